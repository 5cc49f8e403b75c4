"""Nested tensors of the jagged layout: views and sums of tensors of unequal sizes. The strided layout is refused."""

from .table import Kind, row

M = Kind.MOVEMENT

row("NestedGetValuesBackward0 NestedGetValuesBackward0_copy NestedFromPaddedTensorBackward0", M)
row("NestedViewFromJaggedBackward0 NestedViewFromJaggedBackward0_copy ToPaddedTensorBackward0", M)
row("ChunkBackwardAutogradNestedTensor0 SelectBackwardAutogradNestedTensor0", M)
row("SelectBackwardAutogradNestedTensor0_copy SplitWithSizesBackwardAutogradNestedTensor0", M)
row("SplitWithSizesBackwardAutogradNestedTensor0_copy SqueezeBackwardAutogradNestedTensor0", M)
row("SqueezeBackwardAutogradNestedTensor0_copy SqueezeBackwardAutogradNestedTensor1", M)
row("SqueezeBackwardAutogradNestedTensor1_copy UnbindBackwardAutogradNestedTensor0", M)
row("UnbindBackwardAutogradNestedTensor0_copy ValuesBackwardAutogradNestedTensor0", M)
row("ValuesBackwardAutogradNestedTensor0_copy ViewBackwardAutogradNestedTensor0", M)
row("ViewBackwardAutogradNestedTensor0_copy", M)
row(
    "SumBackwardAutogradNestedTensor0 SumBackwardAutogradNestedTensor1 MeanBackwardAutogradNestedTensor0",
    Kind.TRANSFORM,
)

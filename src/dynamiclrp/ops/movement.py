"""Operations that move, copy or pick values: their own backward hands relevance (and coefficients) down unchanged."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .table import Kind, row, unbroadcast

M = Kind.MOVEMENT


def _index(n: Any, x: Tensor) -> Tensor:
    # None stands for a full slice
    return torch.ops.aten.index.Tensor(x, list(n.indices))


def _slice(n: Any, x: Tensor) -> Tensor:
    return torch.ops.aten.slice.Tensor(x, n.dim, n.start, min(n.end, x.shape[n.dim]) if n.end > 0 else n.end, n.step)


def _split(n: Any, x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x, n.split_size if isinstance(n.split_size, int) else list(n.split_size), n.dim)


def _chosen(n: Any, x: Tensor) -> Tensor:
    index = n.indices if n.keepdim else n.indices.unsqueeze(n.dim)
    chosen = x.gather(n.dim, index)
    return chosen if n.keepdim else chosen.squeeze(n.dim)


def _reshaped(n: Any, y: Tensor, shape: torch.Size) -> Tensor:
    return y.reshape(shape)


def _unpermuted(n: Any, y: Tensor, shape: torch.Size) -> Tensor:
    rank = len(shape)
    return y.permute(sorted(range(rank), key=lambda i: n.dims[i] % rank))


row("ViewBackward0 UnsafeViewBackward0 ReshapeAliasBackward0 ViewCopyBackward0 ReshapeBackward0", M,
    forward=lambda n, x: x.reshape(n.shape), undo=_reshaped)  # fmt: skip
row("TBackward0", M, forward=lambda n, x: x.t(), undo=lambda n, y, shape: y.t())
row("TransposeBackward0", M, forward=lambda n, x: x.transpose(n.dim0, n.dim1),
    undo=lambda n, y, shape: y.transpose(n.dim0, n.dim1))  # fmt: skip
row("PermuteBackward0", M, forward=lambda n, x: x.permute(n.dims), undo=_unpermuted)
row("MovedimBackward0", M)
row("ExpandBackward0", M, forward=lambda n, x: x.expand(n.shape), undo=lambda n, y, shape: unbroadcast(y, shape))
row("RepeatBackward0", M, forward=lambda n, x: x.repeat(n.repeats))
row("SqueezeBackward0 SqueezeBackward1 SqueezeBackward2 SqueezeBackward3", M,
    forward=lambda n, x: x.reshape(n.shape), undo=_reshaped)  # fmt: skip
row("UnsqueezeBackward0", M, forward=lambda n, x: x.unsqueeze(n.dim), undo=_reshaped)
row("AsStridedBackward0", M, forward=lambda n, x: x.as_strided(n.size, n.stride, n.storage_offset))
row("AliasBackward0 CloneBackward0 ContiguousBackward0 LiftFreshBackward0", M,
    forward=lambda n, x: x, undo=lambda n, y, shape: y)  # fmt: skip
row("ToCopyBackward0", M, forward=lambda n, x: x.to(n.device, n.dtype))
row("CopyBackwards CopyBackward0", M)
row("CopySlices", M)
row("SliceBackward0", M, forward=_slice)
row("SelectBackward0", M, forward=lambda n, x: x.select(n.dim, n.index))
row("NarrowBackward0", M)
row("IndexBackward0", M, forward=_index, lookup="indices")
row("IndexSelectBackward0", M, forward=lambda n, x: x.index_select(n.dim, n.index), lookup="index")
row("GatherBackward0", M, forward=lambda n, x: x.gather(n.dim, n.index))
row("TakeAlongDimBackward0", M)
row("EmbeddingBackward0", M, forward=lambda n, w: F.embedding(n.indices, w), lookup="indices")
row("CatBackward0", M, forward=lambda n, *xs: torch.cat(xs, n.dim))
row("StackBackward0", M, forward=lambda n, *xs: torch.stack(xs, n.dim))
row("SplitBackward0", M, forward=_split, join=lambda n, ys: torch.cat(ys, n.dim))
row("SplitWithSizesBackward0", M, forward=lambda n, x: torch.split(x, list(n.split_sizes), n.dim),
    join=lambda n, ys: torch.cat(ys, n.dim))  # fmt: skip
row("UnbindBackward0", M, forward=lambda n, x: x.unbind(n.dim), join=lambda n, ys: torch.stack(ys, n.dim))
row("UnsafeSplitBackward0", M, forward=_split)
row("FlipBackward0", M, forward=lambda n, x: x.flip(n.dims))
row("RollBackward0", M, forward=lambda n, x: x.roll(n.shifts, n.dims))
row("UnfoldBackward0", M, forward=lambda n, x: x.unfold(n.dimension, n.size, n.step))
row("DiagonalBackward0 DiagBackward0 TrilBackward0 TriuBackward0", M)
row("ConstantPadNdBackward0 ReflectionPad1DBackward0 ReflectionPad2DBackward0 ReplicationPad2DBackward0", M)
row("MaskedFillBackward0", M)
row("MaskedSelectBackward0", M, forward=lambda n, x: x.masked_select(n.mask))
row("WhereBackward0", M, forward=lambda n, a, b: torch.where(n.condition, a, b))
row("IndexPutBackward0 ScatterBackward0 ScatterBackward1 SelectScatterBackward0 SliceScatterBackward0", M)
row("PixelShuffleBackward0", M, forward=lambda n, x: F.pixel_shuffle(x, n.upscale_factor))
row("NativeDropoutBackward0", M, forward=lambda n, x: x * n.result1 / (1 - n.p))

# Selection by value: the chosen element takes all.
row("MaxBackward0 MinBackward0", M, forward=_chosen)
row("MaxBackward1 MinBackward1 AmaxBackward0 AminBackward0", M, saved={0: ("self", None)}, result="result")
row("MaximumBackward0", M, saved={0: ("self", None), 1: ("other", None)}, forward=lambda n, a, b: torch.maximum(a, b))
row("MinimumBackward0", M, saved={0: ("self", None), 1: ("other", None)}, forward=lambda n, a, b: torch.minimum(a, b))
row("TopkBackward0 SortBackward0", M)
row("MaxPool2DWithIndicesBackward0", M, saved={0: ("self", None)},
    forward=lambda n, x: F.max_pool2d(x, n.kernel_size, n.stride, n.padding, n.dilation, n.ceil_mode))  # fmt: skip
row("MaxPool3DWithIndicesBackward0", M, saved={0: ("self", None)},
    forward=lambda n, x: F.max_pool3d(x, n.kernel_size, n.stride, n.padding, n.dilation, n.ceil_mode))  # fmt: skip
row("AdaptiveMaxPool2DBackward0", M, saved={0: ("self", None)})
row("UpsampleNearest1DBackward0", M,
    forward=lambda n, x: torch.ops.aten.upsample_nearest1d(x, n.output_size, n.scales))  # fmt: skip
row("UpsampleNearest2DBackward0", M,
    forward=lambda n, x: torch.ops.aten.upsample_nearest2d(x, n.output_size, n.scales_h, n.scales_w))  # fmt: skip
row("UpsampleNearestExact2DBackward0", M)
row("AccumulateGrad", Kind.LEAF)

"""Operations that move or copy values by position: their own backward hands relevance (and coefficients) down unchanged."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .table import Kind, row, unbroadcast

M = Kind.MOVEMENT


def _slice(n: Any, x: Tensor) -> Tensor:
    end = n.end if n.end is None or n.end < 0 else min(n.end, x.shape[n.dim])
    return torch.ops.aten.slice.Tensor(x, n.dim, n.start, end, n.step)


def _split(n: Any, x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x, n.split_size if isinstance(n.split_size, int) else list(n.split_size), n.dim)


def _split_with_sizes(n: Any, x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x, list(n.split_sizes), n.dim)


def _joined(n: Any, ys: Any) -> Tensor:
    return torch.cat(ys, n.dim)


def _reshaped(n: Any, y: Tensor, shape: torch.Size) -> Tensor:
    return y.reshape(shape)


def _same(n: Any, x: Tensor) -> Tensor:
    return x


def _unpermuted(n: Any, y: Tensor, shape: torch.Size) -> Tensor:
    rank = len(shape)
    return y.permute(sorted(range(rank), key=lambda i: n.dims[i] % rank))


# Views. `…_copy` are the same as copies, `…1` and higher numbers often the same in place.
row("ViewBackward0 ViewBackward0_copy UnsafeViewBackward0 ReshapeAliasBackward0 ReshapeAliasBackward0_copy", M,
    forward=lambda n, x: x.reshape(n.shape), undo=_reshaped, reshapes=True, hands_on="moved")  # fmt: skip
row(
    "ReshapeCopyBackward0 MkldnnReshapeBackward0",
    M,
    forward=lambda n, x: x.reshape(n.shape),
    undo=_reshaped,
    reshapes=True,
    hands_on="moved",
)
row("SqueezeBackward0 SqueezeBackward1 SqueezeBackward2 SqueezeBackward3 SqueezeBackward4 SqueezeBackward5", M,
    forward=lambda n, x: x.reshape(n.shape), undo=_reshaped, reshapes=True, hands_on="moved")  # fmt: skip
row("SqueezeBackward0_copy SqueezeBackward1_copy SqueezeBackward2_copy", M,
    forward=lambda n, x: x.reshape(n.shape), undo=_reshaped, reshapes=True, hands_on="moved")  # fmt: skip
row("UnsqueezeBackward0 UnsqueezeBackward0_copy UnsqueezeBackward1", M,
    forward=lambda n, x: x.unsqueeze(n.dim), undo=_reshaped, hands_on="moved")  # fmt: skip
row("TBackward0 TBackward0_copy TBackward1", M, hands_on="moved",
    forward=lambda n, x: x.t(), undo=lambda n, y, shape: y.t())  # fmt: skip
row("TransposeBackward0 TransposeBackward0_copy TransposeBackward1", M, hands_on="moved",
    forward=lambda n, x: x.transpose(n.dim0, n.dim1),
    undo=lambda n, y, shape: y.transpose(n.dim0, n.dim1))  # fmt: skip
row(
    "PermuteBackward0 PermuteBackward0_copy",
    M,
    hands_on="moved",
    forward=lambda n, x: x.permute(n.dims),
    undo=_unpermuted,
)
row("ExpandBackward0 ExpandBackward0_copy", M, hands_on="moved", forward=lambda n, x: x.expand(n.shape),
    undo=lambda n, y, shape: unbroadcast(y, shape))  # fmt: skip
row("AsStridedBackward0 AsStridedBackward0_copy AsStridedBackward1", M, fills=True,
    forward=lambda n, x: x.as_strided(n.size, n.stride, n.storage_offset))  # fmt: skip
row("SliceBackward0 SliceBackward0_copy", M, forward=_slice, hands_on="moved")
row("NarrowCopyBackward0", M, hands_on="moved", forward=lambda n, x: x.narrow(n.dim, n.start, n.length))
row("SelectBackward0 SelectBackward0_copy", M, forward=lambda n, x: x.select(n.dim, n.index))
row("UnfoldBackward0 UnfoldBackward0_copy", M, forward=lambda n, x: x.unfold(n.dimension, n.size, n.step))
row("DiagonalBackward0 DiagonalBackward0_copy", M, forward=lambda n, x: x.diagonal(n.offset, n.dim1, n.dim2))
row("SplitBackward0", M, forward=_split, join=_joined)
row("SplitWithSizesBackward0", M, forward=_split_with_sizes, join=_joined)
row("UnbindBackward0", M, forward=lambda n, x: x.unbind(n.dim), join=lambda n, ys: torch.stack(ys, n.dim))
row("SplitBackward0_copy UnsafeSplitBackward0", M, forward=_split)
row("SplitWithSizesBackward0_copy UnsafeSplitWithSizesBackward0", M, forward=_split_with_sizes)
row("UnbindBackward0_copy", M, forward=lambda n, x: x.unbind(n.dim))
row("ChunkBackward0", M)

# Copies and casts.
row("AliasBackward0 AliasBackward0_copy CloneBackward0 LazyCloneBackward0 PinMemoryBackward0", M,
    forward=_same, undo=lambda n, y, shape: y, hands_on="in place")  # fmt: skip
row("LiftBackward0 LiftFreshBackward0 LiftFreshBackward0_copy", M,
    forward=_same, undo=lambda n, y, shape: y, hands_on="in place")  # fmt: skip
row("ToCopyBackward0", M, hands_on="in place", forward=lambda n, x: x.to(n.device, n.dtype))
row("CopyBackwards", M)
row("CopySlices", M, fills=True)

# Rearrangements.
row("RepeatBackward0", M, hands_on="moved", forward=lambda n, x: x.repeat(n.repeats))
row("CatBackward0", M, forward=lambda n, *xs: torch.cat(xs, n.dim))
row("StackBackward0", M, forward=lambda n, *xs: torch.stack(xs, n.dim))
row("BlockDiagBackward0", M, fills=True, forward=lambda n, *xs: torch.block_diag(*xs))
row("FlipBackward0", M, hands_on="moved", forward=lambda n, x: x.flip(n.dims))
row("RollBackward0", M, hands_on="moved", forward=lambda n, x: x.roll(n.shifts, n.dims))
row("Rot90Backward0", M, hands_on="moved", forward=lambda n, x: x.rot90(n.k, n.dims))
row("TrilBackward0", M, fills=True, forward=lambda n, x: x.tril(n.diagonal))
row("TriuBackward0", M, fills=True, forward=lambda n, x: x.triu(n.diagonal))
row("DiagEmbedBackward0", M, fills=True, forward=lambda n, x: x.diag_embed(n.offset, n.dim1, n.dim2))
row("PixelShuffleBackward0", M, hands_on="moved", forward=lambda n, x: F.pixel_shuffle(x, n.upscale_factor))
row("PixelUnshuffleBackward0", M, hands_on="moved", forward=lambda n, x: F.pixel_unshuffle(x, n.downscale_factor))
row("ChannelShuffleBackward0", M, hands_on="moved", forward=lambda n, x: F.channel_shuffle(x, n.groups))
row("Im2ColBackward0", M, forward=lambda n, x: F.unfold(x, n.kernel_size, n.dilation, n.padding, n.stride))
row("PackPaddedSequenceBackward0", M)
row("ConstantPadNdBackward0", M, fills=True)
row("ReflectionPad1DBackward0 ReflectionPad2DBackward0 ReflectionPad3DBackward0", M, saved={0: ("self", None)},
    forward=lambda n, x: F.pad(x, n.padding, "reflect"))  # fmt: skip
row("ReplicationPad1DBackward0 ReplicationPad2DBackward0 ReplicationPad3DBackward0", M, saved={0: ("self", None)},
    forward=lambda n, x: F.pad(x, n.padding, "replicate"))  # fmt: skip
row("UpsampleNearest1DBackward0", M,
    forward=lambda n, x: torch.ops.aten.upsample_nearest1d(x, n.output_size, n.scales))  # fmt: skip
row("UpsampleNearest2DBackward0", M,
    forward=lambda n, x: torch.ops.aten.upsample_nearest2d(x, n.output_size, n.scales_h, n.scales_w))  # fmt: skip
row("UpsampleNearest3DBackward0 UpsampleNearestExact1DBackward0 UpsampleNearestExact2DBackward0", M)
row("UpsampleNearestExact3DBackward0", M)

# Fake quantisation passes through what it does not clip (the straight-through estimator).
row("FakeQuantizePerTensorAffineCachemaskBackward0 FakeQuantizePerChannelAffineCachemaskBackward0", M, fills=True)
row("FakeQuantizePerTensorAffineCachemaskTensorQparamsBackward0 FusedMovingAvgObsFqHelperBackward0", M, fills=True)
row("FakeQuantizeLearnablePerTensorAffineBackward0 FakeQuantizeLearnablePerChannelAffineBackward0", M, fills=True)

row("AccumulateGrad", Kind.LEAF)

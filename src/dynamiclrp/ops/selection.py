"""Operations that pick values, by index or by comparison: what was picked takes all."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .table import Kind, row

M = Kind.MOVEMENT
KEEPS_INPUT = {0: ("self", None)}
KEEPS_BOTH = {0: ("self", None), 1: ("other", None)}


def _index(n: Any, x: Tensor) -> Tensor:
    # None stands for a full slice
    return torch.ops.aten.index.Tensor(x, list(n.indices))


def _chosen(n: Any, x: Tensor) -> Tensor:
    if x.dim() == 0:
        return x
    index = n.indices if n.keepdim else n.indices.unsqueeze(n.dim)
    chosen = x.gather(n.dim, index)
    return chosen if n.keepdim else chosen.squeeze(n.dim)


def _gathered(n: Any, x: Tensor) -> Tensor:
    return x.gather(n.dim, n.indices)


_MAX = 2  # of EmbeddingBag's modes: sum, mean, max


def _bagged(n: Any, w: Tensor, weights: Tensor | None = None) -> Tensor:
    last, padding = len(n.offsets) != n.shape[0], n.padding_idx if n.padding_idx >= 0 else None
    return torch.embedding_bag(w, n.indices, n.offsets, False, n.mode, False, n.per_sample_weights, last, padding)[0]


def _in_bags(n: Any, w: Tensor) -> tuple[Tensor, Tensor]:
    """What each index adds to its bag, and which bag that is. Of the largest of each column: where it stands."""
    places = torch.arange(len(n.indices), device=w.device)
    bag = torch.searchsorted(n.offsets, places.to(n.offsets.dtype), right=True) - 1
    counts = (n.indices != n.padding_idx).to(w.dtype)
    if n.mode == _MAX:
        holds = (n.result3[bag] == n.indices[:, None]) * counts[:, None]  # equal ids share
        return F.embedding(n.indices, w) * holds / _summed(n, holds, bag)[bag].clamp_min(1), bag
    size = counts.new_zeros(n.shape[0]).index_add_(0, bag, counts) if n.mode else counts.new_ones(n.shape[0])
    factor = counts / size[bag].clamp_min(1)
    factor = factor if n.per_sample_weights is None else factor * n.per_sample_weights
    return F.embedding(n.indices, w) * factor[:, None], bag


def _summed(n: Any, parts: Tensor, bag: Tensor) -> Tensor:
    return parts.new_zeros(n.shape).index_add_(0, bag, parts)


def _shares_of_bags(n: Any, w: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    parts, bag = _in_bags(n, w)
    sums = sums[bag]
    return torch.where(sums == 0, 0, parts / torch.where(sums == 0, 1, sums)), bag


# By index.
row("IndexBackward0", M, forward=_index, lookup="indices")
row("UnsafeIndexBackward0", M, forward=_index)
row("UnsafeMaskedIndexBackward0", M, fills=True)
row("IndexSelectBackward0", M, forward=lambda n, x: x.index_select(n.dim, n.index), lookup="index")
row("GatherBackward0", M, forward=lambda n, x: x.gather(n.dim, n.index), lookup="index")
row("TakeBackward0", M, saved=KEEPS_INPUT, forward=lambda n, x: x.take(n.index))
row("EmbeddingBackward0", M, forward=lambda n, w: F.embedding(n.indices, w), lookup="indices", fills=True)  # padding
row("EmbeddingBagBackward0", Kind.TRANSFORM, carriers=(0,), signature=lambda n: (n.per_sample_weights is not None,),
    absent=lambda signature: () if signature[0] else (1,), lookup="indices", bags=_shares_of_bags,
    forward=_bagged)  # fmt: skip
row("MaskedSelectBackward0", M, forward=lambda n, x: x.masked_select(n.mask))
row("WhereBackward0", M, forward=lambda n, a, b: torch.where(n.condition, a, b))

# Written into another tensor.
row("MaskedFillBackward0 IndexFillBackward0", M, fills=True)
row("MaskedFillBackward1", M, forward=lambda n, x, value: x.masked_fill(n.mask, value))
row("IndexFillBackward1", M, forward=lambda n, x, value: x.index_fill(n.dim, n.index, value))
row("MaskedScatterBackward0", M, forward=lambda n, x, source: x.masked_scatter(n.mask, source))
row("IndexPutBackward0 IndexPutImplBackward0 UnsafeIndexPutBackward0 PutBackward0", M, fills=True,
    signature=lambda n: (n.accumulate,),
    kind_for=lambda signature: Kind.TRANSFORM if signature[0] else M)  # added to what is there  # fmt: skip
row("UnsafeMaskedIndexPutAccumulateBackward0", Kind.TRANSFORM, fills=True)
row("ScatterBackward0", M, fills=True, forward=lambda n, x, source: x.scatter(n.dim, n.index, source))
row("ScatterBackward1", M, fills=True)
row("IndexCopyBackward0", M, forward=lambda n, x, source: x.index_copy(n.dim, n.index, source))
row("SelectScatterBackward0", M, forward=lambda n, x, source: x.select_scatter(source, n.dim, n.index))
row("SliceScatterBackward0", M,
    forward=lambda n, x, source: x.slice_scatter(source, n.dim, n.start, n.end, n.step))  # fmt: skip
row("DiagonalScatterBackward0", M,
    forward=lambda n, x, source: x.diagonal_scatter(source, n.offset, n.dim1, n.dim2))  # fmt: skip
row("AsStridedScatterBackward0", M, fills=True,
    forward=lambda n, x, source: x.as_strided_scatter(source, n.size, n.stride, n.storage_offset))  # fmt: skip
row("SliceInverseBackward0", M)
row("MaxUnpool2DBackward0 MaxUnpool3DBackward0", M, fills=True)
row("NanToNumBackward0", M, saved=KEEPS_INPUT, fills=True)

# By value.
row("MaxBackward0 MinBackward0 KthvalueBackward0 MedianBackward1 NanmedianBackward1 ModeBackward0", M, forward=_chosen)
row("MaxBackward1 MinBackward1 AmaxBackward0 AminBackward0", M, saved=KEEPS_INPUT, result="result")
row("MedianBackward0 NanmedianBackward0", M, saved=KEEPS_INPUT, result="result")
row("AminmaxBackward0", M, saved=KEEPS_INPUT)
row("TopkBackward0 SortBackward0 SortBackward1", M, forward=_gathered)
row("CummaxBackward0 CumminBackward0", M, saved=KEEPS_INPUT, forward=_gathered)
row("MaximumBackward0", M, saved=KEEPS_BOTH, forward=lambda n, a, b: torch.maximum(a, b))
row("MinimumBackward0", M, saved=KEEPS_BOTH, forward=lambda n, a, b: torch.minimum(a, b))
row("FmaxBackward0", M, saved=KEEPS_BOTH, forward=lambda n, a, b: torch.fmax(a, b))
row("FminBackward0", M, saved=KEEPS_BOTH, forward=lambda n, a, b: torch.fmin(a, b))
row("ClampBackward0", M, saved={0: ("self", None), 1: ("min", None), 2: ("max", None)},
    forward=lambda n, x, low, top: x.clamp(low, top))  # fmt: skip
row(
    "ClampMinBackward1", M, saved={0: ("self", None), 1: ("min", None)}, forward=lambda n, x, low: torch.maximum(x, low)
)
row(
    "ClampMaxBackward1", M, saved={0: ("self", None), 1: ("max", None)}, forward=lambda n, x, top: torch.minimum(x, top)
)
row("MaxPool2DWithIndicesBackward0 MaxPool2DBackward0 MkldnnMaxPool2DBackward0", M, saved=KEEPS_INPUT,
    forward=lambda n, x: F.max_pool2d(x, n.kernel_size, n.stride, n.padding, n.dilation, n.ceil_mode))  # fmt: skip
row("MaxPool3DWithIndicesBackward0 MkldnnMaxPool3DBackward0", M, saved=KEEPS_INPUT,
    forward=lambda n, x: F.max_pool3d(x, n.kernel_size, n.stride, n.padding, n.dilation, n.ceil_mode))  # fmt: skip
row("AdaptiveMaxPool2DBackward0", M, saved=KEEPS_INPUT,
    forward=lambda n, x: F.adaptive_max_pool2d(x, tuple(n.shape[-2:])))  # fmt: skip
row("AdaptiveMaxPool3DBackward0", M, saved=KEEPS_INPUT,
    forward=lambda n, x: F.adaptive_max_pool3d(x, tuple(n.shape[-3:])))  # fmt: skip
row("FractionalMaxPool2DBackward0 FractionalMaxPool3DBackward0", M, saved=KEEPS_INPUT)

"""Sums, means and averages over windows."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .table import Kind, row

S = Kind.SUM


def _reduced(n: Any, x: Tensor, reduce: Any) -> Tensor:
    return reduce(x, n.dim or None, n.keepdim, dtype=n.dtype)


row("AddBackward0", S, forward=lambda n, a, b: torch.add(a, b, alpha=n.alpha), weights=lambda n: (1, n.alpha))
row("SubBackward0", S, forward=lambda n, a, b: torch.sub(a, b, alpha=n.alpha), weights=lambda n: (1, -n.alpha))
row("RsubBackward0", S, weights=lambda n: (-n.alpha, 1))
row("RsubBackward1", S, weights=lambda n: (-n.alpha,), fills=True)
row("AddBackward1 SubBackward1", S, weights=lambda n: (1,), fills=True)
row("SumBackward0", S, forward=lambda n, x: x.sum(dtype=n.dtype))
row("SumBackward1", S, forward=lambda n, x: _reduced(n, x, torch.sum))
row("MeanBackward0", S, forward=lambda n, x: x.mean(dtype=n.dtype))
row("MeanBackward1", S, forward=lambda n, x: _reduced(n, x, torch.mean))
row("NansumBackward0", S, saved={0: ("self", None)}, forward=lambda n, x: _reduced(n, x, torch.nansum))
row("TraceBackward0", S, forward=lambda n, x: x.trace())
row("LerpBackward0", S, forward=lambda n, a, b: torch.lerp(a, b, n.weight), weights=lambda n: (1 - n.weight, n.weight))

P = Kind.POOL


def _avg_pool2d(n: Any, x: Tensor) -> Tensor:
    return F.avg_pool2d(x, n.kernel_size, n.stride, n.padding, n.ceil_mode, n.count_include_pad, n.divisor_override)


def _avg_pool3d(n: Any, x: Tensor) -> Tensor:
    return F.avg_pool3d(x, n.kernel_size, n.stride, n.padding, n.ceil_mode, n.count_include_pad, n.divisor_override)


row("AvgPool2DBackward0", P, saved={0: ("self", None)}, forward=_avg_pool2d)
row("AvgPool3DBackward0", P, saved={0: ("self", None)}, forward=_avg_pool3d)
row("AdaptiveAvgPool2DBackward0 MkldnnAdaptiveAvgPool2DBackward0", P, saved={0: ("self", None)},
    forward=lambda n, x: F.adaptive_avg_pool2d(x, tuple(n.shape[-2:])))  # fmt: skip
row("AdaptiveAvgPool3DBackward0", P, saved={0: ("self", None)},
    forward=lambda n, x: F.adaptive_avg_pool3d(x, tuple(n.shape[-3:])))  # fmt: skip

# Where they land is not kept unless the source needs it, so they are not replayed.
row("IndexAddBackward0 ScatterAddBackward0", Kind.TRANSFORM)

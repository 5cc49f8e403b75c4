"""Normalisations. `fixed` is their backward with the scale statistic held constant (AttnLRP, eq. 10 and prop. 3.4)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernel import formula, stabilised
from .table import Kind, row

_LAYER_NORM = ("result2", "normalized_shape", "weight")
_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default


def _layer_norm_fixed(n: Any, s: Tensor) -> Tensor:
    # LayerNorm's own backward for an input that equals its mean: the term of the standard deviation vanishes.
    rstd, shape, weight = n.several(_LAYER_NORM)
    made = _layer_norm_backward(s, n.zeros_like(s), shape, n.zeros_like(rstd), rstd, weight, None, [True, False, False])
    return made[0]


def _layer_norm(n: Any, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    # autograd keeps the statistics, not the eps they were made with
    mean, rstd = n.result1, n.result2
    y = (x - mean) * rstd
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(n.dtype)


@formula
def _quotient(s: Any, x: Any, mean: Any, rstd: Any, weight: Any, bias: Any, *, eps: float) -> Any:
    y = (x - mean) * rstd
    y = y if weight is None else y * weight
    return s * (y if bias is None else y + bias) / stabilised(x, eps)


def _layer_norm_quotient(n: Any, s: Tensor, eps: float) -> Tensor:
    return _quotient(s, *n.several(("input", "result1", "result2", "weight", "bias")), eps=eps)


def _group_norm_fixed(n: Any, s: Tensor) -> Tensor:
    weight = n.weight
    g = s if weight is None else s * weight.reshape(-1, *[1] * (s.dim() - 2))
    g = g.reshape(n.N, n.group, -1)
    g = (g - g.mean(-1, keepdim=True)) * n.result2.reshape(n.N, n.group, 1)
    return g.reshape(s.shape).to(s.dtype)


def _rms_norm_fixed(n: Any, s: Tensor) -> Tensor:
    g = s if n.weight is None else s * n.weight
    return (g * n.result1).to(s.dtype)


def _batch_norm_fixed(n: Any, s: Tensor) -> Tensor:
    """Batch statistics (training mode, and instance norm, which is made of it)."""
    shape = (1, -1, *[1] * (s.dim() - 2))
    g = s * n.result2.reshape(shape)
    if n.weight is not None:
        g = g * n.weight.reshape(shape)
    dims = (0, *range(2, s.dim()))
    return (g - g.mean(dims, keepdim=True)).to(s.dtype)


def _eps(n: Any) -> float:
    return n.eps if hasattr(type(n), "eps") else n.epsilon  # cuDNN's and MIOpen's name


def _in_training(n: Any) -> bool:
    """Batch statistics? Some variants of batch norm say so by their name."""
    return n.training if hasattr(type(n), "training") else "WithUpdate" in type(n.node).__name__


def _signature(n: Any) -> tuple[bool, bool]:
    """Batch statistics? A weight and a bias?"""
    if hasattr(type(n), "training"):
        training, weight = n.several(("training", "weight"))
        return training, weight is not None
    return _in_training(n), n.weight is not None


@dataclass(eq=False)
class BatchNorm:
    """A batch norm in eval mode, one number a channel: y = (x - mean) · scale + shift."""

    mean: Tensor
    var: Tensor
    weight: Tensor | None
    eps: float

    @cached_property
    def scale(self) -> Tensor:
        scale = torch.rsqrt(self.var + self.eps)
        return scale if self.weight is None else scale * self.weight

    def shift(self, bias: Tensor | None, added: Tensor | None = None) -> Tensor:
        """What it adds to scale · x, where x lacks what was `added` to it."""
        mean = self.mean if added is None else self.mean - added
        return -mean * self.scale if bias is None else torch.addcmul(bias, mean, self.scale, value=-1)

    def __call__(self, x: Tensor, shift: Tensor | None) -> Tensor:
        return _normalised(x, self.mean, self.var, self.weight, shift, False, self.eps)


def batch_norm(n: Any) -> BatchNorm:
    """What a node of a batch norm saved; its shift is an operand."""
    return BatchNorm(
        *n.several(("running_mean", "running_var", "weight", "eps" if hasattr(type(n), "eps") else "epsilon"))
    )


def _batch_norm(n: Any, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    mean, var = (getattr(n, name, None) for name in ("running_mean", "running_var"))
    return _normalised(x, mean, var, weight, bias, _in_training(n) or mean is None, _eps(n))


def _normalised(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    eps: float,
) -> Tensor:
    """`F.batch_norm` without its checks, which were made in the forward pass."""
    return torch.batch_norm(x, weight, bias, mean, var, training, 0.0, eps, torch.backends.cudnn.enabled)


row("NativeLayerNormBackward0", Kind.NORMALISE,
    saved={0: ("input", None), 1: ("weight", None), 2: ("bias", None)}, fixed=_layer_norm_fixed,
    quotient=_layer_norm_quotient, forward=_layer_norm)  # fmt: skip
row("NativeGroupNormBackward0", Kind.NORMALISE, saved={0: ("input", None), 1: ("weight", None)},
    fixed=_group_norm_fixed, signature=lambda n: (n.weight is not None,),
    absent=lambda signature: () if signature[0] else (1, 2),
    forward=lambda n, x, w=None, b=None: F.group_norm(x, n.group, w, b, n.eps))  # fmt: skip
row("FusedRmsNormBackward0", Kind.NORMALISE, saved={0: ("input", None), 1: ("weight", None)},
    fixed=_rms_norm_fixed, root=lambda n: n.several(("input", "result1", "weight")))  # fmt: skip
for _names in (
    "NativeBatchNormBackward0 CudnnBatchNormBackward0 MiopenBatchNormBackward0",
    "NativeBatchNormLegitBackward0 NativeBatchNormLegitBackward1 NativeBatchNormLegitNoTrainingBackward0",
    "BatchNormWithUpdateBackward0 BatchNormNoUpdateBackward0",
):
    row(_names, Kind.BATCHNORM,
        saved={0: ("input", None), 1: ("weight", None)}, fixed=_batch_norm_fixed, forward=_batch_norm,
        signature=_signature,
        absent=lambda signature: () if signature[1] else (1, 2))  # fmt: skip
row("WeightNormInterfaceBackward0", Kind.NORMALISE, saved={0: ("v", None), 1: ("g", None)},
    fixed=lambda n, s: s * (n.g / n.result1), forward=lambda n, v, g: v * (g / n.result1))  # fmt: skip

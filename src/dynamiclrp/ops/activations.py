"""Elementwise functions of neural networks. Those with f(0) = 0 are activations; for the others f(x)/x has no limit."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .table import Kind, row

A = Kind.ACTIVATION
KEEPS_INPUT = {0: ("self", None)}


def _gelu_ratio(n: Any) -> Tensor:
    x = n.self
    if n.approximate == "tanh":
        return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    # as torch's own kernel computes it, so that x times the ratio is the output also where it cancels; one temporary
    return (x * math.sqrt(0.5)).erf_().add_(1).mul_(0.5)


def _hardtanh_ratio(n: Any) -> Tensor:
    x, low, high = n.several(("self", "min_val", "max_val"))
    slope = float(low < 0 < high)  # at 0
    return torch.where(x == 0, slope, x.clamp(low, high) / x)


def _kind_of_power(exponent: Any) -> Kind:
    """Below 1 the power of 0, or its slope there, is infinite: a root or a reciprocal is no activation."""
    if exponent == 0:
        return Kind.CONSTANT
    return Kind.ACTIVATION if not isinstance(exponent, complex) and exponent >= 1 else Kind.FUNCTION


def _power_ratio(n: Any) -> Tensor:
    if n.exponent == 2:
        return n.self.conj() if n.self.is_complex() else n.self
    ratio = n.self.pow(n.exponent - 1)
    ratio = ratio if _kind_of_power(n.exponent) is A else torch.where(n.self == 0, 0, ratio)  # infinite at 0
    return ratio.conj() if ratio.is_complex() else ratio


def _wide(y: Tensor) -> Tensor:
    """Powers of half types would overflow."""
    return y.float() if y.dtype in (torch.float16, torch.bfloat16) else y


def _rrelu(n: Any, x: Tensor) -> Tensor:
    return torch.where(x > 0, x, x * n.noise) if n.training else F.leaky_relu(x, (n.lower + n.upper) / 2)


row("ReluBackward0", A, result="result", forward=lambda n, x: F.relu(x), rectifies=True, shuts=lambda signature: True,
    ratio=lambda n: (n.result > 0).to(n.result.dtype))  # fmt: skip
row("GeluBackward0", A, saved=KEEPS_INPUT, forward=lambda n, x: F.gelu(x, approximate=n.approximate),
    ratio=_gelu_ratio)  # fmt: skip
row("SiluBackward0", A, saved=KEEPS_INPUT, forward=lambda n, x: F.silu(x),
    ratio=lambda n: torch.sigmoid(n.self))  # fmt: skip
row("MishBackward0", A, saved=KEEPS_INPUT, forward=lambda n, x: F.mish(x),
    ratio=lambda n: torch.tanh(F.softplus(n.self)))  # fmt: skip
row("HardswishBackward0", A, saved=KEEPS_INPUT, forward=lambda n, x: F.hardswish(x),
    ratio=lambda n: F.hardsigmoid(n.self))  # fmt: skip
row("LeakyReluBackward0", A, saved=KEEPS_INPUT, forward=lambda n, x: F.leaky_relu(x, n.negative_slope),
    ratio=lambda n: torch.where(n.self > 0, torch.ones_like(n.self), n.negative_slope))  # fmt: skip
row("LeakyReluBackward1", A, result="result", forward=lambda n, x: F.leaky_relu(x, n.negative_slope),
    ratio=lambda n: torch.where(n.result > 0, torch.ones_like(n.result), n.negative_slope))  # fmt: skip
row("RreluWithNoiseBackward0", A, saved=KEEPS_INPUT, forward=_rrelu)
row("RreluWithNoiseFunctionalBackward0", A, saved=KEEPS_INPUT)  # it draws its noise anew
row("RreluWithNoiseBackward1", A, result="result", forward=_rrelu)
row("PreluKernelBackward0", A, saved={0: ("self", None), 1: ("weight", None)},
    forward=lambda n, x, w: torch.where(x > 0, x, w * x))  # fmt: skip
row("HardtanhBackward0", A, saved=KEEPS_INPUT, forward=lambda n, x: F.hardtanh(x, n.min_val, n.max_val),
    ratio=_hardtanh_ratio,
    signature=lambda n: (n.min_val, n.max_val), shuts=lambda signature: signature[0] == 0 < signature[1])  # fmt: skip
row("EluBackward0", A, saved=KEEPS_INPUT,
    forward=lambda n, x: torch.ops.aten.elu(x, n.alpha, n.scale, n.input_scale))  # fmt: skip
row("EluBackward1", A, result="result", forward=lambda n, x: torch.ops.aten.elu(x, n.alpha, n.scale, n.input_scale))
row("CeluBackward0", A, saved=KEEPS_INPUT, forward=lambda n, x: F.celu(x, n.alpha))
row("CeluBackward1", A, result="result", forward=lambda n, x: F.celu(x, n.alpha))
row("HardshrinkBackward0", A, saved=KEEPS_INPUT, forward=lambda n, x: F.hardshrink(x, n.lambd))
row("SoftshrinkBackward0", A, saved=KEEPS_INPUT, forward=lambda n, x: F.softshrink(x, n.lambd))
row("TanhBackward0", A, result="result", forward=lambda n, x: x.tanh())
row("ErfBackward0", A, saved=KEEPS_INPUT, forward=lambda n, x: x.erf())
row("SinBackward0", A, saved=KEEPS_INPUT, forward=lambda n, x: x.sin())
row("AbsBackward0", A, saved=KEEPS_INPUT, forward=lambda n, x: x.abs())
row("PowBackward0", A, saved=KEEPS_INPUT, forward=lambda n, x: x.pow(n.exponent), ratio=_power_ratio,
    signature=lambda n: (n.exponent,), kind_for=lambda signature: _kind_of_power(*signature))  # fmt: skip
row("ThresholdBackward0 ThresholdBackward1", A, saved=KEEPS_INPUT)
row("ClampBackward1", A, saved=KEEPS_INPUT, forward=lambda n, x: x.clamp(n.min, n.max))
row("ClampMinBackward0", A, saved=KEEPS_INPUT, forward=lambda n, x: x.clamp_min(n.min))
row("ClampMaxBackward0", A, saved=KEEPS_INPUT, forward=lambda n, x: x.clamp_max(n.max))

N = Kind.FUNCTION
row("SigmoidBackward0", N, result="result", forward=lambda n, x: x.sigmoid())
row("HardsigmoidBackward0", N, saved=KEEPS_INPUT, forward=lambda n, x: F.hardsigmoid(x))
row("LogSigmoidBackward0", N, saved=KEEPS_INPUT, forward=lambda n, x: F.logsigmoid(x))
row("SoftplusBackward0", N, saved=KEEPS_INPUT, forward=lambda n, x: F.softplus(x, n.beta, n.threshold))
row("ExpBackward0", N, result="result", forward=lambda n, x: x.exp())
row("LogBackward0", N, saved=KEEPS_INPUT, forward=lambda n, x: x.log())
row("Log1PBackward0", A, saved=KEEPS_INPUT, forward=lambda n, x: x.log1p())
row("Expm1Backward0", A, result="result", forward=lambda n, x: x.expm1())
row("CosBackward0", N, saved=KEEPS_INPUT, forward=lambda n, x: x.cos())
row("SqrtBackward0", N, result="result", forward=lambda n, x: x.sqrt(), undo=lambda n, y, shape: y**2)
row("RsqrtBackward0", N, result="result", forward=lambda n, x: x.rsqrt(), undo=lambda n, y, shape: y**-2,
    ratio=lambda n: _wide(n.result) ** 3)  # fmt: skip
row("ReciprocalBackward0", N, result="result", forward=lambda n, x: x.reciprocal(),
    undo=lambda n, y, shape: y.reciprocal(), ratio=lambda n: _wide(n.result) ** 2)  # fmt: skip

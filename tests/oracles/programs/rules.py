"""The textbook formulas, in relevance form: what arrives at an operation → what its operands take.

In: values and relevance as plain tensors. Out: relevance. A linear map hands in its contributions z_ij = x_i w_ij, of shape [rows, in, out].
This file must not know the engine, autograd's graph, or how a program spelled the operation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rules:
    """What a preset means (docs/presets.md): the name of a formula below and its parameters, by kind of operation."""

    linear: tuple = ("zero",)
    biased: tuple | None = None  # linear maps that add a bias, where they differ
    conv: tuple = ("zero",)
    first: tuple | None = None  # the first map above an input
    first_conv: tuple | None = None
    sums: tuple = ("proportional", 0.0)
    pools: tuple = ("proportional", 0.0)
    gate: float = 0.5  # what a gate takes of a product
    weights: float = 0.5  # what attention weights take of A·v
    pattern: str = "taylor"  # the softmax of an attention
    products: str = "split"
    functions: str = "taylor"
    norms: str = "fixed"
    batch_norms: str = "affine"
    folds: bool = False  # does a batch norm behind a map belong to it? (rules of z = x·W + b with one denominator)


_ZENNIT = Rules(
    linear=("epsilon", 1e-6), sums=("proportional", 1e-6), pools=("proportional", 1e-6), batch_norms="identity", folds=True
)  # fmt: skip
_PLUS = replace(_ZENNIT, conv=("plus", 1e-6))
_ALPHA = replace(_ZENNIT, conv=("alpha-beta", 2.0, 1.0, 1e-6))
LOW, HIGH = -8.0, 8.0  # the box that epsilon-gamma-box gets

PRESETS = {
    "default": Rules(
        conv=("gamma by depth", 0.5, 0.07, 1e-6), biased=("gamma", 0.02, 1e-6), first_conv=("box", None, None, 1e-6), weights=0.4,
        folds=True,
    ),
    "attnlrp": Rules(),
    "cp-lrp": Rules(gate=0.0, weights=0.0, pattern="nothing"),
    "dynamic": Rules(
        linear=("absolute", 1e-11), conv=("absolute", 1e-11), sums=("absolute", 1e-11), pools=("uniform",), weights=0.5,
        pattern="nothing", products="absolute", functions="share", norms="identity", batch_norms="absolute",
    ),
    "epsilon": Rules(linear=("epsilon", 1e-6), conv=("epsilon", 1e-6), folds=True),
    "gamma": Rules(linear=("gamma", 0.25, 1e-6), conv=("gamma", 0.25, 1e-6), folds=True),
    "epsilon-plus": _PLUS,
    "epsilon-plus-flat": replace(_PLUS, first=("flat", 1e-6)),
    "epsilon-gamma-box": replace(_ZENNIT, conv=("gamma", 0.25, 1e-6), first_conv=("box", LOW, HIGH, 1e-6)),
    "epsilon-alpha2-beta1": _ALPHA,
    "epsilon-alpha2-beta1-flat": replace(_ALPHA, first=("flat", 1e-6)),
}  # fmt: skip
EXACT = (
    "attnlrp",
    "cp-lrp",
    "default",
    "gamma",
    "epsilon",
    "gradient",
)  # sums of these have no stabiliser and no signs


# ---------------------------------------------------------------- small pieces


def stab(d: Tensor, eps: float) -> Tensor:
    """d + eps·sgn(d), with sgn(0) = +1."""
    eps = max(eps, torch.finfo(d.dtype).tiny)
    return torch.where(d < 0, d - eps, d + eps)


def up(d: Tensor, eps: float) -> Tensor:
    """d + eps where d is not negative; eps does not underflow in half types."""
    return d + max(eps, torch.finfo(d.dtype).tiny)


def over(r: Tensor, z: Tensor, eps: float = 0.0) -> Tensor:
    """R / z: 0 where z is exactly 0, stabilised where there is an eps."""
    if eps:
        return torch.where(z == 0, 0, r / stab(z, eps))
    return torch.where(z == 0, 0, r / torch.where(z == 0, 1, z))


def reduce_to(r: Tensor, shape: torch.Size) -> Tensor:
    """What was broadcast collects all of its copies' relevance."""
    return r.sum_to_size(shape)


# ---------------------------------------------------------------- linear maps: R [rows, out], contributions c [rows, in, out] → [rows, in]


def positive(t: Tensor) -> Tensor:
    return t.clamp(min=0)


def negative(t: Tensor) -> Tensor:
    return t.clamp(max=0)


def spread(c: Tensor, u: Tensor) -> Tensor:
    return (c * u[:, None]).sum(2)


def zero_rule(c: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return spread(c, over(r, c.sum(1) + b))


def epsilon_rule(c: Tensor, b: Tensor, r: Tensor, eps: float) -> Tensor:
    return spread(c, over(r, c.sum(1) + b, eps))


def plus_rule(c: Tensor, b: Tensor, r: Tensor, eps: float) -> Tensor:
    return spread(positive(c), r / up(positive(c).sum(1) + positive(b), eps))


def gamma_rule(c: Tensor, b: Tensor, r: Tensor, gamma: float, eps: float) -> Tensor:
    """Contributions of the sign of z count 1 + gamma times (Andéol et al. 2021)."""
    z = (c.sum(1) + b)[:, None]
    chosen = c + gamma * torch.where(z > 0, positive(c), negative(c))
    own = b + gamma * torch.where(z[:, 0] > 0, positive(b), negative(b))
    d = chosen.sum(1) + own
    return spread(chosen, torch.where(z[:, 0] == 0, 0, r / stab(d, eps)))


def alpha_beta_rule(c: Tensor, b: Tensor, r: Tensor, alpha: float, beta: float, eps: float) -> Tensor:
    raises = spread(positive(c), r / up(positive(c).sum(1) + positive(b), eps))
    lowers = spread(negative(c), r / stab(negative(c).sum(1) + negative(b), eps))
    return alpha * raises - beta * lowers


def absolute_rule(c: Tensor, b: Tensor, r: Tensor, eps: float) -> Tensor:
    """The paper: |x·W| and |b| take their shares first, then LRP-0."""
    z = c.sum(1)
    r = r * z.abs() / up(z.abs() + b.abs(), eps) if bool((b != 0).any()) else r
    return spread(c, over(r, z, eps))


def flat_rule(connected: Tensor, r: Tensor, eps: float) -> Tensor:
    """Every input of a unit takes the same; `connected` [in, out] holds ones."""
    return (r / up(connected.sum(0), eps)) @ connected.T


def box_rule(x: Tensor, w: Tensor, r: Tensor, low: Tensor, high: Tensor, eps: float) -> Tensor:
    """z_ij = x_i w_ij - low_i w_ij⁺ - high_i w_ij⁻ (Montavon et al. 2017)."""
    c = x[:, :, None] * w - low[:, :, None] * positive(w) - high[:, :, None] * negative(w)
    return spread(c, r / stab(c.sum(1), eps))


# ---------------------------------------------------------------- sums, products, functions, norms


def sum_shares(rule: tuple, r: Tensor, parts: list[Tensor], takes: list[bool]) -> list[Tensor]:
    """What each part of a sum takes; a part that does not take (a literal) has no share by magnitude, but is in the sum."""
    total = sum(parts)
    if rule[0] == "absolute":
        magnitude = up(sum(part.abs() for part, take in zip(parts, takes) if take), rule[1])
        return [r * part.abs() / magnitude for part in parts]
    unit = over(r, total, rule[1])
    return [part * unit for part in parts]


def taylor_function(r: Tensor, x: Tensor, y: Tensor, slope: Tensor) -> Tensor:
    return over(r, y) * slope * x


def shared_function(r: Tensor, y: Tensor, at_zero: float) -> Tensor:
    """f(0) takes its absolute share, as a bias does (presets.py: the one place where `dynamic` is not the paper)."""
    rest = (y - at_zero).abs()
    return r * rest / up(rest + abs(at_zero), 1e-11)


def softmax_taylor(r: Tensor, x: Tensor, p: Tensor, dim: int) -> Tensor:
    return x * (r - p * r.sum(dim, keepdim=True))


def centred_norm(r: Tensor, x: Tensor, scaled: Tensor, bias: Tensor) -> Tensor:
    """LayerNorm with std constant: the bias keeps its part, the centring is a linear map without one (LRP-0)."""
    r = scaled * over(r, scaled + bias)
    n = x.shape[-1]
    centring = torch.eye(n, dtype=x.dtype) - 1 / n
    c = x.reshape(-1, n)[:, :, None] * centring
    return zero_rule(c, torch.zeros(n, dtype=x.dtype), r.reshape(-1, n)).reshape(x.shape)

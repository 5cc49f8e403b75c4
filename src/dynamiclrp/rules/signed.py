"""Rules that treat positive and negative contributions to z = x·W + b apart: gamma, z+, alpha-beta.

With q = |x|·|W| + |b| the positive part of z is (z + q)/2 and the negative part (z - q)/2, by `x⁺w⁺ + x⁻w⁻ = (x·W + |x|·|W|) / 2`: one extra
product forward and one back serve all of them. A rule is a formula of z and q: what of a coefficient (or relevance) goes back through W (u),
and what through sgn(x)·|W| (v). x takes `Wᵀu + ratio · sgn(x)·|W|ᵀv`, and so does the bias, which is a weight of 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..kernel import add, between, formula, serves, sgn, sign, stabilised
from .base import OUT, Grads, stabilise, usable
from .linear import LinearRule

if TYPE_CHECKING:
    from ..here import Here
    from ..step import Step

# Elements of a weight whose magnitudes are taken at once, on a CPU and elsewhere. VGG16's first dense layer has a hundred million: a copy of it
# would be most of the memory of a call, and on a CPU slower than one that stays in its cache.
PIECE = (1 << 22, 1 << 23)


@dataclass(frozen=True)
class SignedRule(LinearRule):
    """What they share: the two extra products.

    Where u = v, and x is not negative, the native backward finds W + ratio · |W| in place of W, if nobody else will use the graph: one
    product less. Without it `default` on VGG16 takes 2.06 gradients in place of 1.81 (H200, batch 16), on ResNet-50 2.15 in place
    of 2.01 (CPU).
    """

    ratio = 1.0  # what a magnitude counts beside its signed part

    def needs(self, step: Step) -> Iterable[int]:
        yield OUT
        yield from step.factors
        if step.has_bias:
            yield step.bias

    def inside(self, s: Tensor) -> float | None:
        """What stabilises the formula as a part of q."""
        return None

    def parts(
        self, step: Step, s: Tensor, z: Tensor, q: Tensor, bias: Tensor | None, plus: float | None, coefficients: bool
    ) -> Any:
        """(u, v), or one for both where they are equal. To q come |bias| and `plus`, unless they are in it."""
        raise NotImplementedError

    def equal(self, step: Step) -> bool:
        """Are u and v equal?"""
        return False

    def before(self, here: Here, s: Tensor) -> Tensor:
        step, coefficients, z = here.step, here.carries_s, self.real_output(here)
        if not self.plain(step):
            (s, z), coefficients = self.relevance(here, s), False
        bias = here.channel_bias if step.has_bias and self.bias == "proportional" else None
        signal = here.signal if step.nonnegative else here.signal.abs()
        # a subclass may change what goes one of the two ways
        weight = Magnitudes(here, self.ratio, once=self.equal(step) and type(self).__module__ == __name__)
        plus = self.inside(s)
        if serves(z):  # the formula adds them, in its kernel
            q = weight.product(here, signal)
            made = self.parts(step, s, z, q, None if bias is None else here.spread(bias), plus, coefficients)
        else:  # a product with a bias costs no pass of its own
            q = weight.product(here, signal, None if bias is None else bias.abs().add_(plus or 0.0))
            q = q if bias is not None or plus is None else q.add_(plus)
            made = self.parts(step, s, z, q, None, None, coefficients)
        u, v = made if isinstance(made, tuple) else (made, made)
        if here.splits_bias and bias is not None:
            here.bias_coefficient = u + self.ratio * sgn(here.spread(bias)) * v
        replaced = weight.instead is not None and here.replace_weight(weight.instead)
        weight.instead = None
        here.stash = None if replaced and weight.once else (v, signal, weight)
        return u

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        (position,) = here.step.live_factors
        g = grads[position]
        if g is not None and here.stash is not None:
            v, signal, weight = here.stash
            more = weight.transposed(here, v, signal)
            if here.step.nonnegative:
                grads[position] = torch.add(g, more, alpha=self.ratio)
            else:
                grads[position] = _add_signed(g, more, here.signal, ratio=self.ratio)
        return self.give_bias(here, grads) if here.wants_bias else grads


class Magnitudes:
    """|W| of a linear map, with a batch norm folded in where there is one; of a large one piece by piece, made anew when needed."""

    def __init__(self, here: Here, ratio: float, once: bool) -> None:
        self.whole: Tensor | None = None
        self.instead: Tensor | None = None  # what the native backward had better find in place of W
        self.once = False  # and then there is nothing else to do
        w, step, norm = here.weight, here.step, here.norm
        size = PIECE[w.device.type != "cpu"]
        columns = here.linear.columns and step.live_factor == 0
        if norm is None and columns and w.numel() > size:
            self.width = max(1, size * w.shape[-1] // w.numel())
            return
        scale = None if norm is None else norm.scale.reshape(here.filters)
        self.once = (
            once and here.ours and not here.turned and step.nonnegative and step.live_factor == 0 and not columns
        )
        made = _weigh(w, scale, ratio=ratio, once=self.once, folded=norm is not None and here.ours)
        self.whole, instead = made if isinstance(made, tuple) else (made, None)
        self.instead = instead if instead is None else instead.to(w.dtype)  # under autocast a norm is of another type
        self.whole = self.whole if here.gain == 1 else self.whole * abs(here.gain)

    def product(self, here: Here, signal: Tensor, bias: Tensor | None = None) -> Tensor:
        """`signal · |W| + bias`."""
        if self.whole is not None:
            return here.product(*here.ordered(signal, self.whole), bias)
        made = torch.cat([here.product(signal, piece) for _, piece in self._pieces(here)], -1)
        return made if bias is None else made.add_(here.spread(bias))

    def transposed(self, here: Here, v: Tensor, signal: Tensor) -> Tensor:
        """`|W|ᵀv`."""
        if self.whole is not None:
            return here.transposed(v, *here.ordered(signal, self.whole))
        parts = (here.transposed(v[..., columns], signal, piece) for columns, piece in self._pieces(here))
        return reduce(Tensor.add_, parts)

    def _pieces(self, here: Here) -> Iterator[tuple[slice, Tensor]]:
        """Each in the memory of the one before: on a CPU new memory costs as much as their products."""
        w, gain, held = here.weight, abs(here.gain), None
        for start in range(0, w.shape[-1], self.width):
            columns = slice(start, start + self.width)
            part = w[..., columns]
            held = torch.empty_like(part) if held is None or held.shape != part.shape else held
            torch.abs(part, out=held)
            yield columns, held if gain == 1 else held.mul_(gain)


@formula
def _weigh(w: Any, scale: Any, *, ratio: float, once: bool, folded: bool) -> Any:
    """|W|, and what stands in for W: W + ratio · |W|, or W with the scale folded in."""
    w = w if scale is None else w * scale
    magnitude = abs(w)
    if once:
        return magnitude, add(w, magnitude, ratio)
    return (magnitude, w) if folded else magnitude


@formula
def _add_signed(g: Any, more: Any, x: Any, *, ratio: float) -> Any:
    return add(g, more * sgn(x), ratio)


def _whole(q: Any, bias: Any, plus: Any) -> Any:
    q = q if bias is None else q + abs(bias)
    return q if plus is None else q + plus


@formula
def _gamma(
    s: Any, z: Any, q: Any, bias: Any, *, ratio: Any, plus: Any, coefficients: bool, equal: bool, rectified: bool
) -> Any:
    """The denominator has the sign of z and the magnitude |z| + ratio · q (both divided by 1 + γ/2); nothing goes where z is 0."""
    v = (s * z if coefficients else s) / add(z if rectified else abs(z), _whole(q, bias, plus), ratio)
    if equal:
        return v
    v = v if coefficients else v * abs(sign(z))
    return v * sign(z), v


@dataclass(frozen=True)
class Gamma(SignedRule):
    """Contributions of z's own sign count 1 + gamma times (the generalised gamma rule; Andéol et al. 2021).

    `last`: gamma of the deepest map that has the rule; the first has `gamma`. Between them its logarithm goes with the square
    root of depth, so it changes early. Depth is how many maps of the rule lie below on the longest way.
    """

    gamma: float = 0.25
    last: float | None = None

    def __init__(
        self,
        gamma: float = 0.25,
        eps: float = 1e-6,
        bias: str = "proportional",
        top: float = 1.0,
        last: float | None = None,
    ) -> None:
        if last is not None and (gamma <= 0 or last <= 0):
            raise ValueError(f"Gamma({gamma}, last={last}): expected both above 0, their logarithms are joined")
        set_values(self, gamma=gamma, eps=eps, bias=bias, top=top, last=last)

    def at(self, depth: float) -> Gamma:
        """The rule of one map, at a depth from 0 (the first that has it) to 1 (the last)."""
        if self.last is None:
            return self
        part = depth**0.5
        return Gamma(self.gamma ** (1 - part) * self.last**part, self.eps, self.bias, self.top)

    @property
    def ratio(self) -> float:  # type: ignore[override]
        return (self.gamma / 2) / (1 + self.gamma / 2)

    def equal(self, step: Step) -> bool:
        return step.positive and not self.sets_bias_aside(step)

    def inside(self, s: Tensor) -> float | None:
        return usable(self.eps / (1 + self.gamma / 2), s) / self.ratio

    def parts(
        self, step: Step, s: Tensor, z: Tensor, q: Tensor, bias: Tensor | None, plus: float | None, coefficients: bool
    ) -> Any:
        equal = self.equal(step)
        return _gamma(
            s, z, q, bias, ratio=self.ratio, plus=plus, coefficients=coefficients, equal=equal, rectified=equal and step.rectified
        )  # fmt: skip

    def before(self, here: Here, s: Tensor) -> Tensor:
        if self.gamma:
            return super().before(here, s)
        r, z = self.relevance(here, s)  # the epsilon rule
        return r / stabilise(z, self.eps)

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        return super().after(here, grads, s) if self.gamma else self.give_bias(here, grads)


@formula
def _zplus(s: Any, z: Any, q: Any, bias: Any, *, eps: float, coefficients: bool) -> Any:
    # rounding may take a sum of nothing positive below 0; the halves of both products cancel
    return (s * z if coefficients else s) / (between(z + _whole(q, bias, None), 0.0, None) + eps)


@dataclass(frozen=True)
class ZPlus(SignedRule):
    """Only positive contributions count (z⁺; Montavon et al. 2017), for inputs of any sign."""

    def equal(self, step: Step) -> bool:
        return True

    def parts(
        self, step: Step, s: Tensor, z: Tensor, q: Tensor, bias: Tensor | None, plus: float | None, coefficients: bool
    ) -> Any:
        return _zplus(s, z, q, bias, eps=usable(2 * self.eps, s), coefficients=coefficients)


@formula
def _alpha_beta(s: Any, z: Any, q: Any, bias: Any, *, alpha: float, beta: float, eps: float, coefficients: bool) -> Any:
    r, q = (s * z if coefficients else s), _whole(q, bias, None)
    positive = alpha * r / (between(z + q, 0.0, None) + eps)
    negative = beta * r / stabilised(between(z - q, None, 0.0), eps)
    return positive - negative, positive + negative


@dataclass(frozen=True)
class AlphaBeta(SignedRule):
    """alpha times the positive contributions minus beta times the negative ones (Bach et al. 2015, eq. 60)."""

    alpha: float = 2.0
    beta: float = 1.0

    def __init__(
        self, alpha: float = 2.0, beta: float = 1.0, eps: float = 1e-6, bias: str = "proportional", top: float = 1.0
    ) -> None:
        if alpha < 0 or beta < 0 or alpha - beta != 1:
            raise ValueError(f"AlphaBeta(alpha={alpha}, beta={beta}): expected alpha - beta = 1, neither negative")
        set_values(self, alpha=alpha, beta=beta, eps=eps, bias=bias, top=top)

    def parts(
        self, step: Step, s: Tensor, z: Tensor, q: Tensor, bias: Tensor | None, plus: float | None, coefficients: bool
    ) -> Any:
        eps = usable(2 * self.eps, s)
        return _alpha_beta(s, z, q, bias, alpha=self.alpha, beta=self.beta, eps=eps, coefficients=coefficients)


def set_values(rule: LinearRule, **values: Any) -> None:
    """Initialise a frozen rule whose own parameter comes first."""
    for name, value in values.items():
        object.__setattr__(rule, name, value)
    rule.__post_init__()

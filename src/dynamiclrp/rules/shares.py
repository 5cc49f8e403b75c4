"""Rules that split relevance among operands: sums, averages and products."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..kernel import between, formula, sgn
from .base import OUT, Grads, Rule, divide, given, reduce_to, scaled, usable

if TYPE_CHECKING:
    from ..here import Here
    from ..step import Step


def _unit(s: Any, y: Any, total: Any, eps: Any, limit: Any, coefficients: bool) -> Any:
    """What arrives at a sum, for each unit of magnitude. Relevance of complex numbers is real: torch's gradients are conjugate."""
    if coefficients and isinstance(y, Tensor) and y.is_complex():
        return (s * y.conj()).real / (total + eps)
    return (s * between(y, -limit, limit) if coefficients else s) / (total + eps)


@formula
def _sum_of_two(s: Any, a: Any, b: Any, *, eps: float, limit: float, coefficients: bool) -> Any:
    unit = _unit(s, a + b, abs(a) + abs(b), eps, limit, coefficients)
    return unit * sgn(a), unit * sgn(b)


@formula
def _sum_of_one(s: Any, y: Any, a: Any, *, eps: float, limit: float, coefficients: bool) -> Any:
    return _unit(s, y, abs(a), eps, limit, coefficients) * sgn(a)


@dataclass(frozen=True)
class AbsoluteShare(Rule):
    """Operands of a sum take |a| / Σ|…| (the paper's add, sub, sum and mean).

    Parameters take their share and keep it, whether or not relevance goes on to an input; literals take none.
    """

    eps: float = 1e-11

    needs_parameters = True
    kinds = frozenset({"sum", "pool"})

    def edits(self, step: Step) -> tuple[bool, bool]:
        if step.op.weights is not None:
            return False, True
        # what cannot be negative is its own magnitude: the native backward of a reduction shares just so
        native = step.nonnegative and step.form == "s"
        return not native, not native

    def needs(self, step: Step) -> Iterable[int]:
        if not any(self.edits(step)):
            return ()
        return step.sharers if _both(step) else (OUT, *step.sharers)

    def takes_relevance(self, step: Step) -> bool:
        return True

    def before(self, here: Here, s: Tensor) -> Tensor:
        # a reduction, whose own forward adds up the magnitudes (and divides them as its backward divides s)
        total = here.replay(here.operand(0).abs())
        return _unit(s, here.output, total, **self._words(here, s, here.output))

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        if here.op.weights is None:
            return [None if g is None else g * sgn(here.operand(0)) for g in grads]
        factors = here.op.weights(here.saved)
        values = [_times(here.operand(i), factors[i]) for i in here.step.sharers]
        words = self._words(here, s, *values)
        if _both(here.step):
            made = dict(zip(here.step.sharers, _sum_of_two(s, *values, **words)))
        else:
            made = {here.step.sharers[0]: _sum_of_one(s, here.output, *values, **words)}
        # of the native backward of a sum only its factors are left to do
        return [None if g is None else _times(reduce_to(made[i], g.shape), factors[i]) for i, g in enumerate(grads)]

    def _words(self, here: Here, s: Tensor, *values: Tensor) -> dict[str, Any]:
        # no relevance arrives at infinities, as of an additive mask, and 0 times infinity would be nan
        limit = min(torch.finfo(value.dtype).max for value in values)
        return {"eps": usable(self.eps, s), "limit": limit, "coefficients": here.carries_s}

    def conserves(self, step: Step) -> bool:
        return step.sharers == step.live and not step.op.fills


@formula
def _product(of_a: Any, of_b: Any, a: Any, b: Any, *, eps: float, quotient: bool) -> Any:
    """Shares of the native backward, which divides by nothing; a divisor's has the other sign."""
    of_b, b = (-of_b, abs(1 / b)) if quotient else (of_b, abs(b))
    total = abs(a) + b + eps
    return of_a * (abs(a) / total), of_b * (b / total)


@dataclass(frozen=True)
class ProductShare(Rule):
    """Factors of an elementwise product take |a| / (|a| + |b|), and a/b is the product of a and 1/b (the paper's mul, div).

    Factors of a matrix product take half each.
    """

    eps: float = 1e-11

    kinds = frozenset({"product"})

    def needs(self, step: Step) -> Iterable[int]:
        return step.live_factors if step.elementwise else ()

    def passes_relevance(self, step: Step) -> bool:
        return step.elementwise and step.live == step.live_factors

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        if not here.step.elementwise:
            return here.on_live(grads, lambda g: g / here.step.parts)
        values = {i: here.operand(i) for i in here.step.live_factors}
        first, second = values.values()
        quotient = here.step.is_quotient
        named = here.step.name in ("Mul", "Div")
        if here.carries_s and named and first.shape == second.shape and not s.is_complex():
            made = _product(
                *[given(grads[i]) for i in values], first, second, eps=usable(self.eps, s), quotient=quotient
            )
            return [None if g is None else dict(zip(values, made))[i] for i, g in enumerate(grads)]
        magnitude = [first.abs(), second.reciprocal().abs() if quotient else second.abs()]
        total = magnitude[0] + magnitude[1]
        if here.carries_s:
            s = s * (first / second if quotient else first * second)
            s = s * here.saved.value if here.step.name.startswith("Addc") else s
        r = s / (total + usable(self.eps, total))
        shares = {i: r * m for i, m in zip(values, magnitude)}
        if here.carries_s:
            shares = {i: divide(share, values[i].conj()) for i, share in shares.items()}
        return [None if g is None else reduce_to(shares[i], g.shape) if i in shares else g for i, g in enumerate(grads)]

    def conserves(self, step: Step) -> bool:
        return _is_whole(step)


@dataclass(frozen=True)
class Uniform(Rule):
    """Live factors of a product take equal parts (AttnLRP, eq. 11)."""

    kinds = frozenset({"product"})

    def edits(self, step: Step) -> tuple[bool, bool]:
        # one multiplication beforehand serves both factors, unless something is added to the product
        return (step.live == step.live_factors, step.live != step.live_factors)

    def before(self, here: Here, s: Tensor) -> Tensor:
        return s / here.step.parts

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        return here.on_live(grads, lambda g: g / here.step.parts)

    def conserves(self, step: Step) -> bool:
        return _is_whole(step)


@dataclass(frozen=True)
class Split(Rule):
    """Gates take the part `gate` of a product, attention weights the part `weights`, the signal the rest.

    Where neither factor is a gate (queries and keys), equal parts. `Split(0.5, 0.5)` is `Uniform`, `Split(0, 0)` is
    `SignalTakesAll`. Give fused attention the same part: `Attention(weights)`.
    """

    gate: float = 0.5
    weights: float = 0.5

    kinds = frozenset({"product"})

    def __post_init__(self) -> None:
        if not (0 <= self.gate <= 1 and 0 <= self.weights <= 1):
            raise ValueError(f"{self}: expected parts between 0 and 1")

    def _factors(self, step: Step) -> dict[int, float]:
        # `choose` has put the part of attention weights into `gate` where the gate is such
        return {i: 1 - self.gate if i == step.signal else self.gate for i in step.live_factors}

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        return scaled(grads, self._factors(here.step))

    def blocks(self, step: Step) -> Iterable[int]:
        return [i for i, part in self._factors(step).items() if part == 0]

    def conserves(self, step: Step) -> bool:
        return _is_whole(step)


@dataclass(frozen=True)
class UniformPool(Rule):
    """Every element of a window takes the same (the paper's average pool): delivers R."""

    delivers_relevance = True
    kinds = frozenset({"pool"})

    def needs(self, step: Step) -> Iterable[int]:
        return (OUT, 0)

    def takes_relevance(self, step: Step) -> bool:
        return True

    def before(self, here: Here, s: Tensor) -> Tensor:
        # the native backward of an average spreads evenly; padding and divisors make its weights add up to less than one
        weight = here.replay(torch.ones_like(here.operand(0)))
        return divide(here.relevance(s, here.output), weight)

    def conserves(self, step: Step) -> bool:
        return True


@dataclass(frozen=True)
class SignalTakesAll(Rule):
    """The signal takes everything; gates, attention weights and statistics take nothing."""

    kinds = frozenset({"product"})

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        step = here.step
        return [g if i == step.signal or i not in step.factors else None for i, g in enumerate(grads)]

    def blocks(self, step: Step) -> Iterable[int]:
        return [i for i in step.live_factors if i != step.signal]

    def conserves(self, step: Step) -> bool:
        return not step.name.startswith("Addc") or 0 in step.live


def _both(step: Step) -> bool:
    """A sum of two operands that both take their share?"""
    return step.op.weights is not None and step.sharers == (0, 1)


def _times(g: Tensor, factor: float) -> Tensor:
    return g if factor == 1 else g * factor


def _is_whole(step: Step) -> bool:
    """Is the output nothing but the product of live factors, each of them homogeneous in its operand?"""
    added = (step.has_bias and step.bias not in step.live) or (step.name.startswith("Addc") and 0 not in step.live)
    return not added and len(set(step.factors)) == len(step.factors) and not (step.is_quotient and step.name != "Div")

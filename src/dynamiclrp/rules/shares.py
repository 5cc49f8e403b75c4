"""Rules that split relevance among operands: sums, averages and products."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .base import OUT, Grads, Rule, bounded, divide, reduce_to, sign, usable

if TYPE_CHECKING:
    from ..here import Here
    from ..step import Step


@dataclass(frozen=True)
class AbsoluteShare(Rule):
    """Operands of a sum take |a| / Σ|…| (the paper's add, sub, sum and mean).

    Parameters take their share and keep it, whether or not relevance goes on to an input; literals take none.
    """

    eps: float = 1e-11

    needs_parameters = True
    kinds = frozenset({"sum", "pool"})

    def edits(self, step: Step) -> tuple[bool, bool]:
        # what cannot be negative is its own magnitude: the native backward shares just so
        native = step.op.weights is None and step.nonnegative and step.form == "s"
        return not native, not native

    def needs(self, step: Step) -> Iterable[int]:
        return (OUT, *step.sharers) if any(self.edits(step)) else ()

    def takes_relevance(self, step: Step) -> bool:
        return True

    def before(self, here: Here, s: Tensor) -> Tensor:
        values = {i: here.operand(i) for i in here.step.sharers}
        if here.op.weights is None:
            # a reduction, whose own forward adds up the magnitudes (and divides them as its backward divides s)
            here.stash = values
            total = here.replay(values[0].abs())
            made = self._fused(here, "sum_share_of_total", s, total)
            return self._share(here, s, total) if made is None else made
        factors = here.op.weights(here.saved)
        here.stash = values = {i: v if factors[i] == 1 else v * factors[i] for i, v in values.items()}
        made = None
        if len(values) == 1:
            made = self._fused(here, "sum_share_of_one", s, *values.values())
            here.stash = values if made is None else None  # it has its sign
        elif len(here.step.live) == 2 and all(v.shape == s.shape and factors[i] == 1 for i, v in values.items()):
            both = self._fused(here, "sum_shares", s, *values.values())
            if both is not None:  # what `after` hands down: the native backward of such a sum does nothing
                here.stash = both
                return s
        elif len(values) == 2:
            made = self._fused(here, "sum_share", s, *values.values())
        if made is not None:
            return made
        return self._share(here, s, reduce(torch.add, [value.abs() for value in values.values()]))

    def _share(self, here: Here, s: Tensor, total: Tensor) -> Tensor:
        return here.relevance(s, bounded(here.output)) / (total + usable(self.eps, total))

    def _fused(self, here: Here, name: str, s: Tensor, *values: Tensor) -> Any:
        limit = torch.finfo(s.dtype).max
        return here.fused(name, s, here.output, *values, text=here.times("y"), eps=usable(self.eps, s), limit=limit)

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        if here.stash is None:
            return grads
        if isinstance(here.stash, tuple):
            return list(here.stash)

        def signed(g: Tensor, value: Tensor) -> Tensor:
            made = here.fused("times_sign", g, value)
            return g * sign(value) if made is None else made

        return [None if g is None else signed(g, here.stash[i]) for i, g in enumerate(grads)]

    def conserves(self, step: Step) -> bool:
        return step.sharers == step.live and not step.op.fills


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
        if here.carries_s and here.step.name == "Mul":
            made = here.fused("product_shares", s, first, second, eps=usable(self.eps, s))
            if made is not None:
                return [None if g is None else reduce_to(share, g.shape) for g, share in zip(grads, made)]
        magnitude = [first.abs(), second.reciprocal().abs() if quotient else second.abs()]
        total = magnitude[0] + magnitude[1]
        if here.carries_s and first.shape == second.shape and not s.is_complex() and here.step.name in ("Mul", "Div"):
            # the share of the native backward, which divides by nothing; a divisor's has the other sign
            unit = total.add_(usable(self.eps, total)).reciprocal_()
            parts = [m.mul_(unit) for m in magnitude]
            parts = [parts[0], -parts[1]] if quotient else parts
            shared = dict(zip(values, parts))
            return [None if g is None else g * shared[i] for i, g in enumerate(grads)]
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

    looks = False
    kinds = frozenset({"product"})

    def edits(self, step: Step) -> tuple[bool, bool]:
        # one multiplication beforehand serves both factors, unless something is added to the product
        return (step.live == step.live_factors, step.live != step.live_factors)

    def divides(self, step: Step) -> int:
        return step.parts if step.live == step.live_factors else 1

    def before(self, here: Here, s: Tensor) -> Tensor:
        return s / here.step.parts

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        return here.on_live(grads, lambda g: g / here.step.parts)

    def conserves(self, step: Step) -> bool:
        return _is_whole(step)


@dataclass(frozen=True)
class Parted(Rule):
    """Movement of the results of many products: the equal parts of all of them are taken here, once (see `choose.gather`)."""

    parts: int = 2

    looks = False

    def divides(self, step: Step) -> int:
        return self.parts

    def before(self, here: Here, s: Tensor) -> Tensor:
        return s / self.parts


@dataclass(frozen=True)
class Whole(Rule):
    """A product whose parts were taken above, by `Parted`."""


@dataclass(frozen=True)
class Split(Rule):
    """Gates take the part `gate` of a product, attention weights the part `weights`, the signal the rest.

    Where neither factor is a gate (queries and keys), equal parts. `Split(0.5, 0.5)` is `Uniform`, `Split(0, 0)` is
    `SignalTakesAll`. Give fused attention the same part: `Attention(weights)`.
    """

    gate: float = 0.5
    weights: float = 0.5

    looks = False
    kinds = frozenset({"product"})

    def __post_init__(self) -> None:
        if not (0 <= self.gate <= 1 and 0 <= self.weights <= 1):
            raise ValueError(f"{self}: expected parts between 0 and 1")

    def prepare(self, step: Step) -> dict[int, float]:
        # `choose` has put the part of attention weights into `gate` where the gate is such
        return {i: 1 - self.gate if i == step.signal else self.gate for i in step.live_factors}

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        return here.scaled(grads, here.step.prepared)

    def blocks(self, step: Step) -> Iterable[int]:
        return [i for i, part in self.prepare(step).items() if part == 0]

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

    looks = False
    kinds = frozenset({"product"})

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        step = here.step
        return [g if i == step.signal or i not in step.factors else None for i, g in enumerate(grads)]

    def blocks(self, step: Step) -> Iterable[int]:
        return [i for i in step.live_factors if i != step.signal]

    def conserves(self, step: Step) -> bool:
        return not step.name.startswith("Addc") or 0 in step.live


def _is_whole(step: Step) -> bool:
    """Is the output nothing but the product of live factors, each of them homogeneous in its operand?"""
    added = (step.has_bias and step.bias not in step.live) or (step.name.startswith("Addc") and 0 not in step.live)
    return not added and len(set(step.factors)) == len(step.factors) and not (step.is_quotient and step.name != "Div")

"""Rules that split relevance among operands: sums, averages and products."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..fused import launcher
from .base import OUT, Grads, Hooks, Rule, bounded, divide, like, reduce_to, sign, usable
from .linear import through_epsilon

if TYPE_CHECKING:
    from ..here import Here
    from ..step import Step


@dataclass(frozen=True)
class AbsoluteShare(Rule):
    """Operands of a sum take |a| / Σ|…| (the paper's add, sub, sum and mean).

    Parameters take their share and keep it, whether or not relevance goes on to an input; literals take none.

    `below`: the eps of the epsilon rule of the linear map that made one of two operands (`step.below`), which is done here as
    well (see `choose.merge`).
    """

    eps: float = 1e-11
    below: float = 0.0

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
        bias = (step.bias,) if step.has_bias else ()
        if step.rest is not None:
            return OUT, 1 - step.rest, *bias
        return (*step.sharers, *bias) if _both(step) else (OUT, *step.sharers)

    def subtracts(self, step: Step) -> bool:
        return _both(step)

    def merges(self, step: Step) -> bool:
        """Can it do the rule of a linear map that made one of its operands as well?"""
        return _both(step) and step.sharers == step.live and step.form == "s" and not (step.multiply or self.below)

    def takes_relevance(self, step: Step) -> bool:
        return True

    def before(self, here: Here, s: Tensor) -> Tensor:
        # a reduction, whose own forward adds up the magnitudes (and divides them as its backward divides s)
        total = here.replay(here.operand(0).abs())
        made = self._fused(here, "sum_share_of_total", s, here.output, total)
        return self._share(here, s, here.output, total) if made is None else made

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        if here.op.weights is None:
            return [None if g is None else _signed(here, g, here.operand(0)) for g in grads]
        factors = here.op.weights(here.saved)
        made = self._shares(here, grads, s, factors)
        if here.step.below is not None:
            _, position = here.step.below
            g = made[position]
            made[position] = None if g is None else self._through(here, g, position, factors)
        return made

    def _through(self, here: Here, g: Tensor, position: int, factors: tuple[Any, ...]) -> Tensor:
        """On through the linear map that made an operand."""
        bias = here.below_bias
        if position == here.step.rest:
            z = here.output - _times(here.operand(1 - position), factors[1 - position])
            z = z if factors[position] == 1 else z / factors[position]
        else:
            z = here.operand(position)
        if bias is None:
            return through_epsilon(g, z, None, self.below)
        rows = (-1, len(bias))  # only reshapes are between
        return through_epsilon(g.reshape(rows), z.reshape(rows), bias, self.below).reshape(g.shape)

    def _shares(self, here: Here, grads: Grads, s: Tensor, factors: tuple[Any, ...]) -> Grads:
        """What the operands take."""
        rest = here.step.rest
        values = {i: _times(here.operand(i), factors[i]) for i in here.step.sharers if i != rest}
        if _both(here.step):
            if rest is not None:
                values[rest] = here.output - values[1 - rest]
            a, b = values[0], values[1]
            if factors == (1, 1) and a.shape == b.shape == s.shape:
                both = self._fused(here, "sum_shares", s, a, b)
                if both is not None:
                    return [None if g is None else share for g, share in zip(grads, both)]
            made = self._fused(here, "sum_share", s, a, b)
            u = self._share(here, s, a + b, a.abs() + b.abs()) if made is None else made
        else:
            ((i, a),) = values.items()
            made = self._fused(here, "sum_share_of_one", s, here.output, a)
            if made is not None:  # with its sign
                return [None if g is None else _times(reduce_to(made, g.shape), factors[i]) for g in grads]
            u = self._share(here, s, here.output, a.abs())
        # of the native backward of a sum only its factors are left to do
        return [
            None if g is None else _times(reduce_to(_signed(here, u, values[i]), g.shape), factors[i])
            for i, g in enumerate(grads)
        ]

    def prepare(self, step: Step) -> tuple[str, int, int, bool] | None:
        """Two live operands of one shape, as of a residual: the formula, what it takes, and are its results the other way round?"""
        if step.multiply or not _both(step) or step.sharers != step.live:
            return None
        name, first = "sum_shares", step.rest or 0
        if step.below is not None:
            name, (_, first) = f"sum_shares_epsilon{'_bias' if step.has_bias else ''}", step.below
        if step.rest is None:
            return name, first, 1 - first, first == 1
        return (name + "_of_rest", OUT, 1 - first, first == 1) if first == step.rest else None

    def short(self, here: Here) -> Hooks | None:
        if here.step.prepared is None or not here.kernels:
            return None
        name, first, second, turned = here.step.prepared
        weights: Any = here.op.weights
        rule, held, text, bias = self, [here], here.times("y"), here.below_bias
        own = [] if bias is None else [bias]

        def after(grads: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> Any:
            s = incoming[0]
            if s is None:
                return None
            here, dtype, shape = held.pop(), s.dtype, s.shape
            a, b = here.operand(first), here.operand(second)
            fits = a.shape == shape and b.shape == shape and a.dtype == dtype and b.dtype == dtype
            if bias is not None:
                fits = fits and bias.dtype == dtype and bias.shape == shape[-1:]
            if fits and s.is_floating_point() and weights(here.saved) == (1, 1):
                made = launcher(name, text, **_numbers(rule, dtype))(s, a, b, *own)
                return made[::-1] if turned else made
            return tuple([like(made, g) for made, g in zip(rule.after(here, list(grads), s), grads)])

        return None, after

    def _share(self, here: Here, s: Tensor, output: Tensor, total: Tensor) -> Tensor:
        return here.relevance(s, bounded(output)) / (total + usable(self.eps, total))

    def _fused(self, here: Here, name: str, s: Tensor, *values: Tensor) -> Any:
        return here.fused(name, s, *values, text=here.times("y"), **_numbers(AbsoluteShare(self.eps), s.dtype))

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


@cache
def _numbers(rule: AbsoluteShare, dtype: torch.dtype) -> dict[str, float]:
    """What the rule's formulas take beside tensors."""
    limits = torch.finfo(dtype)
    numbers = {"eps": max(rule.eps, limits.tiny), "limit": limits.max}
    return numbers | {"below": max(rule.below, limits.tiny)} if rule.below else numbers


def _both(step: Step) -> bool:
    """A sum of two operands that both take their share?"""
    return step.op.weights is not None and step.sharers == (0, 1)


def _signed(here: Here, g: Tensor, value: Tensor) -> Tensor:
    made = here.fused("times_sign", g, value)
    return g * sign(value) if made is None else made


def _times(g: Tensor, factor: float) -> Tensor:
    return g if factor == 1 else g * factor


def _is_whole(step: Step) -> bool:
    """Is the output nothing but the product of live factors, each of them homogeneous in its operand?"""
    added = (step.has_bias and step.bias not in step.live) or (step.name.startswith("Addc") and 0 not in step.live)
    return not added and len(set(step.factors)) == len(step.factors) and not (step.is_quotient and step.name != "Div")

"""Rules for operations that pass relevance on: activations, attention, scalings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..kernel import sgn
from .base import OUT, Grads, Rule, divide, first_only, given, reduce_to, scaled, stabilise, usable

if TYPE_CHECKING:
    from ..here import Here
    from ..step import Step


@dataclass(frozen=True)
class Identity(Rule):
    """R_x = R_y: s · f(x)/x, in closed form where there is one, with the limit f'(0) at 0.

    `composites`: does it also hold for activations and normalisations that are written out in primitives?
    """

    composites: bool = True
    eps: float = 0.0  # stabilises f(x)/x where there is no closed form

    kinds = frozenset({"activation", "function", "normalise", "batchnorm", "softmax", "scale"})

    def edits(self, step: Step) -> tuple[bool, bool]:
        return False, not (step.op.rectifies and step.form == "s")  # a rectifier's own backward is the identity rule

    def needs(self, step: Step) -> Iterable[int]:
        return () if step.form == "R" or self._closed(step) else (OUT, 0)

    def _closed(self, step: Step) -> bool:
        """Does the node keep all that f(x)/x is made of?"""
        return step.op.ratio is not None or bool(self.eps and step.op.quotient is not None)

    def passes_relevance(self, step: Step) -> bool:
        return True

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        if here.step.form == "R":
            return first_only(grads, s)
        if self._closed(here.step):
            if here.op.quotient is not None:
                return first_only(grads, here.op.quotient(here.saved, s, usable(self.eps, s)))
            assert here.op.ratio is not None
            return first_only(grads, s * here.op.ratio(here.saved))
        x, y = here.operand(0), here.output
        passed = self._divide(s * y.conj(), x.conj()) if x.is_complex() else self._divide(s * y, x)
        limit = here.step.kind == "activation"
        return first_only(grads, torch.where(x == 0, given(grads[0]), passed) if limit else passed)

    def _divide(self, numerator: Tensor, x: Tensor) -> Tensor:
        return numerator / stabilise(x, self.eps) if self.eps else divide(numerator, x)

    def conserves(self, step: Step) -> bool:
        return step.kind == "activation" and step.live == (0,)


@dataclass(frozen=True)
class FunctionShare(Identity):
    """A function with f(0) ≠ 0 is f(0) + (f(x) - f(0)): the constant takes its absolute share and keeps it, as a bias does.

    s_x = s · (f(x) - f(0))/x · y·sgn(f(x) - f(0)) / (|f(0)| + |f(x) - f(0)| + eps). Since |y| is at most that sum, it never
    exceeds s times the secant's slope, whereas the identity rule's f(x)/x has no bound at 0: a sigmoid gate that is
    undecided would make relevance explode. Where f(0) is 0, infinite or unknown: the identity rule.
    """

    composites: bool = False
    eps: float = 1e-11

    kinds = frozenset({"function"})

    def needs(self, step: Step) -> Iterable[int]:
        closed = step.op.forward is None or step.op.ratio is not None  # which have no f(0)
        return super().needs(step) if closed else (OUT, 0)

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        if here.op.forward is None or here.op.ratio is not None or s.is_complex():  # a complex number has no sign
            return super().after(here, grads, s)
        constant = here.replay(torch.zeros((), dtype=torch.float64))
        if constant.dim() or constant.device.type != "cpu":  # a function of more than its input, such as a parameter
            known = constant.isfinite() & (constant != 0)
            shared = self._share(here, given(grads[0]), s, torch.where(known, constant, 0).to(s.dtype))
            return first_only(grads, torch.where(known, shared, given(super().after(here, grads, s)[0])))
        c = float(constant)
        if c == 0 or not math.isfinite(c):
            return super().after(here, grads, s)
        return first_only(grads, self._share(here, given(grads[0]), s, c))

    def _share(self, here: Here, g: Tensor, s: Tensor, c: Any) -> Tensor:
        """What x takes, of a function with f(0) = c."""
        x, y = here.operand(0), here.output
        # near 0 the secant is the tangent, and rounding would spoil the difference
        close = torch.finfo(x.dtype).eps ** 0.5
        rest = y - c
        total = rest.abs() + (abs(c) + usable(self.eps, s))
        if here.step.form == "R":
            return s * rest.abs() / total
        slope = torch.where(x.abs() < close, g, s * rest / torch.where(x == 0, 1, x))
        return slope * y * sgn(rest) / total


@dataclass(frozen=True)
class PassScale(Rule):
    """A product with a constant, below a rule that delivers R: relevance passes as it is."""

    def passes_relevance(self, step: Step) -> bool:
        return True

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        return here.on_live(grads, lambda g: reduce_to(s, g.shape))

    def conserves(self, step: Step) -> bool:
        return True


@dataclass(frozen=True)
class Carry(Rule):
    """A fixed linear map: the values that go through carry all relevance; what only steers them (a grid) takes none."""

    kinds = frozenset({"transform"})

    def _steering(self, step: Step) -> tuple[int, ...]:
        carriers = step.op.carriers
        if carriers is None or not any(i in carriers for i in step.live):
            return ()
        return tuple(i for i in step.live if i not in carriers)

    def edits(self, step: Step) -> tuple[bool, bool]:
        return False, bool(self._steering(step))

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        steering = self._steering(here.step)
        return [None if i in steering else g for i, g in enumerate(grads)]

    def conserves(self, step: Step) -> bool:
        return step.homogeneous


@dataclass(frozen=True)
class Attention(Rule):
    """Fused attention as the products it is made of: `weights` of A·v to A, split between q and k; the rest to v.

    0.5 is AttnLRP; 0 is CP-LRP (queries and keys take nothing). `lost` is what v does not get (the paper: 0.5).
    """

    weights: float = 0.5
    lost: float = 0.0

    kinds = frozenset({"attention"})

    def _factor(self, step: Step, position: int) -> float:
        """What an operand gets of its own gradient; those beside query, key and value are added to the pattern."""
        query, key, value = step.op.factors if len(step.op.factors) == 3 else (0, 1, 2)
        if value not in step.live:  # a product with one live factor: all to the pattern
            pattern, values = 1.0, 0.0
        elif step.live == (value,):  # all to the values
            pattern, values = 0.0, 1.0
        else:
            pattern, values = self.weights, 1 - self.weights - self.lost
        if position == value:
            return values
        both = query in step.live and key in step.live
        return pattern / 2 if both and position in (query, key) else pattern

    def edits(self, step: Step) -> tuple[bool, bool]:
        return False, any(self._factor(step, i) != 1 for i in step.live)

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        return scaled(grads, {i: self._factor(here.step, i) for i in here.step.live})

    def blocks(self, step: Step) -> Iterable[int]:
        return [i for i in step.live if self._factor(step, i) == 0]

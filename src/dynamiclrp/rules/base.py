"""What a rule is, and the rules that leave an operation's own backward as it is.

Every tensor y of the forward pass carries a coefficient s with R_y = y * s (form "s"), or R_y itself (form "R").
A rule edits the operation's own backward: `before` rescales what the native backward is fed with, `after` replaces what
it returned. A rule says which values it `needs`; the Promise System gets them. It must not know where they come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernel import stabilised

if TYPE_CHECKING:
    from ..here import Here
    from ..step import Step

OUT = -1  # the output, among the positions of the operands

Grads = list[Tensor | None]


def stabilise(denominator: Tensor, eps: float) -> Tensor:
    """`d + eps * sgn(d)` with sgn(0) = +1, so that nothing is divided by zero (eps never underflows)."""
    return stabilised(denominator, usable(eps, denominator))


def usable(eps: float, like: Tensor) -> float:
    """An eps that does not underflow in the tensor's dtype."""
    return max(eps, _tiny(like.dtype))


@cache
def _tiny(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).tiny


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient, and 0 where the denominator is 0: what has no value carries no relevance."""
    zero = denominator == 0
    return torch.where(zero, 0, numerator / torch.where(zero, 1, denominator))


def bounded(y: Tensor) -> Tensor:
    """Infinities, as of an additive attention mask, replaced by the largest numbers: no relevance arrives there, and
    0 times infinity would be nan."""
    limits = torch.finfo(y.dtype)
    return y.clamp(limits.min, limits.max)


def like(made: Tensor | None, native: Tensor | None) -> Tensor | None:
    """In the dtype of what autograd made; nothing, where it made nothing."""
    if made is None or native is None:
        return None
    return made if made.dtype == native.dtype else made.to(native.dtype)


def reduce_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo broadcasting by summation."""
    return x if x.shape == torch.Size(shape) else x.sum_to_size(shape)


def first_only(grads: Grads, passed: Tensor) -> Grads:
    """All to the first operand; parameters of the function take nothing."""
    return [None if g is None or i > 0 else passed for i, g in enumerate(grads)]


def scaled(grads: Grads, factors: Mapping[int, float]) -> Grads:
    """Multiply by the factors; operands without one keep what they have, a factor of 0 leaves nothing."""
    return [
        g if g is None or factors.get(i, 1) == 1 else g * factors[i] if factors[i] else None
        for i, g in enumerate(grads)
    ]


def given(grad: Tensor | None) -> Tensor:
    """What is known to be there."""
    assert grad is not None
    return grad


class Rule:
    """Base of all rules; by itself, the operation's own backward."""

    delivers_relevance = False  # hands down R, not s
    kinds: frozenset[str] | None = None  # the kinds of operations it can serve; None: all
    needs_parameters = False  # computes with biases and other parameters that are added

    def fits(self, kind: str) -> bool:
        """Can it serve operations of this kind?"""
        return self.kinds is None or str(kind) in self.kinds

    def edits(self, step: Step) -> tuple[bool, bool]:
        """Which of `before` and `after` it has to do at this step."""
        return type(self).before is not Rule.before, type(self).after is not Rule.after

    def before(self, here: Here, s: Tensor) -> Tensor:
        """What to feed the native backward with."""
        return s

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        """What to hand down in place of the native backward's results; None: nothing."""
        return grads

    def needs(self, step: Step) -> Iterable[int]:
        """Positions of the operands (or OUT) whose values the rule computes with."""
        return ()

    def blocks(self, step: Step) -> Iterable[int]:
        """Live operands that get nothing."""
        return ()

    def passes_relevance(self, step: Step) -> bool:
        """Can it take R in place of s and hand down R?"""
        return False

    def takes_relevance(self, step: Step) -> bool:
        """Can it take R in place of s and hand down s?"""
        return False

    def conserves(self, step: Step) -> bool:
        """Does it claim to hand down exactly what arrives, given these live operands?"""
        return False


@dataclass(frozen=True)
class Gradient(Rule):
    """The operation's own backward: LRP-0 for linear and homogeneous operations, Taylor for others (softmax)."""

    def conserves(self, step: Step) -> bool:
        carriers = step.op.carriers
        return step.homogeneous and (carriers is None or all(i in carriers for i in step.live))


@dataclass(frozen=True)
class Move(Rule):
    """Movement and selection: relevance and coefficients alike go where the values came from."""

    def passes_relevance(self, step: Step) -> bool:
        return True

    def conserves(self, step: Step) -> bool:
        return step.homogeneous


@dataclass(frozen=True)
class Nothing(Rule):
    """No relevance passes."""

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        return [None] * len(grads)

    def blocks(self, step: Step) -> Iterable[int]:
        return step.live

    def passes_relevance(self, step: Step) -> bool:
        return True

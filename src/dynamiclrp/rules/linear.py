"""Linear maps z = x·W + b (matrix products and convolutions with one live operand): what their rules share, and epsilon."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UnsupportedTensorError
from ..kernel import formula, sgn, stabilised
from .base import OUT, Grads, Rule, usable

if TYPE_CHECKING:
    from ..here import Here
    from ..step import Step


@dataclass(frozen=True)
class LinearRule(Rule):
    """z = x·W + b. `top` keeps only that share of the largest relevances of each row (the paper's relevance filter).

    `bias` says what the bias takes: its proportional share (inside the denominator), or |b| / (|x·W| + |b|) beforehand.
    """

    eps: float = 1e-6
    bias: str = "proportional"
    top: float = 1.0

    needs_parameters = True
    kinds = frozenset({"linear", "conv"})

    def __post_init__(self) -> None:
        if not 0 < self.top <= 1:
            raise ValueError(f"{type(self).__name__}(top={self.top}): expected a share, 0 < top <= 1")
        if self.bias not in ("proportional", "absolute"):
            raise ValueError(f"{type(self).__name__}(bias={self.bias!r}): expected 'proportional' or 'absolute'")

    def needs(self, step: Step) -> Iterable[int]:
        yield OUT
        if self.sets_bias_aside(step):
            yield step.bias

    @property
    def folds(self) -> bool:
        """Does a batch norm behind the map count as part of it?"""
        return self.bias == "proportional"

    def takes_relevance(self, step: Step) -> bool:
        return True

    def sets_bias_aside(self, step: Step) -> bool:
        """Does a bias take its share beforehand?"""
        return self.bias == "absolute" and step.has_bias

    def real_output(self, here: Here) -> Tensor:
        """z, unless it is complex."""
        if not here.output.is_complex():
            return here.output
        name = here.step.name
        raise UnsupportedTensorError(
            f"node {here.step.node} ({name}) multiplies complex numbers, which have no sign: {self} cannot tell their parts apart. "
            f'Remedy: let it keep its own backward, preset(…) | {{"{name}": Gradient()}}, or write it with real numbers.'
        )

    def relevance(self, here: Here, s: Tensor) -> tuple[Tensor, Tensor]:
        """(relevance to hand down, z) with the filter applied and, where so asked, the bias' share set aside."""
        z = self.real_output(here)
        r = here.relevance(s, z)
        if self.top < 1:
            r = _keep_top(r, self.top)
        if self.sets_bias_aside(here.step):
            bias, eps = here.bias, usable(self.eps, z)
            z = z - bias
            if here.wants_bias:
                here.bias_coefficient = _share(r, z, bias, eps) * sgn(bias)
            r = _share(r, z, bias, eps) * abs(z)
        return r, z

    def plain(self, step: Step) -> bool:
        """Is all of `relevance` one multiplication by z, at most?"""
        return self.top == 1 and not self.sets_bias_aside(step)

    def give_bias(self, here: Here, grads: Grads) -> Grads:
        """Where relevance of the bias itself was asked for, hand it its part."""
        position = here.step.bias
        if position in here.step.live and here.bias_coefficient is not None and grads[position] is not None:
            grads[position] = here.reduce_to_bias(here.bias_coefficient, relevance=self.delivers_relevance)
        return grads


def _keep_top(r: Tensor, share: float) -> Tensor:
    rows = r.reshape(len(r), -1) if r.dim() > 1 else r.reshape(1, -1)
    top = rows.topk(max(1, int(share * rows.shape[1])), dim=1)
    return torch.zeros_like(rows).scatter_(1, top.indices, top.values).reshape(r.shape)


@formula
def epsilon(s: Any, z: Any, bias: Any, *, eps: float, coefficients: bool) -> Any:
    """R / stab(z), of coefficients or of relevance; a `bias` takes its absolute share beforehand."""
    if bias is None and coefficients:  # z / stab(z), which is 0 for z = 0 and 1 for an infinite z (an additive mask)
        return s / (eps / abs(z) + 1)
    r = s * z if coefficients else s
    if bias is None:
        return r / stabilised(z, eps)
    z = z - bias
    return _share(r, z, bias, eps) * abs(z) / stabilised(z, eps)


def _share(r: Any, z: Any, bias: Any, eps: Any) -> Any:
    """What a unit of magnitude takes, where the bias is none of z."""
    return r / (abs(z) + (abs(bias) + eps))


@dataclass(frozen=True)
class Epsilon(LinearRule):
    """R_x = x · Wᵀ(R_z / stab(z)) (Bach et al. 2015, eq. 58). On sums and averages: Zennit's Norm."""

    kinds = frozenset({"linear", "conv", "sum", "pool"})

    def edits(self, step: Step) -> tuple[bool, bool]:
        return True, self.sets_bias_aside(step) and step.bias in step.live

    def before(self, here: Here, s: Tensor) -> Tensor:
        z, aside = here.output, self.sets_bias_aside(here.step)
        if self.top == 1 and not (aside and here.wants_bias):
            bias = here.bias if aside else None
            if (here.carries_s and not aside) or not z.is_complex():
                return epsilon(s, z, bias, eps=usable(self.eps, s), coefficients=here.carries_s)
        r, z = self.relevance(here, s)
        return epsilon(r, z, None, eps=usable(self.eps, r), coefficients=False)

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        return self.give_bias(here, grads)

"""Rules for the first linear map above an input. They hand relevance to zeros, so they deliver R."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .base import OUT, Grads, stabilise
from .linear import LinearRule
from .signed import set_values

if TYPE_CHECKING:
    from ..here import Here
    from ..step import Step


@dataclass(frozen=True)
class _FirstLayerRule(LinearRule):
    """What they share."""

    delivers_relevance = True

    def needs(self, step: Step) -> Iterable[int]:
        yield OUT
        yield from step.factors

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        relevance = self.distribute(here, here.stash)
        grads = here.on_live(grads, lambda g: relevance)
        if here.wants_bias and here.bias_coefficient is None:  # the bias has no part in this rule
            grads[here.step.bias] = None
        return self.give_bias(here, grads)

    def before(self, here: Here, s: Tensor) -> Tensor:
        here.stash, _ = self.relevance(here, s)
        return s

    def distribute(self, here: Here, r: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Flat(_FirstLayerRule):
    """Every input of a unit takes the same (Lapuschkin et al. 2019)."""

    def distribute(self, here: Here, r: Tensor) -> Tensor:
        x, w = (torch.ones_like(factor) for factor in here.factors)
        return here.transposed(r / stabilise(here.product(x, w), self.eps), x, w)


@dataclass(frozen=True)
class WSquare(_FirstLayerRule):
    """Inputs take in proportion to the square of their weight (Montavon et al. 2017)."""

    def needs(self, step: Step) -> Iterable[int]:
        yield from super().needs(step)
        if step.has_bias:
            yield step.bias

    def distribute(self, here: Here, r: Tensor) -> Tensor:
        x, w = here.factors
        x, w = (torch.ones_like(x), w**2) if here.step.live_factor == 0 else (x**2, torch.ones_like(w))
        d = here.product(x, w)
        if here.step.has_bias:
            d = d + here.bias**2
        u = r / stabilise(d, self.eps)
        if here.wants_bias:
            here.bias_coefficient = u * here.bias**2
        return here.transposed(u, x, w)


@dataclass(frozen=True)
class Box(_FirstLayerRule):
    """Inputs lie between low and high (z^B; Montavon et al. 2017). Numbers or nested tuples that broadcast to the input.

    Without bounds: between the lowest and the highest value of the input at hand, each channel of each row by itself (behind a
    matrix product: each row).
    """

    low: Any = None
    high: Any = None

    def __init__(
        self, low: Any = None, high: Any = None, eps: float = 1e-6, bias: str = "proportional", top: float = 1.0
    ) -> None:
        if (low is None) != (high is None):
            raise ValueError(f"Box({low}, {high}): expected both bounds or neither")
        low, high = (_freeze(v.tolist() if isinstance(v, Tensor) else v) for v in (low, high))
        set_values(self, low=low, high=high, eps=eps, bias=bias, top=top)

    def distribute(self, here: Here, r: Tensor) -> Tensor:
        factors = list(here.factors)
        i = here.step.live_factor
        x, w = factors[i], factors[1 - i]
        low, high = (bound.expand_as(x) for bound in self._bounds(here, x))
        parts = [(x - low, w.clamp(min=0)), (x - high, w.clamp(max=0))]
        if i == 1:
            parts = [(b, a) for a, b in parts]
        d = reduce(torch.add, [here.product(*part) for part in parts])
        u = r / stabilise(d, self.eps)
        return reduce(torch.add, [part[i] * here.transposed(u, *part) for part in parts])

    def _bounds(self, here: Here, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.low is not None:
            low, high = (torch.as_tensor(bound, dtype=x.dtype, device=x.device) for bound in (self.low, self.high))
            return low, high
        conv = here.step.kind.value == "conv"
        over = tuple(range(2, x.dim())) if conv else (-1,)
        low, high = x.amin(over, keepdim=True), x.amax(over, keepdim=True)
        # a little wider: where all values are equal, they take in proportion to |w|, and not a rounding error's share
        top = torch.maximum(high, -low)
        top = top.amax(1, keepdim=True) if conv else top
        slack = torch.where(top == 0, 1, top) * 1e-3
        return low - slack, high + slack


def _freeze(value: Any) -> Any:
    return tuple(_freeze(item) for item in value) if isinstance(value, (list, tuple)) else value

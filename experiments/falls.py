"""Rules that the search for `default` tried and the package does not have: other ways for gamma to fall, shared max pooling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from dynamiclrp.rules import Gamma, Rule
from dynamiclrp.rules.base import OUT


@dataclass(frozen=True)
class Curve(Gamma):
    """Gamma from first to last by another curve: equal factors of depth^`power`, or `even`, by equal differences."""

    power: float = 1.0
    even: bool = False

    def __init__(self, gamma: float, last: float, power: float = 1.0, even: bool = False) -> None:
        super().__init__(gamma, last=last)
        object.__setattr__(self, "power", power)
        object.__setattr__(self, "even", even)

    def at(self, depth: float) -> Gamma:
        assert self.last is not None
        depth = depth**self.power
        if self.even:
            return Gamma(self.gamma * (1 - depth) + self.last * depth)
        return Gamma(self.gamma ** (1 - depth) * self.last**depth)


@dataclass(frozen=True)
class Count(Gamma):
    """gamma / (1 + convolutions below)^power, in a model that has `levels` of them above each other."""

    power: float = 0.5
    levels: int = 1

    def __init__(self, gamma: float, power: float, levels: int) -> None:
        super().__init__(gamma, last=gamma)
        object.__setattr__(self, "power", power)
        object.__setattr__(self, "levels", levels)

    def at(self, depth: float) -> Gamma:
        return Gamma(self.gamma / (1 + round(depth * (self.levels - 1))) ** self.power)


@dataclass(frozen=True)
class Resolution(Gamma):
    """gamma · factor^octaves, where octaves are how often the input's `side` was halved."""

    factor: float = 1.0
    side: int = 224

    def __init__(self, gamma: float, factor: float, side: int) -> None:
        super().__init__(gamma)
        object.__setattr__(self, "factor", factor)
        object.__setattr__(self, "side", side)

    def here(self, here: Any) -> Gamma:
        return Gamma(self.gamma * self.factor ** max(0.0, math.log2(self.side / here.output.shape[-1])))

    def before(self, here: Any, s: Tensor) -> Tensor:
        return self.here(here).before(here, s)

    def after(self, here: Any, grads: Any, s: Tensor) -> Any:
        return self.here(here).after(here, grads, s)


@dataclass(frozen=True)
class SharedPool(Rule):
    """Max pooling over windows of 2 x 2 side by side, behind a rectifier: relevance in proportion to x^power."""

    power: float = 1.0

    kinds = frozenset({"movement"})

    def needs(self, step: Any) -> tuple[int, ...]:
        return (OUT, 0)

    def takes_relevance(self, step: Any) -> bool:
        return True

    def before(self, here: Any, s: Tensor) -> Tensor:
        here.stash = here.relevance(s, here.output)
        return s

    def after(self, here: Any, grads: Any, s: Tensor) -> Any:
        x = here.operand(0)
        share = here.stash / (4 * F.avg_pool2d(x**self.power, 2) + 1e-9)
        return [x ** (self.power - 1) * F.interpolate(share, scale_factor=2.0), *grads[1:]]

"""A candidate for linear maps: LRP-0 without the units whose terms cancel. Costs a gamma rule's denoising, not its products."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dynamiclrp.rules.base import OUT, Rule, usable


@dataclass(frozen=True)
class Damped(Rule):
    """A unit counts z² / (z² + (part · rms)²), with the root mean square of z over the units of its position.

    LRP-0 hands each input x·w/z of a unit's relevance: where z is near 0 though its terms are not, large shares of both
    signs, which is noise. Epsilon damps those by |z| / (|z| + eps), with an eps in units of z and a tail that damps all
    others too; the square leaves them alone, and the layer itself gives the unit. For inputs of any scale.
    """

    part: float = 0.3
    whole: bool = False  # do the units that stay share what the others had?

    kinds = frozenset({"linear"})

    def __post_init__(self) -> None:
        if self.part <= 0:
            raise ValueError(f"{self}: expected a part of the root mean square, above 0")

    def needs(self, step: Any) -> Iterable[int]:
        return (OUT,)

    def takes_relevance(self, step: Any) -> bool:
        return True

    def before(self, here: Any, s: Tensor) -> Tensor:
        z = here.output
        square = z * z
        total = square + square.mean(-1, keepdim=True) * self.part**2
        # a position may be all zeros, and its relevance with it
        found = s * (square if here.carries_s else z) / total.clamp_(min=usable(0.0, total))
        if not self.whole:
            return found
        before, after = here.relevance(s, z).sum(-1, keepdim=True), (found * z).sum(-1, keepdim=True)
        return found * (before / after).nan_to_num(1.0).clamp(
            0, 5
        )  # what is left may be next to nothing, or of another sign

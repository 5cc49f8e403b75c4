"""The result of an explanation. It knows its tensors and where they come from, never the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from .ledger import Ledger
    from .plan import Plan
    from .presets import Preset


@dataclass(frozen=True, eq=False)
class Attribution:
    """Relevance of a prediction's inputs.

    Float inputs have relevance of their own shape; token ids have one number per token. Sums are in the units of the
    explained score.
    """

    relevances: dict[str, Tensor]  # by argument name, in the model's order
    layers: dict[str, Tensor]  # by module name, at the modules' outputs
    prediction: Tensor  # the model's output, detached (start and end logits are stacked last)
    target: Any
    seed: Tensor  # relevance at the output
    plan: Plan
    preset: Preset
    ledger: Ledger | None = field(default=None)

    @property
    def relevance(self) -> Tensor:
        """The relevance of the first input that was explained."""
        return next(iter(self.relevances.values()))

    @property
    def score(self) -> Tensor:
        """What was explained, one number per row."""
        return self.seed.reshape(len(self.seed), -1).sum(1) if self.seed.dim() else self.seed

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {tuple(r.shape)}" for name, r in self.relevances.items())
        total = sum(float(r.sum()) for r in self.relevances.values())
        return (
            f"Attribution({shapes}; target={self.target}, score={float(self.seed.sum()):.4g}, "
            f"sum of relevance={total:.4g}, preset={self.preset.name})"
        )

"""Explanations side by side: of several targets, presets or methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from .attribution import Attribution, Viewable


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Viewable):
    """Attributions of the same inputs by label, in order."""

    parts: dict[str, Attribution]

    def __getitem__(self, label: str) -> Attribution:
        return self.parts[label]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def items(self) -> Any:
        return self.parts.items()

    def to_pandas(self, *, words: bool = False) -> Any:
        """A DataFrame with one line per label and part."""
        import pandas

        frames = [a.to_pandas(words=words).assign(label_of=label) for label, a in self.items()]
        return pandas.concat(frames, ignore_index=True).rename(columns={"label_of": "compared"})

    def to_dict(self, *, k: int | None = None) -> dict[str, Any]:
        """Plain values for JSON, by label."""
        return {label: a.to_dict(k=k) for label, a in self.items()}

    def __repr__(self) -> str:
        return f"Comparison({', '.join(self.parts)})"


def compare(results: Mapping[str, Attribution | Tensor]) -> Comparison:
    """Put explanations side by side. A tensor of another method takes its inputs from the first Attribution.

    >>> import torch, dynamiclrp as dlrp
    >>> model, x = torch.nn.Linear(3, 2), torch.randn(1, 3)
    >>> dlrp.compare({p: dlrp.explain(model, x, target=0, preset=p) for p in ("epsilon", "gamma")})
    Comparison(epsilon, gamma)
    """
    base = next((a for a in results.values() if isinstance(a, Attribution)), None)
    if base is None:
        raise TypeError("compare: expected at least one Attribution, by label: compare({'LRP': a, 'gradient': tensor})")
    parts = {}
    for label, result in results.items():
        if isinstance(result, Tensor):
            name = next(iter(base.relevances))
            if result.shape != base.relevance.shape:
                raise ValueError(
                    f"{label!r} has shape {tuple(result.shape)}: expected that of {name!r}, {tuple(base.relevance.shape)}"
                )
            result = replace(base, relevances={name: result.detach()}, layers={}, plan=None, ledger=None)
        elif not isinstance(result, Attribution):
            raise TypeError(f"{label!r}: expected an Attribution or a tensor, got {type(result).__name__}")
        parts[str(label)] = result
    return Comparison(parts)

"""Explanations side by side: of several targets, presets or methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn

from .attribution import Answer, Attribution, Viewable
from .errors import PresetError
from .explain import Explainer
from .heads import several
from .outputs import unwrap
from .presets import Preset


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


class Ask(Protocol):
    """A target that remembers, once it was called with an output, what it chose."""

    chosen: Any

    @property
    def answers(self) -> Sequence[Answer]: ...

    def __call__(self, output: Tensor) -> Tensor: ...


def explain_each(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    ask: Callable[[Any], Ask],
    *,
    target: Any,
    targets: int | Sequence[Any] | None,
    preset: str | Preset,
    presets: Sequence[str | Preset] | None,
    ledger: bool,
    **shown: Any,
) -> Attribution | Comparison:
    """One explanation, or one for each of several targets and presets; `shown` is what each says of its inputs.

    Targets share a forward pass, unless a ledger of each is asked for.
    """
    if target is not None and targets is not None:
        raise TypeError("give target for one explanation or targets for several, not both")
    wanted = [target] if targets is None else several(targets)
    chosen = [preset] if presets is None else list(presets)
    if not chosen or isinstance(presets, str):
        raise PresetError(f"presets={presets!r}: expected a list of presets")
    found: dict[str, Attribution] = {}
    for name in chosen:
        explainer, asks = Explainer(model, name), [ask(one) for one in wanted]
        if ledger or len(asks) == 1:
            made = [explainer(target=one, ledger=ledger, output=unwrap, **inputs) for one in asks]  # type: ignore[arg-type]
        else:
            made = list(explainer.each(targets=asks, output=unwrap, **inputs))  # type: ignore[arg-type]
        for one, a in zip(asks, made):
            media = {key: medium for key, medium in shown["media"].items() if key in a.relevances}
            answers = tuple(one.answers)
            dressed = replace(a, target=one.chosen, answers=answers, media=media, about=shown["about"])
            answer = "; ".join(each.label for each in answers) if len(asks) > 1 else ""
            label = " · ".join(filter(None, (answer, explainer.preset.name if len(chosen) > 1 else "")))
            label = label or str(answers[0])
            same = sum(key == label or key.startswith(f"{label} (") for key in found)
            found[f"{label} ({same + 1})" if same else label] = dressed
    return next(iter(found.values())) if targets is None and presets is None else Comparison(found)

"""The result of an explanation. It knows its tensors and where they come from, never the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .media import FIRST, PADDING, SPECIAL, Medium, Picture, Tokens
from .parts import Part, parts_of, pool
from .targets import row_dim

if TYPE_CHECKING:
    from .ledger import Ledger
    from .plan import Plan
    from .presets import Preset


@dataclass(frozen=True)
class Account:
    """Where a score went: what reached the inputs and what was kept on the way, by whom.

    >>> Account(total=10.0, delivered=7.5, kept={"bias": 2.0}).residual
    0.5
    """

    total: float
    delivered: float
    kept: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what its reader has to know

    @property
    def residual(self) -> float:
        """What no line of the account explains."""
        return self.total - self.delivered - sum(self.kept.values())


@dataclass(frozen=True)
class Answer:
    """What was explained in one row, in words: the answer, its probability, and what it was set against."""

    label: str
    probability: float | None = None
    contrast: str | None = None

    def __str__(self) -> str:
        return self.label if self.contrast is None else f"{self.label} rather than {self.contrast}"


class Viewable:
    """What every result can do: be looked at, written as a page, kept."""

    def html(
        self, path: str | PathLike[str] | None = None, *, palette: str = "red-blue", title: str | None = None
    ) -> str:
        """One page that needs nothing but itself; written to `path` if one is given.

        >>> import torch, dynamiclrp as dlrp
        >>> page = dlrp.explain(torch.nn.Linear(3, 2), torch.randn(1, 3)).html()
        >>> page[:15]
        '<!doctype html>'
        """
        from .archive import write_whole
        from .view.document import document

        text = document(self, palette=palette, title=title)
        if path is not None:
            write_whole(path, text.encode("utf-8"))
        return text

    def show(self) -> None:
        """Show it where you are: the page in a notebook, a table in a terminal."""
        from .view.terminal import show

        show(self)

    def plot(self, **options: Any) -> Any:
        """A matplotlib figure: `ax` to draw into, `palette`, `words` instead of tokens, `patch` pixels to a square."""
        from .view.plot import plot

        return plot(self, **options)

    def save(self, path: str | PathLike[str]) -> None:
        """Keep it in one safetensors file, with what is not a tensor as JSON inside; `dynamiclrp.load` brings it back."""
        from .archive import save

        save(self, path)

    def _repr_html_(self) -> str:
        from .view.document import frame

        return frame(self)

    def __rich__(self) -> Any:
        from .view.terminal import renderable

        return renderable(self)


@dataclass(frozen=True, eq=False, repr=False)
class Attribution(Viewable):
    """Relevance of a prediction's inputs.

    Float inputs have relevance of their own shape; token ids have one number per token. Sums are in the units of the
    explained score. `media` say what the inputs are to a person, `answers` what was explained, one per row each.
    """

    relevances: dict[str, Tensor]  # by argument name, in the model's order
    layers: dict[str, Tensor]  # by module name, at the modules' outputs
    prediction: Tensor  # the model's output, detached (start and end logits are stacked last)
    target: Any
    seed: Tensor  # relevance at the output
    plan: Plan | None  # not kept in a file
    preset: Preset
    ledger: Ledger | Account | None = field(default=None)
    media: dict[str, tuple[Medium, ...]] = field(default_factory=dict)
    answers: tuple[Answer, ...] = ()
    about: dict[str, str] = field(default_factory=dict)  # model, task: for captions
    output: str = ""  # which of several things that the model returned was explained
    batch_dim: int | None = None  # of the rows in inputs and outputs, as far as it had to be said
    notes: tuple[str, ...] = ()  # what its reader has to know

    @property
    def relevance(self) -> Tensor:
        """The relevance of the first input that was explained."""
        return next(iter(self.relevances.values()))

    @property
    def score(self) -> Tensor:
        """What was explained, one number per row: of a target that is not linear gradient x output, as `notes` say."""
        dim = row_dim(self.seed, self.batch_dim)
        if dim is None:
            return self.seed.sum()[None] if self.seed.dim() else self.seed
        return self.seed.movedim(dim, 0).reshape(len(self), -1).sum(1)

    @property
    def account(self) -> Account:
        """Score, what reached the inputs, and what was kept (by whom, if a ledger was asked for)."""
        if self.ledger is not None:
            return Account(self.ledger.total, self.ledger.delivered, dict(self.ledger.kept), self.notes)
        delivered = sum(float(r.double().sum()) for r in self.relevances.values())
        return Account(float(self.seed.double().sum()), delivered, notes=self.notes)

    def __len__(self) -> int:
        """Rows."""
        dim = row_dim(self.seed, self.batch_dim)
        return 1 if dim is None else self.seed.shape[dim]

    def __getitem__(self, row: int) -> Attribution:
        """One row, as an attribution of its own, whose tensors have that row first."""
        if not isinstance(row, int) or not -len(self) <= row < len(self):
            raise IndexError(
                f"row {row!r}: expected a number below {len(self)}, the rows of the output of shape {tuple(self.seed.shape)}"
            )
        if len(self) == 1 and not self.batch_dim:
            return self
        row %= len(self)
        outer, inner = row_dim(self.seed, self.batch_dim) or 0, self.batch_dim or 0

        def rows(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            fit = {name: t for name, t in tensors.items() if t.dim() > inner and t.shape[inner] == len(self)}
            return {name: t.narrow(inner, row, 1).movedim(inner, 0) for name, t in fit.items()}

        if not rows(self.relevances):
            shapes = ", ".join(f"{name} {tuple(r.shape)}" for name, r in self.relevances.items())
            raise ValueError(
                f"row {row}: no input has the output's {len(self)} rows in dimension {inner} ({shapes}). Where rows stand "
                "elsewhere, say so when you explain: batch_dim=1 for [positions, rows, …]."
            )
        each = self.target.tolist() if isinstance(self.target, Tensor) and self.target.dim() == 1 else self.target
        return replace(
            self,
            relevances=rows(self.relevances),
            layers=rows(self.layers),
            prediction=self.prediction.narrow(outer, row, 1).movedim(outer, 0),
            seed=self.seed.narrow(outer, row, 1).movedim(outer, 0),
            batch_dim=self.batch_dim and 0,
            target=each[row] if isinstance(each, list) and len(each) == len(self) else self.target,
            ledger=None,  # one for all rows
            media={name: media[row : row + 1] for name, media in self.media.items()},
            answers=self.answers[row : row + 1],
        )

    def seen_as(self, **media: Medium | tuple[Medium, ...]) -> Attribution:
        """The same relevance, with what its inputs are to a person: `a.seen_as(input_ids=Tokens.of([...]))`."""
        unknown = [name for name in media if name not in self.relevances]
        if unknown:
            raise KeyError(f"no input {unknown[0]!r} was explained. Known: {', '.join(self.relevances)}")
        rows = {name: medium if isinstance(medium, tuple) else (medium,) for name, medium in media.items()}
        for name, each in rows.items():
            if len(each) != len(self.relevances[name]):
                raise ValueError(
                    f"{len(each)} media for {len(self.relevances[name])} rows of {name!r}: expected one each"
                )
        return replace(self, media={**self.media, **rows})

    # Parts ----------------------------------------------------------------------------------------------------------

    def parts(self, *, words: bool = False) -> list[Part]:
        """Every part of every input that has a name of its own: tokens (or words), columns, regions of pictures, times.

        Padding that carries nothing is left out. Beside inputs that a person can look at, others (segment ids, say) are one
        part each.
        """
        return [
            part
            for name in self.relevances
            for row in range(len(self._rows(name)))
            for part in self._parts(name, row, words)
        ]

    def _parts(self, name: str, row: int, words: bool) -> list[Part]:
        values = self._rows(name)[row]
        if self.media and name not in self.media:
            return [Part(name, row, None, name, float(values.double().sum()))]
        return parts_of(name, row, values, self.media[name][row] if self.media else None, words)

    def _rows(self, name: str) -> Tensor:
        relevance, dim = self.relevances[name], self.batch_dim or 0
        return relevance.movedim(dim, 0) if relevance.dim() > dim else relevance[None]

    def words(self) -> list[Part]:
        """Tokens added up to words; other inputs' parts as they are."""
        return self.parts(words=True)

    def top(self, k: int = 10, *, words: bool = False) -> list[Part]:
        """The k parts with the largest relevance, whatever its sign."""
        if not isinstance(k, int) or k < 1:
            raise ValueError(f"top({k!r}): expected a positive number of parts")
        return sorted(self.parts(words=words), key=lambda part: -abs(part.relevance))[:k]

    def pool(self, size: int, name: str | None = None) -> Tensor:
        """Channels added up, and patches of size x size pixels: [rows, height / size, width / size]."""
        chosen = name or next((n for n, r in self.relevances.items() if r.dim() == 4), next(iter(self.relevances)))
        relevance = self._named(chosen)
        if relevance.dim() not in (3, 4):
            raise ValueError(f"{chosen!r} has shape {tuple(relevance.shape)}: expected a batch of pictures [rows, channels, height, width]")  # fmt: skip
        maps = relevance.sum(1) if relevance.dim() == 4 else relevance
        return torch.stack([pool(heat, size) for heat in maps])

    def heat_map(self, name: str | None = None, row: int = 0, *, original: bool = True) -> Tensor:
        """Relevance [height, width] of a picture, channels added up; in the original picture's pixels where that is known."""
        chosen = name or next((n for n, m in self.media.items() if m and isinstance(m[0], Picture)), None)
        chosen = chosen or next((n for n, r in self.relevances.items() if r.dim() == 4), next(iter(self.relevances)))
        relevance = self._named(chosen)[row].detach().cpu()
        if relevance.dim() not in (2, 3):
            raise ValueError(f"{chosen!r} has rows of shape {tuple(relevance.shape)}: expected pictures [channels, height, width]")  # fmt: skip
        heat = relevance.sum(0) if relevance.dim() == 3 else relevance
        medium = self.media[chosen][row] if chosen in self.media else None
        return medium.original(heat) if original and isinstance(medium, Picture) else heat

    def _named(self, name: str) -> Tensor:
        if name not in self.relevances:
            raise KeyError(f"no input {name!r} was explained. Known: {', '.join(self.relevances)}")
        return self.relevances[name]

    # Other forms ----------------------------------------------------------------------------------------------------

    def to_pandas(self, *, words: bool = False) -> Any:
        """A DataFrame with one line per part: input, row, index, label, relevance."""
        return frame_of(self.parts(words=words))

    def to_dict(self, *, k: int | None = None) -> dict[str, Any]:
        """Plain values for JSON: what was explained, the account, the parts (the largest k, or all)."""
        account = self.account
        rows = []
        for row in range(len(self)):
            one = self[row]
            answer = one.answers[0] if one.answers else None
            parts = one.parts() if k is None else one.top(k)
            rows.append({
                "answer": answer.label if answer else None,
                "contrast": answer.contrast if answer else None,
                "probability": answer.probability if answer else None,
                "score": float(one.seed.double().sum()),
                "parts": [{"input": p.input, "index": p.index, "label": p.label, "relevance": p.relevance} for p in parts],
            })  # fmt: skip
        return {
            **self.about,
            **({"output": self.output} if self.output else {}),
            **({"notes": list(self.notes)} if self.notes else {}),
            "preset": self.preset.name,
            "account": {"total": account.total, "delivered": account.delivered, "kept": dict(account.kept), "residual": account.residual},
            "rows": rows,
        }  # fmt: skip

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {tuple(r.shape)}" for name, r in self.relevances.items())
        total = sum(float(r.sum()) for r in self.relevances.values())
        target = "; ".join(map(str, self.answers)) if self.answers else self.target
        output = f"output={self.output}, " if self.output else ""
        notes = "".join(f"; {note}" for note in self.notes)
        return (
            f"Attribution({shapes}; {output}target={target}, score={float(self.seed.sum()):.4g}, "
            f"sum of relevance={total:.4g}, preset={self.preset.name}{notes})"
        )


def frame_of(parts: list[Part]) -> Any:
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to_pandas() needs pandas: pip install pandas") from error
    columns = ["input", "row", "index", "label", "relevance"]
    return pandas.DataFrame([[getattr(part, column) for column in columns] for part in parts], columns=columns)


def sinks(tokens: Tokens, values: list[float]) -> list[int]:
    """Tokens whose relevance is shown on its own: special ones, padding, and a first token that outweighs all others.

    A colour scale made by them would leave everything else pale, and leaving them out would hide where relevance went.
    """
    own = [i for i, kind in enumerate(tokens.kinds) if kind in (SPECIAL, PADDING)]
    first = next((i for i, kind in enumerate(tokens.kinds) if kind == FIRST), None)
    if first is not None:
        rest = max((abs(v) for i, v in enumerate(values) if i != first and i not in own), default=0.0)
        if abs(values[first]) > 1.5 * rest:
            own.append(first)
    return sorted(own)

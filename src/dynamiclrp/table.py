"""`explain_table`: which columns a model's answer for a row of numbers stands on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .attribution import Answer, Attribution
from .errors import TargetError
from .explain import explain
from .heads import class_names, label_index
from .media import Table
from .outputs import unwrap
from .presets import Preset


def explain_table(
    model: nn.Module,
    rows: Any,
    *,
    columns: Sequence[str] | None = None,
    cells: Sequence[Sequence[Any]] | None = None,
    target: int | str | None = None,
    contrast: int | str | None = None,
    classes: Sequence[str] | Mapping[int, str] | None = None,
    preset: str | Preset = "default",
    ledger: bool = False,
) -> Attribution:
    """Explain a model of columns by the columns it read.

    `rows`: a float tensor [rows, columns] (or one row), a DataFrame or a dict of column → number. `cells` is what the
    page shows in place of the numbers, if they were scaled for the model.

    >>> import torch, dynamiclrp as dlrp
    >>> a = dlrp.explain_table(torch.nn.Linear(2, 3), {"age": 0.4, "income": -1.2}, target=1)
    >>> sorted(part.label for part in a.parts())
    ['age', 'income']
    """
    values, names = _values(rows, columns)
    values = values.to(next(model.parameters()).device)
    known = class_names(model, classes)
    answers: list[Answer] = []
    chosen: list[Any] = []

    def ask(output: Tensor) -> Tensor:
        scores = output if output.dim() == 2 else output.reshape(len(values), -1)
        labels = {i: known.get(i, str(i)) for i in range(scores.shape[1])}
        against = None if contrast is None else label_index(contrast, labels)
        picked = []
        for row in scores:
            index = int(row.argmax()) if target is None else label_index(target, labels)
            if index == against:
                raise TargetError(f"contrast {contrast!r} is the target itself: there is no difference to explain")
            picked.append(row[index] if against is None else row[index] - row[against])
            chosen.append(index if against is None else (index, against))
            chance = float(row.detach().float().softmax(-1)[index]) if len(row) > 1 else None
            name = labels[index] if len(row) > 1 or index in known else "output"
            answers.append(Answer(name, chance, None if against is None else labels[against]))
        return torch.stack(picked)

    a = explain(model, values, target=ask, preset=preset, ledger=ledger, output=unwrap)
    shown = cells if cells is not None else [[f"{v:.4g}".replace("-", "−") for v in row] for row in values.tolist()]
    if len(shown) != len(values) or any(len(row) != len(names) for row in shown):
        raise ValueError(f"cells: expected {len(values)} rows of {len(names)} cells, as the input has")
    media = tuple(Table(names, tuple(str(cell) for cell in row)) for row in shown)
    name = next(iter(a.relevances))
    return replace(
        a,
        target=chosen,
        media={name: media},
        answers=tuple(answers),
        about={"model": type(model).__name__, "task": "table"},
    )


def _values(rows: Any, columns: Sequence[str] | None) -> tuple[Tensor, tuple[str, ...]]:
    names: Sequence[Any] | None = columns
    if isinstance(rows, Mapping):
        names, rows = names or list(rows), torch.tensor([[float(v) for v in rows.values()]])
    elif hasattr(rows, "columns") and hasattr(rows, "to_numpy"):  # a DataFrame
        names, rows = names or list(rows.columns), torch.tensor(rows.to_numpy(dtype="float32"))
    values = torch.as_tensor(rows)
    values = values[None] if values.dim() == 1 else values
    if values.dim() != 2 or not values.is_floating_point():
        raise ValueError(
            f"rows: a tensor of shape {tuple(values.shape)} and {values.dtype}; expected floats [rows, columns]"
        )
    names = names or [f"column {i}" for i in range(values.shape[1])]
    if len(names) != values.shape[1]:
        raise ValueError(f"{len(names)} names for {values.shape[1]} columns: expected one each")
    return values, tuple(str(name) for name in names)

"""Methods against each other, on the same inputs, in one call: `compare` → `Comparison`.

Batch by batch: explain with every method, rank, perturb, store. Nothing but finished numbers is kept between batches.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import EvaluationError
from .comparison import Comparison
from .cost import Spent, gradient_times_input, timed
from .data import Batch, batches, count
from .fills import Fill, find_fill
from .methods import Method, Ours, find_methods
from .perturb import Perturber, tie_seed
from .progress import Progress
from .store import Store
from .subject import Measure, Subject, warn_training
from .units import Unit, find_unit


def compare(
    model: Callable[..., Any],
    data: Any,
    methods: Any = ("default", "gradient", "random"),
    targets: Any = None,
    *,
    unit: str | Unit | None = None,
    fill: str | Fill | Callable[[Tensor], Tensor] | None = None,
    measure: Measure = "probability",
    step: int | None = None,
    batch_size: int | None = None,
    explain_batch_size: int = 8,
    limit: int | None = None,
    seed: int = 0,
    store: str | os.PathLike[str] | None = None,
    on_error: str = "record",
    input: str | None = None,
    embedding: str | None = None,
    progress: bool | None = None,
) -> Comparison:
    """Explain every input with every method and measure how well each ranks what the model looks at.

    `methods`: preset names, Presets, "captum:NAME", "zennit:NAME", "random", functions; or a mapping from labels to those.
    `unit`, `fill`, `measure`, `step`: as for `perturb`. `explain_batch_size` inputs are explained together, `batch_size`
    perturbed inputs run together (by default 64, on a CPU 8). `store`: a file that finished inputs are appended to, and skipped from in a second run.
    A method that fails on an input is reported beside the table, or raised at once with `on_error="raise"`.

    >>> import torch
    >>> from dynamiclrp.evaluate import compare
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).eval()
    >>> found = compare(model, torch.randn(6, 8), methods=["epsilon", "random"], measure="logit")
    >>> sorted(row["method"] for row in found.rows)
    ['epsilon', 'random']
    """
    if on_error not in ("record", "raise"):
        raise EvaluationError(f"on_error={on_error!r}: expected 'record' or 'raise'")
    warn_training(model)
    chosen = find_methods(methods)
    found: dict[tuple[int, str], dict[str, Any]] = {}
    kept: Store | None = None
    setup: dict[str, Any] = {}
    reader = Subject(model)
    total = count(data, limit)
    seen: set[int] = set()
    warm = False
    with ExitStack() as stack:
        bar = stack.enter_context(Progress("comparing", total and total * len(chosen), progress))
        for batch in batches(reader, data, targets, explain_batch_size, name=input, limit=limit):
            if not setup:
                unit_, fill_ = find_unit(unit, batch.inputs.explained), find_fill(fill, batch.inputs.explained)
                subject = Subject(model, measure=measure, embedding=embedding, hidden=unit_.hidden)
                setup = describe(model, unit_, fill_, measure, step, seed)
                if store is not None:
                    kept = stack.enter_context(Store(store, setup))
                    found.update(_finished(kept, chosen))
            seen.update(batch.indices)
            digests = {index: batch.digest(row) for row, index in enumerate(batch.indices)}
            _check_data(found, digests, chosen, store)
            left = [row for row, i in enumerate(batch.indices) if any((i, m.name) not in found for m in chosen)]
            bar.advance((len(batch) - len(left)) * len(chosen))
            if not left:
                continue
            if not warm and isinstance(model, nn.Module):
                _warm_up(subject, batch, chosen)
                warm = True
            run = _Run(subject, batch.pick(left), unit_, fill_, step, batch_size, seed, on_error)
            new: list[dict[str, Any]] = []
            for method in chosen:
                new += run.results(method, digests, found)
                bar.advance(len(left), f"comparing: {method.name}")
            if kept is not None:
                kept.add(new)
            found.update({(r["input"], r["method"]): r for r in new})
    result = Comparison(
        tuple(m.name for m in chosen), setup, tuple(found[key] for key in sorted(found) if key[0] in seen)
    )
    if all(result.errors(m.name) and not result.of(m.name) for m in chosen):
        raise EvaluationError(f"every method failed on every input; the first: {result.errors(chosen[0].name)[0]}")
    return result


class _Run:
    """One batch: its perturbed ends and reference cost are shared by all methods."""

    def __init__(
        self,
        subject: Subject,
        batch: Batch,
        unit: Unit,
        fill: Fill,
        step: int | None,
        batch_size: int | None,
        seed: int,
        on_error: str,
    ) -> None:
        self.subject, self.batch, self.seed, self.on_error = subject, batch, seed, on_error
        self.device = batch.inputs.explained.device
        self.targets = subject.predict(batch.inputs) if batch.targets is None else batch.targets
        self.perturber = Perturber(subject, batch.inputs, self.targets, unit, fill, step=step, batch_size=batch_size)
        self.scores: list[float | None] = [None] * len(batch)  # outputs that only the user's measure can read have none
        if not callable(subject.measure):
            logit = Subject(subject.model, measure="logit", hidden=tuple(subject.hidden))
            with torch.no_grad():
                raw = logit.call(batch.inputs, self.targets)
                self.scores = list(logit.score(raw, batch.inputs, self.targets).tolist())
        self.reference = None
        if isinstance(subject.model, nn.Module):
            _, self.reference = timed(lambda: gradient_times_input(subject, batch.inputs, self.targets), self.device)

    def results(
        self, method: Method, digests: dict[int, str], finished: dict[tuple[int, str], dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """A method's records for the rows that do not have one yet."""
        indices, rows = self.batch.indices, len(self.batch)
        wanted = [row for row in range(rows) if (indices[row], method.name) not in finished]
        if not wanted:
            return []
        base = [
            {"input": i, "method": method.name, "data": digests[i], "about": about(method), "target": t}
            for i, t in zip(indices, self.targets.tolist())
        ]
        spent = _Total()
        found, failed = self._explain(method, list(range(rows)), spent)
        records = [base[row] | {"error": failed[row]} for row in wanted if row in failed]
        good = [row for row in wanted if row in found]
        if not good:
            return records
        nothing = torch.zeros_like(found[good[0]][0])
        scores = torch.stack([found[row][0] if row in found else nothing for row in range(rows)])
        ranking = self.perturber.ranking(scores, [tie_seed(self.seed, i) for i in indices])
        curves = self.perturber.curves(ranking, rows=good)
        shared: dict[str, Any] = {
            "seconds": spent.seconds / rows,
            "memory": spent.memory,
            "rows": rows,
        }
        if self.reference is not None:
            shared |= {"reference_seconds": self.reference.seconds / rows, "reference_memory": self.reference.memory}
        return records + [
            base[row]
            | {
                "fractions": curves.fractions[place].tolist(),
                "morf": curves.morf[place].tolist(),
                "lerf": curves.lerf[place].tolist(),
                "score": self.scores[row],
                "relevance": found[row][1],
            }
            | shared
            for place, row in enumerate(good)
        ]

    def _explain(
        self, method: Method, rows: list[int], spent: _Total
    ) -> tuple[dict[int, tuple[Tensor, float]], dict[int, str]]:
        """Scores of units and the sum of relevance by row, and why there are none. A batch that fails is taken apart, so
        that one bad input costs no others."""
        batch = self.batch.pick(rows) if len(rows) < len(self.batch) else self.batch
        targets = self.targets[torch.tensor(rows, device=self.targets.device)]
        try:
            relevance, cost = timed(
                lambda: method.relevance(self.subject, batch.inputs, targets, batch.indices), self.device
            )
            spent.add(cost)
            if len(relevance) != len(rows):
                raise EvaluationError(f"method {method.name!r} gave {len(relevance)} rows of relevance for {len(rows)}")
            scores = self.perturber.layout.scores(relevance)
        except Exception as error:  # other packages raise anything; it is reported, beside the table or at once
            if self.on_error == "raise":
                raise
            if len(rows) == 1:
                return {}, {rows[0]: f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
            half = len(rows) // 2
            parts = [self._explain(method, part, spent) for part in (rows[:half], rows[half:])]
            return {k: v for p, _ in parts for k, v in p.items()}, {k: v for _, p in parts for k, v in p.items()}
        sums = relevance.detach().cpu().double().flatten(1).sum(1).tolist()
        return {row: (scores[place], sums[place]) for place, row in enumerate(rows)}, {}


def _warm_up(subject: Subject, batch: Batch, methods: Sequence[Method]) -> None:
    """The first calls load kernels and make plans, which is not what explanations cost; whatever fails here will fail
    again where it is reported."""
    targets = subject.predict(batch.inputs) if batch.targets is None else batch.targets
    with suppress(Exception):
        gradient_times_input(subject, batch.inputs, targets)
    for method in methods:
        if isinstance(method, Ours):
            with suppress(Exception):
                method.relevance(subject, batch.inputs, targets, batch.indices)


@dataclass
class _Total:
    """What the calls for one batch took together."""

    seconds: float = 0.0
    memory: int | None = None

    def add(self, cost: Spent) -> None:
        self.seconds += cost.seconds
        if cost.memory is not None:
            self.memory = max(self.memory or 0, cost.memory)


def about(method: Method) -> str:
    """A short mark of what a method does, to tell it from another of the same name."""
    return hashlib.blake2b(method.describe().encode(), digest_size=6).hexdigest()


def describe(
    model: Callable[..., Any], unit: Unit, fill: Fill, measure: Measure, step: int | None, seed: int
) -> dict[str, Any]:
    """What decides the numbers, in words that can be compared later."""
    return {
        "model": fingerprint(model),
        "unit": repr(unit),
        "fill": repr(fill),
        "measure": measure if isinstance(measure, str) else getattr(measure, "__qualname__", type(measure).__name__),
        "step": step,
        "seed": seed,
    }


def fingerprint(model: Callable[..., Any]) -> str:
    """A model's class and weights; sums of raw bits, so that they cost little and are the same on every device."""
    if not isinstance(model, nn.Module):
        return getattr(model, "__qualname__", type(model).__name__)
    found = hashlib.blake2b(digest_size=8)
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            continue
        kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(value.element_size())
        bits = value.detach().contiguous().view(kind).sum(dtype=torch.int64) if kind and value.dim() else value
        found.update(f"{name} {tuple(value.shape)} {bits.item() if bits.numel() == 1 else ''}".encode())
    return f"{type(model).__name__} {found.hexdigest()}"


def _finished(store: Store, methods: Sequence[Method]) -> dict[tuple[int, str], dict[str, Any]]:
    marks = {method.name: about(method) for method in methods}
    found = {}
    for record in store.records:
        name = record["method"]
        if name not in marks or "error" in record:
            continue  # another run's method, or one that failed: tried again
        if record["about"] != marks[name]:
            raise EvaluationError(
                f"{store.path} holds results of another method under the name {name!r} (its rules or parameters changed). "
                "Give yours another label, methods={'label': …}, or use another path."
            )
        found[record["input"], name] = record
    return found


def _check_data(
    found: dict[tuple[int, str], dict[str, Any]], digests: dict[int, str], methods: Sequence[Method], store: Any
) -> None:
    for index, digest in digests.items():
        for method in methods:
            record = found.get((index, method.name))
            if record is not None and record["data"] != digest:
                raise EvaluationError(
                    f"{store} holds a result of {method.name!r} for input {index}, but the data has another input there now. "
                    "Use another path, or the same data in the same order."
                )

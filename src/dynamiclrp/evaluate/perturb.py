"""Perturbation curves: remove units in the order of their relevance and watch the score.

In: a model, inputs, relevance. Out: `Curves`, one pair per input. MoRF removes the most relevant first (a good
explanation makes the score fall fast), LeRF the least relevant first (it stays high for long). Both begin at the untouched
input and end with every unit removed; x is the fraction removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attribution import Attribution
from ..errors import EvaluationError
from .fills import Fill, find_fill
from .metrics import METRICS, Interval, bootstrap, on_grid
from .progress import Progress
from .subject import Inputs, Measure, Subject, read_targets, warn_training
from .units import Layout, Unit, find_unit

STEPS = 50  # of a curve, where the user does not say how many units go at once


@dataclass(frozen=True, eq=False)
class Curves:
    """MoRF and LeRF curves, one pair per input. Their lengths differ where inputs have different numbers of units."""

    fractions: tuple[Tensor, ...]  # of the units removed, from 0 to 1
    morf: tuple[Tensor, ...]
    lerf: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.fractions)

    def metric(self, name: str = "abpc") -> Tensor:
        """One number per input; the names and scales are in `METRICS`."""
        if name not in METRICS:
            raise EvaluationError(f"unknown metric {name!r}. Known: {', '.join(METRICS)}")
        together: dict[tuple[float, ...], list[int]] = {}  # inputs with the same points go in one step
        for row, points in enumerate(self.fractions):
            together.setdefault(tuple(points.tolist()), []).append(row)
        found = torch.empty(len(self), dtype=torch.float64)
        for rows in together.values():
            morf, lerf = (torch.stack([curves[row].double() for row in rows]) for curves in (self.morf, self.lerf))
            found[rows] = METRICS[name].function(self.fractions[rows[0]].double(), morf, lerf)
        return found

    def interval(self, name: str = "abpc", *, seed: int = 0) -> Interval:
        """The mean over inputs with its bootstrap interval."""
        return bootstrap(self.metric(name), seed=seed)

    def mean(self, points: int = 101) -> tuple[Tensor, Tensor, Tensor]:
        """Fractions and the mean MoRF and LeRF curves on one grid."""
        grid = torch.linspace(0, 1, points, dtype=torch.float64)
        return grid, on_grid(grid, self.fractions, self.morf).mean(0), on_grid(grid, self.fractions, self.lerf).mean(0)

    def __add__(self, other: Curves) -> Curves:
        return Curves(self.fractions + other.fractions, self.morf + other.morf, self.lerf + other.lerf)


@dataclass(frozen=True, eq=False)
class Ranking:
    """When each unit goes, MoRF, first = 0; units that may never go rank at infinity."""

    ranks: Tensor  # [rows, units] on the CPU
    counts: Tensor  # units of each row that may go

    @staticmethod
    def of(scores: Tensor, allowed: Tensor | None, seeds: Sequence[int]) -> Ranking:
        """Ties are broken at random, by seed: a constant explanation must rank like chance, not like reading order."""
        rows, units = scores.shape
        shuffled = torch.stack([torch.randperm(units, generator=torch.Generator().manual_seed(s)) for s in seeds])
        values = scores.gather(1, shuffled)
        if allowed is not None:
            values = values.masked_fill(~allowed.gather(1, shuffled), -torch.inf)
        order = shuffled.gather(1, values.argsort(dim=1, descending=True, stable=True))
        ranks = torch.empty_like(order).scatter_(1, order, torch.arange(units).expand(rows, -1))
        counts = torch.full((rows,), units) if allowed is None else allowed.sum(1)
        if bool((counts == 0).any()):
            raise EvaluationError(f"row {int((counts == 0).nonzero()[0])} has no unit that may be removed")
        return Ranking(ranks, counts)

    def to(self, device: torch.device) -> Ranking:
        return Ranking(self.ranks.to(device, torch.int32), self.counts.to(device, torch.int32))

    def removed(self, rows: Tensor, numbers: Tensor, least_first: Tensor) -> Tensor:
        """Which units are gone after `numbers` were removed from `rows`: [pairs, units]."""
        ranks, counts, numbers = self.ranks[rows], self.counts[rows, None], numbers[:, None]
        return torch.where(least_first[:, None], (ranks >= counts - numbers) & (ranks < counts), ranks < numbers)


class Perturber:
    """A batch of inputs, ready to be perturbed in any order.

    The ends of all curves (nothing and everything removed) are measured once and shared by all rankings.
    """

    def __init__(
        self,
        subject: Subject,
        inputs: Inputs,
        targets: Tensor,
        unit: Unit,
        fill: Fill,
        *,
        step: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        if (batch_size is not None and batch_size < 1) or (step is not None and step < 1):
            raise EvaluationError(f"step={step}, batch_size={batch_size}: expected 1 or more")
        self.subject, self.inputs, self.targets = subject, inputs, targets
        # on a CPU large batches only cost page faults: measured, 34 ms an image in fours and 95 ms in batches of 64
        self.step, self.batch_size = step, batch_size or (8 if inputs.explained.device.type == "cpu" else 64)
        self.layout: Layout = unit.layout(inputs.explained)
        self.allowed = unit.allowed(inputs.explained, inputs.values, self.layout)
        self.filled = fill.filled(inputs, subject.model)
        self._ends: dict[tuple[int, int], float] = {}

    def ranking(self, scores: Tensor, seeds: Sequence[int]) -> Ranking:
        """The order of units by their scores, which `layout.scores` makes of relevance."""
        return Ranking.of(scores, self.allowed, seeds)

    def numbers(self, count: int) -> Tensor:
        """How many units are gone at each point of the curve."""
        step = self.step or -(-count // STEPS)
        return torch.cat([torch.arange(0, count, step), torch.tensor([count])])

    def curves(
        self, ranking: Ranking, tick: Callable[[int], None] | None = None, rows: Sequence[int] | None = None
    ) -> Curves:
        """Both curves of the rows (by default all), in batches over rows, steps and orders alike."""
        wanted = range(len(ranking.counts)) if rows is None else rows
        numbers = {row: self.numbers(int(ranking.counts[row])) for row in wanted}
        pairs = [
            (row, int(n), least)
            for row, points in numbers.items()
            for n in points.tolist()
            for least in ((False, True) if 0 < n < points[-1] else (False,))
            if (row, n) not in self._ends
        ]
        ranking = ranking.to(self.inputs.explained.device)
        found: dict[tuple[int, int, bool], float] = {}
        for start in range(0, len(pairs), self.batch_size):
            part = pairs[start : start + self.batch_size]
            found.update(zip(part, self._measure(ranking, part)))
            if tick is not None:
                tick(len(part))
        for (row, n, _), value in found.items():
            if n == 0 or n == int(numbers[row][-1]):
                self._ends[row, n] = value

        def curve(row: int, least: bool) -> Tensor:
            values = [
                self._ends[row, n] if (row, n) in self._ends else found[row, n, least] for n in numbers[row].tolist()
            ]
            return torch.tensor(values, dtype=torch.float64)

        return Curves(
            tuple(numbers[row].double() / numbers[row][-1] for row in wanted),
            tuple(curve(row, False) for row in wanted),
            tuple(curve(row, True) for row in wanted),
        )

    def passes(self, ranking: Ranking) -> int:
        """How many perturbed inputs `curves` will run."""
        return sum(2 * len(self.numbers(int(n))) - 2 for n in ranking.counts) - len(self._ends)

    @torch.no_grad()
    def _measure(self, ranking: Ranking, pairs: list[tuple[int, int, bool]]) -> list[float]:
        device = self.inputs.explained.device
        rows, numbers, least = torch.tensor(pairs, device=device).T
        mask = self.layout.mask(ranking.removed(rows, numbers, least.bool()))
        inputs, targets = self.inputs.pick(rows), self.targets[rows.to(self.targets.device)]
        if self.filled is None:
            raw = self.subject.call_embedded(inputs, targets, lambda e: e.masked_fill(mask[..., None], 0))
        else:
            inputs = inputs.put(torch.where(mask, self.filled[rows], inputs.explained))
            raw = self.subject.call(inputs, targets)
        scores = self.subject.score(raw, inputs, targets)
        if not bool(torch.isfinite(scores).all()):
            raise EvaluationError("the model's score is nan or inf on perturbed inputs: choose another fill or measure")
        return scores.tolist()


def perturb(
    model: Callable[..., Any],
    inputs: Any,
    relevance: Tensor | Attribution,
    targets: Any = None,
    *,
    unit: str | Unit | None = None,
    fill: str | Fill | Callable[[Tensor], Tensor] | None = None,
    measure: Measure = "probability",
    step: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    input: str | None = None,
    embedding: str | None = None,
    progress: bool | None = None,
) -> Curves:
    """MoRF and LeRF curves of a model for relevance from anywhere: a tensor, rows first, or an `Attribution`.

    `unit`: pixel, region, patch, token, feature or an object (`Regions(14)`). `fill`: blur, mean, zero, pad, mask, an
    object (`Blur(51, 20)`) or a function. `measure`: probability, logit, accuracy or `function(output, targets)`.
    `step` units go at once (by default so many that curves have 50 steps); `batch_size`
    perturbed inputs run together (by default 64, on a CPU 8). `targets`: one per row; by default what the
    model answers.

    >>> import torch
    >>> from dynamiclrp.evaluate import perturb
    >>> model, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
    >>> curves = perturb(model, x, relevance=x * model.weight[0], targets=[0, 0, 0], measure="logit")
    >>> curves.morf[0].shape, curves.metric("abpc").shape
    (torch.Size([5]), torch.Size([3]))
    """
    warn_training(model)
    batch = Subject(model).read(inputs, input)
    found = find_unit(unit, batch.explained)
    subject = Subject(model, measure=measure, embedding=embedding, hidden=found.hidden)
    wanted = subject.predict(batch) if targets is None else read_targets(targets, len(batch))
    perturber = Perturber(
        subject, batch, wanted, found, find_fill(fill, batch.explained), step=step, batch_size=batch_size
    )
    if isinstance(relevance, Attribution):
        relevance = relevance.relevances.get(batch.name, relevance.relevance)
    if len(relevance) != len(batch):
        raise EvaluationError(f"relevance for {len(relevance)} rows: there are {len(batch)} inputs")
    scores = perturber.layout.scores(relevance)
    ranking = perturber.ranking(scores, [tie_seed(seed, row) for row in range(len(batch))])
    with Progress("perturbing", perturber.passes(ranking), progress) as bar:
        return perturber.curves(ranking, bar.advance)


def tie_seed(seed: int, row: int) -> int:
    """A seed for one row, so that its result does not depend on the batch it is in."""
    return (seed * 1_000_003 + row) % 2**63

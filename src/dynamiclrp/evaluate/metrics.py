"""Numbers from perturbation curves, and how sure they are.

Scale: with f(x) the untouched score and every curve over the fraction removed (0 to 1), all areas here are **means over
the curve**: in the units of the score, 0..1 for probabilities. The names that end in `_paper` are 4 times as large, the
scale that the DynamicLRP paper's tables are on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import EvaluationError

PAPER_SCALE = 4.0
ERASER_BINS = (0.01, 0.05, 0.1, 0.2, 0.5)


def area(fractions: Tensor, values: Tensor) -> Tensor:
    """The mean of curves [..., points] over the fraction removed, by trapezes."""
    return torch.trapezoid(values, fractions, dim=-1)


def abpc(fractions: Tensor, morf: Tensor, lerf: Tensor) -> Tensor:
    """Area between LeRF and MoRF: the larger, the better the ranking; 0 for chance."""
    return area(fractions, lerf - morf)


def comprehensiveness(fractions: Tensor, morf: Tensor, lerf: Tensor) -> Tensor:
    """Area between the untouched score and MoRF: how much is lost without what is relevant (more is better)."""
    return area(fractions, morf[..., :1] - morf)


def sufficiency(fractions: Tensor, morf: Tensor, lerf: Tensor) -> Tensor:
    """Area between the untouched score and LeRF: how much is lost without what is irrelevant (less is better)."""
    return area(fractions, lerf[..., :1] - lerf)


def eraser_comprehensiveness(fractions: Tensor, morf: Tensor, lerf: Tensor) -> Tensor:
    """f(x) - f(x without the top q), averaged over q in `ERASER_BINS` (DeYoung et al. 2020): more is better.

    Between the points of a curve it is read linearly; with `step=1` no more than one unit lies between them.
    """
    return _aopc(fractions, morf, ERASER_BINS)


def eraser_sufficiency(fractions: Tensor, morf: Tensor, lerf: Tensor) -> Tensor:
    """f(x) - f(only the top q of x), averaged over `ERASER_BINS`: less is better. Keeping the top q is LeRF at 1 - q."""
    return _aopc(fractions, lerf, [1 - q for q in ERASER_BINS])


def _aopc(fractions: Tensor, curve: Tensor, at: Sequence[float]) -> Tensor:
    points = torch.tensor(list(at), dtype=torch.float64)
    return (curve[..., :1] - interpolate(points, fractions, curve)).mean(-1)


def interpolate(points: Tensor, fractions: Tensor, values: Tensor) -> Tensor:
    """The values of curves [..., points] between their points, linearly."""
    right = torch.searchsorted(fractions, points).clamp(1, len(fractions) - 1)
    x0, x1, y0, y1 = fractions[right - 1], fractions[right], values[..., right - 1], values[..., right]
    return y0 + (y1 - y0) * (points - x0) / (x1 - x0)


def on_grid(grid: Tensor, fractions: Sequence[Tensor], curves: Sequence[Tensor]) -> Tensor:
    """Curves of different lengths on one grid: [inputs, points]."""
    return torch.stack([interpolate(grid, x.double(), y.double()) for x, y in zip(fractions, curves)])


@dataclass(frozen=True)
class Metric:
    """A number per input, whether more or less of it is better, and its scale in words."""

    function: Callable[[Tensor, Tensor, Tensor], Tensor]
    more_is_better: bool
    scale: str


def _scaled(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda fractions, morf, lerf: PAPER_SCALE * function(fractions, morf, lerf)


_MEAN, _PAPER, _BINS = "mean over the curve", "4 x the mean over the curve", f"mean over the top {ERASER_BINS}"
METRICS: dict[str, Metric] = {
    "abpc": Metric(abpc, True, _MEAN),
    "comprehensiveness": Metric(comprehensiveness, True, _MEAN),
    "sufficiency": Metric(sufficiency, False, _MEAN),
    "abpc_paper": Metric(_scaled(abpc), True, _PAPER),
    "comprehensiveness_paper": Metric(_scaled(comprehensiveness), True, _PAPER),
    "sufficiency_paper": Metric(_scaled(sufficiency), False, _PAPER),
    "eraser_comprehensiveness": Metric(eraser_comprehensiveness, True, _BINS),
    "eraser_sufficiency": Metric(eraser_sufficiency, False, _BINS),
}


def decimals(values: Sequence[float]) -> int:
    """How many to show, so that the largest of the numbers has three digits."""
    largest = max((abs(value) for value in values), default=0.0)
    return min(8, max(0, 2 - math.floor(math.log10(largest)))) if largest else 3


# ------------------------------------------------------------------------------------------------------------- certainty


@dataclass(frozen=True)
class Interval:
    """A mean over inputs with a bootstrap interval."""

    mean: float
    low: float
    high: float
    n: int
    level: float = 0.95

    def __str__(self) -> str:
        return f"{self.mean:.4g} " + (f"[{self.low:.4g}, {self.high:.4g}]" if self.n > 1 else "(one input)")

    def __contains__(self, value: float) -> bool:
        return self.n < 2 or self.low <= value <= self.high  # one input says nothing of others


def bootstrap(
    values: Tensor | Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """The mean of one number per input, with the percentile interval of means over resampled inputs.

    >>> bootstrap([1.0, 2.0, 3.0, 4.0]).mean
    2.5
    """
    data = torch.as_tensor(values, dtype=torch.float64).flatten()
    return bootstrap_columns(data[:, None], level=level, resamples=resamples, seed=seed)[0]


def bootstrap_columns(data: Tensor, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0) -> list[Interval]:
    """The same for several numbers per input, [inputs, numbers], resampled together."""
    n = len(data)
    if not n:
        raise EvaluationError("an interval of no inputs: there is nothing to resample")
    if not 0 < level < 1:
        raise EvaluationError(f"level={level}: expected a number between 0 and 1, such as 0.95")
    generator = torch.Generator().manual_seed(seed)
    means = []
    for start in range(0, resamples, 1_000):  # in parts: resamples x inputs numbers would not fit for many inputs
        rows = min(1_000, resamples - start)
        drawn = torch.randint(n, (rows, n), generator=generator)
        times = torch.zeros(rows, n, dtype=torch.float64).scatter_add_(
            1, drawn, torch.ones(rows, n, dtype=torch.float64)
        )
        means.append(times @ data / n)
    tail = (1 - level) / 2
    low, high = torch.cat(means).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=0)
    ends = zip(data.mean(0).tolist(), low.tolist(), high.tolist())
    return [Interval(mean, a, b, n, level) for mean, a, b in ends]


def paired_difference(
    ours: Tensor | Sequence[float], theirs: Tensor | Sequence[float], *, level: float = 0.95, seed: int = 0
) -> Interval:
    """The mean of ours - theirs on the same inputs, with its bootstrap interval; a real difference excludes 0.

    >>> 0 in paired_difference([1.0, 2.0, 3.0], [0.5, 1.0, 2.0])
    False
    """
    a, b = torch.as_tensor(ours, dtype=torch.float64), torch.as_tensor(theirs, dtype=torch.float64)
    if a.shape != b.shape:
        raise EvaluationError(f"{len(a)} numbers against {len(b)}: a paired difference needs the same inputs")
    return bootstrap(a - b, level=level, seed=seed)

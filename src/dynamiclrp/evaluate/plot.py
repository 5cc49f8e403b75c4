"""Pictures of evaluations, by matplotlib. In: results. Out: a figure, and a file where a path is given."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .metrics import decimals, on_grid
from .packages import need

if TYPE_CHECKING:
    from .comparison import Comparison
    from .randomise import Randomisation

# Okabe and Ito's colours, told apart by colour-blind readers too; grey is for chance.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F3C8D", "#8C6D31", "#3F3F3F", "#B3B300")
GREY = "#9A9A9A"
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Look:
    """How a method is drawn."""

    colour: str
    line: str
    hatch: str


def plot_comparison(found: Comparison, path: str | os.PathLike[str] | None, methods: Sequence[str]) -> Any:
    """MoRF and LeRF side by side with bands (95 % of the mean), and a bar of ABPC per method."""
    figure_module, style = need("matplotlib.figure", "matplotlib"), need("matplotlib", "matplotlib")
    looks = looks_of(found.methods)
    grid = torch.linspace(0, 1, 101, dtype=torch.float64)
    measure = str(found.setup.get("measure", "score"))
    with style.rc_context(STYLE):
        figure = figure_module.Figure(figsize=(12.5, max(4.0, 1.6 + 0.3 * len(methods))), layout="constrained")
        morf, lerf, bars = figure.subplots(1, 3, width_ratios=(1, 1, 0.9))
        lerf.sharey(morf)
        for method in methods:
            curves = found.curves(method)
            for axis, values in ((morf, curves.morf), (lerf, curves.lerf)):
                rows = on_grid(grid, curves.fractions, values)
                mean = rows.mean(0)
                band = 1.96 * rows.std(0) / len(rows) ** 0.5 if len(rows) > 1 else torch.zeros_like(mean)
                look = looks[method]
                axis.plot(
                    grid.tolist(), mean.tolist(), color=look.colour, linestyle=look.line, linewidth=1.8, label=method
                )
                axis.fill_between(
                    grid.tolist(), (mean - band).tolist(), (mean + band).tolist(), color=look.colour, alpha=0.14 if len(methods) <= 6 else 0.07, linewidth=0
                )  # fmt: skip
        morf.set(title="Most relevant first (low is good)", xlabel="fraction removed", ylabel=measure, xlim=(0, 1))
        lerf.set(title="Least relevant first (high is good)", xlabel="fraction removed", xlim=(0, 1))
        lerf.tick_params(labelleft=False)
        _bars(bars, found, methods, looks)
        if path is not None:
            _write(figure, Path(path))
    return figure


def _bars(axis: Any, found: Comparison, methods: Sequence[str], looks: dict[str, Look]) -> None:
    intervals = [found.interval(method) for method in methods]
    places = list(range(len(methods)))[::-1]
    for place, method, interval in zip(places, methods, intervals):
        look = looks[method]
        axis.barh(
            place, interval.mean, color=look.colour, hatch=look.hatch, edgecolor="white", linewidth=0, height=0.62
        )
        axis.plot([interval.low, interval.high], [place, place], color="#222222", linewidth=1.2)
    reach = max(max(abs(i.low), abs(i.high)) for i in intervals) or 1.0
    digits = decimals([i.mean for i in intervals])
    for place, interval in zip(places, intervals):
        axis.text(max(interval.high, 0) + 0.02 * reach, place, f"{interval.mean:.{digits}f}", va="center", fontsize=9)
    axis.set_yticks(places, methods)
    low, high = min(0.0, *(i.low for i in intervals)), max(0.0, *(i.high for i in intervals))
    axis.set_xlim(low - 0.03 * reach, high + 0.22 * reach)  # room for the numbers
    axis.axvline(0, color="#222222", linewidth=0.8)
    axis.grid(axis="y", visible=False)
    axis.set(title="Area between (ABPC), 95 %", xlabel="mean over the curve")


def _write(figure: Any, path: Path) -> None:
    """Whole or not at all."""
    part = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        figure.savefig(part, dpi=160, facecolor="white")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def looks_of(names: Sequence[str]) -> dict[str, Look]:
    """A look per name: colours first, then the same colours dashed; chance is grey."""
    places = iter(range(len(names)))
    looks = {}
    for name in names:
        if name == "random":
            looks[name] = Look(GREY, "-", "")
        else:
            turn, place = divmod(next(places), len(COLOURS))
            looks[name] = Look(COLOURS[place], ("-", "--", ":")[turn % 3], ("", "////", "....")[turn % 3])
    return looks


def plot_randomisation(found: Randomisation, path: str | os.PathLike[str] | None, which: str) -> Any:
    """Rank correlation after each layer, one line per method with its interval."""
    figure_module, style = need("matplotlib.figure", "matplotlib"), need("matplotlib", "matplotlib")
    looks = looks_of(found.methods)
    places = range(len(found.layers) + 1)
    with style.rc_context(STYLE):
        figure = figure_module.Figure(figsize=(max(8.0, 4.0 + 0.22 * len(found.layers)), 4.6), layout="constrained")
        axis = figure.subplots()
        for method in found.methods:
            intervals = [found.interval(method, layer, which) for layer in found.layers]
            done = [(0, 1.0, 1.0, 1.0)] + [
                (i + 1, v.mean, v.low, v.high) for i, v in enumerate(intervals) if v is not None
            ]
            x, mean, low, high = zip(*done)
            look = looks[method]
            axis.plot(
                x, mean, color=look.colour, linestyle=look.line, linewidth=1.8, marker="o", markersize=3, label=method
            )
            axis.fill_between(x, low, high, color=look.colour, alpha=0.14, linewidth=0)
        axis.axhline(0, color="#222222", linewidth=0.8)
        axis.set_xticks(list(places), ["trained", *found.layers], rotation=60, ha="right", fontsize=8)
        down = "cascading" if found.mode == "cascading" else "one layer at a time"
        axis.set(title=f"Parameter randomisation, {down}", ylabel=f"Spearman correlation ({which})", ylim=(-0.6, 1.05))
        figure.legend(loc="outside right upper")
        if path is not None:
            _write(figure, Path(path))
    return figure

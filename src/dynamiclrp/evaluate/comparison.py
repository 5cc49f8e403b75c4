"""The result of `compare`: curves and costs per input and method, as a table, a plot, a file."""

from __future__ import annotations

import html
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import EvaluationError
from .metrics import METRICS, Interval, bootstrap, bootstrap_columns, decimals, paired_difference
from .packages import need
from .perturb import Curves

FORMAT = 1


@dataclass(frozen=True, eq=False)
class Comparison:
    """Methods on the same inputs.

    `records` are plain dicts, one per input and method: curves (`fractions`, `morf`, `lerf`), the explained `score`, the
    sum of `relevance`, `seconds` per input, or the `error` that a method ended in.
    """

    methods: tuple[str, ...]
    setup: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]] = field(repr=False)

    @cached_property
    def _finished(self) -> dict[str, dict[int, Mapping[str, Any]]]:
        found: dict[str, dict[int, Mapping[str, Any]]] = {method: {} for method in self.methods}
        for record in sorted(self.records, key=lambda record: record["input"]):
            if "error" not in record:
                found[record["method"]][record["input"]] = record
        return found

    def of(self, method: str) -> dict[int, Mapping[str, Any]]:
        """A method's finished records by input, in the data's order."""
        if method not in self.methods:
            raise EvaluationError(f"no method {method!r} here. Known: {', '.join(self.methods)}")
        return self._finished[method]

    def errors(self, method: str) -> list[str]:
        """Why a method gave nothing, one line per input that it failed on."""
        finished = self.of(method)
        return [
            r["error"] for r in self.records if r["method"] == method and "error" in r and r["input"] not in finished
        ]

    def curves(self, method: str) -> Curves:
        rows = self.of(method).values()
        part = {k: tuple(torch.tensor(r[k], dtype=torch.float64) for r in rows) for k in ("fractions", "morf", "lerf")}
        return Curves(part["fractions"], part["morf"], part["lerf"])

    def metric(self, method: str, name: str = "abpc") -> Tensor:
        """One number per finished input, in the data's order."""
        return self.curves(method).metric(name)

    def interval(self, method: str, name: str = "abpc") -> Interval:
        """Mean and bootstrap interval over the inputs."""
        return bootstrap(self.metric(method, name), seed=self._seed)

    def difference(self, ours: str, theirs: str, name: str = "abpc") -> Interval:
        """ours - theirs on the inputs that both finished, with a bootstrap interval: a real difference excludes 0."""
        shared = sorted(set(self.of(ours)) & set(self.of(theirs)))
        if not shared:
            raise EvaluationError(f"{ours!r} and {theirs!r} finished no input in common")
        places = [dict(zip(self.of(m), self.metric(m, name).tolist())) for m in (ours, theirs)]
        return paired_difference([places[0][i] for i in shared], [places[1][i] for i in shared], seed=self._seed)

    @property
    def _seed(self) -> int:
        return int(self.setup.get("seed", 0))

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """One dict per method, best ABPC first: metrics with intervals, distance to the best, conservation, cost."""
        values: dict[str, dict[int, list[float]]] = {}
        for method in self.methods:
            curves = self.curves(method)
            columns = torch.stack([curves.metric(name) for name in METRICS], 1) if len(curves) else torch.empty(0, 1)
            values[method] = dict(zip(self.of(method), columns.tolist()))
        found: list[dict[str, Any]] = [
            {"method": m, "n": len(self.of(m)), "failed": len(self.errors(m))} for m in self.methods
        ]
        finished = [row for row in found if row["n"]]
        for row, intervals in zip(finished, self._intervals([values[row["method"]] for row in finished])):
            for name, interval in zip(METRICS, intervals):
                row |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
        found.sort(key=lambda row: -row["abpc"] if row["n"] else float("inf"))
        best = values[found[0]["method"]]
        others = [row for row in found[1:] if best.keys() & values[row["method"]].keys()]
        behind = [{i: [best[i][0] - v[0]] for i, v in values[row["method"]].items() if i in best} for row in others]
        for row, (interval,) in zip(others, self._intervals(behind)):
            row |= {"behind": interval.mean, "behind_low": interval.low, "behind_high": interval.high}
        for row in finished:
            row |= self._sums_and_cost(row["method"])
        return found

    def _intervals(self, values: Sequence[Mapping[int, list[float]]]) -> list[list[Interval]]:
        """Intervals of several methods' numbers by input; those on the same inputs are resampled in one go."""
        together: dict[tuple[int, ...], list[int]] = {}
        for place, numbers in enumerate(values):
            together.setdefault(tuple(numbers), []).append(place)
        found: list[list[Interval]] = [[] for _ in values]
        for places in together.values():
            columns = [torch.tensor(list(values[place].values()), dtype=torch.float64) for place in places]
            intervals = iter(bootstrap_columns(torch.cat(columns, 1), seed=self._seed))
            for place, part in zip(places, columns):
                found[place] = [next(intervals) for _ in range(part.shape[1])]
        return found

    def _sums_and_cost(self, method: str) -> dict[str, Any]:
        records = list(self.of(method).values())
        row: dict[str, Any] = {}
        kept = [r["relevance"] / r["score"] for r in records if r.get("score")]
        row["conservation"] = statistics.median(kept) if kept else None  # sum of relevance / score
        row["seconds"] = statistics.median(r["seconds"] for r in records)
        ratios = [r["seconds"] / r["reference_seconds"] for r in records if r.get("reference_seconds")]
        row["time_ratio"] = statistics.median(ratios) if ratios else None  # to gradient x input
        memory = [r["memory"] / r["reference_memory"] for r in records if r.get("memory") and r.get("reference_memory")]
        row["memory_ratio"] = statistics.median(memory) if memory else None
        return row

    # ------------------------------------------------------------------------------------------------------------ showing

    def _table(self) -> tuple[list[str], list[list[str]]]:
        head = [
            "method",
            "ABPC [95 %]",
            "behind the best [95 %]",
            "compreh.",
            "suffic.",
            "sum/score",
            "x gradient",
            "inputs",
        ]
        digits = decimals([row["abpc"] for row in self.rows if row["n"]])

        def show(row: dict[str, Any], name: str) -> str:
            if name not in row:
                return ""
            return f"{row[name]:.{digits}f} [{row[f'{name}_low']:.{digits}f}, {row[f'{name}_high']:.{digits}f}]"

        body = []
        for row in self.rows:
            failed = f" ({row['failed']} failed)" if row["failed"] else ""
            if not row["n"]:
                body.append([row["method"], "failed", *[""] * 5, f"0{failed}"])
                continue
            body.append([
                row["method"],
                show(row, "abpc"),
                show(row, "behind"),
                f"{row['comprehensiveness']:.{digits}f}",
                f"{row['sufficiency']:.{digits}f}",
                "" if row["conservation"] is None else f"{row['conservation']:.3g}",
                "" if row["time_ratio"] is None else f"{row['time_ratio']:.2f}",
                f"{row['n']}{failed}",
            ])  # fmt: skip
        return head, body

    @property
    def _caption(self) -> str:
        words = [str(self.setup[k]) for k in ("measure", "unit", "fill") if k in self.setup]
        return f"Perturbation: {', '.join(words)}. Areas are means over the curve (the paper's scale is 4 times that)."

    @property
    def _notes(self) -> list[str]:
        return [f"{m} failed on {len(self.errors(m))}: {self.errors(m)[0]}" for m in self.methods if self.errors(m)]

    def __str__(self) -> str:
        head, body = self._table()
        widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in [head, *body]]
        return "\n".join([self._caption, lines[0], "-" * len(lines[0]), *lines[1:], *self._notes])

    def __rich__(self) -> Any:
        head, body = self._table()
        caption = "\n".join(self._notes) or None
        table = need("rich.table", "rich").Table(title=self._caption, title_justify="left", caption=caption)
        for i, name in enumerate(head):
            table.add_column(name, justify="left" if i == 0 else "right")
        for line in body:
            table.add_row(*line)
        return table

    def _repr_html_(self) -> str:
        head, body = self._table()
        lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
        lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in body]
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self._notes)
        rows = "".join(f"<tr>{line}</tr>" for line in lines)
        return f"<table><caption>{html.escape(self._caption)}</caption>{rows}</table>{notes}"

    def to_pandas(self) -> Any:
        """The rows as a DataFrame, indexed by method."""
        return need("pandas", "pandas").DataFrame(self.rows).set_index("method")

    def plot(self, path: str | os.PathLike[str] | None = None, *, methods: Sequence[str] | None = None) -> Any:
        """MoRF and LeRF curves with bands, and the ABPC of each method; the matplotlib figure."""
        from .plot import plot_comparison  # here: matplotlib is an extra

        return plot_comparison(self, path, methods or [row["method"] for row in self.rows if row["n"]])

    # ------------------------------------------------------------------------------------------------------------- storing

    def save(self, path: str | os.PathLike[str]) -> None:
        """Everything as one JSON file."""
        file = Path(path)
        whole = {
            "dynamiclrp comparison": FORMAT,
            "methods": list(self.methods),
            "setup": dict(self.setup),
            "rows": self.rows,
            "records": [dict(r) for r in self.records],
        }
        part = file.with_name(f".{file.name}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(whole), encoding="utf-8")
            os.replace(part, file)
        finally:
            part.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Comparison:
        """What `save` wrote."""
        try:
            whole = json.loads(Path(path).read_text("utf-8"))
            if whole["dynamiclrp comparison"] != FORMAT:
                raise EvaluationError(
                    f"{path} has format {whole['dynamiclrp comparison']}: this version reads {FORMAT}"
                )
            return Comparison(tuple(whole["methods"]), whole["setup"], tuple(whole["records"]))
        except (ValueError, KeyError, TypeError) as error:
            raise EvaluationError(f"{path} is not a saved Comparison ({type(error).__name__}: {error})") from None

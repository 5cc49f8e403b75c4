"""Two commits side by side: what do their explanations cost? Ratios of one run, printed and stored.

    make beside                                                        # on a CPU, minutes
    python bench/beside.py --device cuda --since FOLDER --json bench/results/beside_h200.json
    python bench/beside.py --fresh --since HEAD~1                      # what only a new process meets

Each commit explains in a process of its own. They take turns, gradient x input of the same process before each of them, so that noise meets all
alike; only one works at a time. `cost` is the median time over that of gradient x input, `was` the other commit's, `times` the median
of the rounds' own ratios, new to old, each over its gradient; `memory` likewise of peaks. On a GPU also as CUDA graphs, against the captured gradient.
Processes are kept, warm, without Python's garbage collector. With `--fresh` each round has new ones, with the collector as users have it: what a script
that explains three inputs waits for, plan and all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from sides import ROOT, SINCE, Lost, Side, answer, tree_of

FLOOR = "gradient x input"
PRESETS = ("attnlrp", "default", "dynamic")
CPU = (
    ("ViT-b-16", 1), ("ResNet-50", 1), ("VGG16", 1), ("MobileNetV2", 1), ("a small Llama", 2), ("a small Llama, 32 tokens", 1)
)  # fmt: skip
IN_A_ROW = 3


def rows_of(device: str) -> list[tuple[str, int]]:
    """(model, batch): on a GPU all of `speed.py`."""
    from models import MODELS

    if device == "cpu":
        return list(CPU)
    return [(name, min(batch, 8) if name.startswith("Llama") else batch) for name in MODELS for batch in (1, 16)]


# ---------------------------------------------------------------- one commit is timed


class Timing:
    """Answers of one commit: what is warm stays so from question to question."""

    def __init__(self, device: str, fresh: bool) -> None:
        self.device, self.fresh, self.row, self.built = device, fresh, "", (None, {})
        self.calls: dict[str, Any] = {}

    def __call__(self, question: str) -> dict[str, Any]:
        """`row, label`: times of so many calls of each, and at the first question of them peaks as well."""
        row, label = question.split("\t")
        import methods
        from models import build

        if row != self.row:
            self.row, self.calls = row, {}
            name, batch = row.rsplit(", batch ", 1)
            self.built = build(name, int(batch), self.device)
        model, inputs = self.built
        graph = label.endswith(", CUDA graph")
        floor = FLOOR + (", CUDA graph" if graph else "")
        if floor not in self.calls:
            self.calls[floor] = (methods.captured_gradient if graph else methods.gradient)(model, inputs)
        if label not in self.calls:
            for other in [key for key in self.calls if key != floor]:  # one at a time: they hold memory
                del self.calls[other]
            self.calls[label] = methods.ours(model, inputs, label.removesuffix(", CUDA graph"), graph)
            if not self.fresh:
                return self._first(floor, label, graph)
            self.calls[floor]()
        return {"times": {which: self._times(which) for which in (floor, label)}}

    def _first(self, floor: str, label: str, graph: bool) -> dict[str, Any]:
        from dynamiclrp.timing import peak_bytes

        for _ in range(2):
            self.calls[floor]()
            self.calls[label]()
        return {} if graph else {"peaks": {which: peak_bytes(self.calls[which]) for which in (floor, label)}}

    def _times(self, which: str) -> list[float]:
        call, took = self.calls[which], []
        for _ in range(IN_A_ROW):
            self._wait()
            begin = time.perf_counter()
            call()
            self._wait()
            took.append(1000 * (time.perf_counter() - begin))
        return took

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


# ---------------------------------------------------------------- both are compared


def row(sides: dict[str, Side], question: str, rounds: int, patience: float, fresh: bool = False) -> dict[str, Any]:
    """One preset on one model, of both commits."""
    peaks = {} if fresh else {which: side.ask(question, patience).get("peaks") for which, side in sides.items()}
    costs: dict[str, list[float]] = {which: [] for which in sides}
    milliseconds: dict[str, list[float]] = {which: [] for which in sides}
    for turn in range(rounds):
        for which in list(sides) if turn % 2 else list(sides)[::-1]:
            floor, label = sides[which].ask(question, patience)["times"].values()
            costs[which].append((statistics.mean if fresh else statistics.median)(label) / statistics.median(floor))
            milliseconds[which] += label
            if fresh:
                sides[which].close()
    made: dict[str, Any] = {
        "cost": round(statistics.median(costs["new"]), 3),
        "was": round(statistics.median(costs["old"]), 3),
        "times": round(statistics.median(new / old for new, old in zip(costs["new"], costs["old"])), 3),
        "milliseconds": round(statistics.median(milliseconds["new"]), 2),
    }
    if all(peaks.values()) and peaks:
        held = {which: found[question.split("\t")[1]] / found[FLOOR] for which, found in peaks.items()}
        made |= {"memory": round(held["new"], 3), "memory was": round(held["old"], 3)}
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", default=SINCE, help="a commit, or a folder that holds src/dynamiclrp")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", default="", help="names as printed, separated by two commas")
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--fresh", action="store_true", help="new processes in each round")
    parser.add_argument("--patience", type=float, default=300, help="seconds for one answer")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        import gc

        if options.device == "cuda":
            torch.backends.cudnn.benchmark = True
        if not options.fresh:
            gc.disable()
        answer(options.answer, Timing(options.device, options.fresh))
        return
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else f"{os.cpu_count()} CPU cores",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "commit": subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True
        ).stdout.strip(),
        "since": options.since,
        "rows": {},
    }
    graphs = ("", ", CUDA graph") if options.device == "cuda" else ("",)
    with tree_of(options.since) as old:
        words = [__file__, "--device", options.device, *(["--fresh"] if options.fresh else [])]
        threads = os.cpu_count() or 1
        sides = {name: Side(source, words, threads) for name, source in (("new", ROOT / "src"), ("old", old))}
        try:
            for name, batch in rows_of(options.device):
                if options.models and name not in options.models.split(",,"):
                    continue
                for label in [preset + graph for preset in options.presets.split(",") for graph in graphs]:
                    key = f"{name}, batch {batch}"
                    try:
                        made = row(sides, f"{key}\t{label}", options.rounds, options.patience, options.fresh)
                    except Lost as lost:
                        made = {"failed": str(lost)}
                    results["rows"][f"{key}, {label}"] = made
                    print(f"{key + ', ' + label:60}", *(f"{k} {v}" for k, v in made.items()), flush=True)
                    if options.json:
                        options.json.write_text(json.dumps(results, indent=1) + "\n")
        finally:
            for side in sides.values():
                side.close()


if __name__ == "__main__":
    main()

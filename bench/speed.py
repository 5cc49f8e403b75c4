"""What an explanation costs: our presets and their peers against gradient x input, in one process and one run.

    python bench/speed.py --device cuda --json bench/results/speed_h200.json        # minutes on a GPU
    make bench                                                                      # minutes on a CPU

Per model and batch: milliseconds, explanations a second, peak memory, and ratios to gradient x input with frozen
parameters. Each call takes turns with gradient x input alone, three of one in a row, then three of the other (one, where a call
takes long): noise meets both alike, and both are as warm as in a loop over a data set. Its ratio is the median of the rounds' ratios; `fastest` is that of
the fastest calls. Other tenants slow the host's cores down to half their speed, by turns: before and after every call a short loop tells how
fast the core is, and calls beside one that took a quarter longer than the fastest are left out (`calm` says of how many rounds something is left;
where it is less than three, all count). Where the file has a run before, its ratio is kept as `earlier`. On a GPU also as CUDA graphs, against the captured gradient.
`--lxt PATH` adds the AttnLRP authors' patched Llama.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

import methods
from dynamiclrp.timing import peak_bytes
from models import MODELS, build

FLOOR = "gradient x input"
LONG = 1.0  # seconds, of two rounds
CALM = 1.25  # times the fastest loop
EARLIER = 3  # runs whose ratios are kept beside the last one's


def calls_for(
    name: str, model: Any, inputs: dict[str, Any], device: str, lxt: str | None
) -> tuple[dict[str, methods.Call], dict[str, str]]:
    """All calls that can be made, and why the others cannot."""
    makers: dict[str, Any] = {
        "forward": lambda: methods.forward(model, inputs),
        FLOOR: lambda: methods.gradient(model, inputs),
    }
    presets = MODELS[name][2]
    for preset in presets:
        makers[preset] = lambda preset=preset: methods.ours(model, inputs, preset)
    if device == "cuda":
        makers[f"{FLOOR}, CUDA graph"] = lambda: methods.captured(methods.gradient(model, inputs))
        for preset in presets:
            makers[f"{preset}, CUDA graph"] = lambda preset=preset: methods.ours(model, inputs, preset, cuda_graph=True)
    if name in ("VGG16", "ResNet-50"):
        for composite in ("epsilon_plus", "epsilon_alpha2_beta1"):
            makers[f"Zennit {composite}"] = lambda composite=composite: methods.zennit(model, inputs, composite)
        makers["Captum LRP"] = lambda: methods.captum_lrp(model, inputs)
    if lxt and name.startswith("Llama"):
        makers["LXT AttnLRP"] = lambda: methods.lxt(lxt, model, inputs)
    calls, failed = {}, {}
    for label, make in makers.items():
        try:
            call = make()
            call()
            calls[label] = call
        except Exception as error:  # a peer that cannot do this model must not hide the others
            failed[label] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return calls, failed


@dataclass
class Timed:
    """One call: milliseconds, and those of a short loop before or after it, whichever took longer."""

    took: float
    loop: float


class Host:
    """How fast the host runs Python, from call to call."""

    def __init__(self) -> None:
        self.fastest = min(self._loop() for _ in range(100))

    def _loop(self) -> float:
        begin, total = time.perf_counter(), 0
        for number in range(10_000):
            total += number
        return 1000 * (time.perf_counter() - begin)

    def timed(self, call: methods.Call) -> Timed:
        synchronise()
        before, begin = self._loop(), time.perf_counter()
        call()
        synchronise()
        took, after = 1000 * (time.perf_counter() - begin), self._loop()
        self.fastest = min(self.fastest, before, after)
        return Timed(took, max(before, after))

    def calm(self, calls: list[Timed]) -> list[float]:
        """Milliseconds of those calls beside which the host was not slowed down."""
        return [call.took for call in calls if call.loop < CALM * self.fastest]


def synchronise() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def rounds_of(host: Host, pair: dict[str, methods.Call], repeats: int, patience: float) -> dict[str, list[list[Timed]]]:
    """Calls in turns: by name, by round."""
    start = time.perf_counter()
    for warm in (*pair.values(), *pair.values()):
        warm()
    in_a_row = 3 if time.perf_counter() - start < LONG else 1
    rounds: dict[str, list[list[Timed]]] = {name: [] for name in pair}
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for turn in range(repeats):
            if turn >= 3 and time.perf_counter() - start > patience:
                break
            for name, call in pair.items():
                rounds[name].append([host.timed(call) for _ in range(in_a_row)])
    finally:
        gc.enable()
    return rounds


def rows_for(
    calls: dict[str, methods.Call], batch: int, repeats: int, patience: float, host: Host
) -> dict[str, dict[str, float]]:
    """Each call in turns with its floor."""
    times: dict[str, list[Timed]] = {label: [] for label in calls}
    rows = {}
    for label, call in calls.items():
        graph = label.endswith("CUDA graph") and f"{FLOOR}, CUDA graph" in calls
        floor = f"{FLOOR}, CUDA graph" if graph else FLOOR
        rounds = rounds_of(host, {floor: calls[floor], label: call}, repeats, patience)  # one, for the floor itself
        for name, found in rounds.items():
            times[name] += [call for turn in found for call in turn]
        pairs = list(zip(rounds[floor], rounds[label]))
        calm = [(host.calm(a), host.calm(b)) for a, b in pairs]
        calm = [(a, b) for a, b in calm if a and b]
        every = [([call.took for call in a], [call.took for call in b]) for a, b in pairs]
        counted = calm if len(calm) >= 3 else every
        rows[label] = {
            "milliseconds": 0.0,
            "explanations a second": 0.0,
            "ratio": round(statistics.median(statistics.median(b) / statistics.median(a) for a, b in counted), 3),
            "fastest": round(min(x for _, b in counted for x in b) / min(x for a, _ in counted for x in a), 3),
            "rounds": len(pairs),
            "calm": len(calm),
        }
        if not label.endswith("CUDA graph"):  # what a graph holds is its own pool, reported by Explainer.captures
            peak = peak_bytes(call)
            rows[label]["peak MiB"] = round(peak / 2**20, 1)
            rows[label]["memory ratio"] = round(peak / peak_bytes(calls[FLOOR]), 3)
    for label, row in rows.items():
        row["milliseconds"] = round(statistics.median(host.calm(times[label]) or [c.took for c in times[label]]), 3)
        row["explanations a second"] = round(1000 * batch / row["milliseconds"], 1)
    return rows


def with_earlier(rows: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Rows, and what the same calls' ratios were in runs before: how far they can be trusted."""
    for label, row in rows.items():
        if label in before:
            row["earlier"] = [*before[label].get("earlier", []), before[label]["ratio"]][-EARLIER:]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", default=",,".join(MODELS), help="names as printed, separated by two commas")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--repeats", type=int, default=15, help="rounds")
    parser.add_argument("--patience", type=float, default=2.5, help="seconds for one row; three rounds at least")
    parser.add_argument("--lxt", help="a folder that holds the package lxt")
    parser.add_argument(
        "--json",
        type=Path,
        help="other models that this file has, of the same machine and versions, are kept, and ratios of those that are run again",
    )
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    host = Host()
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} CPU cores",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "models": {},
    }
    if options.json and options.json.exists():
        kept = json.loads(options.json.read_text())
        if all(kept[key] == results[key] for key in ("machine", "versions")):
            results["models"] = kept["models"]
    for name in options.models.split(",,"):
        for batch in map(int, options.batches.split(",")):
            batch = min(batch, 8) if name.startswith("Llama") else batch  # 8 x 512 tokens
            model, inputs = build(name, batch, options.device)
            calls, failed = calls_for(name, model, inputs, options.device, options.lxt)
            rows = rows_for(calls, batch, options.repeats, options.patience, host)
            del calls
            key = f"{name}, batch {batch}"
            rows = with_earlier(rows, results["models"].get(key, {}).get("rows", {}))
            results["models"][key] = {"rows": rows, "failed": failed}
            print(f"\n{name}, batch {batch}")
            for label, row in rows.items():
                print(f"  {label:32} " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            for label, why in failed.items():
                print(f"  {label:32} {why}", flush=True)
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(results, indent=1) + "\n")
            del model, inputs
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""What an explanation costs: our presets and their peers against gradient x input, in one process and one run.

    python bench/speed.py --device cuda --json bench/results/speed_h200.json        # minutes on a GPU
    make bench                                                                      # minutes on a CPU

Per model and batch: milliseconds, explanations a second, peak memory, and ratios to gradient x input with frozen
parameters. Each call takes turns with gradient x input alone, three of one in a row, then three of the other (one, where a call
takes long): noise meets both alike, and both are as warm as in a loop over a data set. Other tenants of the machine slow single cores down
to half their speed, for milliseconds to seconds: the process moves to cores that run a short loop at full speed, and calls before or after
which that loop took a third longer are left out. The ratio is that of the medians of the calls that are left; `fastest` that of the fastest of them; `calm`
says how many of how many `calls` are left. Where it is less than three, the ratio is the median of the rounds' ratios, and `calm` is 0.
Where the file has a run before, its ratio is kept as `earlier`. On a GPU also as CUDA graphs, against the captured gradient.
`--lxt PATH` adds the AttnLRP authors' patched Llama, `--paper PATH` the code of the paper's authors (batch 1).
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

import methods
from dynamiclrp.timing import peak_bytes
from host import Host, Timed
from models import MODELS, build

FLOOR = "gradient x input"
LONG = 1.0  # seconds, of two rounds
EARLIER = 3  # runs whose ratios are kept beside the last one's


def calls_for(
    name: str,
    model: Any,
    inputs: dict[str, Any],
    device: str,
    lxt: str | None,
    paper: str | None,
    only: Sequence[str] = (),
) -> tuple[dict[str, methods.Call], dict[str, str]]:
    """All calls that can be made (or `only` those, and their floors), and why the others cannot."""
    makers: dict[str, Any] = {
        "forward": lambda: methods.forward(model, inputs),
        FLOOR: lambda: methods.gradient(model, inputs),
    }
    presets = MODELS[name][2]
    for preset in presets:
        makers[preset] = lambda preset=preset: methods.ours(model, inputs, preset)
    if device == "cuda":
        makers[f"{FLOOR}, CUDA graph"] = lambda: methods.captured_gradient(model, inputs)
        for preset in presets:
            makers[f"{preset}, CUDA graph"] = lambda preset=preset: methods.ours(model, inputs, preset, cuda_graph=True)
    if name in ("VGG16", "ResNet-50"):
        for composite in ("epsilon_plus", "epsilon_alpha2_beta1"):
            makers[f"Zennit {composite}"] = lambda composite=composite: methods.zennit(model, inputs, composite)
        makers["Captum LRP"] = lambda: methods.captum_lrp(model, inputs)
    if lxt and name.startswith("Llama"):
        makers["LXT AttnLRP"] = lambda: methods.lxt(lxt, model, inputs)
    if paper:
        makers["the paper's code"] = lambda: methods.paper(paper, model, inputs)
    unknown = [label for label in only if label not in makers]
    if unknown:
        raise SystemExit(f"--only {',,'.join(unknown)}: {name} has no such row here; it has {', '.join(makers)}")
    calls, failed = {}, {}
    for label, make in makers.items():
        if only and label not in only and not label.startswith(FLOOR):
            continue
        try:
            call = make()
            call()
            calls[label] = call
        except Exception as error:  # a peer that cannot do this model must not hide the others
            failed[label] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return calls, failed


def _median(calls: list[Timed]) -> float:
    return statistics.median(call.took for call in calls)


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
            if host.settle():
                next(iter(pair.values()))()  # where it moved to it is cold
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
        took = {name: [call for turn in found for call in turn] for name, found in rounds.items()}
        for name, found in took.items():
            times[name] += found
        below, own = host.calm(took[floor]), host.calm(took[label])
        calm = min(len(below), len(own))
        if calm:
            ratio = statistics.median(own) / statistics.median(below)
        else:
            below, own = ([call.took for call in took[name]] for name in (floor, label))
            ratio = statistics.median(_median(b) / _median(a) for a, b in zip(rounds[floor], rounds[label]))
        rows[label] = {
            "milliseconds": 0.0,
            "explanations a second": 0.0,
            "ratio": round(ratio, 3),
            "fastest": round(min(own) / min(below), 3),
            "calls": len(took[label]),
            "calm": calm,
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
    parser.add_argument("--only", help="rows as printed, separated by two commas, to add to the file or to renew in it")
    parser.add_argument("--repeats", type=int, default=15, help="rounds")
    parser.add_argument("--patience", type=float, default=2.5, help="seconds for one row; three rounds at least")
    parser.add_argument("--lxt", help="a folder that holds the package lxt")
    parser.add_argument("--paper", help="a folder that holds the package lrp_engine, the paper authors' code")
    parser.add_argument(
        "--json",
        type=Path,
        help="other models that this file has, of the same machine and versions, are kept, and ratios of those that are run again",
    )
    options = parser.parse_args()
    if options.device == "cuda":
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
            paper = options.paper if batch == 1 else None  # the rows of its batches share their seeds
            only = options.only.split(",,") if options.only else ()
            calls, failed = calls_for(name, model, inputs, options.device, options.lxt, paper, only)
            rows = rows_for(calls, batch, options.repeats, options.patience, host)
            del calls
            key = f"{name}, batch {batch}"
            before = results["models"].get(key, {"rows": {}, "failed": {}})
            rows = with_earlier(rows, before["rows"])
            if only:  # the others stand as they were, and so do the floors that they were measured beside
                kept = {label: row for label, row in rows.items() if label in only or label not in before["rows"]}
                results["models"][key] = {"rows": before["rows"] | kept, "failed": before["failed"] | failed}
            else:
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

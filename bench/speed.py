"""What an explanation costs: our presets and their peers against gradient x input, in one process and one run.

    python bench/speed.py --device cuda --json bench/results/speed_h200.json        # minutes on a GPU
    make bench                                                                      # minutes on a CPU

Per model and batch: milliseconds, explanations a second, peak memory, and ratios to gradient x input with frozen
parameters. Calls take turns, so that noise meets them alike. On a GPU also as CUDA graphs, against the captured gradient.
`--lxt PATH` adds the AttnLRP authors' patched Llama.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
from datetime import date
from pathlib import Path
from typing import Any

import torch

import methods
from dynamiclrp.timing import measure
from models import MODELS, build

FLOOR = "gradient x input"


def calls_for(
    name: str, model: Any, inputs: dict[str, Any], device: str
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
    calls, failed = {}, {}
    for label, make in makers.items():
        try:
            call = make()
            call()
            calls[label] = call
        except Exception as error:  # a peer that cannot do this model must not hide the others
            failed[label] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return calls, failed


def rows_for(costs: dict[str, Any], batch: int) -> dict[str, dict[str, float]]:
    rows = {}
    for label, cost in costs.items():
        graph = label.endswith("CUDA graph")
        floor = costs[f"{FLOOR}, CUDA graph"] if graph and f"{FLOOR}, CUDA graph" in costs else costs[FLOOR]
        rows[label] = {
            "milliseconds": round(cost.milliseconds, 3),
            "explanations a second": round(1000 * batch / cost.milliseconds, 1),
            "ratio": round(cost.milliseconds / floor.milliseconds, 3),
        }
        if not graph:  # what a graph holds is its own pool, reported by Explainer.captures
            rows[label]["peak MiB"] = round(cost.peak_bytes / 2**20, 1)
            rows[label]["memory ratio"] = round(cost.peak_bytes / costs[FLOOR].peak_bytes, 3)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", default=",,".join(MODELS), help="names as printed, separated by two commas")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--patience", type=float, default=15.0, help="seconds for one model and batch")
    parser.add_argument("--lxt", help="a folder that holds the package lxt")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} CPU cores",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "models": {},
    }
    for name in options.models.split(",,"):
        for batch in map(int, options.batches.split(",")):
            batch = min(batch, 8) if name.startswith("Llama") else batch  # 8 x 512 tokens
            model, inputs = build(name, batch, options.device)
            calls, failed = calls_for(name, model, inputs, options.device)
            costs = measure(calls, repeats=options.repeats, patience=options.patience)
            rows = rows_for(costs, batch)
            del calls
            if options.lxt and name.startswith("Llama"):
                try:
                    with methods.lxt(options.lxt, model, inputs) as patched:
                        costs |= measure({"LXT AttnLRP": patched}, repeats=options.repeats, patience=options.patience)
                    rows["LXT AttnLRP"] = rows_for(costs, batch)["LXT AttnLRP"]
                except Exception as error:
                    failed["LXT AttnLRP"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            results["models"][f"{name}, batch {batch}"] = {"rows": rows, "failed": failed}
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

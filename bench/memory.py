"""Ways to need less memory, and many targets at once.

python bench/memory.py --device cuda --json bench/results/memory_h200.json
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu

import dynamiclrp as dlrp
import methods
from dynamiclrp.timing import measure
from models import build

FLOOR = "gradient x input"
TARGETS = 16
SIZES = {"cuda": {"tokens": 4096}, "cpu": {"tokens": 256, "layers": 8}}


def less_memory(device: str) -> dict[str, dict[str, float]]:
    name = "Llama-3.2-1B bf16, 512 tokens" if device == "cuda" else "a small Llama"
    model, inputs = build(name, 1, device, **SIZES[device])

    def offloaded(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            with save_on_cpu(pin_memory=True):
                return call()

        return run

    presets = ("attnlrp", "gamma", "dynamic") if device == "cpu" else ("attnlrp",)
    plain = {FLOOR: methods.gradient(model, inputs)} | {p: methods.ours(model, inputs, p) for p in presets}
    moved = {f"{label}, saved tensors on the CPU": offloaded(call) for label, call in plain.items()}
    costs = measure(plain | (moved if device == "cuda" else {}), repeats=3, patience=10)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()  # transformers checkpoints in training mode alone; this model has no dropout
    costs |= measure({f"{label}, checkpointed": call for label, call in plain.items()}, repeats=3, patience=10)
    return {
        label: {
            "milliseconds": round(cost.milliseconds, 2),
            "peak MiB": round(cost.peak_bytes / 2**20, 1),
            "ratio": round(cost.milliseconds / costs[FLOOR].milliseconds, 2),
        }
        for label, cost in costs.items()
    }


def many_targets(device: str) -> dict[str, float]:
    model, inputs = build("ViT-b-16", 1, device)
    x, targets = inputs["x"], list(range(TARGETS))
    eager, graph = dlrp.Explainer(model, "attnlrp"), dlrp.Explainer(model, "attnlrp", cuda_graph=True)
    calls: dict[str, Callable[[], object]] = {
        "one explanation": lambda: eager(x, target=0),
        f"{TARGETS} explanations, one by one": lambda: [eager(x, target=t) for t in targets],
        "targets=[…], one backward each": lambda: list(eager.each(x, targets=targets, at_once=1)),
        "targets=[…], 8 in a backward (the default)": lambda: list(eager.each(x, targets=targets)),
        "targets=[…], all in one backward": lambda: list(eager.each(x, targets=targets, at_once=TARGETS)),
    }
    if device == "cuda":
        calls["targets=[…], CUDA graph"] = lambda: list(graph.each(x, targets=targets))
    return {name: round(cost.milliseconds, 2) for name, cost in measure(calls, repeats=5, patience=10).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = ", ".join(f"{n:,} {what}" for what, n in SIZES[options.device].items())
    model = "Llama-3.2-1B in bf16" if options.device == "cuda" else "A small Llama (width 256) in float32"
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} CPU cores",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "what": f"{model}, {sizes}",
        "number": TARGETS,
        "rows": less_memory(options.device),
    }
    if options.device == "cuda":
        results["targets"] = many_targets(options.device)
    print(json.dumps(results["rows"], indent=1))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

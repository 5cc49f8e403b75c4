"""Ways to need less memory, and many targets at once, on a GPU.

python bench/memory.py --json bench/results/memory_h200.json
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

TOKENS, TARGETS = 4096, 16


def less_memory() -> dict[str, dict[str, float]]:
    model, inputs = build("Llama-3.2-1B bf16, 512 tokens", 1, "cuda", tokens=TOKENS)

    def offloaded(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            with save_on_cpu(pin_memory=True):
                return call()

        return run

    plain = {"gradient x input": methods.gradient(model, inputs), "attnlrp": methods.ours(model, inputs, "attnlrp")}
    calls = plain | {f"{name}, saved tensors on the CPU": offloaded(call) for name, call in plain.items()}
    costs = measure(calls, repeats=3, patience=10)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()  # transformers checkpoints in training mode alone; this model has no dropout
    costs |= measure({f"{name}, checkpointed": call for name, call in plain.items()}, repeats=3, patience=10)
    return {
        name: {"milliseconds": round(c.milliseconds, 2), "peak MiB": round(c.peak_bytes / 2**20, 1)}
        for name, c in costs.items()
    }


def many_targets() -> dict[str, float]:
    model, inputs = build("ViT-b-16", 1, "cuda")
    x, targets = inputs["x"], list(range(TARGETS))
    eager, graph = dlrp.Explainer(model), dlrp.Explainer(model, cuda_graph=True)
    calls: dict[str, Callable[[], object]] = {
        "one explanation": lambda: eager(x, target=0),
        f"{TARGETS} explanations, one by one": lambda: [eager(x, target=t) for t in targets],
        "targets=[…], one backward each": lambda: list(eager.each(x, targets=targets, at_once=1)),
        "targets=[…], 8 in a backward (the default)": lambda: list(eager.each(x, targets=targets)),
        "targets=[…], all in one backward": lambda: list(eager.each(x, targets=targets, at_once=TARGETS)),
        "targets=[…], CUDA graph": lambda: list(graph.each(x, targets=targets)),
    }
    return {name: round(cost.milliseconds, 2) for name, cost in measure(calls, repeats=5, patience=10).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "what": f"Llama-3.2-1B in bf16, {TOKENS:,} tokens",
        "number": TARGETS,
        "targets": many_targets(),
    }
    print(json.dumps(results["targets"], indent=1), flush=True)
    results["rows"] = less_memory()
    print(json.dumps(results["rows"], indent=1))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

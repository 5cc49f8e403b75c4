"""How the cost grows: with sequence length, depth and batch (time and memory), and planning with the number of nodes.

    python bench/scaling.py --device cuda --json bench/results/scaling_h200.json
    python bench/scaling.py --plans --json bench/results/plans_cpu.json            # planning only, on the CPU

Llama-3.2-1B in bf16 on a GPU; a small one in float32 on a CPU. Gradient x input and `attnlrp` in turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import dynamiclrp as dlrp
import methods
from dynamiclrp.explainer import Plans
from dynamiclrp.forward import graph_of
from dynamiclrp.outputs import unwrap
from dynamiclrp.timing import measure
from models import build

MODEL = "Llama-3.2-1B bf16, 512 tokens"
LLAMA, STACK = "Llama-3.2-1B, 512 tokens", "residual blocks"  # whose graphs are planned


def point(device: str, batch: int, tokens: int, layers: int, preset: str) -> dict[str, Any]:
    model, inputs = build(MODEL, batch, device, tokens=tokens, layers=layers)
    costs = measure(
        {"gradient": methods.gradient(model, inputs), preset: methods.ours(model, inputs, preset)},
        repeats=5,
        patience=4,
    )
    row = {
        label: {"milliseconds": round(cost.milliseconds, 3), "peak MiB": round(cost.peak_bytes / 2**20, 1)}
        for label, cost in costs.items()
    }
    del model, inputs
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return {"batch": batch, "tokens": tokens, "layers": layers, **row}


def sweep(device: str, largest: int) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """One more point after the other."""
    lengths = [n for n in (256, 512, 1024, 2048, 4096, 8192, 16384) if n <= largest]
    sizes = {
        "tokens": [(1, tokens, 16) for tokens in lengths],
        "layers": [(1, 512, layers) for layers in (2, 4, 8, 16, 32)],
        "batch": [(batch, 512, 16) for batch in (1, 2, 4, 8, 16)],
    }
    for name, points in sizes.items():
        rows: list[dict[str, Any]] = []
        for batch, tokens, layers in points:
            rows.append(point(device, batch, tokens, layers, "attnlrp"))
            print(name, json.dumps(rows[-1]), flush=True)
            yield {name: rows}


class Stack(nn.Module):
    """Residual blocks, as many as asked for: 9 nodes each."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.blocks):
            x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x.sum(-1)


def to_plan(what: str, preset: str) -> tuple[torch.Tensor, torch.Tensor]:
    """An output and the input that it is to be explained by: of so many blocks, or of Llama at its published size."""
    if what == LLAMA:
        model, inputs = build(what, 1, "cpu", tokens=8)
        x = inputs["inputs_embeds"].requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):  # as float32 attends on a GPU
            return unwrap(model(**inputs)), x
    stack, x = Stack(int(what)).eval(), torch.randn(1, 2, 4, requires_grad=True)
    for name, parameter in stack.named_parameters():
        parameter.requires_grad_(name.endswith("bias") or preset == "dynamic")
    return stack(x), x


def planned(preset: str, what: str) -> dict[str, Any]:
    """Milliseconds of capture, first plan and cached plan of one graph."""
    (output, x), rules = to_plan(what, preset), dlrp.preset(preset)
    times: dict[str, list[float]] = {"capture": [], "first plan": [], "cached plan": []}
    for _ in range(3):
        cache, start = Plans(), time.perf_counter()
        graph = graph_of([output], [x])
        captured = time.perf_counter()
        cache.get(graph, rules)
        planned = time.perf_counter()
        cache.get(graph_of([output], [x]), rules)
        end = time.perf_counter()
        for label, seconds in zip(times, (captured - start, planned - captured, end - planned)):
            times[label].append(1000 * seconds)
    medians = {label: round(statistics.median(values), 2) for label, values in times.items()}
    return {"preset": preset, "graph": what if what == LLAMA else STACK, "nodes": len(graph)} | medians


def plans() -> list[dict[str, Any]]:
    """Each in a process of its own: torch may overflow the stack when a graph of 50,000 nodes is freed."""
    rows = []
    for preset in ("attnlrp", "dynamic"):
        for what in (LLAMA, "40", "150", "600", "2400", "5600"):
            command = [sys.executable, __file__, "--planned", preset, what]
            rows.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
            print("plan", json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--plans", action="store_true", help="planning only")
    parser.add_argument("--planned", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--largest", type=int, default=16384, help="tokens")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.planned:
        print(json.dumps(planned(*options.planned)), flush=True)
        os._exit(0)  # without freeing the graph
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} CPU cores",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    if options.plans:
        results["plans"] = plans()
    for part in () if options.plans else sweep(options.device, options.largest):
        results |= part
        if options.json:  # as far as it came
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

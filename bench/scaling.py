"""How the cost grows: with sequence length, depth and batch (time and memory), and planning with the number of nodes.

    python bench/scaling.py --device cuda --json bench/results/scaling_h200.json
    python bench/scaling.py --plans --json bench/results/plans_cpu.json            # planning only, on the CPU

Llama-3.2-1B in bf16 on a GPU; a small one in float32 on a CPU. Gradient x input and `attnlrp` in turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import methods
import torch
from models import build
from torch import nn

import dynamiclrp as dlrp
from dynamiclrp.explainer import Plans
from dynamiclrp.forward import graph_of
from dynamiclrp.timing import measure

MODEL = "Llama-3.2-1B bf16, 512 tokens"


def point(device: str, batch: int, tokens: int, layers: int, preset: str) -> dict[str, Any]:
    model, inputs = build(MODEL, batch, device, tokens=tokens, layers=layers)
    costs = measure(
        {"gradient": methods.gradient(model, inputs), preset: methods.ours(model, inputs, preset)}, repeats=5, patience=4
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


def sweep(device: str, largest: int) -> dict[str, list[dict[str, Any]]]:
    lengths = [n for n in (256, 512, 1024, 2048, 4096, 8192, 16384) if n <= largest]
    found: dict[str, list[dict[str, Any]]] = {"tokens": [], "layers": [], "batch": []}
    for tokens in lengths:
        found["tokens"].append(point(device, 1, tokens, 16, "attnlrp"))
        print("tokens", json.dumps(found["tokens"][-1]), flush=True)
    for layers in (2, 4, 8, 16, 32):
        found["layers"].append(point(device, 1, 512, layers, "attnlrp"))
        print("layers", json.dumps(found["layers"][-1]), flush=True)
    for batch in (1, 2, 4, 8, 16, 32):
        found["batch"].append(point(device, batch, 512, 16, "attnlrp"))
        print("batch", json.dumps(found["batch"][-1]), flush=True)
    return found


class Stack(nn.Module):
    """Residual blocks, as many as asked for: 7 nodes each."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.blocks):
            x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x.sum(-1)


def plans() -> list[dict[str, Any]]:
    """Milliseconds of capture, first plan and cached plan, by preset and number of nodes."""
    rows = []
    for preset in ("attnlrp", "dynamic"):
        for blocks in (40, 150, 600, 2400, 7200):
            model = Stack(blocks).eval()
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.endswith("bias") or preset == "dynamic")
            x = torch.randn(1, 2, 4, requires_grad=True)
            output = model(x)
            times: dict[str, list[float]] = {"capture": [], "first plan": [], "cached plan": []}
            for _ in range(3):
                cache, rules = Plans(), dlrp.preset(preset)
                for label, call in (
                    ("capture", lambda: graph_of([output], [x])),
                    ("first plan", lambda: cache.get(graph, rules)),
                    ("cached plan", lambda: cache.get(graph_of([output], [x]), rules)),
                ):
                    start = time.perf_counter()
                    made = call()
                    times[label].append(1000 * (time.perf_counter() - start))
                    graph = made if label == "capture" else graph
            row = {"preset": preset, "nodes": len(graph)} | {k: round(statistics.median(v), 2) for k, v in times.items()}
            rows.append(row)
            print("plan", json.dumps(row), flush=True)
            dlrp.relevance(output, x, preset=preset)  # frees the graph from the outside in
            del graph, output
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--plans", action="store_true", help="planning only")
    parser.add_argument("--largest", type=int, default=16384, help="tokens")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} CPU cores",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    if options.plans:
        results["plans"] = plans()
    else:
        results |= sweep(options.device, options.largest)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What the engine costs: relevance against gradient x input, side by side in one run.

    python bench/engine.py [--device cuda] [--layers 12] [--json results.json]

Prints, per preset, the median ratio of time (forward included on both sides) and of peak memory (CUDA only), and what
capturing the graph and looking up the plan cost per 1,000 nodes.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn

import dynamiclrp as dlrp
from dynamiclrp.explain import Plans
from dynamiclrp.forward import graph_of


def transformer(layers: int, width: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def convnet(layers: int, width: int) -> nn.Module:
    blocks: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
    for _ in range(layers - 1):
        blocks += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def score(output: Tensor) -> Tensor:
    """One number a row: the mean over tokens, where there are any, and its largest unit."""
    return (output.mean(1) if output.dim() == 3 else output).amax(1, keepdim=True)


def measure(calls: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, list[float]]:
    """Times of each call, in turns, so that noise hits all alike."""
    synchronise = torch.cuda.synchronize if device == "cuda" else lambda: None
    for call in calls.values():
        call()
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            synchronise()
            start = time.perf_counter()
            call()
            synchronise()
            times[name].append(time.perf_counter() - start)
    return times


def peak_memory(call: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def compare(model: nn.Module, x: Tensor, presets: list[str], repeats: int, device: str) -> list[dict[str, object]]:
    x = x.requires_grad_()

    def gradient() -> Tensor:
        return x.detach() * torch.autograd.grad(score(model(x)).sum(), x)[0]

    def lrp(preset: str) -> Callable[[], object]:
        return lambda: dlrp.relevance(score(model(x)), x, preset=preset)

    calls: dict[str, Callable[[], object]] = {"gradient x input": gradient} | {name: lrp(name) for name in presets}
    times = measure(calls, repeats, device)
    base = times["gradient x input"]
    rows = []
    for name in calls:
        ratio = statistics.median(t / b for t, b in zip(times[name], base))
        row: dict[str, object] = {"preset": name, "ratio": round(ratio, 3)}
        if device == "cuda":
            row["milliseconds"] = round(1000 * statistics.median(times[name]), 3)
            row["memory ratio"] = round(peak_memory(calls[name]) / peak_memory(gradient), 3)
        rows.append(row)
    return rows


def lookup(model: nn.Module, x: Tensor, repeats: int = 50) -> dict[str, float]:
    """Milliseconds per 1,000 nodes: capture of the graph, lookup of a cached plan, first plan."""
    output = score(model(x.requires_grad_()))
    preset, plans = dlrp.preset("attnlrp"), Plans()
    nodes = len(graph_of([output], [x]))

    def best(call: Callable[[], object]) -> float:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return round(1e6 * statistics.median(times) / nodes, 3)

    graph = graph_of([output], [x])
    start = time.perf_counter()
    plans.get(graph, preset)
    first = round(1e6 * (time.perf_counter() - start) / nodes, 3)
    capture = best(lambda: graph_of([output], [x]))
    both = best(lambda: plans.get(graph_of([output], [x]), preset))
    return {"nodes": nodes, "capture": capture, "capture and lookup": both, "first plan": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    device, batch = options.device, options.batch
    models = {
        f"transformer, {options.layers} layers": (
            transformer(options.layers, options.width), torch.randn(batch, options.tokens, options.width),
            ["gradient", "attnlrp", "cp-lrp", "epsilon", "dynamic"],
        ),
        f"conv net, {options.layers} layers": (
            convnet(options.layers, 64), torch.randn(batch, 3, 64, 64), ["gradient", "attnlrp", "gamma", "epsilon-plus", "dynamic"],
        ),
    }  # fmt: skip
    results: dict[str, object] = {
        "date": date.today().isoformat(),
        "machine": torch.cuda.get_device_name()
        if device == "cuda"
        else f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "arguments": {k: str(v) for k, v in vars(options).items() if k != "json"},
    }
    for name, (model, x, presets) in models.items():
        model = model.eval().requires_grad_(False).to(device)
        for parameter in (p for n, p in model.named_parameters() if n.endswith("bias")):
            parameter.requires_grad_(True)  # as explain() does
        rows = compare(model, x.to(device), presets, options.repeats, device)
        plan = lookup(model, x.to(device))
        results[name] = {"presets": rows, "milliseconds per 1,000 nodes": plan}
        print(f"\n{name}")
        for row in rows:
            print("  " + "  ".join(f"{key} {value}" for key, value in row.items()))
        print("  per 1,000 nodes: " + ", ".join(f"{key} {value}" for key, value in plan.items()))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

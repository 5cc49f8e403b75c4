"""bench/results/*.json → docs/performance.md and its figures. Numbers come from the files alone.

python bench/report.py
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
RESULTS, DOCS = ROOT / "bench" / "results", ROOT / "docs"
FLOOR = "gradient x input"
COLOURS = {
    "attnlrp": "#2563eb", "default": "#7c3aed", "cp-lrp": "#60a5fa", "epsilon-plus": "#f59e0b", "gamma": "#ea580c", "dynamic": "#16a34a",
    "peers": "#9ca3af",
}  # fmt: skip


def load(name: str) -> dict[str, Any] | None:
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def colour(label: str) -> str:
    return COLOURS.get(label.split(",")[0], COLOURS["peers"])


def table(rows: dict[str, dict[str, float]], failed: dict[str, str], absolute: bool) -> str:
    """One model and batch. Absolute times only from the GPU; elsewhere ratios, since the machine is shared."""
    head = [
        "",
        *(["ms", "a second"] if absolute else []),
        "time / gradient x input",
        "fastest",
        *(["calm calls"] if any("calm" in row for row in rows.values()) else []),
        "peak MiB",
        "memory / gradient x input",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for label, row in rows.items():
        cells = [f"{row['milliseconds']:.2f}", f"{row['explanations a second']:.1f}"] if absolute else []
        earlier = ", ".join(
            f"{ratio:.2f}" for ratio in row.get("earlier", []) if label not in (FLOOR, f"{FLOOR}, CUDA graph")
        )
        cells += [f"{row['ratio']:.2f}" + (f" ({earlier})" if earlier else ""), f"{row['fastest']:.2f}"]
        cells += [f"{row['calm']} of {row['calls']}"] if "calm" in row else []
        cells += [f"{row['peak MiB']:.0f}", f"{row['memory ratio']:.2f}"] if "peak MiB" in row else ["", ""]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    lines += [f"\n{label}: could not run ({why})." for label, why in failed.items()]
    return "\n".join(lines)


def glance(models: dict[str, Any]) -> str:
    """The cheapest and the dearest model for each preset."""

    def span(ratios: list[float]) -> str:
        ends = [f"{ratio:.2f}" for ratio in (min(ratios), max(ratios))] if ratios else [""]
        return " to ".join(dict.fromkeys(ends))

    lines = [
        "| preset | models | eager, batch 1 | eager, larger batches | CUDA graph / captured gradient | memory |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for preset in [name for name in COLOURS if any(name in found["rows"] for found in models.values())]:
        rows = {name: found["rows"] for name, found in models.items() if preset in found["rows"]}
        alone = [row[preset]["ratio"] for name, row in rows.items() if name.endswith("batch 1")]
        many = [row[preset]["ratio"] for name, row in rows.items() if not name.endswith("batch 1")]
        graphs = [row[f"{preset}, CUDA graph"]["ratio"] for row in rows.values()]
        memory = [row[preset]["memory ratio"] for row in rows.values()]
        number = len({name.split(", batch")[0] for name in rows})
        lines.append(f"| {preset} | {number} | {span(alone)} | {span(many)} | {span(graphs)} | {span(memory)} |")
    return "\n".join(lines)


def zoo(results: dict[str, Any]) -> str:
    """What became of the zoos' models on a GPU."""
    models = results["models"].values()
    built = [row for row in models if not {"not built", "refused", "does not run there"} & set(row)]

    def share(what: str, *beginnings: str) -> str:
        tried = [row[what] for row in built if what in row]
        return f"{sum(text.startswith(beginnings) for text in tried)} of {len(tried)}"

    def ranks(pattern: str) -> list[float]:
        found = [re.search(pattern, row.get("default, bf16", "")) for row in built]
        return sorted(float(match[1]) for match in found if match)

    def tenth(values: list[float]) -> str:
        return f"{statistics.median(values):.3f} in the middle, {values[len(values) // 10]:.3f} or more for nine in ten"

    faults = sum(text.startswith("fault") for row in models for text in row.values())
    return "\n".join(
        [
            f"{len(built)} small models with random weights that were built and explained there ({faults} faults):",
            "",
            "| | `default` | `dynamic` |",
            "|---|---:|---:|",
            *(
                f"| {label} | {share('default' + what, *how)} | {share('dynamic' + what, *how)} |"
                for label, what, how in (
                    ("the CPU's relevance, eager", "", ("same",)),
                    ("the model itself predicts otherwise there (random draws, ties)", "", ("the model itself",)),
                    ("the same relevance as a CUDA graph, also of other values", ", CUDA graph", ("same",)),
                    ("refused as a CUDA graph, with the reason", ", CUDA graph", ("refused",)),
                )
            ),
            "",
            "Refused are models that read numbers on the way (mixtures of experts that sort tokens, detectors), and some that predict "
            "otherwise where they see that they are captured. "
            f"In bf16 the rank correlation with float32 is {tenth(ranks(r'ranks (-?[0-9.]+)'))}; "
            f"that of gradient x input {tenth(ranks(r'gradient x input (-?[0-9.]+)'))}.",
        ]
    )


def bars(results: dict[str, Any], path: Path) -> None:
    """Ratios per model, one group a model."""
    models = list(results["models"])
    across = 4
    down = -(-len(models) // across)
    figure, axes = plt.subplots(down, across, figsize=(15, 2.8 * down), squeeze=False)
    for axis, model in zip(axes.flat, models):
        rows = {
            k: v
            for k, v in results["models"][model]["rows"].items()
            if k not in ("forward", FLOOR) and not k.startswith(FLOOR)
        }
        labels = list(rows)
        values = [rows[label]["ratio"] for label in labels]
        axis.barh(labels, values, color=[colour(label) for label in labels], height=0.7)
        axis.axvline(1, color="#111827", lw=1)
        axis.invert_yaxis()
        axis.set_title(model.replace(", batch", "\nbatch"), fontsize=9)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
        for y, value in enumerate(values):
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over the line at 1
            axis.text(value + max(values) / 60, y, f"{value:.2f}", va="center", fontsize=7, bbox=paper)
        axis.set_xlim(0, max(values) * 1.2)
    for axis in axes.flat[len(models) :]:
        axis.set_visible(False)
    figure.supxlabel("time / gradient x input (CUDA graphs: / captured gradient x input)", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def curves(results: dict[str, Any], path: Path) -> None:
    """Time and memory against tokens, layers and batch."""
    figure, axes = plt.subplots(2, 3, figsize=(11, 6))
    for column, (name, label) in enumerate((("tokens", "tokens"), ("layers", "layers"), ("batch", "batch"))):
        points = results[name]
        xs = [point[name] for point in points]
        for method, style in (("gradient", "#6b7280"), ("attnlrp", COLOURS["attnlrp"])):
            for row, key in enumerate(("milliseconds", "peak MiB")):
                axis = axes[row][column]
                axis.plot(
                    xs,
                    [p[method][key] for p in points],
                    "o-",
                    color=style,
                    ms=4,
                    label="gradient x input" if method == "gradient" else method,
                )
                axis.set_xscale("log", base=2)
                axis.set_yscale("log")
                axis.set_xlabel(label)
                axis.set_ylabel(key)
                axis.spines[["top", "right"]].set_visible(False)
                axis.set_xticks(xs, [str(x) for x in xs], fontsize=7)
    axes[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plans_plot(results: dict[str, Any], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(5.5, 3.4))
    for preset in dict.fromkeys(row["preset"] for row in results["plans"]):
        rows = [row for row in results["plans"] if row["preset"] == preset and row["graph"] == "residual blocks"]
        for key, style in (("first plan", "o-"), ("cached plan", "s--")):
            axis.plot(
                [r["nodes"] for r in rows],
                [1000 * r[key] / r["nodes"] for r in rows],
                style,
                color=colour(preset),
                ms=4,
                label=f"{preset}, {key}",
            )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("nodes of the graph")
    axis.set_ylabel("microseconds a node")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def growth(results: dict[str, Any]) -> str:
    lines = [
        "| tokens | gradient x input, ms | attnlrp, ms | ratio | gradient x input, MiB | attnlrp, MiB | ratio |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for p in results["tokens"]:
        g, a = p["gradient"], p["attnlrp"]
        lines.append(
            f"| {p['tokens']:,} | {g['milliseconds']:.1f} | {a['milliseconds']:.1f} | {a['milliseconds'] / g['milliseconds']:.2f} "
            f"| {g['peak MiB']:,.0f} | {a['peak MiB']:,.0f} | {a['peak MiB'] / g['peak MiB']:.2f} |"
        )  # fmt: skip
    return "\n".join(lines)


def precision(results: dict[str, Any]) -> str:
    """Per model, the worst over torch's own choice of attention and every backend that could be forced."""
    lines = [
        "| model | float32, GPU against CPU: largest error | backends | bf16: largest error | bf16: rank correlation | "
        "the same of gradient x input | backends |",
        "|---|---:|---|---:|---:|---:|---|",
    ]
    for name, row in results.items():
        if not isinstance(row, dict) or "float32" not in row:
            continue
        cells = []
        for dtype in ("float32", "bfloat16"):
            ran = {key: found for key, found in row.items() if key.split(",")[0] == dtype and "error" in found}
            attends = any(found["attention"] for found in ran.values())
            cells.append(f"{max(found['error'] for found in ran.values()):.1e}")
            if dtype == "bfloat16":
                cells.append(f"{min(found['rank correlation'] for found in ran.values()):.4f}")
                own = row[dtype].get("gradient's rank correlation")
                cells.append("" if own is None else f"{own:.4f}")
            cells.append(
                ", ".join(key.split(", ")[1] for key in ran if ", " in key) if attends else "no fused attention"
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def precision_cpu(results: dict[str, Any]) -> str:
    """Per model in bf16: what the prediction, gradient x input and relevance lose."""
    lines = [
        "| model | the prediction's error | relevance: largest error | rank correlation | gradient x input: largest error | rank correlation |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, row in results.items():
        if isinstance(row, dict) and "error" in row.get("bfloat16", {}):
            found = row["bfloat16"]
            errors = [f"{found[key]:.1e}" for key in ("prediction's error", "error", "gradient's error")]
            ranks = [f"{found[key]:.4f}" for key in ("rank correlation", "gradient's rank correlation")]
            lines.append(f"| {name} | {errors[0]} | {errors[1]} | {ranks[0]} | {errors[2]} | {ranks[1]} |")
    return "\n".join(lines)


def made_on(results: dict[str, Any]) -> str:
    versions = results.get("versions") or {"torch": results["torch"]}
    return f"{results['machine']}, {', '.join(f'{k} {v}' for k, v in versions.items())}, {results['date']}"


def main() -> None:
    figures = DOCS / "performance"
    figures.mkdir(exist_ok=True)
    parts = [(ROOT / "bench" / "performance.md").read_text()]
    speed, scaling, plans = load("speed_h200.json"), load("scaling_h200.json"), load("plans_cpu.json")
    if speed:
        parts.append(f"## At a glance\n\n{made_on(speed)}. Time / gradient x input.\n\n{glance(speed['models'])}\n")
        bars(speed, figures / "speed.png")
        parts.append(
            f"## One explanation on a GPU\n\n{made_on(speed)}. Random weights at published sizes; forward pass included.\n\n![Time per explanation](performance/speed.png)\n"
        )
        parts += [
            f"### {name}\n\n{table(found['rows'], found['failed'], True)}\n" for name, found in speed["models"].items()
        ]
    cpu = load("speed_cpu.json")
    if cpu:
        parts.append(f"## One explanation on a CPU\n\n{made_on(cpu)}.\n")
        parts += [
            f"### {name} (CPU)\n\n{table(found['rows'], found['failed'], False)}\n"
            for name, found in cpu["models"].items()
        ]
    if scaling:
        curves(scaling, figures / "scaling.png")
        parts.append(
            f"## How it grows\n\n{made_on(scaling)}. Llama-3.2-1B in bf16, batch 1; 512 tokens where depth and batch grow.\n\n![Time and memory against tokens, layers and batch](performance/scaling.png)\n\n{growth(scaling)}\n"
        )
    memory, small = load("memory_h200.json"), load("memory_cpu.json")
    parts.append("## Less memory: checkpointing and offloading\n")
    for found in filter(None, (memory, small)):
        timed = "H200" in found["machine"]
        lines = [f"| | {'ms' if timed else 'time / gradient x input'} | peak MiB |", "|---|---:|---:|"]
        for label, row in found["rows"].items():
            cost = f"{row['milliseconds']:.1f}" if timed else f"{row['ratio']:.2f}"
            lines.append(f"| {label} | {cost} | {row['peak MiB']:,.1f} |")
        parts.append(f"{made_on(found)}. {found['what']}.\n\n" + "\n".join(lines) + "\n")
    if memory:
        lines = ["| | ms |", "|---|---:|"] + [
            f"| {label} | {value:.1f} |" for label, value in memory["targets"].items()
        ]
        parts.append(
            f"## Many targets\n\n{made_on(memory)}. ViT-b-16, one picture, {memory['number']} classes.\n\n"
            + "\n".join(lines)
            + "\n"
        )
    if plans:
        plans_plot(plans, figures / "plans.png")
        lines = [
            "| preset | graph | nodes | capture, ms | first plan, ms | cached plan with capture, ms |",
            "|---|---|---:|---:|---:|---:|",
        ]
        lines += [
            f"| {r['preset']} | {r['graph']} | {r['nodes']:,} | {r['capture']:.1f} | {r['first plan']:.0f} | {r['cached plan']:.1f} |"
            for r in plans["plans"]
        ]
        parts.append(
            f"## Planning\n\n{made_on(plans)}.\n\n![Microseconds per node](performance/plans.png)\n\n"
            + "\n".join(lines)
            + "\n"
        )
    found = load("zoo_h200.json")
    if found:
        parts.append(f"## The zoos on a GPU\n\n{made_on(found)}.\n\n{zoo(found)}\n")
    architectures = load("architectures_h200.json")
    if architectures:
        parts.append(
            f"## Precision\n\n{made_on(architectures)}. `attnlrp`; errors relative to the largest relevance; rank correlation (Spearman) against float32 on the CPU, the worst over torch's own choice of attention and each backend that could be forced (float32 has no flash or cuDNN kernel; grouped queries in float32 and T5's position bias have only some). Random weights: nets without trained structure are chaotic in bf16, and gradient x input loses as much where it was measured beside (on VGG16 and ResNet-50 it *is* `attnlrp`, and in float32 too errs as much: rectifiers near 0 fall to the other side under other convolution algorithms). Coefficients ride autograd's own backward, so they have the dtype of the activations; where ranks in bf16 are not enough, explain `model.float()`.\n\n{precision(architectures)}\n"
        )
    here = load("architectures_cpu.json")
    if here:
        parts.append(
            f"{made_on(here)}. The same in bf16 on a CPU, beside what the model's own prediction loses (relative to its largest score). "
            "Relevance adds up to the score: where bf16 predicts another one, as Mamba does with random weights, relevance is another too.\n\n"
            f"{precision_cpu(here)}\n"
        )
    (DOCS / "performance.md").write_text("\n".join(parts))


if __name__ == "__main__":
    main()

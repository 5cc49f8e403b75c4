"""`dynamiclrp inspect`: what is a model made of, and what will be done to explain it?"""

from collections import Counter
from typing import Annotated, Any

import typer

from .models import Loaded, load
from .options import Debug, Device, Dtype, Json, Model, Out, Preset, Random, chosen
from .output import check_out, print_json, show, working, write_json

EXAMPLES = """[bold]Examples[/]

dynamiclrp inspect torchvision:resnet50 --random

dynamiclrp inspect gpt2 --text "The capital of France is" --promises

dynamiclrp inspect mymodels:net --shape 1,3,64,64 --preset dynamic --json"""


def run(
    model: Model,
    text: Annotated[str | None, typer.Option(help="A text to run the model on.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="Shape of a random input to run it on, such as 1,3,224,224.")
    ] = None,
    preset: Preset = None,
    promises: Annotated[bool, typer.Option("--promises", help="Also print every promise with its chain.")] = False,
    random: Random = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """What is it made of? Operations, the rule of each, coverage, promises, depth and density, without explaining anything."""
    from rich.console import Console

    import dynamiclrp as dlrp

    check_out(out, (".json",))
    rules = chosen(preset)
    with working(f"loading {model}"):
        loaded = load(model, device=device, dtype=dtype, random=random)
    inputs = loaded.example(text, shape)
    with working("planning"):
        report = dlrp.inspect(loaded.model, **inputs, **rules)
    result = summary(loaded, inputs, report, promises)
    if out is not None:
        write_json(out, result)
    if json:
        print_json(result)
        return
    console = Console()
    console.print(
        f"[bold]{model}[/]: {loaded.parameters:,} parameters, {report.nodes:,} nodes, {report.live:,} live, "
        f"coverage {report.coverage:.2%}",
        highlight=False,
    )
    if report.unknown:
        console.print("without a rule: " + ", ".join(f"{name} ×{n}" for name, n in report.unknown.items()))
    rows = [[op["op"], op["kind"], op["rule"], op["nodes"]] for op in result["operations"]]
    show(console, f"Operations under {report.preset!r}", ["operation", "kind", "rule", "nodes"], rows, left=3)
    if result["promises"] is not None:
        p = result["promises"]
        console.print(
            f"promises {p['promises']:,}, internal nodes {p['internal_nodes']:,}, depth δ {p['depth']:,}, "
            f"density ρ {p['density']:.3f}",
            highlight=False,
        )
        for tree in p.get("trees", ()):
            console.print(tree, highlight=False, markup=False)
    if out is not None:
        console.print(f"written: {out}", highlight=False, soft_wrap=True)


def summary(loaded: Loaded, inputs: dict[str, Any], report: Any, promises: bool) -> dict[str, Any]:
    """What was found, as data."""
    plan = report.plan
    counts: Counter[tuple[str, str, str]] = Counter()
    if plan is not None:
        counts.update((s.name, str(s.kind), str(s.rule) if any(s.hooks) else "native") for s in plan.steps)
    trees = {"trees": [str(promise) for promise in plan.promises]} if plan is not None and promises else {}
    return {
        "model": loaded.name,
        "parameters": loaded.parameters,
        "inputs": {name: list(value.shape) for name, value in inputs.items() if hasattr(value, "shape")},
        "preset": report.preset.name,
        "nodes": report.nodes,
        "live": report.live,
        "coverage": report.coverage,
        "without_a_rule": report.unknown,
        "operations": [
            {"op": name, "kind": kind, "rule": rule, "nodes": n} for (name, kind, rule), n in counts.most_common()
        ],
        "promises": None
        if plan is None
        else {
            "promises": plan.statistics.promises,
            "internal_nodes": plan.statistics.internal_nodes,
            "depth": plan.statistics.depth,
            "density": plan.statistics.density,
            **trees,
        },
    }

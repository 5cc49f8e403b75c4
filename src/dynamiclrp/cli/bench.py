"""`dynamiclrp bench`: what does an explanation of this model cost, beside a forward pass and a gradient?"""

import platform
from collections.abc import Callable
from typing import Annotated, Any

import typer

from .exits import Code, UserError
from .models import Loaded, load
from .options import Debug, Device, Dtype, Json, Model, Out, Random, preset_of
from .output import check_out, columns, print_json, quiet_stdout, show, working, write_json

EXAMPLES = """[bold]Examples[/]

dynamiclrp bench torchvision:resnet50 --random -p attnlrp -p gamma

dynamiclrp bench gpt2 --tokens 512 --device cuda --dtype bfloat16

dynamiclrp bench mymodels:net --shape 1,3,64,64 --json"""


def run(
    model: Model,
    preset: Annotated[list[str] | None, typer.Option("--preset", "-p", help="Presets to measure.")] = None,
    text: Annotated[str | None, typer.Option(help="A text to run the model on.")] = None,
    shape: Annotated[str | None, typer.Option(help="Shape of a random input, such as 1,3,224,224.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows at once.")] = 1,
    tokens: Annotated[int, typer.Option(min=2, help="Length of a random text.")] = 128,
    repeats: Annotated[int, typer.Option(min=3, help="Rounds; the median counts.")] = 11,
    patience: Annotated[float, typer.Option(min=1, help="Seconds after which no round begins.")] = 60,
    random: Random = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """What does an explanation cost? Forward, gradient x input and presets in one run: time, ratio, peak memory."""
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from ..timing import measure

    check_out(out, (".json",))
    presets = {name: preset_of(name) for name in preset or ("default", "attnlrp", "gamma")}
    with working(f"loading {model}"):
        loaded = load(model, device=device, dtype=dtype, random=random)
    inputs = loaded.example(text, shape, batch, tokens)
    with quiet_stdout(), Progress(*columns(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=repeats)
        costs = measure(
            contestants(loaded, inputs, presets),
            repeats=repeats,
            patience=patience,
            step=lambda: progress.advance(task),
        )
    base = costs["gradient x input"]
    rows = [
        {
            "what": name,
            "ms": round(cost.milliseconds, 3),
            "ratio": round(cost.milliseconds / base.milliseconds, 3),
            "peak_mb": round(cost.peak_bytes / 1e6, 2),
            "memory_ratio": round(cost.peak_bytes / max(base.peak_bytes, 1), 3),
        }
        for name, cost in costs.items()
    ]
    place = loaded.device
    machine = torch.cuda.get_device_name(place) if place.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    result: dict[str, Any] = {
        "model": model,
        "parameters": loaded.parameters,
        "inputs": {name: list(value.shape) for name, value in inputs.items() if hasattr(value, "shape")},
        "dtype": dtype,
        "machine": machine,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "ratio_to": "gradient x input, parameters frozen, forward pass included",
        "rows": rows,
    }
    if out is not None:
        write_json(out, result)
    if json:
        print_json(result)
        return
    console = Console()
    shapes = ", ".join(f"{name} {'×'.join(map(str, size))}" for name, size in result["inputs"].items())
    show(
        console,
        f"{model}: {shapes}, {dtype}, {machine}",
        ["", "ms", "ratio", "peak MB", "memory ratio"],
        [[f"{v:,.2f}" if isinstance(v, float) else v for v in row.values()] for row in rows],
    )
    console.print("forward pass included; ratios to gradient x input in this run", style="dim")
    if out is not None:
        console.print(f"written: {out}", highlight=False, soft_wrap=True)


def contestants(loaded: Loaded, inputs: dict[str, Any], presets: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """Calls that end with the relevance (or gradient x input) of the same score."""
    import torch

    import dynamiclrp as dlrp
    from dynamiclrp.outputs import unwrap
    from dynamiclrp.targets import seed_for

    model: Any = loaded.model.requires_grad_(False)
    ids, pixels = inputs.get("input_ids"), [x for x in inputs.values() if x.is_floating_point()]
    if ids is None and not pixels:
        raise UserError(
            Code.USAGE, f"{loaded.name}: nothing among its inputs can be explained", "Give --shape or --text"
        )

    def forward() -> None:
        with torch.no_grad():
            model(**inputs)

    def gradient() -> None:
        if ids is not None:
            leaf = model.get_input_embeddings()(ids).detach().requires_grad_()
            given = {key: value for key, value in inputs.items() if key != "input_ids"} | {"inputs_embeds": leaf}
        else:
            leaf = pixels[0].detach().clone().requires_grad_()
            given = {key: leaf if value is pixels[0] else value for key, value in inputs.items()}
        output = unwrap(model(**given))
        (found,) = torch.autograd.grad(output, leaf, seed_for(output, None).coefficient)
        (found * leaf.detach()).sum(-1 if ids is not None else ())

    explainers = {name: dlrp.Explainer(model, preset) for name, preset in presets.items()}
    calls = {name: (lambda explainer=explainer: explainer(**inputs)) for name, explainer in explainers.items()}
    return {"forward": forward, "gradient x input": gradient, **calls}

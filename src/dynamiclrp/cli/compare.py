"""`dynamiclrp compare`: which method knows best what this model looks at?"""

from pathlib import Path
from typing import Annotated, Any

import typer

from .exits import Code, UserError, asking
from .models import Loaded, load
from .options import Debug, Device, Dtype, Json, Model, Out, preset_of
from .output import check_out, print_json, quiet_stdout, working, write

EXAMPLES = """[bold]Examples[/]

dynamiclrp compare torchvision:resnet50 photos/*.jpg -m gamma -m attnlrp -m captum:IntegratedGradients -m random

dynamiclrp compare gpt2 --text "The capital of France is" --text "Two and two make" --out curves.png

dynamiclrp compare gpt2 --texts lines.txt --measure logit --store run.jsonl --json"""

PICTURES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})


def run(
    model: Model,
    pictures: Annotated[
        list[Path] | None, typer.Argument(help="Pictures, or folders of them.", show_default=False)
    ] = None,
    text: Annotated[list[str] | None, typer.Option(help="A text; may be given several times.")] = None,
    texts: Annotated[Path | None, typer.Option(help="A file of texts, one a line.")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method", "-m", help="A preset, captum:NAME, zennit:NAME, gradient or random; several in a row."
        ),
    ] = None,
    unit: Annotated[str | None, typer.Option(help="What is taken away: pixel, region, patch, token.")] = None,
    fill: Annotated[str | None, typer.Option(help="What comes in its place: blur, mean, zero, pad, mask.")] = None,
    measure: Annotated[str, typer.Option(help="What is watched: probability, logit, accuracy.")] = "probability",
    step: Annotated[int | None, typer.Option(min=1, help="Units taken away at once.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many inputs.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Perturbed inputs at once; by default what suits the device.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random choices and intervals.")] = 0,
    store: Annotated[Path | None, typer.Option(help="A .jsonl file to go on from when stopped.")] = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """Which method knows best? Take away what each calls relevant, watch the model's score: areas with intervals, a plot."""
    from rich.console import Console

    from .. import evaluate

    check_out(out, (".json", ".png", ".svg", ".pdf", ".csv"))
    files = _files(pictures or [])
    words = [*(text or []), *_lines(texts)]
    if bool(files) == bool(words):
        raise UserError(Code.USAGE, "give pictures, or texts", "For example: photos/*.jpg, or --text 'The capital is'")
    methods = _methods(method or ["default", "gradient", "random"])
    with working(f"loading {model}"):
        loaded = load(model, device=device, dtype=dtype)
    data = _pictures(loaded, files[:limit]) if files else _tokens(loaded, words[:limit])
    with quiet_stdout(), asking():
        found = evaluate.compare(
            loaded.model,
            data,
            methods=methods,
            unit=unit or ("region" if files else "token"),
            fill=fill or ("blur" if files else "zero"),
            measure=measure,
            step=step,
            batch_size=batch_size,
            limit=limit,
            seed=seed,
            store=None if store is None else str(store),
        )
    _write(out, found)
    if json:
        print_json({"model": model, "setup": _plain(found.setup), "rows": found.rows})
        return
    console = Console()
    console.print(found)
    if out is not None:
        console.print(f"written: {out}", highlight=False, soft_wrap=True)


def _methods(names: list[str]) -> dict[str, Any]:
    """By label; presets with parameters are made here, all else is looked up by `evaluate`."""
    return {name: preset_of(name) if "," in name else name for name in names}


def _files(given: list[Path]) -> list[Path]:
    files: list[Path] = []
    for path in given:
        if path.is_dir():
            inside = sorted(f for f in path.iterdir() if f.suffix.lower() in PICTURES)
            if not inside:
                raise UserError(Code.INPUT, f"{path}: a folder without pictures", "Give pictures, or a folder of them")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise UserError(Code.INPUT, f"{path}: no such file", "Give pictures, or a folder of them")
    return files


def _lines(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        lines = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(Code.INPUT, f"--texts {file}: {error}", "Expected a text file, one text a line") from None
    if not lines:
        raise UserError(Code.INPUT, f"--texts {file}: it is empty", "Expected one text a line")
    return lines


def _pictures(loaded: Loaded, files: list[Path]) -> Any:
    import torch

    from ..image import prepare

    prepared = [prepare(loaded.model, file, loaded.processor).tensor for file in files]
    if len({x.shape for x in prepared}) > 1:
        raise UserError(
            Code.INPUT, "the processor makes inputs of different sizes", "Give a model with a fixed input size"
        )
    return torch.cat(prepared).to(loaded.device)


def _tokens(loaded: Loaded, words: list[str]) -> Any:
    if loaded.tokenizer is None:
        raise UserError(Code.MODEL, f"{loaded.name} has no tokenizer", "Give a text model, or pictures")
    batches = [dict(loaded.tokenizer(text, return_tensors="pt")) for text in words]
    return [{key: value.to(loaded.device) for key, value in batch.items()} for batch in batches]


def _write(out: Path | None, found: Any) -> None:
    if out is None:
        return
    match out.suffix.lower():
        case ".json":
            write(out, lambda part: found.save(part))
        case ".csv":
            write(out, lambda part: found.to_pandas().to_csv(part))
        case _:
            write(out, lambda part: found.plot(str(part)))


def _plain(setup: Any) -> dict[str, Any]:
    return {
        key: value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
        for key, value in setup.items()
    }

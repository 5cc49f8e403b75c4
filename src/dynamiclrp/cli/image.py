"""`dynamiclrp image`: which pixels made a vision model answer as it did?"""

from pathlib import Path
from typing import Annotated

import typer

from .exits import Code, UserError, asking
from .models import load
from .options import Contrast, Debug, Device, Dtype, Json, Ledger, Model, Out, preset_of, target_of
from .output import RESULTS, check_out, finish, working

EXAMPLES = """[bold]Examples[/]

dynamiclrp image torchvision:resnet50 photo.jpg --out why.png

dynamiclrp image timm:vit_base_patch16_224 photo.jpg --top 3 --out why.html

dynamiclrp image google/vit-base-patch16-224 photo.jpg -t tabby -t collie

dynamiclrp image torchvision:vgg16 photo.jpg -p attnlrp -p gamma -p gradient --out methods.html"""


def run(
    model: Model,
    picture: Annotated[Path, typer.Argument(help="The picture's file.", show_default=False)],
    target: Annotated[
        list[str] | None, typer.Option("--target", "-t", help="Class to explain, by name or number; several in a row.")
    ] = None,
    top: Annotated[int | None, typer.Option(min=1, help="Explain the first so many answers.")] = None,
    contrast: Contrast = None,
    preset: Annotated[
        list[str] | None, typer.Option("--preset", "-p", help="Which rules; several are shown side by side.")
    ] = None,
    classes: Annotated[Path | None, typer.Option(help="File with the classes' names, one a line.")] = None,
    ledger: Ledger = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """Which pixels made it answer so? Heat maps on the picture itself, for one answer or several, one preset or several."""
    from .. import explain_image
    from ..image import open_picture

    check_out(out, RESULTS)
    if not picture.is_file():
        raise UserError(Code.INPUT, f"{picture}: no such file", "Give the path of a picture")
    if top is not None and target:
        raise UserError(Code.USAGE, "--top and --target exclude each other")
    rules = [preset_of(text) for text in preset or ()]
    wanted = [target_of(text) for text in target or ()]
    if len(rules) > 1 and (len(wanted) > 1 or top):
        raise UserError(Code.USAGE, "several presets and several targets", "Vary one of them at a time")
    names = _names(classes)
    try:
        shown = open_picture(picture)
    except (ValueError, OSError) as error:
        raise UserError(Code.INPUT, str(error), "Give a picture, such as a JPEG or PNG file") from None
    with working(f"loading {model}"):
        loaded = load(model, device=device, dtype=dtype)
    many = wanted if len(wanted) > 1 else top
    with working("explaining"), asking():
        result = explain_image(
            loaded.model,
            shown,
            contrast=target_of(contrast),
            processor=loaded.processor,
            classes=names or loaded.classes,
            ledger=ledger,
            **({"targets": many} if many else {"target": wanted[0] if wanted else None}),
            **({"presets": rules} if len(rules) > 1 else {"preset": rules[0]} if rules else {}),
        )
    finish(result, json, out)


def _names(classes: Path | None) -> list[str] | None:
    if classes is None:
        return None
    try:
        return classes.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(Code.INPUT, f"--classes {classes}: {error}", "Expected a text file, one name a line") from None

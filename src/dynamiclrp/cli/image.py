"""`dynamiclrp image`: which pixels made a vision model answer as it did?"""

from pathlib import Path
from typing import Annotated

import typer

from .exits import Code, UserError, asking
from .models import load
from .options import Contrast, Debug, Device, Dtype, Json, Ledger, Model, Out, Presets, Targets, Top, target_of, wanted
from .output import RESULTS, check_out, finish, working

EXAMPLES = """[bold]Examples[/]

dynamiclrp image torchvision:resnet50 photo.jpg --out why.png

dynamiclrp image timm:vit_base_patch16_224 photo.jpg --top 3 --out why.html

dynamiclrp image google/vit-base-patch16-224 photo.jpg -t tabby -t collie

dynamiclrp image torchvision:vgg16 photo.jpg -p attnlrp -p gamma -p gradient --out methods.html"""


def run(
    model: Model,
    picture: Annotated[Path, typer.Argument(help="The picture's file.", show_default=False)],
    target: Targets = None,
    top: Top = None,
    contrast: Contrast = None,
    preset: Presets = None,
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
    asked = wanted(target, top, preset)
    names = _names(classes)
    try:
        shown = open_picture(picture)
    except (ValueError, OSError) as error:
        raise UserError(Code.INPUT, str(error), "Give a picture, such as a JPEG or PNG file") from None
    with working(f"loading {model}"):
        loaded = load(model, device=device, dtype=dtype)
    with working("explaining"), asking():
        result = explain_image(
            loaded.model,
            shown,
            contrast=target_of(contrast),
            processor=loaded.processor,
            classes=names or loaded.classes,
            ledger=ledger,
            **asked,
        )
    finish(result, json, out)


def _names(classes: Path | None) -> list[str] | None:
    if classes is None:
        return None
    try:
        return classes.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(Code.INPUT, f"--classes {classes}: {error}", "Expected a text file, one name a line") from None

"""`explain_image`: which pixels an image model's answer stands on, shown on the picture as it was given.

In: a model and a picture (a path, a PIL picture or a tensor that is already preprocessed). Out: an `Attribution`, or a
`Comparison` of several targets or presets. Preprocessing is found from the model where the model says it: timm's
configuration, torchvision's weights, a transformers checkpoint's processor.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from .arguments import argument_names
from .attribution import Attribution
from .comparison import Comparison, explain_each
from .geometry import seen_part
from .heads import ClassChoice, accepted, class_names
from .media import Picture
from .presets import Preset

_SHOWN = 1024  # pixels of the longer side that a page carries
Source = str | PathLike[str] | Tensor | Any  # Any: a PIL picture
Process = Callable[[Any], Tensor]


@overload
def explain_image(
    model: nn.Module,
    image: Source,
    *,
    target: int | str | None = ...,
    contrast: int | str | None = ...,
    preset: str | Preset = ...,
    processor: Any = ...,
    classes: Sequence[str] | Mapping[int, str] | None = ...,
    ledger: bool = ...,
) -> Attribution: ...


@overload
def explain_image(
    model: nn.Module,
    image: Source,
    *,
    target: int | str | None = ...,
    contrast: int | str | None = ...,
    targets: int | Sequence[int | str] | None = ...,
    preset: str | Preset = ...,
    presets: Sequence[str | Preset] | None = ...,
    processor: Any = ...,
    classes: Sequence[str] | Mapping[int, str] | None = ...,
    ledger: bool = ...,
) -> Attribution | Comparison: ...


def explain_image(
    model: nn.Module,
    image: Source,
    *,
    target: int | str | None = None,
    contrast: int | str | None = None,
    targets: int | Sequence[int | str] | None = None,
    preset: str | Preset = "default",
    presets: Sequence[str | Preset] | None = None,
    processor: Any = None,
    classes: Sequence[str] | Mapping[int, str] | None = None,
    ledger: bool = False,
) -> Attribution | Comparison:
    """Explain an image model's answer by the pixels it saw.

    `image`: a path, a PIL picture, or a tensor [3, H, W] that is already what the model wants. `processor`: any function
    from a PIL picture to a tensor, a `transformers` image processor or torchvision's weights; without it the model is asked.
    `target` and `contrast` are class numbers or names (`classes`, or the model's own names). `targets` (a list, or how
    many of the likeliest) and `presets` give several explanations side by side.

        dlrp.explain_image(model, "cat.jpg", targets=2).html("cat.html")

    >>> import torch, dynamiclrp as dlrp
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    >>> a = dlrp.explain_image(model, torch.rand(3, 24, 32), target="dog", classes=["cat", "dog", "owl", "fox"])
    >>> a.heat_map().shape
    torch.Size([24, 32])
    """
    seen = prepare(model, image, processor)
    if classes is None and hasattr(processor, "meta"):  # torchvision's weights name their classes
        classes = processor.meta.get("categories")
    names = class_names(model, classes)
    return explain_each(
        model,
        {seen.argument: seen.tensor.to(next(model.parameters()).device)},
        lambda one: ClassChoice(one, contrast, names),
        target=target,
        targets=targets,
        preset=preset,
        presets=presets,
        ledger=ledger,
        media={} if seen.picture is None else {seen.argument: (seen.picture,)},
        about={"model": type(model).__name__, "task": "image-classification", **seen.about},
    )


# Preparing a picture -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Prepared:
    """What the model gets, under which argument, and what the person sees."""

    tensor: Tensor
    argument: str
    picture: Picture | None
    about: dict[str, str]


def prepare(model: nn.Module, image: Source, processor: Any = None) -> Prepared:
    """A picture as the model wants it, and as the person knows it."""
    argument = image_argument(model)
    if isinstance(image, Tensor):
        if processor is not None:
            raise TypeError(
                "explain_image: a tensor counts as preprocessed; pass the path or PIL picture with a processor"
            )
        x = image[None] if image.dim() == 3 else image
        if x.dim() != 4 or len(x) != 1 or not x.is_floating_point():
            raise ValueError(
                f"image: a tensor of shape {tuple(image.shape)} and {image.dtype}; expected floats [3, H, W] or [1, 3, H, W], "
                "preprocessed as the model wants it"
            )
        return Prepared(x, argument, _as_picture(x[0]), {})
    picture = open_picture(image)
    process = as_process(processor) if processor is not None else find_processor(model)
    x = process(picture)
    x = x[None] if x.dim() == 3 else x
    if x.dim() != 4 or len(x) != 1:
        raise ValueError(f"the processor made a tensor of shape {tuple(x.shape)} of one picture: expected [3, H, W]")
    seen = seen_part(process, picture.width, picture.height)
    if seen is not None:
        return Prepared(x, argument, keep_picture(picture, seen), {})
    # not a resize, crop or pad: show what the model saw instead of guessing
    return Prepared(x, argument, _as_picture(x[0]), {"geometry": "as the model saw it"})


def image_argument(model: nn.Module) -> str:
    """The name of the argument that takes pixels."""
    names = accepted(model) or argument_names(model)[0]  # one that takes any names its own first
    return "pixel_values" if "pixel_values" in names else names[0] if names else "pixel_values"


def open_picture(image: Any) -> Any:
    """A PIL picture in RGB, turned as its camera says."""
    Image, ImageOps = _pil()
    if isinstance(image, (str, os.PathLike)):
        path = Path(image)
        if not path.is_file():
            raise FileNotFoundError(f"no picture at {path}")
        try:
            with Image.open(path) as opened:
                return ImageOps.exif_transpose(opened).convert("RGB")
        except Image.UnidentifiedImageError:
            raise ValueError(f"{path} is not a picture that Pillow can read") from None
    if isinstance(image, Image.Image):
        return ImageOps.exif_transpose(image).convert("RGB")
    raise TypeError(f"image: expected a path, a PIL picture or a tensor, got {type(image).__name__}")


def _pil() -> Any:
    try:
        from PIL import Image, ImageOps
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures need Pillow: pip install pillow") from error
    return Image, ImageOps


def keep_picture(picture: Any, seen: tuple[float, float, float, float]) -> Picture:
    """The picture as a page carries it: smaller if it is very large."""
    shrink = min(1.0, _SHOWN / max(picture.size))
    shown = picture
    if shrink < 1:
        shown = picture.resize((round(picture.width * shrink), round(picture.height * shrink)))
    across, down = shown.width / picture.width, shown.height / picture.height
    out = io.BytesIO()
    shown.save(out, "JPEG", quality=90, optimize=True)
    left, top, right, bottom = seen
    return Picture(
        out.getvalue(),
        "image/jpeg",
        shown.width,
        shown.height,
        (left * across, top * down, right * across, bottom * down),
    )


def _as_picture(x: Tensor) -> Picture | None:
    """What the model saw, made visible: each tensor stretched to the range of a picture."""
    if x.shape[0] not in (1, 3):
        return None
    try:
        from PIL import Image
    except ModuleNotFoundError:
        return None
    x = x.detach().float().cpu()
    low, high = x.amin((1, 2), keepdim=True), x.amax((1, 2), keepdim=True)
    pixels = ((x - low) / (high - low).clamp_min(1e-6) * 255).round().to(torch.uint8)
    pixels = pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous()
    height, width = pixels.shape[:2]
    out = io.BytesIO()
    Image.frombytes("RGB", (width, height), bytes(pixels.flatten().tolist())).save(out, "PNG", optimize=True)
    return Picture(out.getvalue(), "image/png", width, height, (0.0, 0.0, float(width), float(height)))


# Preprocessing and class names that models bring along ---------------------------------------------------------------


def as_process(processor: Any) -> Process:
    """A function from a PIL picture to a tensor, of whatever was given."""
    if hasattr(processor, "transforms") and hasattr(processor, "meta"):  # torchvision's weights
        processor = processor.transforms()
    image_processor = getattr(processor, "image_processor", processor)  # of a processor for several modalities
    if type(image_processor).__module__.startswith("transformers"):

        def through(picture: Any) -> Tensor:
            return torch.as_tensor(image_processor(images=picture, return_tensors="pt")["pixel_values"]).float()

        return through
    if not callable(processor):
        raise TypeError(
            f"processor: expected a function from a PIL picture to a tensor, got {type(processor).__name__}"
        )

    def checked(picture: Any) -> Tensor:
        made = processor(picture)
        if not isinstance(made, Tensor) or not made.is_floating_point():
            raise TypeError(f"the processor returned {type(made).__name__}: expected a float tensor [3, H, W]")
        return made

    return checked


def find_processor(model: nn.Module) -> Process:
    """The model's own preprocessing, where it says which."""
    if getattr(model, "pretrained_cfg", None):  # timm
        from timm.data import create_transform, resolve_data_config

        return as_process(create_transform(**resolve_data_config({}, model=model), is_training=False))
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    if name and type(model).__module__.startswith("transformers"):
        from transformers import AutoImageProcessor

        try:
            return as_process(AutoImageProcessor.from_pretrained(name))
        except (OSError, ValueError) as error:
            raise ValueError(f"no image processor was found beside {name!r} ({error}): pass processor=") from None
    hint = ""
    if type(model).__module__.startswith("torchvision."):
        hint = " For torchvision, the weights it was built with: processor=ResNet50_Weights.DEFAULT, say."
    raise ValueError(
        f"{type(model).__name__} does not say how pictures are prepared for it. Pass processor=, a function from a PIL "
        f"picture to a tensor (or a transformers image processor), or a tensor that is already prepared.{hint}"
    )

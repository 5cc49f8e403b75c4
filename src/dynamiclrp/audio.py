"""`explain_audio`: which moments (and frequencies) of a recording a model's answer stands on."""

from __future__ import annotations

import os
import wave
from collections.abc import Callable, Mapping, Sequence
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
    sound = heard(samples, rate, x, lambda s: _input(model, s, rate, processor)[0])
    return replace(
        a,
        target=ask.chosen,
        media={argument: (sound,)},
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


def heard(samples: Tensor, rate: int, x: Tensor, process: Callable[[Tensor], Tensor]) -> Sound:
    """What of a recording the model was given: the samples, or a spectrogram, and which seconds of it.

    The seconds are found by asking: a burst of noise at two moments, and where in the features it shows.
    """
    shape = tuple(x.shape[1:])
    if len(shape) == 1 or (len(shape) == 2 and shape[0] == 1 and shape[1] >= len(samples) // 2):
        return Sound(samples, rate)
    axis = max(range(len(shape)), key=lambda i: shape[i])
    features, frames, seconds = x[0].detach().float().cpu(), shape[axis], len(samples) / rate
    noise = torch.randn(len(samples), generator=torch.Generator().manual_seed(0)) * samples.abs().max().clamp_min(0.1)
    silence = _frames(process(1e-4 * noise), axis)
    found = []
    for begin, end in ((0.1, 0.14), (0.3, 0.34), (0.5, 0.54), (0.7, 0.74), (0.9, 0.94)):
        burst = 1e-4 * noise
        a, b = int(begin * len(samples)), max(int(end * len(samples)), int(begin * len(samples)) + 1)
        burst[a:b] = noise[a:b]
        change = (_frames(process(burst), axis) - silence).abs().sum(0)
        change = (change - change.median()).clamp_min(0)
        change = torch.where(change > 0.3 * change.max(), change, 0)
        if change.sum() > 0 and int((change > 0).sum()) < frames // 2:
            place = float((change * (torch.arange(frames) + 0.5)).sum() / change.sum())
            found.append(((a + b) / 2 / rate, place))
    if len(found) < 2 or found[-1][1] <= found[0][1]:
        return Sound(samples, rate, features, axis, (0.0, seconds))
    times, places = (torch.tensor(column, dtype=torch.float64) for column in zip(*found))
    slope = ((places - places.mean()) * (times - times.mean())).sum() / ((times - times.mean()) ** 2).sum()
    start = float(times.mean() - places.mean() / slope)
    return Sound(samples, rate, features, axis, (start, start + frames / float(slope)))


def _frames(x: Tensor, axis: int) -> Tensor:
    row = x[0].detach().double().cpu()
    return row.movedim(axis, -1).reshape(-1, row.shape[axis])

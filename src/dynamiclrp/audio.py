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

from .arguments import argument_names
from .attribution import Attribution
from .explain import Explainer
from .heads import ClassChoice, accepted, class_names
from .media import Sound
from .outputs import unwrap
from .presets import Preset

_QUIET = 1e-4  # noise that counts as silence
_MOMENTS = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the recording, where bursts are tried


def explain_audio(
    model: nn.Module,
    audio: str | PathLike[str] | Tensor | Any,
    *,
    rate: int | None = None,
    target: int | str | None = None,
    contrast: int | str | None = None,
    processor: Any = None,
    classes: Sequence[str] | Mapping[int, str] | None = None,
    preset: str | Preset = "default",
    ledger: bool = False,
) -> Attribution:
    """Explain an audio classifier by the recording it heard.

    `audio`: a .wav file, or samples (a tensor or array, mono) with their `rate`. `processor`: a `transformers` feature
    extractor, or a function from samples to the model's input; without it the samples go in as they are, [1, samples].

        a = dlrp.explain_audio(model, "bird.wav", processor=AutoFeatureExtractor.from_pretrained(...))

    >>> import torch, dynamiclrp as dlrp
    >>> a = dlrp.explain_audio(torch.nn.Linear(800, 2), torch.randn(800), rate=8000, classes=["bird", "car"])
    >>> a.media
    {'input': (Sound(0.10 s at 8000 Hz),)}
    """
    samples, rate = read_audio(audio, rate)
    x, argument = _input(model, samples, rate, processor)
    ask = ClassChoice(target, contrast, class_names(model, classes))
    x = x.to(next(model.parameters()).device)
    a = Explainer(model, preset)(target=ask, ledger=ledger, output=unwrap, **{argument: x})  # type: ignore[arg-type]
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
    names = accepted(model) or argument_names(model)[0]
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

    Axis and seconds are found by asking: a burst of noise at several moments, and where in the features it shows.
    """
    shape = tuple(x.shape[1:])
    if len(shape) == 1 or (len(shape) == 2 and shape[0] == 1 and shape[1] >= len(samples) // 2):
        return Sound(samples, rate)
    noise = torch.randn(len(samples), generator=torch.Generator().manual_seed(0)) * samples.abs().max().clamp_min(0.1)
    silence = _row(process(_QUIET * noise))
    changes = []
    for moment in _MOMENTS:
        burst = _QUIET * noise
        begin, end = int((moment - 0.02) * len(samples)), int((moment + 0.02) * len(samples)) + 1
        burst[begin:end] = noise[begin:end]
        changes.append(((begin + end) / 2 / rate, (_row(process(burst)) - silence).abs()))
    lines = [line for axis in range(len(shape)) if (line := _line(changes, axis)) is not None]
    if not lines:
        raise ValueError(
            f"the processor made features of shape {shape}, in which no axis follows the recording's time. Explain them with "
            "dynamiclrp.explain."
        )
    _, axis, span = max(lines)
    return Sound(samples, rate, x[0].detach().float().cpu(), axis, span)


def _row(x: Tensor) -> Tensor:
    return x[0].detach().double().cpu()


def _line(changes: list[tuple[float, Tensor]], axis: int) -> tuple[float, int, tuple[float, float]] | None:
    """How far bursts wander along an axis, as a share of it, and the seconds at which it begins and ends."""
    size = changes[0][1].shape[axis]
    times, places = [], []
    for time, change in changes:
        along = change.movedim(axis, 0).flatten(1).sum(1) if change.dim() > 1 else change
        along = (along - along.median()).clamp_min(0)
        along = torch.where(along > 0.3 * along.max(), along, 0)
        if along.sum() > 0 and int((along > 0).sum()) <= max(1, size // 3):  # a burst is short
            times.append(time)
            places.append(float((along * (torch.arange(size) + 0.5)).sum() / along.sum()))
    if len(times) < 2:
        return None
    t, p = torch.tensor(times, dtype=torch.float64), torch.tensor(places, dtype=torch.float64)
    slope = float(((p - p.mean()) * (t - t.mean())).sum() / ((t - t.mean()) ** 2).sum())
    wrong = float((p - p.mean() - slope * (t - t.mean())).abs().max())
    if slope <= 0 or wrong > max(1.5, 0.02 * size):
        return None
    begin = float(t.mean() - p.mean() / slope)
    return float(p.max() - p.min()) / size, axis, (begin, begin + size / slope)

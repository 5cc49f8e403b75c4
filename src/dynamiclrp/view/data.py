"""Results → the plain values that a page is drawn from.

In: an Attribution, Comparison or Generation. Out: a dict for JSON. Short rows keep their exact numbers; maps and matrices
are 16-bit integers in base64: square roots, scaled by the largest value (of a matrix: of each row), so that a sink a
thousand times as large leaves the rest exact to 0.1 %.
"""

from __future__ import annotations

import base64
import io
import math
import wave
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..attribution import Attribution, Viewable
from ..comparison import Comparison
from ..generation import Generation
from ..media import Medium, Picture, Sound, Table, Tokens
from ..parts import is_picture

_FULL = 32767
_BINS = 900  # of a waveform
_BANDS, _FRAMES = 96, 600  # of a spectrogram, at most
_PLAYABLE = 60  # seconds of sound that a page carries
_PARTS = 60  # of a tensor that is nothing in particular


def page_data(result: Viewable) -> dict[str, Any]:
    """Everything that the page's script draws."""
    pictures: list[str] = []
    if isinstance(result, Generation):
        return {"generation": generation_data(result), "panels": [], "pictures": pictures}
    if isinstance(result, Comparison):
        named = [(label, a) for label, a in result.items()]
    elif isinstance(result, Attribution):
        named = [("", result)]
    else:
        raise TypeError(
            f"no page can be made of {type(result).__name__}: expected an Attribution, Comparison or Generation"
        )
    panels = [panel(label, a, row, pictures) for label, a in named for row in range(len(a))]
    return {"generation": None, "panels": panels, "pictures": pictures}


def panel(label: str, a: Attribution, row: int, pictures: list[str]) -> dict[str, Any]:
    """One row of an attribution."""
    one = a[row]
    account = one.account
    answer = one.answers[0] if one.answers else None
    shown = [name for name in one.relevances if name in one.media] or list(one.relevances)
    aside = {name: float(r.double().sum()) for name, r in one.relevances.items() if name not in shown}
    return {
        "label": label,
        "answer": answer.label if answer else None,
        "contrast": answer.contrast if answer else None,
        "probability": answer.probability if answer else None,
        "score": account.total,
        "delivered": account.delivered - math.fsum(aside.values()),
        "aside": aside,  # inputs that have no picture of their own, such as segment ids
        "kept": dict(account.kept),
        "inputs": [drawn for name in shown for drawn in _inputs(name, one, pictures)],
    }


def _inputs(name: str, a: Attribution, pictures: list[str]) -> list[dict[str, Any]]:
    """An input of one answer; it may have several rows, as texts that a picture is compared with."""
    values, media = a.relevances[name].detach().float().cpu(), a.media.get(name)
    if media is None:
        return [_input(name, values[0] if len(values.shape) and len(values) == 1 else values, None, pictures)]
    label = (lambda i: f"{name} {i + 1} of {len(media)}") if len(media) > 1 else (lambda i: name)
    return [_input(label(i), values[i], medium, pictures) for i, medium in enumerate(media)]


def _input(name: str, values: Tensor, medium: Medium | None, pictures: list[str]) -> dict[str, Any]:
    match medium:
        case Tokens():
            return {"kind": "tokens", "name": name, **tokens_data(medium), "values": values.tolist()}
        case Table():
            flat = values.flatten().tolist()
            return {
                "kind": "table",
                "name": name,
                "columns": list(medium.columns),
                "cells": list(medium.cells),
                "values": flat,
            }
        case Picture():
            source = _uri(medium.file, medium.mime)
            if source not in pictures:
                pictures.append(source)
            heat = values.sum(0) if values.dim() == 3 else values
            return _image(name, heat, pictures.index(source), (medium.width, medium.height), medium.seen)
        case Sound():
            return {"kind": "sound", "name": name, **_sound(medium, values)}
    if is_picture(values):
        height, width = values.shape[1:]
        return _image(name, values.sum(0), None, (width, height), (0, 0, width, height))
    every = values.flatten()
    order = range(len(every)) if len(every) <= _PARTS else every.abs().topk(_PARTS).indices.tolist()
    places = [torch.unravel_index(torch.tensor(i), values.shape) for i in order] if values.dim() else []
    labels = ["[" + ", ".join(str(int(k)) for k in place) + "]" for place in places] or [name]
    largest = every[list(order)]
    rest = float(every.double().sum() - largest.double().sum()) if len(every) > _PARTS else None
    cells = [""] * len(labels)
    return {"kind": "table", "name": name, "columns": labels, "cells": cells, "values": largest.tolist(), "rest": rest}


def _image(
    name: str, heat: Tensor, picture: int | None, size: tuple[int, int], seen: Sequence[float]
) -> dict[str, Any]:
    shape = {"width": size[0], "height": size[1], "seen": list(seen)}
    return {"kind": "image", "name": name, "picture": picture, **shape, "map": integers(heat)}


def tokens_data(tokens: Tokens) -> dict[str, Any]:
    return {"pieces": list(tokens.pieces), "kinds": list(tokens.kinds), "words": [start for start, _ in tokens.words()]}


def generation_data(g: Generation) -> dict[str, Any]:
    return {
        **tokens_data(g.context),
        "generated": list(g.generated),
        "said": list(g.said.kinds),
        "start": g.start,
        "scores": g.scores.tolist(),
        "probabilities": g.probabilities.tolist(),
        "alternatives": [[[piece, p] for piece, p in step] for step in g.alternatives],
        "contrasts": list(g.contrasts),
        "matrix": integers(g.matrix, by_row=True),
    }


def integers(values: Tensor, by_row: bool = False) -> dict[str, Any]:
    """A matrix as 16-bit integers: value = ±(integer / 32,767)² · scale, in base64 of little-endian bytes."""
    values = values.detach().double().cpu()
    if not torch.isfinite(values).all():
        raise ValueError("cannot show relevance that is not finite")
    largest = values.abs().amax(1, keepdim=True) if by_row else values.abs().max().reshape(1, 1)
    share = values / torch.where(largest == 0, 1, largest)
    whole = (share.sign() * share.abs().sqrt() * _FULL).round().to(torch.int16)
    return {"shape": list(values.shape), "scales": largest.flatten().tolist(), "data": _base64(_bytes(whole))}


def from_integers(packed: dict[str, Any]) -> Tensor:
    """What `integers` packed."""
    root = torch.frombuffer(bytearray(base64.b64decode(packed["data"])), dtype=torch.int16).double() / _FULL
    scales = torch.tensor(packed["scales"], dtype=torch.float64)[:, None]
    return (root * root.abs()).reshape(packed["shape"]) * scales


def _uri(data: bytes, mime: str) -> str:
    return f"data:{mime};base64,{_base64(data)}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(values: Tensor) -> bytes:
    """A tensor's own bytes, without numpy, which torch does not bring along."""
    return bytes(values.contiguous().flatten().view(torch.uint8).tolist())


def _sound(sound: Sound, values: Tensor) -> dict[str, Any]:
    samples = sound.samples.detach().float().cpu().flatten()
    line = sound.line(values)
    bins = min(_BINS, len(samples))
    heat = None
    if sound.features is None:  # samples: more of them than a page has room for
        line = torch.stack([chunk.sum() for chunk in line.tensor_split(min(bins, len(line)))])
        power = spectrogram(samples, sound.rate)
    else:
        power = sound.bands(sound.features)
        heat = sound.bands(values)
        heat = _pooled(heat, min(heat.shape[0], _BANDS), min(heat.shape[1], _FRAMES)) if len(heat) > 1 else None
    power = _pooled(power, min(_BANDS, power.shape[0]), min(_FRAMES, power.shape[1]), mean=True)
    low, high = torch.quantile(power.flatten()[::7], 0.05), power.max()
    shade = ((power - low) / (high - low).clamp_min(1e-6)).clamp(0, 1).mul(255).round().to(torch.uint8)
    return {
        "seconds": sound.seconds,
        "span": list(sound.moments()),
        "low": [float(chunk.min()) for chunk in samples.tensor_split(bins)],
        "high": [float(chunk.max()) for chunk in samples.tensor_split(bins)],
        "values": line.tolist(),
        "spectrogram": {
            "shape": list(shade.shape),
            "data": _base64(_bytes(shade)),
        },
        "map": None if heat is None else integers(heat),
        "audio": _uri(_wav(samples, sound.rate), "audio/wav") if sound.seconds <= _PLAYABLE else None,
    }


def spectrogram(samples: Tensor, rate: int) -> Tensor:
    """Log power [bands, frames], low frequencies first; a window of 25 ms."""
    window = max(16, min(2 ** math.ceil(math.log2(0.025 * rate)), 2 ** math.floor(math.log2(max(len(samples), 16)))))
    padded = torch.nn.functional.pad(samples, (0, max(0, window - len(samples))))
    made = torch.stft(padded, window, hop_length=window // 4, window=torch.hann_window(window), return_complex=True)
    return made.abs().pow(2).clamp_min(1e-10).log10()


def _pooled(values: Tensor, rows: int, columns: int, mean: bool = False) -> Tensor:
    def fold(pieces: Sequence[Tensor]) -> Tensor:
        return torch.stack([piece.mean(0) if mean else piece.sum(0) for piece in pieces])

    return fold(fold(values.tensor_split(rows)).T.tensor_split(columns)).T


def _wav(samples: Tensor, rate: int) -> bytes:
    loud = samples / samples.abs().max().clamp_min(1e-9)
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(_bytes((loud * 32000).to(torch.int16)))
    return out.getvalue()

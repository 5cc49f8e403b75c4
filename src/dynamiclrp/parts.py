"""Parts of an input that have a name: tokens and words, regions of a picture, moments of a sound, columns.

In: the relevance of one row and what the row is to a person. Out: `Part`s, whose relevances add up to the row's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .media import PADDING, Medium, Picture, Sound, Table, Tokens

_REGIONS = 14  # of a picture's shorter side
_MOMENTS = 50  # of a sound


@dataclass(frozen=True)
class Part:
    """A part of an input and its relevance: a token, a word, a region, a stretch of sound, a column."""

    input: str
    row: int
    index: Any
    label: str
    relevance: float


def parts_of(name: str, row: int, values: Tensor, medium: Medium | None, words: bool = False) -> list[Part]:
    """The parts of one row."""
    values = values.detach().double().cpu()
    match medium:
        case Tokens():
            found = _tokens(medium, values, words)
        case Table():
            found = zip(range(values.numel()), medium.columns, values.flatten().tolist())
        case Sound():
            found = _moments(medium, values)
        case _ if isinstance(medium, Picture) or is_picture(values):
            found = _regions(values, medium if isinstance(medium, Picture) else None)
        case _:
            found = _elements(name, values)
    return [Part(name, row, index, label, relevance) for index, label, relevance in found]


def is_picture(values: Tensor) -> bool:
    """Does a row look like pixels [channels, height, width]?"""
    return values.dim() == 3 and values.shape[0] <= 4 and min(values.shape[1:]) >= 4


def pool(heat: Tensor, size: int) -> Tensor:
    """Sums over patches of size x size; the last ones may be smaller.

    >>> pool(torch.ones(3, 5), 2)
    tensor([[4., 4., 2.],
            [2., 2., 1.]])
    """
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"pool size {size!r}: expected a positive number of pixels")
    height, width = heat.shape
    padded = torch.nn.functional.pad(heat, (0, -width % size, 0, -height % size))
    return padded.unflatten(0, (-1, size)).unflatten(2, (-1, size)).sum((1, 3))


_Found = Iterable[tuple[Any, str, float]]


def _tokens(tokens: Tokens, values: Tensor, words: bool) -> _Found:
    for start, stop in tokens.words() if words else [(i, i + 1) for i in range(len(tokens.pieces))]:
        relevance = float(values[start:stop].sum())
        if tokens.kinds[start] != PADDING or relevance:  # padding is nothing, unless the model looked at it
            yield (start, stop) if words else start, tokens.label(start, stop), relevance


def _regions(values: Tensor, picture: Picture | None) -> _Found:
    """Squares, named by the pixels of the original picture that they cover."""
    heat = values.sum(0) if values.dim() == 3 else values
    height, width = heat.shape
    size = max(1, min(height, width) // _REGIONS)
    left, top, right, bottom = picture.seen if picture is not None else (0.0, 0.0, width, height)
    across, down = (right - left) / width, (bottom - top) / height
    for y, line in enumerate(pool(heat, size).tolist()):
        for x, relevance in enumerate(line):
            xs = [round(left + across * min(k * size, width)) for k in (x, x + 1)]
            ys = [round(top + down * min(k * size, height)) for k in (y, y + 1)]
            yield (y, x), f"x {xs[0]}–{xs[1]}, y {ys[0]}–{ys[1]}", relevance


def _moments(sound: Sound, values: Tensor) -> _Found:
    begin, end = sound.moments()
    line = sound.line(values)
    chunks = line.tensor_split(min(_MOMENTS, len(line)))
    step = (end - begin) / len(chunks)
    for i, chunk in enumerate(chunks):
        yield i, f"{begin + i * step:.2f} s", float(chunk.sum())


def _elements(name: str, values: Tensor) -> _Found:
    places = product(*(range(n) for n in values.shape))
    for place, relevance in zip(places, values.flatten().tolist()):
        yield place[0] if len(place) == 1 else place, f"{name}{list(place) if place else ''}", relevance

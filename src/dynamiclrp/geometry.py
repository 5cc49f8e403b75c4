"""Where preprocessing took its pixels from, found by asking it.

In: any function from a PIL picture to a tensor [3, h, w] (a torchvision transform, a timm one, a transformers processor).
Out: the part of the picture that the tensor shows. Ramps are sent through it: a picture whose brightness is its x (or y)
comes out as a map of where each output pixel came from, whatever resize, crop and padding were done on the way. Black
and white pictures, sent first, undo the normalisation and show which output pixels are padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Rect = tuple[float, float, float, float]
# Pictures have whole gray levels: ramps of several slopes keep their rounding from falling into step.
_SLOPES = (255, 247, 239, 227)


def seen_part(process: Callable[[Any], Tensor], width: int, height: int) -> Rect | None:
    """(left, top, right, bottom) in the picture's pixels of what `process` shows; None if it is no resize, crop or pad.

    The part reaches beyond the picture where it was padded.
    """

    def through(data: bytes) -> Tensor:
        """A gray picture through the preprocessing: its first channel."""
        from PIL import Image

        made = process(Image.frombytes("L", (width, height), data).convert("RGB"))
        return made.reshape(-1, *made.shape[-2:])[0].detach().double()

    black, white = through(bytes(width * height)), through(b"\xff" * (width * height))
    span = white - black
    live = span.abs() > 1e-3 * span.abs().max()
    if not live.any():
        return None

    def coordinates(size: int, spread: Callable[[list[int]], bytes]) -> Tensor:
        """Which coordinate of the picture each output pixel shows."""
        levels = []
        for top in _SLOPES:
            ramp = [round(top * i / max(1, size - 1)) for i in range(size)]
            levels.append((through(spread(ramp)) - black) / torch.where(live, span, 1) * (255 / top))
        return torch.stack(levels).mean(0) * (size - 1) + 0.5

    xs = coordinates(width, lambda ramp: bytes(ramp) * height)
    ys = coordinates(height, lambda ramp: b"".join(bytes([level]) * width for level in ramp))
    left_right = _line(xs, live, width, along=1)
    top_bottom = _line(ys, live, height, along=0)
    if left_right is None or top_bottom is None:
        return None
    return left_right[0], top_bottom[0], left_right[1], top_bottom[1]


def _line(coordinates: Tensor, live: Tensor, size: int, along: int) -> tuple[float, float] | None:
    """Coordinates as a straight line along one axis: where it begins and ends; None if they are not one."""
    mask = live & (coordinates > 2) & (coordinates < size - 2)  # edges are smeared by interpolation
    if mask.sum() < 8:
        mask = live
    places = torch.arange(coordinates.shape[along], dtype=torch.float64) + 0.5
    across = places[None, :].expand_as(coordinates) if along == 1 else places[:, None].expand_as(coordinates)
    p, c = across[mask], coordinates[mask]
    if len(p) < 2 or p.var() == 0:
        return None
    slope = ((p - p.mean()) * (c - c.mean())).mean() / ((p - p.mean()) ** 2).mean()
    start = c.mean() - slope * p.mean()
    error = (start + slope * p - c).abs()
    # one gray level of the ramp is size/255 pixels; resampling rounds to levels
    if slope <= 0 or error.quantile(0.95) > max(1.5, 1.5 * size / 255, 2 * float(slope)):
        return None
    return float(start), float(start + slope * coordinates.shape[along])

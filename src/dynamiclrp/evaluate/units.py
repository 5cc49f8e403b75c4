"""What is removed together: a pixel, a square region, a patch, a token, a feature.

In: the explained tensor. Out: a `Layout`, which pools relevance into one number per unit and turns chosen units back
into a mask over the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import EvaluationError

_POOLS = ("sum", "max", "mean")


@dataclass(frozen=True, eq=False)
class Layout:
    """Units of one batch: `index` has the unit of every position; `channels` is the dimension that units span whole."""

    index: Tensor  # [positions]
    positions: tuple[int, ...]  # the shape of the positions
    channels: int | None
    pool: str
    shape: tuple[int, ...]  # one row of the explained tensor

    @property
    def count(self) -> int:
        return int(self.index.max()) + 1

    def scores(self, relevance: Tensor) -> Tensor:
        """Relevance [rows, *row shape] or [rows, *positions] → [rows, units], in float64 on the CPU."""
        r = relevance.detach().cpu().double()  # in this order: some devices have no float64
        row = tuple(r.shape[1:])
        if row == self.shape and self.channels is not None:
            r = r.sum(self.channels)
        elif row != self.positions:
            wanted = {self.shape, self.positions}
            raise EvaluationError(f"relevance of shape {row} per row: expected {' or '.join(map(str, wanted))}")
        if not bool(torch.isfinite(r).all()):
            raise EvaluationError("relevance holds nan or inf: it cannot be ranked")
        r = r.reshape(len(r), -1)
        if self.count == r.shape[1]:
            return r
        reduce = {"sum": "sum", "max": "amax", "mean": "mean"}[self.pool]
        out = r.new_zeros(len(r), self.count)
        return out.scatter_reduce_(1, self.index.expand_as(r), r, reduce, include_self=False)

    def mask(self, units: Tensor) -> Tensor:
        """Chosen units [rows, units] → a mask that broadcasts over the explained tensor."""
        chosen = units if self.count == len(self.index) else units[:, self.index.to(units.device)]
        chosen = chosen.reshape(len(units), *self.positions)
        return chosen if self.channels is None else chosen.unsqueeze(self.channels)


def _check_pool(pool: str) -> None:
    if pool not in _POOLS:
        raise EvaluationError(f"pool={pool!r}: expected one of {', '.join(_POOLS)}")


class Unit:
    """Base of all units."""

    def layout(self, value: Tensor) -> Layout:
        raise NotImplementedError

    def allowed(self, value: Tensor, inputs: Mapping[str, Any], layout: Layout) -> Tensor | None:
        """Units that may be removed, [rows, units]; None for all."""
        return None

    @property
    def hidden(self) -> tuple[str, ...]:
        """Entries of the inputs that only this unit reads."""
        return ()


def _grid(value: Tensor, size: int, pool: str, what: str) -> Layout:
    if value.dim() != 4:
        raise EvaluationError(
            f"{what} need images [rows, channels, height, width], got {tuple(value.shape)}; use Tokens() or Features()"
        )
    if size < 1:
        raise EvaluationError(f"{what} of size {size}: expected 1 or more")
    height, width = value.shape[2:]
    across = -(-width // size)
    index = (torch.arange(height) // size)[:, None] * across + (torch.arange(width) // size)[None, :]
    return Layout(index.flatten(), (height, width), 1, pool, tuple(value.shape[1:]))


@dataclass(frozen=True)
class Pixels(Unit):
    """One pixel with all its channels."""

    def layout(self, value: Tensor) -> Layout:
        return _grid(value, 1, "sum", "pixels")


@dataclass(frozen=True)
class Regions(Unit):
    """Squares of `size` pixels; those at the right and lower border may be smaller.

    >>> Regions(14)
    Regions(size=14, pool='sum')
    """

    size: int
    pool: str = "sum"

    def __post_init__(self) -> None:
        _check_pool(self.pool)

    def layout(self, value: Tensor) -> Layout:
        return _grid(value, self.size, self.pool, "regions")


@dataclass(frozen=True)
class Patches(Unit):
    """The patches of a vision transformer; relevance is max-pooled, as in the paper, unless `pool` says otherwise."""

    size: int = 16
    pool: str = "max"

    def __post_init__(self) -> None:
        _check_pool(self.pool)

    def layout(self, value: Tensor) -> Layout:
        if value.dim() == 4 and (value.shape[2] % self.size or value.shape[3] % self.size):
            raise EvaluationError(f"patches of {self.size} do not divide images of {tuple(value.shape[2:])} pixels")
        return _grid(value, self.size, self.pool, "patches")


@dataclass(frozen=True)
class Tokens(Unit):
    """One token, or one position of a float sequence [rows, positions, width].

    Positions that `attention_mask` leaves out are never touched, nor are ids in `skip` (special tokens). `only` names a
    boolean entry of the inputs that says which may be; it is not handed to the model.
    """

    skip: tuple[int, ...] = ()
    only: str | None = None

    def layout(self, value: Tensor) -> Layout:
        if value.dim() != (3 if value.is_floating_point() else 2):
            raise EvaluationError(
                f"tokens need ids [rows, positions] or floats [rows, positions, width], got {tuple(value.shape)}"
            )
        channels = 2 if value.is_floating_point() else None
        return Layout(torch.arange(value.shape[1]), (value.shape[1],), channels, "sum", tuple(value.shape[1:]))

    def allowed(self, value: Tensor, inputs: Mapping[str, Any], layout: Layout) -> Tensor | None:
        masks = []
        attention = inputs.get("attention_mask")
        if isinstance(attention, Tensor) and attention.shape == value.shape[:2]:
            masks.append(attention != 0)
        if self.skip and not value.is_floating_point():
            masks.append(~torch.isin(value, torch.tensor(self.skip, device=value.device)))
        if self.only is not None:
            given = inputs.get(self.only)
            if not isinstance(given, Tensor) or given.shape != value.shape[:2]:
                raise EvaluationError(
                    f"Tokens(only={self.only!r}): expected a mask of shape {tuple(value.shape[:2])} in the inputs"
                )
            masks.append(given.bool())
        return torch.stack(masks).all(0).cpu() if masks else None

    @property
    def hidden(self) -> tuple[str, ...]:
        return () if self.only is None else (self.only,)


@dataclass(frozen=True)
class Features(Unit):
    """Every number of the input on its own, as for tables."""

    def layout(self, value: Tensor) -> Layout:
        shape = tuple(value.shape[1:])
        return Layout(torch.arange(value[0].numel()), shape, None, "sum", shape)


_NAMES: dict[str, Unit] = {"pixel": Pixels(), "patch": Patches(), "token": Tokens(), "feature": Features()}


def find_unit(unit: str | Unit | None, value: Tensor) -> Unit:
    """A unit by name, or what suits the tensor: tokens for ids, a grid of about 16 x 16 regions for images."""
    if isinstance(unit, Unit):
        return unit
    if unit in ("region", None) and value.dim() == 4:
        return Regions(max(1, round(max(value.shape[2:]) / 16)))
    if unit is None:
        return Tokens() if not value.is_floating_point() or value.dim() == 3 else Features()
    if unit not in _NAMES:
        raise EvaluationError(
            f"unit={unit!r}: expected pixel, region, patch, token, feature or an object such as Regions(14)"
        )
    return _NAMES[unit]

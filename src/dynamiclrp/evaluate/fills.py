"""What removed units become: blurred, mean, zero, or another token.

In: the inputs. Out: the explained tensor with *everything* replaced, from which perturbation takes the removed part; None
means that embeddings are zeroed instead of ids being replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import EvaluationError
from .subject import Inputs


class Fill:
    """Base of all fills."""

    def filled(self, inputs: Inputs, model: Any) -> Tensor | None:
        raise NotImplementedError


@dataclass(frozen=True)
class Blur(Fill):
    """A Gaussian blur with reflected borders; kernel 51 and sigma 20 are the paper's.

    >>> Blur()
    Blur(kernel=51, sigma=20.0)
    """

    kernel: int = 51
    sigma: float = 20.0

    def __post_init__(self) -> None:
        if self.kernel < 1 or self.kernel % 2 == 0 or self.sigma <= 0:
            raise EvaluationError(f"{self}: expected an odd kernel and a positive sigma")

    def filled(self, inputs: Inputs, model: Any) -> Tensor:
        x = inputs.explained
        if x.dim() != 4 or not x.is_floating_point():
            raise EvaluationError(
                f"blur needs float images [rows, channels, height, width], got {tuple(x.shape)} {x.dtype}"
            )
        offset = torch.arange(self.kernel, device=x.device, dtype=torch.float64) - self.kernel // 2
        weights = torch.exp(-0.5 * (offset / self.sigma) ** 2)
        weights = (weights / weights.sum()).to(x.dtype)
        channels, half = x.shape[1], self.kernel // 2
        for dim, (pad, shape) in enumerate((((0, 0, half, half), (-1, 1)), ((half, half, 0, 0), (1, -1)))):
            if x.shape[2 + dim] <= half:
                raise EvaluationError(
                    f"a blur of kernel {self.kernel} reflects {half} pixels, more than images of {tuple(x.shape[2:])} have: "
                    f"use Blur(kernel={2 * (min(x.shape[2:]) // 2) - 1}, …) or less"
                )
            x = functional.pad(x, pad, mode="reflect")
            x = functional.conv2d(x, weights.view(1, 1, *shape).expand(channels, 1, -1, -1), groups=channels)
        return x


@dataclass(frozen=True)
class Mean(Fill):
    """The input's own mean: per channel for images, per position's width for sequences, over all for tables."""

    def filled(self, inputs: Inputs, model: Any) -> Tensor:
        x = inputs.explained
        if not x.is_floating_point():
            raise EvaluationError("mean: token ids have no mean; use zero (embeddings), pad or mask")
        dims = tuple(range(2, x.dim())) if x.dim() == 4 else (1,)
        return x.mean(dims, keepdim=True).expand_as(x)


@dataclass(frozen=True)
class Zero(Fill):
    """Zeros: of float inputs as the model gets them (normalised images: the data's mean); of tokens the embedding."""

    def filled(self, inputs: Inputs, model: Any) -> Tensor | None:
        return None if inputs.is_tokens else torch.zeros_like(inputs.explained)


@dataclass(frozen=True)
class Token(Fill):
    """Another token id: a number, or "pad" or "mask" for the one in the model's configuration."""

    id: int | str

    def filled(self, inputs: Inputs, model: Any) -> Tensor:
        if not inputs.is_tokens:
            raise EvaluationError(f"{self}: the explained input is not token ids; use blur, mean or zero")
        token: Any = self.id
        if isinstance(token, str):
            config = getattr(model, "config", None)
            token = getattr(config, f"{self.id}_token_id", None)
            if isinstance(token, list):
                token = token[0]
            if not isinstance(token, int):
                raise EvaluationError(
                    f"the model's configuration has no {self.id}_token_id: use Token(tokenizer.{self.id}_token_id)"
                )
        return torch.full_like(inputs.explained, token)


@dataclass(frozen=True)
class Function(Fill):
    """A user's function: explained tensor → its replacement."""

    function: Callable[[Tensor], Tensor]

    def filled(self, inputs: Inputs, model: Any) -> Tensor:
        found = self.function(inputs.explained)
        if not isinstance(found, Tensor) or found.shape != inputs.explained.shape:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise EvaluationError(
                f"the fill returned {shape}: expected a tensor of shape {tuple(inputs.explained.shape)}"
            )
        return found.to(inputs.explained.dtype)

    def __repr__(self) -> str:
        return f"Function({getattr(self.function, '__qualname__', type(self.function).__name__)})"


_NAMES: dict[str, Fill] = {"blur": Blur(), "mean": Mean(), "zero": Zero(), "pad": Token("pad"), "mask": Token("mask")}


def find_fill(fill: str | Fill | Callable[[Tensor], Tensor] | None, value: Tensor) -> Fill:
    """A fill by name, or what suits the tensor: blur for images, zeros for all else."""
    if isinstance(fill, Fill):
        return fill
    if fill is None:
        return Blur() if value.dim() == 4 and min(value.shape[2:]) > 25 else Zero()
    if callable(fill):
        return Function(fill)
    if fill not in _NAMES:
        raise EvaluationError(
            f"fill={fill!r}: expected {', '.join(_NAMES)}, an object such as Blur(51, 20) or a function"
        )
    return _NAMES[fill]

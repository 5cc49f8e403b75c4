"""A model with inputs to explain it on, as every zoo hands it out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


class NotBuilt(Exception):
    """The library could not build or run this model here; the message says why."""


@dataclass(frozen=True, eq=False)
class Case:
    """`inputs` hold two rows where `batched` says so; otherwise what the model takes cannot be cut into rows."""

    name: str
    model: nn.Module
    inputs: dict[str, Any]
    batched: bool = True
    note: str = ""
    positional: tuple[Any, ...] = field(default=())

    def row(self, number: int) -> dict[str, Any]:
        """One row of the inputs."""
        return {
            key: value[number : number + 1].clone() if isinstance(value, Tensor) and value.dim() else value
            for key, value in self.inputs.items()
        }


def open_rectifiers(model: nn.Module) -> None:
    """Make all biases positive, so that rectifiers let something through."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.abs_().add_(0.05)


class Pick(nn.Module):
    """A model whose output is nested, reduced to the tensor at one place in it."""

    def __init__(self, model: nn.Module, place: tuple[Any, ...]) -> None:
        super().__init__()
        self.model, self.place = model, place

    def forward(self, **inputs: Any) -> Tensor:
        output = self.model(**inputs)
        for key in self.place:
            output = output[key]
        return output


def places(output: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """The float tensors in an output and where they stand: fields in their order, lists from their end."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.numel():
            yield above, output
    elif isinstance(output, dict):
        for key, value in output.items():
            yield from places(value, (*above, key))
    elif isinstance(output, (list, tuple)):
        for key in reversed(range(len(output))):
            yield from places(output[key], (*above, key))


def last_tensor(output: Any) -> Tensor | None:
    """The tensor that `choose` would take."""
    found = list(places(output))
    return next((t for _, t in found if t.requires_grad), found[0][1] if found else None)


def choose(model: nn.Module, output: Any) -> nn.Module | None:
    """The model, wrapped where `explain` would not find a tensor with a graph in its output; None where there is none."""
    from dynamiclrp.errors import TargetError
    from dynamiclrp.outputs import unwrap

    try:
        found = unwrap(output)
        if found.is_floating_point() and found.requires_grad and found.numel():
            return model
    except TargetError:
        pass
    candidates = list(places(output))
    candidates = [c for c in candidates if c[1].requires_grad] or candidates
    return Pick(model, candidates[0][0]) if candidates else None


def wake(model: nn.Module) -> nn.Module:
    """Eval mode, and no parameter left at zero: outputs of zero could not be explained, and zero biases prove nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel() and not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model.eval()


def mend_torchvision() -> None:
    """Make torchvision importable where its wheel does not fit a CPU-only torch.

    Its import then fails for two operators that the wheel's binary would bring; declared without a body they are
    enough for everything that does not call them. Does nothing where torchvision imports.
    """
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _MENDED.append(library)  # its declarations live as long as it does


_MENDED: list[Any] = []

"""Which of a model's parameters autograd follows while it is explained; flags and statistics are put back afterwards.

It must stay so until relevance has moved: layers that are recomputed (`torch.utils.checkpoint`) must meet the same flags.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .presets import Preset

# Flags are shared by all threads that explain a model.
_one_at_a_time = threading.RLock()


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules, each once; `model.modules()` takes ten times as long, at every call."""
    found = {id(model): model}
    stack = [model]
    while stack:
        for module in stack.pop()._modules.values():
            if module is not None and id(module) not in found:
                found[id(module)] = module
                stack.append(module)
    return list(found.values())


class Following:
    """Entered around forward pass and relevance; `follow` sets the flags, leaving puts everything back."""

    def __init__(self, modules: Sequence[nn.Module], preset: Preset, integers: bool) -> None:
        self.modules, self.preset, self.integers = modules, preset, integers
        self._freeze: bool | None = None  # the last choice, for those who enter again
        self._before: dict[int, tuple[nn.Parameter, bool]] = {}
        self._statistics: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> Following:
        _one_at_a_time.acquire()
        training = [m for m in self.modules if m.training and isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self._statistics = [(buffer, buffer.clone()) for module in training for buffer in module.buffers()]
        if self._freeze is not None:
            self.follow(self._freeze)
        return self

    def __exit__(self, *error: object) -> None:
        try:
            for parameter, flag in self._before.values():
                parameter.requires_grad_(flag)
            self._before.clear()
            with torch.no_grad():
                for buffer, value in self._statistics:  # batch norms in training mode move their running statistics
                    buffer.data.copy_(value)  # autograd may have saved the buffer: no new version
            self._statistics.clear()
        finally:
            _one_at_a_time.release()

    def follow(self, freeze: bool) -> None:
        """Follow what rules and token ids need, or (without `freeze`) every parameter."""
        self._freeze = freeze
        wanted = self._wanted() if freeze else None
        for module in self.modules:
            for parameter in module._parameters.values():
                if parameter is None or not parameter.is_floating_point():
                    continue
                flag = wanted is None or id(parameter) in wanted
                if parameter.requires_grad != flag:
                    self._before.setdefault(id(parameter), (parameter, not flag))
                    parameter.requires_grad_(flag)

    def _wanted(self) -> set[int]:
        """Weights of linear maps are never needed. All else is, where a rule computes with parameters; biases always are,
        and the embeddings where token ids are explained."""
        maps = (nn.Linear, nn.modules.conv._ConvNd)
        weights = {id(m.weight) for m in self.modules if isinstance(m, maps) or type(m).__name__ == "Conv1D"}
        tables = {id(m.weight) for m in self.modules if isinstance(m, nn.Embedding)}
        named = [(name, p) for m in self.modules for name, p in m._parameters.items() if p is not None]
        if self.integers:  # a table may be any parameter
            tables |= {id(p) for _, p in named if p.dim() >= 2 and id(p) not in weights}
        if self.preset.needs_parameters:
            return {id(p) for _, p in named if id(p) not in weights} | tables
        # following a bias makes autograd save nothing, and keeps its value where an activation's input must be rebuilt
        biases = {id(p) for name, p in named if name.endswith("bias")}
        return biases | (tables if self.integers else set())

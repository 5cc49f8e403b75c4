"""Which of a model's parameters autograd follows while it is explained; flags and statistics are put back afterwards.

It must stay so until relevance has moved: layers that are recomputed (`torch.utils.checkpoint`) must meet the same flags.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor, nn

from .presets import Preset

# Flags are shared by all threads that explain a model.
_one_at_a_time = threading.RLock()


class Inventory:
    """A model's modules and parameters, found in one walk at every call: modules may come and go.

    What was worked out `before` holds on where they are still the same.
    """

    def __init__(self, model: nn.Module, before: Inventory | None = None) -> None:
        self.modules = [model]  # each once, level by level; `model.modules()` takes many times as long
        self.parameters: list[nn.Parameter | None] = []  # shared ones as often as they are held
        self.training: list[nn.Module] = []
        seen = {model}
        for module in self.modules:  # which grows on the way
            children, parameters = module._modules, module._parameters
            if children:
                for child in children.values():
                    if child is not None and child not in seen:
                        seen.add(child)
                        self.modules.append(child)
            if parameters:
                self.parameters += parameters.values()
            if module.training:
                self.training.append(module)
        same = before is not None and _same(before.modules, self.modules) and _same(before.parameters, self.parameters)
        self._chosen: dict[tuple[bool, bool, bool], frozenset[int]] = before._chosen if before and same else {}

    def buffers(self) -> list[Tensor]:
        """The modules' tensors that are no parameters."""
        return [buffer for module in self.modules for buffer in module._buffers.values() if buffer is not None]

    def choose(self, every: bool, biases: bool, integers: bool) -> frozenset[int]:
        """The parameters, by id, that are to be followed: `every` one that is no weight of a linear map, `biases`, and tables that
        `integers` may be looked up in."""
        key = (every, biases, integers)
        if key not in self._chosen:
            self._chosen[key] = self._choose(*key)
        return self._chosen[key]

    def _choose(self, every: bool, biases: bool, integers: bool) -> frozenset[int]:
        weights, tables, wanted = set[int](), set[int](), set[int]()
        for module in self.modules:
            parameters = module._parameters
            if isinstance(module, nn.Embedding) and (every or integers):
                tables.add(id(module.weight))
            elif parameters and (isinstance(module, _MAPS) or type(module).__name__ == "Conv1D"):
                weights.add(id(module.weight))
            for name, parameter in parameters.items():
                # a table may be any parameter
                if parameter is not None and (
                    every or (biases and name.endswith("bias")) or (integers and parameter.dim() >= 2)
                ):
                    wanted.add(id(parameter))
        return frozenset((wanted - weights) | tables)


def _same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


class Following:
    """Entered around forward pass and relevance; `follow` sets the flags, leaving puts everything back."""

    def __init__(self, inventory: Inventory, preset: Preset, integers: bool) -> None:
        self.inventory, self.preset, self.integers = inventory, preset, integers
        self.only: frozenset[int] | None = None  # parameters that are known to be the only ones needed
        self.weights = False  # follow weights too: then autograd keeps what they are multiplied with
        self.tables: set[int] = set()  # others, by id, that integers are looked up in
        self._freeze: bool | None = None  # the last choice, for those who enter again
        self._before: dict[int, tuple[Tensor, bool]] = {}
        self._statistics: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> Following:
        _one_at_a_time.acquire()
        training = [m for m in self.inventory.training if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self._statistics = [(buffer, buffer.clone()) for module in training for buffer in module.buffers()]
        if self._freeze is not None:
            self.follow(self._freeze)
        return self

    def __exit__(self, *error: object) -> None:
        try:
            for parameter, flag in self._before.values():
                parameter.requires_grad_(flag)
            self._before.clear()
            if self._statistics:
                with torch.no_grad():
                    for buffer, value in self._statistics:  # batch norms in training mode move their running statistics
                        buffer.data.copy_(value)  # autograd may have saved the buffer: no new version
                self._statistics.clear()
        finally:
            _one_at_a_time.release()

    def follow(self, freeze: bool) -> None:
        """Follow what rules and token ids need, or (without `freeze`) every parameter."""
        self._freeze = freeze
        wanted = self._wanted() if freeze and not self.weights else None
        buffers = [b for b in self.inventory.buffers() if id(b) in self.tables] if self.tables else []
        for parameter in [*self.inventory.parameters, *buffers]:
            if parameter is None:
                continue
            flag = wanted is None or id(parameter) in wanted
            if parameter.requires_grad is not flag and parameter.is_floating_point():
                self._before.setdefault(id(parameter), (parameter, not flag))
                parameter.requires_grad_(flag)

    def _wanted(self) -> frozenset[int]:
        """Weights of linear maps are never needed. All else is, where a rule computes with parameters; biases, where values
        may have to be rebuilt from them; tables of embeddings, where token ids are explained."""
        return self._needed() | self.tables

    def _needed(self) -> frozenset[int]:
        if self.only is not None:
            return self.only | self.inventory.choose(False, False, True) if self.integers else self.only
        return self.inventory.choose(self.preset.needs_parameters, True, self.integers)


_MAPS = (nn.Linear, nn.modules.conv._ConvNd)

"""Which of a model's parameters autograd follows while it is explained; flags and statistics are put back afterwards.

It must stay so until relevance has moved: layers that are recomputed (`torch.utils.checkpoint`) must meet the same flags.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from .presets import Preset

# Flags are shared by all threads that explain a model.
_one_at_a_time = threading.RLock()


class Inventory:
    """A model's modules and parameters, found in one walk at every call: modules may come and go."""

    def __init__(self, model: nn.Module) -> None:
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


class Following:
    """Entered around forward pass and relevance; `follow` sets the flags, leaving puts everything back."""

    def __init__(self, inventory: Inventory, preset: Preset, integers: bool) -> None:
        self.inventory, self.preset, self.integers = inventory, preset, integers
        self.only: frozenset[int] | None = None  # parameters that are known to be the only ones needed
        self.weights = False  # follow weights too: then autograd keeps what they are multiplied with
        self._freeze: bool | None = None  # the last choice, for those who enter again
        self._before: dict[int, tuple[nn.Parameter, bool]] = {}
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
        for parameter in self.inventory.parameters:
            if parameter is None:
                continue
            flag = wanted is None or id(parameter) in wanted
            if parameter.requires_grad is not flag and parameter.is_floating_point():
                self._before.setdefault(id(parameter), (parameter, not flag))
                parameter.requires_grad_(flag)

    def _wanted(self) -> set[int]:
        """Weights of linear maps are never needed. All else is, where a rule computes with parameters; biases, where values
        may have to be rebuilt from them; tables of embeddings, where token ids are explained."""
        biases, integers = self.only is None, self.integers
        every = biases and self.preset.needs_parameters
        weights, tables, wanted = set[int](), set[int](), set(self.only or ())
        if not (biases or integers):
            return wanted
        for module in self.inventory.modules:
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
        return (wanted - weights) | tables


_MAPS = (nn.Linear, nn.modules.conv._ConvNd)

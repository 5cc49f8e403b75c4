"""Low-rank updates of linear layers (LoRA; Hu et al. 2022), just what fine-tuning SmolLM2 needs."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LowRank(nn.Module):
    """A frozen linear layer plus up @ down. Starts as the layer itself: `up` is zero."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.scale * ((x @ self.down.T) @ self.up.T)


def add_low_rank(model: nn.Module, rank: int, scale: float = 2.0) -> list[nn.Parameter]:
    """Replace every linear layer below `model` in place; the new parameters."""
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    new: list[nn.Parameter] = []
    for name, layer in found:
        parent, _, attribute = name.rpartition(".")
        wrapped = LowRank(layer, rank, scale).to(layer.weight.device)
        setattr(model.get_submodule(parent), attribute, wrapped)
        new += [wrapped.down, wrapped.up]
    return new


def low_rank_state(model: nn.Module, prefix: str) -> dict[str, Tensor]:
    """What `texts.merge_low_rank` adds to the plain model."""
    state = {}
    for name, module in model.named_modules():
        if isinstance(module, LowRank):
            state[f"{prefix}{name}.down"] = module.down.detach()
            state[f"{prefix}{name}.up"] = module.scale * module.up.detach()
    return state

"""Is what was found sound? The one place that waits for the device.

In: seeds and the relevance they gave. Out: whether all of it is finite, or the error that says what is wrong with a seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .targets import Seed


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """On the device: the largest magnitude in each tensor; nan or infinite, if any is."""
    if len(tensors) == 1 and tensors[0].numel():
        return torch.linalg.vector_norm(tensors[0], torch.inf).reshape(1)
    values = [t.to(tensors[0].device) if t.numel() else t.new_zeros(1, device=tensors[0].device) for t in tensors]
    return torch.stack(torch._foreach_norm(values, torch.inf))


def sound(seeds: Sequence[Seed], found: Sequence[Tensor]) -> bool:
    """Is all relevance finite? Raises what is wrong with the seeds."""
    several = len(seeds) > 1
    flags = [seed.coefficient if seed.good is None else seed.good for seed in seeds if several or seed.good is not None]
    told = largest([*flags, *found]).tolist()
    for seed, good in zip(seeds, told[: len(flags)]):
        if good == 0:
            raise seed.error()
    return judge(seeds[0], told[len(flags) :])


def judge(seed: Seed, told: Sequence[float]) -> bool:
    """Are all magnitudes finite? Where there is nothing at all, the seed is looked at, unless it is the caller's own."""
    if seed.good is None and not any(told) and not seed.coefficient.any():
        raise seed.error()
    return all(map(math.isfinite, told))

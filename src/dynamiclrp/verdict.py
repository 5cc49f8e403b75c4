"""Is what was found sound? The one place that waits for the device.

In: seeds and the relevance they gave. Out: whether all of it is finite, or the error that says what is wrong with a seed.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import TargetWarning
from .plan import Plan
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
    told = largest([*flags, *(seed.scores for seed in seeds), *found]).tolist()
    for seed, good in zip(seeds, told[: len(flags)]):
        if good == 0:
            raise seed.error()
    first = len(flags) + len(seeds)
    return judge(seeds[0], told[first:]) and all(map(math.isfinite, told[len(flags) : first]))


def judge(seed: Seed, told: Sequence[float]) -> bool:
    """Are all magnitudes finite? Where there is nothing at all, the seed is looked at, unless it is the caller's own."""
    if seed.good is None and not any(told) and not seed.coefficient.any():
        raise seed.error()
    return all(map(math.isfinite, told))


def noted(plan: Plan, seed: Seed) -> tuple[str, ...]:
    """What a reader of the result has to know. Of a target that is not linear its author is warned, too."""
    if seed.differs is None or not float(seed.differs) > 0:
        return plan.notes
    note = "the target is not linear in the output: explained is gradient x output, which is not the target's value"
    warnings.warn(
        f"{note} (a.score is {float(seed.relevance.sum()):.4g} in all). Remedy: explain scores or differences of them, such as "
        "lambda y: y[:, 0] - y[:, 1], in place of probabilities, logarithms or distances.",
        TargetWarning,
        stacklevel=caller(),
    )
    return (*plan.notes, note)


def caller() -> int:
    """How far up the stack the first frame outside this package is, seen from who asks."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(__package__ + "."):
        frame, level = frame.f_back, level + 1
    return level

"""What an explanation costs: seconds and peak memory, beside gradient x input in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .methods import Scores
from .subject import Inputs, Subject


@dataclass(frozen=True)
class Cost:
    """Of one call. Memory is what was allocated above the state before, on the GPU; None on the CPU."""

    seconds: float
    memory: int | None


def measured(call: Callable[[], Any], device: torch.device | None) -> tuple[Any, Cost]:
    """Run once; the result with its cost."""
    cuda = device is not None and device.type == "cuda"
    before = 0
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    start = time.perf_counter()
    result = call()
    if cuda:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    return result, Cost(seconds, torch.cuda.max_memory_allocated(device) - before if cuda else None)


def gradient_times_input(subject: Subject, inputs: Inputs, targets: Tensor) -> Tensor:
    """The floor that every method is measured against: one forward, one backward, no gradients of weights."""
    parameters = [p for p in getattr(subject.model, "parameters", list)() if p.requires_grad]
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        scores = Scores(subject, inputs, targets)
        with torch.enable_grad():
            x = scores.start().requires_grad_()
            rows = torch.arange(len(inputs), device=x.device)
            (gradient,) = torch.autograd.grad(scores(x, rows).sum(), x)
        return scores.finish(gradient * x.detach())
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)

"""What explanations cost: seconds and peak memory, beside gradient x input in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..timing import measure
from .methods import Scores, find_methods, frozen
from .subject import Inputs, Subject, read_targets

FLOOR = "gradient x input"


@dataclass(frozen=True)
class Cost:
    """Of explaining one batch. Ratios are to gradient x input (one forward, one backward, weights frozen)."""

    method: str
    milliseconds: float
    peak_bytes: int
    time_ratio: float
    memory_ratio: float

    def __str__(self) -> str:
        return (
            f"{self.method}: {self.milliseconds:.1f} ms ({self.time_ratio:.2f} x gradient), "
            f"peak {self.peak_bytes / 2**20:.1f} MiB ({self.memory_ratio:.2f} x)"
        )


def cost(
    model: nn.Module,
    inputs: Any,
    methods: Any = ("default",),
    targets: Any = None,
    *,
    repeats: int = 7,
    patience: float = 30.0,
    input: str | None = None,
    embedding: str | None = None,
) -> list[Cost]:
    """Time and memory of explaining these inputs in one batch, all methods in turns, the floor first.

    >>> import torch
    >>> [found.method for found in cost(torch.nn.Linear(4, 3), torch.randn(5, 4), ["epsilon"], repeats=3)]
    ['gradient x input', 'epsilon']
    """
    subject = Subject(model, embedding=embedding)
    batch = subject.read(inputs, input)
    wanted = subject.predict(batch) if targets is None else read_targets(targets, len(batch))
    calls: dict[str, Callable[[], object]] = {FLOOR: lambda: gradient_times_input(subject, batch, wanted)}
    for method in find_methods(methods):
        calls[method.name] = lambda method=method: method.relevance(subject, batch, wanted, range(len(batch)))  # type: ignore[misc]
    found = measure(calls, repeats=repeats, patience=patience)
    floor = found[FLOOR]
    return [
        Cost(
            name,
            c.milliseconds,
            c.peak_bytes,
            c.milliseconds / floor.milliseconds,
            c.peak_bytes / max(floor.peak_bytes, 1),
        )
        for name, c in found.items()
    ]


@dataclass(frozen=True)
class Spent:
    """By one call. Memory is what was allocated above the state before, on the GPU; None on the CPU."""

    seconds: float
    memory: int | None


def timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, Spent]:
    """Run once; the result with what it took."""
    cuda = device.type == "cuda"
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
    return result, Spent(seconds, torch.cuda.max_memory_allocated(device) - before if cuda else None)


def gradient_times_input(subject: Subject, inputs: Inputs, targets: Tensor) -> Tensor:
    """The floor that every method is measured against: one forward, one backward, no gradients of weights."""
    with frozen(subject.model), torch.enable_grad():
        scores = Scores(subject, inputs, targets)
        x = scores.start().requires_grad_()
        rows = torch.arange(len(inputs), device=x.device)
        (gradient,) = torch.autograd.grad(scores(x, rows).sum(), x)
        return scores.finish(gradient * x.detach())

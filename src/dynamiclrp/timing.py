"""What calls cost, side by side: milliseconds in turns, and the peak of memory they allocate.

In: calls without arguments, by name. Out: a `Cost` each. The first call is what the others are compared with by `ratio`.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cost:
    """Of one call: median milliseconds, and the most bytes that it held at once beyond what was there before."""

    milliseconds: float
    peak_bytes: int


def measure(
    calls: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 7,
    patience: float = 30.0,
    step: Callable[[], object] = lambda: None,
) -> dict[str, Cost]:
    """Time all calls in turns, so that whatever else the machine does meets them alike.

    Three rounds at least, `repeats` at most, none begun after `patience` seconds; `step` is called after each round.

    >>> import torch
    >>> x = torch.randn(64, 64)
    >>> costs = measure({"once": lambda: x @ x, "twice": lambda: x @ x @ x}, repeats=3)
    >>> costs["once"].peak_bytes
    16384
    """
    for call in calls.values():  # warm up: plans, kernels, allocator
        call()
    peaks = {name: peak_bytes(call) for name, call in calls.items()}
    times = in_turns(calls, repeats, patience, step)
    return {name: Cost(statistics.median(times[name]), peaks[name]) for name in calls}


def in_turns(
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    patience: float,
    step: Callable[[], object] = lambda: None,
    in_a_row: int = 1,
) -> dict[str, list[float]]:
    """Milliseconds of every call of every round; in a round each is called so many times in a row."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        for turn in range(max(repeats, 1)):
            if turn >= 3 and time.perf_counter() - start > patience:
                break
            for name, call in calls.items():
                for _ in range(in_a_row):
                    _synchronise()
                    begin = time.perf_counter()
                    call()
                    _synchronise()
                    times[name].append(1000 * (time.perf_counter() - begin))
            step()
    finally:
        if collecting:
            gc.enable()
    return times


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that a call holds at once, on the GPU where there is one, otherwise on the CPU."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler talks on stderr
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        call()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    held = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def _synchronise() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()

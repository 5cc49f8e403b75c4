"""Timing on a machine that others use: is the host as fast as it can be while a call is timed?

Other tenants slow single cores down to half their speed, for milliseconds to seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

CALM = 1.35  # times the fastest loop


@dataclass
class Timed:
    """One call: milliseconds, and those of a short loop before or after it, whichever took longer."""

    took: float
    loop: float


class Host:
    """How fast the host runs Python, from call to call and from core to core."""

    def __init__(self) -> None:
        self.fastest = float("inf")  # milliseconds of a short loop
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self._settled = 0.0
        for _ in range(100):
            self._loop()

    def _loop(self) -> float:
        begin, total = time.perf_counter(), 0
        for number in range(10_000):
            total += number
        took = 1000 * (time.perf_counter() - begin)
        self.fastest = min(self.fastest, took)
        return took

    def settle(self) -> bool:
        """Move all threads to the cores that nobody else slows down just now, a few times a second. Did they move?"""
        if len(self._cores) < 8 or time.perf_counter() - self._settled < 0.2:
            return False
        took = {}
        for core in self._cores:
            os.sched_setaffinity(0, {core})
            took[core] = min(self._loop() for _ in range(2))
        calm = {core for core, loop in took.items() if loop < CALM * self.fastest}
        for task in os.listdir("/proc/self/task"):
            with suppress(OSError):  # it has ended
                os.sched_setaffinity(int(task), calm if len(calm) >= 4 else self._cores)
        self._settled = time.perf_counter()
        return True

    def timed(self, call: Callable[[], object]) -> Timed:
        synchronise()
        before, begin = self._loop(), time.perf_counter()
        call()
        synchronise()
        took, after = 1000 * (time.perf_counter() - begin), self._loop()
        return Timed(took, max(before, after))

    def calm(self, calls: list[Timed]) -> list[float]:
        """Milliseconds of those calls beside which the host was not slowed down; none, if these are too few."""
        found = [call.took for call in calls if call.loop < CALM * self.fastest]
        return found if len(found) >= 3 else []


def synchronise() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()

"""Python's garbage collector, paused while an explanation runs.

A graph's walk makes thousands of objects at once, all of which die with the call. Each thousand would start a collection
that visits whatever else the process holds: with a large library imported, half of an explanation's time.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0  # calls that are under way, in all threads
_was_on = False


@contextmanager
def paused_collector() -> Iterator[None]:
    """Enter it around work whose objects are all gone when it is left.

    >>> with paused_collector():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    global _pauses, _was_on
    with _lock:
        if _pauses == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_on:
                gc.enable()

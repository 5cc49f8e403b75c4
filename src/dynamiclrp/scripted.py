"""Scripted functions as the Python functions they were made from: `torch.jit` hides their operations from autograd.

Libraries script small functions inside plain models (VITS, ZoeDepth). `unscripted` is entered around a forward pass,
and around relevance, in which checkpointed layers run once more.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_Scripted: Any = torch._C.ScriptFunction
_call = _Scripted.__call__
_lock = threading.Lock()
_inside = 0


def _plain(function: Any, *args: Any, **kwargs: Any) -> Any:
    original = getattr(function, "_torchdynamo_inline", None)  # torch keeps it there for its compiler
    return _call(function, *args, **kwargs) if original is None else original(*args, **kwargs)


@contextmanager
def unscripted() -> Iterator[None]:
    """Let scripted functions run as plain ones.

    >>> import warnings
    >>> from torch import Tensor
    >>> def double(x: Tensor) -> Tensor:
    ...     return x + x
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     scripted = torch.jit.script(double)
    >>> with unscripted():
    ...     scripted(torch.ones(1, requires_grad=True)).grad_fn.name()
    'AddBackward0'
    """
    global _inside
    with _lock:
        _inside += 1
        _Scripted.__call__ = _plain
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _Scripted.__call__ = _call

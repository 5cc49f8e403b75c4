"""`s · f(x)/x` of activations in one kernel on CUDA devices, compiled when first used; elsewhere there is none.

One launch instead of five, and no temporaries: at batch 1 launches are what an explanation costs beyond a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Kernel = Callable[[Tensor, Tensor], Tensor]

_CODE = {
    "gelu": "return s * T(0.5) * (T(1) + erf(x * T(0.70710678118654752440)));",
    "gelu_tanh": "return s * T(0.5) * (T(1) + tanh(T(0.79788456080286535588) * (x + T(0.044715) * x * x * x)));",
    "silu": "return s / (T(1) + exp(-x));",
}
_compiled: dict[str, Kernel] = {}


def kernel(name: str, s: Tensor, x: Tensor) -> Kernel | None:
    """The kernel `(s, x) → s · f(x)/x`, where it serves these tensors: on CUDA, one dtype, one shape."""
    if s.device.type != "cuda" or torch.version.hip or s.dtype != x.dtype or s.shape != x.shape:
        return None
    if s.dtype not in (torch.float32, torch.float64):  # half types are computed in their own precision there
        return None
    if name not in _compiled:
        code = f"template <typename T> T {name}_share(T s, T x) {{ {_CODE[name]} }}"
        _compiled[name] = torch.cuda.jiterator._create_jit_fn(code)
    return _compiled[name]

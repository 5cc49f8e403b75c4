"""Recurrent layers as primitives: their fused kernels hide the gates.

`primitive_recurrence` is entered around a forward pass. On the CPU torch itself runs a layer as primitives when oneDNN is
off; on other devices the cell stays one kernel even without cuDNN, so torch's own decomposition takes its place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


@contextmanager
def primitive_recurrence(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let the recurrent layers and cells among the modules run as visible operations.

    >>> lstm = nn.LSTM(3, 2)
    >>> with primitive_recurrence([lstm]):
    ...     type(lstm(torch.randn(1, 4, 3))[0].grad_fn).__name__ != "MkldnnRnnLayerBackward0"
    True
    """
    modules = list(modules)
    recurrent = {kind for kind in set(map(type, modules)) if issubclass(kind, (nn.RNNBase, nn.RNNCellBase))}
    if not recurrent:
        yield
        return
    layers = [module for module in modules if type(module) in recurrent]
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "TF32 acceleration")  # torch warns whenever these flags are touched
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if any(parameter.device.type != "cpu" for layer in layers for parameter in layer.parameters()):
            stack.enter_context(Unfused())
        yield


class Unfused(TorchFunctionMode):
    """Replaces the calls that would run a cell as one kernel, on these devices or on all but the CPU."""

    def __init__(self, devices: tuple[str, ...] | None = None) -> None:
        super().__init__()
        self.devices = devices

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        form = _FORMS.get(getattr(func, "__name__", ""))
        if form is not None and args and self._fused_on(args[0].device.type):
            return form(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _fused_on(self, device: str) -> bool:
        return device != "cpu" if self.devices is None else device in self.devices


def _decomposed(name: str, x: Tensor, second: Any, *rest: Any) -> Any:
    """torch's own decomposition; packed sequences have the sizes of their batches as second argument."""
    from torch._decomp import decomposition_table

    packed = isinstance(second, Tensor) and not second.is_floating_point()
    overload = getattr(getattr(torch.ops.aten, name), "data" if packed else "input")
    return decomposition_table[overload](x, second, *rest)


def _lstm(x: Tensor, second: Any, *rest: Any) -> Any:
    return _decomposed("lstm", x, second, *rest)


def _gru(x: Tensor, second: Any, *rest: Any) -> Any:
    return _decomposed("gru", x, second, *rest)


def _lstm_cell(x: Tensor, state: Any, w: Tensor, u: Tensor, b: Any = None, c: Any = None) -> tuple[Tensor, Tensor]:
    h, memory = state
    i, f, g, o = (F.linear(x, w, b) + F.linear(h, u, c)).chunk(4, -1)
    memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
    return o.sigmoid() * memory.tanh(), memory


def _gru_cell(x: Tensor, h: Tensor, w: Tensor, u: Tensor, b: Any = None, c: Any = None) -> Tensor:
    x_reset, x_update, x_new = F.linear(x, w, b).chunk(3, -1)
    h_reset, h_update, h_new = F.linear(h, u, c).chunk(3, -1)
    new = (x_new + (x_reset + h_reset).sigmoid() * h_new).tanh()
    return (h - new) * (x_update + h_update).sigmoid() + new


_FORMS: dict[str, Callable[..., Any]] = {"lstm": _lstm, "gru": _gru, "lstm_cell": _lstm_cell, "gru_cell": _gru_cell}

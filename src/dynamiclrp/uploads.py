"""Copies from the CPU to the GPU in a forward pass: constants that a model makes anew in every call.

A CUDA graph can hold such a copy only from pinned memory, which it reads again at every replay. In: a pass that is run twice to
see what it copies, and whether that is the same in each call, and once more under capture. Out: the same pass, with copies from
pinned memory that `Uploads` holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .errors import CaptureError

aten = torch.ops.aten
_ALIGNED = 64  # bytes
_SPARE = 1 << 16
# Operations that take tensors of the CPU beside one on the GPU, and copy them out of sight.
_MIXING = frozenset({
    aten.where.self, aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
    aten._unsafe_index.Tensor, aten._unsafe_index_put.default,
})  # fmt: skip


class Uploads(TorchDispatchMode):
    """Entered around a pass it notes what is copied; after `reserve`, it makes the copies from pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self._memory: Tensor | None = None
        self._used = 0
        self._copied: list[Tensor] = []  # in this pass, and in the one before
        self._before: list[Tensor] = []
        self._factories = _Factories()

    def reserve(self, model: str) -> None:
        """Have pinned memory for twice as much: a model may copy more where it sees that it is captured.

        Refuses a model that copied something else in the pass before: a graph would hold one of them for ever.
        """
        alike = len(self._copied) == len(self._before)
        for now, before in zip(self._copied, self._before):
            alike = alike and now.dtype == before.dtype and now.shape == before.shape
            alike = alike and torch.equal(now.nan_to_num(), before.nan_to_num())
        if not alike:
            raise CaptureError(
                f"{model} copies other numbers from the CPU to the GPU in each call (random draws? counters?): as a CUDA graph it would "
                "go on with those of its capture. Remedy: leave out cuda_graph, or make them on the GPU."
            )
        self._copied, self._before = [], []
        self._memory = torch.empty(2 * self._used + _SPARE, dtype=torch.uint8, pin_memory=True)
        self._used = 0

    def __enter__(self) -> Any:
        if self._memory is None:
            self._before, self._copied, self._used = self._copied, [], 0
        self._factories.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._factories.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._to_copy.default and _is_on_cpu(args[0]) and _is_gpu(kwargs.get("device")):
            source = args[0].to(kwargs.get("dtype") or args[0].dtype)
            return func(self._pinned(source), **{**kwargs, "non_blocking": True})
        if func is aten.copy_.default and args[0].is_cuda and _is_on_cpu(args[1]):
            target, source = args[:2]
            return func(target, self._pinned(source.to(target.dtype).expand(target.shape)), True)
        if func in _MIXING and args[0].is_cuda:
            args = tree_map_only(Tensor, lambda tensor: self._moved(tensor, args[0].device), args)
        return func(*args, **kwargs)

    def _moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        return self._pinned(tensor).to(device, non_blocking=True) if _is_on_cpu(tensor) else tensor

    def _pinned(self, source: Tensor) -> Tensor:
        """A copy in pinned memory; in the passes before, the tensor as it is."""
        size = source.numel() * source.element_size()
        start, self._used = self._used, self._used + -(-size // _ALIGNED) * _ALIGNED
        if self._memory is None:
            self._copied.append(source.clone())
        if self._memory is None or not size:
            return source
        if self._used > len(self._memory):
            raise CaptureError(
                f"the model copies over {len(self._memory):,} bytes from the CPU to the GPU while it is captured, more than twice "
                "of what it did before. Remedy: leave out cuda_graph."
            )
        strides = torch.empty_like(source, device="meta").stride()  # those that a copy keeps
        held = self._memory[start : start + size].view(source.dtype)
        return held.as_strided(source.shape, strides).copy_(source)


class _Factories(TorchFunctionMode):
    """Tensors of Python's numbers are made on the CPU and then copied, where `Uploads` sees it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.new_tensor:
            like, *args = args
            func, kwargs = torch.tensor, {"dtype": like.dtype, "device": like.device, **kwargs}
        makes = func in (torch.tensor, torch.as_tensor) and not any(isinstance(value, Tensor) for value in args)
        if makes and _is_gpu(kwargs.get("device")) and not kwargs.get("requires_grad"):
            return func(*args, **{**kwargs, "device": "cpu"}).to(kwargs["device"])
        return func(*args, **kwargs)


def _is_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"

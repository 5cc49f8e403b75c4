"""What autograd's nodes saved: reading it, and swapping it under their own backward.

In: one node. Out: `Saved`, the view of its values by the names in torch's table of derivatives. With `capture` the only file that
reads torch's private attributes. It knows nothing of rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from .errors import FreedGraphError, LRPError

GraphExecGroup: Any = getattr(checkpoint, "GraphExecGroup", None)  # torch 2.10 and newer
_SIGN_BIT = 1 << 63


class Saved:
    """One node's saved values by their names in torch's table of derivatives: `Saved(node).dim`, `.weight`."""

    __slots__ = ("node", "read", "scratch")

    node: Any
    read: Mapping[str, Any] | None  # values that were read ahead, since they can be read only once
    scratch: dict[Any, Any]  # shared by all nodes of one pass

    def __new__(cls, node: Any, read: Mapping[str, Any] | None = None, scratch: dict[Any, Any] | None = None) -> Saved:
        kind = type(node)
        made = object.__new__(_saved_types.get(kind) or _saved_type(kind))
        made.node, made.read, made.scratch = node, read, {} if scratch is None else scratch
        return made

    def __getattr__(self, name: str) -> Any:  # for names that the node's type does not have
        raise AttributeError(f"{type(self.node).__name__} saves no {name!r}")

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """Zeros to read from; nodes of one pass share them."""
        return zeros_like(tensor, self.scratch)

    def several(self, names: tuple[str, ...]) -> tuple[Any, ...]:
        """Several values at once, for where no number can be negative."""
        if self.read is None:
            try:
                return _several(names)(self.node)
            except RuntimeError:  # freed: named below
                pass
        return tuple([getattr(self, name) for name in names])

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What a Python `autograd.Function` gave to `ctx.save_for_backward`."""
        return tuple(t.detach() if t is not None else None for t in self.node.saved_tensors)

    @property
    def shape(self) -> torch.Size:
        """The shape of the node's first output."""
        return output_shape(self.node, 0)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the node's first output."""
        return self.node._input_metadata[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of the node's first output."""
        return self.node._input_metadata[0].device


def zeros_like(tensor: Tensor, scratch: dict[Any, Any]) -> Tensor:
    """Zeros to read from, made once for all tensors of one kind."""
    key = (tensor.shape, tensor.dtype, tensor.get_device())
    made = scratch.get(key)
    if made is None:
        made = scratch[key] = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
    return made


_saved_types: dict[type, type[Saved]] = {}


def _saved_type(kind: type) -> type[Saved]:
    """`Saved` for one node type, with a property for each name: many times faster than `__getattr__`."""
    names = [name.removeprefix("_saved_") for name in dir(kind) if name.startswith("_saved_")]
    readers = {name: property(_reader(name)) for name in names if name not in vars(Saved)}
    made = type("Saved", (Saved,), {"__slots__": (), **readers})
    return _saved_types.setdefault(kind, made)


@cache
def _several(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*["_saved_" + name for name in names])


def _reader(name: str) -> Callable[[Saved], Any]:
    attribute = "_saved_" + name

    def read(saved: Saved) -> Any:
        if saved.read is not None and name in saved.read:
            return saved.read[name]
        try:
            value = getattr(saved.node, attribute)
        except RuntimeError as error:
            raise read_error(error, type(saved.node).__name__, name) from None
        return value if type(value) is Tensor else _clean(value)

    return read


def saved_tensor(node: Any, name: str) -> Any:
    """One tensor that a node saved: `Saved(node).name` in short."""
    try:
        return getattr(node, "_saved_" + name)
    except (AttributeError, RuntimeError):  # what is no tensor of torch's table, or was freed
        return getattr(Saved(node), name)


def swap(node: Any, name: str, put: Callable[[Tensor], Any], get: Callable[[Any], Tensor]) -> bool:
    """Let a node hold `put(value)` in place of what it saved, and its own backward find `get` of that.

    It cannot be undone: for graphs that nobody else will use. False, and nothing happened: the value is not in its hands
    (checkpointed, offloaded).
    """
    try:
        getattr(node, "_raw_saved_" + name).register_hooks(put, get)
    except RuntimeError:
        return False
    return True


can_recompute_twice = GraphExecGroup is not None


def checkpoint_mark(node: Any) -> Any:
    """Of a node made under `torch.utils.checkpoint` (non-reentrant): what tells its region from others; else None.

    Its values are recomputed when they are read, with those of its region.
    """
    for name in _raw_names(type(node)):
        try:
            saved = getattr(node, name, None)
        except RuntimeError:  # freed
            return None
        hook = getattr(saved, "unpack_hook", None)
        if hook is not None:
            return hook if "_checkpoint_hook" in getattr(hook, "__qualname__", "") else None
        if getattr(saved, "data", None) is not None:  # saved without a hook, and so were the others
            return None
    return None


def read_ahead(nodes: Sequence[Any]) -> list[dict[str, Any]]:
    """All saved tensors of checkpointed nodes of one region, each read once, with one recomputation (newer torch)."""
    with GraphExecGroup() if GraphExecGroup is not None else nullcontext():
        return [{name: getattr(Saved(node), name) for name in saved_tensor_names(type(node))} for node in nodes]


def saved_tensor_names(kind: type) -> tuple[str, ...]:
    """The attributes under which nodes of a type save tensors."""
    return tuple(name.removeprefix("_raw_saved_") for name in _raw_names(kind))


def _raw_names(kind: type) -> tuple[str, ...]:
    if kind not in _names:
        names = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        _names[kind] = tuple(name for name in names if hasattr(kind, name.removeprefix("_raw")))
    return _names[kind]


_names: dict[type, tuple[str, ...]] = {}  # a memo: dir() is slow


def output_shape(node: Any, number: int) -> torch.Size:
    """The shape of one output of an autograd node."""
    return torch.Size(output_sizes(node, number))


def output_sizes(node: Any, number: int) -> Sequence[int]:
    """The same as plain numbers, which torch reads faster."""
    if type(node).__name__ == "AccumulateGrad":
        return node.variable.shape
    metadata = node._input_metadata[number]
    strided = getattr(metadata, "is_cpp_nested_tensor", False)  # a nested tensor of the strided layout has no shape
    return () if strided else metadata.shape


def first_operand_sizes(node: Any) -> Sequence[int] | None:
    """The shape of a node's first operand, where the node saved it, which is the quickest to read."""
    return getattr(node, "_saved_self_sym_sizes", None)


def is_half(node: Any) -> bool:
    """Is the first output of an autograd node of a type with less than 32 bits?"""
    return node._input_metadata[0].dtype.itemsize < 4


def leaf_value(node: Any) -> Tensor:
    """The tensor behind an AccumulateGrad node."""
    return node.variable.detach()


def leaf_id(node: Any) -> int:
    """Which tensor stands behind an AccumulateGrad node."""
    return id(node.variable)


def sequence_number(node: Any) -> int:
    """When the node was made; nodes of one forward pass on one thread count up."""
    return node._sequence_nr()


def next_sequence_number() -> int:
    """The number that the next node made on this thread will get."""
    return torch._C._autograd._get_sequence_nr()


def read_error(error: RuntimeError, node: str, name: str) -> LRPError:
    """What it means that a saved value cannot be read."""
    text = str(error)
    if "second time" in text or "already been freed" in text:
        return FreedGraphError(
            f"the saved values of {node} were freed by an earlier backward pass. Run the forward pass again, or keep the "
            "graph with retain_graph=True."
        )
    if "inplace" in text:
        return FreedGraphError(f"{node} saved {name!r}, and an in-place operation overwrote it afterwards: {text}")
    return FreedGraphError(f"{node} cannot hand out {name!r}: {text}")


def _clean(value: Any) -> Any:
    """Negative integers read back as unsigned."""
    kind = type(value)
    if kind is int:
        return value - (1 << 64) if value >= _SIGN_BIT else value
    if kind is tuple or kind is list:
        return tuple([item if type(item) is int and item < _SIGN_BIT else _clean(item) for item in value])
    return value

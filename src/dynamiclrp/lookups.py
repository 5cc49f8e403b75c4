"""Which embedding lookups of a graph an integer argument ends in.

In: a captured `Graph` and the integer arguments of a call. Out: `Lookup`s, and a `Tracker` for arguments that are padded,
hashed or cut before they are looked up. It knows nothing of models, rules or plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .graph import Graph, Ref
from .ops import OPS, Kind
from .saved import Saved, leaf_value


@dataclass(frozen=True, eq=False)
class Lookup:
    """A node that looks rows up in a table of parameters."""

    node: int
    indices: Tensor
    value: Tensor


def table_lookups(graph: Graph) -> Iterator[Lookup]:
    """All lookups in tables of parameters, with the looked-up values."""
    for node, kind in enumerate(graph.types):
        op = OPS.get(kind.__name__)
        if op is None or op.lookup is None or op.forward is None:
            continue
        table = _parameter(graph, graph.edges[node][0])
        saved = Saved(graph.handles[node])
        indices = getattr(saved, op.lookup) if table is not None else None
        if isinstance(indices, tuple) and len(indices) == 1:
            indices = indices[0]
        if isinstance(indices, Tensor):
            with torch.no_grad():
                value = op.forward(saved, table)
            yield Lookup(node, indices, value)


def same_memory(indices: Tensor, ids: Tensor) -> bool:
    """Are the indices the argument itself, or a view of all of it?"""
    return indices.numel() == ids.numel() and indices.data_ptr() == ids.data_ptr()


def same_values(indices: Tensor, ids: Tensor) -> bool:
    """Are the indices a copy of the argument?"""
    return indices.shape == ids.shape and torch.equal(indices.to(ids), ids)


class Tracker(TorchDispatchMode):
    """Follows integer arguments through the forward pass, element by element, to the lookups they end in.

    Beside each tensor made from an argument it keeps where its elements came from (-1: from nowhere). Operations that move
    elements move those too; elementwise ones (hashing, shifting, clamping) keep them.
    """

    def __init__(self, arguments: dict[str, Tensor]) -> None:
        super().__init__()
        self.origins: dict[Any, tuple[str, Tensor]] = {}
        self.alive: list[Tensor] = []  # so that no address is used twice
        for name, ids in arguments.items():
            self._enter(ids, name, torch.arange(ids.numel(), device=ids.device).reshape(ids.shape))

    def made_from(self, tensor: Tensor) -> tuple[str, Tensor] | None:
        """The argument that a tensor was made from, and where in it each element came from."""
        return self.origins.get(_identity(tensor))

    def _enter(self, tensor: Tensor, name: str, origin: Tensor) -> None:
        self.origins.setdefault(_identity(tensor), (name, origin))
        self.alive.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else (result,)
        if not all(isinstance(r, Tensor) and not r.is_floating_point() for r in results):
            return result
        found = [self.made_from(t) for t in _tensors(args)]
        name = next((entry[0] for entry in found if entry is not None), None)
        if name is not None:
            moved = self._moved(func, args, kwargs or {})
            for number, tensor in enumerate(results):
                origin = moved[number] if moved is not None else next(e[1] for e in found if e is not None)
                if origin.shape == tensor.shape:
                    self._enter(tensor, name, origin)
        return result

    def _moved(self, func: Any, args: Any, kwargs: Any) -> tuple[Tensor, ...] | None:
        """The origins, moved as the operation moves elements; None for an elementwise operation."""
        if func._schema.name.removeprefix("aten::") not in _MOVES:
            return None
        args = [_swap(argument, self) for argument in args]
        if func._schema.name == "aten::constant_pad_nd":
            args = [*args[:2], -1]
        made = func(*args, **{k: v for k, v in kwargs.items() if k == "dim"})
        return tuple(made) if isinstance(made, (tuple, list)) else (made,)


_MOVES = frozenset({
    "view", "_unsafe_view", "reshape", "slice", "select", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand",
    "index_select", "clone", "alias", "unbind", "split", "cat", "stack", "constant_pad_nd", "roll", "repeat", "flip",
})  # fmt: skip


def _swap(argument: Any, tracker: Tracker) -> Any:
    if isinstance(argument, (list, tuple)) and any(isinstance(item, Tensor) for item in argument):
        return [_swap(item, tracker) for item in argument]
    if not isinstance(argument, Tensor):
        return argument
    entry = tracker.made_from(argument)
    return entry[1] if entry is not None else torch.full(argument.shape, -1, dtype=torch.int64, device=argument.device)


def _tensors(arguments: Any) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _parameter(graph: Graph, ref: Ref | None) -> Tensor | None:
    """The value of a tensor that is a leaf, or a view or cast of one."""
    steps = []
    while ref is not None and graph.types[ref[0]].__name__ != "AccumulateGrad":
        op = OPS.get(graph.types[ref[0]].__name__)
        if op is None or op.kind is not Kind.MOVEMENT or op.forward is None or len(graph.edges[ref[0]]) != 1:
            return None
        steps.append((op, ref[0]))
        ref = graph.edges[ref[0]][0]
    if ref is None:
        return None
    value = leaf_value(graph.handles[ref[0]])
    for op, node in reversed(steps):
        value = op.forward(Saved(graph.handles[node]), value)  # type: ignore[misc]
    return value

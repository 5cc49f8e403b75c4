"""Where a number stopped being finite: in a parameter, in an argument, or in an operation of the forward pass.

In: a model and its arguments, then the graph of a forward pass that ran under `Numbers`. Out: words. It must not know rules.
Masks hold infinities on purpose, so what is not finite counts only where it is on the way to the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .graph import Graph
from .recorder import fits
from .saved import next_sequence_number, sequence_number


@dataclass(frozen=True)
class _Made:
    """What an operation made, and what it was given by name."""

    function: Any
    state: str  # "nan", "inf", or empty if it is finite
    named: str | None


class Numbers(TorchDispatchMode):
    """Watches a forward pass for numbers that are not finite."""

    def __init__(self, model: nn.Module, arguments: Mapping[str, Tensor]) -> None:
        super().__init__()
        named = {f"argument {name!r}": tensor for name, tensor in arguments.items()}
        named |= {f"parameter {name!r}": tensor for name, tensor in model.named_parameters()}
        named |= {f"buffer {name!r}": tensor for name, tensor in model.named_buffers()}
        self._names = {_memory(t): name for name, t in reversed(named.items()) if _state(t)}
        self._held: list[Tensor] = []  # so that no other tensor gets the memory of one that has a name
        self._made: dict[int, list[_Made]] = {}  # by sequence number of the node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = next((self._names[_memory(t)] for t in _tensors(args) if _memory(t) in self._names), None)
        result = func(*args, **(kwargs or {}))
        bad = [t for t in _tensors(result) if _state(t)]
        state = "nan" if any(_state(t) == "nan" for t in bad) else "inf" if bad else ""
        self._made.setdefault(next_sequence_number() - 1, []).append(_Made(func, state, named))
        if named is not None and not any(t.requires_grad for t in _tensors(args)):  # a cast, say, of a frozen weight
            self._held += bad
            self._names |= {_memory(t): named for t in bad}
        return result

    def origin(self, graph: Graph) -> str | None:
        """Where it began, of what reached the output; None, if the output is finite."""
        node = graph.outputs[0][0]
        here = self._of(graph, node)
        if here is None or not here.state:
            return None
        born = None  # where an infinity became nan
        while True:
            below = [(n, made) for n, made in self._operands(graph, node) if made.state]
            same = [(n, made) for n, made in below if made.state == here.state]
            if here.named is not None and not same:
                return f"it began in {here.named}, which is not finite. {_REMEDY}"
            if not below:
                after = "" if born is None else f", and nan of that by {graph.where(born)}"
                return f"{here.state} was first made by {graph.where(node)}{after}. {_REMEDY}"
            born = born if same else node
            node, here = (same or below)[0]

    def _of(self, graph: Graph, node: int) -> _Made | None:
        """What a node made; None, if nobody saw it."""
        number = sequence_number(graph.handles[node])
        near = (*self._made.get(number, ()), *self._made.get(number + 1, ()))
        return next((made for made in near if fits(made.function, graph.types[node].__name__)), None)

    def _operands(self, graph: Graph, node: int) -> Iterator[tuple[int, _Made]]:
        """The nodes below and what they made; those that nobody saw are looked through."""
        seen: set[int] = set()
        left = [node]
        while left:
            for operand in {ref[0] for ref in graph.edges[left.pop()] if ref is not None} - seen:
                seen.add(operand)
                made = self._of(graph, operand)
                if made is None:
                    left.append(operand)
                else:
                    yield operand, made


_REMEDY = "Relevance would mean nothing: mend that number, or give an input that the model takes."


def _state(tensor: Tensor) -> str:
    if not tensor.is_floating_point() or tensor.layout != torch.strided or bool(torch.isfinite(tensor).all()):
        return ""
    return "nan" if bool(torch.isnan(tensor).any()) else "inf"


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for item in given:
            yield from _tensors(item)

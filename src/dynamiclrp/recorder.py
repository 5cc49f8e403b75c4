"""What autograd forgets, written down while the forward pass runs.

`x + k` leaves no trace of k, `masked_fill` none of its value. Where a plan finds such a value lost, `explain` runs the
forward pass again under this recorder, which keeps each operation's constants and can call it again. Calls are matched
to autograd's nodes by sequence number: autograd makes the node just before it runs the operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import LostActivationError
from .graph import Graph, op_name
from .saved import next_sequence_number, sequence_number

_ARITHMETIC = frozenset({"add", "sub", "rsub", "mul", "div"})  # whose integer operands have an edge too
_OPERAND = object()  # stands for a tensor that autograd tracks


@dataclass(frozen=True)
class Call:
    """One operation: its arguments, with the tracked tensors left out."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    constants: dict[int, Any]  # untracked tensors and numbers by operand position
    versions: tuple[tuple[Tensor, int], ...]
    value: Tensor | None = None  # what a write through a view left in the tensor behind it
    operands: tuple[Tensor, ...] = ()  # the constant tensors that have an edge

    def constant(self, position: int) -> Any:
        """A constant operand, if it is still what it was."""
        self._check()
        return self.constants[position]

    def _check(self) -> None:
        for tensor, version in self.versions:
            if tensor._version != version:
                raise LostActivationError(
                    f"a constant of {self.function} was overwritten after the forward pass used it: its value is lost"
                )

    def replay(self, operands: Sequence[Tensor]) -> Any:
        """Call it again on these operands (in the order of the node's edges; constants are known)."""
        self._check()
        tensors = iter(operands)
        arguments = [self._fill(argument, tensors) for argument in self.arguments]
        if self.function._schema.is_mutable:
            arguments[0] = arguments[0].clone()
        return self.function(*arguments, **self.keywords)

    def _fill(self, argument: Any, tensors: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return [self._fill(item, tensors) for item in argument]
        if argument is _OPERAND:
            return next(tensors)
        if isinstance(argument, Tensor) and any(argument is constant for constant in self.operands):
            next(tensors, None)  # a constant operand has an edge too
        return argument


class Recorder(TorchDispatchMode):
    """Records calls by the sequence number of their autograd node."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, list[Call]] = {}
        self.written: dict[int, Tensor] = {}  # tensors after a write through a view

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kept = args
        if func._schema.is_mutable and args and isinstance(args[0], Tensor) and not args[0].requires_grad:
            kept = (args[0].clone(), *args[1:])  # what it will have overwritten
        result = func(*args, **kwargs)
        if func._schema.is_mutable and args and isinstance(args[0], Tensor) and args[0]._base is not None:
            # autograd makes the operation's node before it runs, and the node of the written tensor right after
            self.written[next_sequence_number()] = args[0]._base.detach().clone()
        if torch.Tag.nondeterministic_seeded in func.tags:  # a second call would draw other numbers
            return result
        if torch.is_grad_enabled() or any(isinstance(a, Tensor) and a.requires_grad for a in _flat(args)):
            self.calls.setdefault(next_sequence_number() - 1, []).append(self._call(func, kept, kwargs))
        return result

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        constants: dict[int, Any] = {}
        versions: list[tuple[Tensor, int]] = []
        operands: list[Tensor] = []
        position = 0

        def strip(argument: Any) -> Any:
            nonlocal position
            if isinstance(argument, (list, tuple)):
                return tuple(strip(item) for item in argument)
            if isinstance(argument, Tensor) and argument.requires_grad:
                position += 1
                return _OPERAND
            if isinstance(argument, Tensor):
                if not argument.is_inference():  # those count no versions
                    versions.append((argument, argument._version))
                if argument.is_floating_point() or func._schema.name.split("::")[-1].rstrip("_") in _ARITHMETIC:
                    constants[position] = argument.detach()
                    operands.append(argument)
                    position += 1
            elif isinstance(argument, (int, float)) and not isinstance(argument, bool):
                constants.setdefault(position, argument)
            return argument

        arguments = tuple(strip(argument) for argument in args)
        return Call(func, arguments, dict(kwargs), constants, tuple(versions), operands=tuple(operands))

    def by_node(self, graph: Graph) -> dict[int, Call]:
        """The calls of a graph's nodes; a call whose name does not fit its node is not one."""
        calls = {}
        for node, handle in enumerate(graph.handles):
            if graph.types[node].__name__ == "CopySlices":
                value = self.written.get(sequence_number(handle))
                if value is not None:
                    calls[node] = Call(None, (), {}, {}, (), value)
                continue
            number = sequence_number(handle)
            # an in-place operation may first copy what it overwrites, which makes a node of its own
            near = (*self.calls.get(number, ()), *self.calls.get(number + 1, ()))
            call = next((c for c in near if fits(c.function, graph.types[node].__name__)), None)
            if call is not None:
                calls[node] = call
        return calls


def fits(function: Any, type_name: str) -> bool:
    """Is this the operation that a node of this type stands for?"""
    called = function._schema.name.split("::")[-1].replace("_", "").lower()
    return op_name(type_name).lower().startswith(called) or called.startswith(op_name(type_name).lower())


def _flat(arguments: Any) -> Any:
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            yield from _flat(argument)
        else:
            yield argument

"""The forward pass as data: nodes, edges, which of them matter.

In: what `capture` read off autograd. Out: a `Graph`, the input of `plan`. This file knows nothing of torch's private
attributes, of rules or of values.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from .frozen import Frozen
from .ops import OPS

# One tensor of the forward pass: (index of the node that made it, number of that node's output).
Ref = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Structure:
    """Types and edges of a graph; one object for all graphs that look alike, so that comparing them costs nothing."""

    types: tuple[type, ...]  # autograd's class of each node
    edges: tuple[tuple[Ref | None, ...], ...]  # operands of each node; None: a constant
    order: tuple[int, ...]  # node → its place in the walk that found it
    numbers: tuple[int, ...]  # place → node
    nodes: dict[type, tuple[int, ...]]  # by type


@dataclass(frozen=True, eq=False)
class Graph(Frozen):
    """The operations between outputs and inputs; an operand's node always stands before its consumer."""

    structure: Structure
    attributes: tuple[tuple[int, tuple[Any, ...]], ...]  # (node, saved values that decide its plan)
    widths: dict[int, int]  # how many outputs a node that splits its operand has
    outputs: tuple[Ref, ...]
    inputs: tuple[Ref, ...]
    handles: tuple[Any, ...] = field(repr=False)  # autograd's nodes; they live no longer than the call
    places: dict[Any, int] = field(repr=False)  # where the walk found each of them
    watched: frozenset[Ref] = frozenset()  # those among the inputs that are only looked at on the way (layers)
    modules: tuple[str, ...] | None = None  # the innermost module of each node, where somebody watched the forward pass
    calls: dict[int, Any] = field(default_factory=dict, repr=False)  # recorded calls by node (see recorder.py)

    def __len__(self) -> int:
        return len(self.structure.types)

    @property
    def types(self) -> tuple[type, ...]:
        """autograd's class of each node."""
        return self.structure.types

    @property
    def edges(self) -> tuple[tuple[Ref | None, ...], ...]:
        """The operands of each node; None: a constant."""
        return self.structure.edges

    def find(self, handle: Any) -> int | None:
        """The number of one of autograd's nodes; None, if the outputs do not depend on it."""
        place = self.places.get(handle)
        return None if place is None else self.structure.numbers[place]

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for two graphs exactly when one plan serves both. Holds no shapes and no values."""
        calls = frozenset(
            (node, frozenset(call.constants), call.value is not None) for node, call in self.calls.items()
        )
        widths = tuple(self.widths.items())
        ends = (self.outputs, self.inputs, self.watched)
        return (self.structure, self.attributes, widths, ends, self.modules, calls)

    def ref(self, edge: Any) -> Ref:
        """The tensor that a gradient edge stands for; for edges that are known to be part of the graph."""
        node = self.find(edge.node)
        assert node is not None
        return node, edge.output_nr

    def name(self, node: int) -> str:
        """The operation's name: `AddmmBackward0` is `Addmm`."""
        return op_name(self.types[node].__name__)

    def op(self, node: int) -> Any:
        """The row of the operation."""
        return OPS[self.structure.types[node].__name__]

    def known(self, node: int) -> Any:
        """The row of the operation; None, where it has none."""
        return OPS.get(self.structure.types[node].__name__)

    def where(self, node: int) -> str:
        """The node as error messages name it."""
        module = self.modules[node] if self.modules else ""
        return f"node {node} ({self.name(node)}{f' in {module}' if module else ''})"

    def attributes_of(self, node: int) -> tuple[Any, ...]:
        """Those of one node; empty, where none decide."""
        return self._attributes.get(node, ())

    @cached_property
    def _attributes(self) -> dict[int, tuple[Any, ...]]:
        return dict(self.attributes)

    @cached_property
    def ends(self) -> frozenset[Ref]:
        """The tensors where relevance ends."""
        return frozenset(self.inputs) - self.watched

    @cached_property
    def runs(self) -> tuple[bool, ...]:
        """For each node: does relevance pass through it on its way to an input?"""
        wanted = set(self.inputs)
        runs: list[bool] = []
        for edges in self.edges:
            runs.append(any(ref is not None and (ref in wanted or runs[ref[0]]) for ref in edges))
        return tuple(runs)

    def is_live(self, ref: Ref | None) -> bool:
        """Does relevance of this tensor reach an input?"""
        return ref is not None and (self.runs[ref[0]] or ref in self.inputs)

    def operand(self, node: int, position: int) -> Ref:
        """The tensor that stands there; for positions that are known not to hold a constant."""
        ref = self.edges[node][position]
        assert ref is not None
        return ref

    @cached_property
    def consumers(self) -> dict[Ref, list[tuple[int, int]]]:
        """For each tensor: the nodes that use it, with the operand's position."""
        consumers: dict[Ref, list[tuple[int, int]]] = {}
        for node, edges in enumerate(self.edges):
            for position, ref in enumerate(edges):
                if ref is not None:
                    consumers.setdefault(ref, []).append((node, position))
        return consumers

    def __str__(self) -> str:
        counts = Counter(self.name(node) for node in range(len(self)))
        live = sum(self.runs)
        ops = ", ".join(f"{name} x{count}" if count > 1 else name for name, count in counts.most_common())
        return f"Graph of {len(self)} nodes, {live} live: {ops}"


@cache
def op_name(type_name: str) -> str:
    """`AddmmBackward0` → `Addmm`; Python functions (`MyFunctionBackward`) → `MyFunction`."""
    name = type_name.removesuffix("AutogradNestedTensor").rstrip("0123456789").removesuffix("Backward")
    return name.removesuffix("_copy").removesuffix("Backward")

"""Which lookups in tables an integer argument ends in, and which of its elements each looked-up row belongs to.

In: a captured `Graph` and the `Origins` of its integers. Out: `Lookup`s, and what an explainer learns of them. It
knows nothing of models, rules or plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .capture import plain
from .graph import Graph, Ref, Structure
from .ops import OPS, Kind, Op
from .origins import Key, Origins, address
from .saved import Saved, leaf_value, sequence_number


@dataclass(frozen=True, eq=False)
class Share:
    """What each element of an argument takes of the relevance of looked-up rows."""

    shape: torch.Size  # of the argument
    first: int  # the first of the rows' dimensions that stand for indices, and how many there are
    count: int
    origins: tuple[Tensor, ...] = ()  # where each index comes from, counted from 1; empty: all in their own places
    several: Tensor | None = None  # into how many parts each goes, if more than one takes some
    bags: tuple[Tensor, Tensor] | None = None  # of rows that were added up: each index's part, and its sum

    def __call__(self, relevance: Tensor) -> Tensor:
        if self.bags is not None:
            part, bag = self.bags
            relevance = part * relevance[bag]
        rest = [i for i in range(relevance.dim()) if not self.first <= i < self.first + self.count]
        relevance = relevance.sum(rest) if rest else relevance
        if not self.origins:
            return relevance.reshape(self.shape)
        relevance = relevance if self.several is None else relevance / self.several
        total = relevance.new_zeros(self.shape.numel() + 1)  # the first one takes what came from nowhere (padding)
        for origin in self.origins:
            total.index_add_(0, origin.clamp_min(0).flatten(), relevance.flatten())
        return total[1:].reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Lookup:
    """A node that looks rows up in a table, for one argument."""

    name: str
    node: int
    value: Tensor
    share: Share


@dataclass
class Learnt:
    """What an explainer learns of lookups; no tensors."""

    follow: bool = True  # follow integers through the forward pass
    moved: bool = False  # there are arguments that are moved before they are looked up: follow in each call
    tables: set[int] = field(default_factory=set)  # parameters, by id, that are looked into
    # by structure, and what was given: lookups that no argument ends in
    elsewhere: WeakKeyDictionary[Structure, dict[Any, frozenset[int]]] = field(default_factory=WeakKeyDictionary)


def find_lookups(
    graph: Graph, origins: Origins, given: dict[str, Tensor], learnt: Learnt, ends: Sequence[int], followed: bool
) -> list[Lookup] | None:
    """All lookups that arguments end in; `ends`: nodes of the other inputs. None: integers must be followed to tell."""
    if not followed and any(ids._version for ids in given.values()):  # the model writes into them
        return None
    names = tuple((name, ids.dtype) for name, ids in given.items())
    known = learnt.elsewhere.setdefault(graph.structure, {}).get(names)
    fixed = any(t.is_cuda for t in given.values()) and torch.cuda.is_current_stream_capturing()
    elsewhere: set[int] = set()
    found: list[Lookup] = []
    for node, op in _nodes(graph):
        if known is not None and node in known and (fixed or not followed):
            continue
        saved = Saved(graph.handles[node])
        where = _Indices.of(saved, op, origins)
        keys = where.found(sure=fixed or not followed) if where is not None else []
        if not keys and followed:
            elsewhere.add(node)
            continue
        if where is None or not keys:
            return None
        held = parameter(graph, graph.edges[node][0], ends)
        if held is None and not followed:
            return None
        table = origins.tables.get(sequence_number(graph.handles[node])) if held is None else held
        sources = [*ends, *(lookup.node for lookup in found)]
        others = graph.edges[node] if held is None else graph.edges[node][1:]
        if table is None or _depends(graph, others, sources):
            elsewhere.add(node)  # not a table, but values that carry relevance further down
            continue
        found += _lookups(node, op, saved, table, where, keys, given)
        learnt.moved |= held is None or any(ids._version for ids in given.values()) or where.moved(given)
    if followed and not fixed:
        learnt.elsewhere[graph.structure][names] = frozenset(elsewhere)
        learnt.follow = learnt.moved or known is None  # until it has been seen twice
    return found


def _nodes(graph: Graph) -> Iterator[tuple[int, Op]]:
    rows = ((OPS.get(kind.__name__), nodes) for kind, nodes in graph.structure.nodes.items())
    yield from sorted(
        ((node, op) for op, nodes in rows if op and op.lookup and op.forward for node in nodes),
        key=lambda pair: pair[0],
    )


@dataclass(frozen=True, eq=False)
class _Indices:
    """The integers that a node looks up."""

    indices: tuple[Tensor, ...]
    first: int  # dimension of the result where theirs begin
    origins: tuple[dict[Key, Tensor], ...]

    @classmethod
    def of(cls, saved: Any, op: Op, origins: Origins) -> _Indices | None:
        assert op.lookup is not None
        value = getattr(saved, op.lookup)
        first = saved.dim if op.lookup == "index" and value.dim() == 1 else 0
        items = value if isinstance(value, tuple) else (value,)
        places = [i for i, item in enumerate(items) if isinstance(item, Tensor)]
        if not places or any(items[i].is_floating_point() or items[i].dtype == torch.bool for i in places):
            return None
        if len(places) > 1:  # those that do not stand side by side come first
            first = places[0] if places[-1] - places[0] == len(places) - 1 else 0
        elif isinstance(value, tuple):
            first = places[0]
        indices = tuple(items[i] for i in places)
        return cls(indices, first, tuple(origins.of(tensor) for tensor in indices))

    def found(self, sure: bool) -> list[tuple[str, int, Key]]:
        """(argument, which indices, key) of those whose elements are an argument's."""
        every = [(key[0], i, key) for i, origins in enumerate(self.origins) for key in origins]
        return [(name, i, key) for name, i, key in every if sure or bool((self.origins[i][key] > 0).any())]

    def moved(self, given: dict[str, Tensor]) -> bool:
        """Do they stand elsewhere than in the arguments' own memory?"""
        own = {address(ids) for ids in given.values()}
        return any(address(tensor) not in own for tensor, origins in zip(self.indices, self.origins) if origins)


def _lookups(
    node: int,
    op: Op,
    saved: Any,
    table: Tensor,
    where: _Indices,
    keys: list[tuple[str, int, Key]],
    given: dict[str, Tensor],
) -> Iterator[Lookup]:
    with torch.no_grad():
        assert op.forward is not None
        value = plain(op.forward(saved, table))
        bags = op.bags(saved, table, value) if op.bags is not None else None
    shape = where.indices[0].shape
    if len(where.indices) > 1:
        shape = torch.broadcast_shapes(*[tensor.shape for tensor in where.indices])
    origins = [where.origins[i][key].expand(shape) for _, i, key in keys]
    several = torch.stack([origin > 0 for origin in origins]).sum(0).clamp_min(1) if len(origins) > 1 else None
    for name in dict.fromkeys(name for name, _, _ in keys):
        ids, own = given[name], tuple(o for o, (other, _, _) in zip(origins, keys) if other == name)
        in_place = len(keys) == 1 and not ids._version and same_elements(where.indices[0], ids)
        share = Share(ids.shape, where.first % table.dim(), len(shape), () if in_place else own, several, bags)
        yield Lookup(name, node, value, share)


def same_elements(indices: Tensor, ids: Tensor) -> bool:
    """Are the indices the argument's own memory, in its order?"""
    if indices.data_ptr() != ids.data_ptr() or indices.numel() != ids.numel() or indices.dtype != ids.dtype:
        return False
    alike = indices.shape == ids.shape and indices.stride() == ids.stride()
    return alike or (indices.is_contiguous() and ids.is_contiguous())


def _depends(graph: Graph, refs: Sequence[Ref | None], nodes: Sequence[int]) -> bool:
    """Does any of the tensors depend on one of the nodes?"""
    stack, seen = [ref[0] for ref in refs if ref is not None], set[int]()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += [ref[0] for ref in graph.edges[node] if ref is not None]
    return not seen.isdisjoint(nodes)


def parameter(graph: Graph, ref: Ref | None, ends: Sequence[int]) -> Tensor | None:
    """The value of a tensor that is a leaf, or a view or cast of one, and no input (`ends`)."""
    steps = []
    while ref is not None and graph.types[ref[0]].__name__ != "AccumulateGrad":
        op = OPS.get(graph.types[ref[0]].__name__)
        if op is None or op.kind is not Kind.MOVEMENT or op.forward is None or len(graph.edges[ref[0]]) != 1:
            return None
        steps.append((op, ref[0]))
        ref = graph.edges[ref[0]][0]
    if ref is None or ref[0] in ends:
        return None
    value = leaf_value(graph.handles[ref[0]])
    for op, node in reversed(steps):
        value = op.forward(Saved(graph.handles[node]), value)  # type: ignore[misc]
    return value

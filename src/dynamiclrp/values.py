"""Promises fulfilled: where a plan says that a value comes from, there it is fetched, once, and let go after its last use.

In: a plan, a graph of its signature, the outputs. It knows sources, never rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import FreedGraphError
from .graph import Graph, Ref
from .ops import Op
from .ops.table import unbroadcast
from .plan import Plan
from .promise import OUTPUT, Absent, Given, Kept, Key, Leaf, Recorded, Replay, Rest, Source, Undo
from .saved import (
    Saved,
    can_recompute_twice,
    checkpoint_mark,
    first_operand_sizes,
    leaf_value,
    output_shape,
    output_sizes,
    read_ahead,
    saved_tensor,
    swap,
)


@dataclass
class Region:
    """Nodes that one checkpoint recomputes together, as far as their values are read."""

    nodes: list[int]
    read: bool = False
    done: int = 0


class Values:
    """Promises fulfilled: each value is computed once, when first needed, and let go after its last use."""

    def __init__(
        self, plan: Plan, graph: Graph, outputs: Sequence[Tensor], keep: bool = False, ours: bool = False
    ) -> None:
        self.plan, self.graph, self.outputs, self.keep, self.ours = plan, graph, outputs, keep, ours
        self.left = dict(plan.uses)
        self.scratch: dict[Any, Any] = {}  # what is needed again, by the same node or by others
        self.ready: dict[Key, Any] = {}
        self.shown: dict[Ref, Tensor] = {}  # relevance of tensors that were asked for on the way
        self._ahead: dict[int, dict[str, Any]] = {}  # saved tensors that were read before their node's turn
        self.regions = self._find_regions()
        for node, names in plan.extras:  # a replay may come after its node's turn, when what it saved is freed
            if node not in self.regions:
                saved = Saved(graph.handles[node])
                with self._lenient():
                    self._ahead[node] = {name: getattr(saved, name) for name in names}
        # What other nodes saved must be read now: a backward pass frees it node by node.
        kept, leaves, others = plan.early
        for key, holder, attribute in kept:
            with self._lenient():
                if holder in self._ahead:
                    self.ready[key] = getattr(self.saved(holder), attribute)
                elif holder not in self.regions:
                    self.ready[key] = saved_tensor(graph.handles[holder], attribute)
        for key, node in leaves:
            self.ready[key] = leaf_value(graph.handles[node])
        for key, source in others:
            self.ready[key] = self._fetch(source)

    def _shape(self, source: Replay | Undo) -> Sequence[int]:
        """The shape of what a reshape, or its undoing, makes."""
        handle = self.graph.handles[source.node]
        if isinstance(source, Replay):
            return output_sizes(handle, 0)
        sizes = first_operand_sizes(handle)
        if sizes is not None:
            return sizes
        node, number = self.graph.operand(source.node, 0)
        return output_sizes(self.graph.handles[node], number)

    def _find_regions(self) -> dict[int, Region]:
        """Checkpointed regions by node. Older torch cannot recompute one of them twice in a backward pass: read all now."""
        found: dict[Any, Region] = {}
        regions = {}
        for node in self.plan.touched:
            mark = checkpoint_mark(self.graph.handles[node])
            if mark is not None:
                regions[node] = found.setdefault(mark, Region([]))
                regions[node].nodes.append(node)
        if can_recompute_twice:
            return regions
        for region in found.values():
            self._read(region)
        return {}

    def saved(self, node: int) -> Saved:
        """What a node saved."""
        if self.regions and node in self.regions and not self.regions[node].read:
            self._read(self.regions[node])
        return Saved(self.graph.handles[node], self._ahead.get(node), self.scratch)

    def replace(self, node: int, name: str, value: Tensor) -> bool:
        """Let the node's own backward find this value in what it saved. Could it be done? What others need of it is read by now."""
        free = self.ours and node not in self.regions
        return free and swap(self.graph.handles[node], name, lambda held: held, lambda held: value)

    def _read(self, region: Region) -> None:
        """Recompute a checkpointed region and keep what its nodes saved, until they have all had their turn."""
        region.read = True
        nodes = region.nodes
        self._ahead.update(zip(nodes, read_ahead([self.graph.handles[node] for node in nodes])))
        for key, source in self.plan.sources.items():
            if isinstance(source, Kept) and source.holder in nodes and (self.keep or self.left.get(key)):
                self.ready.setdefault(key, self._ahead[source.holder][source.attribute])

    def had_its_turn(self, node: int) -> None:
        """A node of a checkpointed region is done; after the last of them, keep only what replays still need."""
        region = self.regions[node]
        region.done += 1
        if region.done == len(region.nodes) and not self.keep:
            extras = dict(self.plan.extras)
            for member in region.nodes:
                read = self._ahead.pop(member, {})
                self._ahead[member] = {name: read[name] for name in extras.get(member, ()) if name in read}

    def take(self, key: Key) -> Any:
        """The value of a tensor; it counts as one of the uses that the plan foresaw."""
        ready = self.ready
        if key not in ready:
            self._make(key)
        value = ready[key]
        if not self.keep:
            left = self.left[key] = self.left[key] - 1
            if left == 0:
                del ready[key]
        return value

    def _make(self, key: Key) -> None:
        """Build a value, and before it all that it rests on."""
        ready, sources = self.ready, self.plan.sources
        stack = [key]
        while stack:  # a loop, since chains may be longer than Python's stack
            current = stack[-1]
            if current in ready:  # also where another branch wanted it, and what it rests on is gone again
                stack.pop()
                continue
            source = sources[current]
            missing = [operand for operand in source.operands if operand not in ready]
            if missing:
                stack += missing
            else:
                ready[current] = self._build(source)
                stack.pop()

    def peek(self, key: Key) -> Any:
        """The value of a tensor, out of turn, or None if it is lost; only where values are kept to the end."""
        assert self.keep
        with self._lenient():
            return self.take(key) if key in self.ready or key in self.plan.sources else None
        return None

    def _lenient(self) -> AbstractContextManager[object]:
        """A ledger asks for more than the rules do: what is lost of that (a model may keep tensors of a freed graph) is not counted."""
        return suppress(FreedGraphError) if self.keep else nullcontext()

    def _fetch(self, source: Source) -> Any:
        if isinstance(source, Kept):
            return getattr(self.saved(source.holder), source.attribute)
        if isinstance(source, Leaf):
            return leaf_value(self.graph.handles[source.node])
        if isinstance(source, Given):
            return self.outputs[source.number].detach()
        if isinstance(source, Recorded):
            call = self.graph.calls[source.node]
            return call.value if source.position == OUTPUT else call.constant(source.position)
        return None if isinstance(source, Absent) else self._build(source)

    def _build(self, source: Source) -> Any:
        operands = [self.take(operand) for operand in source.operands]
        if isinstance(source, Rest):
            return self._rest(source, *operands)
        if not isinstance(source, (Replay, Undo)):
            return self._fetch(source)
        op = self.graph.op(source.node)
        if op.reshapes:
            return operands[0].reshape(self._shape(source))
        if isinstance(source, Replay):
            return self._replay(source, op, operands)
        if op.join is not None:
            return op.join(self.saved(source.node), operands)
        ref = self.graph.operand(source.node, 0)
        return op.undo(self.saved(source.node), operands[0], output_shape(self.graph.handles[ref[0]], ref[1]))

    def _replay(self, source: Replay, op: Op, operands: list[Any]) -> Any:
        if source.recorded:
            made = self.graph.calls[source.node].replay(operands)
        else:
            assert op.forward is not None
            made = op.forward(self.saved(source.node), *operands)
        return made if isinstance(made, Tensor) else made[source.output]

    def _rest(self, source: Rest, total: Tensor, other: Any) -> Tensor:
        node, position = source.node, source.position
        if isinstance(other, Tensor) and other.dtype is torch.bool:  # torch adds masks, but subtracts none
            other = other.to(total.dtype)
        factors = self.graph.op(node).weights(self.saved(node))
        value = total - (other if factors[1 - position] == 1 else factors[1 - position] * other)
        if factors[position] != 1:
            value = value / factors[position]
        ref = self.graph.operand(node, position)
        return unbroadcast(value, output_shape(self.graph.handles[ref[0]], ref[1]))

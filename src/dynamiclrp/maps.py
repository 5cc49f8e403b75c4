"""What counts as part of a linear map: the batch norm behind it, or a sum that adds its bias.

In: a `Graph`. Out: a `Part` for each such map, found before rules are chosen, whatever moves of the very values lie between; and, for
shapes that a graph happens to have, the parts that do not fit. It knows nothing of rules or presets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .graph import Graph, Ref
from .ops import Kind
from .saved import Saved, output_shape, output_sizes


@dataclass(frozen=True)
class Part:
    """What another node does to a linear map's output, as part of the map: z = scale · (x·W + own bias) + shift."""

    top: int  # that node, whose output is the whole map's
    position: int  # of what it adds
    norm: bool  # a batch norm; otherwise a sum
    moves: tuple[int, ...] = ()  # between, from the map up

    @property
    def inside(self) -> tuple[int, ...]:
        """Nodes behind the map that carry what arrives at the top, as it is. A sum has a backward of its own that does so."""
        return (*self.moves, self.top) if self.norm else ()

    def back(self, graph: Graph, value: Tensor) -> Tensor:
        """A value of the top's shape, moved to where the map's own output has it: by the moves' own backward."""
        for node in reversed(self.moves):
            value = graph.handles[node](value)
        return value

    def onward(self, graph: Graph, value: Tensor, node: int) -> Tensor:
        """A value of the map's shape, moved to where one of the moves has it."""
        for move in self.moves[: self.moves.index(node) + 1] if node in self.moves else ():
            forward = graph.op(move).forward
            value = forward(Saved(graph.handles[move]), value)
        return value


def parts(graph: Graph, apart: frozenset[int] = frozenset()) -> dict[int, Part]:
    """By linear map. Maps that are `apart` have none."""
    found: dict[int, Part] = {}
    for top in range(len(graph)):
        added = _added(graph, top) if graph.runs[top] else None
        if added is None:
            continue
        operand, position, norm = added
        ref, moves = graph.operand(top, operand), []
        while _is_private(graph, ref) and graph.known(ref[0]) is not None and graph.op(ref[0]).hands_on:
            moves.append(ref[0])
            ref = graph.operand(ref[0], 0)
        if _takes(graph, ref, norm) and ref[0] not in apart:
            found.setdefault(ref[0], Part(top, position, norm, tuple(reversed(moves))))
    return found


def _added(graph: Graph, node: int) -> tuple[int, int, bool] | None:
    """Of a batch norm in eval mode, or a sum of something live and parameters: (the operand, what is added to it, a norm?)."""
    op = graph.known(node)
    if op is None:
        return None
    if op.kind is Kind.BATCHNORM:
        return None if graph.attributes_of(node)[0] or not graph.is_live(graph.edges[node][0]) else (0, 2, True)
    if op.kind is not Kind.SUM or op.weights is None or len(graph.edges[node]) != 2:
        return None
    live = [position for position, ref in enumerate(graph.edges[node]) if graph.is_live(ref)]
    if len(live) != 1 or not _is_of_parameters(graph, graph.edges[node][1 - live[0]]):
        return None
    return live[0], 1 - live[0], False


def _takes(graph: Graph, ref: Ref, norm: bool) -> bool:
    """Is it the output of a linear map that can have such a part?"""
    op = graph.known(ref[0])
    if op is None or op.linear is None or not _is_private(graph, ref):
        return False
    live = [i for i in op.linear.factors if graph.is_live(graph.edges[ref[0]][i])]
    if len(live) != 1:
        return False
    if not norm:
        return op.linear.bias is None
    transposed = op.kind is Kind.CONV and graph.attributes_of(ref[0])[1]  # which keeps its channels elsewhere
    return op.linear.channels is not None and live == [op.linear.factors[0]] and not transposed


def _is_private(graph: Graph, ref: Ref) -> bool:
    """Is the tensor used once, and does relevance go on through it?"""
    return len(graph.consumers[ref]) == 1 and ref not in graph.ends and ref not in graph.outputs


_POINTWISE = frozenset({Kind.LEAF, Kind.MOVEMENT, Kind.SCALE, Kind.PRODUCT, Kind.SUM})


def _is_of_parameters(graph: Graph, ref: Ref | None) -> bool:
    """Leaves, parts or views of leaves (attention layers split one bias), and what is worked out from them place by place."""
    stack = [] if ref is None else [ref[0]]
    while stack:
        node = stack.pop()
        op = graph.known(node)
        if op is None or op.kind not in _POINTWISE:
            return False
        stack += [operand[0] for operand in graph.edges[node] if operand is not None]
    return ref is not None


def misfits(graph: Graph, found: Mapping[int, Part]) -> frozenset[int]:
    """Maps whose part is none in these shapes: the map's output is broadcast or cut there, or the norm's channels are not the map's."""
    return frozenset(node for node, part in found.items() if not _fits(graph, node, part))


def _fits(graph: Graph, node: int, part: Part) -> bool:
    op, sizes = graph.op(node), output_sizes(graph.handles[node], 0)
    if part.norm and not part.moves and (op.kind is Kind.CONV or len(sizes) == 2):
        return True
    if prod(sizes) != prod(output_sizes(graph.handles[part.top], 0)):
        return False
    if not part.norm:
        return True
    shape = output_shape(graph.handles[part.top], 0)
    channels = torch.arange(shape[1]).view(-1, *[1] * (len(shape) - 2)).expand(shape)
    for move in reversed(part.moves):
        if graph.op(move).hands_on == "moved":
            channels = graph.handles[move](channels)
    spread = (-1,) if op.linear.spread is None else op.linear.spread(Saved(graph.handles[node]))
    own = torch.arange(shape[1]).reshape(spread)
    fits = len(own.shape) <= len(sizes) and all(a in (1, b) for a, b in zip(own.shape[::-1], list(sizes)[::-1]))
    return fits and torch.equal(channels.reshape(tuple(sizes)), own.expand(tuple(sizes)))

"""Shorter ways for relevance: what the own backward of several nodes would do, done at once.

In: what `sites` found in a graph, once per plan. Out: `Shortcut`s, each of which gives hooks that take what arrives at the first of
its nodes, whose own backward then finds nothing to do, and put it back behind the last. They hand down what the nodes' own
backward and rules would: none is needed, and `run` leaves them out where it cannot serve them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .fused import fused
from .graph import Graph, Ref
from .rules.base import Hook
from .saved import Saved, output_sizes

BEFORE, AFTER = False, True
Placed = tuple[int, bool, Hook]  # a hook with its node; does it come after the node's own backward?

_STOP = (None,)


class Shortcut:
    """Some nodes, and another way past them."""

    covers: frozenset[int] = frozenset()  # nodes whose rules it does as well
    reads: tuple[int, ...] = ()  # nodes of whose saved tensors it reads some

    def hooks(self, graph: Graph, saved: Callable[[int], Saved], handles: list[Any]) -> Iterator[Placed]:
        """Hooks for one pass; none, where shapes or numbers forbid it.

        `saved` gives what a node saved; `handles` takes those of hooks that are added on the way.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Selections(Shortcut):
    """All that uses a tensor are selections from it, as in a loop over tokens. The own backward of each fills a tensor of its
    whole size, and adds it to the others'; here the parts are put beside each other, once."""

    tensor: Ref
    members: tuple[int, ...]

    def hooks(self, graph: Graph, saved: Callable[[int], Saved], handles: list[Any]) -> Iterator[Placed]:
        held: list[tuple[int, Tensor]] = []
        waiting = Streams()

        def arrives(member: int) -> Hook:
            def before(grads: tuple[Tensor | None, ...]) -> Any:
                part = grads[0]
                if part is None:
                    return None
                held.append((member, part))
                waiting.note(part)
                if len(held) > 1:
                    return _STOP
                # the first one goes through, so that something arrives below: nothing but a place
                handles.append(graph.handles[member].register_hook(_place))
                return None

            return before

        node, number = self.tensor

        def join(grads: tuple[Tensor | None, ...]) -> Any:
            place = grads[number]
            if place is None or not held:
                return None
            waiting.wait([part for _, part in held])
            parts = [(saved(member), part) for member, part in held]
            held.clear()
            return (*grads[:number], _joined(place, parts), *grads[number + 1 :])

        yield node, BEFORE, join
        for member in self.members:
            yield member, BEFORE, arrives(member)


def _place(grads: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> Any:
    """Zeros that take no memory."""
    (native,) = grads
    return None if native is None else (native.new_zeros(()).expand(native.shape),)


def _joined(place: Tensor, parts: Sequence[tuple[Saved, Tensor]]) -> Tensor:
    """The tensor of which these are parts; zeros, where there is none."""
    shape, rank = place.shape, place.dim()
    dim = parts[0][0].dim % rank
    slots: list[Tensor | None] = [None] * shape[dim]
    for saved, part in parts:
        if saved.dim % rank != dim:  # then one by one
            made = torch.zeros(shape, dtype=place.dtype, device=place.device)
            for saved, part in parts:
                made.select(saved.dim, saved.index).add_(part)
            return made
        index = saved.index
        there = slots[index]
        slots[index] = part if there is None else there + part
    full = [part for part in slots if part is not None]
    if len(full) < len(slots):
        nothing = torch.zeros_like(full[0])
        full = [nothing if part is None else part for part in slots]
    return torch.stack(full, dim)


@dataclass(frozen=True)
class Scaling(Shortcut):
    """A normalisation that is written out, beside a residual connection: what arrives at its last node is multiplied by scale and
    statistic, and added to what comes along the residual, in one kernel. Its own backward would also work out what the statistic
    takes, which the rule then throws away."""

    top: int
    factors: tuple[tuple[int, str, bool], ...]  # node, attribute, and does it divide; in the order of the backward pass
    tensor: Ref  # what was normalised
    covers: frozenset[int]

    @property
    def reads(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(node for node, _, _ in self.factors)

    def hooks(self, graph: Graph, saved: Callable[[int], Saved], handles: list[Any]) -> Iterator[Placed]:
        factors = [(getattr(saved(node), name), divides) for node, name, divides in self.factors]
        held: list[Tensor] = []
        waiting = Streams()

        def take(grads: tuple[Tensor | None, ...]) -> Any:
            s = grads[0]
            if s is None:
                return None
            held.append(s)
            waiting.note(s)
            return _STOP

        node, number = self.tensor

        def give(grads: tuple[Tensor | None, ...]) -> Any:
            if not held:
                return None
            s, beside = held.pop(), grads[number]
            assert beside is not None, f"nothing came along the residual connection at {graph.where(node)}"
            waiting.wait([s])
            return (*grads[:number], _scaled(beside, s, factors), *grads[number + 1 :])

        yield node, BEFORE, give
        yield self.top, BEFORE, take


def _scaled(beside: Tensor, s: Tensor, factors: Sequence[tuple[Tensor, bool]]) -> Tensor:
    """`beside + s · factors`."""
    if len(factors) == 2 and not any(divides for _, divides in factors) and s.shape == beside.shape:
        (weight, _), (statistic, _) = factors
        made = fused("add_scaled", beside, s, weight, statistic)
        if made is None and beside.dtype is torch.bfloat16 and statistic.dtype is torch.float32:
            # a kernel takes tensors of one type: the lower and the upper half of its bits
            halves = statistic.contiguous().unsqueeze(-1).view(beside.dtype)
            made = fused("add_scaled_wide", beside, s, weight, halves[..., 0], halves[..., 1])
        if made is not None:
            return made
    for factor, divides in factors:
        s = s / factor if divides else s * factor
    return beside + (s if s.dtype == beside.dtype and s.device == beside.device else s.to(beside))


@dataclass(frozen=True)
class Rotation(Shortcut):
    """A rotary embedding that is written out, `x·cos + turned(x)·sin`, where `turned` puts parts of x, some with the other sign,
    beside each other. What goes back through the second product is added to what goes back through the first, in place."""

    total: int
    plain: tuple[int, int]  # the first product, and the operand that is x
    turned: tuple[int, str]  # the second product, and the attribute that holds its constant
    tensor: Ref  # x
    joined: int
    parts: tuple[tuple[int, bool], ...]  # slices of x, in their new order; is it negated?

    @property
    def reads(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.turned[0],)

    def hooks(self, graph: Graph, saved: Callable[[int], Saved], handles: list[Any]) -> Iterator[Placed]:
        found = self._moves(graph, saved)
        if not found:
            return
        (dim, moves), (node, position) = found, self.plain
        turned, name = self.turned
        constant = getattr(saved(turned), name)
        wide = constant.dim() >= -dim and constant.shape[dim] != 1

        def add(grads: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> None:
            s, made = incoming[0], grads[position]
            if s is None or made is None:
                return
            for there, here, length, sign in moves:
                factor = constant.narrow(dim, here, length) if wide else constant
                made.narrow(dim, there, length).addcmul_(s.narrow(dim, here, length), factor, value=sign)

        yield turned, BEFORE, _stop
        yield node, AFTER, add

    def _moves(self, graph: Graph, saved: Callable[[int], Saved]) -> tuple[int, list[tuple[int, int, int, int]]] | None:
        """The dimension (from the end), and for each part: where it was, where it is now, how long it is, its sign."""
        shape = output_sizes(graph.handles[self.tensor[0]], self.tensor[1])
        rank = len(shape)
        if graph.op(self.total).weights(saved(self.total)) != (1, 1):
            return None
        if list(shape) != list(output_sizes(graph.handles[self.total], 0)):
            return None
        dim = saved(self.joined).dim % rank
        size, now, moves = shape[dim], 0, []
        for node, negated in self.parts:
            part = saved(node)
            start, end = _within(part.start, size, 0), _within(part.end, size, size)
            if part.dim % rank != dim or part.step != 1 or end <= start:
                return None
            moves.append((start, now, end - start, -1 if negated else 1))
            now += end - start
        return (dim - rank, moves) if now == size else None


def _stop(grads: tuple[Tensor | None, ...]) -> Any:
    return _STOP


def _within(index: int | None, size: int, default: int) -> int:
    """A slice's start or end as a place in the dimension."""
    return default if index is None else min(max(index + size if index < 0 else index, 0), size)


class Streams:
    """Autograd hands tensors from one CUDA stream to another safely; what is carried past it must be waited for."""

    def __init__(self) -> None:
        self.seen: dict[int, torch.device] = {}

    def note(self, tensor: Tensor) -> None:
        if tensor.is_cuda:
            self.seen[torch._C._cuda_getCurrentRawStream(tensor.get_device())] = tensor.device

    def wait(self, tensors: Sequence[Tensor]) -> None:
        """Let the stream of the node that they are handed to wait for them."""
        here = torch.cuda.current_stream(tensors[0].device) if self.seen else None
        for stream, device in self.seen.items():
            if here is not None and stream != here.cuda_stream:
                here.wait_stream(torch.cuda.ExternalStream(stream, device))
                for tensor in tensors:
                    tensor.record_stream(here)
        self.seen.clear()

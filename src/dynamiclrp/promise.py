"""The Promise System: where the value of a tensor that autograd did not keep comes from.

In: a `Graph`. Out: for every value that a rule needs a `Source`, or the news that it is lost, and the paper's `Promise`
objects for people to read. All of it is decided before relevance moves, so a branch may reach ahead of the relevance
frontier at any time: what the paper calls Pre-Promises is the normal case, and the residual diamond cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .graph import Graph, Ref
from .ops import OPS, Kind, Op

# A value: a tensor of the graph, ("value", node, output), or a constant operand, ("constant", node, position).
Key = tuple[str, int, int]


@dataclass(frozen=True)
class Kept:
    """Some node saved it."""

    holder: int
    attribute: str

    operands: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Leaf:
    """A leaf tensor: input or parameter."""

    node: int
    operands: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Given:
    """One of the tensors that the caller holds: an output of the graph."""

    number: int
    operands: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Absent:
    """An optional operand that was left out, such as a bias."""

    operands: tuple[Key, ...] = ()


OUTPUT = -1


@dataclass(frozen=True)
class Recorded:
    """A constant that the forward pass recorded, or the output of a write through a view."""

    node: int
    position: int  # of the operand, or OUTPUT
    operands: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Rest:
    """A sum minus its other operand."""

    node: int  # the sum
    position: int  # which operand is wanted
    operands: tuple[Key, ...]  # (the sum, the other operand)


@dataclass(frozen=True)
class Undo:
    """A view's output (or all parts of a split), moved back; a root's, raised to its power."""

    node: int  # the view or root
    operands: tuple[Key, ...]  # its outputs


@dataclass(frozen=True)
class Replay:
    """The forward function of the node that made it, on its operands."""

    node: int
    output: int
    operands: tuple[Key, ...]
    recorded: bool = False  # by the recorded call instead of the op's row


Source = Kept | Leaf | Given | Absent | Recorded | Rest | Undo | Replay


@dataclass(frozen=True)
class Branch:
    """One missing value of an origin: the forward chain down to the Arg node, whose output can be had."""

    key: Key
    chain: tuple[str, ...]  # operations to replay, from the origin down
    arg: str
    how: str
    depth: int  # steps from the origin to the (farthest) Arg node
    children: tuple[Promise, ...] = ()  # a chain that ends at another origin's operation


@dataclass(frozen=True)
class Promise:
    """Made at an origin node for the values that its rule needs and autograd did not keep there."""

    origin: int
    op: str
    branches: tuple[Branch, ...]

    @property
    def depth(self) -> int:
        return max(branch.depth for branch in self.branches)

    def lines(self, indent: int = 0) -> Iterator[str]:
        """The promise as a tree, one line a branch."""
        pad = "  " * indent
        yield f"{pad}{self.op} (node {self.origin})"
        for branch in self.branches:
            path = " ← ".join((*branch.chain, f"{branch.arg} [{branch.how}]" if branch.arg else branch.how))
            yield f"{pad}  {_label(branch.key)} ← {path}"
            for child in branch.children:
                yield from child.lines(indent + 2)

    def __str__(self) -> str:
        return "\n".join(self.lines())


def value_key(ref: Ref) -> Key:
    return ("value", *ref)


def operand_key(graph: Graph, node: int, position: int) -> Key:
    """The value of an operand: a tensor of the graph, or a constant of this node."""
    edges = graph.edges[node]
    ref = edges[position] if position < len(edges) else None
    return value_key(ref) if ref is not None else ("constant", node, position)


class Sources:
    """Finds a source for every tensor of one graph, once.

    Order: saved as its own result by its producer → saved as an operand by any consumer → a leaf → a view of one of
    these → a view or root of it, undone → one pass over memory from its operands → a sum minus its other operand → replay
    from operands. `coarse`: numbers are so short that a difference loses what a replay does not; then it comes last.
    """

    def __init__(self, graph: Graph, coarse: bool = False) -> None:
        self.graph = graph
        self.ops: list[Op | None] = [OPS.get(kind.__name__) for kind in graph.types]
        self.table: dict[Key, Source] = {}
        self.numbers: dict[int, list[int]] = {}  # which outputs of a node are used
        for maker, number in graph.consumers:
            self.numbers.setdefault(maker, []).append(number)
        self._constants()
        self._direct()
        # each entry rests on earlier ones, so no value can rest on itself
        self._replay_all(_is_view)
        self._undo_all(sums=False)
        self._replay_all(None if coarse else _is_cheap)
        self._undo_all()
        self._replay_all()

    def get(self, key: Key) -> Source | None:
        """None: the value is lost."""
        return self.table.get(key)

    def short(self, key: Key) -> Source:
        """Where to have a value that is not lost: of several reshapes in a row, the last."""
        source = self.table[key]
        if self._reshapes(source):
            below = self.table[source.operands[0]]
            while self._reshapes(below):
                source = replace(source, operands=below.operands)
                below = self.table[below.operands[0]]
        return source

    def _reshapes(self, source: Source) -> bool:
        op = self.ops[source.node] if isinstance(source, (Undo, Replay)) else None
        return op is not None and op.reshapes

    def _constants(self) -> None:
        for node, edges in enumerate(self.graph.edges):
            op = self.ops[node]
            if op is None:
                continue
            absent = op.absent(self.graph.attributes_of(node))
            for position in range(max(len(edges), op.linear.bias + 1 if op.linear and op.linear.bias else 0)):
                if position < len(edges) and edges[position] is not None:
                    continue
                key: Key = ("constant", node, position)
                attribute = op.keeps(position, edges)
                if position in absent:
                    self.table[key] = Absent()
                elif attribute is not None:
                    self.table[key] = Kept(node, attribute)
                elif node in self.graph.calls and position in self.graph.calls[node].constants:
                    self.table[key] = Recorded(node, position)

    def _direct(self) -> None:
        graph = self.graph
        for number, ref in enumerate(graph.outputs):
            self.table[value_key(ref)] = Given(number)
        for node, op in enumerate(self.ops):
            if op is None:
                continue
            if node in graph.calls and graph.calls[node].value is not None:
                self.table[value_key((node, 0))] = Recorded(node, OUTPUT)
            elif op.kind is Kind.LEAF:
                self.table[value_key((node, 0))] = Leaf(node)
            elif op.result is not None:
                self.table[value_key((node, 0))] = Kept(node, op.result)
        for ref, consumers in graph.consumers.items():
            key = value_key(ref)
            for node, position in consumers:
                op = self.ops[node]
                attribute = op.keeps(position, graph.edges[node]) if op else None
                if attribute is not None:
                    self.table.setdefault(key, Kept(node, attribute))
                    break

    def _replay_all(self, only: Callable[[Op, int], bool] | None = None) -> None:
        for node in range(len(self.graph)):
            self._replay(node, only)

    def _undo_all(self, sums: bool = True) -> None:
        for node in reversed(range(len(self.graph))):
            self._undo(node, sums)

    def _replay(self, node: int, only: Callable[[Op, int], bool] | None) -> None:
        op, edges = self.ops[node], self.graph.edges[node]
        if op is None or op.kind is Kind.LEAF or (only is not None and not only(op, len(edges))):
            return
        operands = tuple(operand_key(self.graph, node, position) for position in range(len(edges)))
        recorded = node in self.graph.calls and self.graph.calls[node].value is None
        if (op.forward is None and not recorded) or not all(operand in self.table for operand in operands):
            return
        for number in self.numbers.get(node, (0,)):
            self.table.setdefault(
                value_key((node, number)), Replay(node, number, operands, recorded=op.forward is None)
            )

    def _undo(self, node: int, sums: bool) -> None:
        """Operands that follow from this node's output."""
        op, edges = self.ops[node], self.graph.edges[node]
        total = value_key((node, 0))
        if op is not None and op.join is not None and edges[0] is not None:
            parts = tuple(value_key((node, number)) for number in range(self.graph.widths[node]))
            if all(part in self.table for part in parts):
                self.table.setdefault(value_key(edges[0]), Undo(node, parts))
            return
        if op is None or total not in self.table:
            return
        if op.undo is not None and edges[0] is not None:
            self.table.setdefault(value_key(edges[0]), Undo(node, (total,)))
        elif sums and op.weights is not None and len(edges) == 2 and edges[0] != edges[1]:
            for position in (0, 1):
                wanted, other = (operand_key(self.graph, node, i) for i in (position, 1 - position))
                if wanted[0] == "value" and wanted not in self.table and other in self.table:
                    self.table[wanted] = Rest(node, position, (total, other))


def _is_view(op: Op, operands: int) -> bool:
    return op.kind is Kind.MOVEMENT and operands == 1


def _is_cheap(op: Op, operands: int) -> bool:
    return op.kind in (Kind.NORMALISE, Kind.ACTIVATION, Kind.FUNCTION)


def describe(graph: Graph, sources: Sources, origins: dict[int, tuple[Key, ...]]) -> tuple[Promise, ...]:
    """The promises of all origins, as the paper draws them; what several of them share is drawn once."""
    steps = _distances(sources, {key for keys in origins.values() for key in keys})
    drawn: set[Key] = set()
    return tuple(
        Promise(node, graph.name(node), tuple(_branch(graph, sources, key, node, steps, drawn) for key in keys))
        for node, keys in origins.items()
    )


def _distances(sources: Sources, keys: set[Key]) -> dict[Key, int]:
    """For every value: steps from a node that wants it to the farthest Arg node."""
    steps: dict[Key, int] = {}
    stack = list(keys)
    while stack:
        source = sources.get(stack[-1])
        below = [key for key in source.operands if key[0] == "value"] if isinstance(source, Replay) else []
        missing = [key for key in below if key not in steps]
        if missing:
            stack += missing
            continue
        steps[stack.pop()] = 1 + max((steps[key] for key in below), default=0)
    return steps


def _branch(
    graph: Graph, sources: Sources, key: Key, origin: int, steps: dict[Key, int], drawn: set[Key], level: int = 0
) -> Branch:
    chain: list[str] = []
    start, depth = key, max(1, steps[key] - (key[:2] == ("value", origin)))  # its own output is no step of its own
    while True:
        source = sources.get(key)
        assert source is not None
        if not isinstance(source, Replay):
            return Branch(start, tuple(chain), graph.name(key[1]), _how(graph, source), depth)
        name = graph.name(source.node)
        tensors = [operand for operand in source.operands if operand[0] == "value"]
        if key in drawn or level == 64:
            return Branch(start, tuple(chain), name, "shared", depth)
        drawn.add(key)
        if len(tensors) == 1:
            chain.append(name)
            key = tensors[0]
            continue
        branches = tuple(_branch(graph, sources, t, source.node, steps, drawn, level + 1) for t in tensors)
        return Branch(start, tuple(chain), name, "replayed", depth, (Promise(source.node, name, branches),))


def _how(graph: Graph, source: Source) -> str:
    match source:
        case Kept(holder, attribute):
            return f"saved as {attribute!r} by {graph.name(holder)} {holder}"
        case Leaf():
            return "leaf"
        case Given():
            return "output"
        case Recorded():
            return "recorded"
        case Absent():
            return "absent"
        case Rest(node):
            return f"{graph.name(node)} {node} minus its other operand"
        case Undo(node):
            return f"{graph.name(node)} {node} undone"
        case Replay():
            return "replayed"


def _label(key: Key) -> str:
    kind, node, number = key
    return (
        f"constant operand {number}"
        if kind == "constant"
        else f"output of node {node}" + (f".{number}" if number else "")
    )

"""What several nodes together mean: composites, gates, attention weights, first layers.

In: a `Graph`. Out: facts about its nodes, decided on the graph with no model knowledge. It knows nothing of presets.
"""

from __future__ import annotations

from collections.abc import Iterator

from .graph import Graph, Ref
from .ops import OPS, Kind

# Views and copies that leave every value at its place (or spread it over new dimensions). Slices and transposes do not:
# the halves of a packed projection are two tensors, not one.
_IN_PLACE = frozenset({
    "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Expand", "Clone", "Alias", "Contiguous", "ToCopy",
})  # fmt: skip
# Along these a value stays a linear function of one tensor, or becomes any function of it.
_LINEAR_NAMES = frozenset({"Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Mean", "Sum"}) | _IN_PLACE
_POINTWISE = frozenset({Kind.ACTIVATION, Kind.FUNCTION, Kind.SCALE, Kind.PRODUCT, Kind.SUM, Kind.STATISTIC})
_REDUCTIONS = frozenset({"Mean", "Sum", "Var", "Std", "VarMean", "StdMean", "LinalgVectorNorm", "Norm"})
_MEANS = frozenset({"VarMean", "StdMean"})  # whose second output is the mean
_GATES = frozenset({
    "Sigmoid", "Hardsigmoid", "HardSigmoidAutoFn", "Softmax", "SafeSoftmax", "MaskedSoftmax", "XSoftmax",
})  # fmt: skip
_LIMIT = 64  # nodes looked at for one composite; the longest in use has about a dozen


def live_operands(graph: Graph, node: int) -> tuple[int, ...]:
    """Positions of the operands whose relevance reaches an input."""
    return tuple(position for position, ref in enumerate(graph.edges[node]) if graph.is_live(ref))


def composite(graph: Graph, node: int) -> tuple[int, Kind] | None:
    """Is this product one function of one tensor, `l(t) * h(t)` or `l(t) / h(t)` with l linear?

    Returns the position of the linear operand (the signal), and whether h is elementwise (an activation, such as a
    hand-written GELU) or a statistic (a normalisation, such as RMSNorm). A softmax written as exp(t) / sum(exp(t)) is one too.
    """
    positions = live_operands(graph, node)
    if len(positions) != 2:
        return None
    orders = [positions, positions[::-1]] if graph.name(node) == "Mul" else [positions]
    for signal, other in orders:
        a, b = graph.operand(node, signal), graph.operand(node, other)
        for source in _linear_sources(graph, a):
            inside = _function_of(graph, b, source)
            if inside is None or _function_of(graph, a, source, linear=True) is None:
                continue
            if not inside & _REDUCTIONS:
                return signal, Kind.ACTIVATION
            if inside <= _LINEAR_NAMES:  # a plain sum is no statistic of spread
                return (signal, Kind.SOFTMAX) if graph.name(_maker(graph, source)) == "Exp" else None
            return signal, Kind.NORMALISE
    return None


def _linear_sources(graph: Graph, ref: Ref) -> Iterator[Ref]:
    """The tensor itself, then those below it along linear operations, nearest first."""
    queue, seen = [ref], {ref}
    while queue and len(seen) <= _LIMIT:
        current = queue.pop(0)
        yield current
        if _is_linear(graph, current):
            for operand in graph.edges[current[0]]:
                if operand is not None and graph.is_live(operand) and operand not in seen:
                    seen.add(operand)
                    queue.append(operand)


def _is_linear(graph: Graph, ref: Ref) -> bool:
    """Is the tensor a linear function of the live operands of its node?"""
    name = graph.name(ref[0])
    if name in ("Mul", "Div"):
        return len(live_operands(graph, ref[0])) == 1
    return name in _LINEAR_NAMES or (name in _MEANS and ref[1] == 1)


def _function_of(graph: Graph, ref: Ref, source: Ref, linear: bool = False) -> set[str] | None:
    """The names of the operations between, if `ref` is a (linear) function of `source` and of no other live tensor."""
    names: set[str] = set()
    stack, seen = [ref], {ref}
    while stack:
        current = stack.pop()
        if current == source:
            continue
        node = current[0]
        live = live_operands(graph, node)
        name = graph.name(node)
        allowed = _is_linear(graph, current) if linear else name in _IN_PLACE or _kind(graph, node) in _POINTWISE
        if not live or not allowed or len(seen) > _LIMIT:
            return None
        names.add(name)
        for position in live:
            operand = graph.operand(node, position)
            if operand not in seen:
                seen.add(operand)
                stack.append(operand)
    return names


def signal(graph: Graph, node: int) -> int | None:
    """Which operand of a product is the signal, if the other is a gate or attention weights?"""
    positions = live_operands(graph, node)
    if len(positions) != 2:
        return None
    makers = [_maker(graph, graph.edges[node][position]) for position in positions]
    bounded = [graph.name(maker) in _GATES for maker in makers]
    active = [_kind(graph, maker) in (Kind.ACTIVATION, Kind.FUNCTION) for maker in makers]
    for gates in (bounded, active):
        if gates[0] != gates[1]:
            return positions[1] if gates[0] else positions[0]
    return None


def gate_is_softmax(graph: Graph, node: int, signal: int | None) -> bool:
    """Is the factor beside the signal made by a softmax: attention weights?"""
    others = [position for position in live_operands(graph, node) if position != signal]
    return any("Softmax" in graph.name(_maker(graph, graph.edges[node][position])) for position in others)


def _maker(graph: Graph, ref: Ref | None) -> int:
    """The node that computed a tensor's values, seen through movement and scaling; a quotient is its dividend, scaled."""
    assert ref is not None
    node = ref[0]
    while True:
        live = live_operands(graph, node)
        quotient = graph.name(node) == "Div" and 0 in live
        through = _kind(graph, node) in (Kind.MOVEMENT, Kind.SCALE) or graph.name(node) == "Mul"
        if not quotient and (not through or len(live) != 1):
            return node
        ref = graph.edges[node][live[0]]
        assert ref is not None
        node = ref[0]


def weighs_values(graph: Graph, node: int) -> bool:
    """Does this softmax's result, moved or scaled, end up only in matrix products with something live: attention?"""
    stack, seen = [node], {node}
    products = False
    while stack:
        for user, _ in graph.consumers.get((stack.pop(), 0), ()):
            op = OPS.get(graph.types[user].__name__)
            if not graph.runs[user] or user in seen:
                continue
            seen.add(user)
            live = len(live_operands(graph, user))
            if op is not None and op.linear is not None and live > 1:
                products = True
            elif op is not None and op.kind in (Kind.MOVEMENT, Kind.SCALE, Kind.PRODUCT) and live == 1:
                stack.append(user)
            else:
                return False
    return products


def first_layers(graph: Graph) -> frozenset[int]:
    """Linear maps with no other linear map between them and an input."""
    above: list[bool] = []  # does a linear map lie at or below this node, towards an input?
    first = []
    for node, edges in enumerate(graph.edges):
        below = any(ref is not None and graph.is_live(ref) and ref not in graph.ends and above[ref[0]] for ref in edges)
        linear = graph.runs[node] and _kind(graph, node) in (Kind.LINEAR, Kind.CONV)
        if linear and not below and len(live_operands(graph, node)) == 1:
            first.append(node)
        above.append(below or linear)
    return frozenset(first)


def nonnegative(graph: Graph) -> frozenset[Ref]:
    """Tensors that cannot be negative, as behind a rectifier and its pools and views."""
    found: set[Ref] = set()
    for node, edges in enumerate(graph.edges):
        name, kind = graph.name(node), _kind(graph, node)
        moved = (kind is Kind.POOL or name in _SIGN_PRESERVING) and all(ref in found for ref in edges)
        even = name == "Pow" and graph.attributes_of(node)[:1] in ((2,), (4,))
        op = OPS.get(graph.types[node].__name__)
        shuts = op is not None and op.shuts(graph.attributes_of(node))
        if name in _NONNEGATIVE or moved or even or shuts:
            found.add((node, 0))
    return frozenset(found)


_NONNEGATIVE = frozenset({"Sigmoid", "Hardsigmoid", "Softmax", "Exp", "Abs", "Softplus", "Sqrt"})
_SIGN_PRESERVING = frozenset({
    "View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Expand", "Squeeze", "Unsqueeze", "Clone", "Alias",
    "Slice", "Select", "MaxPool2DWithIndices", "MaxPool3DWithIndices", "Cat", "Mean", "Sum", "ToCopy",
})  # fmt: skip


def _kind(graph: Graph, node: int) -> Kind | None:
    op = OPS.get(graph.types[node].__name__)
    return op.kind if op else None

"""autograd → `Graph`. With `saved` the only file that reads torch's private attributes.

In: output and input tensors (or gradient edges). Out: a `Graph`.
It knows nothing of rules.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .errors import NoGraphError, OpaqueGraphError, UnsupportedTensorError, UnusedInputError
from .graph import Graph, Ref, Structure
from .ops import Op
from .saved import Saved, output_shape

_SCRIPTED = (
    "explain the plain module or function instead of the scripted one; where a library scripts it, set the environment "
    "variable PYTORCH_JIT=0 before Python starts"
)
# Nodes behind which the operations cannot be seen, and what to do about each.
OPAQUE = {
    "CompiledFunctionBackward": "wrap the call in torch.compiler.set_stance('force_eager'), or explain model._orig_mod",
    "CheckpointFunctionBackward": "call torch.utils.checkpoint with use_reentrant=False",
    "DifferentiableGraphBackward": _SCRIPTED,
    "_ReversibleFunctionBackward": "reversible layers (Reformer) recompute themselves; run the plain layers in sequence",
    "WarnNotImplemented": (
        "torch has no derivative of what is inside. Of a quantised model explain the float model that it was made from; for "
        "an operator of your own, give it a derivative (torch.library.register_autograd)"
    ),
    "CppFunction": f"if it is scripted (torch.jit): {_SCRIPTED}",
}


def capture(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor | GradientEdge],
    rows: Mapping[str, Op],
) -> Graph:
    """Walk from the outputs down to the inputs' graph, iteratively, in one canonical order.

    The `rows` say of which node types saved values, or the number of outputs, decide a plan.
    """
    roots = [_root(output, number) for number, output in enumerate(outputs)]
    places: dict[Any, int] = {}  # holding the wrappers keeps their identity stable during the walk
    for root, _ in roots:
        places.setdefault(root, len(places))
    found, shape, width = list(places), list[int](), len(places)
    count, places[None] = width, _CONSTANT
    place_of, find, note = places.setdefault, found.append, shape.append
    for node in found:  # which grows on the way
        for operand, number in node.next_functions:
            place = place_of(operand, count)
            if place == count:
                find(operand)
                count += 1
            note(place + (number << 32) if number else place)
        note(_NEXT)
    del places[None]

    types = tuple(map(type, found))
    if any(kind.__name__ == "CppFunction" for kind in set(types)):
        types = tuple(map(_node_type, found))
    structure = _structure(types, tuple(shape), width)
    handles = tuple([found[place] for place in structure.order])
    attributes: list[tuple[int, tuple[Any, ...]]] = []
    widths: dict[int, int] = {}
    for kind, nodes in structure.nodes.items():
        row = rows.get(kind.__name__)
        if row is not None and row.signature is not None:
            attributes += [(node, row.signature(Saved(handles[node]))) for node in nodes]
        if row is not None and row.join is not None:
            widths |= {node: len(handles[node]._input_metadata) for node in nodes}
    graph = Graph(
        structure=structure,
        attributes=tuple(attributes),
        widths=widths,
        outputs=tuple((structure.numbers[places[node]], number) for node, number in roots),
        inputs=(),
        handles=handles,
        places=places,
    )
    if not inputs:
        return graph
    return graph.changed(inputs=tuple(_input_ref(number, tensor, graph) for number, tensor in enumerate(inputs)))


_lock = threading.Lock()
_CONSTANT, _NEXT = -1, -2  # in a walk's shape: an operand without a node; the end of a node's operands
_KEPT = 250_000  # nodes of all structures that are remembered; the oldest are dropped first
_structures: dict[Any, Structure] = {}


def _structure(types: tuple[type, ...], shape: tuple[int, ...], roots: int) -> Structure:
    """What a walk saw, as nodes in an order in which operands stand before their consumers."""
    key = (types, shape, roots)
    known = _structures.get(key)
    if known is not None:
        return known
    _refuse_opaque(set(types))
    operands: list[list[tuple[int, int] | None]] = [[]]
    for item in shape:
        if item == _NEXT:
            operands.append([])
        else:
            operands[-1].append(None if item == _CONSTANT else (item & 0xFFFFFFFF, item >> 32))
    order: list[int] = []
    seen: set[int] = set()
    for root in range(roots):
        stack = [] if root in seen else [(root, 0)]
        seen.add(root)
        while stack:  # depth first
            place, position = stack.pop()
            edges = operands[place]
            while position < len(edges):
                edge = edges[position]
                position += 1
                if edge is not None and edge[0] not in seen:
                    seen.add(edge[0])
                    stack.append((place, position))
                    place, edges, position = edge[0], operands[edge[0]], 0
            order.append(place)
    numbers = {place: node for node, place in enumerate(order)}
    nodes: dict[type, list[int]] = {}
    for node, place in enumerate(order):
        nodes.setdefault(types[place], []).append(node)
    made = Structure(
        types=tuple(types[place] for place in order),
        edges=tuple(tuple(edge and (numbers[edge[0]], edge[1]) for edge in operands[place]) for place in order),
        order=tuple(order),
        numbers=tuple(numbers[place] for place in range(len(order))),
        nodes={kind: tuple(members) for kind, members in nodes.items()},
    )
    with _lock:
        while _structures and len(order) + sum(len(other.order) for other in _structures.values()) > _KEPT:
            del _structures[next(iter(_structures))]
        return _structures.setdefault(key, made)


def _node_type(node: Any) -> type:
    """The node's class. C++ functions of extensions share one: those get a class by the name of their own."""
    kind = type(node)
    if kind.__name__ != "CppFunction":
        return kind
    name = cpp_function(node.name())
    return kind if name is None else _cpp_types.setdefault(name, type(name, (), {}))


_cpp_types: dict[str, type] = {}


def cpp_function(name: str) -> str | None:
    """The node type that stands for a C++ `torch::autograd::Function`; None for other hidden code.

    >>> cpp_function("torch::autograd::CppNode<vision::ops::(anonymous namespace)::ROIAlignFunction>")
    'ROIAlignFunctionBackward'
    """
    if name.endswith("::WarnNotImplemented"):
        return "WarnNotImplemented"
    if not name.startswith("torch::autograd::CppNode<"):
        return None
    return name.removesuffix(">").rpartition("::")[2].rpartition("<")[2] + "Backward"


def gradient_edge(tensor: Tensor | GradientEdge) -> GradientEdge:
    """Where autograd delivers the gradient of a tensor."""
    if isinstance(tensor, GradientEdge):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():  # a subclass would give the edge of a copy
        return get_gradient_edge(tensor)


def plain(tensor: Tensor) -> Tensor:
    """The same without what a subclass adds (MONAI's MetaTensor); those that dispatch on their own stay what they are."""
    if type(tensor) is Tensor or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def _root(output: Tensor, number: int) -> tuple[Any, int]:
    if output.grad_fn is None:
        cause = (
            "it was made in inference mode"
            if output.is_inference()
            else "it is a leaf"
            if output.requires_grad
            else "it was made under torch.no_grad(), detached, from tensors that require no gradient, or by a quantised model's integers "
            "(explain the float model that it was made from)"
        )
        raise NoGraphError(
            f"output {number} of shape {tuple(output.shape)} has no autograd graph: {cause}. Run the forward pass with "
            "gradients enabled on an input that requires them (x.requires_grad_()), or call dynamiclrp.explain, which does."
        )
    return output.grad_fn, output.output_nr


def _input_ref(number: int, tensor: Tensor | GradientEdge, graph: Graph) -> Ref:
    if isinstance(tensor, Tensor) and not tensor.requires_grad:
        raise UnusedInputError(
            f"input {number} of shape {tuple(tensor.shape)} does not require a gradient, so autograd did not follow it. "
            "Call x.requires_grad_() before the forward pass."
        )
    edge = gradient_edge(tensor)
    node = graph.find(edge.node)
    if node is None:
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else tuple(output_shape(edge.node, edge.output_nr))
        raise UnusedInputError(
            f"input {number} of shape {shape} is not part of the graph of the outputs: they do not depend on it. "
            "Pass the very tensor that the model used (not a copy, cast or view made afterwards)."
        )
    return (node, edge.output_nr)


def refuse_nested(tensor: Tensor, what: str) -> None:
    """Relevance has the shape of its tensor, and a nested tensor's rows have none in common."""
    if tensor.is_nested:
        raise UnsupportedTensorError(
            f"{what} is a nested tensor ({tensor.layout}): expected one whose rows have the same shape. Remedy: pass "
            "torch.nested.to_padded_tensor(x, 0.0); inside the model tensors of layout torch.jagged are fine."
        )


def _refuse_opaque(types: set[type]) -> None:
    for name in sorted(kind.__name__ for kind in types):
        if name in OPAQUE:
            raise OpaqueGraphError(f"{name} hides the operations it is made of. Remedy: {OPAQUE[name]}.")

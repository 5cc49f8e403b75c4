"""autograd → `Graph`. The only file that reads torch's private attributes.

In: output and input tensors (or gradient edges). Out: a `Graph`, and `Saved`, the view of one node's saved values.
It knows nothing of rules.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .errors import FreedGraphError, LRPError, NoGraphError, OpaqueGraphError, UnsupportedTensorError, UnusedInputError
from .graph import Graph, Ref, Structure
from .ops import Op

try:
    from torch.utils.checkpoint import GraphExecGroup
except ImportError:  # torch < 2.10
    GraphExecGroup = None  # type: ignore[assignment,misc]

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
    "CppFunction": f"if it is scripted (torch.jit): {_SCRIPTED}",
}

_SIGN_BIT = 1 << 63


class Saved:
    """One node's saved values by their names in torch's table of derivatives: `Saved(node).dim`, `.weight`."""

    __slots__ = ("node", "read", "scratch")

    node: Any
    read: Mapping[str, Any] | None  # values that were read ahead, since they can be read only once
    scratch: dict[Any, Any]  # shared by all nodes of one pass

    def __new__(cls, node: Any, read: Mapping[str, Any] | None = None, scratch: dict[Any, Any] | None = None) -> Saved:
        kind = type(node)
        made = object.__new__(_saved_types.get(kind) or _saved_type(kind))
        made.node, made.read, made.scratch = node, read, {} if scratch is None else scratch
        return made

    def __getattr__(self, name: str) -> Any:  # for names that the node's type does not have
        raise AttributeError(f"{type(self.node).__name__} saves no {name!r}")

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """Zeros to read from; nodes of one pass share them."""
        return zeros_like(tensor, self.scratch)

    def several(self, names: tuple[str, ...]) -> tuple[Any, ...]:
        """Several values at once, for where no number can be negative."""
        if self.read is None:
            try:
                return _several(names)(self.node)
            except RuntimeError:  # freed: named below
                pass
        return tuple([getattr(self, name) for name in names])

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What a Python `autograd.Function` gave to `ctx.save_for_backward`."""
        return tuple(t.detach() if t is not None else None for t in self.node.saved_tensors)

    @property
    def shape(self) -> torch.Size:
        """The shape of the node's first output."""
        return output_shape(self.node, 0)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the node's first output."""
        return self.node._input_metadata[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of the node's first output."""
        return self.node._input_metadata[0].device


def zeros_like(tensor: Tensor, scratch: dict[Any, Any]) -> Tensor:
    """Zeros to read from, made once for all tensors of one kind."""
    key = (tensor.shape, tensor.dtype, tensor.get_device())
    made = scratch.get(key)
    if made is None:
        made = scratch[key] = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
    return made


_saved_types: dict[type, type[Saved]] = {}


def _saved_type(kind: type) -> type[Saved]:
    """`Saved` for one node type, with a property for each name: many times faster than `__getattr__`."""
    names = [name.removeprefix("_saved_") for name in dir(kind) if name.startswith("_saved_")]
    readers = {name: property(_reader(name)) for name in names if name not in vars(Saved)}
    made = type("Saved", (Saved,), {"__slots__": (), **readers})
    return _saved_types.setdefault(kind, made)


@cache
def _several(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*["_saved_" + name for name in names])


def _reader(name: str) -> Callable[[Saved], Any]:
    attribute = "_saved_" + name

    def read(saved: Saved) -> Any:
        if saved.read is not None and name in saved.read:
            return saved.read[name]
        try:
            value = getattr(saved.node, attribute)
        except RuntimeError as error:
            raise read_error(error, type(saved.node).__name__, name) from None
        return value if type(value) is Tensor else _clean(value)

    return read


def saved_tensor(node: Any, name: str) -> Any:
    """One tensor that a node saved: `Saved(node).name` in short."""
    try:
        return getattr(node, "_saved_" + name)
    except (AttributeError, RuntimeError):  # what is no tensor of torch's table, or was freed
        return getattr(Saved(node), name)


def swap(node: Any, name: str, put: Callable[[Tensor], Any], get: Callable[[Any], Tensor]) -> bool:
    """Let a node hold `put(value)` in place of what it saved, and its own backward find `get` of that.

    It cannot be undone: for graphs that nobody else will use. False, and nothing happened: the value is not in its hands
    (checkpointed, offloaded).
    """
    try:
        getattr(node, "_raw_saved_" + name).register_hooks(put, get)
    except RuntimeError:
        return False
    return True


can_recompute_twice = GraphExecGroup is not None


def checkpoint_mark(node: Any) -> Any:
    """Of a node made under `torch.utils.checkpoint` (non-reentrant): what tells its region from others; else None.

    Its values are recomputed when they are read, with those of its region.
    """
    for name in _raw_names(type(node)):
        saved = getattr(node, name, None)
        hook = getattr(saved, "unpack_hook", None)
        if hook is not None:
            return hook if "_checkpoint_hook" in getattr(hook, "__qualname__", "") else None
        if getattr(saved, "data", None) is not None:  # saved without a hook, and so were the others
            return None
    return None


def read_ahead(nodes: Sequence[Any]) -> list[dict[str, Any]]:
    """All saved tensors of checkpointed nodes of one region, each read once, with one recomputation (newer torch)."""
    with GraphExecGroup() if GraphExecGroup is not None else nullcontext():
        return [{name: getattr(Saved(node), name) for name in saved_tensor_names(type(node))} for node in nodes]


def saved_tensor_names(kind: type) -> tuple[str, ...]:
    """The attributes under which nodes of a type save tensors."""
    return tuple(name.removeprefix("_raw_saved_") for name in _raw_names(kind))


def _raw_names(kind: type) -> tuple[str, ...]:
    if kind not in _names:
        names = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        _names[kind] = tuple(name for name in names if hasattr(kind, name.removeprefix("_raw")))
    return _names[kind]


_names: dict[type, tuple[str, ...]] = {}  # a memo: dir() is slow


def output_shape(node: Any, number: int) -> torch.Size:
    """The shape of one output of an autograd node."""
    if type(node).__name__ == "AccumulateGrad":
        return node.variable.shape
    metadata = node._input_metadata[number]
    strided = getattr(metadata, "is_cpp_nested_tensor", False)  # a nested tensor of the strided layout has no shape
    return torch.Size(() if strided else metadata.shape)


def leaf_value(node: Any) -> Tensor:
    """The tensor behind an AccumulateGrad node."""
    return node.variable.detach()


def leaf_id(node: Any) -> int:
    """Which tensor stands behind an AccumulateGrad node."""
    return id(node.variable)


def sequence_number(node: Any) -> int:
    """When the node was made; nodes of one forward pass on one thread count up."""
    return node._sequence_nr()


def next_sequence_number() -> int:
    """The number that the next node made on this thread will get."""
    return torch._C._autograd._get_sequence_nr()


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
    if not name.startswith("torch::autograd::CppNode<"):
        return None
    return name.removesuffix(">").rpartition("::")[2].rpartition("<")[2] + "Backward"


def gradient_edge(tensor: Tensor | GradientEdge) -> GradientEdge:
    """Where autograd delivers the gradient of a tensor."""
    return tensor if isinstance(tensor, GradientEdge) else get_gradient_edge(tensor)


def _root(output: Tensor, number: int) -> tuple[Any, int]:
    if output.grad_fn is None:
        cause = (
            "it was made in inference mode"
            if output.is_inference()
            else "it is a leaf"
            if output.requires_grad
            else "it was made under torch.no_grad(), detached, or from tensors that require no gradient"
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


def read_error(error: RuntimeError, node: str, name: str) -> LRPError:
    """What it means that a saved value cannot be read."""
    text = str(error)
    if "second time" in text or "already been freed" in text:
        return FreedGraphError(
            f"the saved values of {node} were freed by an earlier backward pass. Run the forward pass again, or keep the "
            "graph with retain_graph=True."
        )
    if "inplace" in text:
        return FreedGraphError(f"{node} saved {name!r}, and an in-place operation overwrote it afterwards: {text}")
    return FreedGraphError(f"{node} cannot hand out {name!r}: {text}")


def _clean(value: Any) -> Any:
    """Negative integers read back as unsigned."""
    kind = type(value)
    if kind is int:
        return value - (1 << 64) if value >= _SIGN_BIT else value
    if kind is tuple or kind is list:
        return tuple([item if type(item) is int and item < _SIGN_BIT else _clean(item) for item in value])
    return value

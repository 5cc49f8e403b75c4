"""autograd → `Graph`. The only file that reads torch's private attributes.

In: output and input tensors (or gradient edges). Out: a `Graph`, and `Saved`, the view of one node's saved values.
It knows nothing of rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .errors import FreedGraphError, LRPError, NoGraphError, OpaqueGraphError, UnsupportedTensorError, UnusedInputError
from .graph import Graph, Ref
from .ops import Op

try:
    from torch.utils.checkpoint import GraphExecGroup
except ImportError:  # torch < 2.10
    GraphExecGroup = None  # type: ignore[assignment,misc]

# Nodes behind which the operations cannot be seen, and what to do about each.
OPAQUE = {
    "CompiledFunctionBackward": "wrap the call in torch.compiler.set_stance('force_eager'), or explain model._orig_mod",
    "CheckpointFunctionBackward": "call torch.utils.checkpoint with use_reentrant=False",
    "DifferentiableGraphBackward": "explain the plain module or function instead of the scripted one",
    "_ReversibleFunctionBackward": "reversible layers (Reformer) recompute themselves; run the plain layers in sequence",
    "CppFunction": "if it is scripted (torch.jit), explain the plain module or function instead",
}

_SIGN_BIT = 1 << 63


class Saved:
    """One node's saved values by their names in torch's table of derivatives: `Saved(node).dim`, `.weight`."""

    __slots__ = ("node", "read", "scratch")

    def __init__(self, node: Any, read: Mapping[str, Any] | None = None, scratch: dict[Any, Any] | None = None) -> None:
        self.node = node
        self.read = read  # values that were read ahead, since they can be read only once
        self.scratch = {} if scratch is None else scratch  # shared by all nodes of one pass

    def __getattr__(self, name: str) -> Any:
        if self.read is not None and name in self.read:
            return self.read[name]
        try:
            value = getattr(self.node, "_saved_" + name)
        except RuntimeError as error:
            raise read_error(error, type(self.node).__name__, name) from None
        return _clean(value)

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """Zeros to read from; nodes of one pass share them."""
        key = (tensor.shape, tensor.dtype, tensor.device)
        if key not in self.scratch:
            self.scratch[key] = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        return self.scratch[key]

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


can_recompute_twice = GraphExecGroup is not None


def checkpoint_mark(node: Any) -> Any:
    """Of a node made under `torch.utils.checkpoint` (non-reentrant): what tells its region from others; else None.

    Its values are recomputed when they are read, with those of its region.
    """
    for name in saved_tensor_names(type(node)):
        hook = getattr(getattr(node, "_raw_saved_" + name, None), "unpack_hook", None)  # what was not saved has none
        if hook is not None and "_checkpoint_hook" in getattr(hook, "__qualname__", ""):
            return hook
    return None


def read_ahead(nodes: Sequence[Any]) -> list[dict[str, Any]]:
    """All saved tensors of checkpointed nodes of one region, each read once, with one recomputation (newer torch)."""
    with GraphExecGroup() if GraphExecGroup is not None else nullcontext():
        return [{name: getattr(Saved(node), name) for name in saved_tensor_names(type(node))} for node in nodes]


def saved_tensor_names(kind: type) -> tuple[str, ...]:
    """The attributes under which nodes of a type save tensors."""
    if kind not in _names:
        names = [name.removeprefix("_raw_saved_") for name in dir(kind) if name.startswith("_raw_saved_")]
        _names[kind] = tuple(name for name in names if hasattr(kind, "_saved_" + name))
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
    index: dict[Any, int] = {}  # holding the wrappers keeps their identity stable during the walk
    handles: list[Any] = []
    nexts: list[tuple[tuple[Any, int], ...]] = []
    for root, _ in roots:
        if root in index:
            continue
        index[root] = -1
        stack = [(root, root.next_functions, 0)]
        while stack:
            node, operands, position = stack.pop()
            while position < len(operands):
                operand = operands[position][0]
                position += 1
                if operand is not None and operand not in index:
                    index[operand] = -1
                    stack.append((node, operands, position))
                    node, operands, position = operand, operand.next_functions, 0
            index[node] = len(handles)
            handles.append(node)
            nexts.append(operands)

    types = tuple(map(type, handles))
    if any(kind.__name__ == "CppFunction" for kind in set(types)):
        types = tuple(map(_node_type, handles))
    # lists inside, since generators are slower and this runs at every call
    edges = tuple([tuple([None if node is None else (index[node], i) for node, i in operands]) for operands in nexts])
    _refuse_opaque(set(types))
    present = {kind: rows[kind.__name__] for kind in set(types) if kind.__name__ in rows}
    deciding = {kind: row.signature for kind, row in present.items() if row.signature is not None}
    attributes = tuple([(i, deciding[kind](Saved(handles[i]))) for i, kind in enumerate(types) if kind in deciding])
    splits = {kind for kind, row in present.items() if row.join is not None}
    return Graph(
        widths={i: len(handles[i]._input_metadata) for i, kind in enumerate(types) if kind in splits} if splits else {},
        types=types,
        edges=edges,
        attributes=attributes,
        outputs=tuple((index[node], number) for node, number in roots),
        inputs=tuple(_input_ref(number, tensor, index) for number, tensor in enumerate(inputs)),
        handles=tuple(handles),
    )


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


def _input_ref(number: int, tensor: Tensor | GradientEdge, index: dict[Any, int]) -> Ref:
    if isinstance(tensor, Tensor) and not tensor.requires_grad:
        raise UnusedInputError(
            f"input {number} of shape {tuple(tensor.shape)} does not require a gradient, so autograd did not follow it. "
            "Call x.requires_grad_() before the forward pass."
        )
    edge = gradient_edge(tensor)
    if edge.node not in index:
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else tuple(output_shape(edge.node, edge.output_nr))
        raise UnusedInputError(
            f"input {number} of shape {shape} is not part of the graph of the outputs: they do not depend on it. "
            "Pass the very tensor that the model used (not a copy, cast or view made afterwards)."
        )
    return (index[edge.node], edge.output_nr)


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
        return tuple([_clean(item) for item in value])
    return value

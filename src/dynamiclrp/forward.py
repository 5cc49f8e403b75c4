"""One forward pass of a model, made ready for relevance: which inputs, which graph, which modules.

In: a model with its arguments. Out: a `Forward`. Whatever it changes on the model for that time (gradient flags, hooks)
is put back, also after an error. It must not know rules or plans beyond handing them through.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .attribution import Attribution
from .capture import Saved, capture, gradient_edge, leaf_value, next_sequence_number, sequence_number
from .errors import NoInputError, PresetError, UnsupportedTensorError
from .graph import Graph
from .ledger import Ledger
from .ops import OPS, Kind
from .plan import Plan
from .presets import Preset
from .recorder import Recorder
from .run import run
from .targets import Target, unwrap

# Flags and hooks on a model are shared by all threads that explain it.
_one_at_a_time = threading.RLock()


def graph_of(outputs: Sequence[Tensor], inputs: Sequence[Tensor | GradientEdge]) -> Graph:
    """Capture with the signatures that the table of operations asks for."""
    signatures = {name: op.signature for name, op in OPS.items() if op.signature is not None}
    return capture(outputs, inputs, signatures)


@dataclass(frozen=True, eq=False)
class Explained:
    """One thing to explain: an edge of the graph, its value, and how its relevance is shown."""

    name: str
    edges: tuple[GradientEdge, ...]
    values: tuple[Tensor, ...]
    tokens: torch.Size | None = None  # token ids: sum over the embedding dimension, in the ids' shape


@dataclass(frozen=True, eq=False)
class Forward:
    """A finished forward pass and its graph."""

    output: Tensor
    graph: Graph
    sources: tuple[Explained, ...]
    layers: tuple[Explained, ...]

    def relevance(self, plan: Plan, seed: Tensor, watch: Callable[..., Any] | None) -> tuple[Tensor, ...]:
        every = (*self.sources, *self.layers)
        edges = [edge for source in every for edge in source.edges]
        values = [value for source in every for value in source.values]
        return run(plan, self.graph, [self.output], [seed], edges, values, watch=watch)

    def attribution(
        self, found: Sequence[Tensor], target: Target, seed: Tensor, plan: Plan, preset: Preset, ledger: Ledger | None
    ) -> Attribution:
        left = iter(found)

        def collect(sources: tuple[Explained, ...]) -> dict[str, Tensor]:
            shown: dict[str, Tensor] = {}
            for source in sources:
                parts = [next(left) for _ in source.edges]
                if source.tokens is not None:
                    parts = [part.sum(-1).reshape(source.tokens) for part in parts]
                total = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
                shown[source.name] = total
            return shown

        relevances = collect(self.sources)
        return Attribution(relevances, collect(self.layers), self.output.detach(), target, seed, plan, preset, ledger)


class Call:
    """A model with its arguments, ready to run forward as often as needed. Leaves the model as it was."""

    def __init__(
        self, model: nn.Module, preset: Preset, args: tuple[Any, ...], kwargs: dict[str, Any], layers: tuple[str, ...]
    ) -> None:
        self.model, self.preset, self.layers = model, preset, layers
        self.modules = dict(model.named_modules())
        unknown = [name for name in layers if name not in self.modules]
        if unknown:
            raise PresetError(f"layers {unknown}: no such module. Known: {', '.join(list(self.modules)[1:9])}, …")
        self.floats: dict[str, Tensor] = {}
        self.integers: dict[str, Tensor] = {}
        names = _argument_names(model, len(args))
        self.args = tuple(self._take(name, value) for name, value in zip(names, args))
        self.kwargs = {name: self._take(name, value) for name, value in kwargs.items()}

    def _take(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor) and (value.is_complex() or value.layout != torch.strided):
            raise UnsupportedTensorError(
                f"argument {name!r} is {'complex' if value.is_complex() else 'sparse'} ({value.dtype}, {value.layout}): "
                "expected a dense real tensor; pass torch.view_as_real(x) or x.to_dense()"
            )
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.clone() if value.is_inference() else value.detach()
            value = self.floats[name] = value.requires_grad_()
        elif isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32):
            self.integers[name] = value
        return value

    def run(self, record: bool) -> Forward:
        with _one_at_a_time:
            forward = self._run(record, freeze=True)
            return forward if forward is not None else self._must(self._run(record, freeze=False))

    def _must(self, forward: Forward | None) -> Forward:
        if forward is None:
            given = [*self.floats, *self.integers] or ["none"]
            raise NoInputError(
                f"nothing to explain among the tensor arguments ({', '.join(given)}): float tensors are explained "
                "themselves, integer tensors at the embedding lookups they reach, and none of these reaches the output."
            )
        return forward

    def _run(self, record: bool, freeze: bool) -> Forward | None:
        watched: dict[str, Explained] = {}
        ranges: list[tuple[int, int, str]] = []
        recorder = Recorder() if record else None
        with _gradients(self.model, self.preset, bool(self.integers), freeze), self._watch(watched, ranges):
            with torch.inference_mode(False), torch.enable_grad(), _primitive_recurrence(self.model):
                if recorder is not None:
                    with recorder:
                        raw = self.model(*self.args, **self.kwargs)
                else:
                    raw = self.model(*self.args, **self.kwargs)
                output = unwrap(raw)
            if output.grad_fn is None:
                if freeze and not output.is_inference():
                    return None
                graph_of([output], [])  # raises the error that names the cause
            return self._graph(output, watched, ranges, recorder, freeze)

    def _graph(
        self,
        output: Tensor,
        watched: dict[str, Explained],
        ranges: list[tuple[int, int, str]],
        recorder: Recorder | None,
        freeze: bool,
    ) -> Forward | None:
        whole = graph_of([output], [])
        reached = {id(handle) for handle in whole.handles}
        sources = [
            Explained(name, (gradient_edge(x),), (x,))
            for name, x in self.floats.items()
            if id(gradient_edge(x).node) in reached
        ]
        sources += self._lookups(whole)
        if not sources:
            return None
        order = [*inspect.signature(self.model.forward).parameters]
        sources.sort(key=lambda source: order.index(source.name) if source.name in order else len(order))
        missing = [
            name for name in self.layers if name not in watched or id(watched[name].edges[0].node) not in reached
        ]
        if missing:
            raise PresetError(
                f"layers {missing} did not contribute to the output with a tensor that requires gradients"
            )
        layers = tuple(watched[name] for name in self.layers)
        index = {handle: i for i, handle in enumerate(whole.handles)}
        edges = [edge for source in (*sources, *layers) for edge in source.edges]
        graph = replace(
            whole,
            inputs=tuple((index[edge.node], edge.output_nr) for edge in edges),
            modules=_labels(whole, ranges) if self.preset.modules else None,
        )
        if recorder is not None:
            graph = replace(graph, calls=recorder.by_node(graph))
        return Forward(output, graph, tuple(sources), layers)

    def _lookups(self, graph: Graph) -> list[Explained]:
        """Embedding lookups by the integer argument whose values they use."""
        if not self.integers:
            return []
        found: dict[str, list[tuple[GradientEdge, Tensor]]] = {}
        for node, kind in enumerate(graph.types):
            op = OPS.get(kind.__name__)
            table = _parameter(graph, graph.edges[node][0]) if op is not None and op.lookup is not None else None
            if op is None or op.lookup is None or table is None:
                continue
            saved = Saved(graph.handles[node])
            indices = getattr(saved, op.lookup)
            indices = indices[0] if isinstance(indices, tuple) and len(indices) == 1 else indices
            if not isinstance(indices, Tensor):
                continue
            name = _same(indices, self.integers)
            if name is not None:
                value = op.forward(saved, table)  # type: ignore[misc]
                found.setdefault(name, []).append((GradientEdge(graph.handles[node], 0), value))
        sources = []
        for name, pairs in found.items():
            shape = self.integers[name].shape
            sources.append(Explained(name, tuple(edge for edge, _ in pairs), tuple(v for _, v in pairs), shape))
        return sources

    @contextmanager
    def _watch(self, watched: dict[str, Explained], ranges: list[tuple[int, int, str]]) -> Iterator[None]:
        """Module outputs that were asked for, and which nodes were made inside which module."""
        handles = []
        try:
            for name in self.layers:
                handles.append(self.modules[name].register_forward_hook(_keep_output(name, watched)))
            if self.preset.modules:
                for name, module in self.modules.items():
                    handles += _note_range(name, module, ranges)
            yield
        finally:
            for handle in handles:
                handle.remove()


def _keep_output(name: str, watched: dict[str, Explained]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        tensor = unwrap(output)
        if tensor.requires_grad:
            # a copy, since a later in-place operation may overwrite it
            watched[name] = Explained(name, (gradient_edge(tensor),), (tensor.detach().clone(),))

    return hook


def _note_range(name: str, module: nn.Module, ranges: list[tuple[int, int, str]]) -> list[Any]:
    starts: list[int] = []

    def enter(module: nn.Module, args: Any) -> None:
        starts.append(next_sequence_number())

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        ranges.append((starts.pop(), next_sequence_number(), name))

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


def _labels(graph: Graph, ranges: list[tuple[int, int, str]]) -> tuple[str, ...]:
    """The innermost module of each node."""
    ordered = sorted(ranges, key=lambda r: r[1] - r[0])
    owner: dict[int, str] = {}
    for start, end, name in ordered:
        for number in range(start, end):
            owner.setdefault(number, name)
    return tuple(owner.get(sequence_number(handle), "") for handle in graph.handles)


@contextmanager
def _primitive_recurrence(model: nn.Module) -> Iterator[None]:
    """Fused kernels of recurrent layers hide their gates; without them torch runs the same layer as primitives."""
    if not any(isinstance(module, nn.RNNBase) for module in model.modules()):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TF32 acceleration")  # torch warns whenever these flags are touched
        with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
            yield


@contextmanager
def _gradients(model: nn.Module, preset: Preset, integers: bool, freeze: bool) -> Iterator[None]:
    """Decide which parameters autograd follows during the forward pass, and put everything back afterwards.

    Weights of linear maps never need it. Everything else is followed where a rule computes with parameters, biases
    always, and the embeddings where token ids are explained.
    """
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        if freeze:
            follow = _followed(model, preset, integers)
            for parameter, _ in before:
                if parameter.is_floating_point():
                    parameter.requires_grad_(id(parameter) in follow)
        else:
            for parameter, _ in before:
                if parameter.is_floating_point():
                    parameter.requires_grad_(True)
        yield
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)


def _followed(model: nn.Module, preset: Preset, integers: bool) -> set[int]:
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} if integers else set()
    if preset.needs_parameters:
        maps = (nn.Linear, nn.modules.conv._ConvNd)
        weights = {id(m.weight) for m in model.modules() if isinstance(m, maps)}
        return {id(p) for p in model.parameters() if id(p) not in weights} | embeddings
    # following a bias makes autograd save nothing, and keeps its value where an activation's input must be rebuilt
    return {id(p) for name, p in model.named_parameters() if name.endswith("bias")} | embeddings


def _parameter(graph: Graph, ref: tuple[int, int] | None) -> Tensor | None:
    """The value of a tensor that is a leaf, or a view or cast of one."""
    steps = []
    while ref is not None and graph.types[ref[0]].__name__ != "AccumulateGrad":
        op = OPS.get(graph.types[ref[0]].__name__)
        if op is None or op.kind is not Kind.MOVEMENT or op.forward is None or len(graph.edges[ref[0]]) != 1:
            return None
        steps.append((op, ref[0]))
        ref = graph.edges[ref[0]][0]
    if ref is None:
        return None
    value = leaf_value(graph.handles[ref[0]])
    for op, node in reversed(steps):
        value = op.forward(Saved(graph.handles[node]), value)  # type: ignore[misc]
    return value


def _argument_names(model: nn.Module, count: int) -> list[str]:
    try:
        names = [
            p.name for p in inspect.signature(model.forward).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]  # fmt: skip
    except (TypeError, ValueError):
        names = []
    return (names + [f"argument {i}" for i in range(len(names), count)])[:count]


def _same(indices: Tensor, arguments: dict[str, Tensor]) -> str | None:
    """The argument that these indices are: by memory first, then by values."""
    for name, argument in arguments.items():
        if indices.data_ptr() == argument.data_ptr() and indices.numel() == argument.numel():
            return name
    for name, argument in arguments.items():
        if indices.shape == argument.shape and torch.equal(indices.to(argument), argument):
            return name
    return None

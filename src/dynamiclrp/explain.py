"""The user's verbs: `relevance` on a graph, `explain` and `Explainer` on a model, `inspect` to look without running."""

from __future__ import annotations

import inspect as python_inspect
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .attribution import Attribution
from .capture import Saved, capture, gradient_edge, leaf_value, next_sequence_number, sequence_number
from .errors import (
    LostActivationError,
    NoGraphError,
    NoInputError,
    NonFiniteError,
    OpaqueGraphError,
    PresetError,
    TrainingModeWarning,
)
from .graph import Graph
from .ledger import Ledger, Locator
from .ops import OPS, Kind
from .plan import Plan, make_plan
from .presets import Preset, preset as find_preset
from .recorder import Recorder
from .run import check_tensors, run
from .targets import Target, check_seed, seed_for, unwrap

_CACHE_SIZE = 64


class Plans:
    """Plans by preset and graph signature, the oldest dropped first."""

    def __init__(self, size: int = _CACHE_SIZE) -> None:
        self.size = size
        self._plans: OrderedDict[Any, Plan] = OrderedDict()

    def get(self, graph: Graph, preset: Preset, everything: bool = False) -> Plan:
        key = (preset, everything, len(OPS), graph.signature)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = make_plan(graph, preset, everything=everything)
            while len(self._plans) > self.size:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        return plan

    def __len__(self) -> int:
        return len(self._plans)


_plans = Plans()


def _graph(outputs: Sequence[Tensor], inputs: Sequence[Tensor | GradientEdge]) -> Graph:
    signatures = {name: op.signature for name, op in OPS.items() if op.signature is not None}
    return capture(outputs, inputs, signatures)


def _sequence(tensors: Tensor | Sequence[Tensor], what: str) -> list[Tensor]:
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not found or not all(isinstance(t, Tensor) for t in found):
        raise TypeError(f"{what}: expected a tensor or a sequence of tensors, got {tensors!r:.80}")
    return found


def relevance(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    *,
    seed: Tensor | Sequence[Tensor | None] | None = None,
    preset: str | Preset = "attnlrp",
    retain_graph: bool = False,
) -> tuple[Tensor, ...]:
    """Relevance of `inputs` for `outputs`, as `torch.autograd.grad` gives gradients.

    `seed` is the relevance at the outputs; by default the largest logit of each row keeps its own value.

    >>> import torch, dynamiclrp as dlrp
    >>> x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    >>> dlrp.relevance(x @ torch.tensor([[3.0], [-1.0]]), x)
    (tensor([[ 3., -2.]]),)
    """
    outs, ins = _sequence(outputs, "outputs"), _sequence(inputs, "inputs")
    graph = _graph(outs, ins)
    check_tensors(graph, outs, ins)
    given = [seed] * len(outs) if seed is None or isinstance(seed, Tensor) else list(seed)
    if len(given) != len(outs):
        raise ValueError(f"{len(given)} seeds for {len(outs)} outputs: expected one each")
    seeds = [seed_for(out, None) if s is None else check_seed(s, out) for s, out in zip(given, outs)]
    plan = _plans.get(graph, find_preset(preset))
    edges = [gradient_edge(x) for x in ins]
    found = run(plan, graph, outs, seeds, edges, ins, retain_graph=retain_graph)
    if not all(bool(torch.isfinite(r).all()) for r in found):
        if not retain_graph:
            raise NonFiniteError(
                f"relevance is not finite under {plan.preset!r}. Call again with retain_graph=True to have the first node "
                "that made it named, or use dynamiclrp.explain."
            )
        locator = Locator(graph)
        run(plan, graph, outs, seeds, edges, ins, retain_graph=True, watch=locator.watch)
        raise NonFiniteError(f"relevance is not finite under {plan.preset!r}: {locator}")
    return found


def plan(
    outputs: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor], *, preset: str | Preset = "attnlrp"
) -> Plan:
    """The plan that `relevance` would follow; `print` it to see rules and promises."""
    return _plans.get(_graph(_sequence(outputs, "outputs"), _sequence(inputs, "inputs")), find_preset(preset))


def explain(
    model: nn.Module,
    *args: Any,
    target: Target = None,
    preset: str | Preset = "attnlrp",
    layers: Sequence[str] = (),
    ledger: bool = False,
    **kwargs: Any,
) -> Attribution:
    """Run the model and say what its prediction stands on.

    Float tensors among the arguments are explained themselves, integer tensors at the embedding lookups they reach.
    `target`: an int, one int per row, a tuple of indices, a callable on the output, a seed tensor, or None for the
    largest logit. `layers` names modules whose outputs are explained too.

    >>> import torch, dynamiclrp as dlrp
    >>> a = dlrp.explain(torch.nn.Linear(3, 2), torch.randn(1, 3), target=1)
    >>> a.relevance.shape
    torch.Size([1, 3])
    """
    return Explainer(model, preset)(*args, target=target, layers=layers, ledger=ledger, **kwargs)


class Explainer:
    """`explain` for many inputs: keeps plans between calls.

    >>> import torch, dynamiclrp as dlrp
    >>> e = dlrp.Explainer(torch.nn.Linear(3, 2), preset="epsilon")
    >>> e(torch.randn(4, 3), target=[0, 1, 0, 1]).relevance.shape
    torch.Size([4, 3])
    """

    def __init__(self, model: nn.Module, preset: str | Preset = "attnlrp") -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}; use dynamiclrp.relevance for functions")
        if isinstance(model, torch.jit.ScriptModule):
            raise OpaqueGraphError("the model is scripted, which hides its operations. Remedy: explain the plain module.")
        if getattr(model, "_orig_mod", None) is not None:
            raise OpaqueGraphError("the model is compiled, which hides its operations. Remedy: explain model._orig_mod.")
        self.model = model
        self.preset = find_preset(preset)
        self.plans = Plans()
        self._record = False  # learnt: this model's constants must be recorded

    def __call__(
        self, *args: Any, target: Target = None, layers: Sequence[str] = (), ledger: bool = False, **kwargs: Any
    ) -> Attribution:
        _warn_training(self.model)
        call = _Call(self.model, self.preset, args, kwargs, tuple(layers))
        record = self._record or ledger  # a ledger needs every value
        forward = call.run(record)
        try:
            plan = self.plans.get(forward.graph, self.preset, ledger)
        except LostActivationError:
            if record:
                raise
            record = self._record = True
            forward = call.run(record)
            plan = self.plans.get(forward.graph, self.preset, ledger)
        seed = seed_for(forward.output, target)
        book = Ledger(forward.graph, plan) if ledger else None
        found = forward.relevance(plan, seed, book.watch if book else None)
        if not all(bool(torch.isfinite(r).all()) for r in found):
            again = call.run(record)
            locator = Locator(again.graph)
            again.relevance(plan, seed, locator.watch)
            raise NonFiniteError(f"relevance is not finite under {self.preset!r}: {locator}")
        if book is not None:
            book.close(seed, found[: sum(len(source.edges) for source in forward.sources)])
        return forward.attribution(found, target, seed, plan, self.preset, book)

    def inspect(self, *args: Any, **kwargs: Any) -> Report:
        """Run the forward pass and plan, without handing anything back."""
        call = _Call(self.model, self.preset, args, kwargs, ())
        forward = call.run(record=False)
        unknown = Counter(
            forward.graph.name(i) for i, kind in enumerate(forward.graph.types)
            if forward.graph.runs[i] and kind.__name__ not in OPS
        )  # fmt: skip
        made: Plan | None = None
        if not unknown:
            try:
                made = self.plans.get(forward.graph, self.preset)
            except LostActivationError:
                made = self.plans.get(call.run(record=True).graph, self.preset)
        return Report(self.preset, len(forward.graph), sum(forward.graph.runs), dict(unknown), made)


def inspect(model: nn.Module, *args: Any, preset: str | Preset = "attnlrp", **kwargs: Any) -> Report:
    """Which operations a model is made of, which rule each gets, and what the Promise System has to do.

    >>> import torch, dynamiclrp as dlrp
    >>> print(dlrp.inspect(torch.nn.Linear(3, 2), torch.randn(1, 3)).coverage)
    1.0
    """
    return Explainer(model, preset).inspect(*args, **kwargs)


@dataclass(frozen=True)
class Report:
    """What `inspect` found."""

    preset: Preset
    nodes: int
    live: int
    unknown: dict[str, int]
    plan: Plan | None

    @property
    def coverage(self) -> float:
        """Share of the live nodes that have a rule."""
        return 1 - sum(self.unknown.values()) / max(self.live, 1)

    def __str__(self) -> str:
        head = f"{self.nodes} nodes, {self.live} live, coverage {self.coverage:.2%}"
        if self.unknown:
            head += "; without a rule: " + ", ".join(f"{name} x{n}" for name, n in self.unknown.items())
        return head if self.plan is None else f"{head}\n{self.plan}"


# ------------------------------------------------------------------------------------------------- one forward pass


@dataclass(frozen=True, eq=False)
class _Source:
    """One thing to explain: an edge of the graph, its value, and how its relevance is shown."""

    name: str
    edges: tuple[GradientEdge, ...]
    values: tuple[Tensor, ...]
    tokens: torch.Size | None = None  # token ids: sum over the embedding dimension, in the ids' shape


@dataclass(frozen=True, eq=False)
class _Forward:
    """A finished forward pass and its graph."""

    output: Tensor
    graph: Graph
    sources: tuple[_Source, ...]
    layers: tuple[_Source, ...]

    def relevance(self, plan: Plan, seed: Tensor, watch: Callable[..., Any] | None) -> tuple[Tensor, ...]:
        every = (*self.sources, *self.layers)
        edges = [edge for source in every for edge in source.edges]
        values = [value for source in every for value in source.values]
        return run(plan, self.graph, [self.output], [seed], edges, values, watch=watch)

    def attribution(
        self, found: Sequence[Tensor], target: Target, seed: Tensor, plan: Plan, preset: Preset, ledger: Ledger | None
    ) -> Attribution:
        left = iter(found)

        def collect(sources: tuple[_Source, ...]) -> dict[str, Tensor]:
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


class _Call:
    """A model with its arguments, ready to run forward as often as needed. Leaves the model as it was."""

    def __init__(self, model: nn.Module, preset: Preset, args: tuple[Any, ...], kwargs: dict[str, Any], layers: tuple[str, ...]) -> None:
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
        if isinstance(value, Tensor) and value.is_floating_point():
            value = self.floats[name] = value.detach().requires_grad_()
        elif isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32):
            self.integers[name] = value
        return value

    def run(self, record: bool) -> _Forward:
        forward = self._run(record, freeze=True)
        return forward if forward is not None else self._must(self._run(record, freeze=False))

    def _must(self, forward: _Forward | None) -> _Forward:
        if forward is None:
            given = [*self.floats, *self.integers] or ["none"]
            raise NoInputError(
                f"nothing to explain among the tensor arguments ({', '.join(given)}): float tensors are explained "
                "themselves, integer tensors at the embedding lookups they reach, and none of these reaches the output."
            )
        return forward

    def _run(self, record: bool, freeze: bool) -> _Forward | None:
        watched: dict[str, _Source] = {}
        ranges: list[tuple[int, int, str]] = []
        recorder = Recorder() if record else None
        with _gradients(self.model, self.preset, bool(self.integers), freeze), self._watch(watched, ranges):
            with torch.inference_mode(False), torch.enable_grad():
                if recorder is not None:
                    with recorder:
                        raw = self.model(*self.args, **self.kwargs)
                else:
                    raw = self.model(*self.args, **self.kwargs)
                output = unwrap(raw)
            if output.grad_fn is None:
                if freeze and not output.is_inference():
                    return None
                _graph([output], [])  # raises the error that names the cause
            return self._graph(output, watched, ranges, recorder, freeze)

    def _graph(
        self,
        output: Tensor,
        watched: dict[str, _Source],
        ranges: list[tuple[int, int, str]],
        recorder: Recorder | None,
        freeze: bool,
    ) -> _Forward | None:
        whole = _graph([output], [])
        reached = {id(handle) for handle in whole.handles}
        sources = [
            _Source(name, (gradient_edge(x),), (x,))
            for name, x in self.floats.items()
            if id(gradient_edge(x).node) in reached
        ]
        sources += self._lookups(whole)
        if not sources:
            return None
        order = [*python_inspect.signature(self.model.forward).parameters]
        sources.sort(key=lambda source: order.index(source.name) if source.name in order else len(order))
        missing = [name for name in self.layers if name not in watched or id(watched[name].edges[0].node) not in reached]
        if missing:
            raise PresetError(f"layers {missing} did not contribute to the output with a tensor that requires gradients")
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
        return _Forward(output, graph, tuple(sources), layers)

    def _lookups(self, graph: Graph) -> list[_Source]:
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
            sources.append(_Source(name, tuple(edge for edge, _ in pairs), tuple(v for _, v in pairs), shape))
        return sources

    @contextmanager
    def _watch(self, watched: dict[str, _Source], ranges: list[tuple[int, int, str]]) -> Iterator[None]:
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


def _keep_output(name: str, watched: dict[str, _Source]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        tensor = unwrap(output)
        if tensor.requires_grad:
            # a copy, since a later in-place operation may overwrite it
            watched[name] = _Source(name, (gradient_edge(tensor),), (tensor.detach().clone(),))

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
            p.name for p in python_inspect.signature(model.forward).parameters.values()
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


def _warn_training(model: nn.Module) -> None:
    if not model.training:
        return
    noisy = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if module.training
        and ((isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0) or isinstance(module, nn.modules.batchnorm._BatchNorm))
    ]
    if noisy:
        shown = ", ".join(noisy[:4]) + (f" and {len(noisy) - 4} more" if len(noisy) > 4 else "")
        warnings.warn(
            f"the model is in training mode: dropout and batch norm ({shown}) make every prediction, and so its explanation, "
            "different. Call model.eval() first.",
            TrainingModeWarning,
            stacklevel=4,
        )


__all__ = ["Explainer", "NoGraphError", "Report", "explain", "inspect", "plan", "relevance"]

"""One forward pass of a model, made ready for relevance: which inputs, which graph, which modules.

In: a model with its arguments. Out: a `Forward`. Whatever it changes on the model for that time (gradient flags, hooks)
is put back, also after an error. It must not know rules or plans beyond handing them through.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .attribution import Attribution
from .capture import capture, gradient_edge, refuse_nested
from .errors import NoInputError, PresetError, UnsupportedTensorError
from .graph import Graph, Structure
from .ledger import Ledger
from .lookups import Lookup, Tracker, same_memory, same_values, table_lookups
from .ops import OPS
from .outputs import Output, Scores, leading, read
from .parameters import Following, Inventory
from .plan import Plan
from .presets import Preset
from .recorder import Recorder
from .recurrence import primitive_recurrence
from .run import run
from .saved import next_sequence_number, sequence_number
from .scripted import unscripted
from .targets import Seed, Target, batch_of, seed_for


def recording() -> Any:
    """Autograd on, whatever the caller has switched off. To ask costs less than to switch in any case."""
    on = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return nullcontext() if on else torch.inference_mode(False)


def graph_of(outputs: Sequence[Tensor], inputs: Sequence[Tensor | GradientEdge]) -> Graph:
    """Capture with what the table of operations asks for."""
    return capture(outputs, inputs, OPS)


@dataclass(frozen=True, eq=False)
class Explained:
    """One thing to explain: an edge of the graph, its value, and how its relevance is shown."""

    name: str
    edges: tuple[GradientEdge, ...]
    values: tuple[Tensor, ...]
    tokens: torch.Size | None = None  # token ids: sum over the embedding dimension, in the ids' shape
    origins: tuple[Tensor, ...] = ()  # where the elements of each lookup stand among the ids, if not in the same place

    def show(self, relevances: list[Tensor]) -> Tensor:
        """The relevance as the user sees it: of the tensor itself, or one number per token."""
        if self.tokens is None:
            return relevances[0] if len(relevances) == 1 else torch.stack(relevances).sum(0)
        per_token = [relevance.sum(-1) for relevance in relevances]
        if not self.origins:
            return torch.stack([relevance.reshape(self.tokens) for relevance in per_token]).sum(0)
        total = per_token[0].new_zeros(self.tokens.numel() + 1)  # the last one takes what came from nowhere (padding)
        for relevance, origin in zip(per_token, self.origins):
            total.index_add_(0, origin.flatten() % len(total), relevance.flatten())
        return total[:-1].reshape(self.tokens)


@dataclass(frozen=True, eq=False)
class Forward:
    """A finished forward pass and its graph."""

    scores: Scores
    graph: Graph
    sources: tuple[Explained, ...]
    layers: tuple[Explained, ...]
    batch_dim: int | None = None  # where rows stand, as far as it had to be said

    @property
    def output(self) -> Tensor:
        """The tensor that is explained."""
        return self.scores.tensor

    def seed(self, target: Target) -> Seed:
        """What a target asks of the output, if that is the one it speaks of."""
        asked = self.scores.ask(target)
        assert asked is not None
        return seed_for(self.output, asked.target, self.batch_dim)

    def relevance(
        self, plan: Plan, seed: Seed, watch: Callable[..., Any] | None = None, retain_graph: bool = False
    ) -> tuple[Tensor, ...]:
        """Relevance at every edge that is explained."""
        edges, values = self._explained
        return run(
            plan, self.graph, [self.output], [seed], edges, values, watch=watch, retain_graph=retain_graph, ours=True
        )

    def relevances(self, plan: Plan, seeds: Sequence[Seed], retain_graph: bool) -> Iterator[tuple[Tensor, ...]]:
        """The same for several seeds: in one backward pass, if every operation in it can be batched."""
        edges, values = self._explained
        batch = replace(
            seeds[0],
            coefficient=torch.stack([seed.coefficient for seed in seeds]),
            relevance=torch.stack([seed.relevance for seed in seeds]),
        )
        found: tuple[Tensor, ...] | None = None
        if len(seeds) > 1:
            try:
                found = run(plan, self.graph, [self.output], [batch], edges, values, retain_graph=True, batched=True)
            except RuntimeError as error:
                if "vmap" not in str(error) and "atching rule" not in str(error):
                    raise
        if found is not None:
            yield from zip(*found)
            return
        for number, seed in enumerate(seeds):
            yield self.relevance(plan, seed, retain_graph=retain_graph or number < len(seeds) - 1)

    @property
    def _explained(self) -> tuple[list[GradientEdge], list[Tensor]]:
        every = (*self.sources, *self.layers)
        return [e for source in every for e in source.edges], [v for source in every for v in source.values]

    def attribution(
        self,
        found: Sequence[Tensor],
        target: Target,
        seed: Seed,
        plan: Plan,
        preset: Preset,
        ledger: Ledger | None = None,
        notes: tuple[str, ...] = (),
    ) -> Attribution:
        relevances, layers = self.shown(found)
        return Attribution(
            relevances, layers, self.output.detach(), target, seed.relevance, plan, preset, ledger,
            output=self.scores.name, batch_dim=self.batch_dim, notes=notes,
        )  # fmt: skip

    def shown(self, found: Sequence[Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The relevance of inputs and layers by name, as the user sees it."""
        left = iter(found)

        def collect(sources: tuple[Explained, ...]) -> dict[str, Tensor]:
            return {source.name: source.show([next(left) for _ in source.edges]) for source in sources}

        return collect(self.sources), collect(self.layers)


class Call:
    """A model with its arguments. Enter it to run forward, as often as needed, and to hand relevance back; leave it, and
    the model is as it was."""

    def __init__(
        self,
        model: nn.Module,
        preset: Preset,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        layers: tuple[str, ...],
        before: Inventory | None = None,
        output: Output = None,
        batch_dim: int | None = None,
    ) -> None:
        self.model, self.preset, self.layers = model, preset, layers
        self.output, self.batch_dim = output, batch_dim
        self.target: Target = None  # which may say what is explained of all that the model returns
        self.inventory = Inventory(model, before)
        self.named = dict(model.named_modules()) if layers or preset.modules else {}
        unknown = [name for name in layers if name not in self.named]
        if unknown:
            raise PresetError(f"layers {unknown}: no such module. Known: {', '.join(list(self.named)[1:9])}, …")
        self.floats: dict[str, Tensor] = {}
        self.integers: dict[str, Tensor] = {}
        names, self.order = _argument_names(model)
        names = [*names, *(f"argument {i}" for i in range(len(names), len(args)))]
        self.args = tuple(self._take(name, value) for name, value in zip(names, args))
        self.kwargs = {name: self._take(name, value) for name, value in kwargs.items()}
        # one tensor under two names (ids as their own labels) is explained under the name that comes first
        self.integers = {name: self.integers[name] for name in sorted(self.integers, key=self._rank)}
        self.following = Following(self.inventory, preset, bool(self.integers))
        self.copy = False  # learnt: the model writes into its input
        self.eager = False  # learnt: parts of it are compiled, and must run as what they were made from
        self._matched: dict[str, tuple[tuple[int, ...], tuple[Tensor, ...]]] = {}  # learnt: lookups by argument
        self._matched_in: Structure | None = None  # and in which graph

    def _rank(self, name: str) -> int:
        """Where an argument stands in the model's signature."""
        return self.order.index(name) if name in self.order else len(self.order)

    def _take(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            refuse_nested(value, f"argument {name!r}")
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

    def __enter__(self) -> Call:
        self.following.__enter__()
        self._plain = ExitStack()  # until relevance has moved: checkpointed layers run once more
        self._plain.enter_context(unscripted())
        if self.eager:
            self._plain.enter_context(_stance())
        return self

    def __exit__(self, *error: object) -> None:
        self._plain.close()
        self.following.__exit__(*error)

    def run(self, record: bool) -> Forward:
        with recording():
            for freeze, track in ((True, False), (False, False), (False, True)):
                if track and not self.integers:
                    break
                forward = self._ran(record, freeze, track)
                if forward is not None:
                    return forward
            return self._must(None)

    def _ran(self, record: bool, freeze: bool, track: bool) -> Forward | None:
        while True:
            try:
                return self._run(record, freeze, track)
            except RuntimeError as error:
                if not self._learns_from(str(error)):
                    raise

    def _learns_from(self, error: str) -> bool:
        """Is there another way to run the model, which avoids the error?"""
        if not self.copy and "leaf Variable" in error:
            self.copy = True
        elif not self.eager and "CompiledFunction" in error:
            self.eager = True
            self._plain.enter_context(_stance())
        else:
            return False
        return True

    def _must(self, forward: Forward | None) -> Forward:
        if forward is None:
            given = [*self.floats, *self.integers] or ["none"]
            raise NoInputError(
                f"nothing to explain among the tensor arguments ({', '.join(given)}): float tensors are explained "
                "themselves, integer tensors at the embedding lookups they reach, and none of these reaches the output."
            )
        return forward

    def _forward(self) -> Any:
        if not self.copy:
            return self.model(*self.args, **self.kwargs)
        ours = {id(x) for x in self.floats.values()}
        copies = {id(x): x.clone() for x in (*self.args, *self.kwargs.values()) if id(x) in ours}
        args = [copies.get(id(x), x) for x in self.args]
        return self.model(*args, **{name: copies.get(id(x), x) for name, x in self.kwargs.items()})

    def _run(self, record: bool, freeze: bool, track: bool) -> Forward | None:
        watched: dict[str, Explained] = {}
        ranges: list[tuple[int, int, str]] = []
        recorder = Recorder() if record else None
        tracker = Tracker(self.integers) if track else None
        self.following.follow(freeze)
        with self._watch(watched, ranges) if self.layers or self.preset.modules else nullcontext():
            with torch.enable_grad(), primitive_recurrence(self.inventory.modules):
                with recorder or nullcontext(), tracker or nullcontext():
                    raw = self._forward()
                scores = read(raw, self.target, self.output)
            if scores.tensor.grad_fn is None:
                if freeze and not scores.tensor.is_inference():
                    return None
                graph_of([scores.tensor], [])  # raises the error that names the cause
            return self._graph(scores, watched, ranges, recorder, tracker)

    def _graph(
        self,
        scores: Scores,
        watched: dict[str, Explained],
        ranges: list[tuple[int, int, str]],
        recorder: Recorder | None,
        tracker: Tracker | None,
    ) -> Forward | None:
        whole = graph_of([scores.tensor], [])
        edges = [(name, x, gradient_edge(x)) for name, x in self.floats.items()]
        sources = [Explained(name, (edge,), (x,)) for name, x, edge in edges if whole.find(edge.node) is not None]
        sources += self._lookups(whole, tracker)
        if not sources:
            return None
        sources.sort(key=lambda source: self._rank(source.name))
        missing = [
            name for name in self.layers if name not in watched or whole.find(watched[name].edges[0].node) is None
        ]
        if missing:
            raise PresetError(
                f"layers {missing} did not contribute to the output with a tensor that requires gradients"
            )
        layers = tuple(watched[name] for name in self.layers)
        graph = whole.changed(
            inputs=tuple(whole.ref(edge) for source in (*sources, *layers) for edge in source.edges),
            watched=frozenset(whole.ref(edge) for layer in layers for edge in layer.edges),
            modules=_labels(whole, ranges) if self.preset.modules else None,
        )
        if recorder is not None:
            graph = graph.changed(calls=recorder.by_node(graph))
        shapes = ((source.tokens or source.values[0].shape, source.tokens is not None) for source in sources)
        return Forward(scores, graph, tuple(sources), layers, batch_of(scores.tensor, shapes, self.batch_dim))

    def _lookups(self, graph: Graph, tracker: Tracker | None) -> list[Explained]:
        """Embedding lookups by the integer argument whose values they use."""
        if not self.integers:
            return []
        lookups = list(table_lookups(graph))
        if not self._matched or self._matched_in is not graph.structure:
            self._matched, self._matched_in = self._match(lookups, tracker), graph.structure
        found = {lookup.node: lookup for lookup in lookups}
        return [
            Explained(
                name,
                tuple(GradientEdge(graph.handles[node], 0) for node in nodes),
                tuple(found[node].value for node in nodes),
                self.integers[name].shape,
                origins,
            )
            for name, (nodes, origins) in self._matched.items()
        ]

    def _match(
        self, lookups: list[Lookup], tracker: Tracker | None
    ) -> dict[str, tuple[tuple[int, ...], tuple[Tensor, ...]]]:
        """For each integer argument: the nodes that look it up, and where their elements stand in it."""
        matched = {}
        for name, ids in self.integers.items():
            taken = [lookup for lookup in lookups if same_memory(lookup.indices, ids)]
            taken = taken or [lookup for lookup in lookups if same_values(lookup.indices, ids)]
            origins: tuple[Tensor, ...] = ()
            if not taken and tracker is not None:
                entries = [(lookup, tracker.made_from(lookup.indices)) for lookup in lookups]
                made = [(lookup, entry[1]) for lookup, entry in entries if entry is not None and entry[0] == name]
                taken, origins = [lookup for lookup, _ in made], tuple(origin for _, origin in made)
            if taken:
                lookups = [lookup for lookup in lookups if lookup not in taken]
                matched[name] = tuple(lookup.node for lookup in taken), origins
        return matched

    @contextmanager
    def _watch(self, watched: dict[str, Explained], ranges: list[tuple[int, int, str]]) -> Iterator[None]:
        """Module outputs that were asked for, and which nodes were made inside which module."""
        handles = []
        try:
            for name in self.layers:
                handles.append(self.named[name].register_forward_hook(_keep_output(name, watched)))
            if self.preset.modules:
                for name, module in self.named.items():
                    handles += _note_range(name, module, ranges)
            yield
        finally:
            for handle in handles:
                handle.remove()


def _stance() -> Any:
    """Let compiled functions run as the plain ones they were made from. At every call it would cost more than it is worth."""
    return torch.compiler.set_stance("force_eager")


def _keep_output(name: str, watched: dict[str, Explained]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        tensor = leading(output)
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


def _argument_names(model: nn.Module) -> tuple[list[str], list[str]]:
    """The arguments that a model takes by position, and all of them in order."""
    function = getattr(model.forward, "__func__", model.forward)
    try:
        if function not in _names:
            parameters = inspect.signature(model.forward).parameters.values()
            positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            _names[function] = positional, [p.name for p in parameters]
        return _names[function]
    except (TypeError, ValueError):
        return [], []


def takes(model: nn.Module, name: str) -> bool:
    """Has the model an argument of this name?"""
    return name in _argument_names(model)[1]


_names: WeakKeyDictionary[Any, tuple[list[str], list[str]]] = WeakKeyDictionary()  # a memo: signatures are slow

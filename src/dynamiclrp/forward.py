"""One forward pass of a model, made ready for relevance: which inputs, which graph, which modules.

In: a model with its arguments. Out: a `Forward`. Whatever it changes on the model for that time (gradient flags, hooks)
is put back, also after an error. It must not know rules or plans beyond handing them through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .arguments import Arguments
from .attribution import Attribution
from .capture import capture, gradient_edge, plain
from .errors import NoInputError, PresetError
from .graph import Graph
from .ledger import Ledger
from .lookups import Learnt, Lookup, Share, find_lookups
from .ops import OPS
from .origins import Origins, address
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
    shares: tuple[Share, ...] = ()  # of token ids: what each of them takes at each edge

    def show(self, relevances: list[Tensor]) -> Tensor:
        """The relevance as the user sees it: of the tensor itself, or one number per token."""
        shown = [share(relevance) for share, relevance in zip(self.shares, relevances)] or relevances
        return shown[0] if len(shown) == 1 else torch.stack(shown).sum(0)


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
        self.arguments = Arguments(model, args, kwargs)
        self.args, self.kwargs = self.arguments.args, self.arguments.kwargs
        self.learnt = Learnt()
        self.following = Following(self.inventory, preset, bool(self.arguments.integers))
        self.copy = False  # learnt: the model writes into its input
        self.eager = False  # learnt: parts of it are compiled, and must run as what they were made from

    def __enter__(self) -> Call:
        self.following.__enter__()
        self._plain = ExitStack()  # until relevance has moved: checkpointed layers run once more
        self._plain.enter_context(unscripted())
        if self.eager:
            self._plain.enter_context(_stance())
        return self

    def __exit__(self, *error: object) -> None:
        self._plain.close()
        if error[0] is None:
            self.arguments.hand_back()
        self.following.__exit__(*error)

    def run(self, record: bool) -> Forward:
        with recording():
            self.following.tables = self.learnt.tables
            for freeze in (True, False):
                forward = self._ran(record, freeze)
                if forward is not None:
                    return forward
            return self._must(None)

    def _ran(self, record: bool, freeze: bool) -> Forward | None:
        while True:
            follow, tables = self.learnt.follow, len(self.learnt.tables)
            try:
                forward = self._run(record, freeze)
            except RuntimeError as error:
                if not self._learns_from(str(error)):
                    raise
                continue
            if (follow or not self.learnt.follow) and len(self.learnt.tables) == tables:
                return forward

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
            given = [*self.arguments.floats, *self.arguments.integers] or ["none"]
            raise NoInputError(
                f"nothing to explain among the tensor arguments ({', '.join(given)}): float tensors are explained "
                "themselves, integer tensors at the embedding lookups they reach, and none of these reaches the output."
            )
        return forward

    def _run(self, record: bool, freeze: bool) -> Forward | None:
        watched: dict[str, Explained] = {}
        ranges: list[tuple[int, int, str]] = []
        recorder = Recorder() if record else None
        args, kwargs = self.arguments.fresh(self.copy)
        origins = Origins(self.arguments.integers)
        follow = bool(self.arguments.integers) and self.learnt.follow
        self.following.follow(freeze)
        with self._watch(watched, ranges) if self.layers or self.preset.modules else nullcontext():
            with torch.enable_grad(), primitive_recurrence(self.inventory.modules):
                with recorder or nullcontext(), origins if follow else nullcontext():
                    raw = self.model(*args, **kwargs)
                scores = read(raw, self.target, self.output)
                scores = replace(scores, tensor=plain(scores.tensor))
            if follow and freeze:
                self._learn_tables(origins)
            if scores.tensor.grad_fn is None:
                if freeze and not scores.tensor.is_inference():
                    return None
                graph_of([scores.tensor], [])  # raises the error that names the cause
            return self._graph(scores, watched, ranges, recorder, origins, follow)

    def _learn_tables(self, origins: Origins) -> None:
        """Weights of linear maps (tied embeddings), vectors and buffers may be tables too: they are followed then."""
        held = [*self.inventory.parameters, *self.inventory.buffers()]
        self.learnt.tables |= {id(x) for x in held if x is not None and address(x) in origins.frozen}

    def _graph(
        self,
        scores: Scores,
        watched: dict[str, Explained],
        ranges: list[tuple[int, int, str]],
        recorder: Recorder | None,
        origins: Origins,
        followed: bool,
    ) -> Forward | None:
        whole = graph_of([scores.tensor], [])
        edges = [(name, plain(x), gradient_edge(x)) for name, x in self.arguments.floats.items()]
        sources = [Explained(name, (edge,), (x,)) for name, x, edge in edges if whole.find(edge.node) is not None]
        if self.arguments.integers:
            ends = [whole.ref(edge)[0] for source in sources for edge in source.edges]
            lookups = find_lookups(whole, origins, self.arguments.integers, self.learnt, ends, followed)
            if lookups is None:
                self.learnt.follow = True
                return None
            sources += _by_argument(lookups, whole)
        if not sources:
            return None
        sources.sort(key=lambda source: self.arguments.rank(source.name))
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
        shapes = ((s.shares[0].shape, True) if s.shares else (s.values[0].shape, False) for s in sources)
        return Forward(scores, graph, tuple(sources), layers, batch_of(scores.tensor, shapes, self.batch_dim))

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


def _by_argument(lookups: Sequence[Lookup], graph: Graph) -> list[Explained]:
    names = dict.fromkeys(lookup.name for lookup in lookups)
    each = [(name, [lookup for lookup in lookups if lookup.name == name]) for name in names]
    return [
        Explained(
            name,
            tuple(GradientEdge(graph.handles[lookup.node], 0) for lookup in own),
            tuple(lookup.value for lookup in own),
            tuple(lookup.share for lookup in own),
        )
        for name, own in each
    ]


def _stance() -> Any:
    """Let compiled functions run as the plain ones they were made from. At every call it would cost more than it is worth."""
    return torch.compiler.set_stance("force_eager")


def _keep_output(name: str, watched: dict[str, Explained]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        tensor = leading(output)
        if tensor.requires_grad:
            # a copy, since a later in-place operation may overwrite it
            watched[name] = Explained(name, (gradient_edge(tensor),), (plain(tensor.detach().clone()),))

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

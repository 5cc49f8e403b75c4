"""`Explainer`: explanations of one model, with what is worth keeping between them.

In: a model, a preset, arguments and targets. Out: `Attribution`s. The stages stand in their own files; here is their order,
what to do when one of them says no, and the caches.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from .arguments import takes
from .attribution import Attribution
from .cuda_graph import Captured, copies_of, key_of
from .errors import LostActivationError, NonFiniteError, OpaqueGraphError, TrainingModeWarning
from .finite import Numbers
from .forward import Call, Forward, recording
from .graph import Graph
from .ledger import Ledger, Locator
from .lookups import Learnt
from .maps import misfits
from .ops import OPS
from .outputs import Output, unwrap
from .parameters import Inventory
from .plan import Plan
from .planning import make_plan, missing_ops
from .presets import Preset
from .presets import preset as find_preset
from .saved import is_half, leaf_id
from .targets import Target, plain
from .verdict import caller, noted, sound

_PLANS = 64
_CAPTURES = 8


class Plans:
    """Plans by preset and graph signature, the oldest dropped first."""

    def __init__(self, size: int = _PLANS) -> None:
        self.size = size
        self._plans: OrderedDict[Any, Plan] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, graph: Graph, preset: Preset, everything: bool = False, on_missing: str = "error") -> Plan:
        rows = frozenset(id(OPS.get(kind.__name__)) for kind in graph.structure.nodes)  # a row may be replaced
        key = (preset, everything, on_missing, rows, graph.signature)
        with self._lock:
            plan = self._find(key, graph)
            coarse = any(is_half(graph.handles[node]) for node in plan.differences)
            apart = misfits(graph, plan.parts)
            return self._find(key, graph, coarse, apart) if coarse or apart else plan

    def _find(
        self, key: tuple[Any, ...], graph: Graph, coarse: bool = False, apart: frozenset[int] = frozenset()
    ) -> Plan:
        """The plan for what a signature does not say: half types, and maps whose part is none in the shapes at hand."""
        plan = self._plans.get((coarse, apart, key))
        if plan is None:
            preset, everything, on_missing, *_ = key
            plan = make_plan(graph, preset, everything=everything, on_missing=on_missing, coarse=coarse, apart=apart)
            self._plans[coarse, apart, key] = plan
            while len(self._plans) > self.size:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end((coarse, apart, key))
        return plan

    def __len__(self) -> int:
        return len(self._plans)


class Explainer:
    """`explain` for many inputs: keeps plans between calls.

    `cuda_graph=True` captures forward pass and relevance once per shape of the arguments and replays them from then on,
    with the same numbers and without Python's cost; `captures` tells what is kept. Tensors must be on the GPU then.

    >>> import torch, dynamiclrp as dlrp
    >>> e = dlrp.Explainer(torch.nn.Linear(3, 2), preset="epsilon")
    >>> e(torch.randn(4, 3), target=[0, 1, 0, 1]).relevance.shape
    torch.Size([4, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        preset: str | Preset = "default",
        *,
        on_missing: str = "error",
        cuda_graph: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model: expected a torch.nn.Module, got {type(model).__name__}; use dynamiclrp.relevance for functions"
            )
        if isinstance(model, torch.jit.ScriptModule):
            raise OpaqueGraphError(
                "the model is scripted, which hides its operations. Remedy: explain the plain module."
            )
        # a compiled model is explained as what it was made from
        self.model: nn.Module = getattr(model, "_orig_mod", model)
        self.preset = find_preset(preset)
        self.on_missing = one_of(on_missing)
        self.cuda_graph = cuda_graph
        self.plans = Plans()
        self._captures: OrderedDict[Any, Captured] = OrderedDict()
        self._lock = threading.Lock()
        self._inventory: Inventory | None = None  # of the last call
        self._read: frozenset[int] | None = None  # learnt: the parameters that plans read, by id; None: any
        self._learning = True
        self._record = False  # learnt: this model's constants must be recorded
        self._weights = False  # learnt: and its weights followed
        self._eager = False  # learnt: parts of it are compiled
        self._lookups = Learnt()  # learnt: where token ids end

    def __call__(
        self,
        *args: Any,
        target: Target = None,
        layers: Sequence[str] = (),
        ledger: bool = False,
        output: Output = None,
        batch_dim: int | None = None,
        **kwargs: Any,
    ) -> Attribution:
        """Explain one target; see `dynamiclrp.explain`."""
        target = plain(target)
        with recording():
            if self.cuda_graph and not ledger:  # a ledger reads numbers on the way
                return self._replayed(args, kwargs, target, layers, output, batch_dim)
            return self._explain(self.call(args, kwargs, layers, output, batch_dim), target, ledger)

    def _explain(self, call: Call, target: Target, ledger: bool) -> Attribution:
        warn_training(self.model, call.inventory.training)
        call.target = target
        with call:
            forward, plan = self.forward(call, ledger)
            seed = forward.seed(target)
            book = Ledger(forward.graph, plan) if ledger else None
            found = forward.relevance(plan, seed, watch=book.watch if book else None)
            if not sound([seed], found):
                raise self._not_finite(call, target)
        if book is not None:
            inputs = sum(len(source.edges) for source in forward.sources)
            once = dict(zip(forward.graph.inputs[:inputs], found))  # two inputs may share what was looked up for both
            book.close(seed.relevance, list(once.values()))
        return forward.attribution(found, target, seed, plan, self.preset, book, noted(plan, seed))

    def call(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        layers: Sequence[str] = (),
        output: Output = None,
        batch_dim: int | None = None,
    ) -> Call:
        """The model with these arguments, and what was learnt about it."""
        if output is not None and output is not unwrap and takes(self.model, "output"):  # then the word is the model's
            kwargs, output = {**kwargs, "output": output}, None
        call = Call(
            self.model,
            self.preset,
            tuple(args),
            kwargs,
            tuple(layers),
            self._inventory,
            output=output,
            batch_dim=batch_dim,
        )
        self._inventory = call.inventory
        call.following.only, call.following.weights = self._read, self._weights
        call.eager, call.learnt = self._eager, self._lookups
        return call

    def each(
        self,
        *args: Any,
        targets: Sequence[Target],
        at_once: int = 8,
        layers: Sequence[str] = (),
        output: Output = None,
        batch_dim: int | None = None,
        **kwargs: Any,
    ) -> Iterator[Attribution]:
        """One attribution for each target, from one forward pass for each output that they speak of; `at_once` targets share a
        backward pass.

        >>> import torch, dynamiclrp as dlrp
        >>> e = dlrp.Explainer(torch.nn.Linear(3, 5))
        >>> [round(float(a.score), 4) == round(float(a.prediction[0, a.target]), 4) for a in e.each(torch.ones(1, 3), targets=[0, 4])]
        [True, True]
        """
        left = [plain(target) for target in targets]
        if at_once < 1:
            raise ValueError(f"at_once={at_once}: expected at least 1")
        with recording():
            if not left:
                return
            if self.cuda_graph:
                owner = object()  # of the values: they are predicted once
                for target in left:
                    yield self._replayed(args, kwargs, target, layers, output, batch_dim, owner, many=len(left) > 1)
                return
            call = self.call(args, kwargs, layers, output, batch_dim)
            warn_training(self.model, call.inventory.training)
            while left:
                call.target = left[0]
                with call:
                    forward, plan = self.forward(call)
                same = list(takewhile(forward.scores.ask, left))
                yield from self._together(call, forward, plan, same, at_once)
                left = left[len(same) :]

    def _together(
        self, call: Call, forward: Forward, plan: Plan, targets: list[Target], at_once: int
    ) -> Iterator[Attribution]:
        """The attributions of targets that speak of one output."""
        for start in range(0, len(targets), at_once):
            chosen = targets[start : start + at_once]
            with call:
                seeds = [forward.seed(target) for target in chosen]
                found = list(forward.relevances(plan, seeds, retain_graph=start + at_once < len(targets)))
            for target, seed, relevance in zip(chosen, seeds, found):
                if not sound([seed], relevance):
                    call.target = target
                    raise self._not_finite(call, target)
                yield forward.attribution(relevance, target, seed, plan, self.preset, notes=noted(plan, seed))

    def forward(self, call: Call, ledger: bool = False) -> tuple[Forward, Plan]:
        """A forward pass and its plan; where the plan lacks values, once more with parameters followed, then recorded, then
        with weights followed as well."""
        following, record = call.following, self._record or ledger  # a ledger needs every value
        if ledger:
            following.only = None
        while True:
            forward = call.run(record)
            self._eager = call.eager
            try:
                plan = self.plans.get(forward.graph, self.preset, ledger, self.on_missing)
                if following.only is None or not plan.needs_parameters:
                    if self._learning and not (ledger or plan.needs_parameters):  # next time follow no others
                        self._read = frozenset(leaf_id(forward.graph.handles[node]) for node in plan.leaves)
                    self._learning = self._learning and ledger
                    return forward, plan
            except LostActivationError:
                if following.weights:
                    raise
                following.weights = self._weights = following.only is None and record
                record = self._record = following.only is None or record
            following.only = self._read = None

    def _not_finite(self, call: Call, target: Target) -> NonFiniteError:
        """Run again, watching, to name where it began: in the forward pass, or else in the relevance."""
        with call:
            with Numbers(self.model, call.arguments.floats) as numbers:
                again, plan = self.forward(call)
            begun = numbers.origin(again.graph)
            if begun is not None:
                return NonFiniteError(f"the output that is explained is not finite: {begun}")
            locator = Locator(again.graph)
            again.relevance(plan, again.seed(target), watch=locator.watch)
        return NonFiniteError(f"relevance is not finite under {self.preset!r}: {locator}")

    @property
    def captures(self) -> tuple[Captured, ...]:
        """What is kept as CUDA graphs, newest last; each prints its shapes and its memory."""
        return tuple(self._captures.values())

    def _replayed(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Target,
        layers: Sequence[str],
        output: Output,
        batch_dim: int | None,
        owner: object = None,
        many: bool = False,
    ) -> Attribution:
        """One explanation by a CUDA graph. Whatever can wait comes after its launch: the GPU works meanwhile."""
        key, owner = (*key_of(args, kwargs, layers, many), output, batch_dim), owner or object()

        def capture() -> Captured:
            call = self.call(*copies_of(args, kwargs), layers, output, batch_dim)
            call.target = target
            made = self._captures[key] = Captured(self, call, many=many)
            while len(self._captures) > _CAPTURES:
                self._captures.popitem(last=False)
            return made

        with self._lock:
            captured = self._captures.get(key) or capture()
            if not captured.speaks_of(target):
                captured = capture()
            fresh, seed = captured.launch(target, owner, args, kwargs)
            self._captures.move_to_end(key)
            if fresh:
                inventory = Inventory(self.model)
                warn_training(self.model, inventory.training)
                if not captured.fits(inventory):
                    captured = capture()
                    _, seed = captured.launch(target, owner, args, kwargs)
            found = captured.finish(target, seed)
        if found is None:
            call = self.call(args, kwargs, layers, output, batch_dim)
            call.target = target
            raise self._not_finite(call, target)
        return found

    def inspect(self, *args: Any, output: Output = None, **kwargs: Any) -> Report:
        """Run the forward pass and plan, without handing anything back."""
        with self.call(args, kwargs, output=output) as call:
            forward = call.run(record=False)
            unknown = missing_ops(forward.graph)
            made: Plan | None = None
            if not unknown:
                forward, made = self.forward(call)
        return Report(self.preset, len(forward.graph), sum(forward.graph.runs), dict(unknown), made)


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


def one_of(on_missing: str) -> str:
    """Check `on_missing`."""
    if on_missing not in ("error", "gradient"):
        raise ValueError(f"on_missing={on_missing!r}: expected 'error' or 'gradient'")
    return on_missing


def warn_training(model: nn.Module, training: Sequence[nn.Module]) -> None:
    """Warn of modules in training mode that make every prediction different."""

    def is_noisy(module: nn.Module) -> bool:
        drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        return module.training and (drops or isinstance(module, nn.modules.batchnorm._BatchNorm))

    if not any(is_noisy(module) for module in training):
        return
    noisy = [name or type(module).__name__ for name, module in model.named_modules() if is_noisy(module)]
    shown = ", ".join(noisy[:4]) + (f" and {len(noisy) - 4} more" if len(noisy) > 4 else "")
    warnings.warn(
        f"the model is in training mode: dropout and batch norm ({shown}) make every prediction, and so its explanation, "
        "different. Call model.eval() first.",
        TrainingModeWarning,
        stacklevel=caller(),
    )

"""The user's verbs: `relevance` on a graph, `explain` and `Explainer` on a model, `inspect` to look without running."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .attribution import Attribution
from .capture import gradient_edge
from .errors import LostActivationError, NonFiniteError, OpaqueGraphError, TrainingModeWarning
from .forward import Call, graph_of
from .graph import Graph
from .ledger import Ledger, Locator
from .ops import OPS
from .plan import Plan, make_plan, missing_ops
from .presets import Preset
from .presets import preset as find_preset
from .run import check_tensors, run
from .targets import Target, check_seed, seed_for

_CACHE_SIZE = 64


class Plans:
    """Plans by preset and graph signature, the oldest dropped first."""

    def __init__(self, size: int = _CACHE_SIZE) -> None:
        self.size = size
        self._plans: OrderedDict[Any, Plan] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, graph: Graph, preset: Preset, everything: bool = False, on_missing: str = "error") -> Plan:
        rows = frozenset(id(OPS.get(kind.__name__)) for kind in set(graph.types))  # a row may be replaced
        key = (preset, everything, on_missing, rows, graph.signature)
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                plan = self._plans[key] = make_plan(graph, preset, everything=everything, on_missing=on_missing)
                while len(self._plans) > self.size:
                    self._plans.popitem(last=False)
            else:
                self._plans.move_to_end(key)
            return plan

    def __len__(self) -> int:
        return len(self._plans)


_plans = Plans()


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
    on_missing: str = "error",
) -> tuple[Tensor, ...]:
    """Relevance of `inputs` for `outputs`, as `torch.autograd.grad` gives gradients.

    `seed` is the relevance at the outputs; by default the largest logit of each row keeps its own value. An operation
    without a rule is an error, unless `on_missing="gradient"` lets it keep its own backward.

    >>> import torch, dynamiclrp as dlrp
    >>> x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    >>> dlrp.relevance(x @ torch.tensor([[3.0], [-1.0]]), x)
    (tensor([[ 3., -2.]]),)
    """
    outs, ins = _sequence(outputs, "outputs"), _sequence(inputs, "inputs")
    check_tensors(outs, ins)
    graph = graph_of(outs, ins)
    given = [seed] * len(outs) if seed is None or isinstance(seed, Tensor) else list(seed)
    if len(given) != len(outs):
        raise ValueError(f"{len(given)} seeds for {len(outs)} outputs: expected one each")
    seeds = [seed_for(out, None) if s is None else check_seed(s, out) for s, out in zip(given, outs)]
    plan = _plans.get(graph, find_preset(preset), on_missing=_choice(on_missing))
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
    return _plans.get(graph_of(_sequence(outputs, "outputs"), _sequence(inputs, "inputs")), find_preset(preset))


def explain(
    model: nn.Module,
    *args: Any,
    target: Target = None,
    preset: str | Preset = "attnlrp",
    layers: Sequence[str] = (),
    ledger: bool = False,
    on_missing: str = "error",
    **kwargs: Any,
) -> Attribution:
    """Run the model and say what its prediction stands on.

    Float tensors among the arguments are explained themselves, integer tensors at the embedding lookups they reach.
    `target`: an int, one int per row, a tuple of indices, a callable on the output, a seed tensor, or None for the
    largest logit. `layers` names modules whose outputs are explained too (the last one, if a module
    runs several times). `ledger=True` accounts for all relevance.
    `on_missing="gradient"` lets operations without a rule keep their own backward; the plan then names them.

    >>> import torch, dynamiclrp as dlrp
    >>> a = dlrp.explain(torch.nn.Linear(3, 2), torch.randn(1, 3), target=1)
    >>> a.relevance.shape
    torch.Size([1, 3])
    """
    return Explainer(model, preset, on_missing=on_missing)._explain(args, kwargs, target, layers, ledger)


class Explainer:
    """`explain` for many inputs: keeps plans between calls.

    >>> import torch, dynamiclrp as dlrp
    >>> e = dlrp.Explainer(torch.nn.Linear(3, 2), preset="epsilon")
    >>> e(torch.randn(4, 3), target=[0, 1, 0, 1]).relevance.shape
    torch.Size([4, 3])
    """

    def __init__(self, model: nn.Module, preset: str | Preset = "attnlrp", *, on_missing: str = "error") -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model: expected a torch.nn.Module, got {type(model).__name__}; use dynamiclrp.relevance for functions"
            )
        if isinstance(model, torch.jit.ScriptModule):
            raise OpaqueGraphError(
                "the model is scripted, which hides its operations. Remedy: explain the plain module."
            )
        if getattr(model, "_orig_mod", None) is not None:
            raise OpaqueGraphError(
                "the model is compiled, which hides its operations. Remedy: explain model._orig_mod."
            )
        self.model = model
        self.preset = find_preset(preset)
        self.on_missing = _choice(on_missing)
        self.plans = Plans()
        self._record = False  # learnt: this model's constants must be recorded

    def __call__(
        self, *args: Any, target: Target = None, layers: Sequence[str] = (), ledger: bool = False, **kwargs: Any
    ) -> Attribution:
        return self._explain(args, kwargs, target, layers, ledger)

    def _explain(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Target, layers: Sequence[str], ledger: bool
    ) -> Attribution:
        _warn_training(self.model)
        with torch.inference_mode(False):
            return self._explained(args, kwargs, target, layers, ledger)

    def _explained(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Target, layers: Sequence[str], ledger: bool
    ) -> Attribution:
        call = Call(self.model, self.preset, args, kwargs, tuple(layers))
        record = self._record or ledger  # a ledger needs every value
        forward = call.run(record)
        try:
            plan = self.plans.get(forward.graph, self.preset, ledger, self.on_missing)
        except LostActivationError:
            if record:
                raise
            record = self._record = True
            forward = call.run(record)
            plan = self.plans.get(forward.graph, self.preset, ledger, self.on_missing)
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
        call = Call(self.model, self.preset, args, kwargs, ())
        forward = call.run(record=False)
        unknown = missing_ops(forward.graph)
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


def _choice(on_missing: str) -> str:
    if on_missing not in ("error", "gradient"):
        raise ValueError(f"on_missing={on_missing!r}: expected 'error' or 'gradient'")
    return on_missing


def _warn_training(model: nn.Module) -> None:
    noisy = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if module.training
        and (
            (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0)
            or isinstance(module, nn.modules.batchnorm._BatchNorm)
        )
    ]
    if noisy:
        shown = ", ".join(noisy[:4]) + (f" and {len(noisy) - 4} more" if len(noisy) > 4 else "")
        warnings.warn(
            f"the model is in training mode: dropout and batch norm ({shown}) make every prediction, and so its explanation, "
            "different. Call model.eval() first.",
            TrainingModeWarning,
            stacklevel=4,
        )

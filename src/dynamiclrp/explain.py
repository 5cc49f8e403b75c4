"""The user's verbs: `relevance` on a graph, `explain` on a model, `inspect` to look without running."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from torch import Tensor, nn

from .attribution import Attribution
from .capture import gradient_edge
from .errors import NonFiniteError
from .explainer import Explainer, Plans, Report, one_of
from .forward import graph_of
from .ledger import Locator
from .outputs import Output
from .plan import Plan
from .presets import Preset
from .presets import preset as find_preset
from .run import check_tensors, run
from .targets import Target, batch_of, given_seed, seed_for
from .verdict import sound

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
    preset: str | Preset = "default",
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
    rows = [(x.shape, False) for x in ins]
    seeds = [
        seed_for(out, None, batch_of(out, rows)) if s is None else given_seed(s, out) for s, out in zip(given, outs)
    ]
    plan = _plans.get(graph, find_preset(preset), on_missing=one_of(on_missing))
    edges = [gradient_edge(x) for x in ins]
    found = run(plan, graph, outs, seeds, edges, ins, retain_graph=retain_graph)
    if not sound(seeds, found):
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
    outputs: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor], *, preset: str | Preset = "default"
) -> Plan:
    """The plan that `relevance` would follow; `print` it to see rules and promises."""
    return _plans.get(graph_of(_sequence(outputs, "outputs"), _sequence(inputs, "inputs")), find_preset(preset))


@overload
def explain(
    model: nn.Module,
    *args: Any,
    target: Target = ...,
    targets: None = ...,
    preset: str | Preset = ...,
    layers: Sequence[str] = ...,
    ledger: bool = ...,
    on_missing: str = ...,
    output: Output = ...,
    batch_dim: int | None = ...,
    **kwargs: Any,
) -> Attribution: ...


@overload
def explain(
    model: nn.Module,
    *args: Any,
    targets: Sequence[Target],
    preset: str | Preset = ...,
    layers: Sequence[str] = ...,
    on_missing: str = ...,
    output: Output = ...,
    batch_dim: int | None = ...,
    **kwargs: Any,
) -> list[Attribution]: ...


def explain(
    model: nn.Module,
    *args: Any,
    target: Target = None,
    targets: Sequence[Target] | None = None,
    preset: str | Preset = "default",
    layers: Sequence[str] = (),
    ledger: bool = False,
    on_missing: str = "error",
    output: Output = None,
    batch_dim: int | None = None,
    **kwargs: Any,
) -> Attribution | list[Attribution]:
    """Run the model and say what its prediction stands on.

    Float tensors among the arguments are explained themselves, integer tensors at the lookups in tables that they reach; those
    in lists, dicts and caches under names such as `more.z` and `past[0]`.
    `target`: an int, one int per row, a tuple of indices, a callable on what the model returned, a seed tensor, or None for
    the largest logit. `targets` takes several of them and gives a list, from one forward pass.
    `output`: where the model returns several tensors, which of them: a name, an index, or a function of what it returned;
    a callable target then gets that tensor. `target=("sex", 1)` says both. (A model's own argument `output` comes first.)
    `batch_dim`: the dimension of rows in inputs and outputs, where that is not the first.
    `layers` names modules whose outputs are explained too (the last one, if a module runs several times).
    `ledger=True` accounts for all relevance.
    `on_missing="gradient"` lets operations without a rule keep their own backward; plan and `a.notes` then name them.

    >>> import torch, dynamiclrp as dlrp
    >>> a = dlrp.explain(torch.nn.Linear(3, 2), torch.randn(1, 3), target=1)
    >>> a.relevance.shape
    torch.Size([1, 3])
    >>> len(dlrp.explain(torch.nn.Linear(3, 2), torch.randn(1, 3), targets=[0, 1]))
    2
    """
    explainer = Explainer(model, preset, on_missing=on_missing)
    kwargs |= {"output": output, "batch_dim": batch_dim}
    if targets is None:
        return explainer(*args, target=target, layers=layers, ledger=ledger, **kwargs)
    if target is not None or ledger:
        raise ValueError("targets: expected alone; leave out target=, and ask for a ledger of one target at a time")
    return list(explainer.each(*args, targets=targets, layers=layers, **kwargs))


def inspect(model: nn.Module, *args: Any, preset: str | Preset = "default", **kwargs: Any) -> Report:
    """Which operations a model is made of, which rule each gets, and what the Promise System has to do.

    `output` says which of several outputs, as for `explain`.

    >>> import torch, dynamiclrp as dlrp
    >>> print(dlrp.inspect(torch.nn.Linear(3, 2), torch.randn(1, 3)).coverage)
    1.0
    """
    return Explainer(model, preset).inspect(*args, **kwargs)

"""Plan + graph → relevance: hooks on, one `torch.autograd.grad`, hooks off.

Autograd's engine does the traversal: pending counts, aggregation, devices, streams, pruning to the inputs. Concerns that
every rule shares stand here once: missing gradients, dtypes, s against R, fetching and releasing values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .capture import refuse_nested
from .errors import UnsupportedTensorError
from .fused import fused
from .graph import Graph
from .here import Here
from .pages import keep_pages
from .plan import Plan
from .rules.base import Grads, Hook, Hooks, divide, like
from .saved import read_error
from .step import Step
from .targets import Seed
from .values import Values


def run(
    plan: Plan,
    graph: Graph,
    outputs: Sequence[Tensor],
    seeds: Sequence[Seed],
    edges: Sequence[GradientEdge],
    inputs: Sequence[Tensor],
    *,
    retain_graph: bool = False,
    batched: bool = False,
    ours: bool = False,
    watch: Callable[[Step, Any, Values], tuple[Any, Any]] | None = None,
) -> tuple[Tensor, ...]:
    """Relevance of the inputs. `watch` gives hooks that look on (the ledger).

    `batched`: the seeds have one more dimension in front, and so has what is found.
    `ours`: nobody else will use the graph, or look at what it saved.
    """
    handles: list[Any] = []
    try:
        with torch.no_grad(), _without_autocast(outputs[0].device.type):
            starts = [
                seed.relevance if form == "R" else seed.coefficient for seed, form in zip(seeds, plan.output_forms)
            ]
            values = Values(plan, graph, outputs, keep=watch is not None, batched=batched)
            device = outputs[0].device.type
            if device == "cpu":
                keep_pages()
            for node in values.regions:  # read before its own backward frees it
                handles.append(graph.handles[node].register_prehook(_turn(values.saved, node)))
            ours = ours and not retain_graph and watch is None
            for node, parts in plan.parted if watch is None else ():
                handle = graph.handles[node].register_prehook(_dividing(parts))
                if not ours:  # it holds nothing, and goes with the graph
                    handles.append(handle)
            for step in plan.steps if watch is not None else plan.hooked:
                if ours and step.blanks and values.blank(step.node, step.blanks):
                    continue
                if ours and step.alike:
                    values.open(step.node, step.weight)
                if step.rule.device in (None, device) or step.convert or step.multiply or watch is not None:
                    _attach(step, graph, values, handles, watch)
            for node in values.regions:  # and let go after the rules
                handles.append(graph.handles[node].register_hook(_turn(values.had_its_turn, node)))
            with torch.autograd.set_multithreading_enabled(False):  # hooks are Python: in its own thread it is warm
                found = torch.autograd.grad(
                    outputs, edges, starts, retain_graph=retain_graph, allow_unused=True, is_grads_batched=batched
                )
            return tuple(
                torch.zeros_like(x).expand((*starts[0].shape[:batched], *x.shape))
                if g is None
                else g.to(x.dtype)
                if form == "R"
                else x.detach() * g
                for g, x, form in zip(found, inputs, plan.input_forms)
            )
    except RuntimeError as error:
        if "second time" in str(error):
            raise read_error(error, "a node", "its values") from None
        raise
    finally:
        for handle in handles:
            handle.remove()


def _without_autocast(device: str) -> Any:
    """Hooks inherit autocast; rules choose their dtypes themselves."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _attach(step: Step, graph: Graph, values: Values, handles: list[Any], watch: Any) -> None:
    node = graph.handles[step.node]
    before, after = _hooks(step, values)
    arriving, leaving = watch(step, node, values) if watch is not None else (None, None)
    if arriving is not None:
        handles.append(node.register_prehook(arriving))
    if before is not None:
        # with a batch norm folded in, the rule begins above it, and the norm's own backward multiplies by its scale
        top = node if step.fold is None else graph.handles[step.fold]
        handles.append(top.register_prehook(before))
    if after is not None:
        handles.append(node.register_hook(after))
    if leaving is not None:
        handles.append(node.register_hook(leaving))


def _turn(what: Callable[[int], Any], node: int) -> Hook:
    """A hook that changes nothing."""

    def hook(*grads: Any) -> None:
        what(node)

    return hook


def _hooks(step: Step, values: Values) -> Hooks:
    """Hooks before and after the native backward. What a rule fetched is let go after the last of them."""
    first, last = step.hooks
    if not (first or last):
        return None, None
    if step.direct is not None and not values.batched:
        return None, _direct(step.node, step.direct, values)
    if step.scales is not None and not values.batched:
        return None, _scaling(step.scales)
    if step.divides != 1:  # under the eyes of a ledger; otherwise `plan.parted`
        return _dividing(step.divides), None
    if values.is_open(step.node) and not step.multiply and step.bias not in step.live:
        last = False  # the native backward does it
    before, after = (_later if values.regions else _now)(step, values, last)
    return before if first else None, after if last else None


def _now(step: Step, values: Values, last: bool) -> Hooks:
    here = Here(step, values).fetch()
    return (step.rule.short(here) if step.short else None) or _at_length(step, here, last)


def _later(step: Step, values: Values, last: bool) -> Hooks:
    """In a checkpointed region: all of it when it is the node's turn."""
    made: list[Hooks] = []

    def before(grads: tuple[Tensor | None, ...]) -> Any:
        if grads[0] is None:
            return None
        made.append(_now(step, values, last))
        hook = made[0][0]
        return hook and hook(grads)

    def after(grads: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> Any:
        if incoming[0] is None:
            return None
        _, hook = made.pop() if made else _now(step, values, last)
        return hook and hook(grads, incoming)

    return before, after


def _at_length(step: Step, here: Here, last: bool) -> Hooks:
    rule, convert, multiply, (edits_before, edits_after) = step.rule, step.convert, step.multiply, step.edits
    held = [here]  # from here to `before` and on to `after`

    def before(grads: tuple[Tensor | None, ...]) -> Any:
        given = grads[0]
        if given is None:
            return None
        here = held[0] if last else held.pop()
        s = divide(given, here.output) if convert else given
        if edits_before:
            s = rule.before(here, s)
        return (like(s, given), *grads[1:])

    def after(grads: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> Any:
        s = incoming[0]
        if s is None:
            return None
        here = held.pop()
        made: Grads = rule.after(here, list(grads), s) if edits_after else list(grads)
        for position in multiply:
            g = made[position]
            if g is not None:
                made[position] = g * here.operand(position)
        return tuple([g if g is native else like(g, native) for g, native in zip(made, grads)])

    return before, after


def _direct(node: int, direct: Callable[[Any, Tensor], Tensor], values: Values) -> Hook:
    def after(grads: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> Any:
        s, native = incoming[0], grads[0]
        if s is None or native is None:
            return None
        made = direct(values.saved(node), s)
        return (made if made.dtype == native.dtype else made.to(native.dtype), *grads[1:])

    return after


@cache
def _scaling(factors: tuple[tuple[int, float], ...]) -> Hook:
    """Multiply what the native backward made, which nobody else reads. A factor of 0 leaves nothing."""
    kept = {i: factor for i, factor in factors if factor}
    blocked = {i for i, factor in factors if not factor}
    places, by = list(kept), list(kept.values())
    numbers: dict[str, Any] = dict(zip(("of_a", "of_b", "of_c"), by))

    def after(grads: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> Any:
        if incoming[0] is None:
            return None
        made: Any = [grads[i] for i in places]
        alike = len(made) == 3 and made[0].shape == made[1].shape == made[2].shape
        # torch's kernel for several tensors takes three times as long where they are small
        scaled = fused("parts", *made, **numbers) if alike else None
        if scaled is not None:
            found = dict(zip(places, scaled))
            return tuple([found.get(i, None if i in blocked else g) for i, g in enumerate(grads)])
        if len(made) == 1:
            made[0].mul_(by[0])
        else:
            torch._foreach_mul_(made, by)
        return tuple([None if i in blocked else g for i, g in enumerate(grads)]) if blocked else None

    return after


@cache
def _dividing(by: int) -> Hook:
    # torch would make such a tensor of a number each time; it does not change the dtype of what has a dimension
    parts = torch.tensor(float(by), dtype=torch.float64, device="cpu")

    def before(grads: tuple[Tensor | None, ...]) -> Any:
        s = grads[0]
        return None if s is None else (s / (parts if s.dim() else by), *grads[1:])

    return before


def check_tensors(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Refuse what no rule can take."""
    for role, tensors in (("output", outputs), ("input", inputs)):
        for number, tensor in enumerate(tensors):
            refuse_nested(tensor, f"{role} {number}")
            if tensor.layout != torch.strided:
                raise UnsupportedTensorError(
                    f"{role} {number} is sparse ({tensor.layout}): expected a dense tensor; call .to_dense()"
                )
            if tensor.is_complex():
                raise UnsupportedTensorError(
                    f"{role} {number} is complex ({tensor.dtype}): relevance is real; take torch.view_as_real or the magnitude"
                )

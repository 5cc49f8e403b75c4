"""Plan + graph → relevance: hooks on, one `torch.autograd.grad`, hooks off.

Autograd's engine does the traversal: pending counts, aggregation, devices, streams, pruning to the inputs. Concerns that
every rule shares stand here once: missing gradients, dtypes, s against R, fetching and releasing values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .capture import refuse_nested
from .errors import UnsupportedTensorError
from .graph import Graph
from .here import Here
from .pages import keep_pages
from .plan import Plan
from .rules.base import Grads, divide, like
from .saved import read_error
from .step import Step
from .targets import Seed
from .values import Values

Hook = Callable[..., Any]  # of autograd: before or after a node's own backward


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
            ours = ours and not (retain_graph or batched or watch is not None)
            values = Values(plan, graph, outputs, keep=watch is not None, ours=ours)
            if outputs[0].device.type == "cpu":
                keep_pages()
            for node in values.regions:  # read before its own backward frees it
                handles.append(graph.handles[node].register_prehook(_turn(values.saved, node)))
            for step in plan.hooked if watch is None else plan.steps:
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
                else values.shown[ref].to(x.dtype)
                if ref in values.shown
                else g.to(x.dtype)
                if form == "R"
                else x.detach() * g
                for g, x, form, ref in zip(found, inputs, plan.input_forms, graph.inputs)
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
        handles.append(node.register_prehook(before))
    if after is not None:
        handles.append(node.register_hook(after))
    if leaving is not None:
        handles.append(node.register_hook(leaving))


def _turn(what: Callable[[int], Any], node: int) -> Hook:
    """A hook that changes nothing."""

    def hook(*grads: Any) -> None:
        what(node)

    return hook


def _hooks(step: Step, values: Values) -> tuple[Hook | None, Hook | None]:
    """Hooks before and after the native backward. What a rule fetched is let go after the last of them."""
    rule, convert, multiply = step.rule, step.convert, step.multiply
    (edits_before, edits_after), (first, last) = step.edits, step.hooks
    made: list[Here] = []  # from the first hook to the last
    part: Any = step.part if step.normed else None
    # tensors within a map carry what arrives at its top: theirs is what the norm does not keep of it
    asked = [ref for ref in values.graph.watched if part and ref[0] in (step.node, *part.moves)]

    def before(grads: tuple[Tensor | None, ...]) -> Any:
        given = grads[0]
        if given is None:
            return None
        here = Here(step, values)
        s = divide(given, here.output) if convert else given
        s = -s if step.part is not None and here.turned else s
        arrived = here.relevance(s, here.output) if asked else None
        if edits_before:
            s = rule.before(here, s)
        for ref in asked:
            values.shown[ref] = part.onward(values.graph, arrived - here.kept_by_norm(rule, s), ref[0])
        if step.part is not None:
            s = here.fed(s)
        if last:
            made.append(here)
        return (like(s, given), *grads[1:])

    def after(grads: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> Any:
        if all(s is None for s in incoming):
            return None
        s = incoming[0]
        here = made.pop() if made else Here(step, values)
        found: Grads = list(grads)
        if edits_after and s is not None:
            found = rule.after(here, found, s)
        elif edits_after:  # relevance of another output, of which only movement and statistics have some
            blocked = set(rule.blocks(step))
            found = [None if i in blocked else g for i, g in enumerate(found)]
        for position in multiply:
            g = found[position]
            if g is not None:
                found[position] = g * here.operand(position)
        return tuple([g if g is native else like(g, native) for g, native in zip(found, grads)])

    return before if first else None, after if last else None


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

"""Every differentiable operation of torch, by the sample inputs of torch's own test database (OpInfo).

Whatever the operation is made of: relevance is finite, of the inputs' shape and dtype, and the same at a second call;
`gradient` is gradient x input exactly; rules that claim to conserve do; forwards replay. What cannot be explained says
so in an error of ours.
"""

import sys
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import dynamiclrp as dlrp
import oracles  # noqa: F401  one thread
from dynamiclrp.forward import graph_of
from dynamiclrp.graph import Graph
from dynamiclrp.ops import OPS, refusal
from dynamiclrp.saved import Saved


def database() -> list[Any]:
    """torch's test database imports `expecttest` for a base class alone."""
    if "expecttest" not in sys.modules:
        stand_in = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if op.supports_autograd and torch.float64 in op.supported_dtypes("cpu")]


OPERATIONS = database()
SAMPLES = 3  # of each operation
LRP = ("attnlrp", "dynamic", "epsilon")

# Rules that claim to conserve, and what keeps relevance nevertheless.
KEEPS = {
    "nn.functional.alpha_dropout": "a dropped value is 0 plus a constant, and a literal constant takes no share",
    "nn.functional.feature_alpha_dropout": "the same",
}


@dataclass(frozen=True)
class Case:
    """One call: what came out, what went in, the relevance to hand back and the plain gradient for it."""

    name: str
    function: Any
    sample: Any
    outputs: list[Tensor]
    inputs: list[Tensor]
    seeds: list[Tensor]
    gradients: list[Tensor]

    @property
    def graph(self) -> Graph:
        return graph_of(self.outputs, self.inputs)

    @property
    def names(self) -> list[str]:
        graph = self.graph
        return [kind.__name__ for kind, runs in zip(graph.types, graph.runs) if runs]

    def relevance(self, preset: str) -> tuple[Tensor, ...]:
        return dlrp.relevance(self.outputs, self.inputs, seed=self.seeds, preset=preset, retain_graph=True)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def seeded(output: Tensor) -> Tensor:
    """Relevance in proportion to the value, where it has one."""
    value = output.detach()
    return torch.where(value.isfinite() & (value != 0), value * (0.5 + torch.rand_like(value)), 0)


def coefficient(seed: Tensor, output: Tensor) -> Tensor:
    zero = output.detach() == 0
    return torch.where(zero, 0, seed / torch.where(zero, 1, output.detach()))


def cases(operation: Any) -> Iterator[Case]:
    torch.manual_seed(0)
    for number, sample in enumerate(islice(operation.sample_inputs("cpu", torch.float64, requires_grad=True), SAMPLES)):
        torch.manual_seed(number)
        made = operation(sample.input, *sample.args, **sample.kwargs)
        outputs = [y for y in tensors(made) if y.grad_fn is not None]
        outputs = [torch.view_as_real(y.resolve_conj()) if y.is_complex() else y for y in outputs]
        inputs = [x for x in tensors((sample.input, sample.args, sample.kwargs)) if x.requires_grad]
        if not outputs or any(t.layout != torch.strided for t in (*outputs, *inputs)):
            continue
        seeds = [seeded(y) for y in outputs]
        starts = [coefficient(seed, y) for seed, y in zip(seeds, outputs)]
        try:
            found = torch.autograd.grad(outputs, inputs, starts, retain_graph=True, allow_unused=True)
        except RuntimeError:  # an output that torch cannot differentiate
            continue
        used = [(x, g) for x, g in zip(inputs, found) if g is not None]
        if not used or not all((x * g).isfinite().all() for x, g in used):  # a pole of the function itself
            continue
        inputs, gradients = ([pair[i] for pair in used] for i in (0, 1))
        yield Case(f"{operation.name} {number}", operation, sample, outputs, inputs, seeds, gradients)


def identify(operation: Any) -> str:
    variant = operation.variant_test_name
    return f"{operation.name}-{variant}" if variant else operation.name


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("operation", OPERATIONS, ids=identify)
def test_operation(operation):
    for case in cases(operation):
        forwards_replay(case)
        if any(refusal(name) for name in case.names):
            for preset in LRP:
                with pytest.raises(dlrp.UnknownOpError):
                    case.relevance(preset)
            continue
        for r, x, g in zip(case.relevance("gradient"), case.inputs, case.gradients):
            assert torch.equal(r, x.detach() * g), case.name
        for preset in LRP:
            relevance_is_sound(case, preset)


def relevance_is_sound(case: Case, preset: str) -> None:
    """Finite, of the inputs' shapes, the same at the second call, and conserved where claimed."""
    try:
        found = case.relevance(preset)
    except dlrp.LostActivationError:  # a constant that only the forward pass could have recorded
        assert preset == "dynamic", case.name
        relevance_is_recorded(case, preset)
        return
    for r, x in zip(found, case.inputs):
        assert r.shape == x.shape and r.dtype == x.dtype, case.name
        assert r.isfinite().all(), case.name
    for r, again in zip(found, case.relevance(preset)):
        assert torch.equal(r, again), case.name
    if case.function.name not in KEEPS:
        relevance_is_conserved(case, preset, found)


def relevance_is_conserved(case: Case, preset: str, found: tuple[Tensor, ...]) -> None:
    """Where all rules claim it, the inputs get what the outputs had."""
    plan = dlrp.plan(case.outputs, case.inputs, preset=preset)
    if not all(step.rule.conserves(step) for step in plan.steps):
        return
    given, got = (torch.cat([t.flatten().double() for t in ts]) for ts in (case.seeds, found))
    precision = max(torch.finfo(y.dtype).eps for y in case.outputs)
    tolerance = max(1e-7, 8 * precision) * float(given.abs().sum() + got.abs().sum())
    assert abs(float(given.sum() - got.sum())) <= tolerance, f"{case.name} under {preset}:\n{plan}"


class Operation(nn.Module):
    """The call of a case as a model of its inputs."""

    def __init__(self, case: Case):
        super().__init__()
        self.case = case

    def forward(self, *inputs: Tensor) -> Tensor:
        given = {id(x): new for x, new in zip(self.case.inputs, inputs)}
        sample = self.case.sample
        call = tree_map(lambda leaf: given.get(id(leaf), leaf), (sample.input, sample.args, dict(sample.kwargs)))
        return tensors(self.case.function(call[0], *call[1], **call[2]))[0]


def relevance_is_recorded(case: Case, preset: str) -> None:
    """`explain` runs the operation itself and records what autograd forgets."""
    if not case.outputs[0].numel():
        return
    found = dlrp.explain(Operation(case), *(x.detach() for x in case.inputs), preset=preset, target=lambda y: y.sum())
    for r in found.relevances.values():
        assert r.isfinite().all(), case.name


def forwards_replay(case: Case) -> None:
    """From the leaves up, by the rows' forwards: as far as they go, and equal where they reach an output."""
    graph = case.graph
    values = replayed(graph)
    for output, (node, number) in zip(case.outputs, graph.outputs):
        if number < len(values.get(node, ())):
            torch.testing.assert_close(
                values[node][number], output.detach(), rtol=1e-7, atol=1e-9, equal_nan=True, msg=case.name
            )


def replayed(graph: Graph) -> dict[int, tuple[Tensor, ...]]:
    values: dict[int, tuple[Tensor, ...]] = {}
    for node, handle in enumerate(graph.handles):
        op, edges = OPS.get(type(handle).__name__), graph.edges[node]
        if type(handle).__name__ == "AccumulateGrad":
            values[node] = (handle.variable.detach(),)
        if op is None or op.forward is None:
            continue
        kept = [op.keeps(position, edges) for position in range(len(edges))]
        if not all(
            ref[1] < len(values.get(ref[0], ())) if ref is not None else kept[i] is not None
            for i, ref in enumerate(edges)
        ):
            continue
        saved = Saved(handle)
        operands = [getattr(saved, kept[i]) if ref is None else values[ref[0]][ref[1]] for i, ref in enumerate(edges)]
        made = op.forward(saved, *operands)
        values[node] = (made,) if isinstance(made, Tensor) else tuple(made)
    return values

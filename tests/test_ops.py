"""Every row of the op table, by its samples: what it says about the operation is true, and the presets run on it."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dynamiclrp as dlrp
import oracles  # noqa: F401  one thread
from dynamiclrp.ops import OPS, Kind
from dynamiclrp.ops.table import LinearMap
from dynamiclrp.saved import Saved
from samples import ELSEWHERE, RANDOM, ROWS, SAMPLES, Sample, every

# torch announces changes of some of the operations that are sampled
pytestmark = pytest.mark.filterwarnings("ignore:index_reduce", "ignore:torch.triangular_solve")

DTYPES = [torch.float64, torch.float32]

# The forward is computed from saved statistics, or by another formula than torch's kernel; equal to 1e-6 then.
ANOTHER_KERNEL = {"NativeLayerNormBackward0", "NativeDropoutBackward0"}


@dataclass(frozen=True)
class Case:
    """A sample, some of whose operands are constants."""

    sample: Sample
    also: tuple[int, ...] = ()

    @property
    def frozen(self) -> tuple[int, ...]:
        return self.sample.frozen + self.also

    def __str__(self) -> str:
        return f"{self.sample}{''.join(f', {i} frozen' for i in self.also)}"


def cases() -> list[Case]:
    """Each sample as it is, and with each operand frozen in turn."""
    found = []
    for each in every():
        operands = enumerate(each.make(torch.float64))
        free = [i for i, operand in operands if operand is not None and i not in each.frozen]
        found += [Case(each), *(Case(each, (i,)) for i in free if len(free) > 1)]
    return found


CASES = cases()


def reseed() -> None:
    """So that dropout draws the same mask at each call (torch.manual_seed costs more than an explanation)."""
    torch.default_generator.manual_seed(0)


class Call:
    """A case, called: the arguments, the node, what the node saw and what it made."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float64):
        reseed()
        self.case = case
        self.op = OPS[case.sample.node]
        given = case.sample.make(dtype)
        self.arguments = [
            None if t is None else t.detach().requires_grad_(i not in case.frozen) for i, t in enumerate(given)
        ]
        self.outputs = case.sample.outputs(*self.arguments)
        self.node = self.outputs[0].grad_fn
        self.operands = case.sample.operands(*(None if t is None else t.detach() for t in self.arguments))

    @property
    def edges(self) -> tuple:
        return tuple(None if node is None else (node, number) for node, number in self.node.next_functions)

    @property
    def live(self) -> list[int]:
        return [i for i, t in enumerate(self.arguments) if t is not None and t.requires_grad]


def parametrise(name: str, values: list):
    return pytest.mark.parametrize(name, values, ids=str)


def assert_equal(actual: Tensor, expected: Tensor, exact: bool) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    if exact:
        assert torch.equal(actual, expected)
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- the table


def test_every_row_has_a_sample_or_a_reason():
    assert set(SAMPLES) | set(ELSEWHERE) == ROWS
    assert not set(SAMPLES) & set(ELSEWHERE)


@parametrise("sample", every())
def test_the_sample_makes_its_node(sample):
    for dtype in DTYPES:
        call = Call(Case(sample), dtype)
        assert type(call.node).__name__ == sample.node
        constant = [t is None or i in sample.frozen for i, t in enumerate(call.operands)]
        assert [edge is None for edge in call.edges] == constant


# ---------------------------------------------------------------- what a row says about values


@parametrise("case", [case for case in CASES if OPS[case.sample.node].forward is not None])
def test_the_forward_replays_the_output(case):
    for dtype in DTYPES:
        call = Call(case, dtype)
        made = call.op.forward(Saved(call.node), *call.operands)
        for output in call.outputs:
            value = made if isinstance(made, Tensor) else made[output.output_nr]
            assert_equal(value, output.detach(), exact=case.sample.node not in ANOTHER_KERNEL)


@parametrise("case", [case for case in CASES if OPS[case.sample.node].saved])
def test_what_a_row_calls_saved_is_the_operand(case):
    call = Call(case)
    for position in call.op.saved:
        attribute = call.op.keeps(position, call.edges)
        if attribute is None:
            continue
        kept, operand = getattr(Saved(call.node), attribute), call.operands[position]
        if operand is None:
            assert kept is None
        else:
            assert_equal(kept, operand, exact=True)


@parametrise("case", [case for case in CASES if OPS[case.sample.node].result])
def test_what_a_row_calls_its_result_is_the_output(case):
    call = Call(case)
    assert_equal(getattr(Saved(call.node), call.op.result), call.outputs[0].detach(), exact=True)


@parametrise("case", [case for case in CASES if OPS[case.sample.node].undo is not None])
def test_undo_gives_back_the_operand(case):
    call = Call(case)
    (operand,) = call.operands
    back = call.op.undo(Saved(call.node), call.outputs[0].detach(), operand.shape)
    assert_equal(back, operand, exact=call.op.kind is Kind.MOVEMENT)  # a root is undone by arithmetic


@parametrise("sample", [sample for sample in every() if OPS[sample.node].join is not None])
def test_join_gives_back_the_operand(sample):
    call = Call(Case(sample))
    (operand,) = call.operands
    assert_equal(call.op.join(Saved(call.node), [y.detach() for y in call.outputs]), operand, exact=True)


@parametrise("sample", [sample for sample in every() if OPS[sample.node].weights is not None])
def test_a_sum_is_its_operands_times_their_weights(sample):
    """Up to a constant that left no edge."""
    call = Call(Case(sample))
    weights = call.op.weights(Saved(call.node))
    assert len(weights) == len(call.edges)
    change = [torch.full_like(operand, 0.1 * (i + 1)) for i, operand in enumerate(call.operands)]
    with torch.no_grad():
        moved = sample.function(*(a + d for a, d in zip(call.arguments, change, strict=True)))
    expected = sum(weight * d for weight, d in zip(weights, change, strict=True))
    torch.testing.assert_close(moved - call.outputs[0].detach(), expected.expand_as(moved), rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------- activations, normalisations, linear maps


@parametrise("sample", [sample for sample in every() if OPS[sample.node].ratio is not None])
@parametrise("dtype", DTYPES)
def test_ratio_is_output_over_input(sample, dtype):
    call = Call(Case(sample), dtype)
    (x,) = call.operands
    ratio = call.op.ratio(Saved(call.node))
    assert ratio.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(ratio, call.outputs[0].detach() / x, rtol=tolerance, atol=tolerance)


@parametrise("sample", [sample for sample in every() if OPS[sample.node].rectifies])
def test_a_rectifier_hands_down_nothing_where_it_changed_its_input(sample):
    call = Call(Case(sample))
    (gradient,) = torch.autograd.grad(call.outputs[0].sum(), call.arguments)
    (x,), y = call.operands, call.outputs[0].detach()
    assert torch.equal(gradient, (x == y).to(x.dtype))


def normalised(x: Tensor, dims: tuple[int, ...], eps: float, centred: bool = True) -> Tensor:
    """With a standard deviation that passes no gradient."""
    centre = x.mean(dims, keepdim=True) if centred else 0
    scale = (x - centre).pow(2).mean(dims, keepdim=True).add(eps).rsqrt()
    return (x - centre) * scale.detach()


def by_channel(parameter: Tensor | None, like: Tensor, default: float) -> Tensor | float:
    return default if parameter is None else parameter.reshape(-1, *[1] * (like.dim() - 2))


def slow_layer_norm(sample: Sample, x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    rank, eps = (2, 0.1) if "two dims" in sample.label else (1, 1e-5)
    y = normalised(x, tuple(range(-rank, 0)), eps)
    return (y if w is None else y * w) + (0 if b is None else b)


def slow_group_norm(sample: Sample, x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    y = normalised(x.reshape(len(x), 2, -1), (-1,), 0.1 if sample.label == "plain" else 1e-5).reshape(x.shape)
    return y * by_channel(w, x, 1.0) + by_channel(b, x, 0.0)


def slow_weight_norm(sample: Sample, v: Tensor, g: Tensor) -> Tensor:
    return v * (g / v.norm(dim=1, keepdim=True).detach())


def slow_batch_norm(sample: Sample, x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    y = normalised(x, (0, *range(2, x.dim())), 1e-5 if "plain" in sample.label else 1e-3)
    return y * by_channel(w, x, 1.0) + by_channel(b, x, 0.0)


NORMALISATIONS = {
    "NativeLayerNormBackward0": slow_layer_norm,
    "NativeGroupNormBackward0": slow_group_norm,
    "WeightNormInterfaceBackward0": slow_weight_norm,
} | {sample.node: slow_batch_norm for sample in every() if OPS[sample.node].kind is Kind.BATCHNORM}


def has_own_statistics(case: Case) -> bool:
    """Batch norm in eval mode has them from elsewhere, and nothing to hold constant."""
    return OPS[case.sample.node].kind is not Kind.BATCHNORM or "training" in case.sample.label


@parametrise(
    "case", [c for c in CASES if c.sample.node in NORMALISATIONS and has_own_statistics(c) and 0 not in c.also]
)
@parametrise("dtype", DTYPES)
def test_fixed_is_the_gradient_with_a_constant_standard_deviation(case, dtype):
    call = Call(case, dtype)
    slow = NORMALISATIONS[case.sample.node](case.sample, *call.arguments)
    torch.testing.assert_close(slow.detach(), call.outputs[0].detach(), rtol=1e-5, atol=1e-5)
    s = torch.randn_like(slow)
    (expected,) = torch.autograd.grad(slow, call.arguments[0], s)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    actual = call.op.fixed(Saved(call.node), s)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_every_normalisation_is_checked():
    assert {sample.node for sample in every() if OPS[sample.node].fixed is not None} == set(NORMALISATIONS)


LINEAR = [sample for sample in every() if OPS[sample.node].linear is not None]


def linear_call(sample: Sample):
    """The call, its map, what the map saved and multiplies by, the two factors and the bias as it stands in the output."""
    call = Call(Case(sample))
    linear, saved = call.op.linear, Saved(call.node)
    first, second = (call.operands[i] for i in linear.factors)
    bias = None if linear.bias is None else call.operands[linear.bias]
    added = 0 if bias is None else linear.factor(saved) * spread(linear, saved, bias)
    return call, linear, saved, 1 if linear.gain is None else linear.gain(saved), first, second, added


@parametrise("sample", LINEAR)
def test_product_is_the_output_without_the_bias(sample):
    call, linear, saved, gain, first, second, added = linear_call(sample)
    product = gain * linear.product(saved, first, second)
    torch.testing.assert_close(product + added, call.outputs[0].detach(), rtol=1e-12, atol=1e-12)


@parametrise("which", [0, 1])
@parametrise("sample", LINEAR)
def test_transposed_is_the_gradient_of_a_factor(sample, which):
    call, linear, saved, gain, first, second, _ = linear_call(sample)
    u = torch.randn_like(call.outputs[0])
    (expected,) = torch.autograd.grad(call.outputs[0], call.arguments[linear.factors[which]], u)
    actual = gain * linear.transposed(saved, which, u, first, second)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@parametrise("sample", LINEAR)
def test_the_products_are_of_the_given_factors_not_of_the_saved_ones(sample):
    _, linear, saved, _, first, second, _ = linear_call(sample)
    others = [torch.randn_like(factor).requires_grad_() for factor in (first, second)]
    product = linear.product(saved, *others)
    u = torch.randn_like(product)
    for which, expected in enumerate(torch.autograd.grad(product, others, u)):
        actual = linear.transposed(saved, which, u, *(factor.detach() for factor in others))
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def spread(linear: LinearMap, saved: Saved, channels: Tensor) -> Tensor:
    return channels if linear.spread is None else channels.reshape(linear.spread(saved))


@parametrise(
    "sample", [s for s in LINEAR if OPS[s.node].linear.channels is not None and "transpose" not in str(s).lower()]
)
def test_channels_scale_the_output(sample):
    _, linear, saved, _, first, second, _ = linear_call(sample)
    product = linear.product(saved, first, second)
    channel = 1 if OPS[sample.node].kind is Kind.CONV else product.dim() - 1
    scale = torch.rand(product.shape[channel], dtype=torch.float64) + 0.5
    shape = [-1 if dim == channel else 1 for dim in range(product.dim())]
    folded = linear.product(saved, first, second * scale.reshape(linear.channels(saved)))
    torch.testing.assert_close(folded, product * scale.reshape(shape), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(spread(linear, saved, scale).expand_as(product), scale.reshape(shape).expand_as(product))


# ---------------------------------------------------------------- attnlrp of one operation


def attnlrp(call: Call, s: list[Tensor]) -> dict[int, Tensor]:
    """Relevance of the arguments (those whose rule is beyond doubt) by the kind of the operation."""
    live, sample, op = call.live, call.case.sample, call.op
    arguments = [call.arguments[i] for i in live]
    gradients = torch.autograd.grad(call.outputs, arguments, s, retain_graph=True, allow_unused=True)
    native = {
        i: torch.zeros_like(x) if g is None else (x * g).detach()
        for i, x, g in zip(live, arguments, gradients, strict=True)
    }
    factors = op.linear.factors if op.linear else op.factors
    if op.linear is not None or op.kind is Kind.PRODUCT:
        number = sum(i in live for i in factors)  # one operand may hold two factors
        if "div" in sample.node.lower():  # a divisor only scales what is live above it
            numerator, divisor = factors
            return {i: torch.zeros_like(r) if i == divisor and numerator in live else r for i, r in native.items()}
        return {i: r / number if i in factors else r for i, r in native.items()}
    if op.carriers is not None:  # the others only steer
        return {i: r for i, r in native.items() if i in op.carriers}
    if op.kind is Kind.ACTIVATION and sample.label not in ("root", "inverse"):  # powers below 1 are functions
        # Σ R is meant, since some samples scale x beforehand, which passes all
        return {0: (call.outputs[0].detach() * s[0])} if 0 in live else {}
    if op.kind is Kind.ATTENTION:
        weights = any(i < 2 for i in live)
        share = {i: 1 / ((2 if 2 in live else 1) * (2 if {0, 1} <= set(live) else 1)) for i in (0, 1)}
        share[2] = 0.5 if weights else 1.0
        return {i: share[i] * r for i, r in native.items()}
    if sample.node in NORMALISATIONS and has_own_statistics(call.case):
        if 0 not in live:
            return {}
        slow = NORMALISATIONS[sample.node](sample, *call.arguments)
        (g,) = torch.autograd.grad(slow, call.arguments[0], s[0])
        return {0: call.arguments[0].detach() * g}
    return native


@parametrise("case", CASES)
def test_attnlrp_of_every_row(case):
    call = Call(case)
    # coefficients of both signs; where the output is 0 there is no relevance to start with
    s = [torch.where(y == 0, 0, torch.randn_like(y)).detach() for y in call.outputs]
    expected = attnlrp(call, s)
    seeds = [y.detach() * c for y, c in zip(call.outputs, s, strict=True)]
    arguments = [call.arguments[i] for i in call.live]
    found = dict(zip(call.live, dlrp.relevance(call.outputs, arguments, seed=seeds, preset="attnlrp"), strict=True))
    for i, r in found.items():
        assert r.shape == call.arguments[i].shape
        assert r.dtype == call.arguments[i].dtype
    for i, r in expected.items():
        tolerance = 1e-9 if all(y.dtype == torch.float64 for y in call.outputs) else 1e-5
        torch.testing.assert_close(found[i], r, rtol=tolerance, atol=tolerance, check_dtype=False)


# ---------------------------------------------------------------- presets on every row


class Positive(nn.Module):
    """A case as a model: its live operands are the arguments, its output the sum of the magnitudes of the outputs."""

    def __init__(self, case: Case, dtype: torch.dtype):
        super().__init__()
        self.case = case
        given = case.sample.make(dtype)
        self.live = [i for i, t in enumerate(given) if t is not None and i not in case.frozen]
        self.constants = {i: t for i, t in enumerate(given) if i not in self.live}
        self.inputs = [given[i] for i in self.live]

    def forward(self, *arguments: Tensor) -> Tensor:
        operands = dict(zip(self.live, arguments, strict=True)) | self.constants
        reseed()
        outputs = self.case.sample.outputs(*(operands[i] for i in sorted(operands)))
        total = sum((y * y.detach().sign()).sum() for y in outputs).double()
        if not total.detach():  # nothing but zeros came out: explain something
            total = total + sum((x * x.detach().sign()).sum() for x in arguments).double()
        return total


def relevances(attribution: dlrp.Attribution) -> list[Tensor]:
    return list(attribution.relevances.values())


def check_twice(model: Positive, preset: str) -> None:
    explainer = dlrp.Explainer(model, preset)
    first, second = relevances(explainer(*model.inputs)), relevances(explainer(*model.inputs))
    for x, a, b in zip(model.inputs, first, second, strict=True):
        assert a.shape == x.shape
        assert a.dtype == x.dtype
        assert torch.isfinite(a).all()
        assert torch.equal(a, b)


REPEATABLE = [case for case in CASES if case.sample.node not in RANDOM]  # the others: tests/test_promises.py


@parametrise("preset", ["attnlrp", "dynamic", "epsilon", "cp-lrp"])
@parametrise("sample", [case.sample for case in REPEATABLE if not case.also])
def test_presets_run_on_every_row(sample, preset):
    check_twice(Positive(Case(sample), torch.float32).eval(), preset)


@parametrise("preset", ["attnlrp", "dynamic"])
@parametrise("case", [case for case in REPEATABLE if case.also])
def test_presets_run_where_an_operand_is_a_constant(case, preset):
    check_twice(Positive(case, torch.float32).eval(), preset)


@parametrise("preset", ["attnlrp", "dynamic"])
@parametrise("case", REPEATABLE)
def test_what_claims_to_conserve_conserves(case, preset):
    model = Positive(case, torch.float32).eval()
    a = dlrp.explain(model, *model.inputs, preset=preset, ledger=True)
    for entry in a.ledger.entries:
        assert math.isfinite(entry.arrived) and math.isfinite(entry.delivered)
        if entry.conserves:
            assert entry.error < 1e-5, entry
    delivered = sum(float(r.double().sum()) for r in relevances(a))
    if all(entry.conserves for entry in a.ledger.entries):
        assert delivered == pytest.approx(float(a.prediction), rel=1e-5)
    kept = sum(amount for entry in a.ledger.entries for amount in entry.kept.values())
    assert delivered + kept == pytest.approx(float(a.prediction), rel=1e-4, abs=1e-5)


def test_silu_of_float32_matches_torch():  # the simplest sample of all, by hand: guards the harness itself
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    y = F.silu(x)
    (r,) = dlrp.relevance(y, x, seed=y.detach(), preset="attnlrp")
    torch.testing.assert_close(r, y.detach())

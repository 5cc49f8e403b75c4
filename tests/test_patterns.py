"""What several operations mean together: composites, gates, first layers, folded batch norms, written-out attention.

Each is checked twice where that is possible: that the plan sees it, and that the relevance is the one of the fused
operation, or of the formula with its statistics held constant.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

import dynamiclrp as dlrp
from dynamiclrp.forward import graph_of
from dynamiclrp.patterns import first_layers
from dynamiclrp.rules import Flat, SignalTakesAll
from oracles import error

TOLERANCE = 1e-9


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def anything(y: Tensor, seed: int = 9) -> Tensor:
    """Coefficients of both signs, to seed with."""
    return gaussian(*y.shape, seed=seed, dtype=y.dtype)


def composites(plan: dlrp.Plan) -> list[str]:
    """The kinds of the products that the plan takes for one function of one tensor."""
    return [
        str(step.kind)
        for step in plan.steps
        if step.name in ("Mul", "Div")
        and isinstance(step.rule, SignalTakesAll)
        and step.kind in ("activation", "normalise")
    ]


def relevance(function: Callable[..., Tensor], *inputs: Tensor, preset: str = "attnlrp") -> tuple[Tensor, ...]:
    """Relevance of the inputs for coefficients of both signs at the output."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    return dlrp.relevance(y, leaves, seed=y.detach() * anything(y), preset=preset)


def planned(function: Callable[..., Tensor], *inputs: Tensor, preset: str = "attnlrp") -> dlrp.Plan:
    leaves = [x.detach().requires_grad_() for x in inputs]
    return dlrp.plan(function(*leaves), leaves, preset=preset)


X = gaussian(3, 8)
W, B = 1 + 0.3 * gaussian(8, seed=1), gaussian(8, seed=2)
EPS = 1e-3


# ---------------------------------------------------------------- normalisations: the statistic takes nothing


def keep(t: Tensor) -> Tensor:
    return t


def rms_llama(x: Tensor, still=keep) -> Tensor:
    h = x.to(torch.float32)
    h = h * still(torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS))
    return W * h.to(x.dtype)


def rms_t5(x: Tensor, still=keep) -> Tensor:
    variance = x.to(torch.float64).pow(2).mean(-1, keepdim=True)
    return W * (x * still(torch.rsqrt(variance + EPS)))


def rms_gemma(x: Tensor, still=keep) -> Tensor:
    h = x.float()
    return (h * still(torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)) * (1.0 + W.float())).type_as(x)


def rms_with_a_parameter_on_the_left(x: Tensor, still=keep) -> Tensor:
    scale = W.clone().requires_grad_()
    return (scale * x) * still(torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS))


def over_the_root_of_the_variance(x: Tensor, still=keep) -> Tensor:
    return x / still(torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + EPS))


def over_the_root_of_the_mean_square(x: Tensor, still=keep) -> Tensor:
    return x / still(((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True).add(EPS).sqrt())


def layer_norm(x: Tensor, still=keep) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / still((centred.pow(2).mean(-1, keepdim=True) + EPS).sqrt()) * W + B


def layer_norm_of_var_mean(x: Tensor, still=keep) -> Tensor:
    var, mean = torch.var_mean(x, -1, keepdim=True, unbiased=False)
    return (x - mean) * still(torch.rsqrt(var + EPS)) * W + B


def layer_norm_of_std(x: Tensor, still=keep) -> Tensor:
    return W * (x - x.mean(-1, keepdim=True)) / still(x.std(-1, keepdim=True) + EPS) + B


def layer_norm_of_expanded_statistics(x: Tensor, still=keep) -> Tensor:
    mean = x.mean(-1).unsqueeze(-1).expand_as(x)
    scale = ((x - mean).pow(2).sum(-1) / 8 + EPS).rsqrt().reshape(3, 1).expand(3, 8)
    return (x - mean) * still(scale) * W + B


def layer_norm_of_channels(x: Tensor, still=keep) -> Tensor:
    """As ConvNeXt and timm write it for images."""
    x = x.reshape(3, 2, 2, 2)
    mean = x.mean(1, keepdim=True)
    var = (x - mean).pow(2).mean(1, keepdim=True)
    return W[:2, None, None] * ((x - mean) / still(torch.sqrt(var + EPS))) + B[:2, None, None]


def group_norm(x: Tensor, still=keep) -> Tensor:
    groups = x.reshape(3, 2, 4)
    centred = groups - groups.mean(-1, keepdim=True)
    return (centred * still(torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS))).reshape(3, 8) * W


def unit_length(x: Tensor, still=keep) -> Tensor:
    return F.normalize(x, dim=-1) if still is keep else x / still(x.norm(dim=-1, keepdim=True).clamp_min(1e-12))


def unit_length_by_hand(x: Tensor, still=keep) -> Tensor:
    return x / still(x.norm(dim=-1, keepdim=True) + EPS)


def unit_sum_of_magnitudes(x: Tensor, still=keep) -> Tensor:
    return x / still(x.abs().sum(-1, keepdim=True))


NORMALISATIONS = [
    rms_llama, rms_t5, rms_gemma, rms_with_a_parameter_on_the_left, over_the_root_of_the_variance,
    over_the_root_of_the_mean_square, layer_norm, layer_norm_of_var_mean, layer_norm_of_std,
    layer_norm_of_expanded_statistics, layer_norm_of_channels, group_norm, unit_length, unit_length_by_hand,
    unit_sum_of_magnitudes,
]  # fmt: skip


IN_FLOAT32 = "rms_llama", "rms_gemma", "silu_with_casts"  # they round in the middle


def tolerance(function: Callable[..., Tensor]) -> float:
    return 1e-5 if function.__name__ in IN_FLOAT32 else TOLERANCE


def named(functions: list):
    return pytest.mark.parametrize("function", functions, ids=lambda function: function.__name__)


@pytest.mark.parametrize("preset", ["attnlrp", "epsilon", "cp-lrp"])
@named(NORMALISATIONS)
def test_a_written_out_normalisation_is_one(function, preset):
    assert composites(planned(function, X, preset=preset)).count("normalise") == 1
    x = X.clone().requires_grad_()
    fixed = function(x, still=Tensor.detach)
    (gradient,) = torch.autograd.grad(fixed, x, anything(fixed))
    assert error(relevance(function, X, preset=preset)[0], X * gradient) < tolerance(function)


@named(NORMALISATIONS)
def test_a_written_out_normalisation_between_linear_maps(function):
    first, second = gaussian(5, 8, seed=3), gaussian(8, 4, seed=4)

    def net(x: Tensor, still=keep) -> Tensor:
        return function(x @ first, still).reshape(3, 8) @ second

    x = gaussian(3, 5, seed=5)
    assert composites(planned(net, x)).count("normalise") == 1
    leaf = x.clone().requires_grad_()
    fixed = net(leaf, still=Tensor.detach)
    (gradient,) = torch.autograd.grad(fixed, leaf, anything(fixed))
    assert error(relevance(net, x)[0], x * gradient) < tolerance(function)


@named([layer_norm, layer_norm_of_var_mean, layer_norm_of_expanded_statistics])
def test_a_written_out_layer_norm_equals_the_fused_one(function):
    (fused,) = relevance(lambda x: F.layer_norm(x, (8,), W, B, EPS), X)
    assert error(relevance(function, X)[0], fused) < TOLERANCE


def test_a_written_out_group_norm_equals_the_fused_one():
    (fused,) = relevance(lambda x: F.group_norm(x, 2, W, None, EPS), X)
    assert error(relevance(group_norm, X)[0], fused) < TOLERANCE


def test_torchs_own_rms_norm_is_written_out_on_cpu():
    (fused,) = relevance(lambda x: F.rms_norm(x, (8,), W, EPS), X)
    assert error(relevance(rms_t5, X)[0], fused) < TOLERANCE


# ---------------------------------------------------------------- activations: relevance passes unchanged


def new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def erf_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def silu_gate_first(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * x


def mish(x: Tensor) -> Tensor:
    return x * torch.tanh(F.softplus(x))


def hard_swish(x: Tensor) -> Tensor:
    return x * F.relu6(x + 3) / 6


def hard_swish_of_hardsigmoid(x: Tensor) -> Tensor:
    return x * F.hardsigmoid(x)


def square(x: Tensor) -> Tensor:
    return x * x


def rectified_square(x: Tensor) -> Tensor:
    return F.relu(x) * F.relu(x)


def over_one_plus_magnitude(x: Tensor) -> Tensor:
    return x / (1 + x.abs())


def silu_with_views(x: Tensor) -> Tensor:
    return (x.reshape(6, 4) * torch.sigmoid(x.reshape(2, 3, 4)).reshape(6, 4)).reshape(3, 8)


def silu_with_expands(x: Tensor) -> Tensor:
    return x.unsqueeze(0).expand(1, 3, 8).squeeze(0) * torch.sigmoid(x).expand_as(x)


def silu_with_casts(x: Tensor) -> Tensor:
    return x.float() * torch.sigmoid(x).float()


ACTIVATIONS = [
    new_gelu, erf_gelu, quick_gelu, silu, silu_gate_first, mish, hard_swish, hard_swish_of_hardsigmoid, square,
    over_one_plus_magnitude, silu_with_views, silu_with_expands, silu_with_casts,
]  # fmt: skip


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic", "cp-lrp"])
@named(ACTIVATIONS)
def test_a_written_out_activation_passes_relevance_unchanged(function, preset):
    assert composites(planned(function, X, preset=preset)) == ["activation"]
    y = function(X)
    assert error(relevance(function, X, preset=preset)[0], (y * anything(y)).to(X.dtype)) < tolerance(function)


@named([*ACTIVATIONS, rectified_square])
def test_a_written_out_activation_between_linear_maps(function):
    """R of the function's input is R of its output: the second map's rule, then the first's."""
    first, second = gaussian(5, 8, seed=3), gaussian(8, 4, seed=4)
    x = gaussian(3, 5, seed=5)
    z = x @ first
    h = function(z).to(z.dtype)
    y = h @ second
    r = (anything(y) @ second.T) * h
    (found,) = relevance(lambda x: function(x @ first).to(x.dtype) @ second, x)
    expected = x * ((r / z) @ first.T)
    assert error(found, expected) < tolerance(function)


FUSED = {
    new_gelu: lambda x: F.gelu(x, approximate="tanh"), erf_gelu: F.gelu, silu: F.silu, mish: F.mish,
    hard_swish: F.hardswish, silu_with_views: F.silu,
}  # fmt: skip


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic", "cp-lrp", "epsilon"])
@named(list(FUSED))
def test_a_written_out_activation_equals_the_fused_one(function, preset):
    weight = gaussian(5, 8, seed=3)
    x = gaussian(3, 5, seed=5)
    (written,) = relevance(lambda x: function(x @ weight), x, preset=preset)
    (fused,) = relevance(lambda x: FUSED[function](x @ weight), x, preset=preset)
    assert error(written, fused) < TOLERANCE


# ---------------------------------------------------------------- what is no composite


U, V = gaussian(3, 8, seed=11), gaussian(3, 8, seed=12)
M1, M2, M3 = gaussian(8, 8, seed=13) / 3, gaussian(8, 8, seed=14) / 3, gaussian(8, 16, seed=15) / 3


def halves(numerator: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    """A product's relevance, half of it, shared proportionally among the parts of a sum."""
    total = sum(parts)
    return tuple(numerator / 2 * part / total for part in parts)


def test_a_sum_times_a_function_of_one_part_is_a_product():
    def function(u: Tensor, v: Tensor) -> Tensor:
        return (u + v) * torch.sigmoid(u)

    assert composites(planned(function, U, V)) == []
    r = function(U, V) * anything(U)
    u, v = halves(r, U, V)
    gate = r / 2 * U * (1 - torch.sigmoid(U))  # x · σ'(x)/σ(x): the gradient through the gate
    found = relevance(function, U, V)
    assert error(found[0], u + gate) < TOLERANCE
    assert error(found[1], v) < TOLERANCE


def test_a_product_of_two_inputs_is_a_product():
    assert composites(planned(torch.mul, U, V)) == []
    r = U * V * anything(U)
    for found in relevance(torch.mul, U, V):
        assert error(found, r / 2) < TOLERANCE


def squeeze_and_excite(x: Tensor) -> Tensor:
    """A gate per channel that two linear maps compute from the mean."""
    return x * torch.sigmoid(F.relu(x.mean(-1, keepdim=True) @ gaussian(1, 4, seed=16)) @ gaussian(4, 1, seed=17))


def swiglu(x: Tensor) -> Tensor:
    return F.silu(x @ M1) * (x @ M2)


def swiglu_of_a_packed_projection(x: Tensor) -> Tensor:
    gate, up = (x @ M3).chunk(2, -1)
    return F.silu(gate) * up


def glu_of_a_packed_projection(x: Tensor) -> Tensor:
    a, b = (x @ M3).split([8, 8], -1)
    return a * torch.sigmoid(b)


def glu_of_slices(x: Tensor) -> Tensor:
    h = x @ M3
    return h[:, :8] * torch.sigmoid(h[:, 8:])


def glu_of_unbind(x: Tensor) -> Tensor:
    a, b = (x @ M3).reshape(3, 2, 8).unbind(1)
    return a * torch.sigmoid(b)


def glu_of_selects(x: Tensor) -> Tensor:
    h = (x @ M3).reshape(3, 2, 8)
    return h[:, 0] * torch.sigmoid(h[:, 1])


def neighbours(x: Tensor) -> Tensor:
    return x[:, 1:] * x[:, :-1]


def rolled(x: Tensor) -> Tensor:
    return x * x.roll(1, -1)


def flipped(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x.flip(-1))


def transposed(x: Tensor) -> Tensor:
    square = x[:, :3]
    return square * torch.tanh(square.t())


def picked(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x[:, torch.tensor([1, 2, 3, 4, 5, 6, 7, 0])])


def queries_and_keys(x: Tensor) -> Tensor:
    return ((x @ M1) * (x @ M2)).sum(-1)


def softmax_by_hand(x: Tensor) -> Tensor:
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)


def stable_softmax_by_hand(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True).detach())
    return e / e.sum(-1, keepdim=True)


def two_gates(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * torch.tanh(x)


PRODUCTS = [
    squeeze_and_excite, swiglu, swiglu_of_a_packed_projection, glu_of_a_packed_projection, glu_of_slices, glu_of_unbind,
    glu_of_selects, neighbours, rolled, flipped, transposed, picked, queries_and_keys, softmax_by_hand,
    stable_softmax_by_hand, two_gates,
]  # fmt: skip


@named(PRODUCTS)
def test_what_is_no_composite_is_not_taken_for_one(function):
    assert composites(planned(function, X)) == []


@named([swiglu_of_a_packed_projection, glu_of_a_packed_projection, glu_of_slices, glu_of_unbind, glu_of_selects])
@pytest.mark.parametrize("preset", ["attnlrp", "dynamic", "cp-lrp"])
def test_a_packed_gate_equals_two_projections(function, preset):
    """One matrix product that is cut in two afterwards, or two matrix products."""
    first, second = M3[:, :8], M3[:, 8:]
    gate = torch.sigmoid if function is not swiglu_of_a_packed_projection else None

    def apart(x: Tensor) -> Tensor:
        return (x @ first) * gate(x @ second) if gate else F.silu(x @ first) * (x @ second)

    assert error(function(X), apart(X)) < 1e-12
    assert error(relevance(function, X, preset=preset)[0], relevance(apart, X, preset=preset)[0]) < 1e-8


# ---------------------------------------------------------------- gates and attention weights: cp-lrp


def signals(function: Callable[..., Tensor], *inputs: Tensor) -> list[tuple[str, int | None]]:
    plan = planned(function, *inputs, preset="cp-lrp")
    return [(step.name, step.signal) for step in plan.steps if isinstance(step.rule, SignalTakesAll)]


def weigh(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


def weigh_with_dropout(scores: Tensor) -> Tensor:
    return F.dropout(scores.softmax(-1), 0.5, training=False)


def weigh_with_casts(scores: Tensor) -> Tensor:
    return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)


def weigh_with_views(scores: Tensor) -> Tensor:
    return scores.unsqueeze(0).softmax(-1).squeeze(0).contiguous() * 1.0


@named([weigh, weigh_with_dropout, weigh_with_casts, weigh_with_views])
def test_attention_weights_take_nothing_under_cp_lrp(function):
    def attend(x: Tensor) -> Tensor:
        return function((x @ M1) @ (x @ M2).t()) @ (x @ M1 @ M2)

    def fixed(x: Tensor) -> Tensor:
        return function((x @ M1) @ (x @ M2).t()).detach() @ (x @ M1 @ M2)

    assert ("Mm", 1) in signals(attend, X)
    x = X.clone().requires_grad_()
    y = fixed(x)
    (gradient,) = torch.autograd.grad(y, x, anything(y))
    assert error(relevance(attend, X, preset="cp-lrp")[0], X * gradient) < TOLERANCE


@pytest.mark.parametrize("order", ["gate last", "gate first"])
def test_a_squeeze_and_excite_gate_takes_nothing_under_cp_lrp(order):
    def gate(x: Tensor) -> Tensor:
        return torch.sigmoid(F.relu(x.mean(-1, keepdim=True) @ gaussian(1, 4, seed=16)) @ gaussian(4, 1, seed=17))

    def function(x: Tensor) -> Tensor:
        return x * gate(x) if order == "gate last" else gate(x).expand_as(x) * x

    assert signals(function, X) == [("Mul", 0 if order == "gate last" else 1)]
    y = function(X)
    assert error(relevance(function, X, preset="cp-lrp")[0], y * anything(y)) < TOLERANCE


def test_a_hard_gate_takes_nothing_under_cp_lrp():
    def function(x: Tensor) -> Tensor:
        return (x @ M1) * F.hardsigmoid(x @ M2)

    assert signals(function, X) == [("Mul", 0)]


def test_the_linear_half_of_swiglu_is_the_signal_under_cp_lrp():
    y = swiglu(X)
    assert signals(swiglu, X) == [("Mul", 1)]
    expected = X * ((anything(y) * F.silu(X @ M1)) @ M2.T)
    assert error(relevance(swiglu, X, preset="cp-lrp")[0], expected) < TOLERANCE


def test_a_product_of_two_equals_is_halved_under_cp_lrp():
    assert signals(queries_and_keys, X) == []
    (found,), (uniform,) = (relevance(queries_and_keys, X, preset=preset) for preset in ("cp-lrp", "attnlrp"))
    assert error(found, uniform) < TOLERANCE


# ---------------------------------------------------------------- first layers


FLAT = dlrp.preset("epsilon-plus-flat")


def first(model: nn.Module, *inputs: Tensor) -> set[str]:
    """The names of the modules that are first layers."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    graph = graph_of([model(*leaves)], leaves)
    names = {parameter: name.removesuffix(".weight") for name, parameter in model.named_parameters()}
    found = set()
    for node in first_layers(graph):
        below = [ref[0] for ref in graph.edges[node] if ref is not None]
        below += [ref[0] for at in below if graph.name(at) == "T" for ref in graph.edges[at]]
        leaves = [graph.handles[at].variable for at in below if graph.name(at) == "AccumulateGrad"]
        found |= {names[leaf] for leaf in leaves if leaf in names and not names[leaf].endswith("bias")}
    return found


class Branches(nn.Module):
    """Two convolutions see the input, a third sees only them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv1d(3, 4, 3, padding=1), nn.Conv1d(3, 5, 1), nn.Conv1d(9, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.cat([F.relu(self.a(x)), self.b(x)], 1))


class Normalised(nn.Module):
    """The mean and the standard deviation of the data come off first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", gaussian(3, 1, seed=1))
        self.register_buffer("std", gaussian(3, 1, seed=2).abs() + 0.5)
        self.a, self.b = nn.Conv1d(3, 4, 3), nn.Conv1d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a((x - self.mean) / self.std)))


class ResNet(nn.Module):
    """Only the stem is first, though blocks have skips and projections of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv1d(3, 4, 3, padding=1, bias=False), nn.BatchNorm1d(4)
        self.a, self.b, self.project = nn.Conv1d(4, 5, 3, padding=1), nn.Conv1d(5, 6, 1), nn.Conv1d(4, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        return self.b(F.relu(self.a(x))) + self.project(x)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.head = nn.Conv1d(3, 4, 3), nn.Linear(5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(F.relu(self.image(x)).amax(-1) + F.relu(self.text(y)))


IMAGE = gaussian(2, 3, 6, seed=21)


def test_every_branch_of_the_input_has_a_first_layer():
    assert first(Branches().double().eval(), IMAGE) == {"a", "b"}


def test_normalising_the_input_is_no_layer():
    assert first(Normalised().double().eval(), IMAGE) == {"a"}


def test_only_the_stem_of_a_resnet_is_first():
    assert first(ResNet().double().eval(), IMAGE) == {"stem"}


def test_two_inputs_have_a_first_layer_each():
    assert first(TwoInputs().double().eval(), IMAGE, gaussian(2, 5, seed=22)) == {"image", "text"}


def test_the_first_layers_above_a_hidden_input():
    class Upper(ResNet):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x))) + self.project(x)

    assert first(Upper().double().eval(), gaussian(2, 4, 6)) == {"a", "project"}


def test_the_first_layer_gets_its_rule():
    model = ResNet().double().eval()
    rules = {step.name: step.rule for step in planned(model, IMAGE, preset=FLAT).steps if step.name == "Convolution"}
    flat = [step for step in planned(model, IMAGE, preset=FLAT).steps if isinstance(step.rule, Flat)]
    assert rules and len(flat) == 1


# ---------------------------------------------------------------- folded batch norms


def randomise(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.copy_(noise.abs() + 0.5 if name.endswith("running_var") else noise * 0.5)
    return model.double().eval()


def folds(model: nn.Module, x: Tensor, preset) -> int:
    return sum(step.normed for step in planned(model, x, preset=preset).steps)


SIGNED = {
    "gamma": dlrp.preset("gamma"), "epsilon-plus": dlrp.preset("epsilon-plus"),
    "alpha-beta": dlrp.preset("epsilon-alpha2-beta1") | {"linear": dlrp.AlphaBeta(2, 1)},
    "box": dlrp.preset("epsilon-gamma-box", low=-3.0, high=3.0), "flat": FLAT,
    "w-square": dlrp.preset("epsilon") | {"first": dlrp.WSquare()},
}  # fmt: skip

PAIRS = {
    "conv": (lambda: nn.Conv2d(3, 4, 3, padding=1), lambda: nn.BatchNorm2d(4), (2, 3, 5, 5)),
    "conv, no bias": (lambda: nn.Conv2d(3, 4, 3, bias=False), lambda: nn.BatchNorm2d(4), (2, 3, 5, 5)),
    "conv, plain norm": (lambda: nn.Conv2d(3, 4, 3), lambda: nn.BatchNorm2d(4, affine=False), (2, 3, 5, 5)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), lambda: nn.BatchNorm2d(4), (2, 4, 5, 5)),
    "grouped, strided": (lambda: nn.Conv2d(4, 6, 3, 2, 1, groups=2), lambda: nn.BatchNorm2d(6), (2, 4, 5, 5)),
    "conv 1d": (lambda: nn.Conv1d(3, 4, 3), lambda: nn.BatchNorm1d(4), (2, 3, 6)),
    "conv 3d": (lambda: nn.Conv3d(2, 3, 2), lambda: nn.BatchNorm3d(3), (1, 2, 3, 4, 3)),
    "linear": (lambda: nn.Linear(5, 4), lambda: nn.BatchNorm1d(4), (3, 5)),
    "linear, no bias": (lambda: nn.Linear(5, 4, bias=False), lambda: nn.BatchNorm1d(4), (3, 5)),
}


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("preset", SIGNED)
@pytest.mark.parametrize("name", PAIRS)
def test_a_batch_norm_behind_a_linear_map_is_folded(name, preset, activation):
    make_map, make_norm, shape = PAIRS[name]
    layer, norm = randomise(make_map()), randomise(make_norm())
    if not norm.affine:
        norm.weight, norm.bias = None, None
        scale, shift = torch.ones(norm.num_features).double(), torch.zeros(norm.num_features).double()
    else:
        scale, shift = norm.weight, norm.bias
    full = type(norm)(norm.num_features).double().eval()
    full.load_state_dict(norm.state_dict() | {"weight": scale, "bias": shift})
    fuse = fuse_linear_bn_eval if isinstance(layer, nn.Linear) else fuse_conv_bn_eval
    fused = fuse(layer, full).requires_grad_()
    function = getattr(torch, activation)
    x = gaussian(*shape, seed=23)
    apart = relevance(lambda x: function(norm(layer(x))), x, preset=SIGNED[preset])[0]
    together = relevance(lambda x: function(fused(x)), x, preset=SIGNED[preset])[0]
    assert error(apart, together) < 1e-8
    if preset in ("gamma", "alpha-beta") or (preset == "epsilon-plus" and "linear" not in name):
        assert folds(nn.Sequential(layer, norm), x, SIGNED[preset]) == 1


def test_a_map_whose_output_is_used_elsewhere_is_not_folded():
    layer, norm = randomise(nn.Conv1d(3, 4, 3)), randomise(nn.BatchNorm1d(4))
    assert folds(lambda x: (h := layer(x)) + norm(h), IMAGE, "gamma") == 0
    assert folds(lambda x: norm(layer(x)), IMAGE, "gamma") == 1


def test_a_batch_norm_in_training_mode_is_not_folded():
    layer, norm = randomise(nn.Conv1d(3, 4, 3)), randomise(nn.BatchNorm1d(4)).train()
    assert folds(lambda x: norm(layer(x)), IMAGE, "gamma") == 0


def test_a_batch_norm_with_something_between_is_not_folded():
    layer, norm = randomise(nn.Conv1d(3, 4, 3)), randomise(nn.BatchNorm1d(4))
    assert folds(lambda x: norm(torch.relu(layer(x))), IMAGE, "gamma") == 0


def test_a_batch_norm_in_front_is_not_folded():
    layer, norm = randomise(nn.Conv1d(3, 4, 3)), randomise(nn.BatchNorm1d(3))
    assert folds(lambda x: layer(norm(x)), IMAGE, "gamma") == 0


def test_a_transposed_convolution_is_not_folded():
    layer, norm = randomise(nn.ConvTranspose1d(3, 4, 3)), randomise(nn.BatchNorm1d(4))
    assert folds(lambda x: norm(layer(x)), IMAGE, "gamma") == 0
    assert torch.isfinite(relevance(lambda x: norm(layer(x)), IMAGE, preset="gamma")[0]).all()


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic"])
def test_other_presets_do_not_fold(preset):
    layer, norm = randomise(nn.Conv1d(3, 4, 3)), randomise(nn.BatchNorm1d(4))
    assert folds(lambda x: norm(layer(x)), IMAGE, preset) == 0


# ---------------------------------------------------------------- eager attention equals SDPA


Q, K, VALUES = gaussian(2, 4, 5, 6, seed=31), gaussian(2, 4, 5, 6, seed=32), gaussian(2, 4, 5, 6, seed=33)
BIAS = gaussian(1, 4, 5, 5, seed=34)
LOWER = torch.ones(5, 5).tril().bool()
HOLES = torch.tensor([1, 1, 1, 0, 0]).bool().expand(2, 1, 5, 5)


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ v


def repeated(t: Tensor, times: int) -> Tensor:
    """As transformers repeats the heads of keys and values."""
    batch, heads, length, size = t.shape
    return t[:, :, None].expand(batch, heads, times, length, size).reshape(batch, heads * times, length, size)


SETTINGS = {
    "plain": {},
    "scaled": {"scale": 0.7},
    "causal": {"mask": LOWER},
    "padded": {"mask": HOLES},
    "bias": {"mask": BIAS},
}


def assert_same(a: Tensor, b: Tensor) -> None:
    """Relevance of the same, or both none."""
    assert (not a.any() and not b.any()) or error(a, b) < TOLERANCE


@pytest.mark.parametrize("preset", ["attnlrp", "cp-lrp"])
@pytest.mark.parametrize("live", ["qkv", "v", "q", "k", "qk", "qv", "kv"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_eager_attention_equals_sdpa(setting, live, preset):
    how = SETTINGS[setting]
    given = dict(zip("qkv", (Q, K, VALUES), strict=True))

    def fused(*tensors: Tensor) -> Tensor:
        at = given | dict(zip(live, tensors, strict=True))
        if setting == "causal":
            return F.scaled_dot_product_attention(at["q"], at["k"], at["v"], is_causal=True)
        return F.scaled_dot_product_attention(
            at["q"], at["k"], at["v"], attn_mask=how.get("mask"), scale=how.get("scale")
        )

    def written(*tensors: Tensor) -> Tensor:
        at = given | dict(zip(live, tensors, strict=True))
        return eager(at["q"], at["k"], at["v"], **how)

    inputs = [given[name] for name in live]
    assert [s.name for s in planned(fused, *inputs, preset=preset).steps] == ["ScaledDotProductFlashAttentionForCpu"]
    for name, a, b in zip(live, *(relevance(f, *inputs, preset=preset) for f in (fused, written)), strict=True):
        assert_same(a, b)
        if preset == "cp-lrp" and name != "v" and "v" in live:
            assert not a.any()


@pytest.mark.parametrize("preset", ["attnlrp", "cp-lrp"])
@pytest.mark.parametrize("causal", [False, True])
def test_eager_attention_with_grouped_heads_equals_sdpa(causal, preset):
    k, v = K[:, :2], VALUES[:, :2]
    mask = LOWER if causal else None
    functions = (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
        lambda q, k, v: F.scaled_dot_product_attention(q, repeated(k, 2), repeated(v, 2), is_causal=causal),
        lambda q, k, v: eager(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), mask),
        lambda q, k, v: eager(q, repeated(k, 2), repeated(v, 2), mask),
    )
    first, *others = (relevance(function, Q, k, v, preset=preset) for function in functions)
    for other in others:
        for i, (a, b) in enumerate(zip(first, other, strict=True)):
            assert_same(a, b)
            assert bool(a.any()) == (preset == "attnlrp" or i == 2)


@pytest.mark.parametrize("preset", ["attnlrp", "cp-lrp"])
@pytest.mark.parametrize("asked", [False, True], ids=["bias not asked for", "bias asked for"])
def test_eager_attention_with_a_learnt_bias_equals_sdpa(asked, preset):
    """As in T5, where position biases are parameters that require gradients."""
    bias = BIAS.clone().requires_grad_()
    inputs = (Q, K, VALUES, BIAS) if asked else (Q, K, VALUES)

    def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor = bias) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor = bias) -> Tensor:
        return eager(q, k, v, mask)

    pairs = zip(*(relevance(function, *inputs, preset=preset) for function in (fused, written)), strict=True)
    for i, (a, b) in enumerate(pairs):
        assert_same(a, b)
        assert bool(a.any()) == (preset == "attnlrp" or i == 2)


def test_attention_weights_and_values_take_half_each_under_attnlrp():
    """A·v halves; q·kᵀ halves again; softmax hands down its gradient (AttnLRP, sections 3.2 and 3.3)."""
    q, k, v = (t.clone().requires_grad_() for t in (Q, K, VALUES))
    y = eager(q, k, v)
    s = anything(y)
    gradients = torch.autograd.grad(y, (q, k, v), s)
    found = relevance(F.scaled_dot_product_attention, Q, K, VALUES)
    for x, gradient, share, r in zip((Q, K, VALUES), gradients, (0.25, 0.25, 0.5), found, strict=True):
        assert error(r, x * gradient * share) < TOLERANCE

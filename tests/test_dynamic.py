"""`dynamic` against the paper's formulas written slowly, and the paper's three worked graphs.

Every network is written twice, side by side: `forward` for torch, `tape` for the oracle.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dynamiclrp as dlrp
from oracles import dynamic as slow
from oracles import error
from oracles.dynamic import Value, leaf, propagate

TOLERANCE = 1e-6


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def largest(y: Tensor) -> Tensor:
    """The largest output of each row keeps its value: the default seed."""
    winner = y.argmax(-1, keepdim=True)
    return torch.zeros_like(y).scatter(-1, winner, y.gather(-1, winner))


def build(network: type[nn.Module], seed: int = 1) -> nn.Module:
    """In float64 and eval mode, every parameter and statistic random: nothing is 0 or 1 by chance."""
    torch.manual_seed(seed)
    net = network().double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter) / max(1, parameter[0].numel()) ** 0.5)
        for name, buffer in net.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    return net


# ---------------------------------------------------------------- networks


class Mlp(nn.Module):
    input_shape = (3, 6)

    def __init__(self, activation=torch.relu):
        super().__init__()
        self.activation = activation
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 7), nn.Linear(7, 4)

    def forward(self, x):
        x = self.activation(self.first(x))
        x = self.activation(self.second(x))
        return self.third(x)

    def tape(self, x: Value) -> Value:
        x = slow.identity(self.activation, slow.linear(x, self.first.weight, self.first.bias))
        x = slow.identity(self.activation, slow.linear(x, self.second.weight, self.second.bias))
        return slow.linear(x, self.third.weight, self.third.bias)


class TanhMlp(Mlp):
    def __init__(self):
        super().__init__(torch.tanh)


class GeluMlp(Mlp):
    def __init__(self):
        super().__init__(functional.gelu)


class BiasFreeMlp(Mlp):
    def __init__(self):
        super().__init__()
        for layer in (self.first, self.second, self.third):
            layer.bias = None


class Vgg(nn.Module):
    """Convolutions with biases, max-pool, adaptive avg-pool with overlapping windows (5 pixels into 2)."""

    input_shape = (2, 3, 10, 10)

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 3, padding=1)
        self.hidden, self.head = nn.Linear(5 * 2 * 2, 6), nn.Linear(6, 4)

    def forward(self, x):
        x = functional.max_pool2d(torch.relu(self.first(x)), 2)
        x = functional.adaptive_avg_pool2d(torch.relu(self.second(x)), 2)
        return self.head(torch.relu(self.hidden(x.flatten(1))))

    def tape(self, x: Value) -> Value:
        x = slow.max_pool(slow.identity(torch.relu, slow.conv(x, self.first.weight, self.first.bias, padding=1)), 2)
        x = slow.identity(torch.relu, slow.conv(x, self.second.weight, self.second.bias, padding=1))
        x = slow.move(lambda t: t.flatten(1), slow.adaptive_avg_pool(x, 2))
        x = slow.identity(torch.relu, slow.linear(x, self.hidden.weight, self.hidden.bias))
        return slow.linear(x, self.head.weight, self.head.bias)


class VggWithAPoolBetween(nn.Module):
    """A max-pool and an in-place ReLU between the uniform pool and the convolution that can take its relevance up."""

    input_shape = (2, 3, 12, 12)

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3, stride=2, padding=1, bias=False)
        self.head = nn.Linear(5 * 3 * 3, 4)

    def forward(self, x):
        x = functional.relu(self.first(x), inplace=True)
        x = functional.max_pool2d(functional.relu(self.second(x), inplace=True), 2, stride=1)
        return self.head(functional.adaptive_avg_pool2d(x, 3).flatten(1))

    def tape(self, x: Value) -> Value:
        x = slow.identity(torch.relu, slow.conv(x, self.first.weight, self.first.bias))
        x = slow.identity(torch.relu, slow.conv(x, self.second.weight, stride=2, padding=1))
        x = slow.move(lambda t: t.flatten(1), slow.adaptive_avg_pool(slow.max_pool(x, 2, stride=1), 3))
        return slow.linear(x, self.head.weight, self.head.bias)


class PoolToOnePixel(nn.Module):
    """torch computes `adaptive_avg_pool2d(x, 1)` as a mean, so on the graph it is one: shares by absolute value."""

    input_shape = (2, 3, 6, 6)

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(functional.adaptive_avg_pool2d(torch.tanh(self.first(x)), 1).flatten(1))

    def tape(self, x: Value) -> Value:
        x = slow.identity(torch.tanh, slow.conv(x, self.first.weight, self.first.bias))
        return slow.linear(slow.mean_over(x, (2, 3)), self.head.weight, self.head.bias)


class Residual(nn.Module):
    """Two residual blocks with batch-norm, one of them projected and strided, and a mean over the picture."""

    input_shape = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.a1, self.a1_norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.a2 = nn.Conv2d(4, 4, 3, padding=1)
        self.b1 = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.b2, self.b2_norm = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.project = nn.Conv2d(4, 6, 1, stride=2)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = torch.relu(self.stem_norm(self.stem(x)))
        x = torch.relu(x + self.a2(torch.relu(self.a1_norm(self.a1(x)))))
        x = torch.relu(self.project(x) + self.b2_norm(self.b2(torch.relu(self.b1(x)))))
        return self.head(x.mean((2, 3)))

    def tape(self, x: Value) -> Value:
        relu = torch.relu
        x = slow.identity(relu, slow.batch_norm(self.stem_norm, slow.conv(x, self.stem.weight, padding=1)))
        inner = slow.identity(relu, slow.batch_norm(self.a1_norm, slow.conv(x, self.a1.weight, padding=1)))
        x = slow.identity(relu, slow.add(x, slow.conv(inner, self.a2.weight, self.a2.bias, padding=1)))
        inner = slow.identity(relu, slow.conv(x, self.b1.weight, self.b1.bias, stride=2, padding=1))
        inner = slow.batch_norm(self.b2_norm, slow.conv(inner, self.b2.weight, padding=1))
        x = slow.identity(relu, slow.add(slow.conv(x, self.project.weight, self.project.bias, stride=2), inner))
        return slow.linear(slow.mean_over(x, (2, 3)), self.head.weight, self.head.bias)


class ResidualMlp(nn.Module):
    """Skips of vectors, through nodes that keep none of them: every add needs values that nobody saved."""

    input_shape = (3, 6)

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        x = x + self.first(x)
        x = x - torch.relu(self.second(x))
        return self.head(x)

    def tape(self, x: Value) -> Value:
        x = slow.add(x, slow.linear(x, self.first.weight, self.first.bias))
        x = slow.sub(x, slow.identity(torch.relu, slow.linear(x, self.second.weight, self.second.bias)))
        return slow.linear(x, self.head.weight, self.head.bias)


class Transformer(nn.Module):
    """Pre-LN blocks with fused attention on token embeddings plus learned positions; mean over tokens."""

    input_shape = (2, 5, 8)
    causal = False

    def __init__(self, blocks: int = 2):
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(5, 8))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(8), "q": nn.Linear(8, 8), "k": nn.Linear(8, 8), "v": nn.Linear(8, 8),
                    "out": nn.Linear(8, 8), "norm2": nn.LayerNorm(8), "up": nn.Linear(8, 12), "down": nn.Linear(12, 8),
                }
            )
            for _ in range(blocks)
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    @staticmethod
    def split(x):
        return x.unflatten(-1, (2, 4)).transpose(1, 2)

    @staticmethod
    def merge(x):
        return x.transpose(1, 2).flatten(2)

    def forward(self, x):
        x = x + self.positions
        for block in self.blocks:
            normed = block["norm1"](x)
            q, k, v = (self.split(block[name](normed)) for name in "qkv")
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            x = x + block["out"](self.merge(attended))
            x = x + block["down"](functional.gelu(block["up"](block["norm2"](x))))
        return self.head(self.norm(x).mean(1))

    def tape(self, x: Value) -> Value:
        def linear(value: Value, layer: nn.Linear) -> Value:
            return slow.linear(value, layer.weight, layer.bias)

        x = slow.add(x, leaf(self.positions))
        for block in self.blocks:
            normed = slow.identity(block["norm1"], x)
            q, k, v = (slow.move(self.split, linear(normed, block[name])) for name in "qkv")
            attended = slow.attention(q, k, v, causal=self.causal)
            x = slow.add(x, linear(slow.move(self.merge, attended), block["out"]))
            inner = slow.identity(functional.gelu, linear(slow.identity(block["norm2"], x), block["up"]))
            x = slow.add(x, linear(inner, block["down"]))
        return linear(slow.mean_over(slow.identity(self.norm, x), (1,)), self.head)


class CausalTransformer(Transformer):
    causal = True


class WrittenOutAttention(nn.Module):
    """q k^T, softmax and A v as nodes of their own get what the fused kernel gets: attention weights take nothing."""

    input_shape = (2, 5, 8)

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        weights = torch.softmax(q @ k.transpose(1, 2) * 8**-0.5, dim=-1)
        return self.head((weights @ v).mean(1))

    def tape(self, x: Value) -> Value:
        q, k, v = (slow.linear(x, layer.weight, layer.bias) for layer in (self.q, self.k, self.v))
        return slow.linear(slow.mean_over(slow.attention(q, k, v), (1,)), self.head.weight, self.head.bias)


NETWORKS = [
    Mlp, TanhMlp, GeluMlp, BiasFreeMlp, ResidualMlp, Vgg, VggWithAPoolBetween, PoolToOnePixel, Residual,
    Transformer, CausalTransformer, WrittenOutAttention,
]  # fmt: skip
CONSERVING = [network for network in NETWORKS if network not in (Transformer, CausalTransformer, WrittenOutAttention)]
named = pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.__name__)


def expected(net: nn.Module, x: Tensor, seed: Tensor) -> Tensor:
    on_tape = leaf(x)
    return propagate(net.tape(on_tape), seed)[on_tape]


# ---------------------------------------------------------------- the oracle stands on its own


@named
def test_the_tape_computes_the_network(network):
    net, x = build(network), gaussian(*network.input_shape)
    assert error(net.tape(leaf(x)).data, net(x).detach()) < 1e-12


@pytest.mark.parametrize("network", CONSERVING, ids=lambda network: network.__name__)
def test_the_tape_conserves_relevance(network):
    """What the input does not get, biases keep."""
    net, x = build(network), gaussian(*network.input_shape)
    output = net.tape(leaf(x))
    relevance = propagate(output, largest(output.data))
    leaves = sum(r.sum() for value, r in relevance.items() if not value.operands)
    assert torch.allclose(leaves, largest(output.data).sum(), rtol=1e-6)


def test_the_tape_is_gradient_times_input_without_biases():
    net, x = build(BiasFreeMlp), gaussian(*BiasFreeMlp.input_shape).requires_grad_()
    y = net(x)
    (gradient,) = torch.autograd.grad(largest(y).sum(), x)
    assert error(expected(net, x, largest(y.detach())), (x * gradient).detach()) < 1e-8


# ---------------------------------------------------------------- dynamic equals the oracle


@named
def test_dynamic_of_a_network(network):
    net, x = build(network), gaussian(*network.input_shape).requires_grad_()
    y = net(x)
    (r,) = dlrp.relevance(y, x, preset="dynamic")
    assert error(r, expected(net, x, largest(y.detach()))) < TOLERANCE


@named
def test_dynamic_with_any_seed(network):
    """Relevance of both signs at every output of every row."""
    net, x = build(network, seed=2), gaussian(*network.input_shape, seed=2).requires_grad_()
    y = net(x)
    seed = y.detach() * gaussian(*y.shape, seed=5)
    (r,) = dlrp.relevance(y, x, seed=seed, preset="dynamic")
    assert error(r, expected(net, x, seed)) < TOLERANCE


@named
def test_dynamic_by_explain(network):
    """`explain` freezes what it may; the relevance is the same."""
    net, x = build(network), gaussian(*network.input_shape)
    seed = largest(net(x).detach())
    a = dlrp.explain(net, x, target=seed, preset="dynamic")
    assert error(a.relevance, expected(net, x, seed)) < TOLERANCE


@named
def test_dynamic_by_explain_of_a_frozen_model(network):
    """A frozen bias takes its share too: `explain` saw it in the forward pass."""
    net, x = build(network).requires_grad_(False), gaussian(*network.input_shape)
    seed = largest(net(x))
    a = dlrp.explain(net, x, target=seed, preset="dynamic")
    assert error(a.relevance, expected(net, x, seed)) < TOLERANCE


@named
def test_a_batch_equals_single_runs(network):
    net, x = build(network), gaussian(*network.input_shape).requires_grad_()
    (together,) = dlrp.relevance(net(x), x, preset="dynamic")
    rows = [row[None].detach().requires_grad_() for row in x]
    singles = torch.cat([dlrp.relevance(net(row), row, preset="dynamic")[0] for row in rows])
    assert error(together, singles) < 1e-9


def test_a_bias_may_be_asked_for_its_share():
    net, x = build(Mlp), gaussian(*Mlp.input_shape).requires_grad_()
    y = net(x)
    r_x, r_bias = dlrp.relevance(y, (x, net.first.bias), preset="dynamic")
    on_tape = leaf(x)
    output = net.tape(on_tape)
    relevance = propagate(output, largest(y.detach()))
    (r_expected,) = [r for v, r in relevance.items() if not v.operands and torch.equal(v.data, net.first.bias.detach())]
    assert error(r_x, relevance[on_tape]) < TOLERANCE
    assert error(r_bias, r_expected) < TOLERANCE


# ---------------------------------------------------------------- batch norm, where we leave the paper

NORMS = {
    "2d": (lambda: nn.BatchNorm2d(3), (2, 3, 4, 5)),
    "1d": (lambda: nn.BatchNorm1d(3), (4, 3)),
    "1d, in time": (lambda: nn.BatchNorm1d(3), (2, 3, 6)),
    "3d": (lambda: nn.BatchNorm3d(3), (2, 3, 2, 3, 2)),
    "without parameters": (lambda: nn.BatchNorm2d(3, affine=False), (2, 3, 4, 5)),
    "one row in channels-last strides": (lambda: nn.BatchNorm2d(3), (1, 3, 4, 5)),
}


def norm_of(name: str) -> tuple[nn.Module, Tensor]:
    make, shape = NORMS[name]
    x = gaussian(*shape, seed=21)
    return build(make), x.to(memory_format=torch.channels_last) if "channels-last" in name else x


PICTURES = ["2d", "without parameters", "one row in channels-last strides"]


@pytest.mark.parametrize("name, pooled", [*((n, False) for n in NORMS), *((n, True) for n in PICTURES)])
def test_the_shift_of_a_batch_norm_takes_its_share(name, pooled):
    norm, x = norm_of(name)
    x.requires_grad_()
    y, on_tape = norm(x), leaf(x)
    result = slow.batch_norm(norm, on_tape)
    if pooled:  # an average pool hands down R, not s
        y, result = functional.adaptive_avg_pool2d(y, 2), slow.adaptive_avg_pool(result, 2)
    seed = y.detach() * gaussian(*y.shape, seed=22)
    (r,) = dlrp.relevance(y, x, seed=seed, preset="dynamic")
    assert error(r, propagate(result, seed)[on_tape]) < TOLERANCE


def test_the_bias_of_a_batch_norm_may_be_asked_for_its_share():
    norm, x = norm_of("2d")
    x.requires_grad_()
    y, on_tape = norm(x), leaf(x)
    relevance = propagate(slow.batch_norm(norm, on_tape), y.detach())
    r_x, r_weight, r_bias = dlrp.relevance(y, (x, norm.weight, norm.bias), seed=y.detach(), preset="dynamic")
    (shift,) = [v for v in relevance if not v.operands and v is not on_tape]
    assert error(r_x, relevance[on_tape]) < TOLERANCE
    assert not r_weight.any()  # a parameter takes a share of a sum, not of a product
    assert error(r_bias, (relevance[shift] / shift.data).flatten() * norm.bias.detach()) < TOLERANCE


def test_the_papers_identity_is_an_override_away():
    norm, x = norm_of("2d")
    x.requires_grad_()
    y = norm(x)
    seed = y.detach() * gaussian(*y.shape, seed=22)
    rule = dlrp.preset("dynamic") | {"batchnorm": dlrp.Identity(eps=1e-11)}
    (r,) = dlrp.relevance(y, x, seed=seed, preset=rule)
    assert error(r, seed) < TOLERANCE


class Deep(nn.Module):
    """Fifty convolutions, each with a batch norm: what an unbounded rule overflows float32 on."""

    def __init__(self):
        super().__init__()
        layers = [[nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Tanh()] for _ in range(50)]
        self.body = nn.Sequential(*(layer for block in layers for layer in block), nn.Flatten(), nn.Linear(64, 3))

    def forward(self, x):
        return self.body(x)


def test_dynamic_of_a_deep_stack_of_batch_norms_is_finite():
    net, x = build(Deep).float(), gaussian(2, 4, 4, 4).float().requires_grad_()
    with pytest.raises(dlrp.NonFiniteError):  # the paper's rule, for comparison
        dlrp.explain(net, x, preset=dlrp.preset("dynamic") | {"batchnorm": dlrp.Identity(eps=1e-11)})
    (r,) = dlrp.relevance(net(x), x, preset="dynamic")
    assert r.isfinite().all() and r.any()


@pytest.mark.parametrize("name", NORMS)
def test_the_share_of_a_batch_norms_input_never_exceeds_its_gradient(name):
    norm, x = norm_of(name)
    with torch.no_grad():
        x.flatten()[::3] *= 1e-12  # where s·y/x would be largest
    x.requires_grad_()
    y = norm(x)
    seed = y.detach() * gaussian(*y.shape, seed=22)
    (r,) = dlrp.relevance(y, x, seed=seed, preset="dynamic", retain_graph=True)
    (gradient,) = dlrp.relevance(y, x, seed=seed, preset="gradient")
    assert (r.abs() <= gradient.abs() * (1 + 1e-9)).all()


# ---------------------------------------------------------------- functions with f(0) ≠ 0, where we leave it too

FUNCTIONS = {
    "sigmoid": torch.sigmoid,
    "hard sigmoid": functional.hardsigmoid,
    "softplus": functional.softplus,
    "log sigmoid": functional.logsigmoid,
    "exp": torch.exp,
    "cos": torch.cos,
    "erfc": torch.special.erfc,
}


@pytest.mark.parametrize("pooled", [False, True], ids=["coefficients", "relevance"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_constant_of_a_function_takes_its_share(name, pooled):
    x = 2 * gaussian(2, 3, 4, 4, seed=31)
    on_tape, leaf_ = leaf(x), x.clone().requires_grad_()
    y, result = FUNCTIONS[name](leaf_), slow.function(FUNCTIONS[name], on_tape)
    if pooled:  # an average pool hands down R, not s
        y, result = functional.adaptive_avg_pool2d(y, 2), slow.adaptive_avg_pool(result, 2)
    seed = y.detach() * gaussian(*y.shape, seed=32)
    (r,) = dlrp.relevance(y, leaf_, seed=seed, preset="dynamic")
    assert error(r, propagate(result, seed)[on_tape]) < TOLERANCE


@pytest.mark.parametrize("name", ["log", "sqrt", "rsqrt", "reciprocal"])
def test_functions_without_a_finite_constant_pass_all(name):
    x = (gaussian(3, 4, seed=31).abs() + 0.1).requires_grad_()
    y = getattr(torch, name)(x)
    seed = y.detach() * gaussian(3, 4, seed=32)
    (r,) = dlrp.relevance(y, x, seed=seed, preset="dynamic")
    assert error(r, seed) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_share_of_a_functions_argument_is_bounded_near_zero(name, dtype):
    """By the seed times the slope: at most 1 for these, but for exp, whose slope at 1 is e - 1."""
    x = torch.tensor([0.0, 1e-30, -1e-12, 1e-8, -1e-6, 1e-4, -1e-3, 1e-2, 0.1, 1.0], dtype=dtype).requires_grad_()
    y = FUNCTIONS[name](x)
    (r,) = dlrp.relevance(y, x, seed=y.detach(), preset="dynamic")
    assert (r.abs() <= 1.8 * x.detach().abs() * 1.001).all()
    if name != "cos":  # and it is of that size, not lost to rounding
        assert (r.abs()[2:8] >= 0.1 * x.detach().abs()[2:8]).all()


def test_the_papers_identity_for_functions_is_an_override_away():
    x = (gaussian(3, 4, seed=31)).requires_grad_()
    y = torch.sigmoid(x)
    seed = y.detach() * gaussian(3, 4, seed=32)
    rule = dlrp.preset("dynamic") | {"function": dlrp.Identity(eps=1e-11)}
    (r,) = dlrp.relevance(y, x, seed=seed, preset=rule)
    assert error(r, seed) < TOLERANCE


# ---------------------------------------------------------------- a norm that is one node on a GPU


class OneNodeNorm(torch.autograd.Function):
    """RMSNorm over the last dimension, as torch's kernel on a GPU saves it."""

    @staticmethod
    def forward(ctx, x, weight):
        r = (x.square().mean(-1, keepdim=True) + 1e-2).rsqrt()
        ctx.save_for_backward(x, r, weight)
        return x * r if weight is None else x * r * weight

    @staticmethod
    def backward(ctx, grad):
        x, r, weight = ctx.saved_tensors  # to x it hands nothing: the rule has its own
        return torch.zeros_like(grad), None if weight is None else (grad * x * r).sum((0, 1, 2))


@pytest.mark.parametrize("zeros", [False, True], ids=["", "a row of zeros"])
@pytest.mark.parametrize("pooled", [False, True], ids=["coefficients", "relevance"])
@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norm_is_the_same_in_one_node_and_written_out(weighted, pooled, zeros):
    x, weight = gaussian(2, 3, 4, 8, seed=31), gaussian(8, seed=33) if weighted else None
    x[0, 1] *= 0 if zeros else 1

    def explained(norm):
        leaf_ = x.clone().requires_grad_()
        y = norm(leaf_)
        y = functional.adaptive_avg_pool2d(y, 2) if pooled else y  # hands down R, not s
        return dlrp.relevance(y, leaf_, seed=y.detach() * gaussian(*y.shape, seed=32), preset="dynamic")[0]

    dlrp.register("OneNodeNormBackward", "normalise", root=lambda n: n.tensors)
    try:
        found = explained(lambda x: OneNodeNorm.apply(x, weight))
    finally:
        del dlrp.ops.OPS["OneNodeNormBackward"]
    expected = explained(lambda x: functional.rms_norm(x, (8,), weight, 1e-2))
    assert expected.isfinite().all() and expected.abs().max() > 0.1
    assert error(found, expected) < TOLERANCE


@pytest.mark.parametrize("pooled", [False, True], ids=["coefficients", "relevance"])
@pytest.mark.parametrize("asked", ["both", "weight"])
def test_the_weight_of_rms_norm_takes_its_share_where_it_is_asked_for(asked, pooled):
    x, weight = gaussian(2, 3, 4, 8, seed=31), gaussian(8, seed=33)

    def explained(norm):
        leaf_, own = x.clone().requires_grad_(asked == "both"), weight.clone().requires_grad_()
        y = norm(leaf_, own)
        y = functional.adaptive_avg_pool2d(y, 2) if pooled else y
        seed = y.detach() * gaussian(*y.shape, seed=32)
        return dlrp.relevance(y, [leaf_, own] if asked == "both" else [own], seed=seed, preset="dynamic")

    dlrp.register("OneNodeNormBackward", "normalise", root=lambda n: n.tensors)
    try:
        found = explained(OneNodeNorm.apply)
    finally:
        del dlrp.ops.OPS["OneNodeNormBackward"]
    for one, expected in zip(found, explained(lambda x, w: functional.rms_norm(x, (8,), w, 1e-2)), strict=True):
        assert error(one, expected) < TOLERANCE


# ---------------------------------------------------------------- one operation at a time

A, B = gaussian(3, 4, seed=11), gaussian(3, 4, seed=12)
ROW = gaussian(4, seed=13)
CONSTANT = gaussian(3, 4, seed=14)

OPERATIONS = {
    "add": (lambda a, b: a + b, slow.add),
    "add with alpha": (lambda a, b: torch.add(a, b, alpha=-2.5), lambda a, b: slow.add(a, b, -2.5)),
    "sub": (lambda a, b: a - b, slow.sub),
    "sub with alpha": (lambda a, b: torch.sub(a, b, alpha=0.5), lambda a, b: slow.sub(a, b, 0.5)),
    "rsub": (lambda a, b: torch.rsub(a, b), lambda a, b: slow.sub(b, a)),
    "mul": (lambda a, b: a * b, slow.mul),
    "div": (lambda a, b: a / b, slow.div),
    "add of a negative": (lambda a, b: a + (-b), lambda a, b: slow.add(a, slow.scale(b, -1))),
    "nested adds": (lambda a, b: a + (b + (a + b)), lambda a, b: slow.add(a, slow.add(b, slow.add(a, b)))),
    "literal constant": (
        lambda a, b: functional.gelu(a + 1.5) + b,
        lambda a, b: slow.add(slow.identity(functional.gelu, slow.add_constant(a, 1.5)), b),
    ),
    "product with a constant": (lambda a, b: a * CONSTANT + b, lambda a, b: slow.add(slow.scale(a, CONSTANT), b)),
    "quotient by a constant": (lambda a, b: a / CONSTANT + b, lambda a, b: slow.add(slow.scale(a, 1 / CONSTANT), b)),
    "sum": (lambda a, b: (a + b).sum(1), lambda a, b: slow.sum_over(slow.add(a, b), (1,))),
    "sum of all": (lambda a, b: (a * b).sum(), lambda a, b: slow.sum_over(slow.mul(a, b), (0, 1))),
    "mean": (lambda a, b: (a - b).mean(0), lambda a, b: slow.mean_over(slow.sub(a, b), (0,))),
    "mean, dimension kept": (
        lambda a, b: a + b.mean(1, keepdim=True),
        lambda a, b: slow.add(a, slow.mean_over(b, (1,), keepdim=True)),
    ),
    "tanh": (lambda a, b: torch.tanh(a) + b, lambda a, b: slow.add(slow.identity(torch.tanh, a), b)),
    "gelu": (lambda a, b: functional.gelu(a) + b, lambda a, b: slow.add(slow.identity(functional.gelu, a), b)),
    "silu": (lambda a, b: functional.silu(a) + b, lambda a, b: slow.add(slow.identity(functional.silu, a), b)),
    "layer norm": (
        lambda a, b: functional.layer_norm(a, (4,)) + b,
        lambda a, b: slow.add(slow.identity(lambda t: functional.layer_norm(t, (4,)), a), b),
    ),
    "layer norm with an eps of its own": (  # which autograd does not keep; the view on top hides the sum
        lambda a, b: (functional.layer_norm(a, (4,), eps=0.1) + b).T,
        lambda a, b: slow.move(
            lambda t: t.T, slow.add(slow.identity(lambda t: functional.layer_norm(t, (4,), eps=0.1), a), b)
        ),
    ),
    "softmax": (lambda a, b: torch.softmax(a, -1) * b, lambda a, b: slow.mul(slow.softmax(a), b)),
    "matmul": (lambda a, b: a @ b.T, lambda a, b: slow.matmul(a, slow.move(lambda t: t.T, b))),
    "expand": (
        lambda a, b: a[:, :1].expand(3, 4) + b,
        lambda a, b: slow.add(slow.move(lambda t: t[:, :1].expand(3, 4), a), b),
    ),
    "cat": (
        lambda a, b: torch.cat([a + b, b], 1).flip(1)[:, ::2],
        lambda a, b: slow.move(lambda t: t.flip(1)[:, ::2], slow.concatenate([slow.add(a, b), b], 1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_dynamic_of_one_operation(name):
    torch_op, slow_op = OPERATIONS[name]
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    y = torch_op(a, b)
    on_tape = leaf(A), leaf(B)
    result = slow_op(*on_tape)
    assert error(result.data, y.detach()) < 1e-12
    seed = y.detach() * gaussian(*y.shape, seed=15)
    relevance = propagate(result, seed)
    for r, value in zip(dlrp.relevance(y, (a, b), seed=seed, preset="dynamic"), on_tape, strict=True):
        assert error(r, relevance[value]) < TOLERANCE


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("order", ["matrix first", "row first"])
def test_a_broadcast_operand_sums_over_its_copies(name, order):
    torch_op, slow_op = OPERATIONS[name]
    data = (A, ROW) if order == "matrix first" else (ROW, A)
    operands = [t.clone().requires_grad_() for t in data]
    y = torch_op(*operands)
    on_tape = [leaf(t) for t in data]
    seed = y.detach() * gaussian(*y.shape, seed=15)
    relevance = propagate(slow_op(*on_tape), seed)
    for r, value in zip(dlrp.relevance(y, operands, seed=seed, preset="dynamic"), on_tape, strict=True):
        assert error(r, relevance[value]) < TOLERANCE


def test_a_parameter_takes_a_share_of_a_sum_but_not_of_a_product():
    scale, shift = nn.Parameter(ROW.clone()), nn.Parameter(gaussian(4, seed=16))
    x = A.clone().requires_grad_()
    y = x * scale + shift
    seed = largest(y.detach())
    (r,) = dlrp.relevance(y, x, seed=seed, preset="dynamic")
    on_tape = leaf(A)
    relevance = propagate(slow.add(slow.scale(on_tape, ROW), leaf(shift)), seed)
    assert error(r, relevance[on_tape]) < TOLERANCE


class Constants(nn.Module):
    """Literal constants and a buffer, in sums whose value only the forward pass knows."""

    input_shape = (3, 4)

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))
        self.register_buffer("offset", torch.linspace(-1, 1, 4))

    def forward(self, x):
        return (2 - torch.tanh(x)) + self.shift + self.offset

    def tape(self, x: Value) -> Value:
        x = slow.add_constant(slow.scale(slow.identity(torch.tanh, x), -1), 2)
        return slow.add_constant(slow.add(x, leaf(self.shift)), self.offset)


def test_constants_take_nothing():
    """Autograd keeps no trace of them: `explain` has to see them in the forward pass."""
    net, x = build(Constants), gaussian(*Constants.input_shape)
    seed = largest(net(x).detach())
    a = dlrp.explain(net, x, target=seed, preset="dynamic")
    assert error(a.relevance, expected(net, x, seed)) < TOLERANCE


# ---------------------------------------------------------------- the paper's three worked graphs


class PaperGraph:
    """A small graph in torch and on the tape; letters are the paper's nodes, A the last operation.

    A's first row is cut off, so that its own value is in nobody's hands and its operands cannot be had from it.
    """

    def __init__(self, torch_graph, slow_graph, *leaves: Tensor):
        self.leaves = [t.clone().requires_grad_() for t in leaves]
        self.output = torch_graph(*self.leaves)[1:]
        self.on_tape = [leaf(t) for t in leaves]
        self.result = slow.move(lambda t: t[1:], slow_graph(*self.on_tape))
        self.seed = self.output.detach() * gaussian(*self.output.shape, seed=21)

    def check_relevance(self) -> None:
        assert error(self.result.data, self.output.detach()) < 1e-12
        relevance = propagate(self.result, self.seed)
        relevances = dlrp.relevance(self.output, self.leaves, seed=self.seed, preset="dynamic")
        for r, value in zip(relevances, self.on_tape, strict=True):
            assert error(r, relevance[value]) < TOLERANCE

    def plan(self):
        return dlrp.plan(self.output, self.leaves, preset="dynamic")


def transposed(value: Value) -> Value:
    return slow.move(lambda t: t.transpose(0, 1), value)


def unsqueezed(value: Value) -> Value:
    return slow.move(lambda t: t.unsqueeze(1), value)


def chain(bottom: str) -> PaperGraph:
    """A = B + w, B = -C, C = unsqueeze(D), D = transpose(E): only E can say what B's value was."""
    keeps_its_output = {"tanh": torch.tanh, "leaf": None}[bottom]

    def torch_graph(x, w):
        e = x if keeps_its_output is None else keeps_its_output(x)
        d = e.transpose(0, 1)
        c = d.unsqueeze(1)
        b = -c
        return b + w

    def slow_graph(x, w):
        e = x if keeps_its_output is None else slow.identity(keeps_its_output, x)
        return slow.add(slow.scale(unsqueezed(transposed(e)), -1), w)

    return PaperGraph(torch_graph, slow_graph, A, gaussian(4, 1, 3, seed=22))


def promise_tree() -> PaperGraph:
    """A = -B + E, B = C + D: A's promise waits for the value of B, whose own promise is nested under it."""

    def torch_graph(x, y, z):
        c, d, e = torch.tanh(x), torch.tanh(y), torch.tanh(z)
        b = c.transpose(0, 1) + d.transpose(0, 1)
        return -b + e

    def slow_graph(x, y, z):
        c, d, e = (slow.identity(torch.tanh, v) for v in (x, y, z))
        return slow.add(slow.scale(slow.add(transposed(c), transposed(d)), -1), e)

    return PaperGraph(torch_graph, slow_graph, A, B, gaussian(4, 3, seed=23))


def residual_diamond(bottom: str) -> PaperGraph:
    """A = B + D, B = -C, C = unsqueeze(E), D = E * 1/2: relevance cannot reach E before A knows what E says."""
    weight = gaussian(4, 4, seed=24)

    def torch_graph(x):
        e = torch.tanh(x) if bottom == "tanh" else x @ nn.Parameter(weight)
        c = e.unsqueeze(1)
        b = -c
        d = e.unsqueeze(1) * 0.5
        return b + d

    def slow_graph(x):
        e = slow.identity(torch.tanh, x) if bottom == "tanh" else slow.linear(x, weight.T)
        return slow.add(slow.scale(unsqueezed(e), -1), slow.scale(unsqueezed(e), 0.5))

    return PaperGraph(torch_graph, slow_graph, A)


@pytest.mark.parametrize("bottom", ["tanh", "leaf"])
def test_paper_chain_A_B_C_D_E(bottom):
    chain(bottom).check_relevance()


def test_paper_promise_tree():
    promise_tree().check_relevance()


@pytest.mark.parametrize("bottom", ["tanh", "matmul"])
def test_paper_residual_deadlock(bottom):
    residual_diamond(bottom).check_relevance()


# The shapes of the plans. `chain` names operations from the origin down to just above the Arg node.


def at_sums(plan) -> list:
    """The promises made at adds; rules of other operations may ask for values too."""
    return [promise for promise in plan.promises if names([promise.op]) == ["add"]]


def branches(plan) -> list:
    """The branches of the promises at adds, and of the promises nested under them."""
    found, promises = [], at_sums(plan)
    for promise in promises:
        found += promise.branches
        promises += [child for branch in promise.branches for child in branch.children]
    return found


def longest(plan):
    return max(branches(plan), key=lambda branch: len(branch.chain))


def names(operations) -> list[str]:
    """NegBackward0, neg, aten::neg, ... -> neg"""
    return [op.lower().removeprefix("aten::").removesuffix("0").removesuffix("backward") for op in operations]


def test_plan_of_the_chain():
    plan = chain("tanh").plan()
    assert len(at_sums(plan)) == 1
    branch = longest(plan)
    assert names(branch.chain) == ["neg", "unsqueeze", "transpose"]
    assert names([branch.arg]) == ["tanh"]
    assert branch.depth == 4  # steps from A to E
    assert plan.statistics.promises == len(plan.promises)
    assert plan.statistics.internal_nodes == 3


def test_plan_of_the_chain_down_to_a_leaf():
    branch = longest(chain("leaf").plan())
    assert names(branch.chain) == ["neg", "unsqueeze", "transpose"]
    assert names([branch.arg]) == ["accumulategrad"]


def test_plan_of_the_promise_tree():
    plan = promise_tree().plan()
    assert len(at_sums(plan)) == len({promise.origin for promise in at_sums(plan)}) == 2
    arguments = [names([branch.arg])[0] for branch in branches(plan)]
    assert arguments.count("tanh") >= 3  # C, D and E
    assert plan.statistics.depth >= 2


@pytest.mark.parametrize("bottom", ["tanh", "matmul"])
def test_plan_of_the_residual_diamond(bottom):
    plan = residual_diamond(bottom).plan()
    assert len(at_sums(plan)) == 1
    chains = [(names(branch.chain), names([branch.arg])[0]) for branch in branches(plan) if branch.chain]
    arg = "tanh" if bottom == "tanh" else "mm"
    assert sorted(chains) == [(["mul", "unsqueeze"], arg), (["neg", "unsqueeze"], arg)]
    assert 0 < plan.statistics.density <= 1

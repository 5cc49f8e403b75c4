"""Weights that are made on the way: adapters, weight and spectral norm, quantised weights. Baked in, they give the same."""

# isort: off
import oracles  # noqa: F401  mends torchvision before transformers imports it

# isort: on
import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import dynamiclrp as dlrp
from contract import PRESETS, holds
from models import IDS, gaussian, llama, randomise
from oracles import error

ALL = (*PRESETS, "epsilon", "epsilon-alpha2-beta1", "epsilon-plus-flat")
X = gaussian(2, 5, 6, seed=3, dtype=torch.float64)
PICTURE = gaussian(2, 3, 6, 6, seed=3, dtype=torch.float64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))).mean(1)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).mean((2, 3))


def assert_same(model: nn.Module, plain: nn.Module, given: dict, presets=ALL, tolerance: float = 1e-9) -> None:
    """Every explanation of the model equals that of the plain one, in which the weights stand as they are."""
    found = holds(model, given, presets)
    for preset in presets:
        for name, r in dlrp.explain(plain, **given, preset=preset).relevances.items():
            assert error(found[preset][name], r) < tolerance, preset


# ---------------------------------------------------------------- weight norm and spectral norm


NORMS = {
    "weight norm": lambda layer: parametrizations.weight_norm(layer),
    "weight norm over all": lambda layer: parametrizations.weight_norm(layer, dim=None),
    "weight norm, the older": lambda layer: nn.utils.weight_norm(layer),
    "spectral norm": lambda layer: parametrizations.spectral_norm(layer),
    "spectral norm, the older": lambda layer: nn.utils.spectral_norm(layer),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("build, given", [(Net, {"x": X}), (ConvNet, {"x": PICTURE})], ids=["linear", "convolution"])
@pytest.mark.parametrize("name", NORMS)
def test_a_normed_weight_equals_the_baked_one(name, build, given):
    plain = randomise(build(), std=0.5).double()
    model = copy.deepcopy(plain)
    for layer in ("up", "down"):
        NORMS[name](getattr(model, layer))
    model.eval()
    model(**given)  # the older forms compute their weight in the forward pass
    with torch.no_grad():
        for layer in ("up", "down"):
            getattr(plain, layer).weight.copy_(getattr(model, layer).weight)
    assert_same(model, plain, given)


# ---------------------------------------------------------------- adapters of peft

CONFIGS = {
    "lora": ("LoraConfig", {"r": 2, "lora_alpha": 5}),
    "rank-stabilised lora": ("LoraConfig", {"r": 3, "use_rslora": True}),
    "dora": ("LoraConfig", {"r": 2, "use_dora": True}),
    "loha": ("LoHaConfig", {"r": 2, "alpha": 3}),
    "lokr": ("LoKrConfig", {"r": 2, "alpha": 3}),
    "ia3": ("IA3Config", {"feedforward_modules": ["down"]}),
}


def adapted(name: str, base: nn.Module, targets: list[str]) -> nn.Module:
    peft = pytest.importorskip("peft")
    kind, options = CONFIGS[name]
    model = peft.get_peft_model(base, getattr(peft, kind)(target_modules=targets, **options))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # fresh adapters are zero, which would prove nothing
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model.eval()


# Rules on signed parts see the adapter as a path of its own; those that only need the sum of both cannot tell.
LINEAR = ("attnlrp", "cp-lrp", "gradient")


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_equals_the_merged_model(name):
    model = adapted(name, randomise(Net(), std=0.5).double(), ["up", "down"])
    merged = copy.deepcopy(model).merge_and_unload()
    assert_same(model, merged, {"x": X}, LINEAR)
    holds(model, {"x": X}, ("gamma", "epsilon-plus", "dynamic"))


def test_an_adapter_of_a_convolution_equals_the_merged_model():
    model = adapted("lora", randomise(ConvNet(), std=0.5).double(), ["up", "down"])
    assert_same(model, copy.deepcopy(model).merge_and_unload(), {"x": PICTURE}, LINEAR)


@pytest.mark.parametrize("name", ["lora", "loha"])
def test_an_adapted_language_model_equals_the_merged_one(name):
    model = adapted(name, llama().double(), ["q_proj", "v_proj", "down_proj"])
    merged = copy.deepcopy(model).merge_and_unload()
    assert any("lora_A" in n or "hada" in n for n, _ in model.named_parameters())
    given = {"input_ids": IDS, "use_cache": False}
    for preset in LINEAR:
        expected = dlrp.explain(merged, **given, preset=preset).relevance
        assert error(dlrp.explain(model, **given, preset=preset).relevance, expected) < 1e-9


def test_lohas_weight_may_be_asked_for():
    """Its Hadamard product of two low-rank products is a Function of peft's, which has a row."""
    model = adapted("loha", randomise(Net(), std=0.5).double(), ["up"])
    factors = [p for n, p in model.named_parameters() if "hada" in n]
    assert factors and all(p.requires_grad for p in factors)
    y = model(X)
    types = {type(node).__name__ for node in _graph(y)}
    assert "HadaWeightBackward" in types
    for r, p in zip(dlrp.relevance(y, factors, preset="attnlrp"), factors, strict=True):
        assert r.shape == p.shape and torch.isfinite(r).all() and r.any()


def _graph(y: Tensor) -> list:
    found, stack = [], [y.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.append(node)
            stack += [n for n, _ in node.next_functions]
    return found


# ---------------------------------------------------------------- quantised weights


class Dequantised(nn.Module):
    """A linear layer that keeps its weight as 8-bit integers and multiplies it out in every forward pass."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach()
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("weight", (weight / self.scale).round().to(torch.int8))
        self.bias = layer.bias

    @property
    def baked(self) -> Tensor:
        return self.weight * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.baked, self.bias)


def quantise(plain: Net, kind) -> Net:
    """The model with its layers replaced; `plain` gets the weights that they compute with."""
    model = copy.deepcopy(plain)
    for name in ("up", "down"):
        setattr(model, name, kind(getattr(plain, name)))
        with torch.no_grad():
            getattr(plain, name).weight.copy_(getattr(model, name).baked)
    return model.eval()


def test_weights_that_are_dequantised_on_the_fly():
    plain = randomise(Net(), std=0.5).double()
    assert_same(quantise(plain, Dequantised), plain, {"x": X})


class Kernel(torch.autograd.Function):
    """As libraries of quantised kernels have it: an opaque product with an integer weight, and its own backward."""

    @staticmethod
    def forward(ctx, x, weight, scale, bias):
        ctx.save_for_backward(weight, scale)
        return F.linear(x, weight * scale, bias)

    @staticmethod
    def backward(ctx, grad):
        weight, scale = ctx.saved_tensors
        return grad @ (weight * scale), None, None, grad.sum(tuple(range(grad.dim() - 1)))


class Opaque(Dequantised):
    def forward(self, x: Tensor) -> Tensor:
        return Kernel.apply(x, self.weight, self.scale, self.bias)


def test_an_opaque_kernel_asks_for_a_row_and_gets_one():
    plain = randomise(Net(), std=0.5).double()
    model = quantise(plain, Opaque)
    with pytest.raises(dlrp.UnknownOpError, match=r'register\("KernelBackward"'):
        dlrp.explain(model, X)
    gradient = dlrp.explain(model, X, on_missing="gradient")
    assert gradient.plan.missing == {"KernelBackward": 2}
    # operands: input, weight, scale, bias; the weight itself is not to be had, so the map is fixed: its own backward
    dlrp.register("KernelBackward", "transform", carriers=(0,), fills=True)
    try:
        for preset in LINEAR:
            expected = dlrp.explain(plain, X, preset=preset).relevance
            assert error(dlrp.explain(model, X, preset=preset).relevance, expected) < 1e-9
    finally:
        del dlrp.ops.OPS["KernelBackward"]
    # told how to multiply, it is a linear layer to every rule that does not take its weight apart
    linear = dlrp.LinearMap(
        factors=(0, 1),
        product=lambda n, x, w, bias=None: F.linear(x, w, bias),
        transposed=lambda n, which, u, x, w: u @ w if which == 0 else u.flatten(0, -2).T @ x.flatten(0, -2),
        bias=3,
    )
    dlrp.register(
        "KernelBackward",
        "linear",
        linear=linear,
        forward=lambda n, x, w, scale, b: F.linear(x, n.tensors[0] * n.tensors[1], b),
        absent=lambda signature: (1, 2),  # the forward finds them among what the Function saved
    )
    try:
        assert_same(model, plain, {"x": X}, ("attnlrp", "epsilon", "dynamic"))
    finally:
        del dlrp.ops.OPS["KernelBackward"]


class FakeQuantised(nn.Module):
    """torch.ao's fake quantisation of weight and activation, calibrated and then fixed."""

    def __init__(self, layer: nn.Linear, activations: bool = False) -> None:
        super().__init__()
        from torch.ao.quantization import FakeQuantize, MinMaxObserver

        self.layer = layer
        self.quantise = FakeQuantize.with_args(
            observer=MinMaxObserver,
            quant_min=-128,
            quant_max=127,
            dtype=torch.qint8,
            qscheme=torch.per_tensor_symmetric,
        )()
        self.quantise(layer.weight)
        self.quantise.disable_observer()

    @property
    def baked(self) -> Tensor:
        return self.quantise(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.baked, self.layer.bias)


def test_fake_quantised_weights():
    plain = randomise(Net(), std=0.5)
    model = quantise(plain, lambda layer: FakeQuantised(copy.deepcopy(layer)))
    assert not torch.equal(plain.up.weight, model.up.layer.weight)  # it does round
    given = {"x": X.float()}
    for preset in ALL:
        expected = dlrp.explain(plain, **given, preset=preset).relevance
        assert error(dlrp.explain(model, **given, preset=preset).relevance, expected) < 2e-4, preset


def test_fake_quantised_activations_pass_relevance_where_they_do_not_saturate():
    x = gaussian(3, 4).requires_grad_()
    y = torch.fake_quantize_per_tensor_affine(x, 0.01, 0, -100, 100)
    (r,) = dlrp.relevance(y, x, seed=y.detach())
    inside = (x.detach() / 0.01).round().abs() <= 100
    assert inside.any() and not inside.all()
    torch.testing.assert_close(r, torch.where(inside, x.detach(), 0), atol=0.01, rtol=0)

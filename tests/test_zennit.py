"""The Zennit-named presets and single rules against Zennit itself, in float64, stabilisers included."""

from oracles import error  # before Zennit: makes its import of torchvision work

# isort: split
import pytest
import torch
from torch import Tensor, nn
from zennit import rules
from zennit.composites import EpsilonGammaBox

import dynamiclrp as dlrp
from oracles.zennit_nets import (
    COMPOSITES,
    CONVOLUTIONAL,
    DENSE,
    PICTURE,
    VECTOR,
    ResNet,
    add_plainly,
    batch_norm_net,
    composite,
    mlp,
    one_rule,
    randomise,
    vgg,
    zennit_relevance,
)

TOLERANCE = 1e-6


def picture(seed: int = 0, sign: str = "mixed") -> Tensor:
    return signed(torch.randn(PICTURE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), sign)


def vector(seed: int = 0, sign: str = "mixed") -> Tensor:
    return signed(torch.randn(VECTOR, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), sign)


def signed(x: Tensor, sign: str) -> Tensor:
    x = x.clamp(-2.9, 2.9)  # inside the box
    return {"mixed": x, "positive": x.abs(), "negative": -x.abs(), "with zeros": x.relu()}[sign]


def largest(y: Tensor) -> Tensor:
    winner = y.argmax(-1, keepdim=True)
    return torch.zeros_like(y).scatter(-1, winner, y.gather(-1, winner))


def preset(name: str):
    return dlrp.preset(name, low=-3.0, high=3.0) if name == "epsilon-gamma-box" else name


def compare(net: nn.Module, x: Tensor, ours, theirs, seed: Tensor | None = None) -> float:
    """Error of our preset on `net` against their composite. Zennit edits the net and puts it back, so it goes last."""
    x = x.requires_grad_()
    y = add_plainly(net)(x)
    seed = largest(y.detach()) if seed is None else seed
    (r,) = dlrp.relevance(y, x, seed=seed, preset=ours)
    return error(r, zennit_relevance(add_plainly(net, False), theirs, x, seed))


# ---------------------------------------------------------------- presets


@pytest.mark.parametrize("network", CONVOLUTIONAL)
@pytest.mark.parametrize("name", COMPOSITES)
def test_preset_on_a_convolutional_net(name, network):
    net = randomise(CONVOLUTIONAL[network]())
    assert compare(net, picture(), preset(name), composite(name)) < TOLERANCE


@pytest.mark.parametrize("network", DENSE)
@pytest.mark.parametrize("name", COMPOSITES)
def test_preset_on_a_dense_net(name, network):
    """Flat takes any first layer; Zennit's box takes convolutions only, so here it leaves epsilon everywhere."""
    net = randomise(DENSE[network]())
    assert compare(net, vector(), preset(name), composite(name)) < TOLERANCE


@pytest.mark.parametrize("sign", ["positive", "negative", "with zeros"])
@pytest.mark.parametrize("name", COMPOSITES)
def test_preset_on_inputs_of_every_sign(name, sign):
    net = randomise(vgg(), seed=1)
    assert compare(net, picture(1, sign), preset(name), composite(name)) < TOLERANCE


@pytest.mark.parametrize("network", ["vgg", "batch-norm", "resnet"])
@pytest.mark.parametrize("name", COMPOSITES)
def test_preset_with_any_seed(name, network):
    """Relevance of both signs at every output of every row."""
    net = randomise(CONVOLUTIONAL[network](), seed=2)
    seed = torch.randn(PICTURE[0], 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert compare(net, picture(2), preset(name), composite(name), seed) < TOLERANCE


@pytest.mark.parametrize("name", COMPOSITES)
def test_preset_on_a_resnet_that_sums_a_stack(name):
    """Zennit's way to write a residual, given to the engine too."""
    net, x = randomise(ResNet()), picture().requires_grad_()
    y = net(x)
    (r,) = dlrp.relevance(y, x, preset=preset(name))
    assert error(r, zennit_relevance(net, composite(name), x, largest(y.detach()))) < TOLERANCE


@pytest.mark.parametrize("network", ["vgg", "batch-norm", "resnet"])
@pytest.mark.parametrize("name", COMPOSITES)
def test_preset_by_explain(name, network):
    net, x = randomise(CONVOLUTIONAL[network]()), picture()
    a = dlrp.explain(add_plainly(net), x, target=2, preset=preset(name))
    y = net(x).detach()
    seed = torch.zeros_like(y)
    seed[:, 2] = y[:, 2]
    assert error(a.relevance, zennit_relevance(add_plainly(net, False), composite(name), x, seed)) < TOLERANCE


def test_the_box_may_differ_by_channel():
    low = torch.tensor([-3.0, -3.5, -4.0], dtype=torch.float64).reshape(1, 3, 1, 1)
    high = torch.tensor([3.0, 4.0, 5.0], dtype=torch.float64).reshape(1, 3, 1, 1)
    ours = dlrp.preset("epsilon-gamma-box", low=low, high=high)
    theirs = EpsilonGammaBox(low, high)
    assert compare(randomise(vgg()), picture(), ours, theirs) < TOLERANCE


# ---------------------------------------------------------------- single rules on every linear map

RULES = {
    "zero": (lambda: dlrp.Gradient(), lambda: rules.Epsilon(0.0)),
    "epsilon 1e-6": (lambda: dlrp.Epsilon(1e-6), lambda: rules.Epsilon(1e-6)),
    "epsilon 0.1": (lambda: dlrp.Epsilon(0.1), lambda: rules.Epsilon(0.1)),
    "gamma 0.25": (lambda: dlrp.Gamma(0.25, 1e-6), lambda: rules.Gamma(0.25, 1e-6)),
    "gamma 10": (lambda: dlrp.Gamma(10.0, 1e-6), lambda: rules.Gamma(10.0, 1e-6)),
    "z+": (lambda: dlrp.ZPlus(1e-6), lambda: rules.ZPlus(1e-6)),
    "alpha 2 beta 1": (lambda: dlrp.AlphaBeta(2.0, 1.0, 1e-6), lambda: rules.AlphaBeta(2.0, 1.0, 1e-6)),
    "alpha 1 beta 0": (lambda: dlrp.AlphaBeta(1.0, 0.0, 1e-6), lambda: rules.AlphaBeta(1.0, 0.0, 1e-6)),
    "w squared": (lambda: dlrp.WSquare(1e-6), lambda: rules.WSquare(1e-6)),
    "flat": (lambda: dlrp.Flat(1e-6), lambda: rules.Flat(1e-6)),
}


def everywhere(rule):
    return dlrp.preset("epsilon") | {"linear": rule, "conv": rule}


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh], ids=["relu", "tanh"])
@pytest.mark.parametrize("name", RULES)
def test_rule_on_every_layer_of_a_dense_net(name, activation):
    ours, theirs = RULES[name]
    net = randomise(mlp(activation), seed=4)
    assert compare(net, vector(4), everywhere(ours()), one_rule(theirs())) < TOLERANCE


@pytest.mark.parametrize("sign", ["mixed", "positive", "with zeros"])
@pytest.mark.parametrize("name", RULES)
def test_rule_on_every_layer_of_a_vgg(name, sign):
    ours, theirs = RULES[name]
    net = randomise(vgg(), seed=5)
    assert compare(net, picture(5, sign), everywhere(ours()), one_rule(theirs())) < TOLERANCE


@pytest.mark.parametrize("name", ["gamma 0.25", "gamma 10", "z+", "alpha 2 beta 1"])
def test_rule_on_every_layer_of_a_batch_norm_net(name):
    """These rules see convolution and batch-norm as one linear map."""
    ours, theirs = RULES[name]
    net = randomise(batch_norm_net(), seed=6)
    assert compare(net, picture(6), everywhere(ours()), one_rule(theirs())) < TOLERANCE


# ---------------------------------------------------------------- what Zennit's numbers stand on


@pytest.mark.parametrize("network", CONVOLUTIONAL)
def test_zennit_explains_the_same_network_and_leaves_it_as_it_was(network):
    """Else the comparisons above would compare two networks."""
    net, x = randomise(CONVOLUTIONAL[network]()), picture()
    before = net(x).detach()
    with composite("epsilon-plus").context(net) as explained:
        assert error(explained(x).detach(), before) < 1e-12
    assert torch.equal(net(x).detach(), before)
    assert error(add_plainly(net)(x).detach(), before) < 1e-12


def test_lrp_0_is_gradient_times_input_on_a_bias_free_relu_net():
    net, x = randomise(vgg(bias=False)), picture().requires_grad_()
    y = net(x)
    (gradient,) = torch.autograd.grad(largest(y).sum(), x, retain_graph=True)
    (r,) = dlrp.relevance(y, x, preset=everywhere(dlrp.Gradient()))
    assert error(r, (x * gradient).detach()) < 1e-12

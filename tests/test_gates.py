"""Gates: what they multiply takes the relevance that the preset says, and nothing explodes where a gate is shut or undecided."""

# isort: off
import oracles  # noqa: F401  mends torchvision

# isort: on
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import SqueezeExcitation

import dynamiclrp as dlrp
from contract import PRESETS, holds
from models import gaussian, randomise
from oracles import error

DOUBLE = torch.float64
X = gaussian(2, 4, 5, 5, seed=3, dtype=DOUBLE)


class Excited(nn.Module):
    """A convolution, squeeze and excitation by torchvision, a head."""

    def __init__(self, scale_activation=nn.Sigmoid) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3)
        self.gate = SqueezeExcitation(6, 3, scale_activation=scale_activation)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gate(torch.relu(self.conv(x))).mean((2, 3)))


class Constant(Excited):
    """The same with gates that are numbers."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x))
        return self.head((x * self.gate._scale(x).detach()).mean((2, 3)))


def pair(scale_activation=nn.Sigmoid) -> tuple[nn.Module, nn.Module]:
    model = randomise(Excited(scale_activation), std=0.5).double()
    constant = Constant(scale_activation).double().eval()
    constant.load_state_dict(model.state_dict())
    return model, constant


GATES = {"sigmoid": nn.Sigmoid, "hard sigmoid": nn.Hardsigmoid}


@pytest.mark.parametrize("name", GATES)
def test_squeeze_and_excitation(name):
    model, constant = pair(GATES[name])
    found = holds(model, {"x": X}, (*PRESETS, "epsilon"))
    expected = dlrp.explain(constant, X, preset="cp-lrp").relevance
    assert error(found["cp-lrp"]["x"], expected) < 1e-9  # the signal takes all
    assert error(found["attnlrp"]["x"], expected) > 1e-3  # and half under attnlrp: the gate has its part


@pytest.mark.parametrize("name", GATES)
def test_half_of_a_gated_product_goes_to_each(name):
    """attnlrp: half of cp-lrp's, and half of the gradient that flows through the gate alone (the channels held fixed)."""
    model, constant = pair(GATES[name])

    class Through(Constant):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.conv(x))
            return self.head((x.detach() * self.gate._scale(x)).mean((2, 3)))

    gates = Through(GATES[name]).double().eval()
    gates.load_state_dict(model.state_dict())
    halves = sum(dlrp.explain(m, X, preset="attnlrp", target=1).relevance for m in (constant, gates)) / 2
    assert error(dlrp.explain(model, X, preset="attnlrp", target=1).relevance, halves) < 1e-9


def mass(model: nn.Module, preset: str) -> float:
    """Relevance handed out, signs aside, for each unit of the score."""
    found = dlrp.explain(model, X, preset=preset, target=1)
    return float(found.relevance.abs().sum() / found.seed.abs().sum())


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("preset", [*PRESETS, "epsilon", "epsilon-plus-flat"])
def test_nothing_explodes_where_gates_are_undecided_shut_or_open(preset, name):
    """σ(x)/x has no bound at x = 0, and a gate of nearly 0 divides: neither may show."""
    model, _ = pair(GATES[name])
    with torch.no_grad():
        usual = mass(model, preset)
        pooled = torch.relu(model.conv(X)).mean((2, 3), keepdim=True)
        before = model.gate.fc2(model.gate.activation(model.gate.fc1(pooled)))
        own = model.gate.fc2.bias.clone()
        for shift in (0.0, 1e-12, -1e-12, 1e-6, -40.0, -2.999999, 40.0):
            model.gate.fc2.bias.copy_(own - before[0, :, 0, 0] + shift)  # before the gates of the first row stands this
            assert mass(model, preset) < 20 * max(usual, 1.0), shift


@pytest.mark.parametrize("preset", [*PRESETS, "epsilon", "epsilon-plus-flat"])
def test_nothing_explodes_where_gates_without_a_bias_are_undecided(preset):
    """As most networks have them: nothing but the product stands before the sigmoid, and may cancel."""
    model, _ = pair()
    model.gate.fc2.bias = None
    weight = model.gate.fc2.weight
    with torch.no_grad():
        usual = mass(model, preset)
        squeezed = model.gate.activation(model.gate.fc1(torch.relu(model.conv(X)).mean((2, 3), keepdim=True)))[
            0, :, 0, 0
        ]
        largest = int(squeezed.argmax())
        for z in (1e-2, 1e-4, 1e-8, 1e-12):
            weight[:, largest, 0, 0] += (z - weight[:, :, 0, 0] @ squeezed) / squeezed[largest]
            assert mass(model, preset) < 20 * max(usual, 1.0), z


@pytest.mark.parametrize("preset", PRESETS)
def test_a_gate_that_is_shut_lets_nothing_through(preset):
    model, _ = pair()
    with torch.no_grad():
        model.gate.fc2.bias.fill_(-800)
    assert not dlrp.explain(model, X, preset=preset).relevance.any()


class Glu(nn.Module):
    """Gated linear units: by torch, by halves, by two projections."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.up, self.head = form, nn.Linear(6, 8), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "torch":
            return self.head(F.glu(self.up(x)))
        if self.form == "halves":
            signal, gate = self.up(x).chunk(2, -1)
        else:
            signal, gate = (
                F.linear(x, w, b) for w, b in zip(self.up.weight.chunk(2), self.up.bias.chunk(2), strict=True)
            )
        return self.head(signal * torch.sigmoid(gate))


@pytest.mark.parametrize("form", ["halves", "projections"])
def test_gated_linear_units(form):
    x = gaussian(2, 6, seed=1, dtype=DOUBLE)
    fused = randomise(Glu("torch"), std=0.6).double()
    written = Glu(form).double().eval()
    written.load_state_dict(fused.state_dict())
    expected = holds(fused, {"x": x})
    found = holds(written, {"x": x})
    for preset in ("attnlrp", "gamma"):  # the fused one holds both factors in one operand, which take equal parts
        assert error(found[preset]["x"], expected[preset]["x"]) < 1e-9

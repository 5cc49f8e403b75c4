"""A NaN or an infinity in a weight, in the input, or made by an operation on the way.

It is an error under every preset, which names where it began: the weight, the input, or the operation; never numbers.
"""

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp

torch.set_num_threads(1)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)).eval()


def message(model, x, preset):
    with pytest.raises(dlrp.NonFiniteError) as raised:
        dlrp.explain(model, x, target=0, preset=preset)
    return str(raised.value)


@pytest.mark.parametrize("preset", ["default", "attnlrp", "dynamic"])
@pytest.mark.parametrize("name", ["0.weight", "2.weight", "2.bias", "4.weight"])
def test_a_parameter_is_named(name, preset):
    model, x = net(), torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] = float("nan")
    assert name in message(model, x, preset)


@pytest.mark.parametrize("preset", ["default", "attnlrp", "dynamic"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_input_is_named(value, preset):
    model, x = net(), torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    x[1, 2] = value
    assert "input" in message(model, x, preset)


class Bends(nn.Module):
    def __init__(self, bend):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 3)
        self.bend = bend

    def forward(self, x):
        return self.two(self.bend(self.one(x)))


OPERATIONS = {"Log": torch.log, "Sqrt": torch.sqrt, "Exp": lambda y: (y * 1000).exp(), "Asin": lambda y: (2 + y).asin()}


@pytest.mark.parametrize(
    "name, preset", [*((name, "default") for name in OPERATIONS), ("Log", "attnlrp"), ("Log", "gradient")]
)
def test_the_operation_is_named(name, preset):
    model, x = Bends(OPERATIONS[name]).eval(), torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert not model(x)[:, 0].isfinite().all()
    assert name in message(model, x, preset)


PRESETS = [name for name in dlrp.PRESETS if name != "epsilon-gamma-box"]


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_explains_nan(preset):
    model, x = Bends(torch.log).eval(), torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    assert "Log" in message(model, x, preset)


def test_a_weight_that_autograd_does_not_follow():
    model, x = net().requires_grad_(False), torch.randn(2, 4)
    model[2].weight[0, 0] = float("inf")
    assert "parameter '2.weight'" in message(model, x, "attnlrp")


def test_a_table_of_embeddings():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 3))
    with torch.no_grad():
        model[0].weight[2, 0] = float("nan")
    assert "parameter '0.weight'" in message(model, torch.tensor([[1, 2, 3]]), "default")


def test_a_buffer():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), torch.randn(2, 4)
    model[1].running_mean[0] = float("nan")
    assert "buffer '1.running_mean'" in message(model, x, "default")


def test_an_infinity_that_became_nan():
    """Both are named: where it began and where it could no longer be told."""
    model = Bends(lambda y: (y * 1e30).exp() - (y * 1e30).exp()).eval()
    told = message(model, torch.ones(1, 4), "default")
    assert "Exp" in told and "Sub" in told


class Masked(nn.Module):
    """Infinite on purpose, before and after: a mask before a softmax, and classes that are not on offer."""

    def __init__(self):
        super().__init__()
        self.map, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        y = self.map(x).masked_fill(torch.tensor([True, False, False, False]), -torch.inf).softmax(-1)
        return self.head(y) + torch.tensor([0.0, 0.0, -torch.inf])


@pytest.mark.parametrize("preset", ["default", "attnlrp", "gradient"])
def test_control_masks(preset):
    assert dlrp.explain(Masked().eval(), torch.randn(2, 4), target=0, preset=preset).relevance.isfinite().all()


@pytest.mark.parametrize("preset", ["default", "attnlrp"])
def test_masks_are_not_blamed(preset):
    model, x = Masked().eval(), torch.randn(2, 4)
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    assert "'head.weight'" in message(model, x, preset)


def test_a_score_that_is_infinite():
    with pytest.raises(dlrp.NonFiniteError):
        dlrp.explain(Masked().eval(), torch.randn(2, 4), target=2, preset="gradient")


def test_a_graph_of_ones_own():
    x = torch.tensor([[-1.0, 2.0]], requires_grad=True)
    with pytest.raises(dlrp.NonFiniteError):
        dlrp.relevance(x.log() @ torch.ones(2, 2), x, preset="gradient")


@pytest.mark.parametrize("many", [1, 3])
def test_several_targets(many):
    model, x = net(), torch.full((1, 4), float("nan"))
    with pytest.raises(dlrp.NonFiniteError, match="argument 'input'"):
        dlrp.explain(model, x, targets=list(range(many)))

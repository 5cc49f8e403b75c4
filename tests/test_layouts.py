"""A linear layer is one map, however torch writes it: one node, or a product and a sum, as the strides of its input have it."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dynamiclrp as dlrp
from contract import PRESETS, holds
from models import gaussian, randomise
from oracles import error

ALL = (*PRESETS, "epsilon", "epsilon-alpha2-beta1", "epsilon-plus-flat")


class Layer(nn.Module):
    """A linear layer between two others, on an input whose strides `arrange` decides."""

    def __init__(self, arrange, above=F.relu) -> None:
        super().__init__()
        self.below, self.layer, self.head = nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 3)
        self.arrange, self.above = arrange, above

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.above(self.layer(self.arrange(torch.tanh(self.below(x))))).mean(1))


def contiguous(x: Tensor) -> Tensor:
    return x


def strided(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def nodes(model: nn.Module, x: Tensor) -> list[str]:
    return [step.name for step in dlrp.inspect(model, x, preset="gamma").plan.steps]


@pytest.mark.parametrize("above", [F.relu, F.gelu])
@pytest.mark.parametrize("preset", ALL)
def test_strides_do_not_matter(preset, above):
    model, x = randomise(Layer(contiguous, above), std=0.5).double(), gaussian(2, 7, 4, dtype=torch.float64)
    expected = dlrp.explain(model, x, preset=preset).relevance
    one = nodes(model, x)
    model.arrange = strided
    assert nodes(model, x) != one  # the graph is another
    assert error(dlrp.explain(model, x, preset=preset).relevance, expected) < 1e-9
    holds(model, {"x": x}, [preset])


@pytest.mark.parametrize("preset", ALL)
def test_a_bias_that_is_added_by_hand_is_a_bias(preset):
    class ByHand(Layer):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(x @ self.below.weight.T + self.below.bias)
            x = F.relu(self.layer.bias + x @ self.layer.weight.T)
            return x.mean(1) @ self.head.weight.T + self.head.bias

    model, x = randomise(Layer(contiguous), std=0.5).double(), gaussian(2, 7, 4, dtype=torch.float64)
    by_hand = ByHand(contiguous).double()
    by_hand.load_state_dict(model.state_dict())
    expected = dlrp.explain(model, x, preset=preset).relevance
    assert error(dlrp.explain(by_hand, x, preset=preset).relevance, expected) < 1e-9


@pytest.mark.parametrize("preset", ["gamma", "epsilon-plus"])
@pytest.mark.parametrize("shape", [(6,), (7, 6), (1, 6), ()], ids=str)
def test_a_bias_of_any_shape(preset, shape):
    """As a position embedding, which is added to the output of a projection: checked against one bias a token."""

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(gaussian(4, 6, seed=1)), nn.Parameter(gaussian(*shape, seed=2))

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x @ self.weight + self.bias).sum((1, 2), keepdim=True)[..., 0]

    class TokenByToken(Added):
        def forward(self, x: Tensor) -> Tensor:
            bias = self.bias.expand(7, 6)
            rows = [torch.addmm(bias[t], x[:, t], self.weight) for t in range(7)]
            return F.relu(torch.stack(rows, 1)).sum((1, 2), keepdim=True)[..., 0]

    model, x = Added().double(), gaussian(2, 7, 4, dtype=torch.float64)
    token = TokenByToken().double()
    token.load_state_dict(model.state_dict())
    expected = dlrp.explain(token, x, preset=preset, target=0).relevance
    assert error(dlrp.explain(model, x, preset=preset, target=0).relevance, expected) < 1e-9


@pytest.mark.parametrize("preset", ["gamma", "epsilon-plus", "epsilon"])
@pytest.mark.parametrize("order", ["bias first", "bias last"])
def test_a_bias_that_is_added_with_a_factor(order, preset):
    weight, bias = (
        gaussian(4, 3, seed=1, dtype=torch.float64),
        gaussian(3, seed=2, dtype=torch.float64).requires_grad_(),
    )
    x = gaussian(2, 4, dtype=torch.float64).requires_grad_()

    def written() -> Tensor:
        first, second = (bias, x @ weight) if order == "bias first" else (x @ weight, bias)
        return torch.add(first, second, alpha=-1.7)

    def one_node() -> Tensor:
        scaled = (weight * -1.7, bias * 1.0) if order == "bias first" else (weight, bias * -1.7)
        return torch.addmm(scaled[1].detach().requires_grad_(), x, scaled[0])

    expected, found = (dlrp.relevance(f(), x, preset=preset)[0] for f in (one_node, written))
    assert error(found, expected) < 1e-6


def test_a_product_that_is_used_elsewhere_keeps_its_own_relevance():
    weight, bias = gaussian(4, 4, seed=1, dtype=torch.float64), gaussian(4, seed=2, dtype=torch.float64)
    x = gaussian(2, 4, dtype=torch.float64).requires_grad_()
    bias.requires_grad_()
    product = x @ weight
    plan = dlrp.plan((product + bias).relu() + product, x, preset="gamma")
    assert [step.part for step in plan.steps if step.name == "Mm"] == [None]


@pytest.mark.parametrize("preset", ALL)
def test_attention_of_torch_gives_a_row_what_its_batch_gives(preset):
    """nn.MultiheadAttention puts time first: a batch of one has other strides than a batch of two."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + self.attention(x, x, x, need_weights=False)[0])[:, 0]

    holds(randomise(Attends(), std=0.5).double(), {"x": gaussian(2, 5, 8, dtype=torch.float64)}, [preset])


# ---------------------------------------------------------------- batch norm


def laid_out(x: Tensor, how: str) -> Tensor:
    """The same values at other strides."""
    if how == "contiguous":
        return x.contiguous()
    a, b = int(how[0]), int(how[2])
    return x.transpose(a, b).contiguous().transpose(a, b)


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic", "epsilon-plus"])
@pytest.mark.parametrize("shape", [(1, 5, 4, 3), (2, 5, 1, 3), (2, 5, 4, 1), (1, 5, 1, 1)], ids=str)
@pytest.mark.parametrize("below", ["contiguous", "1,3", "1,2", "2,3"])
def test_batch_norm_does_not_depend_on_strides(below, shape, preset):
    """torch's CPU kernel of its backward does, where a size is 1 and the strides of input and gradient differ."""
    norm = randomise(nn.BatchNorm2d(5), std=0.5).double()
    x, s = gaussian(*shape, seed=1, dtype=torch.float64), gaussian(*shape, seed=2, dtype=torch.float64)
    found = []
    for above in ("contiguous", "1,3", "1,2", "2,3"):
        leaf = laid_out(x, below).requires_grad_()
        y = norm(leaf)
        seed = laid_out(y.detach() * s, above)
        found.append(dlrp.relevance(y * 1.0, leaf, seed=seed, preset=preset)[0])
    if preset == "attnlrp":
        scale = (norm.weight / torch.sqrt(norm.running_var + norm.eps)).detach().reshape(1, -1, 1, 1)
        assert error(found[0], x * s * scale) < 1e-9
    for other in found[1:]:
        assert error(other, found[0]) < 1e-9

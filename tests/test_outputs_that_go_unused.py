"""Operations with several outputs of which the first goes unused, beside a consumer that hands down R.

Their relevance is that of the same model written with slices.
"""

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp

# How a model takes the last two of four channels, with several outputs of which the first is not used, and the same in one output.
TAKE = {
    "split": lambda x: x.split(2, 1)[1],
    "chunk": lambda x: x.chunk(2, 1)[1],
    "split_with_sizes": lambda x: x.split([2, 2], 1)[1],
    "unsafe_split": lambda x: torch.unsafe_split(x, 2, 1)[1],
    "unbind": lambda x: torch.stack(x.unbind(1)[2:], 1),
    "detached": lambda x: x.split(2, 1)[1] + 0 * x.split(2, 1)[0].detach(),
}
# Several outputs, of which only the second carries a gradient that is used; and the same second output in another way.
SECOND = {
    "var_mean": (lambda x: torch.var_mean(x, 1)[1], lambda x: x.mean(1)),
    "std_mean": (lambda x: torch.std_mean(x, 1)[1], lambda x: x.mean(1)),
    "aminmax": (lambda x: torch.aminmax(x, dim=1)[1], lambda x: x.amax(1)),
    "unsafe_chunk": (lambda x: torch.unsafe_chunk(x, 2, 1)[1], lambda x: x[:, 2:]),
}


class Beside(nn.Module):
    """A convolution of the input, and part of the input itself."""

    def __init__(self, take):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.take = take

    def forward(self, x):
        return self.conv(x).relu().flatten(1).sum(1, keepdim=True) + 3 * self.take(x).flatten(1).sum(1, keepdim=True)


class BesidePool(nn.Module):
    """An average pool of the input, and part of the input itself."""

    def __init__(self, take):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 1, bias=False)
        self.take = take

    def forward(self, x):
        return self.head(nn.functional.avg_pool2d(x, 6).flatten(1)) + 3 * self.take(x).flatten(1).mean(1, keepdim=True)


def picture():
    return torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1)).double()


def off(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


def compare(kind, take, same, preset):
    a = dlrp.explain(kind(take).double().eval(), picture(), preset=preset).relevance
    b = dlrp.explain(kind(same).double().eval(), picture(), preset=preset).relevance
    wrong = off(a, b)
    assert wrong < 1e-6, f"{wrong:.1%} off"


@pytest.mark.parametrize("preset", ["default", "epsilon-plus-flat", "epsilon-gamma-box"])
@pytest.mark.parametrize("name", TAKE)
def test_unused_first_output_beside_a_convolution(name, preset):
    chosen = dlrp.preset(preset, low=-4.0, high=4.0) if "box" in preset else preset
    compare(Beside, TAKE[name], lambda x: x[:, 2:], chosen)


@pytest.mark.parametrize("name", SECOND)
def test_only_the_second_output_beside_a_convolution(name):
    compare(Beside, *SECOND[name], "default")


@pytest.mark.parametrize("name", TAKE)
def test_unused_first_output_beside_an_average_pool(name):
    compare(BesidePool, TAKE[name], lambda x: x[:, 2:], "dynamic")


class Spread(nn.Module):
    """An average pool, which hands down relevance under `dynamic`, above the second output of an operation."""

    def forward(self, x):
        return nn.functional.avg_pool2d(torch.var_mean(x * 1.5, 1)[1][:, None], 2).flatten(1)


def test_relevance_that_a_later_output_cannot_take_is_refused_with_a_remedy():
    with pytest.raises(dlrp.UnsupportedTensorError, match=r"VarMean\) has several outputs.*Nothing\(\)"):
        dlrp.explain(Spread(), picture(), target=0, preset="dynamic")
    with_remedy = dlrp.explain(
        Spread(), picture(), target=0, preset=dlrp.preset("dynamic") | {"VarMean": dlrp.Nothing()}
    )
    assert not with_remedy.relevance.any()

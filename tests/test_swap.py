"""A weight swapped under a convolution's own backward: the same relevance as by two products, and never in a graph that is the caller's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dynamiclrp as dlrp
from dynamiclrp import values
from dynamiclrp.presets import PRESETS
from dynamiclrp.rules import Gamma


class Convolutions(nn.Module):
    """Rectified maps with and without a batch norm, whose scales are of both signs; strides, groups, a transposed one."""

    def __init__(self, rectifier: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.rectifier = rectifier
        self.first, self.normed = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, stride=2, padding=1, bias=False)
        self.norm, self.grouped = nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, groups=3, dilation=2, padding=2)
        self.up, self.open, self.head = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Conv2d(4, 4, 1), nn.Linear(4, 3)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)
        nn.init.normal_(self.norm.running_mean)
        self.norm.weight.data = torch.tensor([1.0, -0.7, 0.4, -1.2, 0.0, 0.9])
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rectifier(self.first(x))
        x = self.rectifier(self.norm(self.normed(x)))
        x = self.rectifier(self.up(self.rectifier(self.grouped(x))))
        return self.head((x + self.open(x)).mean((2, 3)))


def capped(x: Tensor) -> Tensor:
    """As ReLU6, but lower."""
    return F.hardtanh(x, 0.0, 0.5)


MODELS = {
    "convolutions": (Convolutions, (2, 3, 9, 9)),
    "capped": (partial(Convolutions, capped), (2, 3, 9, 9)),
}
SWAPS = {"default", "gamma", "epsilon-plus"}  # whose rules hand another weight to a convolution's own backward


def _built(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    kind, shape = MODELS[name]
    return kind().double().eval(), torch.randn(shape, dtype=torch.float64)


@pytest.fixture
def swaps(monkeypatch):
    """What was swapped; set `allowed` to False to have none."""

    class Swaps(list):
        allowed = True

    found, real = Swaps(), values.swap

    def swap(node, name, put, get):
        done = found.allowed and real(node, name, put, get)
        found.extend([name] if done else [])
        return done

    monkeypatch.setattr(values, "swap", swap)
    return found


@pytest.mark.parametrize("preset", ["attnlrp", "default", "gamma", "epsilon-plus", "epsilon", "dynamic"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_as_by_hooks(name, preset, swaps):
    model, x = _built(name)
    swapped = dlrp.explain(model, x, preset=preset).relevance
    assert bool(swaps) == (preset in SWAPS)
    swaps.allowed = False
    torch.testing.assert_close(swapped, dlrp.explain(model, x, preset=preset).relevance, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "epsilon-gamma-box"])
def test_a_capped_rectifier_is_a_clamp(preset):
    model, x = _built("capped")
    expected = dlrp.explain(model, x, preset=preset).relevance
    model.rectifier = lambda x: x.clamp(0.0, 0.5)  # of which nothing is known beforehand
    torch.testing.assert_close(dlrp.explain(model, x, preset=preset).relevance, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("preset", ["attnlrp", "epsilon-plus"])
@pytest.mark.parametrize("name", MODELS)
def test_the_callers_graph_stays_what_it_was(name, preset, swaps):
    model, x = _built(name)
    x.requires_grad_()
    scores = model(x).amax(-1)
    (before,) = torch.autograd.grad(scores.sum(), x, retain_graph=True)
    dlrp.relevance(scores, x, preset=preset, retain_graph=True)
    (after,) = torch.autograd.grad(scores.sum(), x)
    assert not swaps
    torch.testing.assert_close(before, after, rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_several_targets_share_a_graph(name):
    model, x = _built(name)
    together = dlrp.explain(model, x, preset="gamma", targets=[0, 2])
    for target, one in zip([0, 2], together):
        torch.testing.assert_close(one.relevance, dlrp.explain(model, x, preset="gamma", target=target).relevance)


def test_where_values_are_elsewhere_hooks_serve(swaps):
    model, x = _built("convolutions")
    plain = dlrp.explain(model, x, preset="gamma").relevance
    assert swaps
    swaps.clear()
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(dlrp.explain(model, x, preset="gamma").relevance, plain)
    assert not swaps


class Doubled(Gamma):
    def before(self, here, s):
        return 2 * super().before(here, s)


def test_a_subclass_means_what_it_overrides():
    model, x = _built("convolutions")
    preset = dlrp.preset("gamma") | {"conv": Doubled(0.25)}
    changed = dlrp.explain(model, x, preset=preset).relevance
    assert not torch.allclose(changed, dlrp.explain(model, x, preset="gamma").relevance)
    leaf = x.requires_grad_()
    torch.testing.assert_close(changed, dlrp.relevance(model(leaf), leaf, preset=preset)[0])

"""Relevance of a layer within a map: of a convolution whose batch norm counts as part of it.

It is what the convolution hands on to its input, as under presets that leave the two apart.
"""

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp

ONE_MAP = ["default", "gamma", "epsilon-plus", "epsilon-plus-flat", "epsilon-alpha2-beta1"]


def network(kind="conv"):
    """Convolutions without a bias: what arrives at one's output all goes on to its input."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 64, 4),
    )  # fmt: skip
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return net.double().eval()


def explained(preset):
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    a = dlrp.explain(network(), x, target=0, preset=preset, layers=["2", "3"])
    return [a.layers[name].flatten(1).sum(1) for name in ("2", "3")]


@pytest.mark.parametrize("preset", [*ONE_MAP, "epsilon", "attnlrp"])
def test_relevance_in_front_of_the_norm_is_what_goes_on(preset):
    below, conv = explained(preset)
    torch.testing.assert_close(conv, below, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("preset", [*ONE_MAP, "epsilon", "attnlrp"])
def test_asking_for_a_layer_changes_nothing(preset):
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    plain, asked = (dlrp.explain(network(), x, target=0, preset=preset, layers=layers) for layers in ([], ["3"]))
    torch.testing.assert_close(asked.relevance, plain.relevance, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("preset", ["gamma", "epsilon"])
def test_relevance_of_what_lies_between(preset):
    """The same values, moved: the same relevance, moved."""
    net = network()
    net = nn.Sequential(*net[:4], nn.Unflatten(1, (8, 1)), nn.Flatten(1, 2), *net[4:])
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    a = dlrp.explain(net, x, target=0, preset=preset, layers=["3", "4", "5"])
    torch.testing.assert_close(a.layers["4"].flatten(1, 2), a.layers["3"], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(a.layers["5"], a.layers["3"], rtol=1e-12, atol=1e-14)

"""An int, or nothing, as target where the output is [rows, classes, height, width], as of segmentation nets.

It could mean one pixel, all of them, or the largest: an error asks which, and says how to choose.
"""

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp

torch.set_num_threads(1)


def parts():
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 1).eval(), torch.randn(1, 3, 5, 5)


def test_an_int_is_not_one_pixel():
    model, x = parts()
    for target in (1, None, [1], torch.tensor([1])):
        with pytest.raises(dlrp.TargetError) as raised:
            dlrp.explain(model, x, target=target, preset="attnlrp")
        for word in ("which pixels", "(class, row, column)", "(5, 5)", "callable", "seed tensor"):
            assert word in str(raised.value)


def test_volumes_are_maps_too():
    with pytest.raises(dlrp.TargetError, match="which pixels"):
        dlrp.explain(nn.Conv3d(1, 2, 1), torch.randn(1, 1, 2, 3, 4), target=1)


def test_a_graph_of_ones_own():
    model, x = parts()
    with pytest.raises(dlrp.TargetError, match="which pixels"):
        dlrp.relevance(model(x.requires_grad_()), x)


def test_the_class_everywhere():
    model, x = parts()
    a = dlrp.explain(model, x, target=lambda y: y[:, 1].sum((1, 2)), preset="attnlrp")
    torch.testing.assert_close(a.relevance, x * model.weight[1].detach().reshape(1, 3, 1, 1), atol=1e-5, rtol=1e-4)


def test_control_token_by_token_is_the_last_position():
    model, x = nn.Linear(3, 4), torch.randn(2, 6, 3)
    torch.testing.assert_close(
        dlrp.explain(model, x, target=1).relevance, dlrp.explain(model, x, target=(-1, 1)).relevance
    )


def test_control_a_tuple_says_it():
    model, x = parts()
    a = dlrp.explain(model, x, target=(1, 2, 3), preset="attnlrp")
    with torch.no_grad():
        wanted = torch.zeros_like(x)
        wanted[0, :, 2, 3] = x[0, :, 2, 3] * model.weight[1].reshape(3)
    torch.testing.assert_close(a.relevance, wanted, atol=1e-5, rtol=1e-4)

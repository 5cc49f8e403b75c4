"""What `default` adds to AttnLRP: gamma by depth on convolutions, a small gamma on linear maps with a bias."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp
from dynamiclrp.ops import Kind
from dynamiclrp.presets import BIASED


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (3, 4, 4, 4):
        layers += [nn.Conv2d(width, 4, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 36, 5))


HALF = 0.5 ** (1 - 0.5**0.5) * 0.07 ** (0.5**0.5)  # gamma half way up: its logarithm goes with the square root of depth


def test_gamma_falls_with_depth_and_early():
    model, x = conv_net(), torch.randn(2, 3, 6, 6)
    rules = [step.rule for step in dlrp.explain(model, x).plan.steps if step.name == "Convolution"]
    gammas = [rule.gamma for rule in reversed(rules) if isinstance(rule, dlrp.Gamma)]
    assert isinstance(rules[-1], dlrp.Box) and len(gammas) == 3
    assert gammas == pytest.approx([0.5, HALF, 0.07])


def test_branches_side_by_side_have_the_same_depth():
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a, self.b, self.c = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))
            self.both = False

        def forward(self, x):
            x = torch.relu(self.stem(x))
            y = torch.relu(self.b(torch.relu(self.a(x))))
            return (y + torch.relu(self.c(x)) if self.both else y).flatten(1)

    model, x = Branches(), torch.randn(1, 3, 5, 5)
    for both, expected in ((False, [0.07, 0.5]), (True, [0.07, 0.5, 0.5])):
        model.both = both
        steps = dlrp.explain(model, x).plan.steps
        assert sorted(s.rule.gamma for s in steps if isinstance(s.rule, dlrp.Gamma)) == pytest.approx(expected)


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_batch_of_attention_layers_equals_its_rows(tokens):
    """Of one row torch makes one node with the bias in it, of several a product and a sum with a part of the bias."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval().double()
    nn.init.normal_(attention.in_proj_bias)
    query = nn.Parameter(torch.randn(1, tokens, 8, dtype=torch.float64))

    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = attention, nn.Linear(8, 3).double()

        def forward(self, x):
            found, _ = self.attention(query.expand(len(x), -1, -1), x, x, need_weights=False)
            return self.head(found.mean(1))

    model, x = Pool(), torch.randn(3, 5, 8, dtype=torch.float64)
    whole = dlrp.explain(model, x, target=1).relevance
    rows = torch.cat([dlrp.explain(model, x[i : i + 1], target=1).relevance for i in range(3)])
    torch.testing.assert_close(whole, rows)


def test_a_bias_may_be_put_together_from_parts():
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.a, self.b = (nn.Parameter(torch.randn(n)) for n in ((4, 6), 2, 4))

        def forward(self, x):
            return x @ self.weight + torch.cat([self.a, self.b])

    steps = dlrp.explain(Joined(), torch.randn(2, 4)).plan.steps
    assert [(step.has_bias, type(step.rule)) for step in steps if step.name == "Mm"] == [(True, dlrp.Gamma)]


def test_it_is_the_same_as_naming_every_layer():
    model, x = conv_net(), torch.randn(2, 3, 6, 6)
    by_hand = dlrp.preset("default") | {str(at): dlrp.Gamma(gamma) for at, gamma in ((2, 0.5), (4, HALF), (6, 0.07))}
    torch.testing.assert_close(dlrp.explain(model, x).relevance, dlrp.explain(model, x, preset=by_hand).relevance)


def test_the_only_layer_with_the_rule_is_the_first():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2, bias=False))
    x = torch.randn(1, 2, 6, 6)
    graded, one = (dlrp.preset("attnlrp") | {"conv": dlrp.Gamma(0.3, last=last)} for last in (0.1, None))
    assert torch.equal(dlrp.explain(model, x, preset=graded).relevance, dlrp.explain(model, x, preset=one).relevance)


@pytest.mark.parametrize(("gamma", "last"), [(0.0, 0.1), (0.1, 0.0), (0.1, -1.0)])
def test_factors_join_positive_numbers(gamma, last):
    with pytest.raises(ValueError, match="expected both above 0"):
        dlrp.Gamma(gamma, last=last)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.biased = nn.Linear(5, 6, bias=False), nn.Linear(6, 3)

    def forward(self, x):
        return self.biased(torch.relu(self.plain(x)))


@pytest.mark.parametrize("shape", [(2, 5), (1, 3, 5), (2, 3, 5)], ids=str)  # one node, or a product and a sum
@pytest.mark.parametrize("frozen", [False, True])
def test_linear_maps_with_a_bias_are_told_from_those_without(shape, frozen):
    torch.manual_seed(0)
    model, x = Both().requires_grad_(not frozen), torch.randn(shape)
    default = dlrp.explain(model, x).relevance
    by_hand = dlrp.preset("default", linear=0.0) | {"biased": dlrp.Gamma(0.02)}
    torch.testing.assert_close(default, dlrp.explain(model, x, preset=by_hand).relevance)
    for other in (dlrp.preset("default", linear=0.0), dlrp.preset("default", linear=0.02)):
        assert not torch.allclose(default, dlrp.explain(model, x, preset=other).relevance)


@pytest.mark.parametrize("key", ["linear", Kind.LINEAR])
def test_an_override_of_linear_means_all_of_them(key):
    preset = dlrp.preset("default") | {key: dlrp.Epsilon()}
    torch.manual_seed(0)
    steps = dlrp.explain(Both(), torch.randn(2, 5), preset=preset).plan.steps
    assert {repr(step.rule) for step in steps if step.kind is Kind.LINEAR} == {repr(dlrp.Epsilon())}


def test_both_can_be_overridden_at_once():
    preset = dlrp.preset("default") | {BIASED: dlrp.ZPlus(), "linear": dlrp.Epsilon()}
    torch.manual_seed(0)
    steps = dlrp.explain(Both(), torch.randn(2, 5), preset=preset).plan.steps
    assert [type(step.rule) for step in steps if step.kind is Kind.LINEAR] == [dlrp.ZPlus, dlrp.Epsilon]

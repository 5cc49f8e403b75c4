"""`Split`: uneven parts for gates, attention weights and signals, by the textbook and alike in every form of attention."""

import math

import pytest
import torch

import dynamiclrp as dlrp
from dynamiclrp.rules import Split
from test_attnlrp import ATTENTION, IDS, LANGUAGE_MODELS, contrast, error, pure_float64, run_language_model  # noqa: F401


def uneven(gate: float, weights: float) -> dlrp.Preset:
    return dlrp.preset("attnlrp") | {"product": Split(gate, weights), "attention": dlrp.Attention(weights)}


@pytest.fixture(autouse=True)
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("gate", [0.0, 0.3, 1.0])
def test_a_gate_takes_its_part_of_a_product(gate):
    torch.manual_seed(0)
    g, u = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    y = torch.sigmoid(g) * u
    r = torch.randn(3, 4)
    preset = uneven(gate, 0.5) | {"function": dlrp.Identity(), "activation": dlrp.Identity()}
    found = dlrp.relevance(y, (g, u), seed=r, preset=preset)
    assert torch.allclose(found[0], gate * r)  # what passes the sigmoid by the identity rule
    assert torch.allclose(found[1], (1 - gate) * r)


@pytest.mark.parametrize("weights", [0.0, 0.3, 0.5])
def test_attention_written_out_is_split_between_weights_and_values(weights):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 5, 4, requires_grad=True) for _ in range(3))
    a = torch.softmax(q @ k.mT / math.sqrt(4), -1)
    y = a @ v
    r = torch.randn(2, 5, 4)
    found = dlrp.relevance(y, (q, k, v), seed=r, preset=uneven(0.5, weights))
    # the textbook, in relevance: A·v, the softmax by its Taylor rule, q·k in halves
    s = r / y.detach()
    with torch.no_grad():
        to_values = (1 - weights) * v * (a.mT @ s)
        to_weights = weights * a * (s @ v.mT)
        logits = q @ k.mT / math.sqrt(4)
        to_logits = logits * (to_weights - a * to_weights.sum(-1, keepdim=True))
        ratio = to_logits / logits / math.sqrt(4) / 2
        to_q, to_k = q * (ratio @ k), k * (ratio.mT @ q)
    for part, expected in zip(found, (to_q, to_k, to_values), strict=True):
        assert torch.allclose(part, expected, atol=1e-12)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_eager_equals_fused_attention(name, pure_float64):  # noqa: F811
    build, _ = LANGUAGE_MODELS[name]
    for preset in (uneven(0.4, 0.3), "default"):
        eager, fused = (run_language_model(build(kind), IDS, contrast, preset)[0] for kind in ATTENTION)
        assert error(eager, fused) < 1e-9


def test_halves_are_attnlrp_and_nothing_is_cp_lrp(pure_float64):  # noqa: F811
    build, _ = LANGUAGE_MODELS[next(iter(LANGUAGE_MODELS))]
    model = build("eager")
    for preset, same in ((uneven(0.5, 0.5), "attnlrp"), (uneven(0, 0) | {"weights": dlrp.Nothing()}, "cp-lrp")):
        ours, theirs = (run_language_model(model, IDS, contrast, p)[0] for p in (preset, same))
        assert error(ours, theirs) < 1e-12


def test_a_part_outside_0_to_1_is_refused():
    with pytest.raises(ValueError, match="between 0 and 1"):
        Split(gate=1.5)


def test_default_takes_a_gamma_for_linear_layers():
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2)), torch.randn(3, 4)
    same = dlrp.preset("default") | {"linear": dlrp.Gamma(0.3)}  # of maps with a bias and of those without
    found, expected = (dlrp.explain(model, x, preset=p).relevance for p in (dlrp.preset("default", linear=0.3), same))
    assert torch.equal(found, expected)
    assert not torch.allclose(found, dlrp.explain(model, x, preset="default").relevance)

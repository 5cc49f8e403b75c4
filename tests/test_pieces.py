"""Rules on signed parts take the magnitudes of a large weight piece by piece: same numbers, less memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp
from dynamiclrp.rules import signed
from dynamiclrp.timing import peak_bytes

RULES = [dlrp.Gamma(0.25), dlrp.ZPlus(), dlrp.AlphaBeta(2, 1)]


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 41), nn.Tanh(), nn.Linear(41, 7), nn.ReLU(), nn.Linear(7, 3, bias=False)).to(
        dtype
    )


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("piece", [1, 41, 100])
def test_pieces_change_nothing(rule, piece, monkeypatch):
    model, x = net(), torch.randn(4, 30, dtype=torch.float64)
    preset = dlrp.preset("attnlrp") | {"linear": rule}
    whole = dlrp.explain(model, x, preset=preset).relevance
    monkeypatch.setattr(signed, "PIECE", (piece, piece))
    torch.testing.assert_close(dlrp.explain(model, x, preset=preset).relevance, whole, rtol=1e-10, atol=1e-12)


def test_a_large_weight_is_not_copied(monkeypatch):
    model = nn.Linear(4096, 8192).eval()
    x = torch.randn(1, 4096)
    explainer = dlrp.Explainer(model, "gamma")
    explainer(x)
    pieces = peak_bytes(lambda: explainer(x))
    monkeypatch.setattr(signed, "PIECE", (1 << 30, 1 << 30))
    whole = peak_bytes(lambda: explainer(x))
    assert whole > 4 * 4096 * 8192 and pieces < whole / 4

"""Rules on signed parts take the magnitudes of a large weight piece by piece: same numbers, less memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp
from dynamiclrp.here import _PIECE
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
    monkeypatch.setitem(_PIECE, "cpu", (piece, piece))
    torch.testing.assert_close(dlrp.explain(model, x, preset=preset).relevance, whole, rtol=1e-10, atol=1e-12)


def test_a_large_weight_is_not_copied(monkeypatch):
    model = nn.Linear(4096, 8192).eval()
    x = torch.randn(1, 4096)
    explainer = dlrp.Explainer(model, "gamma")
    explainer(x)
    pieces = peak_bytes(lambda: explainer(x))
    monkeypatch.setitem(_PIECE, "cpu", (1 << 30, 1 << 30))
    whole = peak_bytes(lambda: explainer(x))
    assert whole > 4 * 4096 * 8192 and pieces < whole / 4


def test_beside_few_rows_the_pieces_are_smaller(monkeypatch):
    model = nn.Linear(256, 256).eval()
    explainer = dlrp.Explainer(model, "gamma")

    def peak(rows: int, sizes: tuple[int, int]) -> int:
        monkeypatch.setitem(_PIECE, "cpu", sizes)
        x = torch.randn(rows, 256)
        explainer(x)
        return peak_bytes(lambda: explainer(x))

    whole, half = 256 * 256, 128 * 256
    assert peak(1, (whole, half)) == peak(1, (half, half)) < peak(1, (whole, whole))
    assert peak(64, (whole, half)) == peak(64, (whole, whole))

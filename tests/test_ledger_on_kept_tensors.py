"""Ledgers of a model that keeps a tensor made from its parameters from call to call, as LeViT, TinyViT and EfficientFormer do.

Its graph may be freed, or it was made in inference mode: the relevance is the same, and the books close.
"""

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp


class Attention(nn.Module):
    """Attention with a bias by position, put together once."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.head = nn.Linear(4, 12), nn.Linear(4, 2)
        self.biases, self.kept = nn.Parameter(torch.randn(2, 5)), None
        self.register_buffer("places", torch.randint(0, 5, (3, 3)))

    def forward(self, x):
        if self.kept is None:
            self.kept = self.biases[:, self.places]
        q, k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) + self.kept).softmax(-1)
        return self.head((weights @ v).transpose(1, 2).flatten(2)).mean(1)


def predicted_in_inference_mode(model, x):
    with torch.inference_mode():
        model(x)


def gradient_taken(model, x):
    model(x).sum().backward()
    model.zero_grad(set_to_none=True)


def explained(model, x):
    dlrp.explain(model, x, target=0)


@pytest.mark.parametrize("preset", ["default", "attnlrp", "dynamic"])
@pytest.mark.parametrize("before", [predicted_in_inference_mode, gradient_taken])
def test_ledger_after_another_use(before, preset):
    model, x = Attention().eval(), torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    expected = dlrp.explain(Attention().eval(), x, target=0, preset=preset).relevance
    before(model, x)
    torch.testing.assert_close(dlrp.explain(model, x, target=0, preset=preset).relevance, expected)  # right today
    a = dlrp.explain(model, x, target=0, preset=preset, ledger=True)
    torch.testing.assert_close(a.relevance, expected)
    book = a.ledger
    assert abs(book.total - book.delivered - sum(book.kept.values())) < 1e-4 * abs(book.total)


def test_control_ledger_after_an_explanation():
    """Right today: must stay so."""
    model, x = Attention().eval(), torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    explained(model, x)
    assert dlrp.explain(model, x, target=0, ledger=True).ledger is not None

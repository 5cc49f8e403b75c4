"""On a CUDA device: the same relevance as on the CPU, for kernels that exist only there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


class Last(nn.Module):
    """The last state of a recurrent layer, as scores."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.LazyLinear(3)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


@pytest.mark.parametrize("preset", ["default", "attnlrp", "epsilon", "dynamic"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind, preset):
    torch.manual_seed(0)
    model, x = Last(kind(4, 5, num_layers=2, bidirectional=True, batch_first=True)).eval(), torch.randn(2, 6, 4)
    with torch.no_grad():
        model(x)
    there = dlrp.explain(model, x, preset=preset, target=1).relevance
    here = dlrp.explain(model.cuda(), x.cuda(), preset=preset, target=1).relevance
    torch.testing.assert_close(here.cpu(), there, rtol=1e-3, atol=1e-5 * there.abs().max().item())


@pytest.mark.parametrize("activation", [nn.GELU(), nn.GELU("tanh"), nn.SiLU()])
def test_activations_in_one_kernel(activation):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), activation, nn.Linear(8, 3)), torch.randn(5, 6)
    there = dlrp.explain(model, x, preset="attnlrp", target=0).relevance
    here = dlrp.explain(model.cuda(), x.cuda(), preset="attnlrp", target=0).relevance
    torch.testing.assert_close(here.cpu(), there, rtol=1e-4, atol=1e-6)


def test_targets_of_a_batched_backward_pass():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, "gelu", batch_first=True, norm_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(80, 7))
    model, x = model.eval().cuda(), torch.randn(1, 5, 16, device="cuda")
    for target, found in enumerate(dlrp.explain(model, x, targets=range(7))):
        torch.testing.assert_close(
            found.relevance, dlrp.explain(model, x, target=target).relevance, rtol=1e-3, atol=1e-6
        )

"""`torch.stft`, a mask, `torch.istft` (speech enhancement): all of it is linear, so relevance is gradient x input."""

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp


class Enhance(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("window", torch.hann_window(16))
        self.mask, self.head = nn.Parameter(torch.rand(9, 1)), nn.Linear(64, 2, bias=False)

    def forward(self, x):
        made = torch.stft(x, 16, 4, window=self.window, return_complex=True) * self.mask
        return self.head(torch.istft(made, 16, 4, window=self.window, length=64))


@pytest.mark.parametrize("preset", ["attnlrp", "default", "epsilon", "gradient"])
def test_forth_and_back(preset):
    model, x = Enhance().double().eval(), torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).double()
    chosen = dlrp.preset("default", linear=0.0) if preset == "default" else preset
    probe = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(probe)[:, 1].sum(), probe)
    found = dlrp.explain(model, x, target=1, preset=chosen).relevance
    torch.testing.assert_close(found, gradient * x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.sum(1), model(x).detach()[:, 1], rtol=1e-4, atol=1e-5)

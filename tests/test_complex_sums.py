"""Sums and means of complex numbers under `dynamic`: their shares go by magnitude."""

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp

SPECTRA = {
    "add": lambda x: (torch.fft.rfft(x) + torch.fft.rfft(x.roll(1, -1))).real,
    "subtract": lambda x: (torch.fft.rfft(x) - torch.fft.rfft(x.roll(1, -1))).real,
    "sum": lambda x: torch.fft.rfft(x).sum(-1, keepdim=True).real,
    "mean": lambda x: torch.fft.rfft(x).mean(-1, keepdim=True).real,
    "magnitude": lambda x: (torch.fft.rfft(x) + torch.fft.rfft(x.roll(1, -1))).abs(),
}


class Spectrum(nn.Module):
    def __init__(self, made):
        super().__init__()
        self.made = made

    def forward(self, x):
        return self.made(x)


@pytest.mark.parametrize("name", SPECTRA)
def test_complex_sum_under_dynamic(name):
    """Nothing in these models keeps relevance: no bias, no constant. All of the score reaches the input."""
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).double()
    target = None if name in ("sum", "mean") else 1  # where the difference is not zero
    a = dlrp.explain(Spectrum(SPECTRA[name]).eval(), x, target=target, preset="dynamic")
    assert a.relevance.isfinite().all()
    torch.testing.assert_close(a.relevance.sum(), a.score.sum(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("preset", ["attnlrp", "default", "gamma", "epsilon", "epsilon-plus"])
def test_control_other_presets(preset):
    """Right today: must stay so."""
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).double()
    a = dlrp.explain(Spectrum(SPECTRA["add"]).eval(), x, target=0, preset=preset)
    torch.testing.assert_close(a.relevance.sum(), a.score.sum(), rtol=1e-4, atol=1e-5)

"""Activations' shares in one CUDA kernel equal the same in torch's operations."""

from __future__ import annotations

import pytest
import torch

from dynamiclrp.ops.fused import _CODE, kernel

RATIOS = {
    "gelu": lambda x: 0.5 * (1 + torch.erf(x * 0.5**0.5)),
    "gelu_tanh": lambda x: 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "silu": torch.sigmoid,
}


def test_every_kernel_has_its_formula_here():
    assert RATIOS.keys() == _CODE.keys()


@pytest.mark.parametrize("name", RATIOS)
def test_there_is_none_on_the_cpu(name):
    assert kernel(name, torch.ones(2), torch.ones(2)) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RATIOS)
def test_kernels_equal_their_formulas(name, dtype):
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, -100, 100])]).to("cuda", dtype)
    s = torch.randn_like(x)
    made = kernel(name, s, x)
    assert made is not None
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(made(s, x), s * RATIOS[name](x), rtol=16 * eps, atol=4 * eps)
    wide, steps = s.expand(3, -1).t(), x.expand(3, -1).t()  # other strides
    torch.testing.assert_close(made(wide, steps), wide * RATIOS[name](steps), rtol=16 * eps, atol=4 * eps)
    assert kernel(name, s.bfloat16(), x) is None and kernel(name, s[:1], x) is None

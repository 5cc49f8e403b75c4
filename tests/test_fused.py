"""Rules' arithmetic in one CUDA kernel equals the same in torch's operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dynamiclrp.fused import FORMULAS, kernel, source

EPS = 1e-6


def _sgn(x: Tensor) -> Tensor:
    return torch.where(x < 0, -1.0, 1.0).to(x.dtype)


# name → (constants, formula); s takes part as a coefficient
CASES = {
    "gelu": ({}, lambda s, x: s * 0.5 * (1 + torch.erf(x * 0.5**0.5))),
    "gelu_tanh": ({}, lambda s, x: s * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))),
    "silu": ({}, lambda s, x: s * torch.sigmoid(x)),
    "layer_norm": ({}, lambda x, mean, rstd, w, b: (x - mean) * rstd * w + b),
    "gamma": (
        {"times_z": "* z"},
        lambda s, z, q: (s * z.abs() / (z.abs() + q), s * z / (z.abs() + q)),
    ),
    "gamma_positive": ({"times_z": ""}, lambda s, z, q: s / (z + q)),
    "zplus": ({"eps": EPS, "times_z": "* z"}, lambda s, z, q: s * z / ((z + q).clamp(min=0) + EPS)),
    "add_signed": ({}, lambda g, more, x: g + _sgn(x) * more),
    "epsilon_absolute": (
        {"eps": EPS, "times_z": "* z"},
        lambda s, z, b: (
            s * z * (z - b).abs() / ((z - b).abs() + b.abs() + EPS) / ((z - b) + EPS * _sgn(z - b))
        ),
    ),
    "sum_share": (
        {"eps": EPS, "limit": 1e30, "times_y": "* y"},
        lambda s, y, a, b: s * y.clamp(-1e30, 1e30) / (a.abs() + b.abs() + EPS),
    ),
    "times_sign": ({}, lambda g, a: g * _sgn(a)),
    "product_share": ({"eps": EPS}, lambda g, a, b: g * a.abs() / (a.abs() + b.abs() + EPS)),
    "affine_absolute": (
        {"eps": EPS, "times_y": "* y"},
        lambda s, x, scale, shift: (
            s * (scale * x + shift) * _sgn(x) * scale.abs() / ((scale * x).abs() + shift.abs() + EPS)
        ),
    ),
}  # fmt: skip


def operands(name: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Of a map z = Σ contributions, q = Σ |contributions| is at least |z|."""
    generator = torch.Generator().manual_seed(0)
    made = {n: torch.randn(3, 5, 64, generator=generator, dtype=torch.float64) for n in FORMULAS[name].operands.split()}
    if "q" in made:
        made["q"] = made["q"].abs() + made["z"].abs()
    if name == "gamma_positive":
        made["z"] = made["z"].abs()
    for n in {"b", "scale", "shift", "mean", "rstd", "w"} & made.keys():
        made[n] = made[n][:1, :, :1]  # one number a channel
    return [x.to(device, dtype) for x in made.values()]


def test_every_kernel_has_its_formula_here():
    assert CASES.keys() == FORMULAS.keys()


@pytest.mark.parametrize("name", CASES)
def test_there_is_none_on_the_cpu(name):
    assert kernel(name, *operands(name, torch.float32, "cpu"), **CASES[name][0]) is None


@pytest.mark.parametrize("name", CASES)
def test_the_source_names_each_constant_and_each_operand(name):
    code = source(name, CASES[name][0])
    assert code.count("{") == code.count("}") == 1
    for operand in FORMULAS[name].operands.split():
        assert f"T {operand}_" in code
    assert all(repr(value) in code for value in CASES[name][0].values() if isinstance(value, float))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_their_formulas(name, dtype):
    constants, formula = CASES[name]
    tensors = operands(name, dtype, "cuda")
    made = kernel(name, *tensors, **constants)
    assert made is not None
    eps = torch.finfo(dtype).eps

    def check(tensors: list[Tensor]) -> None:
        found, expected = made(*tensors), formula(*[x.double() for x in tensors])
        for one, other in zip(
            found if isinstance(found, tuple) else [found], expected if isinstance(expected, tuple) else [expected]
        ):
            assert one.dtype == dtype
            torch.testing.assert_close(one.double(), other, rtol=64 * eps, atol=16 * eps)

    check(tensors)
    check([x.transpose(0, 1) for x in tensors])  # other strides
    wide = tensors[0].new_zeros(2, *tensors[0].shape)
    assert kernel(name, tensors[0], *[wide for _ in tensors[1:]], **constants) is None  # nothing grows
    assert (
        kernel(
            name,
            tensors[0].double().to(torch.float64 if dtype != torch.float64 else torch.float32),
            *tensors[1:],
            **constants,
        )
        is None
    )

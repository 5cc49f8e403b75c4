"""Formulas as kernels: the C++ that they are traced to computes what they compute in Python.

Without a GPU the text is compiled by the machine's own compiler, and rules run on what it made; with one, as torch compiles it there.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import pkgutil
import shutil
import subprocess
from collections import defaultdict
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dynamiclrp as dlrp
from dynamiclrp import kernel

COMPILER = shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def formulas() -> dict[str, Any]:
    """All of the library's, by name."""
    found = {}
    for package in ("rules", "ops"):
        for module in pkgutil.iter_modules(importlib.import_module(f"dynamiclrp.{package}").__path__):
            for name, value in vars(importlib.import_module(f"dynamiclrp.{package}.{module.name}")).items():
                if (
                    inspect.isfunction(value)
                    and value.__code__.co_filename == kernel.__file__
                    and hasattr(value, "__wrapped__")
                ):
                    found[f"{module.name}.{name}"] = value
    return found


FORMULAS = formulas()
OPTIONAL = defaultdict[str, tuple[str, ...]](
    lambda: ("bias",), weigh=("scale",), quotient=("weight", "bias")
)  # tensors that may be absent
CHANNELS = {"bias", "scale", "shift", "weight", "mean", "rstd"}  # one number for each
POSITIVE = {"q", "eps", "ratio", "plus", "rstd", "limit"}


def forms(function: Any) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """The tensors that are there, and the words, in every form of a formula."""
    parameters = inspect.signature(function).parameters.values()
    tensors = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    words = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    flags = [p.name for p in words if p.annotation in ("bool", bool)]
    numbers = {p.name: 1e30 if p.name == "limit" else 0.3 for p in words if p.name not in flags}
    found = []
    optional = [name for name in OPTIONAL[function.__name__.strip("_")] if name in tensors]
    for present in product([True, False], repeat=len(optional)):
        absent = {name for name, there in zip(optional, present) if not there}
        for chosen in product([True, False], repeat=len(flags)):
            found.append((tuple("" if n in absent else n for n in tensors), numbers | dict(zip(flags, chosen))))
    if "plus" in numbers:
        found += [(names, words | {"plus": None}) for names, words in found]
    return found


CASES = [(name, *form) for name, function in FORMULAS.items() for form in forms(function)]


def operands(names: tuple[str, ...], words: dict[str, Any], dtype: torch.dtype) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    made: list[Tensor | None] = []
    for name in names:
        x = torch.randn(3, 5, 8, generator=generator, dtype=torch.float64)
        x = x.abs() + 0.1 if name in POSITIVE or (name == "z" and words.get("rectified")) else x
        x.view(-1)[3:5] = torch.tensor([0.0, 0.5])
        x = x + 4 if name == "q" else x  # at least |z|
        made.append(x[:1, :, :1].to(dtype) if name in CHANNELS and name != names[0] else x.to(dtype) if name else None)
    return made


@cache
def compiled(code: str, name: str, letter: str, operands: int, numbers: int, results: int, folder: str) -> Any:
    """A loop over the kernel, as a C function."""
    kind = {"d": "double", "f": "float"}[letter]
    given = [f"in{i}[j]" for i in range(operands)] + [f"n{i}" for i in range(numbers)]
    call = f"{name}<{kind}>({', '.join([*given, *(f'out{i}[j]' for i in range(results))][: None if results > 1 else len(given)])})"
    taken = [f"{kind}* in{i}" for i in range(operands)] + [f"double n{i}" for i in range(numbers)]
    taken += [f"{kind}* out{i}" for i in range(results)]
    body = f"{call};" if results > 1 else f"out0[j] = {call};"
    text = f'#include <cmath>\nusing namespace std;\n{code}\nextern "C" void run({", ".join(taken)}, long n) {{ for (long j = 0; j < n; j++) {{ {body} }} }}\n'
    path = Path(folder) / f"{name}_{letter}"
    path.with_suffix(".cpp").write_text(text)
    words = [COMPILER, "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-o"]
    subprocess.run([*words, str(path.with_suffix(".so")), str(path.with_suffix(".cpp"))], check=True)
    return ctypes.CDLL(str(path.with_suffix(".so"))).run


@pytest.fixture
def kernels(monkeypatch, tmp_path_factory):
    """Let formulas run as compiled C++ on the CPU; yields the names of those that did."""
    folder, used = str(tmp_path_factory.getbasetemp()), set()

    def serves(tensor: Tensor) -> bool:
        return tensor.dtype in (torch.float32, torch.float64) and not torch._C._functorch.is_batchedtensor(tensor)

    def launcher(*what: Any) -> Any:
        code, name, results = kernel.source(*what)

        def launch(tensors: tuple[Tensor, ...], numbers: dict[str, float]) -> Any:
            used.add(what[0].__name__.strip("_"))
            shape, dtype = tensors[0].shape, tensors[0].dtype
            given = [tensor.expand(shape).contiguous() for tensor in tensors]
            made = [torch.empty(shape, dtype=dtype) for _ in range(results)]
            letter = "d" if dtype is torch.float64 else "f"
            run = compiled(code, name, letter, len(given), len(numbers), results, folder)
            pointers = [ctypes.c_void_p(t.data_ptr()) for t in given]
            out = [ctypes.c_void_p(t.data_ptr()) for t in made]
            run(*pointers, *map(ctypes.c_double, numbers.values()), *out, ctypes.c_long(made[0].numel()))
            return tuple(made) if results > 1 else made[0]

        return launch

    monkeypatch.setattr(kernel, "serves", serves)
    monkeypatch.setattr("dynamiclrp.rules.signed.serves", serves)
    monkeypatch.setattr(kernel, "_launcher", launcher)
    return used


def test_the_formulas_are_found():
    assert {
        "signed._gamma",
        "signed._weigh",
        "linear.epsilon",
        "shares._sum_of_two",
        "norms._affine",
    } <= FORMULAS.keys()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "names", "words"), CASES, ids=str)
def test_a_formula_is_the_same_in_cpp(name, names, words, dtype, kernels):
    tensors = operands(names, words, dtype)
    found, expected = FORMULAS[name](*tensors, **words), FORMULAS[name].__wrapped__(*tensors, **words)
    assert kernels == {name.split(".")[1].strip("_")}
    torch.testing.assert_close(
        found, expected, rtol=16 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps, equal_nan=True
    )


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "names", "words"), CASES, ids=str)
def test_a_formula_is_the_same_on_a_gpu(name, names, words, dtype):
    tensors = [None if x is None else x.cuda() for x in operands(names, words, dtype)]
    words = {key: 1e4 if key == "limit" else value for key, value in words.items()}
    assert kernel.fits(*tensors)
    wide = [None if x is None else x.double().cpu() for x in tensors]
    found, expected = FORMULAS[name](*tensors, **words), FORMULAS[name].__wrapped__(*wide, **words)
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected)), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(
            one.cpu().double(), other, rtol=64 * torch.finfo(dtype).eps, atol=16 * torch.finfo(dtype).eps
        )


def test_what_does_not_fit_together_runs_as_it_is(kernels):
    z, s = torch.randn(2, 3), torch.randn(2, 3)
    epsilon = FORMULAS["linear.epsilon"]
    for other in (z.double(), torch.randn(4, 2, 3)):
        epsilon(s, other, None, eps=1e-6, coefficients=True)
    assert not kernels
    torch.vmap(lambda s: epsilon(s, z, None, eps=1e-6, coefficients=True))(torch.randn(4, 2, 3))
    assert not kernels
    epsilon(s, z[:1], None, eps=1e-6, coefficients=True)
    assert kernels == {"epsilon"}


class Net(nn.Module):
    """Every rule that has a formula: folded and plain maps, sums, gates, norms, activations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.biased, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.third, self.fourth, self.fifth = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
        self.free = nn.BatchNorm2d(8, affine=False)
        self.branch, self.unrectified = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.sixth, self.capped = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.linear, self.gate, self.layer = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.LayerNorm(8)
        self.group, self.head = nn.GroupNorm(2, 8), nn.Linear(8, 5)
        for norm in (self.norm, self.second, self.free, self.fourth, self.unrectified, self.capped):
            nn.init.uniform_(norm.running_var, 0.5, 2)
            nn.init.normal_(norm.running_mean)
            if norm.affine:
                nn.init.normal_(norm.weight)
                nn.init.normal_(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        x = F.relu(self.fifth(F.relu(self.fourth(self.third(x)))))
        x = F.hardtanh(self.capped(self.sixth(x)), 0.0, 0.5)
        x = x + self.unrectified(self.branch(x))
        x = x + self.free(self.second(self.biased(x)))
        x = self.group(x)
        heads = x.flatten(2).unflatten(1, (2, 4)).transpose(2, 3)
        x = self.layer(x.mean((2, 3)) + F.scaled_dot_product_attention(heads, heads, heads).mean(2).flatten(1))
        x = x * torch.sigmoid(x) + x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        x = x + F.silu(self.gate(x)) * self.linear(x)
        return self.head(F.gelu(x.tanh()) + F.gelu(F.softplus(x), approximate="tanh"))


EXPECTED = {
    "default": {"gamma", "weigh", "add_signed"},
    "gamma": {"gamma", "weigh", "add_signed"},
    "epsilon-plus": {"zplus", "weigh", "epsilon"},
    "epsilon-alpha2-beta1": {"alpha_beta", "weigh", "add_signed"},
    "epsilon": {"epsilon"},
    "dynamic": {"epsilon", "sum_of_two", "affine", "product", "quotient"},
}


@needs_compiler
@pytest.mark.parametrize("preset", EXPECTED)
def test_rules_are_the_same_with_kernels(preset, kernels, monkeypatch):
    torch.manual_seed(0)
    model, x = Net().double().eval(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with_kernels = dlrp.explain(model, x, preset=preset).relevance
    leaf = x.clone().requires_grad_()
    (of_callers_graph,) = dlrp.relevance(model(leaf), leaf, preset=preset)
    monkeypatch.undo()
    plain = dlrp.explain(model, x, preset=preset).relevance
    torch.testing.assert_close(with_kernels, plain, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(of_callers_graph, plain, rtol=1e-9, atol=1e-12)
    assert EXPECTED[preset] <= kernels

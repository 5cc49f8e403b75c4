"""Rules' arithmetic in one CUDA kernel equals the same in torch's operations."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dynamiclrp as dlrp
from dynamiclrp import fused as module
from dynamiclrp.fused import FORMULAS, fused, launcher, source
from dynamiclrp.ops import OPS
from dynamiclrp.saved import Saved

EPS = 1e-6


def _sgn(x: Tensor) -> Tensor:
    return torch.where(x < 0, -1.0, 1.0).to(x.dtype)


def _affine_absolute(s: Tensor, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor) -> Tensor:
    shift = bias - mean * scale
    return s * (scale * x + shift) * _sgn(x) * scale.abs() / ((scale * x).abs() + shift.abs() + 1e-3)


def _function_share(s: Tensor, g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    rest = y - 0.7
    slope = torch.where(x.abs() < 1e-4, g, s * rest / torch.where(x == 0, 1, x))
    return slope * y * _sgn(rest) / (rest.abs() + 0.7 + EPS)


def _bits(x: Tensor) -> Tensor:
    return x.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF


def _number(bits: Tensor) -> Tensor:
    return torch.where(bits < 1 << 31, bits, bits - (1 << 32)).int().view(torch.float32)


def _share(s: Tensor, y: Tensor, *values: Tensor) -> Tensor:
    return s * y.clamp(-1e30, 1e30) / (sum(value.abs() for value in values) + EPS)


SUM = {"eps": EPS, "limit": 1e30, "text": "* y"}
MERGED = SUM | {"below": 1e-2}


def _merged(s: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Both shares of a + b, that of a through the epsilon rule of what made it."""
    of_a, of_b = (_share(s, a + b, a, b) * _sgn(value) for value in (a, b))
    if bias is None:
        return of_a * a / (a + 1e-2 * _sgn(a)), of_b
    own = a - bias
    kept = own.abs() / (own.abs() + bias.abs() + 1e-2)
    return of_a * a * kept / (own + 1e-2 * _sgn(own)), of_b


# name → (constants, formula); s takes part as a coefficient
CASES = {
    "gelu": ({}, lambda s, x: s * 0.5 * (1 + torch.erf(x * 0.5**0.5))),
    "gelu_tanh": ({}, lambda s, x: s * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))),
    "silu": ({}, lambda s, x: s * torch.sigmoid(x)),
    "hardtanh": (
        {"low": -0.5, "high": 0.25, "slope": 0.75},
        lambda s, x: torch.where(x == 0, 0.75 * s, s * x.clamp(-0.5, 0.25) / x),
    ),
    "identity": ({"eps": 1e-2}, lambda s, x, y: s * y / (x + 1e-2 * _sgn(x))),
    "identity_limit": ({}, lambda s, x, y, g: torch.where(x == 0, g, s * y / torch.where(x == 0, 1, x))),
    "layer_norm": ({}, lambda x, mean, rstd, weight, bias: (x - mean) * rstd * weight + bias),
    "layer_norm_quotient": (
        {"eps": 1e-2},
        lambda s, x, mean, rstd, weight, bias: s * ((x - mean) * rstd * weight + bias) / (x + 1e-2 * _sgn(x)),
    ),
    "absolute": ({"times": 0.3}, lambda w: 0.3 * w.abs()),
    "absolute_folded": (
        {"times": 0.3, "eps": EPS},
        lambda w, scale, var: 0.3 * (w * scale / (var + EPS).sqrt()).abs(),
    ),
    "both": ({"times": 0.3}, lambda w: (0.3 * w.abs(), w + 0.3 * w.abs())),
    "both_folded": (
        {"times": 0.3, "eps": EPS},
        lambda w, scale, var: (0.3 * (w * scale / (var + EPS).sqrt()).abs(), w + 0.3 * w.abs() * _sgn(scale)),
    ),
    "parts": ({"of_a": 0.25, "of_b": 0.3, "of_c": 0.5}, lambda a, b, c: (0.25 * a, 0.3 * b, 0.5 * c)),
    "add_scaled": ({}, lambda g, s, weight, statistic: g + s * weight * statistic),
    "add_scaled_wide": (
        {},
        lambda g, s, weight, low, high: g + s * weight * _number(_bits(high) | _bits(low) >> 16),
    ),
    "add_signed": ({}, lambda g, more, x: g + _sgn(x) * more),
    "epsilon_absolute": (
        {"eps": EPS, "text": "* z"},
        lambda s, z, b: (
            s * z * (z - b).abs() / ((z - b).abs() + b.abs() + EPS) / ((z - b) + EPS * _sgn(z - b))
        ),
    ),
    "epsilon": ({"eps": EPS}, lambda s, z: s * z / (z + EPS * _sgn(z))),
    "epsilon_of_relevance": ({"eps": 1e-2}, lambda s, z: s / (z + 1e-2 * _sgn(z))),
    "sum_share": (SUM, lambda s, a, b: _share(s, a + b, a, b)),
    "sum_shares": (SUM, lambda s, a, b: (_share(s, a + b, a, b) * _sgn(a), _share(s, a + b, a, b) * _sgn(b))),
    "sum_shares_of_rest": (SUM, lambda s, y, b: (_share(s, y, y - b, b) * _sgn(y - b), _share(s, y, y - b, b) * _sgn(b))),
    "sum_shares_epsilon": (MERGED, _merged),
    "sum_shares_epsilon_of_rest": (MERGED, lambda s, y, b: _merged(s, y - b, b)),
    "sum_shares_epsilon_bias": (MERGED, _merged),
    "sum_shares_epsilon_bias_of_rest": (MERGED, lambda s, y, b, bias: _merged(s, y - b, b, bias)),
    "sum_share_of_one": (SUM, lambda s, y, a: _share(s, y, a) * _sgn(a)),
    "sum_share_of_total": (SUM, _share),
    "times_sign": ({}, lambda g, a: g * _sgn(a)),
    "product_shares": (
        {"eps": EPS},
        lambda s, a, b: tuple(s * u * v.abs() / (a.abs() + b.abs() + EPS) for u, v in ((b, a), (a, b))),
    ),
    "function_share": ({"c": 0.7, "eps": EPS, "close": 1e-4}, _function_share),
    "function_share_of_relevance": (
        {"c": 0.7, "eps": EPS},
        lambda s, y: s * (y - 0.7).abs() / ((y - 0.7).abs() + 0.7 + EPS),
    ),
    "affine_absolute": (
        {"eps": EPS, "stable": 1e-3, "text": "* y"},
        lambda s, x, weight, bias, mean, var: _affine_absolute(s, x, weight / (var + EPS).sqrt(), bias, mean),
    ),
    "affine_absolute_epsilon": (
        {"eps": EPS, "stable": 1e-3, "below": 1e-2, "text": "* y"},
        lambda s, x, weight, bias, mean, var: (
            _affine_absolute(s, x, weight / (var + EPS).sqrt(), bias, mean) / (1 + 1e-2 / x.abs())
        ),
    ),
}  # fmt: skip
for _suffix, _numbers, _bias in (
    ("", {}, lambda: 0.0),
    ("_bias", {"times": 0.3}, lambda b: 0.3 * b.abs()),
    ("_folded", {"times": 0.3, "eps": EPS}, lambda b, m, w, v: 0.3 * (b - m * w / (v + EPS).sqrt()).abs()),
):
    _what = {"plus": 1e-3, "text": "* z", **_numbers}
    CASES |= {
        f"gamma{_suffix}": (_what, lambda s, z, q, *b, bias=_bias: _gamma(s, z, q + bias(*b) + 1e-3)),
        f"gamma_positive{_suffix}": (_what, lambda s, z, q, *b, bias=_bias: s * z / (z.abs() + q + bias(*b) + 1e-3)),
        f"zplus{_suffix}": (_what, lambda s, z, q, *b, bias=_bias: s * z / ((z + q + bias(*b)).clamp(min=0) + 1e-3)),
    }


def _normed(z: Tensor, b: Tensor, mean: Tensor, scale: Tensor, var: Tensor) -> Tensor:
    return (z - mean) * scale / (var + EPS).sqrt() + b


for _rule in ("gamma", "gamma_positive", "zplus"):  # of what goes into the batch norm
    _what, _of_output = CASES[f"{_rule}_folded"]
    CASES[f"{_rule}_normed"] = (_what, lambda s, z, q, *b, made=_of_output: made(s, _normed(z, *b), q, *b))


def _gamma(s: Tensor, z: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    return s * z.abs() / (z.abs() + q), s * z / (z.abs() + q)


def operands(name: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Of a map z = Σ contributions, q = Σ |contributions| is at least |z|."""
    generator = torch.Generator().manual_seed(0)
    made = {n: torch.randn(3, 5, 64, generator=generator, dtype=torch.float64) for n in FORMULAS[name].operands.split()}
    if name.startswith("gamma_positive"):
        made["z"] = made["z"].abs()
    if name in ("function_share", "identity_limit", "hardtanh"):
        made["x"].view(-1)[3:5] = torch.tensor([0.0, 1e-5])
    if "total" in made:
        made["total"] = made["total"].abs() + 0.1
    if "var" in made:
        made["var"] = made["var"].abs() + 0.1
    for n in {"bias", "weight", "scale", "mean", "rstd", "w", "var"} & set(list(made)[1:]):
        made[n] = made[n][:1, :, :1]  # one number a channel
    if "q" in made:
        z = _normed(*[made[n] for n in ("z", "b", "mean", "scale", "var")]) if name.endswith("_normed") else made["z"]
        made["q"] = made["q"].abs() + z.abs()
    return [x.to(device, dtype) for x in made.values()]


def test_every_kernel_has_its_formula_here():
    assert CASES.keys() == FORMULAS.keys()


@pytest.mark.parametrize("name", CASES)
def test_there_is_none_on_the_cpu(name):
    assert fused(name, *operands(name, torch.float32, "cpu"), **CASES[name][0]) is None


@pytest.mark.parametrize("name", CASES)
def test_the_source_names_each_operand_and_each_number(name):
    code = source(name, CASES[name][0].get("text", ""))
    assert code.count("{") == code.count("}") == 1
    assert all(f"T {operand}_" in code for operand in FORMULAS[name].operands.split())
    assert {key for key, value in CASES[name][0].items() if isinstance(value, float)} == set(
        FORMULAS[name].numbers.split()
    )
    assert all(f"double {number}_" in code for number in FORMULAS[name].numbers.split())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_their_formulas(name, dtype):
    constants, formula = CASES[name]
    tensors = operands(name, dtype, "cuda")
    eps = torch.finfo(dtype).eps

    def check(tensors: list[Tensor]) -> None:
        found, expected = fused(name, *tensors, **constants), formula(*[x.double() for x in tensors])
        assert found is not None
        for one, other in zip(
            found if isinstance(found, tuple) else [found], expected if isinstance(expected, tuple) else [expected]
        ):
            assert one.dtype == dtype
            torch.testing.assert_close(one.double(), other, rtol=64 * eps, atol=16 * eps)

    check(tensors)
    check([x.transpose(0, 1) for x in tensors])  # other strides
    if len(tensors) > 1:
        wide = tensors[0].new_zeros(2, *tensors[0].shape)
        assert fused(name, tensors[0], *[wide for _ in tensors[1:]], **constants) is None  # nothing grows
        other = tensors[0].to(torch.float64 if dtype != torch.float64 else torch.float32)
        assert fused(name, other, *tensors[1:], **constants) is None


# ---------------------------------------------------------------- rules with kernels, without a GPU


def _python(text: str) -> str:
    """C++ `(condition ? one : other)` as Python's `where(condition, one, other)`; the rest is the same in both."""
    parts = [""]
    for letter in text:
        if letter == "(":
            parts.append("")
        elif letter == ")":
            inside = parts.pop()
            choice = "where" if "?" in inside else ""
            parts[-1] += f"{choice}({inside.replace(' ? ', ', ').replace(' : ', ', ')})"
        else:
            parts[-1] += letter
    return parts[0]


def _reference(name: str, text: str):
    """A formula as a kernel would compute it, from its C++."""
    formula = FORMULAS[name]
    words = {
        "A": lambda x: x * 1.0 if isinstance(x, Tensor) else x, "fabs": abs, "erf": torch.erf, "tanh": torch.tanh,
        "exp": torch.exp, "rsqrt": torch.rsqrt, "where": torch.where, "isfinite": torch.isfinite,
        "fmax": lambda a, b: a.clamp(min=b), "fmin": lambda a, b: a.clamp(max=b),
        "__float_as_uint": _bits, "__uint_as_float": _number,
    }  # fmt: skip

    def call(*tensors: Tensor, **numbers: float):
        names = words | dict(zip(formula.operands.split(), tensors)) | numbers
        for statement in formula.where.format(text).split(";"):
            target, _, value = statement.strip().removeprefix("A ").partition(" = ")
            if value:
                names[target] = eval(_python(value), {}, names)
        outputs = [f"({output.format(text)})" for output in formula.outputs]
        made = tuple(eval(_python(output), {}, names) for output in outputs)
        return made if len(made) > 1 else made[0]

    return call


@pytest.fixture
def kernels(monkeypatch):
    """The formulas in Python in place of their kernels; yields which of them were used."""
    used = set()

    def compiled(name, text):
        call = _reference(name, text)
        return lambda tensors, numbers: (used.add(name), call(*tensors, **numbers))[1]

    monkeypatch.setattr(module, "serves", lambda tensor: tensor.is_floating_point())
    monkeypatch.setattr("dynamiclrp.here.serves", lambda tensor: tensor.is_floating_point())
    monkeypatch.setattr(module, "_compile", compiled)
    launcher.cache_clear()
    yield used
    launcher.cache_clear()


@pytest.mark.parametrize("activation", [F.gelu, F.silu, F.relu6, F.hardtanh], ids=lambda f: f.__name__)
def test_where_dtypes_differ_the_formula_serves(activation, kernels):
    """As under autocast: relevance arrives in another type than the values have."""
    x = torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    y, s = activation(4 * x), torch.randn(40)
    rule, op, saved = dlrp.Identity(), OPS[type(y.grad_fn).__name__], Saved(y.grad_fn)
    torch.testing.assert_close(rule._pass(op, saved, s), s * (y / (4 * x)).detach())
    assert not kernels
    rule._pass(op, saved, s.double())
    assert kernels


@pytest.mark.parametrize("name", CASES)
def test_a_launcher_and_a_kernel_of_one_formula(name, kernels):
    constants = CASES[name][0]
    tensors = operands(name, torch.float64, "cpu")
    for _ in range(2):  # whichever was asked for first
        found = [launcher(name, **constants)(*tensors), fused(name, *tensors, **constants)]
        torch.testing.assert_close(*found, rtol=0, atol=0)
    other = {key: 2 * value if isinstance(value, float) else value for key, value in constants.items()}
    torch.testing.assert_close(launcher(name, **other)(*tensors), fused(name, *tensors, **other), rtol=0, atol=0)


class Net(nn.Module):
    """Every rule that has a kernel: folded and plain maps, sums, gates, norms, activations."""

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
        heads = x.flatten(2).unflatten(1, (2, 4)).transpose(2, 3).contiguous()  # fused attention wants it so
        x = self.layer(x.mean((2, 3)) + F.scaled_dot_product_attention(heads, heads, heads).mean(2).flatten(1))
        x = x * torch.sigmoid(x) + x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        x = x + F.silu(self.gate(x)) * self.linear(x)
        return self.head(F.gelu(x.tanh()) + F.gelu(F.softplus(x), approximate="tanh"))


class Residuals(nn.Module):
    """Sums of linear maps and what goes past them: the sum kept or not, either order, other factors, with a bias and without."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(6, 6, bias=bias) for _ in range(6))
        self.norms, self.wide = nn.ModuleList(nn.LayerNorm(6) for _ in range(2)), nn.Linear(6, 12, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        one, two, three, four, five, six = self.maps
        x = self.norms[0](x + one(x))
        x = self.norms[1](two(x) + x)
        x = x.tanh() + three(x)
        x = torch.add(x, four(x), alpha=0.5) - five(x)
        x = six(x) + one(x)  # either could be done with the sum
        heads = x.unflatten(-1, (2, 3))
        x = heads + self.wide(x).unflatten(-1, (4, 3))[:, :, :2]  # a slice is between
        x = x.flatten(-2)
        return x.unflatten(-1, (3, 2)).flatten(-2) + self.maps[5](x).unflatten(-1, (3, 2)).flatten(-2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("device", ["kernels", "plain"])
@pytest.mark.parametrize("target", [None, [0, 3]], ids=["one", "batched"])
def test_the_rule_of_a_map_is_done_with_the_sum_above(bias, device, target, request, monkeypatch):
    used = request.getfixturevalue("kernels") if device == "kernels" else None
    torch.manual_seed(0)
    model, x = Residuals(bias).double().eval(), torch.randn(2, 4, 6, dtype=torch.float64)

    def explained() -> list[Tensor]:
        if target is None:
            return [dlrp.explain(model, x, preset="dynamic").relevance]
        return [a.relevance for a in dlrp.explain(model, x, targets=target, preset="dynamic")]

    merged = explained()
    plan = dlrp.inspect(model, x, preset="dynamic").plan
    assert plan is not None
    assert sum(step.below is not None for step in plan.steps) == 7  # all but the one behind a slice
    monkeypatch.setattr(sys.modules["dynamiclrp.planning"], "merge", lambda graph, steps: steps)
    for one, other in zip(merged, explained()):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    if used is not None and target is None:
        name = "sum_shares_epsilon_bias" if bias else "sum_shares_epsilon"
        assert {name, name + "_of_rest"} <= used


@pytest.mark.parametrize(
    "preset", ["attnlrp", "default", "gamma", "epsilon-plus", "dynamic", "epsilon", "epsilon-alpha2-beta1"]
)
def test_rules_are_the_same_with_kernels(preset, kernels, monkeypatch):
    torch.manual_seed(0)
    model, x = Net().double().eval(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    explainer = dlrp.Explainer(model, preset)
    with_kernels = [explainer(x).relevance for _ in range(2)]
    monkeypatch.undo()
    plain = dlrp.explain(model, x, preset=preset).relevance
    for one in with_kernels:
        torch.testing.assert_close(one, plain, rtol=1e-9, atol=1e-12)
    expected = {
        "attnlrp": {"gelu", "gelu_tanh", "silu", "hardtanh", "identity_limit", "parts"},
        "gamma": {"gamma_bias", "gamma", "gamma_positive_folded", "gamma_positive_normed", "gamma_normed", "absolute", "absolute_folded", "add_signed", "both"},
        "default": {"gamma_bias", "absolute", "absolute_folded"},
        "epsilon-plus": {"zplus_folded", "zplus_normed", "zplus_bias", "absolute_folded", "both", "both_folded"},
        "dynamic": {
            "epsilon", "epsilon_absolute", "sum_shares", "sum_share_of_one", "sum_share_of_total", "product_shares",
            "affine_absolute", "affine_absolute_epsilon", "function_share", "identity", "layer_norm_quotient",
        },
    }  # fmt: skip
    assert expected.get(preset, set()) <= kernels

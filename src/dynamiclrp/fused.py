"""Rules' arithmetic in one kernel on CUDA devices, compiled when first used; elsewhere there is none.

One launch instead of three to ten, and no temporaries: launches are what an explanation costs beyond a gradient where
the GPU waits for Python, and passes over memory where it does not. Half types are computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Formula:
    """C++ expressions of the named operands and numbers, one for each output; `{}` is a piece of text.

    A kernel is compiled for each text; numbers are handed to it at each launch.
    """

    operands: str
    outputs: tuple[str, ...]
    where: str = ""  # statements that come first
    numbers: str = ""


_BOUNDED = "y = fmin(fmax(y, -limit), limit); "  # no relevance arrives at infinities, and 0 times infinity would be nan
FORMULAS = {
    # activations: s · f(x)/x
    "gelu": Formula("s x", ("s * A(0.5) * (A(1) + erf(x * A(0.70710678118654752440)))",)),
    "gelu_tanh": Formula(
        "s x", ("s * A(0.5) * (A(1) + tanh(A(0.79788456080286535588) * (x + A(0.044715) * x * x * x)))",)
    ),
    "silu": Formula("s x", ("s / (A(1) + exp(-x))",)),
    "hardtanh": Formula(
        "s x", ("(x > high ? s * (high / x) : (x < low ? s * (low / x) : (x == 0 ? s * slope : s)))",), numbers="low high slope"
    ),
    # where there is no closed form: s · y/x, stabilised, or with the limit g at 0
    "identity": Formula("s x y", ("s * y / (x < 0 ? x - eps : x + eps)",), numbers="eps"),
    "identity_limit": Formula("s x y g", ("(x == 0 ? g : s * y / x)",)),
    # what a layer norm made of x
    "layer_norm": Formula("x mean rstd weight bias", ("(x - mean) * rstd * weight + bias",)),
    # what the identity rule makes of one
    "layer_norm_quotient": Formula(
        "s x mean rstd weight bias",
        ("s * ((x - mean) * rstd * weight + bias) / (x < 0 ? x - eps : x + eps)",), numbers="eps",
    ),
    # |W|, times what a rule wants of it, and with a batch norm folded in
    "absolute": Formula("w", ("fabs(w) * times",), numbers="times"),
    "absolute_folded": Formula("w scale var", ("fabs(w * (scale * rsqrt(var + eps))) * times",), numbers="eps times"),
    # the same, and W + |W|; a batch norm's own backward multiplies by its scale
    "both": Formula("w", ("fabs(w) * times", "w + fabs(w) * times"), numbers="times"),
    "both_folded": Formula(
        "w scale var", ("more * fabs(scale) * rsqrt(var + eps)", "w + (scale < 0 ? -more : more)"),
        "A more = fabs(w) * times;", "eps times",
    ),
    # what queries, keys and values take of what arrives
    "parts": Formula("a b c", ("a * of_a", "b * of_b", "c * of_c"), numbers="of_a of_b of_c"),
    # g + sgn(x) · more
    "add_signed": Formula("g more x", ("g + (x < 0 ? -more : more)",)),
    # the epsilon rule of coefficients, which are 0 for z = 0 and whole for an infinite z (an additive mask); of relevance
    "epsilon": Formula("s z", ("s / (A(1) + eps / fabs(z))",), numbers="eps"),
    "epsilon_of_relevance": Formula("s z", ("s / (z < 0 ? z - eps : z + eps)",), numbers="eps"),
    # an epsilon rule whose bias takes |b| / (|z - b| + |b|) beforehand
    "epsilon_absolute": Formula(
        "s z b", ("s {} * fabs(y) / (fabs(y) + fabs(b) + eps) / (y < 0 ? y - eps : y + eps)",),
        "A y = z - b;", "eps",
    ),
    # sums y = a + b: s · y / (|a| + |b|), and what the summands take of it; both at once, also from y
    # and b; what one takes beside a literal
    "sum_share": Formula("s a b", ("s {} / (fabs(a) + fabs(b) + eps)",), "A y = a + b; " + _BOUNDED, "eps limit"),
    "sum_shares": Formula(
        "s a b", ("(a < 0 ? -u : u)", "(b < 0 ? -u : u)"),
        f"A y = a + b; {_BOUNDED}A u = s {{}} / (fabs(a) + fabs(b) + eps);", "eps limit",
    ),
    "sum_shares_of_rest": Formula(
        "s y b", ("(a < 0 ? -u : u)", "(b < 0 ? -u : u)"),
        f"A a = y - b; {_BOUNDED}A u = s {{}} / (fabs(a) + fabs(b) + eps);", "eps limit",
    ),
    "sum_share_of_one": Formula(
        "s y a", ("(a < 0 ? -u : u)",), _BOUNDED + "A u = s {} / (fabs(a) + eps);", "eps limit"
    ),
    "sum_share_of_total": Formula("s y total", ("s {} / (total + eps)",), _BOUNDED, "eps limit"),
    "times_sign": Formula("g a", ("(a < 0 ? -g : g)",)),
    # products: what each factor takes
    "product_shares": Formula(
        "s a b", ("s * b * fabs(a) / sum", "s * a * fabs(b) / sum"), "A sum = fabs(a) + fabs(b) + eps;", "eps"
    ),
    # functions with f(0) = c, which takes its absolute share
    "function_share": Formula(
        "s g x y", ("slope * y * (rest < 0 ? A(-1) : A(1)) / (fabs(rest) + fabs(c) + eps)",),
        "A rest = y - c; A near = close - fabs(x); A slope = (near > 0 ? g : s * rest / (x == 0 ? A(1) : x));",
        "c eps close",
    ),
    "function_share_of_relevance": Formula(
        "s y", ("s * fabs(rest) / (fabs(rest) + fabs(c) + eps)",), "A rest = y - c;", "c eps"
    ),
    # batch norms, y = scale·x + shift, the shift taking its absolute share
    "affine_absolute": Formula(
        "s x weight bias mean var",
        ("s {} * (x < 0 ? -fabs(scale) : fabs(scale)) / (fabs(scale * x) + fabs(shift) + stable)",),
        "A scale = weight * rsqrt(var + eps); A shift = bias - mean * scale; A y = scale * x + shift;", "eps stable",
    ),
}  # fmt: skip

# and below them the epsilon rule of the linear map that made x
_affine = FORMULAS["affine_absolute"]
FORMULAS["affine_absolute_epsilon"] = Formula(
    _affine.operands, (f"({_affine.outputs[0]}) / (A(1) + below / fabs(x))",), _affine.where, f"{_affine.numbers} below"
)

# Sums, and the epsilon rule of the linear map that made a.
for _name in ("sum_shares", "sum_shares_of_rest"):
    _sum = FORMULAS[_name]
    _a, _b = _sum.outputs
    FORMULAS |= {
        _name.replace("shares", "shares_epsilon"): Formula(
            _sum.operands, (f"{_a} / (A(1) + below / fabs(a))", _b), _sum.where, f"{_sum.numbers} below"
        ),
        _name.replace("shares", "shares_epsilon_bias"): Formula(
            f"{_sum.operands} bias",
            (f"{_a} * a / (fabs(own) + fabs(bias) + below) * fabs(own) / (own < 0 ? own - below : own + below)", _b),
            f"{_sum.where} A own = a - bias;",
            f"{_sum.numbers} below",
        ),
    }

# Linear maps, of what arrives (s, or s = R), the output z and the product q of magnitudes: what goes back through W (and |W|).
# To q comes the magnitude of a bias, and of a batch norm that is folded in; z may be what goes into that.
_NORM = "A factor = scale * rsqrt(var + eps);"
_NORM_BIAS = " + fabs(b - mean * factor) * times"
for _suffix, _operands, _numbers, _first, _bias in (
    ("", "", "", "", ""),
    ("_bias", " b", " times", "", " + fabs(b) * times"),
    ("_folded", " b mean scale var", " times eps", _NORM, _NORM_BIAS),
    ("_normed", " b mean scale var", " times eps", f"{_NORM} z = (z - mean) * factor + b;", _NORM_BIAS),
):
    FORMULAS |= {
        f"gamma{_suffix}": Formula(
            f"s z q{_operands}",
            ("r * sgn", "r"),
            f"{_first} A sgn = A(z > 0) - A(z < 0); A r = sgn * sgn * s {{}} / (fabs(z) + q + plus{_bias});",
            f"plus{_numbers}",
        ),
        f"gamma_positive{_suffix}": Formula(  # where nothing arrives unless z is positive
            f"s z q{_operands}", (f"s {{}} / (fabs(z) + q + plus{_bias})",), _first, f"plus{_numbers}"
        ),
        f"zplus{_suffix}": Formula(
            f"s z q{_operands}", (f"s {{}} / (fmax(z + q{_bias}, A(0)) + plus)",), _first, f"plus{_numbers}"
        ),
    }

_JITERATOR = torch.version.hip is None


def serves(tensor: Tensor) -> bool:
    """Are there kernels for such a tensor?"""
    return tensor.is_cuda and _JITERATOR and tensor.is_floating_point()


@lru_cache(maxsize=4096)
def _spreads(shape: torch.Size, wanted: torch.Size) -> bool:
    """Can it be broadcast to that shape? `torch.broadcast_shapes` takes longer than the kernel."""
    return len(shape) <= len(wanted) and all(a in (1, b) for a, b in zip(shape[::-1], wanted[::-1]))


def fused(name: str, *tensors: Tensor, text: str = "", **numbers: float) -> Any:
    """A formula of these tensors in one kernel. None, where there is none: not on CUDA, several dtypes, or others than the
    first one's shape and what can be broadcast to it."""
    first = tensors[0]
    if not serves(first):
        return None
    dtype, device, shape = first.dtype, first.get_device(), first.shape
    for tensor in tensors[1:]:
        if tensor.dtype != dtype or tensor.get_device() != device:
            return None
        if tensor.shape != shape and not _spreads(tensor.shape, shape):
            return None
    return launcher(name, text, **numbers)(*tensors)


@lru_cache(maxsize=4096)
def launcher(name: str, text: str = "", **numbers: float) -> Callable[..., Any]:
    """The kernel of a formula with its numbers, for tensors that are known to fit."""
    names = FORMULAS[name].numbers.split()
    assert numbers.keys() == set(names), name
    kernel, ordered = _compile(name, text), {number: numbers[number] for number in names}

    def launch(*tensors: Tensor) -> Any:
        return kernel(tensors, ordered)

    return launch


@cache
def source(name: str, text: str) -> str:
    """The C++ of a formula, as torch's jiterator takes it."""
    formula = FORMULAS[name]
    operands, numbers = formula.operands.split(), formula.numbers.split()
    outputs = [expression.format(text) for expression in formula.outputs]
    many = len(outputs) > 1
    taken = [f"T {operand}_" for operand in operands] + [f"double {number}_" for number in numbers]
    taken += [f"T& out{i}" for i in range(len(outputs))] if many else []
    return "\n".join(
        [
            f"template <typename T> {'void' if many else 'T'} {_called(name, text)}({', '.join(taken)}) {{",
            f"typedef decltype({operands[0]}_ + 0.0f) A;",  # float for half types
            *(f"A {value} = static_cast<A>({value}_);" for value in (*operands, *numbers)),
            formula.where.format(text),
            *([f"out{i} = T({output});" for i, output in enumerate(outputs)] if many else [f"return T({outputs[0]});"]),
            "}",
        ]
    )


def _compile(name: str, text: str) -> Kernel:
    """What launches a kernel of (tensors, numbers). torch's own wrapper does the same, with checks that take a tenth of a launch."""
    outputs = len(FORMULAS[name].outputs)
    launch = torch._C._cuda_jiterator_compile_and_launch_kernel
    return partial(launch, source(name, text), _called(name, text), outputs > 1, outputs)


def _called(name: str, text: str) -> str:
    return f"{name}_{crc32(text.encode())}"

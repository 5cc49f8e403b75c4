"""Rules' arithmetic in one kernel on CUDA devices, compiled when first used; elsewhere there is none.

One launch instead of three to ten, and no temporaries: launches are what an explanation costs beyond a gradient where
the GPU waits for Python, and passes over memory where it does not. Half types are computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Formula:
    """C++ expressions of the named operands and numbers, one for each output; `{…}` are pieces of text.

    A kernel is compiled for each text; numbers are handed to it at each launch.
    """

    operands: str
    outputs: tuple[str, ...]
    where: str = ""  # statements that come first
    numbers: str = ""


_CONSTANT = (
    "A known = A(isfinite(c)) * A(c != 0); A k = (known > 0 ? c : A(0)); A rest = y - k; "
    "A sum = fabs(rest) + fabs(k) + eps; A near = close - fabs(x); "
)
FORMULAS = {
    # activations: s · f(x)/x
    "gelu": Formula("s x", ("s * A(0.5) * (A(1) + erf(x * A(0.70710678118654752440)))",)),
    "gelu_tanh": Formula(
        "s x", ("s * A(0.5) * (A(1) + tanh(A(0.79788456080286535588) * (x + A(0.044715) * x * x * x)))",)
    ),
    "silu": Formula("s x", ("s / (A(1) + exp(-x))",)),
    # what a layer norm made of x
    "layer_norm": Formula("x mean rstd weight bias", ("(x - mean) * rstd * weight + bias",)),
    # |W|, times what a rule wants of it, and with a batch norm folded in
    "absolute": Formula("w", ("fabs(w) * times",), numbers="times"),
    "absolute_folded": Formula("w scale var", ("fabs(w * (scale * rsqrt(var + eps))) * times",), numbers="eps times"),
    # g + sgn(x) · more
    "add_signed": Formula("g more x", ("g + (x < 0 ? -more : more)",)),
    # an epsilon rule whose bias takes |b| / (|z - b| + |b|) beforehand
    "epsilon_absolute": Formula(
        "s z b", ("s {times_z} * fabs(y) / (fabs(y) + fabs(b) + eps) / (y < 0 ? y - eps : y + eps)",),
        "A y = z - b;", "eps",
    ),
    # sums: s · y / (|a| + |b|), and what the summands take of it
    "sum_share": Formula(
        "s y a b", ("s {times_y} / (fabs(a) + fabs(b) + eps)",), "y = fmin(fmax(y, -limit), limit);", "eps limit"
    ),
    "times_sign": Formula("g a", ("(a < 0 ? -g : g)",)),
    "times_signs": Formula("g a b", ("(a < 0 ? -g : g)", "(b < 0 ? -g : g)")),
    # products: what each factor takes
    "product_shares": Formula(
        "s a b", ("s * b * fabs(a) / sum", "s * a * fabs(b) / sum"), "A sum = fabs(a) + fabs(b) + eps;", "eps"
    ),
    # functions with f(0) = c: the constant takes its absolute share; where it is 0, infinite or unknown, the identity rule
    "function_share": Formula(
        "s g x y c",
        ("(known > 0 ? slope * y * (rest < 0 ? A(-1) : A(1)) / sum : s * y / (x + (x < 0 ? -eps : eps)))",),
        _CONSTANT + "A slope = (near > 0 ? g : s * rest / (x == 0 ? A(1) : x));",
        "eps close",
    ),
    "function_share_of_relevance": Formula(
        "s g x y c", ("(known > 0 ? s * fabs(rest) / sum : s)",), _CONSTANT, "eps close"
    ),
    # batch norms, y = scale·x + shift, the shift taking its absolute share
    "affine_absolute": Formula(
        "s x weight bias mean var",
        ("s {times_y} * (x < 0 ? -fabs(scale) : fabs(scale)) / (fabs(scale * x) + fabs(shift) + stable)",),
        "A scale = weight * rsqrt(var + eps); A shift = bias - mean * scale; A y = scale * x + shift;", "eps stable",
    ),
}  # fmt: skip

# Linear maps, of what arrives (s, or s = R), the output z and the product q of magnitudes: what goes back through W (and |W|).
# To q comes the magnitude of a bias, and of a batch norm that is folded in.
for _suffix, _operands, _numbers, _bias in (
    ("", "", "", ""),
    ("_bias", " b", " times", " + fabs(b) * times"),
    ("_folded", " b mean scale var", " times eps", " + fabs(b - mean * (scale * rsqrt(var + eps))) * times"),
):
    FORMULAS |= {
        f"gamma{_suffix}": Formula(
            f"s z q{_operands}",
            ("r * sgn", "r"),
            "A sgn = A(z > 0) - A(z < 0); " + f"A r = sgn * sgn * s {{times_z}} / (fabs(z) + q + plus{_bias});",
            f"plus{_numbers}",
        ),
        f"gamma_positive{_suffix}": Formula(
            f"s z q{_operands}", (f"s {{times_z}} / (z + q + plus{_bias})",), numbers=f"plus{_numbers}"
        ),
        f"zplus{_suffix}": Formula(
            f"s z q{_operands}", (f"s {{times_z}} / (fmax(z + q{_bias}, A(0)) + plus)",), numbers=f"plus{_numbers}"
        ),
    }

_compiled: dict[Any, Kernel] = {}


def serves(tensor: Tensor) -> bool:
    """Are there kernels for such a tensor?"""
    return tensor.device.type == "cuda" and tensor.is_floating_point() and not torch.version.hip


def fused(name: str, *tensors: Tensor, **constants: Any) -> Any:
    """A formula of these tensors in one kernel. None, where there is none: not on CUDA, several dtypes, or others than the
    first one's shape and what can be broadcast to it."""
    first = tensors[0]
    if not serves(first):
        return None
    for tensor in tensors[1:]:
        if tensor.dtype != first.dtype or tensor.device != first.device:
            return None
        if tensor.shape != first.shape and torch.broadcast_shapes(tensor.shape, first.shape) != first.shape:
            return None
    numbers = {key: constants.pop(key) for key in FORMULAS[name].numbers.split()}
    key = (name, *constants.items())
    if key not in _compiled:
        _compiled[key] = _compile(name, constants)
    return _compiled[key](*tensors, **numbers)


def source(name: str, texts: dict[str, str]) -> str:
    """The C++ of a formula, as torch's jiterator takes it."""
    formula = FORMULAS[name]
    operands, numbers = formula.operands.split(), formula.numbers.split()
    outputs = [expression.format(**texts) for expression in formula.outputs]
    many = len(outputs) > 1
    taken = [f"T {operand}_" for operand in operands] + [f"double {number}_" for number in numbers]
    taken += [f"T& out{i}" for i in range(len(outputs))] if many else []
    return "\n".join(
        [
            f"template <typename T> {'void' if many else 'T'} {name}_{crc32(repr(texts).encode())}({', '.join(taken)}) {{",
            f"typedef decltype({operands[0]}_ + 0.0f) A;",  # float for half types
            *(f"A {value} = static_cast<A>({value}_);" for value in (*operands, *numbers)),
            formula.where.format(**texts),
            *([f"out{i} = T({output});" for i, output in enumerate(outputs)] if many else [f"return T({outputs[0]});"]),
            "}",
        ]
    )


def _compile(name: str, texts: dict[str, str]) -> Kernel:
    formula = FORMULAS[name]
    code, numbers = source(name, texts), dict.fromkeys(formula.numbers.split(), 0.0)
    if len(formula.outputs) == 1:
        return torch.cuda.jiterator._create_jit_fn(code, **numbers)
    return torch.cuda.jiterator._create_multi_output_jit_fn(code, len(formula.outputs), **numbers)

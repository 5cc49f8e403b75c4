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
    """C++ expressions of the named operands, one for each output; `{…}` are constants."""

    operands: str
    outputs: tuple[str, ...]
    where: str = ""  # statements that come first


FORMULAS = {
    # activations: s · f(x)/x
    "gelu": Formula("s x", ("s * A(0.5) * (A(1) + erf(x * A(0.70710678118654752440)))",)),
    "gelu_tanh": Formula(
        "s x", ("s * A(0.5) * (A(1) + tanh(A(0.79788456080286535588) * (x + A(0.044715) * x * x * x)))",)
    ),
    "silu": Formula("s x", ("s / (A(1) + exp(-x))",)),
    # what a layer norm made of x
    "layer_norm": Formula("x mean rstd w b", ("(x - mean) * rstd * w + b",)),
    # linear maps, of what arrives (s, or s = R), the output z and the magnitude q: what goes back through W and |W|
    "gamma": Formula(
        "s z q", ("r * sgn", "r"), "A sgn = A(z > 0) - A(z < 0); A r = sgn * sgn * s {times_z} / (fabs(z) + q);"
    ),
    "gamma_positive": Formula("s z q", ("s {times_z} / (z + q)",)),
    "zplus": Formula("s z q", ("s {times_z} / (fmax(z + q, A(0)) + A({eps}))",)),
    # g + sgn(x) · more
    "add_signed": Formula("g more x", ("g + (x < 0 ? -more : more)",)),
    # an epsilon rule whose bias takes |b| / (|z - b| + |b|) beforehand
    "epsilon_absolute": Formula(
        "s z b", ("s {times_z} * fabs(y) / (fabs(y) + fabs(b) + A({eps})) / (y < 0 ? y - A({eps}) : y + A({eps}))",),
        "A y = z - b;",
    ),
    # sums: s · y / (|a| + |b|), and what a summand takes of it
    "sum_share": Formula(
        "s y a b", ("s {times_y} / (fabs(a) + fabs(b) + A({eps}))",), "y = fmin(fmax(y, -A({limit})), A({limit}));"
    ),
    "times_sign": Formula("g a", ("a < 0 ? -g : g",)),
    # products: a's part of its own gradient
    "product_share": Formula("g a b", ("g * fabs(a) / (fabs(a) + fabs(b) + A({eps}))",)),
    # batch norms, y = scale·x + shift, the shift taking its absolute share
    "affine_absolute": Formula(
        "s x scale shift",
        ("s {times_y} * (x < 0 ? -fabs(scale) : fabs(scale)) / (fabs(scale * x) + fabs(shift) + A({eps}))",),
        "A y = scale * x + shift;",
    ),
}  # fmt: skip

_compiled: dict[Any, Kernel] = {}


def kernel(name: str, *tensors: Tensor, **constants: Any) -> Kernel | None:
    """The kernel of a formula, where it serves these tensors: on CUDA, one dtype, the first one's shape or broadcast to it."""
    first = tensors[0]
    if first.device.type != "cuda" or not first.is_floating_point() or torch.version.hip:
        return None
    for tensor in tensors[1:]:
        if tensor.dtype != first.dtype or tensor.device != first.device:
            return None
        if tensor.shape != first.shape and torch.broadcast_shapes(tensor.shape, first.shape) != first.shape:
            return None
    key = (name, *constants.items())
    if key not in _compiled:
        _compiled[key] = _compile(name, constants)
    return _compiled[key]


def source(name: str, constants: dict[str, Any]) -> str:
    """The C++ of a formula, as torch's jiterator takes it."""
    formula = FORMULAS[name]
    operands = formula.operands.split()
    fill = {key: repr(value) if isinstance(value, float) else value for key, value in constants.items()}
    outputs = [expression.format(**fill) for expression in formula.outputs]
    many = len(outputs) > 1
    taken = [f"T {operand}_" for operand in operands] + ([f"T& out{i}" for i in range(len(outputs))] if many else [])
    return "\n".join(
        [
            f"template <typename T> {'void' if many else 'T'} {name}_{crc32(repr(fill).encode())}({', '.join(taken)}) {{",
            f"typedef decltype({operands[0]}_ + 0.0f) A;",  # float for half types
            *(f"A {operand} = static_cast<A>({operand}_);" for operand in operands),
            formula.where.format(**fill),
            *([f"out{i} = T({output});" for i, output in enumerate(outputs)] if many else [f"return T({outputs[0]});"]),
            "}",
        ]
    )


def _compile(name: str, constants: dict[str, Any]) -> Kernel:
    outputs = len(FORMULAS[name].outputs)
    code = source(name, constants)
    if outputs == 1:
        return torch.cuda.jiterator._create_jit_fn(code)
    return torch.cuda.jiterator._create_multi_output_jit_fn(code, outputs)

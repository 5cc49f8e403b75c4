"""A formula that is said once, in Python, as one kernel on a CUDA device.

In: a pure function of tensors, made of arithmetic and the words below. Out: the same function. On a CUDA device it is traced on symbols
and compiled when first used; elsewhere, and where its tensors do not fit together, it runs as it is.

What for: a rule's formula is three to twelve passes over memory, and as many launches; so it is one. Measured on an H200 before there was
one mechanism for it: without kernels `default` on a ResNet-50 of batch 16 took 24.5 ms, with them 18.7. Half types are computed in float32
and rounded once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, lru_cache, partial, wraps
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

_AVAILABLE = torch.version.hip is None


# Words of a formula, beside arithmetic and abs. ----------------------------------------------------------------------


def sgn(x: Any) -> Any:
    """The sign of x, +1 at 0; of a complex number its direction."""
    if isinstance(x, Symbol):
        return x.new("({0} < 0 ? A(-1) : A(1))", x)
    return x.sgn() if x.is_complex() else torch.copysign(torch.ones((), dtype=x.dtype), x)


def sign(x: Any) -> Any:
    """The sign of x, 0 at 0."""
    return x.new("A({0} > 0) - A({0} < 0)", x) if isinstance(x, Symbol) else x.sign()


def add(a: Any, b: Any, times: Any) -> Any:
    """a + times · b."""
    return a.new("{0} + {2} * {1}", a, b, times) if isinstance(a, Symbol) else torch.add(a, b, alpha=times)


def between(x: Any, low: Any, high: Any) -> Any:
    """x, or the limit that it is beyond; None: no limit."""
    if not isinstance(x, Symbol):
        return x.clamp(low, high)
    x = x if low is None else x.new("fmax({0}, {1})", x, low)
    return x if high is None else x.new("fmin({0}, {1})", x, high)


def stabilised(x: Any, eps: Any) -> Any:
    """x + eps · sgn(x), by which can be divided."""
    return add(x, sgn(x), eps)


# ----------------------------------------------------------------------------------------------------------------------


def formula(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function be one kernel where it can.

    It takes tensors by position, of which the first has the shape of all results and the others can be broadcast to it, or None for one
    that is absent; by keyword numbers, and bools or None that choose between forms of it.

    >>> @formula
    ... def epsilon(r, z, *, eps):
    ...     return r / stabilised(z, eps)
    >>> epsilon(torch.tensor([1.0]), torch.tensor([0.0]), eps=0.5)
    tensor([2.])
    """

    @wraps(function)
    def call(*tensors: Tensor | None, **words: float | bool | None) -> Any:
        if not fits(*tensors):
            return function(*tensors, **words)
        present = tuple([tensor is not None for tensor in tensors])
        chosen = tuple([item for item in words.items() if item[1] is None or isinstance(item[1], bool)])
        numbers = {name: value for name, value in words.items() if value is not None and not isinstance(value, bool)}
        return _launcher(function, present, chosen, tuple(numbers))(tuple(t for t in tensors if t is not None), numbers)

    return call


def serves(tensor: Tensor) -> bool:
    """Are there kernels for such a tensor?"""
    return (
        tensor.is_cuda
        and _AVAILABLE
        and tensor.is_floating_point()
        and not torch._C._functorch.is_batchedtensor(tensor)
    )


def fits(first: Tensor | None, *others: Tensor | None) -> bool:
    """Can one kernel take them: of one kind, and none larger than the first?"""
    if first is None or not serves(first):
        return False
    dtype, device, shape = first.dtype, first.get_device(), first.shape
    return all(
        tensor.dtype == dtype
        and tensor.get_device() == device
        and (tensor.shape == shape or _spreads(tensor.shape, shape))
        and not torch._C._functorch.is_batchedtensor(tensor)
        for tensor in others
        if tensor is not None
    )


@lru_cache(maxsize=4096)
def _spreads(shape: torch.Size, wanted: torch.Size) -> bool:
    """Can it be broadcast to that shape? `torch.broadcast_shapes` takes longer than the kernel."""
    return len(shape) <= len(wanted) and all(a in (1, b) for a, b in zip(shape[::-1], wanted[::-1]))


class Symbol:
    """A value in a kernel that is being written: each operation on it adds a line."""

    def __init__(self, name: str, lines: list[str]) -> None:
        self.name, self.lines = name, lines

    def new(self, text: str, *operands: Any) -> Symbol:
        """What an operation makes."""
        names = [operand.name if isinstance(operand, Symbol) else f"A({float(operand)!r})" for operand in operands]
        made = Symbol(f"v{len(self.lines)}", self.lines)
        self.lines.append(f"A {made.name} = {text.format(*names)};")
        return made

    def __add__(self, other: Any) -> Symbol:
        return self.new("{0} + {1}", self, other)

    def __sub__(self, other: Any) -> Symbol:
        return self.new("{0} - {1}", self, other)

    def __mul__(self, other: Any) -> Symbol:
        return self.new("{0} * {1}", self, other)

    def __truediv__(self, other: Any) -> Symbol:
        return self.new("{0} / {1}", self, other)

    def __radd__(self, other: Any) -> Symbol:
        return self.new("{1} + {0}", self, other)

    def __rmul__(self, other: Any) -> Symbol:
        return self.new("{1} * {0}", self, other)

    def __rtruediv__(self, other: Any) -> Symbol:
        return self.new("{1} / {0}", self, other)

    def __neg__(self) -> Symbol:
        return self.new("-{0}", self)

    def __abs__(self) -> Symbol:
        return self.new("fabs({0})", self)


@cache
def source(
    function: Callable[..., Any],
    present: tuple[bool, ...],
    chosen: tuple[tuple[str, Any], ...],
    numbers: tuple[str, ...],
) -> tuple[str, str, int]:
    """The C++ of a formula as torch's jiterator takes it, its name there, and how many results it has."""
    names = list(inspect.signature(function).parameters)[: len(present)]
    lines: list[str] = []
    operands = [Symbol(name, lines) if there else None for name, there in zip(names, present)]
    made = function(*operands, **{number: Symbol(number, lines) for number in numbers}, **dict(chosen))
    results = made if isinstance(made, tuple) else (made,)
    known = [operand.name for operand in operands if operand is not None]
    taken = [f"T {name}_" for name in known] + [f"double {number}_" for number in numbers]
    taken += [f"T& out{i}" for i in range(len(results))] if len(results) > 1 else []
    body = [
        f"typedef decltype({known[0]}_ + 0.0f) A;",  # float for half types
        *(f"A {value} = static_cast<A>({value}_);" for value in (*known, *numbers)),
        *lines,
        *(f"out{i} = T({result.name});" for i, result in enumerate(results) if len(results) > 1),
        *(f"return T({result.name});" for result in results if len(results) == 1),
    ]
    name = f"{function.__name__.strip('_')}_{crc32(' '.join([*taken, *body]).encode())}"
    head = f"template <typename T> {'void' if len(results) > 1 else 'T'} {name}({', '.join(taken)}) {{"
    return "\n".join([head, *body, "}"]), name, len(results)


@lru_cache(maxsize=1024)
def _launcher(*what: Any) -> Callable[[tuple[Tensor, ...], dict[str, float]], Any]:
    """What launches a kernel. torch's own wrapper does the same, with checks that take a tenth of a launch."""
    code, name, results = source(*what)
    return partial(torch._C._cuda_jiterator_compile_and_launch_kernel, code, name, results > 1, results)

"""The DynamicLRP paper's rules on a tape, in relevance form.

In: tensors wrapped by `leaf`, combined by the operations below. Out: `propagate` gives the relevance of every value.

    x, b = leaf(torch.randn(2, 3)), leaf(torch.randn(3))
    y = add(x, b)
    r = propagate(y, seed=y.data)
    r[x], r[b]

An operation computes its result and says, as `rule`, how the relevance of the result is divided among its operands.
Weight matrices and kernels are plain tensors: they get no relevance. Biases and position embeddings are leaves: they
take their share and keep it. Every rule but softmax and attention hands on exactly what it gets (up to epsilon).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

EPSILON = 1e-11


class Value:
    """A tensor of the forward pass, the values it was computed from, and its rule: R of this -> R of each of those."""

    def __init__(self, data: Tensor, operands: tuple["Value", ...] = (), rule: Callable | None = None):
        self.data, self.operands, self.rule = data.detach(), operands, rule

    @property
    def shape(self) -> torch.Size:
        return self.data.shape


def leaf(data: Tensor) -> Value:
    return Value(data)


def propagate(output: Value, seed: Tensor) -> dict[Value, Tensor]:
    """Relevance of every value that `output` was computed from. A value used twice sums what it gets."""
    order: list[Value] = []

    def visit(value: Value) -> None:
        if value not in order:
            for operand in value.operands:
                visit(operand)
            order.append(value)

    visit(output)
    relevance = {value: torch.zeros_like(value.data) for value in order}
    relevance[output] = seed
    for value in reversed(order):
        if value.operands:
            for operand, r in zip(value.operands, value.rule(relevance[value]), strict=True):
                relevance[operand] = relevance[operand] + r
    return relevance


# ---------------------------------------------------------------- linear maps


def stabilise(z: Tensor) -> Tensor:
    """z moved away from 0 by epsilon; 0 counts as positive."""
    return z + EPSILON * torch.where(z < 0, -1.0, 1.0)


def linear(x: Value, weight: Tensor, bias: Tensor | None = None) -> Value:
    """x W^T + b: R_i = x_i sum_j W_ji R_j / z_j, where z is without the bias, which is an add of its own."""
    weight = weight.detach()
    z = x.data @ weight.T
    product = Value(z, (x,), lambda r: [x.data * ((r / stabilise(z)) @ weight)])
    return product if bias is None else add(product, leaf(bias))


def conv(x: Value, weight: Tensor, bias: Tensor | None = None, **options) -> Value:
    """A convolution as the matrix that it is: one column per input pixel, found by convolving unit images."""
    features = x.data[0].numel()
    units = torch.eye(features, dtype=x.data.dtype).reshape(features, *x.shape[1:])
    columns = functional.conv2d(units, weight.detach(), **options)
    flat = move(lambda t: t.flatten(1), x)
    product = move(lambda t: t.unflatten(1, columns.shape[1:]), linear(flat, columns.flatten(1).T))
    return product if bias is None else add(product, leaf(bias[:, None, None]))


# ---------------------------------------------------------------- sums: shares by absolute value


def absolute_shares(r: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    """R |a| / (|a| + |b|) and R |b| / (|a| + |b|); an operand that was broadcast sums over its copies."""
    total = a.abs() + b.abs() + EPSILON
    return [(r * a.abs() / total).sum_to_size(a.shape), (r * b.abs() / total).sum_to_size(b.shape)]


def add(a: Value, b: Value, alpha: float = 1.0) -> Value:
    """a + alpha b."""
    return Value(a.data + alpha * b.data, (a, b), lambda r: absolute_shares(r, a.data, alpha * b.data))


def sub(a: Value, b: Value, alpha: float = 1.0) -> Value:
    return add(a, b, -alpha)


def add_constant(x: Value, constant: float | Tensor) -> Value:
    """A literal constant, a mask, a buffer: takes nothing."""
    return Value(x.data + constant, (x,), lambda r: [r])


def sum_over(x: Value, dims: tuple[int, ...], keepdim: bool = False) -> Value:
    """R_i = R |x_i| / sum |x|."""
    shape = x.data.sum(dims, keepdim=True).shape
    shares = x.data.abs() / (x.data.abs().sum(dims, keepdim=True) + EPSILON)
    return Value(x.data.sum(dims, keepdim=keepdim), (x,), lambda r: [r.reshape(shape) * shares])


def mean_over(x: Value, dims: tuple[int, ...], keepdim: bool = False) -> Value:
    """A sum times a constant."""
    summed = sum_over(x, dims, keepdim)
    return scale(summed, summed.data.numel() / x.data.numel())


# ---------------------------------------------------------------- products


def mul(a: Value, b: Value) -> Value:
    return Value(a.data * b.data, (a, b), lambda r: absolute_shares(r, a.data, b.data))


def div(a: Value, b: Value) -> Value:
    """a / b is the product of a and 1/b, which share by absolute value."""
    return Value(a.data / b.data, (a, b), lambda r: absolute_shares(r, a.data, 1 / b.data))


def scale(x: Value, factor: float | Tensor) -> Value:
    """A product with a constant or a parameter: linear in x, which takes all."""
    return Value(x.data * factor, (x,), lambda r: [r])


def matmul(a: Value, b: Value) -> Value:
    """Two activations: each gets half of what LRP-0 would give it alone."""
    z = a.data @ b.data

    def rule(r: Tensor) -> list[Tensor]:
        unit = r / stabilise(z)
        return [a.data * (unit @ b.data.mT) / 2, b.data * (a.data.mT @ unit) / 2]

    return Value(z, (a, b), rule)


# ---------------------------------------------------------------- identities


def identity(function: Callable[[Tensor], Tensor], x: Value) -> Value:
    """Activations, LayerNorm: R_x = R_y, element by element."""
    y = function(x.data).detach()
    assert y.shape == x.shape
    return Value(y, (x,), lambda r: [r])


def batch_norm(norm: torch.nn.Module, x: Value) -> Value:
    """Not the paper's identity: scale x + shift, in which the shift takes its share by magnitude and keeps it."""
    sigma = torch.sqrt(norm.running_var + norm.eps)
    weight = torch.ones_like(sigma) if norm.weight is None else norm.weight.detach()
    bias = torch.zeros_like(sigma) if norm.bias is None else norm.bias.detach()
    shape = (-1, *[1] * (x.data.dim() - 2))
    shift = bias - norm.running_mean * weight / sigma
    return add(scale(x, (weight / sigma).reshape(shape)), leaf(shift.reshape(shape)))


def function(f: Callable[[Tensor], Tensor], x: Value) -> Value:
    """Not the paper's identity: f(0) + (f(x) - f(0)), in which the constant takes its share by magnitude and keeps it."""
    constant = f(torch.zeros_like(x.data))
    return add(identity(lambda t: f(t) - constant, x), leaf(constant))


# ---------------------------------------------------------------- attention


def softmax(x: Value) -> Value:
    """AttnLRP's Taylor rule: R_i = x_i (R_i - p_i sum_j R_j)."""
    p = torch.softmax(x.data, dim=-1)
    return Value(p, (x,), lambda r: [x.data * (r - p * r.sum(-1, keepdim=True))])


def attention(q: Value, k: Value, v: Value, causal: bool = False) -> Value:
    """Fused attention: query and key get nothing, the value half of what LRP-0 gives it; the other half is kept."""
    scores = q.data @ k.data.mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), -math.inf)
    weights = torch.softmax(scores, dim=-1)
    output = weights @ v.data

    def rule(r: Tensor) -> list[Tensor]:
        return [
            torch.zeros_like(q.data),
            torch.zeros_like(k.data),
            v.data * (weights.mT @ (r / stabilise(output))) / 2,
        ]

    return Value(output, (q, k, v), rule)


# ---------------------------------------------------------------- pools and movement


def move(function: Callable[[Tensor], Tensor], x: Value) -> Value:
    """Views, transposes, slices, gathers, expands: relevance goes where the element came from, copies sum."""
    origin = function(torch.arange(x.data.numel()).reshape(x.shape))

    def rule(r: Tensor) -> list[Tensor]:
        return [torch.zeros_like(x.data).flatten().index_add(0, origin.flatten(), r.flatten()).reshape(x.shape)]

    return Value(x.data.flatten()[origin], (x,), rule)


def concatenate(values: list[Value], dim: int) -> Value:
    sizes = [value.shape[dim] for value in values]
    return Value(torch.cat([value.data for value in values], dim), tuple(values), lambda r: r.split(sizes, dim))


def max_pool(x: Value, size: int, stride: int | None = None) -> Value:
    """The largest pixel of each window takes all."""
    _, winner = functional.max_pool2d(x.data, size, stride, return_indices=True)  # indices within each plane
    planes = torch.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], 1, 1) * (x.shape[2] * x.shape[3])
    return move(lambda index: index.flatten()[planes + winner], x)


def adaptive_avg_pool(x: Value, size: int) -> Value:
    """The pixels of a window share equally, whatever their values."""

    def window(i: int, length: int) -> slice:
        return slice(math.floor(i * length / size), math.ceil((i + 1) * length / size))

    height, width = x.shape[2:]
    windows = [(i, j, window(i, height), window(j, width)) for i in range(size) for j in range(size)]
    y = torch.zeros(*x.shape[:2], size, size, dtype=x.data.dtype)
    for i, j, rows, columns in windows:
        y[:, :, i, j] = x.data[:, :, rows, columns].mean((2, 3))

    def rule(r: Tensor) -> list[Tensor]:
        spread = torch.zeros_like(x.data)
        for i, j, rows, columns in windows:
            pixels = (rows.stop - rows.start) * (columns.stop - columns.start)
            spread[:, :, rows, columns] += r[:, :, i, j, None, None] / pixels
        return [spread]

    return Value(y, (x,), rule)

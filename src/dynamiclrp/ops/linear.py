"""Matrix products and convolutions, each with the product and its two transposed products."""

from typing import Any

import torch
from torch import Tensor

from .table import Kind, LinearMap, row


def _matmul_transposed(n: Any, which: int, u: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return u @ b.mT if which == 0 else a.mT @ u


def _scale_columns(n: Any, w: Tensor, scale: Tensor) -> Tensor:
    return w * scale


def _matmul(n: Any, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return a @ b if bias is None else a @ b + bias


def _addmm(n: Any, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    product = a @ b if n.alpha == 1 else n.alpha * (a @ b)
    return product if bias is None else product + bias


_MM = LinearMap((0, 1), _matmul, _matmul_transposed, fold=_scale_columns)
_ADDMM = LinearMap(
    (1, 2),
    _addmm,
    lambda n, which, u, a, b: _matmul_transposed(n, which, u if n.alpha == 1 else n.alpha * u, a, b),
    bias=0,
    factor=lambda n: n.beta,
    fold=_scale_columns,
)

_TWO = {0: ("self", 1), 1: ("mat2", 0)}
row("MmBackward0", Kind.LINEAR, saved=_TWO, forward=lambda n, a, b: torch.mm(a, b), linear=_MM)
row("BmmBackward0", Kind.LINEAR, saved=_TWO, forward=lambda n, a, b: torch.bmm(a, b), linear=_MM)
row("AddmmBackward0", Kind.LINEAR, saved={1: ("mat1", 2), 2: ("mat2", 1)}, linear=_ADDMM,
    forward=lambda n, c, a, b: torch.addmm(c, a, b, beta=n.beta, alpha=n.alpha))  # fmt: skip
row("BaddbmmBackward0", Kind.LINEAR, saved={1: ("batch1", 2), 2: ("batch2", 1)}, linear=_ADDMM,
    forward=lambda n, c, a, b: torch.baddbmm(c, a, b, beta=n.beta, alpha=n.alpha))  # fmt: skip
row("MvBackward0", Kind.LINEAR, saved={0: ("self", 1), 1: ("vec", 0)}, forward=lambda n, a, b: torch.mv(a, b),
    linear=LinearMap((0, 1), _matmul,
                     lambda n, which, u, a, b: u[:, None] * b if which == 0 else a.t() @ u))  # fmt: skip
row("DotBackward0", Kind.LINEAR, saved={0: ("self", 1), 1: ("tensor", 0)}, forward=lambda n, a, b: torch.dot(a, b),
    linear=LinearMap((0, 1), _matmul, lambda n, which, u, a, b: u * (b if which == 0 else a)))  # fmt: skip


def _convolve(n: Any, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.aten.convolution(
        x, w, bias, n.stride, n.padding, n.dilation, n.transposed, n.output_padding, n.groups
    )


def _convolve_transposed(n: Any, which: int, u: Tensor, x: Tensor, w: Tensor) -> Tensor:
    mask = [which == 0, which == 1, False]
    grads = torch.ops.aten.convolution_backward(
        u, x, w, None, n.stride, n.padding, n.dilation, n.transposed, n.output_padding, n.groups, mask
    )
    return grads[which]


def _scale_filters(n: Any, w: Tensor, scale: Tensor) -> Tensor:
    return w * scale.reshape(-1, *[1] * (w.dim() - 1))


row("ConvolutionBackward0 ConvolutionOverrideableBackward0", Kind.CONV,
    saved={0: ("input", None), 1: ("weight", None)},
    forward=_convolve,
    linear=LinearMap((0, 1), _convolve, _convolve_transposed, bias=2, fold=_scale_filters,
                     spread=lambda n, b: b.reshape(-1, *[1] * (len(n.shape) - 2))),
    signature=lambda n: (bool(n.bias_sym_sizes_opt) and n.bias_sym_sizes_opt != (0,), n.transposed),
    absent=lambda signature: () if signature[0] else (2,))  # fmt: skip

"""Matrix products and convolutions, each with the product and its two transposed products."""

from typing import Any

import torch
from torch import Tensor

from .table import Kind, LinearMap, row


def _times(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b) if a.dim() == b.dim() == 2 else a @ b  # which takes a while to find that out


def _matmul_transposed(n: Any, which: int, u: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return _times(u, b.mT) if which == 0 else _times(a.mT, u)


def _columns(n: Any) -> tuple[int, ...]:
    return (-1,)


def _matmul(n: Any, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None:
        return _times(a, b)
    return torch.addmm(bias, a, b) if a.dim() == b.dim() == 2 and bias.dim() == 1 else a @ b + bias


_MM = LinearMap((0, 1), _matmul, _matmul_transposed, channels=_columns, columns=True)
_ADDMM = LinearMap(
    (1, 2),
    _matmul,
    _matmul_transposed,
    bias=0,
    factor=lambda n: n.beta,
    gain=lambda n: n.alpha,
    channels=_columns,
    columns=True,
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


def _addmv_transposed(n: Any, which: int, u: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return u[:, None] * b if which == 0 else a.t() @ u


def _outer(n: Any, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    product = torch.outer(a, b)
    return product if bias is None else product + bias


def _addbmm(n: Any, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    product = torch.bmm(a, b).sum(0)
    return product if bias is None else product + bias


row("VdotBackward0", Kind.LINEAR, saved={0: ("self", 1), 1: ("other", 0)}, forward=lambda n, a, b: torch.vdot(a, b),
    linear=LinearMap((0, 1), lambda n, a, b, bias=None: torch.vdot(a, b),
                     lambda n, which, u, a, b: u * (b if which == 0 else a)))  # fmt: skip
row("AddmvBackward0", Kind.LINEAR, saved={1: ("mat", 2), 2: ("vec", 1)},
    forward=lambda n, c, a, b: torch.addmv(c, a, b, beta=n.beta, alpha=n.alpha),
    linear=LinearMap((1, 2), _matmul, _addmv_transposed, bias=0, factor=lambda n: n.beta, gain=lambda n: n.alpha))  # fmt: skip
row("AddrBackward0", Kind.LINEAR, saved={1: ("vec1", 2), 2: ("vec2", 1)},
    forward=lambda n, c, a, b: torch.addr(c, a, b, beta=n.beta, alpha=n.alpha),
    linear=LinearMap((1, 2), _outer,
                     lambda n, which, u, a, b: u @ b if which == 0 else u.t() @ a,
                     bias=0, factor=lambda n: n.beta, gain=lambda n: n.alpha))  # fmt: skip
row("AddbmmBackward0", Kind.LINEAR, saved={1: ("batch1", 2), 2: ("batch2", 1)},
    forward=lambda n, c, a, b: torch.addbmm(c, a, b, beta=n.beta, alpha=n.alpha),
    linear=LinearMap((1, 2), _addbmm, _matmul_transposed,
                     bias=0, factor=lambda n: n.beta, gain=lambda n: n.alpha))  # fmt: skip

# What other backends make of a linear layer: its weight is (out, in).
_LINEAR = LinearMap(
    (0, 1),
    lambda n, x, w, bias=None: torch.nn.functional.linear(x, w, bias),
    lambda n, which, u, x, w: u @ w if which == 0 else u.flatten(0, -2).t() @ x.flatten(0, -2),
    bias=2,
    channels=lambda n: (-1, 1),
)
row("LinearBackward0", Kind.LINEAR, saved={0: ("input", None), 1: ("weight", None)}, linear=_LINEAR,
    forward=lambda n, x, w, b=None: torch.nn.functional.linear(x, w, b))  # fmt: skip
row("MkldnnLinearBackward0", Kind.LINEAR, saved={0: ("self", None), 1: ("weight", None)}, linear=_LINEAR)
row("MatmulBackward0", Kind.LINEAR, saved={0: ("self", None), 1: ("other", None)}, linear=_MM, forward=_matmul)


def _grouped_mm(n: Any, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch._grouped_mm(a, b, n.offs)


def _grouped_mm_transposed(n: Any, which: int, u: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return _grouped_mm(n, u, b.mT) if which == 0 else _grouped_mm(n, a.mT, u)


row("GroupedMmBackward0", Kind.LINEAR, saved=_TWO, forward=_grouped_mm,
    linear=LinearMap((0, 1), _grouped_mm, _grouped_mm_transposed))  # fmt: skip

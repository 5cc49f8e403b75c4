"""Elementwise products and quotients. With one live operand they scale; with two they are bilinear."""

import torch

from .table import Kind, row

P = Kind.PRODUCT

row("MulBackward0", P, saved={0: ("self", 1), 1: ("other", 0)}, forward=lambda n, a, b: torch.mul(a, b))
row("MulBackward1", P)
row("DivBackward0", P, saved={0: ("self", 1), 1: ("other", None)}, forward=lambda n, a, b: torch.div(a, b))
row("DivBackward1", P)
row("NegBackward0", Kind.SCALE, forward=lambda n, x: x.neg())
row("AddcmulBackward0", P, saved={1: ("tensor1", 2), 2: ("tensor2", 1)},
    forward=lambda n, a, b, c: torch.addcmul(a, b, c, value=n.value))  # fmt: skip

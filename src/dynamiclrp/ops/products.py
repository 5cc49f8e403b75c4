"""Products and quotients. With one live operand they scale; with two they are bilinear."""

import torch

from .table import Kind, row

P = Kind.PRODUCT

row("MulBackward0", P, saved={0: ("self", 1), 1: ("other", 0)}, forward=lambda n, a, b: torch.mul(a, b))
row("MulBackward1", P)
row("DivBackward0", P, saved={0: ("self", 1), 1: ("other", None)}, forward=lambda n, a, b: torch.div(a, b))
row("DivBackward1", P)
row("NegBackward0", Kind.SCALE, forward=lambda n, x: x.neg())
row("AddcmulBackward0", P, saved={1: ("tensor1", 2), 2: ("tensor2", 1)}, factors=(1, 2),
    forward=lambda n, a, b, c: torch.addcmul(a, b, c, value=n.value))  # fmt: skip
row("AddcdivBackward0", P, saved={1: ("tensor1", 2), 2: ("tensor2", None)}, factors=(1, 2),
    forward=lambda n, a, b, c: torch.addcdiv(a, b, c, value=n.value))  # fmt: skip
row("NativeDropoutBackward0 FusedDropoutBackward0", Kind.SCALE, forward=lambda n, x: x * n.result1 / (1 - n.p))

# Products that mix elements.
row("LinalgCrossBackward0", P, saved={0: ("self", 1), 1: ("other", 0)}, elementwise=False,
    forward=lambda n, a, b: torch.linalg.cross(a, b, dim=n.dim))  # fmt: skip
row("GluBackward0", P, saved={0: ("self", None)}, factors=(0, 0), elementwise=False,
    forward=lambda n, x: torch.nn.functional.glu(x, n.dim))  # fmt: skip
row("TrilinearBackward0", P, saved={0: ("i1", None), 1: ("i2", None), 2: ("i3", None)}, factors=(0, 1, 2),
    elementwise=False,
    forward=lambda n, a, b, c: torch.ops.aten._trilinear(a, b, c, n.expand1, n.expand2, n.expand3, n.sumdim))  # fmt: skip

"""Softmax, and nonlinear functions of several values: norms, variances, distances, functions of two variables."""

from typing import Any

import torch
from torch import Tensor

from .activations import KEEPS_INPUT
from .table import Kind, row

row("SoftmaxBackward0", Kind.SOFTMAX, result="result", forward=lambda n, x: x.softmax(n.dim))
row("SafeSoftmaxBackward0", Kind.SOFTMAX, result="result",
    forward=lambda n, x: torch.ops.aten._safe_softmax(x, n.dim))  # fmt: skip
row("LogSoftmaxBackward0", Kind.SOFTMAX, result="result", forward=lambda n, x: x.log_softmax(n.dim))
row("MaskedSoftmaxBackward0", Kind.SOFTMAX, result="result")

S = Kind.STATISTIC


def _norm(n: Any, x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, n.ord, n.dim, n.keepdim)


row("VarBackward0", S, saved=KEEPS_INPUT,
    forward=lambda n, x: torch.var(x, n.dim, correction=n.correction, keepdim=n.keepdim))  # fmt: skip
row("StdBackward0", S, saved=KEEPS_INPUT, result="result",
    forward=lambda n, x: torch.std(x, n.dim, correction=n.correction, keepdim=n.keepdim))  # fmt: skip
row("VarMeanBackward0", S, saved=KEEPS_INPUT,
    forward=lambda n, x: torch.var_mean(x, n.dim, correction=n.correction, keepdim=n.keepdim))  # fmt: skip
row("StdMeanBackward0", S, saved=KEEPS_INPUT,
    forward=lambda n, x: torch.std_mean(x, n.dim, correction=n.correction, keepdim=n.keepdim))  # fmt: skip
row("LinalgVectorNormBackward0", S, saved=KEEPS_INPUT, result="result", forward=_norm)
row("NormBackward0 NormBackward1 NormBackward2 NormBackward3", S, saved=KEEPS_INPUT, result="result")
row("LogsumexpBackward0 LogcumsumexpBackward0 ProdBackward0 ProdBackward1 CumprodBackward0", S,
    saved=KEEPS_INPUT, result="result")  # fmt: skip
row("RenormBackward0", S, saved=KEEPS_INPUT)

# Distances.
row("CdistBackward0 EuclideanDistBackward0", S, saved={0: ("x1", None), 1: ("x2", None)}, result="result")
row("DistBackward0", S, saved={0: ("self", None), 1: ("other", None)}, result="result")
row("PdistBackward0", S, saved=KEEPS_INPUT, result="result")

# Functions of two variables.
row("Atan2Backward0 LogaddexpBackward0 Logaddexp2Backward0 XlogyBackward0 SpecialXlog1PyBackward0", S)
row("HypotBackward0 LdexpBackward0 CopysignBackward0 PowBackward1", S, result="result")
row("DivBackward2 FmodBackward1 RemainderBackward1 NextafterBackward0 IgammaBackward0 IgammacBackward0", S)
row("AngleBackward0 SgnBackward0", S, saved=KEEPS_INPUT)  # of real and imaginary part
row("PolarBackward0", S, result="result")

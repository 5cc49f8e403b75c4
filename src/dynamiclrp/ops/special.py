"""Elementwise functions of mathematics, by their value at 0."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .activations import KEEPS_INPUT
from .table import Kind, row

A, N = Kind.ACTIVATION, Kind.FUNCTION
KEEPS_OTHER = {0: ("other", None)}


def _plain(function: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A forward without parameters."""
    return lambda n, x: function(x)


# f(0) = 0
row("AsinBackward0", A, saved=KEEPS_INPUT, forward=_plain(torch.asin))
row("AsinhBackward0", A, saved=KEEPS_INPUT, forward=_plain(torch.asinh))
row("AtanBackward0", A, saved=KEEPS_INPUT, forward=_plain(torch.atan))
row("AtanhBackward0", A, saved=KEEPS_INPUT, forward=_plain(torch.atanh))
row("SinhBackward0", A, saved=KEEPS_INPUT, forward=_plain(torch.sinh))
row("TanBackward0", A, result="result", forward=_plain(torch.tan))
row("ErfinvBackward0", A, saved=KEEPS_INPUT, forward=_plain(torch.erfinv))
row("SpecialI1Backward0", A, saved=KEEPS_INPUT, result="result", forward=_plain(torch.special.i1))
row("SpecialI1EBackward0", A, saved=KEEPS_INPUT, result="result", forward=_plain(torch.special.i1e))
row("CopysignBackward1", A, saved=KEEPS_INPUT, result="result")
row("FracBackward0", A, forward=_plain(torch.frac))
row("FmodBackward0 RemainderBackward0", A)

# f(0) is something else, or f'(0) infinite
row("AcosBackward0", N, saved=KEEPS_INPUT, forward=_plain(torch.acos))
row("AcoshBackward0", N, saved=KEEPS_INPUT, forward=_plain(torch.acosh))
row("CoshBackward0", N, saved=KEEPS_INPUT, forward=_plain(torch.cosh))
row("DigammaBackward0", N, saved=KEEPS_INPUT, forward=_plain(torch.digamma))
row("ErfcBackward0", N, saved=KEEPS_INPUT, forward=_plain(torch.erfc))
row("Exp2Backward0", N, result="result", forward=_plain(torch.exp2))
row("I0Backward0", N, saved=KEEPS_INPUT, forward=_plain(torch.i0))
row("LgammaBackward0", N, saved=KEEPS_INPUT, forward=_plain(torch.lgamma))
row("Log10Backward0", N, saved=KEEPS_INPUT, forward=_plain(torch.log10))
row("Log2Backward0", N, saved=KEEPS_INPUT, forward=_plain(torch.log2))
row("LogitBackward0", N, saved=KEEPS_INPUT, forward=lambda n, x: torch.logit(x, n.eps))
row("MvlgammaBackward0", N, saved=KEEPS_INPUT, forward=lambda n, x: torch.mvlgamma(x, n.p))
row("PolygammaBackward0 PolygammaBackward1", N, saved=KEEPS_INPUT, forward=lambda n, x: torch.polygamma(n.n, x))
row("SincBackward0", N, saved=KEEPS_INPUT, forward=_plain(torch.sinc))
row("SpecialEntrBackward0", N, saved=KEEPS_INPUT, forward=_plain(torch.special.entr))
row("SpecialErfcxBackward0", N, saved=KEEPS_INPUT, result="result", forward=_plain(torch.special.erfcx))
row("SpecialI0EBackward0", N, saved=KEEPS_INPUT, result="result", forward=_plain(torch.special.i0e))
row("SpecialLogNdtrBackward0", N, saved=KEEPS_INPUT, result="result", forward=_plain(torch.special.log_ndtr))
row("SpecialNdtriBackward0", N, result="result", forward=_plain(torch.special.ndtri))
row("StandardGammaBackward0", N, saved=KEEPS_INPUT, result="result")
row("PowBackward2", N, saved={0: ("exponent", None)}, result="result")
row("XlogyBackward1", N, saved=KEEPS_OTHER, forward=lambda n, x: torch.xlogy(n.self, x))
row("SpecialXlog1PyBackward1", N, saved=KEEPS_OTHER, forward=lambda n, x: torch.special.xlog1py(n.self, x))
row("SpecialZetaBackward1", N, saved=KEEPS_OTHER, forward=lambda n, x: torch.special.zeta(n.self, x))

# a * x
row("NegViewBackward0 NegViewBackward0_copy", Kind.SCALE, forward=_plain(torch.neg))
row("Deg2RadBackward0", Kind.SCALE, forward=_plain(torch.deg2rad))
row("Rad2DegBackward0", Kind.SCALE, forward=_plain(torch.rad2deg))
row("FrexpBackward0", Kind.SCALE, forward=lambda n, x: x / n.exponent.exp2())
row("XlogyBackward2 SpecialXlog1PyBackward2", Kind.SCALE, saved=KEEPS_INPUT)

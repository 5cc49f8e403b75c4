"""Where two spellings of one function are two explanations, by the rules themselves: one table, a reason for each row.

In: a program and a preset. Out: how far its explanation may be from that of its plain spelling. The oracle has no exceptions: it is told
what was written.
"""

from __future__ import annotations

import math

from .program import Program

ZENNIT = ("epsilon-plus", "epsilon-plus-flat", "epsilon-gamma-box", "epsilon-alpha2-beta1", "epsilon-alpha2-beta1-flat")
_PAPER = "the paper's rules see the primitives of a norm that is written out, and the identity where it is one node (RULES.md, Normalisation)"
_SUMS = "Zennit's Norm stabilises every sum by 1e-6; a norm that is written out has two or three sums in it, one node has none"
_COMPLEX = "complex numbers have no sign: the stabiliser of a sum of spectra is not the one of the signals' sum"
STABILISER = 1e-2  # 1e-6, relative to sums that may be small

# (block or entry, spelling, presets) → (how far off, why)
EXCEPTIONS: dict[tuple[str, str, tuple[str, ...]], tuple[float, str]] = {
    ("layer norm", "by hand", ("dynamic",)): (math.inf, _PAPER),
    ("layer norm", "divided", ("dynamic",)): (math.inf, _PAPER),
    ("layer norm", "by hand", ZENNIT): (STABILISER, _SUMS),
    ("layer norm", "divided", ZENNIT): (STABILISER, _SUMS),
    ("spectrum", "complex sum", (*ZENNIT, "dynamic")): (math.inf, _COMPLEX),
    ("spectrum", "complex difference", (*ZENNIT, "dynamic")): (math.inf, _COMPLEX),
    ("spectrum", "complex mean", (*ZENNIT, "dynamic")): (math.inf, _COMPLEX),
}


def allowance(program: Program, preset: str) -> float:
    """How far off: 0, or the most that one of its parts is excepted for."""
    rows = EXCEPTIONS.items()
    names = {(part.name, part.spelling) for part in program.parts}
    return max(
        (far for (name, spelling, presets), (far, _) in rows if (name, spelling) in names and preset in presets),
        default=0.0,
    )

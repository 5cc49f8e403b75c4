"""One row per autograd node type, by family. To add an operation, add a row and a sample (tests/samples.py)."""

from . import (  # noqa: F401 - each enters its rows
    activations,
    attention,
    constants,
    convolutions,
    libraries,
    linear,
    losses,
    movement,
    nested,
    normalise,
    products,
    selection,
    special,
    statistics,
    sums,
    transforms,
)
from .refused import REFUSED, refusal
from .table import OPS, Kind, LinearMap, Op, register

__all__ = ["OPS", "REFUSED", "Kind", "LinearMap", "Op", "refusal", "register"]

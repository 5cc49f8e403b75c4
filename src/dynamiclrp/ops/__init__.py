"""One row per autograd node type, by family. To add an operation, add a row and a sample (tests/samples.py)."""

from . import activations, attention, linear, movement, normalise, products, sums  # noqa: F401 - each enters its rows
from .table import OPS, Kind, LinearMap, Op, register

__all__ = ["OPS", "Kind", "LinearMap", "Op", "register"]

"""The rules, as small value objects; each docstring gives the formula and where it is from."""

from .base import OUT, Gradient, Grads, Move, Nothing, Rule
from .first import Box, Flat, WSquare
from .linear import AlphaBeta, Epsilon, Gamma, LinearRule, ZPlus
from .passing import Affine, Attention, Carry, Folded, FunctionShare, Identity, NormShare, PassScale, ScaleFixed
from .shares import AbsoluteShare, Parted, ProductShare, SignalTakesAll, Split, Uniform, UniformPool, Whole

__all__ = [
    "OUT",
    "AbsoluteShare",
    "Affine",
    "AlphaBeta",
    "Attention",
    "Box",
    "Carry",
    "Epsilon",
    "Flat",
    "Folded",
    "FunctionShare",
    "Gamma",
    "Gradient",
    "Grads",
    "Identity",
    "LinearRule",
    "Move",
    "NormShare",
    "Nothing",
    "Parted",
    "PassScale",
    "ProductShare",
    "Rule",
    "ScaleFixed",
    "SignalTakesAll",
    "Split",
    "Uniform",
    "UniformPool",
    "WSquare",
    "Whole",
    "ZPlus",
]

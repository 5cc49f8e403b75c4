"""The rules, as small value objects; each docstring gives the formula and where it is from."""

from .base import OUT, Gradient, Grads, Move, Nothing, Rule
from .first import Box, Flat, WSquare
from .linear import Epsilon, LinearRule
from .norms import Affine, Folded, NormShare, ScaleFixed
from .passing import Attention, Carry, FunctionShare, Identity, PassScale
from .shares import AbsoluteShare, ProductShare, SignalTakesAll, Split, Uniform, UniformPool
from .signed import AlphaBeta, Gamma, SignedRule, ZPlus

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
    "PassScale",
    "ProductShare",
    "Rule",
    "ScaleFixed",
    "SignalTakesAll",
    "SignedRule",
    "Split",
    "Uniform",
    "UniformPool",
    "WSquare",
    "ZPlus",
]

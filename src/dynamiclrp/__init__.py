"""Explain what any PyTorch model did: Layer-wise Relevance Propagation on the autograd graph.

>>> import torch, dynamiclrp as dlrp
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
>>> dlrp.explain(model, torch.randn(1, 4), target=0).relevance.shape
torch.Size([1, 4])
"""

from .attribution import Attribution
from .errors import *  # noqa: F403
from .errors import __all__ as _errors
from .explain import Explainer, Report, explain, inspect, plan, relevance
from .graph import Graph
from .ledger import Ledger
from .ops import Kind, LinearMap, register
from .plan import Plan
from .presets import PRESETS, Preset, preset
from .promise import Branch, Promise
from .rules import (
    AbsoluteShare,
    AlphaBeta,
    Attention,
    Box,
    Epsilon,
    Flat,
    Gamma,
    Gradient,
    Identity,
    Move,
    Nothing,
    ProductShare,
    Rule,
    ScaleFixed,
    SignalTakesAll,
    Uniform,
    UniformPool,
    WSquare,
    ZPlus,
)

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "AbsoluteShare",
    "AlphaBeta",
    "Attention",
    "Attribution",
    "Box",
    "Branch",
    "Epsilon",
    "Explainer",
    "Flat",
    "Gamma",
    "Gradient",
    "Graph",
    "Identity",
    "Kind",
    "Ledger",
    "LinearMap",
    "Move",
    "Nothing",
    "Plan",
    "Preset",
    "ProductShare",
    "Promise",
    "Report",
    "Rule",
    "ScaleFixed",
    "SignalTakesAll",
    "Uniform",
    "UniformPool",
    "WSquare",
    "ZPlus",
    "explain",
    "inspect",
    "plan",
    "preset",
    "register",
    "relevance",
    *_errors,
]

"""Explain what any PyTorch model did: Layer-wise Relevance Propagation on the autograd graph.

>>> import torch, dynamiclrp as dlrp
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
>>> dlrp.explain(model, torch.randn(1, 4), target=0).relevance.shape
torch.Size([1, 4])
"""

from typing import TYPE_CHECKING, Any

from .attribution import Account, Answer, Attribution
from .errors import *  # noqa: F403
from .errors import __all__ as _errors
from .explain import Explainer, Report, explain, inspect, plan, relevance
from .graph import Graph
from .ledger import Ledger
from .ops import Kind, LinearMap, register
from .parts import Part
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
    Split,
    Uniform,
    UniformPool,
    WSquare,
    ZPlus,
)

if TYPE_CHECKING:
    from .archive import load
    from .audio import explain_audio
    from .comparison import Comparison, compare
    from .generation import Generation, explain_generation
    from .image import explain_image
    from .multimodal import explain_multimodal
    from .table import explain_table
    from .text import explain_text

__version__ = "0.1.0"

# Looked up when first used: they are built on the core and on packages of its extras.
_LATER = {
    "Comparison": "comparison",
    "Generation": "generation",
    "compare": "comparison",
    "explain_audio": "audio",
    "explain_generation": "generation",
    "explain_image": "image",
    "explain_multimodal": "multimodal",
    "explain_table": "table",
    "explain_text": "text",
    "load": "archive",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f".{_LATER[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


__all__ = [
    "PRESETS",
    "AbsoluteShare",
    "Account",
    "AlphaBeta",
    "Answer",
    "Attention",
    "Attribution",
    "Box",
    "Branch",
    "Comparison",
    "Epsilon",
    "Explainer",
    "Flat",
    "Gamma",
    "Generation",
    "Gradient",
    "Graph",
    "Identity",
    "Kind",
    "Ledger",
    "LinearMap",
    "Move",
    "Nothing",
    "Part",
    "Plan",
    "Preset",
    "ProductShare",
    "Promise",
    "Report",
    "Rule",
    "ScaleFixed",
    "SignalTakesAll",
    "Split",
    "Uniform",
    "UniformPool",
    "WSquare",
    "ZPlus",
    "compare",
    "explain",
    "explain_audio",
    "explain_generation",
    "explain_image",
    "explain_multimodal",
    "explain_table",
    "explain_text",
    "inspect",
    "load",
    "plan",
    "preset",
    "register",
    "relevance",
    *_errors,
]

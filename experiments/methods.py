"""What is compared: every preset of ours, and the peers that work on a model of that kind. Labels are what tables show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from damped import Damped
from falls import Curve

import dynamiclrp as dlrp
from dynamiclrp import evaluate as ev
from dynamiclrp.rules import AbsoluteShare, Flat, Gamma, Gradient, Split, WSquare, ZPlus

Methods = dict[str, Any]


def bounds(mean: Sequence[float], std: Sequence[float]) -> tuple[Any, Any]:
    """The lowest and highest input of a model whose pixels are normalised, [3, 1, 1] nested lists."""
    return tuple([[[(edge - m) / s]] for m, s in zip(mean, std)] for edge in (0.0, 1.0))  # type: ignore[return-value]


def image_presets(mean: Sequence[float], std: Sequence[float]) -> Methods:
    low, high = bounds(mean, std)
    found: Methods = {name: name for name in dlrp.PRESETS if name != "epsilon-gamma-box"}
    found["epsilon-gamma-box"] = dlrp.preset("epsilon-gamma-box", low=low, high=high)
    # the paper's settings: VGG16, and ViT-b-16 with relevance through the values only
    found["dynamic (linear 1, conv 100)"] = dlrp.preset("dynamic", gamma_linear=1.0, gamma_conv=100.0)
    found["dynamic (linear 0.001, conv 130)"] = dlrp.preset("dynamic", gamma_linear=0.001, gamma_conv=130.0)
    return found


def equal_factors(first: float = 0.5, last: float = 0.07, **what: Any) -> dlrp.Preset:
    """`default` as it was before its search by depth: gamma falls by equal factors, the first convolution is flat."""
    return dlrp.preset("default", **what) | {"conv": Curve(first, last), "first-conv": Flat()}


def former_defaults() -> Methods:
    """What `default` was, in the order in which it changed; labels of candidates."""
    return {
        "default, gamma 0.25 at every depth": equal_factors() | {"conv": Gamma(0.25)},
        "default, gamma 0.5 to 0.07 by equal factors": equal_factors(),
        "default, linear LRP-0": dlrp.preset("default", linear=0.0),
    }


def image_peers(mean: Sequence[float], std: Sequence[float], convolutional: bool) -> Methods:
    low, high = bounds(mean, std)
    found: Methods = {
        "Saliency": "captum:Saliency",
        "InputXGradient": "captum:InputXGradient",
        "IntegratedGradients": ev.Captum("IntegratedGradients", n_steps=16),
        "GradientShap": ev.Captum("GradientShap", n_samples=8),
        "SmoothGrad": "captum:SmoothGrad",
        "DeepLift": "captum:DeepLift",
        "random": "random",
    }
    if convolutional:
        found |= {
            "Captum LRP": "captum:LRP",
            "GuidedBackprop (Zennit)": "zennit:GuidedBackprop",
            "ExcitationBackprop (Zennit)": "zennit:ExcitationBackprop",
            "Zennit EpsilonPlus": "zennit:EpsilonPlus",
            "Zennit EpsilonPlusFlat": "zennit:EpsilonPlusFlat",
            "Zennit EpsilonGammaBox": ev.Zennit("EpsilonGammaBox", low=low, high=high),
            "Zennit EpsilonAlpha2Beta1": "zennit:EpsilonAlpha2Beta1",
            "Zennit EpsilonAlpha2Beta1Flat": "zennit:EpsilonAlpha2Beta1Flat",
        }
    return found


def text_presets() -> Methods:
    found: Methods = {
        name: name for name in dlrp.PRESETS if "-plus" not in name and "alpha" not in name and "box" not in name
    }
    found["dynamic (linear 0.001)"] = dlrp.preset("dynamic", gamma_linear=0.001)
    found["default + linear gamma 0.02"] = dlrp.preset("default", linear=0.02)
    found["default, linear LRP-0"] = dlrp.preset("default", linear=0.0)
    return found


def text_peers() -> Methods:
    return {
        "Saliency": "captum:Saliency",
        "InputXGradient": "captum:InputXGradient",
        "IntegratedGradients": ev.Captum("IntegratedGradients", n_steps=16),
        "GradientShap": ev.Captum("GradientShap", n_samples=8),
        "SmoothGrad": "captum:SmoothGrad",
        "random": "random",
    }


# ------------------------------------------------------------------------------------- the search for `default`


def candidate(
    conv: Any = None,
    linear: float = 0.0,
    first: Any = None,
    sum: str = "proportional",
    gate: float = 0.5,
    weights: float = 0.5,
    damp: float = 0.0,
    whole: bool = False,
) -> dlrp.Preset:
    """AttnLRP with gamma (or z+) for convolutions, gamma or damping for linear layers, another first layer, uneven products."""
    rules: dict[str, Any] = {"product": Split(gate, weights), "attention": dlrp.Attention(weights)}
    if conv is not None:
        rules["conv"] = ZPlus() if conv == "z+" else Gamma(conv)
    if first is not None:
        rules["first-conv"] = {"flat": Flat(), "w2": WSquare()}[first]
    if sum == "absolute":
        rules["sum"] = AbsoluteShare()
    rules["linear"] = Gamma(linear) if linear else Damped(damp, whole) if damp else Gradient()
    return dlrp.preset("attnlrp") | rules


def _grid(*settings: dict[str, Any]) -> Methods:
    return {", ".join(f"{name} {value}" for name, value in knobs.items()): candidate(**knobs) for knobs in settings}


DAMP = (0.1, 0.2, 0.3, 0.45, 0.6)  # of the root mean square, see damped.py


def conv_candidates() -> Methods:
    """Gamma of convolutions, of the linear head, the first layer, and how residual sums are divided."""
    return _grid(
        *(
            {"conv": conv, "linear": linear, "first": "flat", "sum": sums}
            for conv in (0.1, 0.25, 0.5, 1.0, 2.0, "z+")
            for linear in (0.0, 0.25)
            for sums in ("proportional", "absolute")
        ),
        *({"conv": conv, "first": first} for conv in (0.25, 1.0) for first in (None, "w2")),
    )


def vit_candidates() -> Methods:
    return _grid(
        *(
            {"conv": 0.25, "first": "flat", "linear": linear, "weights": weights}
            for linear in (0.0, 0.02, 0.05, 0.1, 0.25)
            for weights in (0.1, 0.3, 0.4, 0.5)
        ),
        *({"conv": 0.25, "linear": linear, "weights": 0.3} for linear in (0.0, 0.05, 0.1)),
        {"conv": 0.25, "first": "flat", "linear": 0.05, "weights": 0.0},
        {"conv": 0.25, "first": "flat", "linear": 0.05, "weights": 0.3, "sum": "absolute"},
        *({"conv": 0.25, "first": "flat", "weights": 0.4, "damp": part} for part in DAMP),
        *({"conv": 0.25, "first": "flat", "weights": 0.4, "damp": part, "whole": True} for part in (0.1, 0.3)),
    )


def text_candidates() -> Methods:
    """The attention split, the gate's part, gamma of linear layers, sums: one at a time around AttnLRP, then some pairs."""
    return _grid(
        *({"weights": w} for w in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)),
        *({"weights": 0.3, "gate": g} for g in (0.0, 0.25, 0.75)),
        *({"weights": 0.3, "linear": gamma} for gamma in (0.02, 0.05, 0.1, 0.25)),
        {"weights": 0.3, "sum": "absolute"},
        {"weights": 0.3, "linear": 0.05, "gate": 0.25},
        {"weights": 0.1, "linear": 0.05},
        {"weights": 0.4, "linear": 0.02},
        *({"weights": 0.4, "damp": part} for part in DAMP),
        {"weights": 0.5, "damp": 0.3},
        *({"weights": 0.4, "damp": part, "whole": True} for part in (0.1, 0.3)),
    )


# What `default` is called among the candidates of each kind of model, or comes nearest to it (conv nets).
DEFAULT_LABELS = ("conv 0.25, linear 0.0, first flat, sum proportional", "weights 0.4")
BIASED_LABELS = (
    "conv 0.25, first flat, linear 0.02, weights 0.4",
    "weights 0.4, linear 0.02",
)  # linear maps with a bias

"""Presets: which rule goes where. Module name > op name > kind, and the newest entry wins among equals.

>>> import dynamiclrp as dlrp
>>> dlrp.preset("attnlrp") | {"conv": dlrp.Gamma(0.25), "Softmax": dlrp.Nothing(), "classifier.*": dlrp.Epsilon(1e-6)}
Preset(attnlrp | conv, Softmax, classifier.*)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from .errors import PresetError
from .graph import op_name
from .ops import OPS, Kind
from .rules import (
    AbsoluteShare,
    Affine,
    AlphaBeta,
    Attention,
    Box,
    Carry,
    Epsilon,
    Flat,
    FunctionShare,
    Gamma,
    Gradient,
    Identity,
    Move,
    NormShare,
    Nothing,
    ProductShare,
    Rule,
    ScaleFixed,
    SignalTakesAll,
    Split,
    Uniform,
    UniformPool,
    ZPlus,
)

FIRST = "first"  # the first linear map above an input
FIRST_CONV = "first-conv"  # the same, if it is a convolution
BIASED = "biased-linear"  # linear maps that add a bias
_KINDS = frozenset(kind.value for kind in Kind) | {FIRST, FIRST_CONV, BIASED}


@dataclass(frozen=True)
class Preset:
    """A named mapping from kinds, op names and module patterns to rules. Immutable; `|` makes a new one."""

    name: str
    kinds: tuple[tuple[str, Rule], ...]
    ops: tuple[tuple[str, Rule], ...] = ()
    modules: tuple[tuple[str, Rule], ...] = ()
    _kinds: dict[str, Rule] = field(init=False, repr=False, compare=False, default_factory=dict)
    _ops: dict[str, Rule] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._kinds.update(self.kinds)
        self._ops.update(self.ops)

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.kinds, self.ops, self.modules))

    def __hash__(self) -> int:  # every call asks for the plan of its preset
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:  # hashes of other processes differ
        return Preset, (self.name, self.kinds, self.ops, self.modules)

    def __or__(self, overrides: Mapping[str, Rule]) -> Preset:
        known = {op_name(name) for name in OPS}
        kinds, ops, modules = dict(self.kinds), dict(self.ops), dict(self.modules)
        for key, rule in overrides.items():
            if not isinstance(rule, Rule):
                raise PresetError(f"override {key!r}: expected a rule such as Gamma(0.25), got {rule!r}")
            name = key.value if isinstance(key, Kind) else key
            if name in _KINDS:
                served = {FIRST: "linear", FIRST_CONV: "conv", BIASED: "linear"}.get(name, name)
                if not rule.fits(served):
                    raise PresetError(f"override {name!r}: {rule} serves only {', '.join(sorted(rule.kinds or ()))}")
                kinds[name] = rule
            elif name in known:
                ops[name] = rule
            else:
                modules.pop(name, None)
                modules[name] = rule
        named = {key.value if isinstance(key, Kind) else key for key in overrides}
        if Kind.LINEAR.value in named and BIASED not in named:
            kinds.pop(BIASED, None)  # all of them are meant
        label = f"{self.name}{',' if '|' in self.name else ' |'} {', '.join(str(key) for key in overrides)}"
        return Preset(label, tuple(kinds.items()), tuple(ops.items()), tuple(modules.items()))

    def rule(self, kind: Kind, op: str, module: str | None, first: bool, biased: bool = False) -> Rule:
        """The rule for one node."""
        own = self.override(op, module)
        if own is not None:
            return own
        if first and kind is Kind.CONV and FIRST_CONV in self._kinds:
            return self._kinds[FIRST_CONV]
        if first and FIRST in self._kinds:
            return self._kinds[FIRST]
        if biased and kind is Kind.LINEAR and BIASED in self._kinds:
            return self._kinds[BIASED]
        return self._kinds[kind.value]

    def override(self, op: str, module: str | None) -> Rule | None:
        """The rule that names this operation or its module."""
        if self.modules and module is not None:
            for pattern, rule in reversed(self.modules):
                if fnmatchcase(module, pattern) or module.startswith(pattern + "."):
                    return rule
        return self._ops.get(op)

    @property
    def needs_parameters(self) -> bool:
        """Do some rules compute with values of biases and other parameters that are added?"""
        rules = [rule for _, rule in (*self.kinds, *self.ops, *self.modules)]
        return any(rule.needs_parameters for rule in rules)

    def __repr__(self) -> str:
        return f"Preset({self.name})"

    def __str__(self) -> str:
        rows = [*self.kinds, *self.ops, *self.modules]
        width = max(len(key) for key, _ in rows)
        return "\n".join([repr(self), *(f"  {key:{width}}  {rule}" for key, rule in rows)])


def base_rules(**rules: Rule) -> dict[str, Rule]:
    """AttnLRP everywhere (Achtibat et al. 2024), with changes."""
    kinds: dict[Kind, Rule] = {
        Kind.LEAF: Move(),
        Kind.MOVEMENT: Move(),
        Kind.SCALE: Gradient(),
        Kind.LINEAR: Gradient(),
        Kind.CONV: Gradient(),
        Kind.SUM: Gradient(),
        Kind.POOL: Gradient(),
        Kind.PRODUCT: Uniform(),
        Kind.ACTIVATION: Identity(),
        Kind.FUNCTION: Gradient(),
        Kind.SOFTMAX: Gradient(),
        Kind.WEIGHTS: Gradient(),
        Kind.NORMALISE: ScaleFixed(),
        Kind.BATCHNORM: Affine(),
        Kind.ATTENTION: Attention(),
        Kind.STATISTIC: Gradient(),
        Kind.TRANSFORM: Carry(),
        Kind.LOSS: Gradient(),
        Kind.CONSTANT: Nothing(),
    }
    return {kind.value: rule for kind, rule in kinds.items()} | rules


def _zennit(conv: Rule, eps: float, stabiliser: float) -> dict[str, Rule]:
    norm = Epsilon(stabiliser)
    return base_rules(linear=Epsilon(eps), conv=conv, sum=norm, pool=norm, batchnorm=Identity())


def _gradient() -> dict[str, Rule]:
    return {kind.value: Gradient() for kind in Kind}


def _dynamic(
    gamma_linear: float = 0.0, gamma_conv: float = 0.0, eps: float = 1e-11, top: float = 1.0
) -> dict[str, Rule]:
    """The paper's rules, but for two kinds in which it hands all to the input, s·y/x, without bound where that is near 0.

    Batch norm in eval mode overflows float32 behind many convolutions: its shift takes |shift| / (|scale·x| + |shift|), as a
    bias does. Functions with f(0) ≠ 0 explode as gates that are undecided: f(0) takes its share likewise. The paper's
    rules: `preset("dynamic") | {"batchnorm": Identity(eps=1e-11), "function": Identity(eps=1e-11)}`.
    """

    def linear(gamma: float) -> Rule:
        return Gamma(gamma, eps, "absolute", top) if gamma else Epsilon(eps, "absolute", top)

    return base_rules(
        linear=linear(gamma_linear),
        conv=linear(gamma_conv),
        sum=AbsoluteShare(eps),
        pool=UniformPool(),
        product=ProductShare(eps),
        function=FunctionShare(eps=eps),
        normalise=NormShare(eps=eps),
        batchnorm=Affine("absolute", eps),
        weights=Nothing(),
        attention=Attention(weights=0.0, lost=0.5),
    )


def _epsilon_gamma_box(
    low: Any = None, high: Any = None, gamma: float = 0.25, eps: float = 1e-6, stabiliser: float = 1e-6
) -> dict[str, Rule]:
    if low is None or high is None:
        raise PresetError(
            "epsilon-gamma-box needs the lowest and highest possible input values: "
            "dynamiclrp.preset('epsilon-gamma-box', low=..., high=...)"
        )
    return _zennit(Gamma(gamma, stabiliser), eps, stabiliser) | {FIRST_CONV: Box(low, high, stabiliser)}


def _epsilon_plus(eps: float = 1e-6, stabiliser: float = 1e-6) -> dict[str, Rule]:
    return _zennit(ZPlus(stabiliser), eps, stabiliser)


def _epsilon_plus_flat(eps: float = 1e-6, stabiliser: float = 1e-6) -> dict[str, Rule]:
    return _zennit(ZPlus(stabiliser), eps, stabiliser) | {FIRST: Flat(stabiliser)}


def _epsilon_alpha2_beta1(eps: float = 1e-6, stabiliser: float = 1e-6) -> dict[str, Rule]:
    return _zennit(AlphaBeta(2, 1, stabiliser), eps, stabiliser)


def _epsilon_alpha2_beta1_flat(eps: float = 1e-6, stabiliser: float = 1e-6) -> dict[str, Rule]:
    return _zennit(AlphaBeta(2, 1, stabiliser), eps, stabiliser) | {FIRST: Flat(stabiliser)}


def _cp() -> dict[str, Rule]:
    return base_rules(product=SignalTakesAll(), weights=Nothing(), attention=Attention(weights=0.0))


def _default(
    gamma: float = 0.5, last: float | None = 0.07, weights: float = 0.4, linear: float | None = None
) -> dict[str, Rule]:
    """What measured best over conv nets and transformers (docs/results.md): AttnLRP; gamma for convolutions, falling from `gamma`
    to `last` with depth, at first fast; the first convolution a box of the input's own extremes; a little less of each
    attention product to the weights than to the values; a small gamma for linear maps with a bias. `linear` is the gamma of
    all linear maps instead; 0 costs one gradient."""
    biased: dict[str, Rule] = {BIASED: Gamma(0.02)} if linear is None else {}
    return base_rules(
        linear=Gamma(linear) if linear else Gradient(),
        conv=Gamma(gamma, last=last),
        product=Split(0.5, weights),
        attention=Attention(weights),
        **{FIRST_CONV: Box()},
        **biased,
    )


PRESETS: dict[str, Callable[..., dict[str, Rule]]] = {
    "default": _default,
    "attnlrp": lambda: base_rules(),
    "cp-lrp": _cp,
    "dynamic": _dynamic,
    "epsilon": lambda eps=1e-6: base_rules(linear=Epsilon(eps), conv=Epsilon(eps)),
    "gamma": lambda gamma=0.25, eps=1e-6: base_rules(linear=Gamma(gamma, eps), conv=Gamma(gamma, eps)),
    "epsilon-plus": _epsilon_plus,
    "epsilon-plus-flat": _epsilon_plus_flat,
    "epsilon-gamma-box": _epsilon_gamma_box,
    "epsilon-alpha2-beta1": _epsilon_alpha2_beta1,
    "epsilon-alpha2-beta1-flat": _epsilon_alpha2_beta1_flat,
    "gradient": _gradient,
}


def preset(which: str | Preset, **parameters: Any) -> Preset:
    """A preset by name, with its parameters.

    >>> preset("gamma", gamma=0.1)
    Preset(gamma(gamma=0.1))
    """
    if isinstance(which, Preset):
        if parameters:
            raise PresetError(f"parameters {sorted(parameters)} go with a preset's name; change an object with |")
        return which
    if not isinstance(which, str) or which not in PRESETS:
        close = get_close_matches(str(which), PRESETS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise PresetError(f"unknown preset {which!r}.{hint} Known: {', '.join(PRESETS)}.")
    try:
        kinds = PRESETS[which](**parameters)
    except TypeError as error:
        raise PresetError(f"preset {which!r} does not take {sorted(parameters)}: {error}") from None
    label = which + (f"({', '.join(f'{k}={v}' for k, v in parameters.items())})" if parameters else "")
    return Preset(label, tuple(kinds.items()))

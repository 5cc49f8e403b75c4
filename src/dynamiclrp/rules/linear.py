"""Rules for linear maps z = x·W + b: matrix products and convolutions with one live operand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UnsupportedTensorError
from ..fused import launcher
from .base import OUT, Grads, Hooks, Rule, like, sign, stabilise, usable
from .signed import signed_hooks

if TYPE_CHECKING:
    from ..here import Here
    from ..step import Step


@dataclass(frozen=True)
class LinearRule(Rule):
    """z = x·W + b. `top` keeps only that share of the largest relevances of each row (the paper's relevance filter).

    `bias` says what the bias takes: its proportional share (inside the denominator), or |b| / (|x·W| + |b|) beforehand.
    """

    eps: float = 1e-6
    bias: str = "proportional"
    top: float = 1.0

    needs_parameters = True
    kinds = frozenset({"linear", "conv"})

    def __post_init__(self) -> None:
        if not 0 < self.top <= 1:
            raise ValueError(f"{type(self).__name__}(top={self.top}): expected a share, 0 < top <= 1")
        if self.bias not in ("proportional", "absolute"):
            raise ValueError(f"{type(self).__name__}(bias={self.bias!r}): expected 'proportional' or 'absolute'")

    def needs(self, step: Step) -> Iterable[int]:
        yield OUT
        if self.bias == "absolute" and step.has_bias:
            yield step.bias

    @property
    def folds(self) -> bool:
        """Does a batch norm behind the map count as part of it?"""
        return self.bias == "proportional"

    def takes_relevance(self, step: Step) -> bool:
        return True

    def relevance(self, here: Here, s: Tensor) -> tuple[Tensor, Tensor]:
        """(relevance to hand down, z) with the filter applied and, where so asked, the bias' share set aside."""
        z = here.output
        if z.is_complex():
            raise UnsupportedTensorError(
                f"node {here.step.node} ({here.step.name}) multiplies complex numbers, which have no sign: {self} cannot tell "
                'their parts apart. Remedy: let it keep its own backward, preset(…) | {"'
                + here.step.name
                + '": Gradient()}, '
                "or write it with real numbers."
            )
        r = here.relevance(s, z)
        if self.top < 1:
            r = _keep_top(r, self.top)
        if self.bias == "absolute" and here.step.has_bias:
            bias = here.bias
            z = z - bias
            magnitude = z.abs()
            share = r / (magnitude + bias.abs().add_(usable(self.eps, z)))
            if here.wants_bias:
                here.bias_coefficient = share * sign(bias)
            r = share * magnitude
        return r, z

    def plain(self, step: Step) -> bool:
        """Is all of `relevance` one multiplication by z, at most?"""
        return self.top == 1 and not (self.bias == "absolute" and step.has_bias)

    def give_bias(self, here: Here, grads: Grads) -> Grads:
        """Where relevance of the bias itself was asked for, hand it its part."""
        position = here.step.bias
        if position in here.step.live and here.bias_coefficient is not None and grads[position] is not None:
            grads[position] = here.reduce_to_bias(here.bias_coefficient, relevance=self.delivers_relevance)
        return grads


def _keep_top(r: Tensor, share: float) -> Tensor:
    rows = r.reshape(len(r), -1) if r.dim() > 1 else r.reshape(1, -1)
    top = rows.topk(max(1, int(share * rows.shape[1])), dim=1)
    return torch.zeros_like(rows).scatter_(1, top.indices, top.values).reshape(r.shape)


def through_epsilon(s: Tensor, z: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """What the epsilon rule of a map with output z makes of a coefficient; a `bias` takes its absolute share beforehand."""
    eps = usable(eps, s)
    if bias is None:  # z / stab(z), which is 0 for z = 0 and 1 for an infinite z (an additive mask)
        return s / (eps / z.abs()).add_(1)
    own = z - bias
    magnitude = own.abs()
    return s * z / (magnitude + (bias.abs() + eps)) * magnitude / stabilise(own, eps)


@dataclass(frozen=True)
class Epsilon(LinearRule):
    """R_x = x · Wᵀ(R_z / stab(z)) (Bach et al. 2015, eq. 58). On sums and averages: Zennit's Norm."""

    kinds = frozenset({"linear", "conv", "sum", "pool"})

    def edits(self, step: Step) -> tuple[bool, bool]:
        return True, self.bias == "absolute" and step.has_bias and step.bias in step.live

    def of_coefficients(self, step: Step) -> bool:
        """Is it a factor of the coefficient, by z alone?"""
        return (step.form == "s" or step.convert) and self.plain(step)

    def before(self, here: Here, s: Tensor) -> Tensor:
        if self.of_coefficients(here.step):
            made = here.fused("epsilon", s, here.output, eps=usable(self.eps, s))
            return through_epsilon(s, here.output, None, self.eps) if made is None else made
        if self.bias == "absolute" and self.top == 1 and here.step.has_bias and not here.wants_bias:
            z, bias = here.output, here.bias
            made = here.fused("epsilon_absolute", s, z, bias, text=here.times("z"), eps=usable(self.eps, s))
            if made is not None:
                return made
        r, z = self.relevance(here, s)
        made = here.fused("epsilon_of_relevance", r, z, eps=usable(self.eps, r))
        return r / stabilise(z, self.eps) if made is None else made

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        return self.give_bias(here, grads)

    def prepare(self, step: Step) -> tuple[str, str] | None:
        """The formula that is all of the rule, and how it makes relevance of what arrives."""
        if self.top < 1 or step.convert or step.multiply or any(i not in step.factors for i in step.live):
            return None
        if self.of_coefficients(step):
            return "epsilon", ""
        absolute = self.bias == "absolute" and step.has_bias and step.added is None
        return ("epsilon_absolute", "* z" if step.form == "s" else "") if absolute else None

    def short(self, here: Here) -> Hooks | None:
        if here.step.prepared is None or not here.kernels:
            return None
        name, text = here.step.prepared
        own = [] if name == "epsilon" else [here.bias]
        rule, held, wanted = self, [here], own[0].dtype if own else None

        def before(grads: tuple[Tensor | None, ...]) -> Any:
            s = grads[0]
            if s is None:
                return None
            here, dtype = held.pop(), s.dtype
            z = here.output
            if z.shape == s.shape and z.dtype == dtype and wanted in (None, dtype) and s.is_floating_point():
                return (launcher(name, text, eps=usable(rule.eps, s))(s, z, *own), *grads[1:])
            return (like(rule.before(here, s), s), *grads[1:])

        return before, None


@dataclass(frozen=True)
class _SignedRule(LinearRule):
    """Rules that treat positive and negative contributions apart, by `x⁺w⁺ + x⁻w⁻ = (x·W + |x|·|W|) / 2`.

    With `q = |x|·|W| + |b|` the positive part of z, bias included, is (z + q)/2 and the negative part (z - q)/2: one
    extra product forward and one back serve all of them.
    """

    def needs(self, step: Step) -> Iterable[int]:
        yield OUT
        yield from step.factors
        if step.has_bias:
            yield step.bias

    def magnitude(self, here: Here, eps: float = 0.0) -> Tensor:
        return here.magnitude(here.step.has_bias and self.bias == "proportional", eps)

    def deliver(self, here: Here, grads: Grads, u: Tensor) -> Grads:
        """`Wᵀu + ratio · sgn(x)·|W|ᵀv`, with v from the stash."""
        for i in here.step.live_factors:
            g = grads[i]
            grads[i] = None if g is None else here.add_signed(g, u, here.stash)
        return self.give_bias(here, grads) if here.wants_bias else grads


@dataclass(frozen=True)
class Gamma(_SignedRule):
    """Contributions of z's own sign count 1 + gamma times (the generalised gamma rule; Andéol et al. 2021).

    `last`: gamma of the deepest map that has the rule; the first has `gamma`. Between them its logarithm goes with the square
    root of depth, so it changes early. Depth is how many maps of the rule lie below on the longest way.
    """

    gamma: float = 0.25
    last: float | None = None

    def __init__(
        self,
        gamma: float = 0.25,
        eps: float = 1e-6,
        bias: str = "proportional",
        top: float = 1.0,
        last: float | None = None,
    ) -> None:
        if last is not None and (gamma <= 0 or last <= 0):
            raise ValueError(f"Gamma({gamma}, last={last}): expected both above 0, their logarithms are joined")
        set_values(self, gamma=gamma, eps=eps, bias=bias, top=top, last=last)

    def at(self, depth: float) -> Gamma:
        """The rule of one map, at a depth from 0 (the first that has it) to 1 (the last)."""
        if self.last is None:
            return self
        part = depth**0.5
        return Gamma(self.gamma ** (1 - part) * self.last**part, self.eps, self.bias, self.top)

    def prepare(self, step: Step) -> bool:
        """Is z known to be positive where relevance arrives?"""
        return step.positive and not (self.bias == "absolute" and step.has_bias)

    def alike(self, step: Step) -> bool:
        return bool(self.gamma and step.prepared and step.nonnegative)

    def short(self, here: Here) -> Hooks | None:
        if not self.gamma or not self.plain(here.step):
            return None
        formula = "gamma_positive" if here.step.prepared else "gamma"
        return signed_hooks(here, formula, self.eps / (1 + self.gamma / 2), self._ratio)

    def before(self, here: Here, s: Tensor) -> Tensor:
        u, here.stash = self._parts(here, s)
        if here.wants_bias and self.bias == "proportional":
            own = u / (1 + self.gamma / 2)
            here.bias_coefficient = torch.where((here.output > 0) == (here.bias > 0), own * (1 + self.gamma), own)
        return u

    def _parts(self, here: Here, s: Tensor) -> tuple[Tensor, Tensor]:
        """What goes back through W, and what through |W|."""
        # the denominator has the sign of z and the magnitude (1 + γ/2) d; nothing goes where z is 0
        eps, positive = usable(self.eps / (1 + self.gamma / 2), s), here.step.prepared
        ratio = here.ratio = self._ratio if self.gamma else 1.0
        q = self.magnitude(here, eps / ratio) if self.gamma else torch.full_like(here.output, eps)
        r, z = self.relevance(here, s)
        total = z if positive and here.step.rectified else z.abs()
        # in memory of our own, where there is some: on a CPU new memory costs more than the arithmetic
        total = torch.add(total, q, alpha=ratio, out=q if q.dtype == total.dtype else None)
        v = _over(r, total, s)
        if positive:
            return v, v
        sgn = z.sign()
        if not here.carries_s:
            v = v * sgn.abs()  # as s · z is, 0 where z is
        return (v * sgn if here.batched else sgn.mul_(v)), v

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        return self.deliver(here, grads, s) if self.gamma else self.give_bias(here, grads)

    @property
    def _ratio(self) -> float:
        """What a magnitude counts beside its signed part; both are divided by 1 + γ/2."""
        return (self.gamma / 2) / (1 + self.gamma / 2)


@dataclass(frozen=True)
class ZPlus(_SignedRule):
    """Only positive contributions count (z⁺; Montavon et al. 2017), for inputs of any sign."""

    def alike(self, step: Step) -> bool:
        return step.nonnegative

    def short(self, here: Here) -> Hooks | None:
        return signed_hooks(here, "zplus", 2 * self.eps) if self.plain(here.step) else None

    def before(self, here: Here, s: Tensor) -> Tensor:
        # rounding may take a sum of nothing positive below 0; the halves of both products cancel
        r, z = self.relevance(here, s)
        u = _over(r, self.magnitude(here).add_(z).clamp_(min=0).add_(usable(2 * self.eps, s)), s)
        if here.wants_bias and self.bias == "proportional":
            here.bias_coefficient = torch.where(here.bias > 0, 2 * u, 0)
        here.stash = u
        return u

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        return self.deliver(here, grads, s)


@dataclass(frozen=True)
class AlphaBeta(_SignedRule):
    """alpha times the positive contributions minus beta times the negative ones (Bach et al. 2015, eq. 60)."""

    alpha: float = 2.0
    beta: float = 1.0

    def __init__(
        self, alpha: float = 2.0, beta: float = 1.0, eps: float = 1e-6, bias: str = "proportional", top: float = 1.0
    ) -> None:
        if alpha < 0 or beta < 0 or alpha - beta != 1:
            raise ValueError(f"AlphaBeta(alpha={alpha}, beta={beta}): expected alpha - beta = 1, neither negative")
        set_values(self, alpha=alpha, beta=beta, eps=eps, bias=bias, top=top)

    def before(self, here: Here, s: Tensor) -> Tensor:
        r, z = self.relevance(here, s)
        q, eps = self.magnitude(here), usable(self.eps, z)
        positive = self.alpha * r / ((q + z).clamp_(min=0).add_(2 * eps))
        negative = self.beta * r / stabilise((z - q).clamp_(max=0), 2 * eps)
        if here.wants_bias and self.bias == "proportional":
            here.bias_coefficient = torch.where(here.bias > 0, 2 * positive, -2 * negative)
        here.stash = positive + negative
        return positive - negative

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        return self.deliver(here, grads, s)


def _over(r: Tensor, total: Tensor, s: Tensor) -> Tensor:
    """r / total, in r's memory unless that is what arrived, which autograd may hand to others."""
    return r / total if r is s else r.div_(total)


def set_values(rule: LinearRule, **values: Any) -> None:
    """Initialise a frozen rule whose own parameter comes first."""
    for name, value in values.items():
        object.__setattr__(rule, name, value)
    rule.__post_init__()

"""The rules, as small value objects. RULES.md in the design notes and the docstrings give the formulas.

Every tensor y of the forward pass carries a coefficient s with R_y = y * s (form "s"), or R_y itself (form "R").
A rule edits the operation's own backward: `before` rescales what the native backward is fed with, `after` replaces what
it returned. A rule says which values it `needs`; the Promise System gets them. It must not know where they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .plan import Step
    from .run import Here

OUT = -1  # the output, among the positions of the operands

Grads = list[Tensor | None]


def stabilise(denominator: Tensor, eps: float) -> Tensor:
    """`d + eps * sgn(d)` with sgn(0) = +1, so that nothing is divided by zero (eps never underflows)."""
    eps = usable(eps, denominator)
    return torch.where(denominator < 0, denominator - eps, denominator + eps)


def usable(eps: float, like: Tensor) -> float:
    """An eps that does not underflow in the tensor's dtype."""
    return max(eps, torch.finfo(like.dtype).tiny)


def sign(x: Tensor) -> Tensor:
    """sgn(x) with sgn(0) = +1."""
    return torch.where(x < 0, -1.0, 1.0).to(x.dtype)


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient, and 0 where the denominator is 0: what has no value carries no relevance."""
    zero = denominator == 0
    return torch.where(zero, 0, numerator / torch.where(zero, 1, denominator))


def reduce_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo broadcasting by summation."""
    return x if x.shape == torch.Size(shape) else x.sum_to_size(shape)


class Rule:
    """Base of all rules; by itself, the operation's own backward."""

    before: Callable[[Here, Tensor], Tensor] | None = None
    after: Callable[[Here, Grads, Tensor], Grads] | None = None
    delivers_relevance = False  # hands down R, not s
    needs_parameters = False  # computes with biases and other parameters that are added

    def edits(self, step: Step) -> tuple[bool, bool]:
        """Which of `before` and `after` it has to do at this step."""
        return self.before is not None, self.after is not None

    def needs(self, step: Step) -> Iterable[int]:
        """Positions of the operands (or OUT) whose values the rule computes with."""
        return ()

    def passes_relevance(self, step: Step) -> bool:
        """Can it take R in place of s and hand down R?"""
        return False

    def takes_relevance(self, step: Step) -> bool:
        """Can it take R in place of s and hand down s?"""
        return False

    def conserves(self, step: Step) -> bool:
        """Does it claim to hand down exactly what arrives, given these live operands?"""
        return False


@dataclass(frozen=True)
class Gradient(Rule):
    """The operation's own backward: LRP-0 for linear and homogeneous operations, Taylor for others (softmax)."""

    def conserves(self, step: Step) -> bool:
        return step.homogeneous


@dataclass(frozen=True)
class Move(Rule):
    """Movement and selection: relevance and coefficients alike go where the values came from."""

    def passes_relevance(self, step: Step) -> bool:
        return True

    def conserves(self, step: Step) -> bool:
        return step.homogeneous


@dataclass(frozen=True)
class Nothing(Rule):
    """No relevance passes."""

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:  # type: ignore[override]
        return [None] * len(grads)

    def passes_relevance(self, step: Step) -> bool:
        return True


# --------------------------------------------------------------------------------------------------- linear maps


@dataclass(frozen=True)
class _LinearRule(Rule):
    """z = x·W + b. `top` keeps only that share of the largest relevances of each row (the paper's relevance filter).

    `bias` says what the bias takes: its proportional share (inside the denominator), or |b| / (|x·W| + |b|) beforehand.
    """

    eps: float = 1e-6
    bias: str = "proportional"
    top: float = 1.0

    needs_parameters = True

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
        r = here.relevance(s, z)
        if self.top < 1:
            r = _keep_top(r, self.top)
        if self.bias == "absolute" and here.step.has_bias:
            bias = here.bias
            z = z - bias
            share = r / (z.abs() + bias.abs() + usable(self.eps, z))
            here.bias_coefficient = share * sign(bias)
            r = share * z.abs()
        return r, z

    def give_bias(self, here: Here, grads: Grads) -> Grads:
        """Where relevance of the bias itself was asked for, hand it its part."""
        position = here.step.bias
        if position in here.step.live and here.bias_coefficient is not None and grads[position] is not None:
            grads[position] = here.reduce_to_bias(here.bias_coefficient)
        return grads


def _keep_top(r: Tensor, share: float) -> Tensor:
    rows = r.reshape(len(r), -1) if r.dim() > 1 else r.reshape(1, -1)
    top = rows.topk(max(1, int(share * rows.shape[1])), dim=1)
    return torch.zeros_like(rows).scatter_(1, top.indices, top.values).reshape(r.shape)


@dataclass(frozen=True)
class Epsilon(_LinearRule):
    """R_x = x · Wᵀ(R_z / stab(z)) (Bach et al. 2015, eq. 58). On sums and averages: Zennit's Norm."""

    def edits(self, step: Step) -> tuple[bool, bool]:
        return True, self.bias == "absolute" and step.has_bias and step.bias in step.live

    def before(self, here: Here, s: Tensor) -> Tensor:  # type: ignore[override]
        r, z = self.relevance(here, s)
        return here.unfold(r / stabilise(z, self.eps))

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:  # type: ignore[override]
        return self.give_bias(here, grads)


@dataclass(frozen=True)
class _SignedRule(_LinearRule):
    """Rules that treat positive and negative contributions apart, by `x⁺w⁺ + x⁻w⁻ = (x·W + |x|·|W|) / 2`.

    With `q = |x|·|W| + |b|` the positive part of z, bias included, is (z + q)/2 and the negative part (z - q)/2: one
    extra product forward and one back serve all of them.
    """

    def needs(self, step: Step) -> Iterable[int]:
        yield OUT
        yield from step.factors
        if step.has_bias:
            yield step.bias

    def magnitude(self, here: Here) -> Tensor:
        return here.magnitude(bias=here.step.has_bias and self.bias == "proportional")

    def deliver(self, here: Here, grads: Grads, native: float, extra: float) -> Grads:
        """`native · Wᵀu + extra · sgn(x)·|W|ᵀv`, with v from the stash."""
        more = here.absolute_transposed(here.stash)
        return self.give_bias(here, here.on_live(grads, lambda g: g.mul(native).add_(more, alpha=extra)))


@dataclass(frozen=True)
class Gamma(_SignedRule):
    """Contributions of z's own sign count 1 + gamma times (the generalised gamma rule; Andéol et al. 2021)."""

    gamma: float = 0.25

    def __init__(self, gamma: float = 0.25, eps: float = 1e-6, bias: str = "proportional", top: float = 1.0) -> None:
        _set(self, gamma=gamma, eps=eps, bias=bias, top=top)

    def before(self, here: Here, s: Tensor) -> Tensor:  # type: ignore[override]
        r, z = self.relevance(here, s)
        # d has the sign of z, and |d| = (1 + γ/2)|z| + γ/2 q
        d = (z if here.step.rectified else z.abs()).mul(1 + self.gamma / 2)
        v = r / d.add_(self.magnitude(here), alpha=self.gamma / 2).add_(usable(self.eps, d))
        v = v if here.step.rectified else torch.where(z == 0, 0, v)
        u = v if here.step.rectified else v * z.sign()
        if here.wants_bias and self.bias == "proportional":
            here.bias_coefficient = torch.where((z > 0) == (here.bias > 0), u * (1 + self.gamma), u)
        here.stash = v
        return here.unfold(u)

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:  # type: ignore[override]
        return self.deliver(here, grads, 1 + self.gamma / 2, self.gamma / 2)


@dataclass(frozen=True)
class ZPlus(_SignedRule):
    """Only positive contributions count (z⁺; Montavon et al. 2017), for inputs of any sign."""

    def before(self, here: Here, s: Tensor) -> Tensor:  # type: ignore[override]
        r, z = self.relevance(here, s)
        # rounding may take a sum of nothing positive below 0
        d = self.magnitude(here).add_(z).clamp_(min=0).div_(2)
        u = r / d.add_(usable(self.eps, d))
        if here.wants_bias and self.bias == "proportional":
            here.bias_coefficient = torch.where(here.bias > 0, u, 0)
        here.stash = u
        return here.unfold(u)

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:  # type: ignore[override]
        return self.deliver(here, grads, 0.5, 0.5)


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
        _set(self, alpha=alpha, beta=beta, eps=eps, bias=bias, top=top)

    def before(self, here: Here, s: Tensor) -> Tensor:  # type: ignore[override]
        r, z = self.relevance(here, s)
        q, eps = self.magnitude(here), usable(self.eps, z)
        positive = self.alpha * r / ((q + z).clamp_(min=0).div_(2).add_(eps))
        negative = self.beta * r / stabilise((z - q).clamp_(max=0).div_(2), eps)
        if here.wants_bias and self.bias == "proportional":
            here.bias_coefficient = torch.where(here.bias > 0, positive, -negative)
        here.stash = positive + negative
        return here.unfold(positive - negative)

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:  # type: ignore[override]
        return self.deliver(here, grads, 0.5, 0.5)


@dataclass(frozen=True)
class _FirstLayerRule(_LinearRule):
    """Rules for the first linear map: they hand relevance to zeros, so they deliver R."""

    delivers_relevance = True

    def needs(self, step: Step) -> Iterable[int]:
        yield OUT
        yield from step.factors

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:  # type: ignore[override]
        relevance = self.distribute(here, here.stash)
        return here.on_live(grads, lambda g: relevance)

    def before(self, here: Here, s: Tensor) -> Tensor:  # type: ignore[override]
        here.stash, _ = self.relevance(here, s)
        return s

    def distribute(self, here: Here, r: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Flat(_FirstLayerRule):
    """Every input of a unit takes the same (Lapuschkin et al. 2019)."""

    def distribute(self, here: Here, r: Tensor) -> Tensor:
        x, w = (torch.ones_like(factor) for factor in here.factors)
        return here.transposed(r / stabilise(here.product(x, w), self.eps), x, w)


@dataclass(frozen=True)
class WSquare(_FirstLayerRule):
    """Inputs take in proportion to the square of their weight (Montavon et al. 2017)."""

    def needs(self, step: Step) -> Iterable[int]:
        yield from super().needs(step)
        if step.has_bias:
            yield step.bias

    def distribute(self, here: Here, r: Tensor) -> Tensor:
        x, w = here.factors
        x, w = (torch.ones_like(x), w**2) if here.live_factor == 0 else (x**2, torch.ones_like(w))
        d = here.product(x, w)
        if here.step.has_bias:
            d = d + here.bias**2
        return here.transposed(r / stabilise(d, self.eps), x, w)


@dataclass(frozen=True)
class Box(_FirstLayerRule):
    """Inputs lie between low and high (z^B; Montavon et al. 2017). Numbers or nested tuples that broadcast to the input."""

    low: Any = -1.0
    high: Any = 1.0

    def __init__(self, low: Any, high: Any, eps: float = 1e-6, bias: str = "proportional", top: float = 1.0) -> None:
        low, high = (_freeze(v.tolist() if isinstance(v, Tensor) else v) for v in (low, high))
        _set(self, low=low, high=high, eps=eps, bias=bias, top=top)

    def distribute(self, here: Here, r: Tensor) -> Tensor:
        factors = list(here.factors)
        i = here.live_factor
        x, w = factors[i], factors[1 - i]
        low, high = (torch.as_tensor(bound, dtype=x.dtype, device=x.device).expand_as(x) for bound in (self.low, self.high))
        terms = ((x, w, 1), (low, w.clamp(min=0), -1), (high, w.clamp(max=0), -1))

        def ordered(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            return (a, b) if i == 0 else (b, a)

        d = sum(sgn * here.product(*ordered(a, b)) for a, b, sgn in terms)
        u = r / stabilise(d, self.eps)
        return sum(sgn * a * here.transposed(u, *ordered(a, b)) for a, b, sgn in terms)


def _set(rule: _LinearRule, **values: Any) -> None:
    """Initialise a frozen rule whose own parameter comes first."""
    for name, value in values.items():
        object.__setattr__(rule, name, value)
    rule.__post_init__()


def _freeze(value: Any) -> Any:
    return tuple(_freeze(item) for item in value) if isinstance(value, (list, tuple)) else value


# --------------------------------------------------------------------------------------------------- sums and pools


@dataclass(frozen=True)
class AbsoluteShare(Rule):
    """Operands of a sum take |a| / Σ|…| (the paper's add, sub, sum and mean).

    Parameters take their share and keep it, whether or not relevance goes on to an input; literals take none.
    """

    eps: float = 1e-11

    needs_parameters = True

    def needs(self, step: Step) -> Iterable[int]:
        return (OUT, *step.sharers)

    def takes_relevance(self, step: Step) -> bool:
        return True

    def before(self, here: Here, s: Tensor) -> Tensor:  # type: ignore[override]
        values = {i: here.operand(i) for i in here.step.sharers}
        if here.op.weights is not None:
            factors = here.op.weights(here.saved)
            values = {i: value * factors[i] for i, value in values.items()}
            total = sum(value.abs() for value in values.values())
        else:  # a reduction, whose own forward adds up the magnitudes (and divides them as its backward divides s)
            total = here.replay(values[0].abs())
        here.stash = {i: sign(value) for i, value in values.items()}
        return here.relevance(s, here.output) / (total + usable(self.eps, total))

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:  # type: ignore[override]
        return [None if g is None else g * here.stash[i] for i, g in enumerate(grads)]

    def conserves(self, step: Step) -> bool:
        return step.sharers == step.live


@dataclass(frozen=True)
class ProductShare(Rule):
    """Factors of an elementwise product take |a| / (|a| + |b|), and a/b is the product of a and 1/b (the paper's mul, div).

    Factors of a matrix product take half each.
    """

    eps: float = 1e-11

    def needs(self, step: Step) -> Iterable[int]:
        return step.live_factors if step.elementwise else ()

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:  # type: ignore[override]
        if not here.step.elementwise:
            return here.on_live(grads, lambda g: g / len(here.step.live_factors))
        values = {i: here.operand(i) for i in here.step.live_factors}
        first, second = values.values()
        quotient = here.step.name == "Div"
        y = first / second if quotient else first * second
        magnitude = [first.abs(), second.reciprocal().abs() if quotient else second.abs()]
        r = s * y / stabilise(magnitude[0] + magnitude[1], self.eps)
        shares = {i: divide(r * m, v) for (i, v), m in zip(values.items(), magnitude)}
        return [None if g is None else reduce_to(shares[i], g.shape) if i in shares else g for i, g in enumerate(grads)]

    def conserves(self, step: Step) -> bool:
        return True


@dataclass(frozen=True)
class Uniform(Rule):
    """Live factors of a product take equal parts (AttnLRP, eq. 11)."""

    def edits(self, step: Step) -> tuple[bool, bool]:
        # one multiplication beforehand serves both factors, unless something is added to the product
        return (step.live == step.live_factors, step.live != step.live_factors)

    def before(self, here: Here, s: Tensor) -> Tensor:  # type: ignore[override]
        return s / len(here.step.live_factors)

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:  # type: ignore[override]
        return here.on_live(grads, lambda g: g / len(here.step.live_factors))

    def conserves(self, step: Step) -> bool:
        return True


@dataclass(frozen=True)
class UniformPool(Rule):
    """Every element of a window takes the same (the paper's average pool): delivers R."""

    delivers_relevance = True

    def needs(self, step: Step) -> Iterable[int]:
        return (OUT,)

    def takes_relevance(self, step: Step) -> bool:
        return True

    def before(self, here: Here, s: Tensor) -> Tensor:  # type: ignore[override]
        # the native backward of an average spreads evenly
        return here.relevance(s, here.output)

    def conserves(self, step: Step) -> bool:
        return True


@dataclass(frozen=True)
class SignalTakesAll(Rule):
    """The signal takes everything; gates, attention weights and statistics take nothing."""

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:  # type: ignore[override]
        return [g if i == here.step.signal else None for i, g in enumerate(grads)]

    def conserves(self, step: Step) -> bool:
        return True


# --------------------------------------------------------------------------------------------------- the rest


@dataclass(frozen=True)
class Identity(Rule):
    """R_x = R_y: s · f(x)/x, in closed form where there is one, with the limit f'(0) at 0.

    `composites`: does it also hold for activations and normalisations that are written out in primitives?
    """

    composites: bool = True

    def edits(self, step: Step) -> tuple[bool, bool]:
        return False, not (step.op.rectifies and step.form == "s")  # a rectifier's own backward is the identity rule

    def needs(self, step: Step) -> Iterable[int]:
        if step.form == "R" or step.op.ratio is not None:
            return ()
        return (OUT, 0)

    def passes_relevance(self, step: Step) -> bool:
        return True

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:  # type: ignore[override]
        if here.step.form == "R":
            return [None if g is None else s for g in grads[:1]] + grads[1:]
        if here.op.ratio is not None:
            passed = s * here.op.ratio(here.saved)
        else:
            x, y = here.operand(0), here.output
            passed = divide(s * y, x)
            if here.step.kind == "activation":
                passed = torch.where(x == 0, grads[0], passed)  # type: ignore[call-overload]
        return [None if g is None else passed for g in grads[:1]] + grads[1:]

    def conserves(self, step: Step) -> bool:
        return step.kind == "activation"


@dataclass(frozen=True)
class ScaleFixed(Rule):
    """Normalisation with its scale statistic held constant: the mean stays, the standard deviation takes nothing."""

    composites: bool = True

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:  # type: ignore[override]
        assert here.op.fixed is not None
        passed = here.op.fixed(here.saved, s)
        return [None if g is None else passed for g in grads[:1]] + grads[1:]


@dataclass(frozen=True)
class PassScale(Rule):
    """A product with a constant, below a rule that delivers R: relevance passes as it is."""

    def passes_relevance(self, step: Step) -> bool:
        return True

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:  # type: ignore[override]
        return here.on_live(grads, lambda g: reduce_to(s, g.shape))

    def conserves(self, step: Step) -> bool:
        return True


@dataclass(frozen=True)
class Attention(Rule):
    """Fused attention as the products it is made of: `weights` of A·v to A, split between q and k; the rest to v.

    0.5 is AttnLRP; 0 is CP-LRP (queries and keys take nothing). `lost` is what v does not get (the paper: 0.5).
    """

    weights: float = 0.5
    lost: float = 0.0

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:  # type: ignore[override]
        live = here.step.live
        pattern = self.weights if 2 in live else 1.0  # A alone takes all of what is left
        value = 1 - self.lost - (self.weights if any(i != 2 for i in live) else 0.0)
        both = 0.5 if 0 in live and 1 in live else 1.0
        factors = (pattern * both, pattern * both, value, pattern)
        if self.weights == 0 and any(i != 2 for i in live):
            factors = (0.0, 0.0, value, 0.0)
        return [
            None if g is None or factors[i] == 0 else g if factors[i] == 1 else g * factors[i]
            for i, g in enumerate(grads)
        ]


@dataclass(frozen=True)
class Relay(Rule):
    """A batch norm that belongs to the linear map below it: hands down R, which that map's rule takes."""

    delivers_relevance = True

    def needs(self, step: Step) -> Iterable[int]:
        return (OUT,)

    def takes_relevance(self, step: Step) -> bool:
        return True

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:  # type: ignore[override]
        # the output is rebuilt here at the latest: the map below needs it too, and by then this node's values are freed
        r = here.relevance(s, here.output)
        return [None if g is None else r for g in grads[:1]] + grads[1:]

    def conserves(self, step: Step) -> bool:
        return True

"""Rules for operations that pass relevance on: activations, normalisations, attention, scalings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import fused as kernels
from ..ops.normalise import BatchNorm, batch_norm
from .base import OUT, Grads, Hooks, Rule, divide, like, reduce_to, sign, stabilise, usable

if TYPE_CHECKING:
    from ..here import Here
    from ..ops import Op
    from ..saved import Saved
    from ..step import Step


def _first_only(grads: Grads, passed: Tensor) -> Grads:
    """All to the first operand; parameters of the function take nothing."""
    return [None if g is None or i > 0 else passed for i, g in enumerate(grads)]


def _given(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad


@dataclass(frozen=True)
class Identity(Rule):
    """R_x = R_y: s · f(x)/x, in closed form where there is one, with the limit f'(0) at 0.

    `composites`: does it also hold for activations and normalisations that are written out in primitives?
    """

    composites: bool = True
    eps: float = 0.0  # stabilises f(x)/x where there is no closed form

    kinds = frozenset({"activation", "function", "normalise", "batchnorm", "softmax", "scale"})

    def edits(self, step: Step) -> tuple[bool, bool]:
        return False, not (step.op.rectifies and step.form == "s")  # a rectifier's own backward is the identity rule

    def needs(self, step: Step) -> Iterable[int]:
        return () if step.form == "R" or self._closed(step) else (OUT, 0)

    def _closed(self, step: Step) -> bool:
        """Does the node keep all that f(x)/x is made of?"""
        return step.op.ratio is not None or bool(self.eps and step.op.quotient is not None)

    def passes_relevance(self, step: Step) -> bool:
        return True

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        if here.step.form == "R":
            return _first_only(grads, s)
        closed = self._closed(here.step)
        passed = self._pass(here.op, here.saved, s, here.batched) if closed else self._quotient(here, grads, s)
        return _first_only(grads, passed)

    def _pass(self, op: Op, saved: Saved, s: Tensor, batched: bool = False) -> Tensor:
        """s · f(x)/x, from what the node saved."""
        numbers: dict[str, Any] = {} if op.quotient is None else {"eps": usable(self.eps, s)}
        if op.fused is not None and not batched and kernels.serves(s):
            name, *values = op.fused(saved) or (None,)
            dtype = s.dtype
            own = values.pop() if values and isinstance(values[-1], dict) else {}
            if name is not None and all(value.dtype == dtype for value in values):
                return kernels.launcher(name, **numbers, **own)(s, *values)
        factor: Any = op.quotient or op.ratio
        return s * factor(saved, **numbers)

    def _quotient(self, here: Here, grads: Grads, s: Tensor) -> Tensor:
        """s · f(x)/x, from x and f(x)."""
        x, y = here.operand(0), here.output
        limit, made = here.step.kind == "activation", None
        if limit and not self.eps:
            made = here.fused("identity_limit", s, x, y, _given(grads[0]))
        elif self.eps and not limit:
            made = here.fused("identity", s, x, y, eps=usable(self.eps, s))
        if made is not None:
            return made
        passed = self._divide(s * y.conj(), x.conj()) if x.is_complex() else self._divide(s * y, x)
        return torch.where(x == 0, _given(grads[0]), passed) if limit else passed

    def direct(self, step: Step) -> Callable[[Saved, Tensor], Tensor] | None:
        return partial(self._pass, step.op) if self._closed(step) else None

    def _divide(self, numerator: Tensor, x: Tensor) -> Tensor:
        return numerator / stabilise(x, self.eps) if self.eps else divide(numerator, x)

    def conserves(self, step: Step) -> bool:
        return step.kind == "activation" and step.live == (0,)


@dataclass(frozen=True)
class FunctionShare(Identity):
    """A function with f(0) ≠ 0 is f(0) + (f(x) - f(0)): the constant takes its absolute share and keeps it, as a bias does.

    s_x = s · (f(x) - f(0))/x · y·sgn(f(x) - f(0)) / (|f(0)| + |f(x) - f(0)| + eps). Since |y| is at most that sum, it never
    exceeds s times the secant's slope, whereas the identity rule's f(x)/x has no bound at 0: a sigmoid gate that is
    undecided would make relevance explode. Where f(0) is 0, infinite or unknown: the identity rule.
    """

    composites: bool = False
    eps: float = 1e-11

    kinds = frozenset({"function"})

    def needs(self, step: Step) -> Iterable[int]:
        closed = step.op.forward is None or step.op.ratio is not None  # which have no f(0)
        return super().needs(step) if closed else (OUT, 0)

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        if here.op.forward is None or here.op.ratio is not None or s.is_complex():  # a complex number has no sign
            return super().after(here, grads, s)
        constant = here.replay(torch.zeros((), dtype=torch.float64))
        if constant.dim() or constant.device.type != "cpu":  # a function of more than its input, such as a parameter
            known = constant.isfinite() & (constant != 0)
            shared = self._share(here, _given(grads[0]), s, torch.where(known, constant, 0).to(s.dtype))
            return _first_only(grads, torch.where(known, shared, _given(super().after(here, grads, s)[0])))
        c = float(constant)
        if c == 0 or not math.isfinite(c):
            return super().after(here, grads, s)
        return _first_only(grads, self._share(here, _given(grads[0]), s, c))

    def _share(self, here: Here, g: Tensor, s: Tensor, c: Any) -> Tensor:
        """What x takes, of a function with f(0) = c."""
        x, y = here.operand(0), here.output
        # near 0 the secant is the tangent, and rounding would spoil the difference
        eps, close = usable(self.eps, s), torch.finfo(x.dtype).eps ** 0.5
        of_relevance, made = here.step.form == "R", None
        if isinstance(c, float) and of_relevance:
            made = here.fused("function_share_of_relevance", s, y, c=c, eps=eps)
        elif isinstance(c, float):
            made = here.fused("function_share", s, g, x, y, c=c, eps=eps, close=close)
        if made is not None:
            return made
        rest = y - c
        total = rest.abs() + (abs(c) + eps)
        if of_relevance:
            return s * rest.abs() / total
        slope = torch.where(x.abs() < close, g, s * rest / torch.where(x == 0, 1, x))
        return slope * y * sign(rest) / total


@dataclass(frozen=True)
class NormShare(Identity):
    """The identity rule, but an RMSNorm in one node, as on a GPU, is what it is elsewhere: y = w · x · r, with r = 1/rms(x).

    The factors take |x| / (|x| + |r| + eps) and |r| / (|x| + |r| + eps), and r hands its own to the x² it is made of:
    R_x = R · |x| / (|x| + |r| + eps) + x²/Σx² · Σ R · |r| / (|x| + |r| + eps).
    Where relevance of w is asked for too, it and x · r take their shares first.
    """

    composites: bool = False
    eps: float = 1e-11

    kinds = frozenset({"normalise"})

    def needs(self, step: Step) -> Iterable[int]:
        return () if step.op.root is not None else super().needs(step)

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        if here.op.root is None:
            return super().after(here, grads, s)
        step = here.step
        if 1 not in step.live:
            return _first_only(grads, self._shares(step, here.saved, s))
        assert here.op.root is not None
        x, r, weight = here.op.root(here.saved)
        if 0 not in step.live:  # linear in w
            return [None, reduce_to(s, _given(weight).shape) if step.form == "R" else grads[1]]
        normed, weight = x.to(r.dtype) * r, _given(weight)
        unit = s.to(r.dtype) / (normed.abs() + weight.abs() + usable(self.eps, r))
        if step.form == "R":
            of_normed, of_weight = unit * normed.abs(), unit * weight.abs()
        else:
            of_normed, of_weight = unit * normed.abs() * weight, unit * weight.abs() * normed
        return [self._through_root(step, x.to(r.dtype), r, of_normed), reduce_to(of_weight, weight.shape)]

    def direct(self, step: Step) -> Callable[[Saved, Tensor], Tensor] | None:
        return super().direct(step) if step.op.root is None else partial(self._shares, step)

    def _shares(self, step: Step, saved: Saved, s: Tensor) -> Tensor:
        assert step.op.root is not None
        x, r, weight = step.op.root(saved)
        given = s.to(r.dtype)
        return self._through_root(
            step, x.to(r.dtype), r, given if weight is None or step.form == "R" else given * weight
        )

    def _through_root(self, step: Step, x: Tensor, r: Tensor, given: Tensor) -> Tensor:
        """What x takes of what arrives at x · r."""
        magnitude = x.abs()
        if step.form == "R":
            unit = given / (magnitude + r + usable(self.eps, r))
            through, part = reduce_to(unit, r.shape) * r, x * x
            return magnitude * unit + part / reduce_to(part, r.shape).clamp_min(usable(self.eps, r)) * through
        unit = given * r / (magnitude + r + usable(self.eps, r))
        through = reduce_to(unit * x, r.shape) * r
        return magnitude * unit + x * (through / reduce_to(x * x, r.shape).clamp_min(usable(self.eps, r)))

    def conserves(self, step: Step) -> bool:
        return step.op.root is not None and step.live == (0,)


@dataclass(frozen=True)
class ScaleFixed(Rule):
    """Normalisation with its scale statistic held constant: the mean stays, the standard deviation takes nothing."""

    composites: bool = True

    kinds = frozenset({"normalise"})

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        assert here.op.fixed is not None
        if grads[0] is not None:
            grads[0] = here.op.fixed(here.saved, s)
        return grads

    def direct(self, step: Step) -> Callable[[Saved, Tensor], Tensor] | None:
        return step.op.fixed

    def blanks(self, step: Step) -> tuple[str, ...]:
        return step.op.blank


@dataclass(frozen=True)
class PassScale(Rule):
    """A product with a constant, below a rule that delivers R: relevance passes as it is."""

    def passes_relevance(self, step: Step) -> bool:
        return True

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        return here.on_live(grads, lambda g: reduce_to(s, g.shape))

    def conserves(self, step: Step) -> bool:
        return True


@dataclass(frozen=True)
class Carry(Rule):
    """A fixed linear map: the values that go through carry all relevance; what only steers them (a grid) takes none."""

    kinds = frozenset({"transform"})

    def _steering(self, step: Step) -> tuple[int, ...]:
        carriers = step.op.carriers
        if carriers is None or not any(i in carriers for i in step.live):
            return ()
        return tuple(i for i in step.live if i not in carriers)

    def edits(self, step: Step) -> tuple[bool, bool]:
        return False, bool(self._steering(step))

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        steering = self._steering(here.step)
        return [None if i in steering else g for i, g in enumerate(grads)]

    def conserves(self, step: Step) -> bool:
        return step.homogeneous


@dataclass(frozen=True)
class Affine(Rule):
    """Batch norm in eval mode, y = scale·x + shift (the shift holds the running mean and the bias).

    `bias` says what the shift takes. "proportional": its part of y, so x gets the affine map's own backward.
    "absolute": |shift| / (|scale·x| + |shift|), as it does behind a linear map under `Epsilon(bias="absolute")`, so
    s_x = s·y·sgn(x)·|scale| / (|scale·x| + |shift| + eps). Since |y| ≤ |scale·x| + |shift|, that never exceeds the
    gradient, whereas the identity rule's s·y/x has no bound where a convolution's output is near 0.

    `below`: the eps of the epsilon rule of the linear map that made x, which is done here as well (see `choose.merge`).
    """

    bias: str = "proportional"
    eps: float = 0.0
    below: float = 0.0

    kinds = frozenset({"batchnorm"})

    def __post_init__(self) -> None:
        if self.bias not in ("proportional", "absolute"):
            raise ValueError(f"Affine(bias={self.bias!r}): expected 'proportional' or 'absolute'")

    @property
    def needs_parameters(self) -> bool:  # type: ignore[override]
        return self.bias == "absolute"

    @property
    def device(self) -> str | None:  # type: ignore[override]
        return "cpu" if self.bias == "proportional" else None

    def needs(self, step: Step) -> Iterable[int]:
        return () if self.bias == "proportional" else (0, 2)

    def takes_relevance(self, step: Step) -> bool:
        return self.bias == "absolute"

    def early(self, here: Here) -> None:
        if self.bias == "absolute":
            here.stash = self._channels(here)

    def _channels(self, here: Here) -> tuple[BatchNorm, list[Tensor] | None]:
        """The norm, and what a kernel takes of it."""
        norm, bias, rank = batch_norm(here.saved), here.operand(2), here.operand(0).dim()
        if norm.weight is None or bias is None or not here.serves(bias):
            return norm, None
        shape = (1, -1, *[1] * (rank - 2))
        return norm, [t.view(*shape) for t in (norm.weight, bias, norm.mean, norm.var)]

    def short(self, here: Here) -> Hooks | None:
        if self.bias == "proportional" or not here.kernels or here.step.multiply or here.step.live != (0,):
            return None
        norm, values = here.stash
        if values is None:
            return None
        rule, held, text = self, [here], here.times("y")
        dtype = values[0].dtype
        name, numbers = self._kernel(norm, values[0])
        if any(t.dtype != dtype for t in values):
            return None

        def after(grads: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> Any:
            s = incoming[0]
            if s is None:
                return None
            here = held.pop()
            x = here.operand(0)
            if s.dtype == dtype and x.dtype == dtype:
                return (kernels.launcher(name, text, **numbers)(s, x, *values), *grads[1:])
            return (like(rule.after(here, list(grads), s)[0], grads[0]), *grads[1:])

        return None, after

    def _kernel(self, norm: BatchNorm, sample: Tensor) -> tuple[str, dict[str, float]]:
        """Its name and its numbers, for tensors like this one."""
        numbers = {"eps": norm.eps, "stable": usable(self.eps, sample)}
        if not self.below:
            return "affine_absolute", numbers
        return "affine_absolute_epsilon", numbers | {"below": usable(self.below, sample)}

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        shape = (1, -1, *[1] * (s.dim() - 2))
        if self.bias == "proportional":
            # torch's CPU kernel takes strides for a memory format, which a size of 1 leaves open, and reads wrongly
            native = grads[0]
            if native is None or 1 not in s.shape or (s.is_contiguous() and native.is_contiguous()):
                return grads
            return [s * batch_norm(here.saved).scale.reshape(shape), *grads[1:]]
        x, bias = here.operand(0), here.operand(2)
        norm, values = here.stash or self._channels(here)
        if values is not None and all(g is None for g in grads[1:]):
            name, numbers = self._kernel(norm, s)
            made = here.fused(name, s, x, *values, text=here.times("y"), **numbers)
            if made is not None:
                return [made, *grads[1:]]
        shift = -norm.mean * norm.scale if bias is None else bias - norm.mean * norm.scale
        scale, shift = norm.scale.reshape(shape), shift.reshape(shape)
        product = x * scale
        total = product.abs() + shift.abs()
        unit = here.relevance(s, product + shift) / (total + usable(self.eps, total))
        share = unit * sign(x) * scale.abs()
        if self.below:
            share = share / (usable(self.below, s) / x.abs()).add_(1)
        shares: Grads = [None if grads[0] is None else share]
        if len(grads) > 1:  # a parameter takes a share of a sum, not of a product
            shares += [
                None,
                None if grads[2] is None else reduce_to(unit * sign(shift), shift.shape).reshape(grads[2].shape),
            ]
        return shares


@dataclass(frozen=True)
class Attention(Rule):
    """Fused attention as the products it is made of: `weights` of A·v to A, split between q and k; the rest to v.

    0.5 is AttnLRP; 0 is CP-LRP (queries and keys take nothing). `lost` is what v does not get (the paper: 0.5).
    """

    weights: float = 0.5
    lost: float = 0.0

    looks = False
    kinds = frozenset({"attention"})

    def _factor(self, step: Step, position: int) -> float:
        """What an operand gets of its own gradient; those beside query, key and value are added to the pattern."""
        query, key, value = step.op.factors if len(step.op.factors) == 3 else (0, 1, 2)
        if value not in step.live:  # a product with one live factor: all to the pattern
            pattern, values = 1.0, 0.0
        elif step.live == (value,):  # all to the values
            pattern, values = 0.0, 1.0
        else:
            pattern, values = self.weights, 1 - self.weights - self.lost
        if position == value:
            return values
        both = query in step.live and key in step.live
        return pattern / 2 if both and position in (query, key) else pattern

    def scales(self, step: Step) -> dict[int, float]:
        return {i: self._factor(step, i) for i in step.live}

    prepare = scales

    def edits(self, step: Step) -> tuple[bool, bool]:
        return False, any(factor != 1 for factor in self.scales(step).values())

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        return here.scaled(grads, here.step.prepared)

    def blocks(self, step: Step) -> Iterable[int]:
        return [i for i in step.live if self._factor(step, i) == 0]


@dataclass(frozen=True)
class Folded(Affine):
    """A batch norm that belongs to the linear map below it, whose rule begins above it."""

    def passes_relevance(self, step: Step) -> bool:
        return True

    def conserves(self, step: Step) -> bool:
        return True

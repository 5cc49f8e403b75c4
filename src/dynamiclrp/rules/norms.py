"""Rules of normalisations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import fused as kernels
from ..ops.normalise import BatchNorm, batch_norm
from .base import Grads, Hooks, Rule, first_only, given, like, reduce_to, sign, usable
from .passing import Identity

if TYPE_CHECKING:
    from ..here import Here
    from ..saved import Saved
    from ..step import Step


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
            return first_only(grads, self._shares(step, here.saved, s))
        assert here.op.root is not None
        x, r, weight = here.op.root(here.saved)
        if 0 not in step.live:  # linear in w
            return [None, reduce_to(s, given(weight).shape) if step.form == "R" else grads[1]]
        normed, weight = x.to(r.dtype) * r, given(weight)
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
class Folded(Affine):
    """A batch norm that belongs to the linear map below it, whose rule begins above it."""

    def passes_relevance(self, step: Step) -> bool:
        return True

    def conserves(self, step: Step) -> bool:
        return True

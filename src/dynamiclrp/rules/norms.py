"""Rules of normalisations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..kernel import formula, sgn
from ..ops.normalise import batch_norm
from .base import Grads, Rule, first_only, given, reduce_to, usable
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


@formula
def _affine(s: Any, x: Any, scale: Any, shift: Any, *, eps: float, coefficients: bool) -> Any:
    """What x takes of y = scale·x + shift."""
    product = scale * x
    r = s * (product + shift) if coefficients else s
    return r / (abs(product) + (abs(shift) + eps)) * sgn(x) * abs(scale)


@dataclass(frozen=True)
class Affine(Rule):
    """Batch norm in eval mode, y = scale·x + shift (the shift holds the running mean and the bias).

    `bias` says what the shift takes. "proportional": its part of y, so x gets the affine map's own backward.
    "absolute": |shift| / (|scale·x| + |shift|), as it does behind a linear map under `Epsilon(bias="absolute")`, so
    s_x = s·y·sgn(x)·|scale| / (|scale·x| + |shift| + eps). Since |y| ≤ |scale·x| + |shift|, that never exceeds the
    gradient, whereas the identity rule's s·y/x has no bound where a convolution's output is near 0.
    """

    bias: str = "proportional"
    eps: float = 0.0

    kinds = frozenset({"batchnorm"})

    def __post_init__(self) -> None:
        if self.bias not in ("proportional", "absolute"):
            raise ValueError(f"Affine(bias={self.bias!r}): expected 'proportional' or 'absolute'")

    @property
    def needs_parameters(self) -> bool:  # type: ignore[override]
        return self.bias == "absolute"

    def needs(self, step: Step) -> Iterable[int]:
        return () if self.bias == "proportional" else (0, 2)

    def takes_relevance(self, step: Step) -> bool:
        return self.bias == "absolute"

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        shape = (1, -1, *[1] * (s.dim() - 2))
        if self.bias == "proportional":
            # torch's CPU kernel takes strides for a memory format, which a size of 1 leaves open, and reads wrongly
            native = grads[0]
            if native is None or native.is_cuda or 1 not in s.shape or (s.is_contiguous() and native.is_contiguous()):
                return grads
            return [s * batch_norm(here.saved).scale.reshape(shape), *grads[1:]]
        norm, x = batch_norm(here.saved), here.operand(0)
        scale, shift = norm.scale.reshape(shape), norm.shift(here.operand(2)).reshape(shape)
        eps = usable(self.eps, s)
        share = None if grads[0] is None else _affine(s, x, scale, shift, eps=eps, coefficients=here.carries_s)
        if all(g is None for g in grads[1:]):
            return [share, *grads[1:]]
        # a parameter takes a share of a sum, not of a product
        product = scale * x
        unit = here.relevance(s, product + shift) / (product.abs() + shift.abs() + eps)
        of_bias = None if grads[2] is None else reduce_to(unit * sgn(shift), shift.shape).reshape(grads[2].shape)
        return [share, None, of_bias]


@dataclass(frozen=True)
class Folded(Rule):
    """A batch norm that is part of the linear map below it: what arrives goes on to that map, whose output is the norm's."""

    kinds = frozenset({"batchnorm"})

    def after(self, here: Here, grads: Grads, s: Tensor) -> Grads:
        return first_only(grads, s)

    def passes_relevance(self, step: Step) -> bool:
        return True

    def conserves(self, step: Step) -> bool:
        return True

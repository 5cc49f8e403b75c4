"""The rules on signed parts of linear maps as two short hooks, where there are kernels.

What `linear` says at length, with all that can be decided decided before relevance moves: at small batches Python is
most of what these rules cost. In: a node as its rule sees it, and the rule's formula. Out: its hooks, or None where the long
form has to do it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..fused import FORMULAS, launcher
from .base import OUT, Hooks, usable

if TYPE_CHECKING:
    from ..here import Here


def signed_hooks(here: Here, formula: str, eps: float, times: float = 1.0) -> Hooks | None:
    """Hooks of the rule that makes `formula` of what arrives, of z and of q = times · (|x|·|W| + |b|), stabilised by eps.

    The first result goes back through W, the last one through times · |W| and sgn(x).
    """
    step = here.step
    w = here.at_hand(step.factors[1 - step.live_factor])
    if w is None or not here.serves(w) or step.convert or here.wants_bias or here.gain != 1 or here.pieces:
        return None
    if step.flat:
        return _flat_hooks(here, w, formula, eps, times)
    if step.added is not None and here.shift.dim() > 1:  # it would have to be spread over the output, too early
        return None
    own: list[Tensor] = []  # beside w
    spread: list[Tensor] = []  # beside what arrives, z and q
    numbers: dict[str, Any] = {}
    suffix, norm = "", here.norm
    if norm is not None:
        if norm.weight is None or here.shift is None:
            return None
        filters, mean, bias = here.filters, norm.mean, here.own_bias
        own = [t.view(filters) for t in (norm.weight, norm.var)]
        spread = here.spread(here.shift, mean if bias is None else mean - bias, norm.weight, norm.var)
        suffix, numbers = "_normed" if step.normed and bias is None else "_folded", {"times": times, "eps": norm.eps}
    elif step.has_bias:
        suffix, numbers, spread = "_bias", {"times": times}, [here.bias]
    # what is added elsewhere may be of another dtype
    if step.top != step.node and (here.top_dtype != w.dtype or any(t.dtype != w.dtype for t in spread)):
        return None
    combine = launcher(formula + suffix, here.times("z"), plus=usable(eps, w), **numbers)
    name = "both" if step.alike else "absolute"
    if own:
        weigh = launcher(name + "_folded", **numbers)
    else:
        weigh = torch.abs if times == 1 and not step.alike else launcher(name, times=times)
    made = _Signed(here, weigh, own, combine, spread, len(FORMULAS[formula].outputs), suffix == "_normed")
    return made.before, made.after


def _flat_hooks(here: Here, w: Tensor, formula: str, eps: float, times: float) -> Hooks:
    """The same for one matrix of signals times one of weights, which every layer of a transformer has six of."""
    step = here.step
    bias = None
    if step.has_bias:
        bias = here.operand(step.bias) if here.linear.factor(here.saved) == 1 else here.bias
    weigh = torch.abs if times == 1 else launcher("absolute", times=times)
    if bias is None:
        combine = launcher(formula, here.times("z"), plus=usable(eps, w))
    else:
        combine = launcher(formula + "_bias", here.times("z"), plus=usable(eps, w), times=times)
    made = _Flat(here, bias, weigh, combine, len(FORMULAS[formula].outputs) == 2)
    return made.before, made.after


class _Flat:
    """Before and after the native backward of one product of matrices, once."""

    __slots__ = ("_bias", "_combine", "_held", "_kept", "_two", "_weigh")

    def __init__(self, here: Here, bias: Tensor | None, weigh: Any, combine: Any, two: bool) -> None:
        self._held: Here | None = here  # let go as soon as it has been used
        self._bias, self._weigh, self._combine, self._two = bias, weigh, combine, two
        self._kept: Any = None  # from `before` to `after`

    def before(self, grads: tuple[Tensor | None, ...]) -> Any:
        s, here = grads[0], self._held
        if s is None or here is None:
            return None
        self._held, step = None, here.step
        signal, weight = step.factors
        z, x, magnitude = here.operand(OUT), here.operand(signal), self._weigh(here.operand(weight))
        q = torch.mm(x if step.nonnegative else here.absolute(signal), magnitude)
        made = self._combine(s, z, q) if self._bias is None else self._combine(s, z, q, self._bias)
        u, v = made if self._two else (made, made)
        self._kept = step, x, v, magnitude
        return (u, *grads[1:])

    def after(self, grads: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> Any:
        if self._kept is None:
            return None
        (step, x, v, magnitude), self._kept = self._kept, None
        position = step.factors[0]
        g = grads[position]
        if g is None:
            return None
        more = torch.mm(v, magnitude.mT)
        g = more.add_(g) if step.nonnegative else launcher("add_signed")(g, more, x)
        made = list(grads)
        made[position] = g * x if step.multiply else g
        return tuple(made)


class _Signed:
    """Before and after the native backward of one linear map of any other kind, once."""

    __slots__ = (
        "_combine",
        "_held",
        "_kept",
        "_linear",
        "_normed",
        "_own",
        "_results",
        "_saved",
        "_spread",
        "_step",
        "_weigh",
    )

    def __init__(
        self, here: Here, weigh: Any, own: list[Tensor], combine: Any, spread: list[Tensor], results: int, normed: bool
    ) -> None:
        self._held: Here | None = here  # let go as soon as it has been used
        self._linear, self._saved, self._step = here.linear, here.saved, here.step
        self._weigh, self._own, self._combine, self._spread, self._results = weigh, own, combine, spread, results
        self._normed = normed  # does the formula take what goes into the batch norm for z?
        self._kept: Any = None  # from `before` to `after`

    def before(self, grads: tuple[Tensor | None, ...]) -> Any:
        s, here, step = grads[0], self._held, self._step
        if s is None or here is None:
            return None
        self._held, live = None, step.live_factor
        z = here.operand(OUT) if self._normed else here.output
        x, w = here.operand(step.factors[live]), here.operand(step.factors[1 - live])
        magnitude = self._weigh(w, *self._own)
        total, replaced = None, False
        if step.alike:
            magnitude, total = magnitude
            replaced = here.replace(total)
        absolute = x if step.nonnegative else here.absolute(step.factors[live])
        q = self._linear.product(self._saved, *((absolute, magnitude) if live == 0 else (magnitude, absolute)))
        made = self._combine(s, z, q, *self._spread)
        u, v = made if self._results == 2 else (made, made)
        if not replaced or step.multiply:
            self._kept = x, v, magnitude if total is None else total, replaced
        return (u, *grads[1:])

    def after(self, grads: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> Any:
        step = self._step
        live = step.live_factor
        position = step.factors[live]
        g = grads[position]
        if g is None or self._kept is None:
            return None
        (x, v, w, replaced), self._kept = self._kept, None
        if not replaced:
            more = self._linear.transposed(self._saved, live, v, *((x, w) if live == 0 else (w, x)))
            if step.alike:
                g = more  # by W + |W|, all of it
            elif step.nonnegative:
                g = more.add_(g)
            else:
                g = launcher("add_signed")(g, more, x)
        made = list(grads)
        made[position] = g * x if step.multiply else g
        return tuple(made)

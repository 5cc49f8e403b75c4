"""What a rule sees of the node that it is applied to: values, the linear map with its batch norm folded in, kernels.

It fetches and computes, and knows no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

from .fused import fused, serves
from .ops.normalise import batch_norm
from .rules.base import OUT, Grads, reduce_to, sign
from .saved import Saved, output_shape, output_sizes
from .step import FOLD_BIAS, Step
from .values import Values

# Elements of a weight whose magnitudes are taken at once. More would be most of the memory of a call, and on a CPU slower
# than a cache that holds them; fewer would be small products and many launches. The second: beside few rows, where a weight
# is all there is.
_PIECE = {"cpu": (1 << 22, 1 << 22)}
_PIECE_ELSEWHERE = (1 << 24, 1 << 23)
_MANY = 64  # rows are few where a weight has so many times the output's elements


class Here:
    """What a rule sees of the node that it is applied to, while it is applied."""

    stash: Any = None  # from `before` to `after`
    bias_coefficient: Tensor | None = None  # likewise, at the output's shape
    ratio: float = 1.0  # likewise, what magnitudes have to be multiplied by
    _sum: Tensor | None = None  # W + |W|, where one product serves for both
    _replaced = False  # and the native backward multiplies by it

    def __init__(self, step: Step, values: Values) -> None:
        self.step, self.op, self._values = step, step.op, values
        self.linear: Any = step.op.linear  # a LinearMap; rules of other operations do not ask for it
        self._operands: dict[int, Any] = {}  # and other values that the rule needs, by position
        # the batch norm that is folded in, whose turn it is: after it what it saved is freed
        self.norm = None if step.fold is None else batch_norm(values.saved(step.fold))

    @cached_property
    def saved(self) -> Saved:
        return self._values.saved(self.step.node)

    def fetch(self) -> Here:
        """Take the values that are at hand. Before relevance moves, one node after the other, it costs a third."""
        ready, loose = self._values.ready, self.step.loose
        for position, place in self.step.places.items():
            if isinstance(place, str):
                self._operands[position] = getattr(self.saved, place)
            elif place in ready and position not in loose:
                self._operands[position] = self._values.take(place)
        self.step.rule.early(self)
        return self

    @cached_property
    def output(self) -> Tensor:
        """The node's output (of the folded batch norm or the sum that adds the bias, where there is one)."""
        value = self.operand(OUT)
        if self.norm is not None and self.step.normed:
            return self.norm(value, self.shift)
        if self.step.added is None:
            return value
        _, own = self._alphas
        return (value if own == 1 else value / own).reshape(self.saved.shape)

    def at_hand(self, position: int) -> Any:
        """A value that the rule needs, if it takes neither time nor memory."""
        return self._operands.get(position)

    def operand(self, position: int) -> Any:
        """A value that the rule needs."""
        if position not in self._operands:
            place = self.step.places[position]
            value = getattr(self.saved, place) if isinstance(place, str) else self._values.take(place)
            self._operands[position] = self._flat(position, value) if position in self.step.loose else value
        return self._operands[position]

    def _flat(self, position: int, value: Tensor) -> Tensor:
        """The signal or the output of a product of two matrices, in their shape."""
        weight = self.at_hand(self.step.factors[1])
        if weight is None:
            return value.reshape(output_sizes(self.saved.node, 0))
        return value.reshape(-1, weight.shape[1 if position == OUT else 0])

    def absolute(self, position: int) -> Tensor:
        """The magnitude of a value, made once for all maps of it."""
        value, place = self.operand(position), self.step.places[position]
        if isinstance(place, str):
            return torch.abs(value)
        made = self._values.absolute(place, value)
        return made if made.shape == value.shape else made.reshape(value.shape)

    @property
    def top_dtype(self) -> torch.dtype:
        """The dtype of that output."""
        return self._values.saved(self.step.top).dtype

    @property
    def carries_s(self) -> bool:
        """Does the rule get a coefficient, not relevance?"""
        return self.step.form == "s" or self.step.convert

    def relevance(self, s: Tensor, output: Tensor) -> Tensor:
        """What arrives, as relevance."""
        return s * output if self.carries_s else s

    def times(self, output: str) -> str:
        """How a formula makes relevance of what arrives."""
        return f"* {output}" if self.carries_s else ""

    def replay(self, *operands: Tensor | None) -> Tensor:
        """The node's own forward on other operands."""
        assert self.op.forward is not None
        return self.op.forward(self.saved, *operands)

    @property
    def batched(self) -> bool:
        """Do several relevances pass at once, in a dimension that only torch knows of?"""
        return self._values.batched

    @property
    def kernels(self) -> bool:
        """Are there kernels where this graph ends?"""
        return self.serves(self._values.outputs[0])

    def serves(self, tensor: Tensor) -> bool:
        """Are there kernels for such a tensor?"""
        return not self._values.batched and serves(tensor)

    def fused(self, name: str, *tensors: Tensor, text: str = "", **numbers: float) -> Any:
        """The formula of that name in one kernel; None, where there is none for these tensors."""
        return None if self._values.batched else fused(name, *tensors, text=text, **numbers)

    def on_live(self, grads: Grads, edit: Callable[[Tensor], Tensor]) -> Grads:
        """Edit what goes to the live operands (of a product or linear map: to its live factors)."""
        live = self.step.live_factors
        return [edit(g) if g is not None and i in live else g for i, g in enumerate(grads)]

    def scaled(self, grads: Grads, factors: Mapping[int, float]) -> Grads:
        """Multiply by the factors, in one launch; operands without one keep what they have, a factor of 0 leaves nothing."""
        places, found, by = list[int](), list[Tensor](), list[float]()
        for i, factor in factors.items():
            g = grads[i]
            if factor == 0:
                grads[i] = None
            elif factor != 1 and g is not None:
                places.append(i)
                found.append(g)
                by.append(factor)
        if self._values.batched:  # which several tensors at once are not
            made: Sequence[Tensor] = [g * factor for g, factor in zip(found, by)]
        elif not found or self.op.fresh:
            if found:
                torch._foreach_mul_(found, by)
            return grads
        else:
            made = torch._foreach_mul(found, by)
        for i, g in zip(places, made):
            grads[i] = g
        return grads

    # Linear maps, with a batch norm folded in where there is one ---------------------------------------------------

    @cached_property
    def gain(self) -> float:
        return 1 if self.linear.gain is None else self.linear.gain(self.saved)

    @property
    def wants_bias(self) -> bool:
        """Was relevance of the bias itself asked for?"""
        return self.step.bias in self.step.live

    @cached_property
    def factors(self) -> tuple[Tensor, Tensor]:
        """Signal and weight in the operation's order."""
        x, w = (self.operand(position) for position in self.step.factors)
        if self.gain != 1:  # it belongs to the weight
            x, w = (x, w * self.gain) if self.step.live_factor == 0 else (x * self.gain, w)
        if self.norm is not None:
            w = w * self.norm.scale.reshape(self.filters)
        return x, w

    @property
    def filters(self) -> tuple[int, ...]:
        """The shape in which one number per output channel can be broadcast to the weight."""
        return self.linear.channels(self.saved)

    @cached_property
    def channel_bias(self) -> Tensor:
        """What the map adds, one number per output channel (or a tensor of the output's shape)."""
        if self.step.added is not None:
            return self._added_bias()
        own = self.own_bias
        if self.norm is None:
            assert own is not None
            return own
        mean, scale, shift = self.norm.mean, self.norm.scale, self.shift
        mean = mean if own is None else mean - own
        return -mean * scale if shift is None else torch.addcmul(shift, mean, scale, value=-1)

    @cached_property
    def own_bias(self) -> Tensor | None:
        """What the map itself adds."""
        own = self.operand(self.step.bias) if self.linear.bias in self.step.places else None
        factor = self.linear.factor(self.saved)
        return own if own is None or factor == 1 else own * factor

    @cached_property
    def shift(self) -> Any:
        """What the folded batch norm, or the sum above, adds."""
        return self.operand(FOLD_BIAS)

    @cached_property
    def below_bias(self) -> Tensor | None:
        """What the linear map adds whose rule is done with this sum's; None, where it takes no share of its own."""
        if self.step.below is None or not self.step.has_bias:
            return None
        node, _ = self.step.below
        bias, factor = self.operand(FOLD_BIAS), self._values.graph.op(node).linear.factor(self._values.saved(node))
        return bias if factor == 1 else bias * factor

    @property
    def _alphas(self) -> tuple[float, float]:
        """What the sum above multiplies the bias and the map's output by."""
        assert self.step.added is not None
        node, position = self.step.added
        weights = self._values.graph.op(node).weights(self._values.saved(node))
        return weights[position], weights[1 - position]

    def _added_bias(self) -> Tensor:
        """What the sum above adds, broadcastable to the map's own output."""
        assert self.step.added is not None
        node, _ = self.step.added
        bias, shape = self.operand(FOLD_BIAS), self.saved.shape
        factor, own = self._alphas
        bias = bias if factor == own else bias * (factor / own)
        if bias.dim() <= 1 and bias.shape[-1:] == shape[-1:]:
            return bias
        return bias.expand(output_shape(self._values.graph.handles[node], 0)).reshape(shape)

    @cached_property
    def bias(self) -> Tensor:
        """What the map adds, broadcastable to its output."""
        (bias,) = self.spread(self.channel_bias)
        return bias

    def spread(self, *channels: Tensor) -> list[Tensor]:
        """What has one number per output channel, broadcastable to the output."""
        if self.linear.spread is None:
            return list(channels)
        shape = self.linear.spread(self.saved)
        return [tensor.reshape(shape) for tensor in channels]

    def reduce_to_bias(self, coefficient: Tensor, relevance: bool) -> Tensor:
        """The bias' own coefficient (or relevance), from one at the output's shape."""
        bias = self.operand(self.step.bias)
        factor = torch.ones_like(bias) * self.linear.factor(self.saved)
        if self.norm is not None:
            factor = factor * self.norm.scale
        (factor,) = self.spread(factor)
        factor = torch.ones_like(factor) if relevance else factor
        return reduce_to(coefficient * factor, factor.shape).reshape(bias.shape)

    def product(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        dtype = x.dtype
        if w.dtype != dtype or (bias is not None and bias.dtype != dtype):
            x, w, *rest = _same_dtype(x, w, *(() if bias is None else (bias,)))
            bias = rest[0] if rest else None
        return self.linear.product(self.saved, x, w, bias)

    def transposed(self, u: Tensor, x: Tensor, w: Tensor) -> Tensor:
        if not u.dtype == x.dtype == w.dtype:
            u, x, w = _same_dtype(u, x, w)
        return self.linear.transposed(self.saved, self.step.live_factor, u, x, w)

    @cached_property
    def _absolute(self) -> tuple[Tensor, Tensor]:
        """Magnitudes of signal and weight in the operation's order; a signal that cannot be negative is its own."""
        live, factors = self.step.live_factor, self.step.factors
        signal, other = self.operand(factors[live]), self.operand(factors[1 - live])
        signal = signal if self.step.nonnegative else signal.abs()
        weight = self._weight_magnitude(other)
        return (signal, weight) if live == 0 else (weight, signal)

    def _weight_magnitude(self, w: Tensor) -> Tensor:
        """|W| of (a piece of) the operand that is no signal, times gain and folded batch norm."""
        norm = self.norm
        made = w.abs() if norm is None else (w * norm.scale.reshape(self.filters)).abs_()
        made = _times(made, abs(self.gain))
        if self.step.alike and self._values.is_open(self.step.node):
            # the native backward of a folded batch norm has multiplied by its scale already
            more = made if norm is None else w.abs().mul_(norm.scale.sign().reshape(self.filters))
            self._sum = torch.add(w, more, alpha=self.ratio)
            self._replaced = self.replace(self._sum)
        return made

    def replace(self, weight: Tensor) -> bool:
        """Let the native backward multiply by another weight. Can it be told so?"""
        return self._values.replace(self.step.node, weight)

    @cached_property
    def pieces(self) -> list[slice]:
        """Parts of a large weight's columns: a copy of all of it would be most of the memory that a rule takes."""
        if self.norm is not None or not self.linear.columns or self.step.live_factor != 0:
            return []
        w = self.operand(self.step.factors[1])
        size, few = _PIECE.get(w.device.type, _PIECE_ELSEWHERE)
        if w.numel() > few and w.numel() > _MANY * self.saved.shape.numel():
            size = few
        if w.numel() <= size:
            return []
        width = max(1, size * w.shape[-1] // w.numel())
        return [slice(start, start + width) for start in range(0, w.shape[-1], width)]

    def magnitude(self, bias: bool, eps: float = 0.0) -> Tensor:
        """`|x|·|W| + |b| + eps`, the extra forward product of the rules on signed parts."""
        # what a bias carries costs no pass of its own
        added = self.channel_bias.abs().add_(eps) if bias else None
        if not self.pieces:
            made = self.product(*self._absolute, added)
        else:
            x, w = (self.operand(position) for position in self.step.factors)
            x = x if self.step.nonnegative else x.abs()
            made = torch.cat([self.product(x, part) for _, part in self._magnitudes(w)], -1)
            made = made if added is None else made.add_(*self.spread(added))
        return made.add_(eps) if eps and not bias else made

    def absolute_transposed(self, u: Tensor) -> Tensor:
        """`|W|ᵀu`, the extra backward product of the rules on signed parts."""
        if not self.pieces:
            return self.transposed(u, *self._absolute)
        x, w = (self.operand(position) for position in self.step.factors)
        parts = (self.transposed(u[..., piece], x, part) for piece, part in self._magnitudes(w))
        return reduce(Tensor.add_, parts)

    def _magnitudes(self, w: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """|W| piece by piece, each in the memory of the one before: on a CPU new memory costs as much as their products."""
        held: Tensor | None = None
        for piece in self.pieces:
            part = w[..., piece]
            held = torch.empty_like(part) if held is None or held.shape != part.shape else held
            yield piece, _times(torch.abs(part, out=held), abs(self.gain))

    def add_signed(self, g: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """`g + ratio · sgn(x) · |W|ᵀv`, where g = Wᵀu is what the native backward made and x the live factor."""
        if self._sum is not None:
            return g if self._replaced else self.transposed(u, self._absolute[0], self._sum)
        more = self.absolute_transposed(v)
        if not self.step.nonnegative:
            more.mul_(sign(self.operand(self.step.live_factors[0])))
        same = more.dtype == g.dtype and not self.batched
        return torch.add(g, more, alpha=self.ratio, out=more if same else None)


def _times(tensor: Tensor, factor: float) -> Tensor:
    """A tensor of our own, times a factor."""
    return tensor if factor == 1 else tensor.mul_(factor)


def _same_dtype(*tensors: Tensor) -> list[Tensor]:
    """Under autocast the factors of one product may differ: take the widest."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return [tensor.to(dtype) for tensor in tensors]

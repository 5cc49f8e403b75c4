"""What a rule sees of the node that it is applied to: values, and the linear map with its batch norm or bias, as one.

It fetches and computes, and knows no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

from .ops.normalise import BatchNorm, batch_norm
from .rules.base import OUT, Grads, Rule, reduce_to
from .saved import Saved, output_shape
from .step import ADDED, Step
from .values import Values


class Here:
    """What a rule sees of the node that it is applied to, while it is applied."""

    stash: Any = None  # from `before` to `after`
    bias_coefficient: Tensor | None = None  # likewise, at the output's shape

    def __init__(self, step: Step, values: Values) -> None:
        self.step, self.op, self._values = step, step.op, values
        self.linear: Any = step.op.linear  # a LinearMap; rules of other operations do not ask for it
        self._operands: dict[int, Any] = {}  # and other values that the rule needs, by position
        self._replaced = False  # does the native backward multiply by another weight?

    @cached_property
    def norm(self) -> BatchNorm | None:
        """The batch norm that is part of the map."""
        return batch_norm(self._values.saved(self.step.top)) if self.step.normed else None

    @cached_property
    def saved(self) -> Saved:
        """What the node saved."""
        return self._values.saved(self.step.node)

    @cached_property
    def output(self) -> Tensor:
        """The node's output: of the whole map, where it has a part."""
        value, part = self.operand(OUT), self.step.part
        if part is None:
            return value
        if part.norm and not self.step.rectified:
            assert self.norm is not None
            return torch.addcmul(self.spread(self.norm.shift(self.operand(ADDED))), value, self.spread(self.norm.scale))
        _, own = (1, 1) if part.norm else self._alphas
        return part.back(self._values.graph, value if own == 1 else value / abs(own)).reshape(self.saved.shape)

    def operand(self, position: int) -> Any:
        """A value that the rule needs."""
        if position not in self._operands:
            place = self.step.places[position]
            self._operands[position] = (
                getattr(self.saved, place) if isinstance(place, str) else self._values.take(place)
            )
        return self._operands[position]

    @property
    def carries_s(self) -> bool:
        """Does the rule get a coefficient, not relevance?"""
        return self.step.form == "s" or self.step.convert

    def relevance(self, s: Tensor, output: Tensor) -> Tensor:
        """What arrives, as relevance."""
        return s * output if self.carries_s else s

    def replay(self, *operands: Tensor | None) -> Tensor:
        """The node's own forward on other operands."""
        assert self.op.forward is not None
        return self.op.forward(self.saved, *operands)

    def on_live(self, grads: Grads, edit: Callable[[Tensor], Tensor]) -> Grads:
        """Edit what goes to the live operands (of a product or linear map: to its live factors)."""
        live = self.step.live_factors
        return [edit(g) if g is not None and i in live else g for i, g in enumerate(grads)]

    # Linear maps, with a batch norm folded in where there is one ---------------------------------------------------

    @property
    def signal(self) -> Tensor:
        """The live factor."""
        return self.operand(self.step.factors[self.step.live_factor])

    @property
    def weight(self) -> Tensor:
        """The other factor, as it was saved."""
        return self.operand(self.step.factors[1 - self.step.live_factor])

    def ordered(self, signal: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """In the operation's order."""
        return (signal, weight) if self.step.live_factor == 0 else (weight, signal)

    @cached_property
    def gain(self) -> float:
        """What the product is multiplied by; it belongs to the weight."""
        return 1 if self.linear.gain is None else self.linear.gain(self.saved)

    @property
    def wants_bias(self) -> bool:
        """Was relevance of the bias itself asked for?"""
        return self.step.bias in self.step.live

    @cached_property
    def factors(self) -> tuple[Tensor, Tensor]:
        """Signal and weight in the operation's order."""
        gain = -self.gain if self.turned else self.gain
        w = self.weight if gain == 1 else self.weight * gain
        return self.ordered(self.signal, w if self.norm is None else w * self.norm.scale.reshape(self.filters))

    @property
    def filters(self) -> tuple[int, ...]:
        """The shape in which one number per output channel can be broadcast to the weight."""
        return self.linear.channels(self.saved)

    @cached_property
    def channel_bias(self) -> Tensor:
        """What the map adds, one number per output channel (or a tensor of the output's shape)."""
        if self.step.part is not None and not self.step.part.norm:
            return self._added_bias()
        own = self.operand(self.step.bias) if self.linear.bias in self.step.places else None
        factor = self.linear.factor(self.saved)
        own = own if own is None or factor == 1 else own * factor
        if self.norm is not None:
            return self.norm.shift(self.operand(ADDED), own)
        assert own is not None
        return own

    @property
    def _alphas(self) -> tuple[float, float]:
        """What the sum above multiplies the bias and the map's output by."""
        part, values = self.step.part, self._values
        assert part is not None
        weights = values.graph.op(part.top).weights(values.saved(part.top))
        return weights[part.position], weights[1 - part.position]

    def _added_bias(self) -> Tensor:
        """What the sum above adds, broadcastable to the map's own output."""
        part, graph = self.step.part, self._values.graph
        assert part is not None
        bias, (factor, own) = self.operand(ADDED), self._alphas
        bias = bias if factor == own == 1 else bias * (factor / abs(own))
        bias = part.back(graph, bias.expand(output_shape(graph.handles[part.top], 0))).reshape(self.saved.shape)
        rows = bias.dim() - 1  # one row of it will do, where all are the same
        return bias[(0,) * rows] if not any(bias.stride()[:rows]) else bias

    @property
    def splits_bias(self) -> bool:
        """Does anybody ask what a bias gets? Relevance of it, or of the map's own output in front of a batch norm."""
        graph, part = self._values.graph, self.step.part
        return self.wants_bias or any(
            ref[0] in (self.step.node, *(part.moves if part else ())) for ref in graph.watched
        )

    def kept_by_norm(self, rule: Rule, u: Tensor) -> Any:
        """Of what arrives at a map with a batch norm: the part of the norm's own shift."""
        if rule.delivers_relevance:  # to the inputs, all of it
            return 0
        assert self.norm is not None
        coefficient = u if self.bias_coefficient is None else self.bias_coefficient
        return self.spread(self.norm.shift(self.operand(ADDED))) * coefficient

    @cached_property
    def bias(self) -> Tensor:
        """What the map adds, broadcastable to its output."""
        return self.spread(self.channel_bias)

    def spread(self, channels: Tensor) -> Tensor:
        """What has one number per output channel, broadcastable to the output."""
        return channels if self.linear.spread is None else channels.reshape(self.linear.spread(self.saved))

    def reduce_to_bias(self, coefficient: Tensor, relevance: bool) -> Tensor:
        """The bias' own coefficient (or relevance), from one at the output's shape."""
        bias = self.operand(self.step.bias)
        factor = torch.ones_like(bias) * self.linear.factor(self.saved)
        factor = self.spread(factor if self.norm is None else factor * self.norm.scale)
        factor = torch.ones_like(factor) if relevance else factor
        return reduce_to(coefficient * factor, factor.shape).reshape(bias.shape)

    def product(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """The map's own product of other factors."""
        x, w, *rest = _same_dtype(x, w, *(() if bias is None else (bias,)))
        return self.linear.product(self.saved, x, w, *rest)

    def transposed(self, u: Tensor, x: Tensor, w: Tensor) -> Tensor:
        """Its transpose: what u at the output is to the signal."""
        return self.linear.transposed(self.saved, self.step.live_factor, *_same_dtype(u, x, w))

    @property
    def ours(self) -> bool:
        """Will nobody else use the graph?"""
        return self._values.ours

    def replace_weight(self, weight: Tensor) -> bool:
        """Let the native backward multiply by another weight, in which a batch norm is folded. Can it be told so?"""
        self._replaced = self._values.replace(self.step.node, self.step.weight, weight)
        return self._replaced

    @cached_property
    def turned(self) -> bool:
        """Is the map subtracted from its bias? Then its weight counts with the other sign."""
        return self.step.part is not None and not self.step.part.norm and self._alphas[1] < 0

    def fed(self, u: Tensor) -> Tensor:
        """What the native backward has to be fed with, which knows of no batch norm and of no other sign."""
        if self.norm is None or self._replaced:
            return -u if self.turned else u
        return u * self.spread(self.norm.scale)


def _same_dtype(*tensors: Tensor) -> Sequence[Tensor]:
    """Under autocast the factors of one product may differ: take the widest."""
    if all(tensor.dtype == tensors[0].dtype for tensor in tensors):
        return tensors
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return [tensor.to(dtype) for tensor in tensors]

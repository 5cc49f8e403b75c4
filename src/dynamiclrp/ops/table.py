"""What a row says: one autograd node type, its kind, where its values are kept, and its forward.

A row states only what is special about the operation. Its kind decides which rule of a preset applies; broadcasting,
dtypes, missing gradients and liveness are handled once, in `run`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ..errors import PresetError


class Kind(str, Enum):
    """What an operation is to relevance."""

    LEAF = "leaf"  # a tensor that the user or a module made
    MOVEMENT = "movement"  # views, copies, casts, padding, selection by position or by value
    SCALE = "scale"  # a product with one live operand, elementwise
    LINEAR = "linear"  # matrix products with one live operand
    CONV = "conv"
    SUM = "sum"
    POOL = "pool"  # averages over windows
    PRODUCT = "product"  # two live operands
    ACTIVATION = "activation"  # elementwise, f(0) = 0
    FUNCTION = "function"  # elementwise, f(0) != 0 or f'(0) infinite
    SOFTMAX = "softmax"
    WEIGHTS = "weights"  # a softmax whose result weighs the values of an attention
    NORMALISE = "normalise"
    BATCHNORM = "batchnorm"
    ATTENTION = "attention"
    STATISTIC = "statistic"  # norms, variances, distances: nonlinear functions of several values
    TRANSFORM = "transform"  # fixed linear maps without parameters: Fourier transforms, interpolation, scans
    LOSS = "loss"
    CONSTANT = "constant"  # the derivative is zero everywhere: steps, comparisons, fills, random draws

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class LinearMap:
    """A bilinear operation seen as `product(x, w) + bias`."""

    factors: tuple[int, int]  # positions of the two operands that are multiplied
    product: Callable[..., Tensor]  # (saved, first factor, second factor, bias or None) → output
    # (saved, which factor gets it, coefficient of the output, both factors) → coefficient of that factor
    transposed: Callable[[Any, int, Tensor, Tensor, Tensor], Tensor]
    bias: int | None = None  # position of the operand that is added
    factor: Callable[[Any], Any] = lambda n: 1  # what the bias is multiplied by
    gain: Callable[[Any], Any] | None = None  # what the product is multiplied by (`product` and `transposed` do not)
    # saved → the shape in which one number per output channel can be broadcast to the output; None: as it is
    spread: Callable[[Any], tuple[int, ...]] | None = None
    # the same for the second factor; None: its channels cannot be told
    channels: Callable[[Any], tuple[int, ...]] | None = None
    columns: bool = False  # is the second factor's last dimension the output's? then it may be taken piece by piece


@dataclass(frozen=True)
class Op:
    """One row. `saved` maps an operand's position to (attribute, position whose gradient made autograd keep it)."""

    kind: Kind
    saved: Mapping[int, tuple[str, int | None]] = field(default_factory=dict)
    result: str | None = None  # the attribute that holds the node's own output
    forward: Callable[..., Any] | None = None  # (saved, *operands) → output, or a sequence of outputs
    undo: Callable[..., Tensor] | None = None  # movement, and roots: (saved, output, operand's shape) → operand
    join: Callable[..., Tensor] | None = None  # the same for several outputs: (saved, outputs) → operand
    linear: LinearMap | None = None
    ratio: Callable[[Any], Tensor] | None = None  # activations: f(x)/x in closed form, from saved values
    # s · f(x)/x of other functions, with an eps in the denominator: (saved, s, eps) → that
    quotient: Callable[[Any, Tensor, float], Tensor] | None = None
    fixed: Callable[[Any, Tensor], Tensor] | None = None  # normalisations: backward with fixed scale statistics
    # those that multiply x by the inverse of its root mean square: saved → x, that number for each row, and the weight
    root: Callable[[Any], tuple[Tensor, Tensor, Tensor | None]] | None = None
    weights: Callable[[Any], tuple[Any, ...]] | None = None  # sums: the factor of each operand, such as alpha
    # movement that hands on the very values that it got, each once, unless it takes more or fewer: "in place" or "moved"
    hands_on: str | None = None
    reshapes: bool = (
        False  # movement: forward and undo are `reshape`, so that only the last of several in a row matters
    )
    rectifies: bool = False  # zero gradient wherever output differs from input: output serves as input
    # activations, by their signature: are they 0 where the operand is not positive, and positive where it is?
    shuts: Callable[[tuple[Any, ...]], bool] = lambda signature: False
    # products: positions of the operands that are multiplied; twice, if it holds two. Attention: query, key
    # and value, where they are not the first three
    factors: tuple[int, ...] = (0, 1)
    elementwise: bool = True  # products: does each element meet only its own counterpart?
    carriers: tuple[int, ...] | None = None  # transforms: operands whose values go through; the others only steer them
    fills: bool = False  # its output may hold more than its operands gave: constants that leave no edge
    lookup: str | None = None  # the attribute that holds integer indices into operand 0
    # lookups that add rows up: (saved, table, output) → each index's part of its sum, and which sum that is
    bags: Callable[..., tuple[Tensor, Tensor]] | None = None
    signature: Callable[[Any], tuple[Any, ...]] | None = None  # saved → what decides the plan beyond the graph
    absent: Callable[[tuple[Any, ...]], tuple[int, ...]] = lambda signature: ()  # optional operands left out
    kind_for: Callable[[tuple[Any, ...]], Kind] | None = None  # signature → kind, where a parameter decides it

    def keeps(self, position: int, edges: tuple[Any, ...]) -> str | None:
        """The attribute that holds an operand, if autograd kept it."""
        attribute, because = self.saved.get(position, (None, None))
        return attribute if because is None or edges[because] is not None else None


def unbroadcast(value: Tensor, shape: torch.Size) -> Tensor:
    """Undo broadcasting of a tensor whose copies are equal: take the first of them."""
    if value.shape == shape:
        return value
    value = value[(0,) * (value.dim() - len(shape))]
    return value[tuple(slice(0, 1) if n == 1 else slice(None) for n in shape)]


OPS: dict[str, Op] = {}


def row(names: str, kind: Kind, **what: Any) -> None:
    """Enter one row under each of the node types `names`."""
    for name in names.split():
        if name in OPS:
            raise PresetError(f"{name} has a row already")
        OPS[name] = Op(kind, **what)


def register(
    name: str,
    kind: Kind | str,
    *,
    replace: bool = False,
    **what: Any,
) -> None:
    """Give a node type a row; for a Python `autograd.Function` called F the node type is `FBackward`.

    >>> register("MySwishBackward", "activation", ratio=lambda n: n.tensors[0].sigmoid())
    >>> OPS.pop("MySwishBackward").kind
    <Kind.ACTIVATION: 'activation'>
    """
    if name in OPS and not replace:
        raise PresetError(f"{name} has a row already; pass replace=True to replace it")
    try:
        OPS[name] = Op(Kind(kind), **what)
    except ValueError:
        raise PresetError(f"unknown kind {kind!r}: expected one of {', '.join(map(str, Kind))}") from None

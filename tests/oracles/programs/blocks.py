"""Blocks of a program: each turns [rows, time, SIZE] into the same shape, in torch in several spellings and, once, as what it means.

In: weights by name, the hidden state. Out: the next one. `run` is ordinary model code; `mean` tells the tape what that code is.
A block must not know which preset is asked for, except through two flags of the tape (see `Block`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .tape import Node, Tape

SIZE = 4
EPS = 1e-5
Weights = dict[str, Any]


@dataclass(frozen=True)
class Block:
    """One kind of block.

    `spellings` are the same function, and the first is the plain one. `marks`: shapes that every spelling has; `marked`: those of some
    spellings. `written`: spellings in which a normalisation is written out in sums, products and functions. The tape's flag of that name tells
    `mean`, and its flag `primitives` whether the preset sees no composites (`dynamic`).
    """

    weights: Callable[[torch.Generator], Weights]
    spellings: dict[str, Callable[[Weights, Tensor], Tensor]]
    mean: Callable[[Tape, Weights, Node], Node]
    marks: frozenset[str] = frozenset()
    marked: dict[str, frozenset[str]] = field(default_factory=dict)
    written: frozenset[str] = frozenset()

    def shapes(self, spelling: str) -> frozenset[str]:
        return self.marks | self.marked.get(spelling, frozenset())


def draw(g: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=g, dtype=torch.float64)


def a_map(g: torch.Generator, out: int = SIZE, size: int = SIZE) -> Weights:
    return {"w": draw(g, out, size, scale=size**-0.5), "b": draw(g, out, scale=0.5)}


def a_norm(g: torch.Generator, size: int = SIZE) -> Weights:
    """Statistics and weights of a batch norm."""
    positive = lambda: 0.5 + torch.rand(size, generator=g, dtype=torch.float64)  # noqa: E731
    return {"mean": draw(g, size, scale=0.5), "var": positive(), "scale": positive(), "shift": draw(g, size, scale=0.5)}


def folded(w: Weights) -> tuple[Tensor, Tensor]:
    """A batch norm as y = scale·x + shift."""
    scale = w["scale"] / (w["var"] + EPS).sqrt()
    return scale, w["shift"] - w["mean"] * scale


def batch_norm(x: Tensor, w: Weights) -> Tensor:
    return F.batch_norm(x, w["mean"], w["var"], w["scale"], w["shift"], False, 0.0, EPS)


# What hands on the very values that it got.
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda y: y.clone(),
    "view": lambda y: y.view(y.shape),
    "reshape": lambda y: y.flatten().reshape(y.shape),
    "unsqueeze": lambda y: y.unsqueeze(0).squeeze(0),
    "slice": lambda y: y[:],
    "transpose twice": lambda y: y.transpose(0, -1).transpose(0, -1),
    "cast": lambda y: y.to(y.dtype, copy=True),
}

_set = frozenset
_MOVED = _set({"moved_between"})
_MAP = _set({"spelled_map"})

# ---------------------------------------------------------------- linear maps

_MAPS: dict[str, Callable[[Weights, Tensor], Tensor]] = {
    "linear": lambda w, h: F.linear(h, w["w"], w["b"]),
    "matmul": lambda w, h: h @ w["w"].t() + w["b"],
    "bias first": lambda w, h: w["b"] + h @ w["w"].t(),
    "tensordot": lambda w, h: torch.tensordot(h, w["w"], ([2], [1])) + w["b"],
    "addmm": lambda w, h: torch.addmm(w["b"], h.flatten(0, 1), w["w"].t()).unflatten(0, h.shape[:2]),
    "baddbmm": lambda w, h: torch.baddbmm(w["b"], h, w["w"].t().expand(len(h), -1, -1)),
    "bias in place": lambda w, h: (h @ w["w"].t()).add_(w["b"]),
    "bias expanded": lambda w, h: h @ w["w"].t() + w["b"].expand(*h.shape[:2], -1),
    "left, bias there": lambda w, h: (w["w"] @ h.transpose(1, 2) + w["b"][:, None]).transpose(1, 2),
    "einsum": lambda w, h: torch.einsum("bti,oi->bto", h, w["w"]) + w["b"],
    "einsum, weight first": lambda w, h: torch.einsum("oi,bti->bto", w["w"], h) + w["b"],
    "left": lambda w, h: (w["w"] @ h.transpose(1, 2)).transpose(1, 2) + w["b"],
    "bias subtracted": lambda w, h: h @ w["w"].t() - (-w["b"]),
}
_MAPS |= {f"{name}, then bias": (lambda w, h, f=f: f(h @ w["w"].t()) + w["b"]) for name, f in BETWEEN.items()}
_KNOWN_MAPS = ("left, bias there", "einsum", "einsum, weight first", "left", "bias subtracted")

LINEAR = Block(
    a_map, _MAPS, lambda tape, w, h: tape.linear(h, w["w"], w["b"]),
    marked=dict.fromkeys(_KNOWN_MAPS, _MAP) | {f"{name}, then bias": _MOVED for name in BETWEEN} | {"bias in place": _set({"in_place"})},
)  # fmt: skip

# A layer whose rectifier tells spellings apart: relevance arrives where the output is positive.
LAYER = Block(
    a_map,
    {name: (lambda w, h, f=_MAPS[name]: f(w, h).relu()) for name in ("linear", *_KNOWN_MAPS)},
    lambda tape, w, h: tape.act(tape.linear(h, w["w"], w["b"]), torch.relu),
    marked=dict.fromkeys(_KNOWN_MAPS, _MAP),
)

FREE = Block(
    a_map,
    {
        "linear": lambda w, h: F.linear(h, w["w"]),
        "matmul": lambda w, h: h @ w["w"].t(),
        "bmm": lambda w, h: torch.bmm(h, w["w"].t().expand(len(h), -1, -1)),
        "left": lambda w, h: (w["w"] @ h.mT).mT,
        "einsum": lambda w, h: torch.einsum("bti,oi->bto", h, w["w"]),
    },
    lambda tape, w, h: tape.linear(h, w["w"]),
)


def _rows(between: Callable[[Tensor], Tensor]) -> Callable[[Weights, Tensor], Tensor]:
    def run(w: Weights, h: Tensor) -> Tensor:
        z = between(F.linear(h.flatten(0, 1), w["w"], w["b"]))
        return batch_norm(z, w).relu().unflatten(0, h.shape[:2])

    return run


LINEAR_NORM = Block(
    lambda g: a_map(g) | a_norm(g),
    {"direct": _rows(lambda y: y)} | {name: _rows(f) for name, f in BETWEEN.items()},
    lambda tape, w, h: tape.act(tape.linear(h, w["w"], w["b"], folded(w)), torch.relu),
    marks=_set({"map_and_norm"}),
    marked=dict.fromkeys(BETWEEN, _MOVED),
)

SHARED = Block(
    a_map,
    {
        "linear": lambda w, h: F.linear(F.linear(h, w["w"], w["b"]).relu(), w["w"], w["b"]),
        "transposed view": lambda w, h: torch.addmm(w["b"], F.linear(h, w["w"], w["b"]).relu().flatten(0, 1), w["w"].t()).view(h.shape),
    },
    lambda tape, w, h: tape.linear(tape.act(tape.linear(h, w["w"], w["b"]), torch.relu), w["w"], w["b"]),
    marks=_set({"shared_weights"}),
)  # fmt: skip

# ---------------------------------------------------------------- sums


def _written_in(w: Weights, h: Tensor) -> Tensor:
    z = h.clone()
    z += F.linear(h, w["w"], w["b"]).relu()
    return z


def _residual(tape: Tape, w: Weights, h: Node) -> Node:
    return tape.add(h, tape.act(tape.linear(h, w["w"], w["b"]), torch.relu))


RESIDUAL = Block(
    a_map,
    {
        "add": lambda w, h: h + F.linear(h, w["w"], w["b"]).relu(),
        "branch first": lambda w, h: F.linear(h, w["w"], w["b"]).relu() + h,
        "torch.add": lambda w, h: torch.add(F.linear(h, w["w"], w["b"]).relu(), h),
        "in place": _written_in,
        "clone": lambda w, h: h.clone() + F.linear(h, w["w"], w["b"]).relu().view(h.shape),
    },
    _residual,
    marks=_set({"residual"}),
    marked={"in place": _set({"in_place"})},
)

DIFFERENCE = Block(
    a_map,
    {
        "sub": lambda w, h: h - 0.5 * F.linear(h, w["w"], w["b"]).relu(),
        "alpha": lambda w, h: torch.sub(h, F.linear(h, w["w"], w["b"]).relu(), alpha=0.5),
        "negated": lambda w, h: h + -0.5 * F.linear(h, w["w"], w["b"]).relu(),
    },
    lambda tape, w, h: tape.add(h, tape.act(tape.linear(h, w["w"], w["b"]), torch.relu), factors=(1.0, -0.5)),
    marks=_set({"residual"}),
)

CONTEXT = Block(
    a_map,
    {
        "mean": lambda w, h: h + F.linear(h.mean(1, keepdim=True), w["w"], w["b"]),
        "expand": lambda w, h: h + F.linear(h.mean(1, keepdim=True), w["w"], w["b"]).expand(h.shape),
        "broadcast first": lambda w, h: F.linear(h.mean(1, keepdim=True), w["w"], w["b"]) + h,
    },
    lambda tape, w, h: tape.add(h, tape.linear(tape.reduce(h, 1, keepdim=True), w["w"], w["b"])),
    marks=_set({"broadcasting", "map_broadcast_in_sum"}),
)

CENTRED = Block(
    lambda g: {},
    {
        "sub": lambda w, h: h - 0.5 * h.mean(1, keepdim=True),
        "alpha": lambda w, h: torch.sub(h, h.mean(1, keepdim=True), alpha=0.5),
        "rsub": lambda w, h: -(0.5 * h.mean(1, keepdim=True) - h),
    },
    lambda tape, w, h: tape.add(h, tape.reduce(h, 1, keepdim=True), factors=(1.0, -0.5)),
    marks=_set({"broadcasting", "residual"}),
)


def _constant_in_place(w: Weights, h: Tensor) -> Tensor:
    z = h.clone()
    z += 0.5
    return z


CONSTANT = Block(
    lambda g: {"buffer c": draw(g, SIZE)},
    {
        "h + c": lambda w, h: h + 0.5,
        "c + h": lambda w, h: 0.5 + h,
        "torch.add": lambda w, h: torch.add(h, 0.25, alpha=2),
        "h - c": lambda w, h: h - (-0.5),
        "tensor": lambda w, h: h + torch.full((SIZE,), 0.5, dtype=h.dtype),
        "in place": _constant_in_place,
    },
    lambda tape, w, h: tape.add(h, tape.literal(0.5)),
    marks=_set({"constants"}),
    marked={"in place": _set({"in_place"})},
)

BUFFER = Block(
    lambda g: {"buffer c": draw(g, SIZE)},
    {
        "1 - h": lambda w, h: w["buffer c"] - h,
        "rsub": lambda w, h: torch.rsub(h, w["buffer c"]),
        "negated": lambda w, h: -h + w["buffer c"],
    },
    lambda tape, w, h: tape.add(tape.literal(w["buffer c"]), h, factors=(1.0, -1.0)),
    marks=_set({"constants", "broadcasting"}),
)

# ---------------------------------------------------------------- writes through views


def _slice_added(w: Weights, h: Tensor) -> Tensor:
    z, y = h.clone(), F.linear(h, w["w"], w["b"])
    z[..., :2] += y[..., :2]
    return z


def _slice_add_method(w: Weights, h: Tensor) -> Tensor:
    z, y = h * 1.0, F.linear(h, w["w"], w["b"])
    z[..., :2].add_(y[..., :2])
    return z


def _mean_slice_added(tape: Tape, w: Weights, h: Node) -> Node:
    y = tape.move(tape.linear(h, w["w"], w["b"]), lambda t: t[..., :2])
    return tape.join(tape.add(tape.move(h, lambda t: t[..., :2]), y), tape.move(h, lambda t: t[..., 2:]), dim=-1)


SLICE_ADDED = Block(
    a_map,
    {
        "cat": lambda w, h: torch.cat([h[..., :2] + F.linear(h, w["w"], w["b"])[..., :2], h[..., 2:]], -1),
        "+=": _slice_added,
        "add_": _slice_add_method,
    },
    _mean_slice_added,
    marks=_set({"residual"}),
    marked={"+=": _set({"addition_through_view", "in_place"}), "add_": _set({"addition_through_view", "in_place"})},
)


def _slice_copied(w: Weights, h: Tensor) -> Tensor:
    z, y = h.clone(), F.linear(h, w["w"], w["b"])
    z[..., :2] = y[..., :2]
    return z


def _slice_zeroed(w: Weights, h: Tensor) -> Tensor:
    z, y = torch.zeros_like(h), F.linear(h, w["w"], w["b"])
    z[..., :2] = y[..., :2]
    z[..., 2:].copy_(h[..., 2:])
    return z


SLICE_COPIED = Block(
    a_map,
    {
        "cat": lambda w, h: torch.cat([F.linear(h, w["w"], w["b"])[..., :2], h[..., 2:]], -1),
        "=": _slice_copied,
        "into zeros": _slice_zeroed,
        "slice_scatter": lambda w, h: torch.slice_scatter(h, F.linear(h, w["w"], w["b"])[..., :2], -1, 0, 2),
    },
    lambda tape, w, h: tape.join(
        tape.move(tape.linear(h, w["w"], w["b"]), lambda t: t[..., :2]), tape.move(h, lambda t: t[..., 2:]), dim=-1
    ),
    marked={"=": _set({"write_through_view", "in_place"}), "into zeros": _set({"write_through_view", "in_place"})},
)

# ---------------------------------------------------------------- several outputs

_UNUSED = _set({"unused_output"})


def _second(take: Callable[[Tensor], Tensor]) -> Callable[[Weights, Tensor], Tensor]:
    return lambda w, h: h + F.linear(take(h), w["w"], w["b"])


UNUSED = Block(
    lambda g: a_map(g, SIZE, 2),
    {
        "slice": _second(lambda h: h[..., 2:]),
        "split": _second(lambda h: h.split(2, -1)[1]),
        "split sizes": _second(lambda h: h.split([1, 1, 2], -1)[2]),
        "chunk": _second(lambda h: h.chunk(2, -1)[1]),
        "unbind": _second(lambda h: torch.stack(h.unbind(-1)[2:], -1)),
        "tensor_split": _second(lambda h: torch.tensor_split(h, 2, -1)[1]),
    },
    lambda tape, w, h: tape.add(h, tape.linear(tape.move(h, lambda t: t[..., 2:]), w["w"], w["b"])),
    marks=_set({"residual"}),
    marked=dict.fromkeys(("split", "split sizes", "chunk", "unbind", "tensor_split"), _UNUSED),
)


def _twice(cut: Callable[[Tensor], Any]) -> Callable[[Weights, Tensor], Tensor]:
    def run(w: Weights, h: Tensor) -> Tensor:
        a, b = cut(h)
        return torch.cat([b, a + b.tanh()], -1)

    return run


def _mean_twice(tape: Tape, w: Weights, h: Node) -> Node:
    a, b = tape.move(h, lambda t: t[..., :2]), tape.move(h, lambda t: t[..., 2:])
    return tape.join(b, tape.add(a, tape.act(b, torch.tanh)), dim=-1)


_TWICE_CUTS = {
    "slice": lambda h: (h[..., :2], h[..., 2:]),
    "split": lambda h: h.split(2, -1),
    "chunk": lambda h: h.chunk(2, -1),
    "unflatten-unbind": lambda h: h.unflatten(-1, (2, 2)).unbind(-2),
}
TWICE = Block(
    lambda g: {}, {name: _twice(cut) for name, cut in _TWICE_CUTS.items()}, _mean_twice,
    marks=_set({"output_used_twice"}),
)  # fmt: skip


def _mean_largest(tape: Tape, w: Weights, h: Node) -> Node:
    return tape.add(h, tape.largest(h))


LARGEST = Block(
    lambda g: {},
    {
        "max": lambda w, h: h + h.max(-1, keepdim=True)[0],
        "topk": lambda w, h: h + h.topk(1, -1)[0],
        "sort": lambda w, h: h + h.sort(-1, descending=True)[0][..., :1],
        "gather": lambda w, h: h + h.gather(-1, h.max(-1, keepdim=True)[1]),
        "indexed": lambda w, h: h + h.max(-1)[0][..., None],
        "amax": lambda w, h: h + h.amax(-1, keepdim=True),
    },
    _mean_largest,
    marks=_set({"broadcasting", "selection", "chosen_by_value"}),
    marked={"gather": _UNUSED},
)

# ---------------------------------------------------------------- products, gates, quotients


def _gate_map(w: Weights, h: Tensor) -> Tensor:
    return F.linear(h, w["w"], w["b"])


def _mean_gate(tape: Tape, w: Weights, h: Node) -> Node:
    return tape.times(h, tape.function(tape.linear(h, w["w"], w["b"]), torch.sigmoid), gate=1)


GATE = Block(
    a_map,
    {
        "a * sigmoid(b)": lambda w, h: h * _gate_map(w, h).sigmoid(),
        "sigmoid(b) * a": lambda w, h: _gate_map(w, h).sigmoid() * h,
        "clone": lambda w, h: h.clone() * torch.sigmoid(_gate_map(w, h)).view(h.shape),
        "glu": lambda w, h: F.glu(torch.cat([h, _gate_map(w, h)], -1), -1),
    },
    _mean_gate,
    marks=_set({"gate"}),
    marked={"glu": _set({"glu"})},
)

SQUEEZE = Block(
    a_map,
    {
        "mul": lambda w, h: h * _gate_map(w, h.mean(1, keepdim=True)).sigmoid(),
        "expand": lambda w, h: h * _gate_map(w, h.mean(1, keepdim=True)).sigmoid().expand_as(h),
    },
    lambda tape, w, h: tape.times(
        h, tape.function(tape.linear(tape.reduce(h, 1, keepdim=True), w["w"], w["b"]), torch.sigmoid), gate=1
    ),
    marks=_set({"gate", "broadcasting"}),
)


def two_maps(g: torch.Generator) -> Weights:
    one, two = a_map(g), a_map(g)
    return one | {"v": two["w"], "c": two["b"]}


SWIGLU = Block(
    two_maps,
    {
        "silu": lambda w, h: F.silu(_gate_map(w, h)) * F.linear(h, w["v"], w["c"]),
        "by hand": lambda w, h: (lambda g: g * g.sigmoid())(_gate_map(w, h)) * F.linear(h, w["v"], w["c"]),
        "packed": lambda w, h: (lambda a, b: F.silu(a) * b)(
            *F.linear(h, torch.cat([w["w"], w["v"]]), torch.cat([w["b"], w["c"]])).chunk(2, -1)
        ),
    },
    lambda tape, w, h: tape.times(
        tape.act(tape.linear(h, w["w"], w["b"]), F.silu), tape.linear(h, w["v"], w["c"]), gate=0
    ),
    marks=_set({"gate"}),
    marked={"packed": _set({"output_used_twice"}), "by hand": _set({"written_gate"})},
)

PRODUCT = Block(
    two_maps,
    {
        "mul": lambda w, h: _gate_map(w, h) * F.linear(h, w["v"], w["c"]),
        "in place": lambda w, h: _gate_map(w, h).mul_(F.linear(h, w["v"], w["c"])),
        "einsum": lambda w, h: torch.einsum("bti,bti->bti", _gate_map(w, h), F.linear(h, w["v"], w["c"])),
    },
    lambda tape, w, h: tape.times(tape.linear(h, w["w"], w["b"]), tape.linear(h, w["v"], w["c"])),
    marks=_set({"product"}),
    marked={"in place": _set({"in_place", "product_through_view"})},
)


def _divisor(w: Weights, h: Tensor) -> Tensor:
    return _gate_map(w, h).square() + 1


def _mean_quotient(tape: Tape, w: Weights, h: Node) -> Node:
    d = tape.add(tape.act(tape.linear(h, w["w"], w["b"]), torch.square), tape.literal(1.0))
    inverse = tape._add("act", d.value.reciprocal(), d)  # 1/d passes on what it gets (`dynamic`: the identity rule)
    return tape.times(h, inverse, quotient=True)


QUOTIENT = Block(
    a_map,
    {
        "x / d": lambda w, h: h / _divisor(w, h),
        "div": lambda w, h: torch.div(h, _divisor(w, h)),
        "x * d**-1": lambda w, h: h * _divisor(w, h) ** -1,
        "x * reciprocal": lambda w, h: h * _divisor(w, h).reciprocal(),
    },
    _mean_quotient,
    marks=_set({"quotient"}),
    marked={"x * d**-1": _set({"inverse"}), "x * reciprocal": _set({"inverse"})},
)

SCALE = Block(
    lambda g: {"s": 1 + draw(g, SIZE, scale=0.3)},
    {
        "mul": lambda w, h: h * w["s"],
        "first": lambda w, h: w["s"] * h,
        "div": lambda w, h: h / w["s"].reciprocal(),
        "in place": lambda w, h: h.clone().mul_(w["s"]),
    },
    lambda tape, w, h: tape.scale(h, w["s"]),
    marks=_set({"broadcasting"}),
    marked={"in place": _set({"in_place"})},
)

# ---------------------------------------------------------------- functions


def _gelu_by_hand(w: Weights, h: Tensor) -> Tensor:
    return 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))


RELU = Block(
    lambda g: {},
    {
        "relu": lambda w, h: h.relu(),
        "clamp": lambda w, h: h.clamp(min=0),
        "in place": lambda w, h: h.clone().relu_(),
        "threshold": lambda w, h: F.threshold(h, 0.0, 0.0),
    },
    lambda tape, w, h: tape.act(h, torch.relu),
    marks=_set({"activation"}),
    marked={"in place": _set({"in_place"})},
)

# A rectifier as a choice between h and 0: where relevance is given to zeros, below a flat first map, the 0 that was chosen keeps it.
CHOSEN = Block(
    lambda g: {},
    {
        "where": lambda w, h: torch.where(h > 0, h, 0.0),
        "maximum": lambda w, h: torch.maximum(h, torch.zeros((), dtype=h.dtype)),
        "masked_fill": lambda w, h: h.masked_fill(h <= 0, 0.0),
    },
    lambda tape, w, h: (lambda mask: tape.move(h, lambda t: torch.where(mask, t, 0.0)))(h.value.detach() > 0),
    marks=_set({"selection"}),
)

SMOOTH = Block(
    lambda g: {},
    {"gelu": lambda w, h: F.gelu(h), "by hand": _gelu_by_hand},
    lambda tape, w, h: tape.act(h, F.gelu),
    marks=_set({"activation"}),
)

SILU = Block(
    lambda g: {},
    {
        "silu": lambda w, h: F.silu(h),
        "by hand": lambda w, h: h * h.sigmoid(),
        "in place": lambda w, h: F.silu(h.clone(), inplace=True),
        "exp": lambda w, h: h / (1 + torch.exp(-h)),
    },
    lambda tape, w, h: tape.act(h, F.silu),
    marks=_set({"activation"}),
    marked={"in place": _set({"in_place"})},
)

TANH = Block(
    lambda g: {},
    {"tanh": lambda w, h: h.tanh(), "in place": lambda w, h: h.clone().tanh_(), "cast": lambda w, h: BETWEEN["cast"](h.view(h.shape).tanh())},
    lambda tape, w, h: tape.act(h, torch.tanh),
    marks=_set({"activation"}),
    marked={"in place": _set({"in_place"})},
)  # fmt: skip

SIGMOID = Block(
    lambda g: {},
    {"sigmoid": lambda w, h: h.sigmoid(), "clone": lambda w, h: h.clone().sigmoid()},
    lambda tape, w, h: tape.function(h, torch.sigmoid),
    marks=_set({"function"}),
)

SOFTPLUS = Block(
    lambda g: {},
    {"softplus": lambda w, h: F.softplus(h), "view": lambda w, h: F.softplus(h.view(h.shape))},
    lambda tape, w, h: tape.function(h, F.softplus),
    marks=_set({"function"}),
)


def _exp_over_sum(t: Tensor, dim: int = -1) -> Tensor:
    e = t.exp()
    return e / e.sum(dim, keepdim=True)


SOFTMAX = Block(
    lambda g: {},
    {"softmax": lambda w, h: h.softmax(-1), "exp over sum": lambda w, h: _exp_over_sum(h)},
    lambda tape, w, h: tape.softmax(h),
    marks=_set({"softmax"}),
    marked={"exp over sum": _set({"exp_over_sum"})},
)

# ---------------------------------------------------------------- norms


def _layer_norm_by_hand(w: Weights, h: Tensor) -> Tensor:
    d = h - h.mean(-1, keepdim=True)
    return d * torch.rsqrt(d.pow(2).mean(-1, keepdim=True) + EPS) * w["scale"] + w["shift"]


def _layer_norm_divided(w: Weights, h: Tensor) -> Tensor:
    d = h - h.mean(-1, keepdim=True)
    return d / torch.sqrt(d.pow(2).mean(-1, keepdim=True) + EPS) * w["scale"] + w["shift"]


def _mean_layer_norm(tape: Tape, w: Weights, h: Node) -> Node:
    if not tape.written:
        return tape.norm(h, w["scale"], w["shift"], EPS)
    d = tape.add(h, tape.reduce(h, -1, keepdim=True), factors=(1.0, -1.0))
    scaled = tape.scale(_rooted(tape, d), w["scale"])
    return tape.add(scaled, tape.parameter(w["shift"]))


def _rooted(tape: Tape, d: Node) -> Node:
    """d / rms(d): a scaling by a statistic, or as the primitives that the paper's rules see of it."""
    if not tape.primitives:
        return tape.scale(d, torch.rsqrt(d.value.square().mean(-1, keepdim=True) + EPS))
    mean = tape.add(tape.reduce(tape.act(d, torch.square), -1, keepdim=True), tape.literal(EPS))
    return tape.times(d, tape._add("act", mean.value.rsqrt(), mean))


def norm_weights(g: torch.Generator) -> Weights:
    return {"scale": 1 + draw(g, SIZE, scale=0.3), "shift": draw(g, SIZE, scale=0.5)}


LAYER_NORM = Block(
    norm_weights,
    {
        "fused": lambda w, h: F.layer_norm(h, (SIZE,), w["scale"], w["shift"], EPS),
        "clone": lambda w, h: F.layer_norm(h.clone(), (SIZE,), w["scale"], w["shift"], EPS).view(h.shape),
        "by hand": _layer_norm_by_hand,
        "divided": _layer_norm_divided,
    },
    _mean_layer_norm,
    marked={
        "fused": _set({"norm_fused"}), "clone": _set({"norm_fused"}), "by hand": _set({"norm_by_hand"}),
        "divided": _set({"norm_by_hand"}),
    },
    written=_set({"by hand", "divided"}),
)  # fmt: skip


def _mean_rms(tape: Tape, w: Weights, h: Node) -> Node:
    return tape.scale(_rooted(tape, h), w["scale"])


RMS_NORM = Block(
    norm_weights,
    {
        "fused": lambda w, h: F.rms_norm(h, (SIZE,), w["scale"], EPS),
        "by hand": lambda w, h: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * w["scale"],
        "weight first": lambda w, h: w["scale"] * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)),
        "divided": lambda w, h: w["scale"] * (h / (h.pow(2).mean(-1, keepdim=True) + EPS).sqrt()),
        "power": lambda w, h: h * (h.pow(2).mean(-1, keepdim=True) + EPS).pow(-0.5) * w["scale"],
    },
    _mean_rms,
    marked={"fused": _set({"norm_fused"})} | {name: _set({"norm_by_hand"}) for name in ("by hand", "weight first", "divided", "power")},
    written=_set({"fused", "by hand", "weight first", "divided", "power"}),
)  # fmt: skip

BATCH_NORM = Block(
    lambda g: a_norm(g),
    {"tanh before": lambda w, h: batch_norm(h.tanh().flatten(0, 1), w).unflatten(0, h.shape[:2])},
    lambda tape, w, h: tape.batch_norm(tape.act(h, torch.tanh), *folded(w)),
    marks=_set({"norm_fused"}),
)

# ---------------------------------------------------------------- attention


def attention_weights(g: torch.Generator) -> Weights:
    made: Weights = {}
    for name in "qkv":
        one = a_map(g)
        made |= {name: one["w"], "b" + name: one["b"]}
    return made


def _qkv(w: Weights, h: Tensor) -> list[Tensor]:
    return [F.linear(h, w[name], w["b" + name]) for name in "qkv"]


def _fused_attention(w: Weights, h: Tensor) -> Tensor:
    q, k, v = (t.unsqueeze(1) for t in _qkv(w, h))
    return F.scaled_dot_product_attention(q, k, v).squeeze(1)


def _packed_attention(w: Weights, h: Tensor) -> Tensor:
    packed = F.linear(h, torch.cat([w[n] for n in "qkv"]), torch.cat([w["b" + n] for n in "qkv"]))
    q, k, v = packed.chunk(3, -1)
    return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]


def _eager_attention(softmax: Callable[[Tensor], Tensor], before: bool = False) -> Callable[[Weights, Tensor], Tensor]:
    def run(w: Weights, h: Tensor) -> Tensor:
        q, k, v = _qkv(w, h)
        scores = (q / 2) @ k.transpose(1, 2) if before else q @ k.mT / 2
        return softmax(scores).clone() @ v if before else softmax(scores) @ v

    return run


def _einsum_attention(w: Weights, h: Tensor) -> Tensor:
    q, k, v = _qkv(w, h)
    return torch.einsum("bqk,bkd->bqd", (torch.einsum("bqd,bkd->bqk", q, k) * 0.5).softmax(-1), v)


def _mean_attention(tape: Tape, w: Weights, h: Node) -> Node:
    q, k, v = (tape.linear(h, w[name], w["b" + name]) for name in "qkv")
    scores = tape.scale(tape.matmul(q, tape.move(k, lambda t: t.mT)), 0.5)
    return tape.matmul(tape.softmax(scores, -1, weighs=True), v, weighs=True)


_BY_HAND = _set({"attention_by_hand"})
ATTENTION = Block(
    attention_weights,
    {
        "sdpa": _fused_attention,
        "packed sdpa": _packed_attention,
        "softmax": _eager_attention(lambda t: t.softmax(-1)),
        "scaled before": _eager_attention(lambda t: F.softmax(t, -1), before=True),
        "exp over sum": _eager_attention(_exp_over_sum),
        "einsum": _einsum_attention,
    },
    _mean_attention,
    marked={"sdpa": _set({"attention_fused"}), "packed sdpa": _set({"attention_fused"})}
    | dict.fromkeys(("softmax", "scaled before", "einsum"), _BY_HAND)
    | {"exp over sum": _BY_HAND | _set({"attention_exp_over_sum"})},
)


def _mean_bare(tape: Tape, w: Weights, h: Node) -> Node:
    scores = tape.scale(tape.matmul(h, tape.move(h, lambda t: t.mT)), 0.5)
    return tape.matmul(tape.softmax(scores, -1, weighs=True), h, weighs=True)


# Without maps of its own: products of two live matrices may be the first products above an input.
BARE = Block(
    lambda g: {},
    {
        "sdpa": lambda w, h: F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])[:, 0],
        "softmax": lambda w, h: (h @ h.mT / 2).softmax(-1) @ h,
    },
    _mean_bare,
    marked={"sdpa": _set({"attention_fused"}), "softmax": _set({"attention_by_hand", "attention_of_inputs"})},
)

# ---------------------------------------------------------------- routing, selections, transforms

EXPERTS = 3


def routing_weights(g: torch.Generator) -> Weights:
    return a_map(g, EXPERTS) | {f"e{n}": t for n, t in a_map(g, EXPERTS * SIZE).items()}


def _route(
    found: Callable[[Tensor], Any], pick: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[Weights, Tensor], Tensor]:
    def run(w: Weights, h: Tensor) -> Tensor:
        value, index = found(F.linear(h, w["w"], w["b"]).softmax(-1))
        experts = F.linear(h, w["ew"], w["eb"]).unflatten(-1, (EXPERTS, SIZE))
        return pick(experts, index).squeeze(2) * value

    return run


def _gathered(experts: Tensor, index: Tensor) -> Tensor:
    return experts.gather(2, index[..., None].expand(-1, -1, 1, SIZE))


def _mean_routing(tape: Tape, w: Weights, h: Node) -> Node:
    gate = tape.softmax(tape.linear(h, w["w"], w["b"]))
    value = tape.largest(gate)
    index = gate.value.detach().argmax(-1, keepdim=True)
    experts = tape.move(tape.linear(h, w["ew"], w["eb"]), lambda t: t.unflatten(-1, (EXPERTS, SIZE)))
    chosen = tape.move(experts, lambda t: _gathered(t, index).squeeze(2))
    return tape.times(chosen, value, gate=1, softmax=True)


ROUTING = Block(
    routing_weights,
    {
        "topk": _route(lambda p: p.topk(1, -1), _gathered),
        "max": _route(lambda p: p.max(-1, keepdim=True), _gathered),
        "sort": _route(lambda p: [t[..., :1] for t in p.sort(-1, descending=True)], _gathered),
        "take_along_dim": _route(lambda p: p.topk(1, -1), lambda e, i: torch.take_along_dim(e, i[..., None], 2)),
    },
    _mean_routing,
    marks=_set({"top_k_routing", "selection", "chosen_by_value"}),
)

MASKED = Block(
    lambda g: {},
    {
        "where": lambda w, h: torch.where(_mask(h), h, torch.zeros((), dtype=h.dtype)),
        "masked_fill": lambda w, h: h.masked_fill(~_mask(h), 0.0),
        "pad": lambda w, h: F.pad(h[..., :-1], (0, 1)),
    },
    lambda tape, w, h: tape.move(h, lambda t: torch.where(_mask(t), t, 0.0)),
    marks=_set({"selection", "constants"}),
)


def _mask(h: Tensor) -> Tensor:
    return torch.arange(SIZE) < SIZE - 1


# The same function as a product: below a flat first map the masked values take relevance too.
MASK = Block(
    lambda g: {},
    {"mul": lambda w, h: h * _mask(h).to(h.dtype), "mask first": lambda w, h: _mask(h).to(h.dtype) * h},
    lambda tape, w, h: tape.scale(h, _mask(h.value).to(tape.dtype)),
    marks=_set({"constants", "broadcasting"}),
)

MOVED = Block(
    lambda g: {},
    {
        "flip": lambda w, h: h.flip(-1).roll(1, 1),
        "index": lambda w, h: h[..., [3, 2, 1, 0]].roll(1, 1),
        "index_select": lambda w, h: h.index_select(-1, torch.tensor([3, 2, 1, 0])).roll(1, 1),
        "stack": lambda w, h: torch.stack(h.unbind(-1)[::-1], -1).roll(1, 1),
        "cat": lambda w, h: (lambda t: torch.cat([t[:, -1:], t[:, :-1]], 1))(h.flip(-1)),
    },
    lambda tape, w, h: tape.move(h, lambda t: t.flip(-1).roll(1, 1)),
    marks=_set({"selection"}),
    marked={"stack": _set({"output_used_twice"})},
)

SCAN = Block(
    lambda g: {"k": draw(g, SIZE, SIZE, scale=0.5)},
    {"cumsum": lambda w, h: h.cumsum(1)},
    lambda tape, w, h: tape.transform(h, lambda t: t.cumsum(1)),
)

SPECTRUM = Block(
    lambda g: {},
    {
        "real": lambda w, h: torch.fft.irfft(torch.fft.rfft(h + h.roll(1, 1)), n=SIZE),
        "complex sum": lambda w, h: torch.fft.irfft(torch.fft.rfft(h) + torch.fft.rfft(h.roll(1, 1)), n=SIZE),
        "complex difference": lambda w, h: torch.fft.irfft(torch.fft.rfft(h) - torch.fft.rfft(-h.roll(1, 1)), n=SIZE),
        "complex mean": lambda w, h: 2 * torch.fft.irfft(torch.stack([torch.fft.rfft(h), torch.fft.rfft(h.roll(1, 1))]).mean(0), n=SIZE),
    },
    lambda tape, w, h: tape.transform(tape.add(h, tape.move(h, lambda t: t.roll(1, 1))), lambda t: t.clone()),
    marked={name: _set({"complex_sums"}) for name in ("complex sum", "complex difference", "complex mean")},
)  # fmt: skip

BLOCKS: dict[str, Block] = {
    "linear": LINEAR, "layer": LAYER, "free": FREE, "linear norm": LINEAR_NORM, "shared": SHARED, "residual": RESIDUAL, "difference": DIFFERENCE,
    "context": CONTEXT, "centred": CENTRED, "constant": CONSTANT, "buffer": BUFFER, "slice added": SLICE_ADDED,
    "slice copied": SLICE_COPIED, "unused": UNUSED, "twice": TWICE, "largest": LARGEST, "gate": GATE, "squeeze": SQUEEZE,
    "swiglu": SWIGLU, "product": PRODUCT, "quotient": QUOTIENT, "scale": SCALE, "relu": RELU, "gelu": SMOOTH, "silu": SILU,
    "tanh": TANH, "sigmoid": SIGMOID, "softplus": SOFTPLUS, "softmax": SOFTMAX, "layer norm": LAYER_NORM, "rms norm": RMS_NORM,
    "batch norm": BATCH_NORM, "attention": ATTENTION, "bare attention": BARE, "routing": ROUTING, "masked": MASKED, "mask": MASK, "chosen": CHOSEN, "moved": MOVED, "scan": SCAN,
    "spectrum": SPECTRUM,
}  # fmt: skip

"""What a program means, as a tape of plain operations, and its relevance, operation by operation from the output down.

In: values and what each operation is (a map with W and b, a sum, a product with a gate, …). Out: `relevance(tape, output, seed, preset)`.
The tape is told what everything is: it recognises nothing, and knows neither torch's autograd nodes nor the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import rules as formula
from .rules import PRESETS, Rules


class Tied(Exception):
    """Two values are the largest."""


@dataclass(eq=False)
class Node:
    """One value of a program and how it came to be."""

    kind: str
    value: Tensor
    parents: tuple[Node, ...] = ()
    live: bool = True  # does an input reach it?
    takes: bool = True  # does it take shares of sums? Literals do not; parameters do, and keep them
    data: dict[str, Any] = field(default_factory=dict)


class Tape:
    """Records the operations of one forward pass.

    Two flags for those who record: `written`, did the program write a normalisation out, and `primitives`, does the preset see no composites?
    """

    def __init__(self, dtype: torch.dtype = torch.float64, primitives: bool = False) -> None:
        self.dtype, self.primitives, self.written = dtype, primitives, False
        self.noise = (
            0.0  # rounding of a Fourier transform, to see whether relevance hangs on it: it makes zeros nearly zero
        )
        self.nodes: list[Node] = []
        self.leaves: dict[str, list[tuple[Node, Tensor | None, torch.Size]]] = {}

    def _add(self, kind: str, value: Tensor, *parents: Node, **data: Any) -> Node:
        live = any(parent.live for parent in parents)
        node = Node(kind, value, parents, live, True, data)
        self.nodes.append(node)
        return node

    # ------------------------------------------------------------ leaves

    def leaf(self, name: str, value: Tensor) -> Node:
        """A float input."""
        node = Node("leaf", value.to(self.dtype), live=True)
        self.nodes.append(node)
        self.leaves.setdefault(name, []).append((node, None, value.shape))
        return node

    def lookup(self, name: str, table: Tensor, looked: Tensor, origin: Tensor, shape: torch.Size) -> Node:
        """Rows of a table; `origin` says for each looked-up place which id it is of (-1: of none)."""
        node = Node("leaf", table[looked].to(self.dtype), live=True)
        self.nodes.append(node)
        self.leaves.setdefault(name, []).append((node, origin, shape))
        return node

    def parameter(self, value: Tensor) -> Node:
        return Node("parameter", value.to(self.dtype), live=False)

    def literal(self, value: Any) -> Node:
        return Node("literal", torch.as_tensor(value, dtype=self.dtype), live=False, takes=False)

    # ------------------------------------------------------------ linear maps

    def linear(self, x: Node, w: Tensor, b: Tensor | None = None, norm: Any = None) -> Node:
        """z = x·wᵀ + b over the last dimension; `norm`: a batch norm behind it, as (scale, shift)."""
        rows = x.value.reshape(-1, x.value.shape[-1])
        shape = (*x.value.shape[:-1], w.shape[0])
        return self._map(x, rows, w.t(), torch.ones_like(w.t()), b, norm, shape, conv=False)

    def conv(self, x: Node, w: Tensor, b: Tensor | None, norm: Any, padding: int) -> Node:
        """A convolution as the dense matrix that it is."""
        shape = x.value.shape[1:]
        basis = torch.eye(shape.numel(), dtype=self.dtype).reshape(-1, *shape)
        made = torch.conv2d(basis, w.to(self.dtype), padding=padding)
        connected = torch.conv2d(basis, torch.ones_like(w, dtype=self.dtype), padding=padding)
        place = made.shape[2] * made.shape[3]
        b = None if b is None else b.repeat_interleave(place)
        norm = None if norm is None else tuple(t.repeat_interleave(place) for t in norm)
        out = (len(x.value), *made.shape[1:])
        return self._map(x, x.value.flatten(1), made.flatten(1), connected.flatten(1), b, norm, out, conv=True)

    def _map(
        self, x: Node, rows: Tensor, matrix: Tensor, connected: Tensor, b: Any, norm: Any, shape: Any, conv: bool
    ) -> Node:
        matrix, connected = matrix.to(self.dtype), connected.to(self.dtype)
        bias = torch.zeros(matrix.shape[1], dtype=self.dtype) if b is None else b.to(self.dtype)
        norm = None if norm is None else tuple(t.to(self.dtype) for t in norm)
        z = rows @ matrix + bias
        y = z if norm is None else z * norm[0] + norm[1]
        return self._add(
            "map", y.reshape(shape), x,
            rows=rows, matrix=matrix, connected=connected, bias=bias, biased=b is not None, norm=norm, conv=conv,
        )  # fmt: skip

    # ------------------------------------------------------------ sums and selections

    def add(self, *terms: Node, factors: tuple[float, ...] | None = None) -> Node:
        factors = factors or (1.0,) * len(terms)
        return self._add("sum", sum(f * t.value for f, t in zip(factors, terms)), *terms, factors=factors)

    def reduce(self, x: Node, dim: Any, mean: bool = True, keepdim: bool = False) -> Node:
        value = x.value.mean(dim, keepdim) if mean else x.value.sum(dim, keepdim)
        count = x.value.numel() // value.numel() if mean else 1
        return self._add("reduce", value, x, dim=dim, keepdim=keepdim, count=count)

    def pool(self, x: Node, pool: Callable[[Tensor], Tensor]) -> Node:
        """An average over windows, linear in x."""
        return self._add("pool", pool(x.value), x, pool=pool)

    def move(self, x: Node, move: Callable[[Tensor], Tensor]) -> Node:
        """Views, copies, selections by place: `move` must not compute."""
        places = move(torch.arange(1, x.value.numel() + 1, dtype=torch.float64).reshape(x.value.shape)).long()
        padded = torch.cat([torch.zeros(1, dtype=self.dtype), x.value.flatten()])
        return self._add("move", padded[places], x, places=places)

    def join(self, *parts: Node, dim: int) -> Node:
        return self._add("join", torch.cat([part.value for part in parts], dim), *parts, dim=dim)

    def largest(self, x: Node) -> Node:
        """The largest of the last dimension. Where two are equal, which one takes all is nobody's promise."""
        top = x.value.detach().topk(2, -1)
        if bool((top.values[..., 0] == top.values[..., 1]).any()):
            raise Tied
        return self.move(x, lambda t: t.gather(-1, top.indices[..., :1]))

    def transform(self, x: Node, transform: Callable[[Tensor], Tensor]) -> Node:
        """A fixed linear map of each row, LRP-0 under every preset."""
        n = x.value[0].numel()
        matrix = transform(torch.eye(n, dtype=torch.float64).reshape(n, *x.value.shape[1:])).flatten(1).to(self.dtype)
        value = transform(x.value)
        if self.noise:
            matrix = matrix + self.noise * torch.randn(
                matrix.shape, generator=torch.Generator().manual_seed(6), dtype=self.dtype
            )
            value = (x.value.flatten(1) @ matrix).reshape(value.shape)
        return self._add("transform", value, x, matrix=matrix)

    # ------------------------------------------------------------ products

    def scale(self, x: Node, factor: Any) -> Node:
        """A product with what no input reaches."""
        return self._add("scale", x.value * torch.as_tensor(factor, dtype=self.dtype), x)

    def times(self, a: Node, b: Node, gate: int | None = None, softmax: bool = False, quotient: bool = False) -> Node:
        """a·b elementwise; `gate`: which of them is a gate (made by a softmax?); `quotient`: b is 1/d of a division.

        Where the other one is a sigmoid too, moved or scaled at most, neither is the signal.
        """
        if gate is not None and _is_gate((a, b)[1 - gate]):
            gate, softmax = None, False
        return self._add("times", a.value * b.value, a, b, gate=gate, softmax=softmax, quotient=quotient)

    def matmul(self, a: Node, b: Node, weighs: bool = False) -> Node:
        """a·b of two live matrices; `weighs`: a is an attention pattern."""
        return self._add("matmul", a.value @ b.value, a, b, weighs=weighs)

    # ------------------------------------------------------------ functions and norms

    def act(self, x: Node, f: Callable[[Tensor], Tensor]) -> Node:
        """f(0) = 0: the identity rule."""
        return self._add("act", f(x.value), x)

    def function(self, x: Node, f: Callable[[Tensor], Tensor]) -> Node:
        """f(0) ≠ 0."""
        at = x.value.detach().double().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(f(at).sum(), at)
        zero = float(f(torch.zeros((), dtype=torch.float64)))
        return self._add("function", f(x.value), x, slope=slope.to(self.dtype), zero=zero)

    def softmax(self, x: Node, dim: int = -1, weighs: bool = False) -> Node:
        return self._add("softmax", x.value.softmax(dim), x, dim=dim, weighs=weighs)

    def norm(self, x: Node, weight: Tensor, bias: Tensor, eps: float, centred: bool = True) -> Node:
        """LayerNorm or (not centred, no bias) RMSNorm over the last dimension, as one operation."""
        weight, bias = weight.to(self.dtype), bias.to(self.dtype)
        middle = x.value - x.value.mean(-1, keepdim=True) if centred else x.value
        scaled = middle * torch.rsqrt(middle.square().mean(-1, keepdim=True) + eps) * weight
        return self._add("norm", scaled + bias, x, scaled=scaled, bias=bias, centred=centred)

    def batch_norm(self, x: Node, scale: Tensor, shift: Tensor) -> Node:
        """In eval mode over the last dimension, standing alone."""
        scale, shift = scale.to(self.dtype), shift.to(self.dtype)
        return self._add("batch_norm", x.value * scale + shift, x, scaled=x.value * scale, shift=shift)


def _is_gate(node: Node) -> bool:
    """Is it made by a sigmoid?"""
    while node.kind in ("move", "scale") or (node.kind == "times" and node.data["quotient"]):
        node = node.parents[0]
    return node.kind == "function" and node.data["zero"] == 0.5


# ---------------------------------------------------------------- relevance


def relevance(tape: Tape, output: Node, seed: Tensor, preset: str) -> dict[str, Tensor]:
    """Relevance of every input under a preset: of numbers elementwise, of ids summed over what was looked up."""
    if preset == "gradient":
        return gradient_times_input(tape, output, seed)
    arrived = pass_down(tape, output, seed, PRESETS[preset])
    return {
        name: _gather(places, [arrived.get(node, torch.zeros_like(node.value)) for node, _, _ in places])
        for name, places in tape.leaves.items()
    }


def _gather(places: list, found: list[Tensor]) -> Tensor:
    total: Any = 0
    for (_, origin, shape), r in zip(places, found):
        if origin is not None:
            r, flat = r.sum(-1).flatten(), origin.flatten()
            kept = flat >= 0
            r = torch.zeros(shape.numel(), dtype=r.dtype).index_add(0, flat[kept], r[kept]).reshape(shape)
        total = total + r
    return total


def gradient_times_input(tape: Tape, output: Node, seed: Tensor) -> dict[str, Tensor]:
    """The tape's own values, if it was recorded with gradients."""
    leaves = [node.value for places in tape.leaves.values() for node, _, _ in places]
    made = torch.autograd.grad(output.value, leaves, formula.over(seed, output.value.detach()), allow_unused=True)
    by_leaf = iter(leaf.detach() * g if g is not None else torch.zeros_like(leaf) for leaf, g in zip(leaves, made))
    return {name: _gather(places, [next(by_leaf) for _ in places]) for name, places in tape.leaves.items()}


def pass_down(tape: Tape, output: Node, seed: Tensor, rules: Rules) -> dict[Node, Tensor]:
    arrived: dict[Node, Tensor] = {output: seed}
    firsts, depths = first_maps(tape), conv_depths(tape, rules)
    at_zeros = zeros_with_relevance(tape, rules, firsts)
    for node in reversed(tape.nodes):
        if node not in arrived or not node.parents:
            continue
        for parent, r in zip(
            node.parents, _BACK[node.kind](node, arrived[node], rules, node in firsts, depths.get(node, 0.0))
        ):
            if parent.live and r is not None:
                r = formula.reduce_to(r, parent.value.shape).to(tape.dtype)
                if parent not in at_zeros:  # what is 0 carries none
                    r = torch.where(parent.value == 0, 0, r)
                arrived[parent] = arrived[parent] + r if parent in arrived else r
    return arrived


def zeros_with_relevance(tape: Tape, rules: Rules, firsts: set[Node]) -> set[Node]:
    """Tensors whose zeros may hold relevance: below flat, box and uniform pools, through movement and identity (RULES.md, "Tensors that carry R")."""
    found: set[Node] = set()
    for node in reversed(tape.nodes):
        kind = node.kind
        gives = kind == "map" and node in firsts and bool(rules.first or (rules.first_conv and node.data["conv"]))
        gives |= kind == "pool" and rules.pools[0] == "uniform"
        passes = kind in ("move", "join", "act", "scale") or (kind == "times" and rules.products == "absolute")
        passes |= (kind == "batch_norm" and rules.batch_norms == "identity") or (
            kind == "norm" and rules.norms == "identity"
        )
        if gives or (passes and node in found):
            found.update(node.parents)
    return found


def first_maps(tape: Tape) -> set[Node]:
    """Linear maps with no other linear map between them and an input; a product of two live matrices is none (RULES.md)."""
    above: set[Node] = set()
    first = set()
    for node in tape.nodes:
        below = any(parent in above for parent in node.parents)
        if node.kind == "map" and node.live and not below:
            first.add(node)
        if below or node.kind == "map":
            above.add(node)
    return first


def conv_depths(tape: Tape, rules: Rules) -> dict[Node, float]:
    """How deep a convolution lies, 0 to 1, counted in convolutions that have the graded rule."""
    firsts, under = first_maps(tape), {}
    graded = []
    for node in tape.nodes:
        below = max((under.get(parent, 0) for parent in node.parents), default=0)
        mine = node.kind == "map" and node.live and node.data["conv"] and not (rules.first_conv and node in firsts)
        under[node] = below + mine
        graded += [node] if mine else []
    deepest = max((under[node] for node in graded), default=1)
    return {node: (under[node] - 1) / max(1, deepest - 1) for node in graded}


def _back_map(node: Node, r: Tensor, rules: Rules, first: bool, depth: float) -> list[Tensor]:
    d, x = node.data, node.parents[0]
    rows, matrix, bias, norm = d["rows"], d["matrix"], d["bias"], d["norm"]
    r = r.reshape(len(rows), -1)
    rule = rules.conv if d["conv"] else rules.biased if rules.biased and d["biased"] else rules.linear
    rule = (
        rules.first_conv if first and d["conv"] and rules.first_conv else rules.first if first and rules.first else rule
    )
    if norm is not None:
        if rules.folds and rule[0] != "zero":
            matrix, bias = matrix * norm[0], bias * norm[0] + norm[1]
        else:
            z = rows @ matrix + bias
            r = _norm_share(rules, r, z * norm[0], norm[1])
    name, *numbers = rule
    if name == "gamma by depth":
        start, last, eps = numbers
        part = depth**0.5
        name, numbers = "gamma", [start ** (1 - part) * last**part, eps]
    if name == "flat":
        made = formula.flat_rule(d["connected"], r, *numbers)
    elif name == "box":
        low, high, eps = numbers
        made = formula.box_rule(rows, matrix, r, *_bounds(x.value, low, high), eps)
    else:
        made = _MAPS[name](rows[:, :, None] * matrix, bias.expand(r.shape), r, *numbers)
    return [made.reshape(x.value.shape)]


_MAPS = {
    "zero": formula.zero_rule,
    "epsilon": formula.epsilon_rule,
    "plus": formula.plus_rule,
    "gamma": formula.gamma_rule,
    "alpha-beta": formula.alpha_beta_rule,
    "absolute": formula.absolute_rule,
}


def _bounds(x: Tensor, low: float | None, high: float | None) -> tuple[Tensor, Tensor]:
    """Without bounds: each channel's own extremes, a thousandth of the largest wider (Box's docstring and comment)."""
    if low is not None:
        return torch.full_like(x.flatten(1), low), torch.full_like(x.flatten(1), high)
    bottom, top = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    widest = torch.maximum(top, -bottom).amax(1, keepdim=True)
    slack = torch.where(widest == 0, 1, widest) * 1e-3
    return (bottom - slack).expand_as(x).flatten(1), (top + slack).expand_as(x).flatten(1)


def _norm_share(rules: Rules, r: Tensor, scaled: Tensor, shift: Tensor) -> Tensor:
    """What a batch norm that stands alone hands down."""
    if rules.batch_norms == "identity":
        return r
    if rules.batch_norms == "absolute":
        return r * scaled.abs() / formula.up(scaled.abs() + shift.abs(), 1e-11)
    return scaled * formula.over(r, scaled + shift)


def _back_sum(node: Node, r: Tensor, rules: Rules, *_: Any) -> list[Tensor]:
    parts = torch.broadcast_tensors(*[f * p.value for f, p in zip(node.data["factors"], node.parents)])
    return formula.sum_shares(rules.sums, r, list(parts), [p.takes for p in node.parents])


def _back_reduce(node: Node, r: Tensor, rules: Rules, *_: Any) -> list[Tensor]:
    x, dim, count = node.parents[0].value, node.data["dim"], node.data["count"]
    if not node.data["keepdim"]:
        for d in sorted(d % x.dim() for d in (dim if isinstance(dim, tuple) else (dim,))):
            r = r.unsqueeze(d)
    if rules.sums[0] == "absolute":
        return [r * x.abs() / formula.up(x.abs().sum(dim, keepdim=True), rules.sums[1])]
    return [x / count * formula.over(r, x.sum(dim, keepdim=True) / count, rules.sums[1])]


def _back_pool(node: Node, r: Tensor, rules: Rules, *_: Any) -> list[Tensor]:
    x, pool = node.parents[0].value, node.data["pool"]
    n = x[0].numel()
    matrix = pool(torch.eye(n, dtype=x.dtype).reshape(n, *x.shape[1:])).flatten(1)
    r = r.flatten(1)
    if rules.pools[0] == "uniform":
        return [((r / matrix.sum(0)) @ matrix.T).reshape(x.shape)]
    u = formula.over(r, x.flatten(1) @ matrix, rules.pools[1])
    return [x * (u @ matrix.T).reshape(x.shape)]


def _back_move(node: Node, r: Tensor, *_: Any) -> list[Tensor]:
    x = node.parents[0].value
    made = torch.zeros(x.numel() + 1, dtype=r.dtype).index_add(0, node.data["places"].flatten(), r.flatten())
    return [made[1:].reshape(x.shape)]


def _back_join(node: Node, r: Tensor, *_: Any) -> list[Tensor]:
    dim = node.data["dim"]
    return list(r.split([p.value.shape[dim] for p in node.parents], dim))


def _back_transform(node: Node, r: Tensor, *_: Any) -> list[Tensor]:
    x, matrix = node.parents[0].value, node.data["matrix"]
    u = formula.over(r, node.value).flatten(1)
    return [x * (u @ matrix.T).reshape(x.shape)]


def _back_scale(node: Node, r: Tensor, *_: Any) -> list[Tensor]:
    return [r]


def _back_times(node: Node, r: Tensor, rules: Rules, *_: Any) -> list[Tensor]:
    a, b = (p.value for p in node.parents)
    d = node.data
    if not (node.parents[0].live and node.parents[1].live):
        return [r, r]
    if rules.products == "absolute":
        total = formula.up(a.abs() + b.abs(), 1e-11)
        return [r * a.abs() / total, r * b.abs() / total]
    r = torch.where(node.value == 0, 0, r)  # whoever splits a product divides by it
    if d["quotient"]:
        return [r, torch.zeros_like(r)]
    if d["gate"] is None:
        return [r / 2, r / 2]
    part = rules.weights if d["softmax"] else rules.gate
    shares = [part * r, (1 - part) * r]
    return shares if d["gate"] == 0 else shares[::-1]


def _back_matmul(node: Node, r: Tensor, rules: Rules, *_: Any) -> list[Tensor]:
    a, b = (p.value for p in node.parents)
    part, rest = (0.5, 0.5)
    if node.data["weighs"]:
        part, rest = rules.weights, 1 - rules.weights
    u = formula.over(r, node.value)
    return [part * a * (u @ b.mT), rest * b * (a.mT @ u)]


def _back_same(node: Node, r: Tensor, *_: Any) -> list[Tensor]:
    return [r]


def _back_function(node: Node, r: Tensor, rules: Rules, *_: Any) -> list[Tensor]:
    if rules.functions == "share" and not node.data.get("passes"):
        return [formula.shared_function(r, node.value, node.data["zero"])]
    return [formula.taylor_function(r, node.parents[0].value, node.value, node.data["slope"])]


def _back_softmax(node: Node, r: Tensor, rules: Rules, *_: Any) -> list[Tensor | None]:
    if node.data["weighs"] and rules.pattern == "nothing":
        return [None]
    return [formula.softmax_taylor(r, node.parents[0].value, node.value, node.data["dim"])]


def _back_norm(node: Node, r: Tensor, rules: Rules, *_: Any) -> list[Tensor]:
    d = node.data
    if rules.norms == "identity":
        return [r]
    if not d["centred"]:
        return [d["scaled"] * formula.over(r, d["scaled"] + d["bias"])]
    return [formula.centred_norm(r, node.parents[0].value, d["scaled"], d["bias"])]


def _back_batch_norm(node: Node, r: Tensor, rules: Rules, *_: Any) -> list[Tensor]:
    return [_norm_share(rules, r, node.data["scaled"], node.data["shift"])]


_BACK: dict[str, Callable[..., list]] = {
    "map": _back_map, "sum": _back_sum, "reduce": _back_reduce, "pool": _back_pool, "move": _back_move, "join": _back_join,
    "transform": _back_transform, "scale": _back_scale, "times": _back_times, "matmul": _back_matmul, "act": _back_same,
    "function": _back_function, "softmax": _back_softmax, "norm": _back_norm, "batch_norm": _back_batch_norm,
}  # fmt: skip

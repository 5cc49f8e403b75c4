"""Double-entry bookkeeping of relevance: for every node what arrived, what it delivered, what was kept and by whom.

In: a graph and a plan made with `everything=True`. It watches a run from its hooks' side and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .graph import Graph
from .ops import Kind
from .plan import Plan
from .promise import operand_key, value_key
from .rules import Folded, LinearRule, Nothing, Rule
from .rules.base import bounded
from .step import Step

Hook = Callable[..., None]


@dataclass(frozen=True)
class Entry:
    """One node's account. `kept` is `arrived - delivered`, by reason."""

    node: int
    op: str
    rule: Rule
    arrived: float
    delivered: float
    kept: dict[str, float]
    conserves: bool
    scale: float  # sum of absolute relevance that arrived, to judge rounding by

    @property
    def error(self) -> float:
        """What is missing, relative to what moved."""
        return abs(self.arrived - self.delivered) / max(self.scale, 1e-30)


class Ledger:
    """The accounts of one explanation: `total` = `delivered` + the sum of `kept`, up to `residual`."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self._graph: Graph | None = graph
        self._plan: Plan | None = plan
        self._arrived: dict[int, tuple[float, float]] = {}
        self._uncounted: set[int] = set()  # nodes next to a tensor whose value is lost
        self.entries: list[Entry] = []
        self.total = 0.0
        self.delivered = 0.0

    @property
    def kept(self) -> dict[str, float]:
        """What did not reach the inputs, by reason, largest first."""
        totals: Counter[str] = Counter()
        for entry in self.entries:
            totals.update(entry.kept)
        return dict(sorted(totals.items(), key=lambda item: -abs(item[1])))

    @property
    def residual(self) -> float:
        """What the accounts cannot explain: rounding."""
        return self.total - self.delivered - sum(self.kept.values())

    def close(self, seed: Tensor, relevances: Sequence[Tensor]) -> None:
        """Enter what was put in and what came out; let go of the graph."""
        self.total = float(seed.double().sum())
        self.delivered = sum(float(r.double().sum()) for r in relevances)
        self._graph = self._plan = None
        self._arrived.clear()

    def watch(self, step: Step, node: Any, values: Any) -> tuple[Hook, Hook]:
        """Hooks around a node: the first sees what arrives before its rule, the second what its rule delivers."""
        assert self._graph is not None and self._plan is not None
        graph, forms, carries = self._graph, self._plan.forms, step.node in self._plan.inside

        def arriving(grads: tuple[Tensor | None, ...]) -> None:
            if step.normed or (carries and not isinstance(step.rule, Folded)):
                return  # entered by the batch norm above
            amount = magnitude = 0.0
            for number, s in enumerate(grads):
                if s is None:
                    continue
                r = _wide(s)
                if step.form == "s":
                    value = values.peek(value_key((step.node, number)))
                    if value is None:  # lost: the consumer that delivered it could not count it either
                        self._uncounted.add(step.node)
                        continue
                    r = _relevance(r, value)
                amount, magnitude = amount + float(r.sum()), magnitude + float(r.abs().sum())
            self._arrived[step.node] = amount, magnitude

        def leaving(grads: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> None:
            if carries:  # one account with the linear map below
                amount, magnitude = self._arrived[graph.operand(step.node, 0)[0]] = self._arrived.pop(step.node)
                self.entries.append(Entry(step.node, step.name, step.rule, amount, amount, {}, True, magnitude))
                return
            amount = 0.0
            for position in step.live:
                g, ref = grads[position], graph.edges[step.node][position]
                if g is None or ref is None:
                    continue
                r = _wide(g)
                if forms.get(ref[0], "s") == "s":
                    value = values.peek(operand_key(graph, step.node, position))
                    if value is None:
                        self._uncounted.add(step.node)
                        continue
                    r = _relevance(r, value)
                amount += float(r.sum())
            arrived, magnitude = self._arrived.pop(step.node)
            conserves = step.rule.conserves(step) and not step.convert and step.node not in self._uncounted
            if step.node in self._uncounted:
                kept = {"uncounted": arrived - amount}
            else:
                kept = _reasons(graph, step, conserves, arrived - amount, incoming[0], values)
            self.entries.append(Entry(step.node, step.name, step.rule, arrived, amount, kept, conserves, magnitude))

        return arriving, leaving

    def __str__(self) -> str:
        rows = [("seed", self.total), ("delivered to inputs", self.delivered)]
        rows += [(f"kept: {reason}", amount) for reason, amount in self.kept.items()]
        rows += [("residual", self.residual)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {amount: .6g}" for name, amount in rows)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _relevance(coefficient: Tensor, value: Tensor) -> Tensor:
    value = _wide(value)
    if value.is_complex():  # torch's gradients are conjugate
        return (coefficient * value.conj()).real
    return coefficient * bounded(value)


def _reasons(
    graph: Graph, step: Step, conserves: bool, amount: float, u: Tensor | None, values: Any
) -> dict[str, float]:
    """Who kept it."""
    if conserves:
        return {"rounding": amount} if amount else {}
    if step.convert:
        return {"zeros": amount}  # relevance of values that are exactly zero
    if isinstance(step.rule, Nothing):
        return {"blocked": amount}
    if isinstance(step.rule, LinearRule):
        if not step.has_bias or step.top != step.node or u is None:
            return {"bias" if step.has_bias else "stabiliser": amount}
        output = values.peek(value_key((step.node, 0)))
        small = float((torch.where(output < 0, -step.rule.eps, step.rule.eps) * u).double().sum())
        return {"bias": amount - small, "stabiliser": small}
    match step.kind:
        case Kind.LINEAR | Kind.CONV | Kind.BATCHNORM:
            return {"bias": amount}
        case Kind.NORMALISE:
            return {"normalisation": amount}
        case Kind.SOFTMAX | Kind.WEIGHTS:
            return {"softmax": amount}
        case Kind.ATTENTION:
            return {"attention": amount}
        case Kind.SUM | Kind.MOVEMENT | Kind.POOL:
            others = [ref for position, ref in enumerate(graph.edges[step.node]) if position not in step.live]
            return {"parameter" if any(ref is not None for ref in others) else "constant": amount}
    return {"nonlinearity": amount}


class Locator:
    """Finds the first node that handed down something that is not finite."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.found: str | None = None

    def watch(self, step: Step, node: Any, values: Any) -> tuple[Hook, Hook]:
        def arriving(grads: tuple[Tensor | None, ...]) -> None:
            pass

        def leaving(grads: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> None:
            bad = [g for g in grads if g is not None and not bool(torch.isfinite(g).all())]
            if bad and self.found is None:
                shape = tuple(bad[0].shape)
                self.found = (
                    f"first made by {self.graph.where(step.node)} under {step.rule}, for an operand of shape {shape}"
                )

        return arriving, leaving

    def __str__(self) -> str:
        return self.found or "made by the product of a coefficient with the input's own value"

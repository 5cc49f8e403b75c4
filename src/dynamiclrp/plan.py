"""What `run` will do: a rule for every live node and a source for every value a rule needs.

A plan holds no tensors, no shapes and no autograd nodes; it serves any graph of the same signature, node by node. It is made by
`planning`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from .maps import Part
from .presets import Preset
from .promise import (
    Branch,
    Kept,
    Key,
    Leaf,
    Promise,
    Rest,
    Source,
)
from .step import Step


@dataclass(frozen=True)
class Statistics:
    """The paper's quantities (its definitions 4 and 5, table 4)."""

    nodes: int
    live: int
    ops: int
    promises: int
    internal_nodes: int  # nodes inside forward chains
    depth: int  # δ: steps to the Arg nodes, summed over promises
    density: float  # ρ: promises per node


@dataclass(frozen=True, eq=False)
class Plan:
    """What `run` will do. `print(plan)` shows each rule and each promise with its chain and Arg node."""

    preset: Preset
    steps: tuple[Step, ...]  # all live nodes, in the order in which relevance meets them
    output_forms: tuple[str, ...]
    input_forms: tuple[str, ...]
    forms: dict[int, str]  # by node: what its outputs carry
    sources: dict[Key, Source]  # every value that will be fetched or rebuilt
    uses: Counter[Key]
    promises: tuple[Promise, ...]
    nodes: int
    ops: int
    extras: tuple[
        tuple[int, tuple[str, ...]], ...
    ]  # saved tensors, beside operands and results, that are read after a node's turn
    leaves: tuple[int, ...]  # nodes of the leaves that are read, beside the inputs
    touched: tuple[int, ...]  # nodes of whose saved tensors some are read
    missing: dict[str, int]  # operations without a row that keep their gradient, by the caller's choice

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of its results has to know."""
        if not self.missing:
            return ()
        names = ", ".join(f"{n} x {op}" for op, n in self.missing.items())
        return (
            f"no rule for {names}: there relevance is split by the plain gradient (on_missing='gradient'), as no LRP rule does",
        )

    @cached_property
    def hooked(self) -> tuple[Step, ...]:
        """Steps that are more than the native backward."""
        return tuple(step for step in self.steps if any(step.hooks))

    @cached_property
    def differences(self) -> tuple[int, ...]:
        """Sums from which one operand is taken to have the other."""
        return tuple(dict.fromkeys(source.node for source in self.sources.values() if isinstance(source, Rest)))

    @cached_property
    def needs_parameters(self) -> bool:
        """Do its rules depend on which parameters autograd followed?"""
        return any(step.rule.needs_parameters for step in self.steps)

    @cached_property
    def early(
        self,
    ) -> tuple[tuple[tuple[Key, int, str], ...], tuple[tuple[Key, int], ...], tuple[tuple[Key, Source], ...]]:
        """What must be read before relevance moves: values that nodes saved, leaves, and others that rest on nothing."""
        first = [(key, source) for key, source in self.sources.items() if not source.operands]
        kept = [(key, source.holder, source.attribute) for key, source in first if isinstance(source, Kept)]
        leaves = [(key, source.node) for key, source in first if isinstance(source, Leaf)]
        others = [(key, source) for key, source in first if not isinstance(source, (Kept, Leaf))]
        return tuple(kept), tuple(leaves), tuple(others)

    @cached_property
    def parts(self) -> dict[int, Part]:
        """By linear map: what counts as part of it."""
        return {step.node: step.part for step in self.steps if step.part is not None}

    @cached_property
    def inside(self) -> dict[int, int]:
        """By node that only carries on what arrives at a map of which it is part: that map."""
        return {node: part_of for part_of, part in self.parts.items() for node in part.inside}

    @cached_property
    def statistics(self) -> Statistics:
        internal = sum(len(branch.chain) for promise in self.promises for branch in _branches(promise))
        depth = sum(promise.depth for promise in self.promises)
        count = len(self.promises)
        return Statistics(self.nodes, len(self.steps), self.ops, count, internal, depth, count / max(self.nodes, 1))

    def __str__(self) -> str:
        counts = Counter(
            (step.name, str(step.kind), repr(step.rule) if any(step.hooks) else "native") for step in self.steps
        )
        width = max((len(name) for name, _, _ in counts), default=0)
        s = self.statistics
        lines = [
            f"Plan: {self.preset!r}, {s.live} live of {s.nodes} nodes, {len(self.hooked)} hooked, "
            f"{s.promises} promises, {s.internal_nodes} internal nodes, depth {s.depth}, density {s.density:.3f}",
        ]
        lines += [f"  {n:5} x {name:{width}}  {kind:10}  {rule}" for (name, kind, rule), n in sorted(counts.items())]
        if self.missing:
            lines.append("Without a rule, by gradient: " + ", ".join(f"{n} x {op}" for op, n in self.missing.items()))
        if self.promises:
            lines.append("Promises:")
            lines += [f"  {line}" for promise in self.promises for line in promise.lines()]
        return "\n".join(lines)


def _branches(promise: Promise) -> Iterator[Branch]:
    for branch in promise.branches:
        yield branch
        for child in branch.children:
            yield from _branches(child)

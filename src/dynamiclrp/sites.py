"""Where shortcuts are to be had: what a plan's steps have to look like for each.

In: a graph and its steps. Out: `Shortcut`s, which do the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .graph import Graph, Ref
from .ops import Kind
from .rules import Gradient, Move, SignalTakesAll
from .shortcuts import Rotation, Scaling, Selections, Shortcut
from .step import Step

Use = tuple[int, int]  # of a tensor: the node, the operand's position

_FEW = 3  # of fewer selections their own backward is as good


def find(graph: Graph, steps: Sequence[Step]) -> tuple[Shortcut, ...]:
    """All shortcuts of a plan."""
    site = _Site(graph, steps)
    return (*site.selections(), *site.rotations(), *site.scalings())


# Whose own backward hands something to every operand whenever something arrives.
_ALWAYS = frozenset({
    "Add", "Sub", "Mul", "Div", "Neg", "Mean", "Sum", "Mm", "Addmm", "Bmm", "Convolution", "NativeLayerNorm", "View", "UnsafeView",
    "ReshapeAlias", "Expand", "Transpose", "T", "Permute", "Unsqueeze", "Squeeze", "Clone", "Alias", "ToCopy", "Slice", "Select",
    "Index", "Cat", "Silu", "Gelu", "Relu", "Tanh",
})  # fmt: skip


def _always(step: Step) -> Sequence[int]:
    """Operands to which its own backward hands something whenever something arrives."""
    if step.kind is Kind.ATTENTION:  # beside them there may be a mask
        return step.op.factors if len(step.op.factors) == 3 else (0, 1, 2)
    return step.live if step.name in _ALWAYS else ()


class _Site:
    """Where shortcuts are looked for."""

    def __init__(self, graph: Graph, steps: Sequence[Step]) -> None:
        self.graph, self.steps = graph, steps
        self.known = {step.node: step for step in steps}
        self.apart = {*graph.outputs, *graph.inputs}
        self.uses: dict[Ref, list[Use]] = {}  # by tensor: where relevance comes from
        for step in steps:
            blocked = set(step.rule.blocks(step)) if step.reached else step.live
            for position in step.live:
                if position not in blocked:
                    self.uses.setdefault(graph.operand(step.node, position), []).append((step.node, position))

    def is_torchs(self, node: int) -> bool:
        """Is it an operation of torch's own? Those are numbered; Python functions may bear the same name."""
        return self.graph.types[node].__name__[-1].isdigit()

    def native(self, node: int, name: str) -> Step | None:
        """The step, if it is such an operation whose own backward does all there is to do."""
        step = self.known.get(node)
        if step is None or step.name != name or not self.is_torchs(node):
            return None
        plain = type(step.rule) in (Move, Gradient) and step.form == "s" and not any(step.hooks)
        return step if plain and step.reached else None

    def only_use(self, tensor: Ref) -> Use | None:
        """The only place where relevance of a tensor comes from, if nobody asked for it."""
        found = self.uses.get(tensor, ())
        return found[0] if len(found) == 1 and tensor not in self.apart else None

    def may_take_in(self, tensor: Ref) -> bool:
        """Can a hook add to what arrives there? Not where it is asked for: that is noted before hooks are called."""
        step = self.known.get(tensor[0])
        return step is not None and step.form == "s" and tensor not in self.graph.inputs

    def factor(self, step: Step, position: int | None) -> tuple[int, str, bool] | None:
        """What a product multiplies one operand by, or a quotient divides it by: the node, the attribute, and does it divide?"""
        divides = step.name == "Div"
        if position is None or step.name not in ("Mul", "Div") or (divides and position != 0):
            return None
        name = step.op.keeps(1 - position, self.graph.edges[step.node]) if self.is_torchs(step.node) else None
        return None if name is None else (step.node, name, divides)

    def selections(self) -> Iterator[Selections]:
        members: dict[Ref, list[int]] = {}
        for step in self.steps:
            if self.native(step.node, "Select"):
                members.setdefault(self.graph.operand(step.node, 0), []).append(step.node)
        for tensor, nodes in members.items():
            alone = len(nodes) == sum(user in self.known for user, _ in self.graph.consumers[tensor])
            if len(nodes) >= _FEW and alone and self.may_take_in(tensor):
                yield Selections(tensor, tuple(nodes))

    def scalings(self) -> Iterator[Scaling]:
        roots = {node for node, _ in self.graph.outputs}
        certain: set[Use] = set()  # along which relevance comes in any case: residual connections, up to an output
        for step in self.steps:  # from the outputs down
            found = self.scaling(step, certain)
            if found is not None:
                yield found
                continue
            arrives = step.node in roots or any(use in certain for use in self.uses.get((step.node, 0), ()))
            if arrives and self.is_torchs(step.node) and step.form == "s":
                certain.update((step.node, position) for position in _always(step))

    def scaling(self, step: Step, certain: set[Use]) -> Scaling | None:
        if type(step.rule) is not SignalTakesAll or step.kind is not Kind.NORMALISE or not step.reached:
            return None
        factor = self.factor(step, step.signal)
        if factor is None or step.form != "s" or step.multiply:
            return None
        assert step.signal is not None
        top, factors = step, [factor]
        while (use := self.only_use((top.node, 0))) is not None:
            node, position = use
            above = self.native(node, "ToCopy")
            if above is None:
                above = self.native(node, "Mul") or self.native(node, "Div")
                if above is None or above.kind is not Kind.SCALE or (factor := self.factor(above, position)) is None:
                    break
                factors.insert(0, factor)
            top = above
        bottom, tensor = step.node, self.graph.operand(step.node, step.signal)
        while self.only_use(tensor) is not None and self.native(tensor[0], "ToCopy"):
            bottom, tensor = tensor[0], self.graph.operand(tensor[0], 0)
        beside = [use for use in self.uses[tensor] if use[0] != bottom]
        if not self.may_take_in(tensor) or not any(use in certain for use in beside):
            return None
        return Scaling(top.node, tuple(factors), tensor, frozenset({step.node}))

    def rotations(self) -> Iterator[Rotation]:
        for step in self.steps:
            if len(step.live) == 2 and self.native(step.node, "Add"):
                found = self.rotation(step.node)
                if found is not None:
                    yield found

    def made(self, tensor: Ref | None, name: str) -> int | None:
        """The node of that name which made a tensor for one use."""
        if tensor is None or self.only_use(tensor) is None:
            return None
        return tensor[0] if self.native(tensor[0], name) else None

    def rotation(self, total: int) -> Rotation | None:
        graph = self.graph
        first, second = (self.made(ref, "Mul") for ref in graph.edges[total])
        if first is None or second is None or len(self.known[first].live) + len(self.known[second].live) != 2:
            return None
        for plain, turned in ((first, second), (second, first)):
            position, moved = self.known[plain].live[0], self.known[turned].live[0]
            tensor, joined = graph.operand(plain, position), self.made(graph.operand(turned, moved), "Cat")
            constant = self.factor(self.known[turned], moved)
            if joined is None or constant is None:
                continue
            parts = []
            for ref in graph.edges[joined]:
                negated = self.made(ref, "Neg")
                part = self.made(ref if negated is None else graph.operand(negated, 0), "Slice")
                if part is not None and graph.operand(part, 0) == tensor:
                    parts.append((part, negated is not None))
            if len(parts) == len(graph.edges[joined]):
                return Rotation(total, (plain, position), constant[:2], tensor, joined, tuple(parts))
        return None

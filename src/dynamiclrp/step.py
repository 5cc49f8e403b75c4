"""One live node of a plan: its rule and all that was decided about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from .frozen import Frozen
from .maps import Part
from .ops import Kind, Op
from .promise import Key
from .rules import Rule

# Where a step finds a value: the name of an attribute of its own node, or a promised value.
Place = str | Key
ADDED = -2  # what a linear map's part adds, among the positions of the operands


@dataclass(frozen=True)
class Step(Frozen):
    """One live node: its rule and all that was decided about it."""

    node: int
    name: str
    op: Op
    kind: Kind
    rule: Rule
    live: tuple[int, ...]  # operands whose relevance reaches an input
    sharers: tuple[int, ...]  # operands that take a share: live ones and parameters
    homogeneous: bool  # its own backward hands down all that arrives
    signal: int | None = None  # the operand that takes all, where others are gates or statistics
    part: Part | None = None  # the batch norm, or the sum that adds a bias, that counts as part of this linear map
    has_bias: bool = False
    nonnegative: bool = False  # the live factor of a linear map, or what a sum runs over, cannot be negative
    rectified: bool = False  # the output is taken from the rectifier above: it equals it where relevance arrives
    positive: bool = False  # linear maps: does relevance arrive only where the output is positive?
    reached: bool = True  # does anything arrive?
    form: str = "s"  # what arrives
    convert: bool = False  # what arrives is R, and the rule wants s
    multiply: tuple[int, ...] = ()  # operands to which R must be delivered where the rule delivers s
    places: Mapping[int, Place] = field(default_factory=dict)

    @property
    def top(self) -> int:
        """The node whose output counts as this one's."""
        return self.node if self.part is None else self.part.top

    @property
    def normed(self) -> bool:
        """Does a batch norm count as part of it?"""
        return self.part is not None and self.part.norm

    def needs(self, position: int) -> bool:
        return position in self.places

    @cached_property
    def bias(self) -> int:
        """The position of the operand that a linear map adds."""
        return self.op.linear.bias if self.op.linear and self.op.linear.bias is not None else ADDED

    @cached_property
    def factors(self) -> tuple[int, ...]:
        """Positions of the operands that are multiplied."""
        return self.op.linear.factors if self.op.linear else self.op.factors

    @property
    def weight(self) -> str:
        """The attribute that holds the second factor."""
        return self.op.saved[self.factors[1]][0]

    @cached_property
    def live_factors(self) -> tuple[int, ...]:
        """Live operands that are multiplied; all live ones, where nothing is."""
        if self.op.linear or self.op.kind is Kind.PRODUCT:
            return tuple(i for i in self.live if i in self.factors)
        return self.live

    @cached_property
    def live_factor(self) -> int:
        """Which of a linear map's two factors is the signal."""
        return self.factors.index(self.live_factors[0])

    @property
    def parts(self) -> int:
        """Among how many live factors a product's relevance is divided; an operand may hold two of them."""
        return sum(i in self.live for i in self.factors)

    @property
    def elementwise(self) -> bool:
        return self.op.linear is None and self.op.elementwise

    @property
    def is_quotient(self) -> bool:
        return self.name in ("Div", "Addcdiv")

    @cached_property
    def edits(self) -> tuple[bool, bool]:
        """Does the rule have something to do before, after the native backward?"""
        return self.rule.edits(self)

    @cached_property
    def hooks(self) -> tuple[bool, bool]:
        """Does the step hook in before, after the native backward?"""
        before, after = self.edits
        return before or self.convert or self.normed, after or bool(self.multiply)

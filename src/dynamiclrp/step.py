"""One live node of a plan: its rule and all that was decided about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .frozen import Frozen
from .ops import Kind, Op
from .promise import Key
from .rules import Rule

# Where a step finds a value: the name of an attribute of its own node, or a promised value.
Place = str | Key
FOLD_BIAS = -2  # what another node adds to a linear map: a batch norm that is folded into it, or a sum


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
    fold: int | None = None  # the batch norm that counts as part of this linear map
    added: tuple[int, int] | None = (
        None  # the sum above this linear map that adds its bias, and the bias' position there
    )
    has_bias: bool = False
    nonnegative: bool = False  # the live factor of a linear map, or what a sum runs over, cannot be negative
    rest: int | None = None  # sums: the operand that is had as the output minus the other one
    below: tuple[int, int] | None = (
        None  # sums: the linear map whose rule is done here as well, and the operand it made
    )
    rectified: bool = False  # the output is taken from the rectifier above: it equals it where relevance arrives
    positive: bool = False  # linear maps: does relevance arrive only where the output is positive?
    reached: bool = True  # does anything arrive?
    form: str = "s"  # what arrives
    convert: bool = False  # what arrives is R, and the rule wants s
    multiply: tuple[int, ...] = ()  # operands to which R must be delivered where the rule delivers s
    places: Mapping[int, Place] = field(default_factory=dict)
    loose: frozenset[int] = (
        frozenset()
    )  # values that are found in another shape than the operation's, in the same order

    @property
    def top(self) -> int:
        """The node whose output counts as this one's: of a folded batch norm, or of the sum that adds the bias."""
        return self.fold if self.fold is not None else self.added[0] if self.added is not None else self.node

    @property
    def normed(self) -> bool:
        """Is the output made from what goes into the batch norm, which keeps that and nothing else?"""
        return self.fold is not None and not self.rectified

    def needs(self, position: int) -> bool:
        return position in self.places

    @cached_property
    def bias(self) -> int:
        """The position of the operand that a linear map adds."""
        return self.op.linear.bias if self.op.linear and self.op.linear.bias is not None else FOLD_BIAS

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
    def prepared(self) -> Any:
        """What the rule works out once for all runs."""
        return self.rule.prepare(self)

    @cached_property
    def direct(self) -> Any:
        """The rule's short form, where it serves."""
        plain = self.live == (0,) and self.form == "s" and not (self.convert or self.multiply)
        short = plain and self.edits == (False, True) and _says(self.rule, "direct", "after")
        return self.rule.direct(self) if short else None

    @cached_property
    def short(self) -> bool:
        """May the rule have both hooks in short?"""
        return _says(self.rule, "short", "before", "after")

    @property
    def looks(self) -> bool:
        """Does the rule read what the node saved?"""
        return self.rule.looks or bool(self.places) or not _says(self.rule, "looks", "before", "after")

    @cached_property
    def divides(self) -> int:
        """Where all that the rule does is to divide what arrives: by how much."""
        short = self.hooks == (True, False) and not self.convert and _says(self.rule, "divides", "before")
        return self.rule.divides(self) if short else 1

    @cached_property
    def scales(self) -> tuple[tuple[int, float], ...] | None:
        """Where all that the rule does is to multiply what the native backward made, in that memory: which operand by what."""
        short = self.op.fresh and not (self.convert or self.multiply) and _says(self.rule, "scales", "after")
        factors = self.rule.scales(self) if short else {}
        factors = {i: factor for i, factor in factors.items() if factor != 1}
        return tuple(factors.items()) if any(factors.values()) else None

    @cached_property
    def blanks(self) -> tuple[str, ...]:
        """Saved values that are zeros to the native backward, where nobody else will read them: then there is no hook."""
        short = self.direct is not None and _says(self.rule, "blanks", "after", "direct")
        return self.rule.blanks(self) if short else ()

    @cached_property
    def flat(self) -> bool:
        """Is it one matrix of signals times one of weights, and nothing else?"""
        alone = self.fold is None and self.added is None
        return alone and self.name in ("Mm", "Addmm") and self.live_factor == 0

    @cached_property
    def alike(self) -> bool:
        """Convolutions: the same goes back through W and |W|, and x cannot be negative: W + |W| serves for both."""
        linear = self.op.linear
        if (
            linear is None
            or linear.columns
            or self.live_factor != 0
            or not _says(self.rule, "alike", "before", "after")
        ):
            return False
        return self.rule.alike(self)

    @cached_property
    def hooks(self) -> tuple[bool, bool]:
        """Does the step hook in before, after the native backward?"""
        before, after = self.edits
        return before or self.convert, after or bool(self.multiply)


def _says(rule: Rule, short: str, *long: str) -> bool:
    """Does the rule's short form speak for its long ones? Not where a subclass overrides these alone."""
    for kind in type(rule).__mro__:
        if any(name in vars(kind) for name in long):
            return short in vars(kind)
    return False

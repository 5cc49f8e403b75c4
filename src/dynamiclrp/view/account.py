"""Numbers as people read them, and the account of a score as a table. Plain values in, HTML out."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..attribution import Account


@dataclass(frozen=True)
class Sums:
    """Where a score went: what reached the input, and what was kept on the way, by whom.

    >>> Sums(score=10.0, delivered=7.5, kept={"bias": 2.0}).rest
    0.5
    """

    score: float
    delivered: float
    kept: Mapping[str, float] = field(default_factory=dict)
    aside: Mapping[str, float] = field(default_factory=dict)  # what other inputs got, by the name of its line

    @property
    def rest(self) -> float:
        """What no line of the account explains."""
        return self.score - self.delivered - math.fsum((*self.kept.values(), *self.aside.values()))


def number(value: float) -> str:
    """Three significant digits and a true minus sign.

    >>> number(-1234.5), number(0.01234), number(0)
    ('−1,234', '0.0123', '0')
    """
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    size = math.floor(math.log10(abs(value)))
    text = f"{value:.1e}" if size < -4 or size > 6 else f"{value:,.{max(0, 2 - size)}f}"
    return text.replace("-", "−")


def percent(share: float) -> str:
    """A probability as people say it.

    >>> percent(0.9519), percent(0.0091), percent(0.00001)
    ('95 %', '0.9 %', '<0.1 %')
    """
    if share < 0.001:
        return "<0.1 %"
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


def sums_table(sums: Sums, reached: str, score: str) -> str:
    """The account of a score as a waterfall: every line begins where the one above ended, the last one is the score.

    `reached` and `score` are the names of its first and its last line. All numbers have the same decimals, so that they
    can be added up by eye; parts too small to show in them share one line, or none.
    """
    rest = "unaccounted" if sums.kept else "kept on the way"
    parts = [(f"kept by {label}", value) for label, value in sums.kept.items()] + [(rest, sums.rest)]
    digits = decimals(max(abs(sums.score), abs(sums.delivered), *(abs(value) for _, value in parts)))
    seen = [(label, value) for label, value in parts if round(value, digits)]
    small = math.fsum(value for _, value in parts if not round(value, digits))
    lines = [
        (reached, sums.delivered, "delivered"),
        *((label, value, "delivered") for label, value in sums.aside.items()),
    ]
    lines += [(label, value, "kept") for label, value in seen]
    if round(small, digits):
        lines.append(("small change", small, "kept"))
    ends = [0.0]
    for _, value, _ in lines:
        ends.append(ends[-1] + value)
    low, high = min(0.0, sums.score, *ends), max(0.0, sums.score, *ends)
    width = (high - low) or 1.0

    def row(label: str, value: str, begin: float, end: float, kind: str) -> str:
        side = "for" if end >= begin else "against"
        left, span = 100 * (min(begin, end) - low) / width, 100 * abs(end - begin) / width
        bar = f'<span class="bar {kind} {side}" style="left:{left:.2f}%;width:{span:.2f}%"></span>'
        return (
            f'<tr class="{kind}"><th scope="row">{html.escape(label)}</th>'
            f'<td class="track">{bar}</td><td class="value">{value.replace("-", "−")}</td></tr>'
        )

    body = [
        row(label, f"{value:+,.{digits}f}", begin, begin + value, kind)
        for (label, value, kind), begin in zip(lines, ends, strict=False)
    ]
    total = row(score, f"{sums.score:,.{digits}f}", 0.0, sums.score, "score")
    return f'<table class="sums">{"".join(body)}{total}</table>'


def decimals(largest: float) -> int:
    """Decimals that show a number of this size in four digits."""
    return max(0, 3 - math.floor(math.log10(largest))) if largest else 0


def account_line(account: Account) -> str:
    """An account in one line."""
    small = 5e-4 * max(abs(account.total), abs(account.delivered))
    kept = [f"kept by {name} {number(value)}" for name, value in account.kept.items() if abs(value) >= small]
    rest = [f"kept on the way {number(account.residual)}"] if not kept else []
    return f"score {number(account.total)} = reached the inputs {number(account.delivered)} + " + " + ".join(
        kept or rest
    )

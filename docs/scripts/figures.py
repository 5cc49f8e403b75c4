"""Draw the two pictures of `how-it-works.md`, for light and for dark pages: `python docs/scripts/figures.py [folder]`.

The picture of a promise is drawn from the plan of a real residual block; if the plan changes, so does the picture.
"""

from __future__ import annotations

import sys
from html import escape
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import dynamiclrp as dlrp

THEMES = {
    "light": {"ink": "#1f2430", "faint": "#6b7280", "line": "#9aa3b2", "box": "#f4f6fa", "blue": "#2563c9",
              "red": "#c2412d", "amber": "#b7791f", "amberbox": "#fdf1d8", "redbox": "#fbe6e2", "bluebox": "#e3edfb"},
    "dark": {"ink": "#e6e9ef", "faint": "#9aa3b2", "line": "#6b7486", "box": "#2a2f3a", "blue": "#7fb0ff",
             "red": "#ff9a86", "amber": "#f0c36b", "amberbox": "#473a1d", "redbox": "#4a2a25", "bluebox": "#233a5c"},
}  # fmt: skip
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, monospace"


class Drawing:
    """An SVG in the making."""

    def __init__(self, width: int, height: int, colours: dict[str, str], title: str) -> None:
        self.c = colours
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="{FONT}"><title>{escape(title)}</title><defs>'
        ]
        for name in ("line", "blue", "red", "amber"):
            self.parts.append(
                f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
                f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{self.c[name]}"/></marker>'
            )
        self.parts.append("</defs>")

    def box(
        self, x: float, y: float, w: float, h: float, fill: str = "box", stroke: str = "line", dash: str = ""
    ) -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="9" fill="{self.c[fill]}" stroke="{self.c[stroke]}" '
            f'stroke-width="1.5"{dashed}/>'
        )

    def text(self, x: float, y: float, words: str, size: float = 14, fill: str = "ink", anchor: str = "middle",
             bold: bool = False, mono: bool = False) -> None:  # fmt: skip
        weight = ' font-weight="650"' if bold else ""
        family = f' font-family="{MONO}"' if mono else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" fill="{self.c[fill]}" text-anchor="{anchor}"{weight}{family}>'
            f"{escape(words)}</text>"
        )

    def arrow(self, path: str, colour: str = "line", dash: str = "", width: float = 1.8) -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{self.c[colour]}" stroke-width="{width}"{dashed} '
            f'marker-end="url(#{colour})"/>'
        )

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


STAGES = [
    ("forward pass", ["your model,", "unchanged"], "outputs"),
    ("capture", ["grad_fn and", "next_functions,", "walked once"], "Graph"),
    ("plan", ["a rule for each node,", "a source for each", "missing value"], "Plan"),
    ("run", ["torch.autograd.grad", "with hooks on", "a few nodes"], "autograd"),
    ("account", ["relevance per input,", "who kept the rest"], "Attribution"),
]


def stages(colours: dict[str, str]) -> str:
    """Five boxes, left to right, and the plan's way around planning."""
    wide, gap, top = 150, 36, 40
    d = Drawing(5 * wide + 4 * gap + 20, 214, colours, "The stages: forward pass, capture, plan, run, account")
    for number, (name, lines, product) in enumerate(STAGES):
        x = 10 + number * (wide + gap)
        special = name in ("plan", "run")
        d.box(x, top, wide, 104, "bluebox" if special else "box", "blue" if special else "line")
        d.text(x + wide / 2, top + 24, name, 15, bold=True)
        for line, words in enumerate(lines):
            d.text(x + wide / 2, top + 48 + 18 * line, words, 12.5, "faint")
        d.text(x + wide / 2, top + 126, product, 13, mono=True)
        if number:
            d.arrow(f"M{x - gap + 3} {top + 52}H{x - 4}")
    start, end = 10 + (wide + gap) + wide / 2, 10 + 3 * (wide + gap) + wide / 2
    d.arrow(f"M{start} {top - 4}C{start} {top - 32} {end} {top - 32} {end} {top - 5}", "amber", "5 4")
    d.text((start + end) / 2, top - 29, "known signature: the cached plan", 12.5, "amber")
    d.text(
        450,
        202,
        "activations that autograd kept: read · those it threw away: promised, rebuilt when needed, released",
        12.5,
        "faint",
    )
    return str(d)


class Residual(nn.Module):
    """The residual diamond: a sum whose operands autograd does not keep."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.down(self.up(x).relu()))


def promise_of_the_sum() -> tuple[dlrp.Promise, dict[int, str]]:
    """The promise at the sum, from the real plan, and the plan's steps by node."""
    plan = dlrp.inspect(Residual().eval(), torch.randn(1, 4), preset="dynamic").plan
    assert plan is not None
    (promise,) = [p for p in plan.promises if p.op == "Add"]
    return promise, {step.node: step.name for step in plan.steps}


def promise(colours: dict[str, str]) -> str:
    """The block as a graph, relevance from the right, values from the left."""
    found, names = promise_of_the_sum()
    add = found.origin
    short, long, *_ = found.branches
    (replayed,) = long.children
    kept = replayed.branches[-1]
    down, relu = replayed.origin, kept.key[1]
    up, head = relu - 1, add + 1
    assert (names[down], names[up], names[head], kept.arg) == ("Addmm", "Addmm", "Addmm", "Relu")

    d = Drawing(
        900, 362, colours, "A promise at a residual sum: one branch ends at the input, one replays a linear layer"
    )
    y, high, wide = 150, 56, 112
    xs = {"x": 20, "up": 168, "relu": 316, "down": 464, "add": 612, "head": 760}
    boxes = [
        ("x", "input x", "leaf", "amberbox", "amber", ""),
        ("up", f"{names[up]} {up}", "up", "box", "line", ""),
        ("relu", f"{kept.arg} {relu}", "keeps its result", "amberbox", "amber", ""),
        ("down", f"{names[down]} {down}", "keeps no output", "box", "line", "5 4"),
        ("add", f"{found.op} {add}", "keeps nothing", "redbox", "red", ""),
        ("head", f"{names[head]} {head}", "head", "box", "line", ""),
    ]  # fmt: skip
    for key, name, note, fill, stroke, dash in boxes:
        d.box(xs[key], y, wide, high, fill, stroke, dash)
        d.text(xs[key] + wide / 2, y + 24, name, 14, bold=True)
        d.text(xs[key] + wide / 2, y + 43, note, 11, "faint")
    order = list(xs)
    for left, right in pairwise(order):
        d.arrow(f"M{xs[left] + wide + 2} {y + high / 2}H{xs[right] - 4}")
    d.arrow(
        f"M{xs['x'] + wide / 2} {y - 2}C{xs['x'] + wide / 2} {y - 62} {xs['add'] + 30} {y - 62} {xs['add'] + 30} {y - 4}"
    )
    d.text((xs["x"] + xs["add"]) / 2 + 40, y - 54, "the residual connection", 12, "faint")

    middle = xs["add"] + wide / 2
    d.text(middle, 30, "the rule shares by |a| / (|a| + |b|):", 12.5, "red")
    d.text(middle, 48, "both operands are promised here", 12.5, "red")
    d.arrow(f"M{middle} 56V{y - 5}", "red", width=1.4)
    a, b = y + high + 4, y + high + 50
    d.arrow(f"M{middle - 14} {a}C{middle - 20} {b} {xs['down'] + 60} {b} {xs['relu'] + wide / 2 + 16} {a + 1}", "amber")
    d.text(
        (xs["relu"] + middle) / 2 - 66,
        b + 5,
        f"branch b: {names[down]} {down} replayed on what {kept.arg} {relu} saved",
        12.5,
        "amber",
    )
    d.arrow(f"M{middle + 24} {a}C{middle + 10} {b + 82} {xs['x'] + 70} {b + 82} {xs['x'] + wide / 2} {a + 1}", "amber")
    d.text((xs["x"] + middle) / 2 + 20, b + 70, f"branch a: the {short.how} x itself", 12.5, "amber")
    d.text(
        450,
        352,
        "orange: Arg nodes · red: origin · dashed: replayed. All of it is decided before relevance moves, so nothing can deadlock.",
        12.5,
        "faint",
    )
    return str(d)


def main(folder: Path) -> None:
    for theme, colours in THEMES.items():
        (folder / f"stages-{theme}.svg").write_text(stages(colours), "utf-8")
        (folder / f"promise-{theme}.svg").write_text(promise(colours), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "img")

"""Story → one HTML page that needs nothing but itself. The explanations are the pages of `view`, each in a frame of its own."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ..view.account import number
from ..view.colours import PALETTES, theme_css
from .story import GRADIENT, INTEGRATED, OURS, Curve, Machine, Story, Test

WIDE, HIGH = 460, 250  # of a chart
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 10, 34

# The frame grows with what is inside; its own head is not needed, since the section has one.
_INSIDE = (
    "<style>body{padding:0;max-width:none}header .mark,header h1,header .facts{display:none}"
    "header .tools{margin-top:0;gap:.5rem 1.2rem}.tools .pick,.legend em{display:none}html{background:transparent}.body{row-gap:0}.panels.grid{grid-template-columns:minmax(0,1fr)}"
    "@media(min-width:34rem){.panels.grid{grid-template-columns:repeat(2,minmax(0,1fr))}}"
    "@media(min-width:60rem){.panels.grid{grid-template-columns:repeat(4,minmax(0,1fr));gap:1.4rem}}</style>"
)
_GROW = (
    "const f=this,d=f.contentDocument;const fit=()=>{f.style.height=d.documentElement.offsetHeight+4+'px'};fit();"
    "new ResizeObserver(fit).observe(d.body)"
)

# One choice of colours for the page and all its frames.
_COLOURS = (
    "document.getElementById('colours').onchange=e=>{document.documentElement.dataset.palette=e.target.value;"
    "for(const f of document.querySelectorAll('iframe')){const s=f.contentDocument.getElementById('palette');"
    "s.value=e.target.value;s.dispatchEvent(new Event('change',{bubbles:true}))}}"
)


def page(story: Story) -> str:
    """The whole page."""
    folder = resources.files(__package__)
    style = theme_css() + folder.joinpath("page.css").read_text("utf-8")
    first, second = list(story.pictures.parts)[:2]
    answer = story.words.parts[next(iter(story.words.parts))].answers[0].label
    machines = story.machines
    quickest = min(m.ratio for m in machines)
    sections = [
        _section(
            "photo",
            f"Why <q>{html.escape(first)}</q>, why <q>{html.escape(second)}</q>?",
            "EfficientNet-Lite0 looked at the whole photo once. Red pixels speak for the answer, blue ones against it. The account "
            "under each map says where its score went: to the pixels, or to whom it was lost on the way.",
            _frame(story.pictures, "heat maps of the photo"),
        ),
        _section(
            "word",
            f"Which words made the next word <q>{html.escape(answer)}</q>?",
            "SmolLM2-135M read the sentence and was about to go on. Below it: why this word rather than the one it thought second.",
            _frame(story.words, "relevance of the words"),
        ),
        _section(
            "answer",
            "And every word of an answer",
            f"Asked <q>{html.escape(story.question)}</q> it said: <q>{html.escape(story.answer)}</q> "
            "Point at a word of the answer to see what it stands on.",
            _frame(story.generation, "relevance of the context for every generated word"),
        ),
        _section(
            "test",
            "Does it hold?",
            "Take away what a method calls most relevant: a good method makes the score fall at once. Take away what it calls least "
            "relevant: the score should stay. The area between the two curves says how well a method knows. This is one photo, to look at; "
            "the tables of the documentation have hundreds.",
            _chart(story.test),
        ),
        _section(
            "plan",
            "What it took",
            "Relevance is one run of autograd's own engine with hooks on some nodes. The plan says which rule each node has, and where "
            "every activation that autograd threw away comes from. The smaller numbers are those of the paper’s own rules, the preset "
            "<code>dynamic</code>, on the same model.",
            _machines(machines),
        ),
    ]
    links = "".join(f'<a href="#{key}">{words}</a>' for key, words in _LINKS)
    options = "".join(f'<option value="{name}">{name.replace("-", " / ")}</option>' for name in PALETTES)
    return f"""<!doctype html>
<html lang="en" data-palette="red-blue">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>dynamiclrp: what did the model look at?</title>
<style>
{style}</style>
<body>
<header>
  <p class="mark">dynamiclrp</p>
  <h1>What did the model look at?</h1>
  <p class="lead">Two real models, unchanged, explained on a CPU. An explanation cost {number(quickest)} to
    {number(max(m.ratio for m in machines))} times a gradient.</p>
  <nav>{links}<label>colours <select id="colours">{options}</select></label></nav>
</header>
<main>
{"".join(sections)}
</main>
<footer><p>{" · ".join(html.escape(fact) for fact in story.facts)} · computed in {story.seconds:.0f} s</p>
<p>{" ".join(html.escape(line) for line in story.credits)}</p></footer>
<script>{_COLOURS}</script>
</body>
</html>
"""


_LINKS = (("photo", "a photo"), ("word", "the next word"), ("answer", "an answer"), ("test", "does it hold?"), ("plan", "what it took"))  # fmt: skip


def _section(key: str, title: str, words: str, body: str) -> str:
    return f'<section id="{key}"><h2>{title}</h2><p class="words">{words}</p>{body}</section>\n'


def _frame(result: Any, title: str) -> str:
    inside = result.html().replace("<body>", f"{_INSIDE}<body>", 1)
    return (
        f'<iframe srcdoc="{html.escape(inside, quote=True)}" onload="{html.escape(_GROW, quote=True)}" '
        f'title="{html.escape(title)}"></iframe>'
    )


# ----------------------------------------------------------------------------------------------------------------- charts


def _chart(test: Test) -> str:
    """Both curves of each method as lines, the area of ours filled; a table of the areas below."""
    values = [v for c in test.curves for v in (*c.most, *c.least)]
    scale = _Scale.over(min(values), max(values))
    ours = next(c for c in test.curves if c.method == OURS)
    lines = "".join(_line(c, scale) for c in reversed(test.curves))
    ticks = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{scale(v):.1f}" y2="{scale(v):.1f}"/>'
        f'<text x="{LEFT - 8}" y="{scale(v) + 4:.1f}" text-anchor="end">{v:g}</text>'
        for v in scale.ticks
    )
    across = "".join(
        f'<text x="{_x(v):.1f}" y="{HIGH - 14}" text-anchor="middle">{v:.0%}</text>' for v in (0, 0.25, 0.5, 0.75, 1)
    )
    band = " ".join(
        f"{_x(f):.1f},{scale(v):.1f}"
        for f, v in (*zip(ours.fractions, ours.least), *reversed(list(zip(ours.fractions, ours.most))))
    )
    rows = "".join(
        f'<tr class="{_class(c)}"><th><i></i>{html.escape(c.method)}</th><td>{c.area:+.3f}</td></tr>'.replace(
            "-0.", "−0."
        )
        for c in test.curves
    )
    return f"""<figure class="chart"><div><svg viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="perturbation curves">{ticks}{across}
<polygon class="band" points="{band}"/>{lines}</svg>
<p class="key"><span></span> most relevant first <span class="dashed"></span> least relevant first</p></div>
<figcaption><b>{html.escape(test.title)}</b> {html.escape(test.measure.capitalize())} against the share that was taken away
({html.escape(test.removed)}).<table><caption>area between the curves</caption>{rows}</table></figcaption></figure>"""


def _line(curve: Curve, scale: _Scale) -> str:
    def points(values: tuple[float, ...]) -> str:
        return " ".join(f"{_x(f):.1f},{scale(v):.1f}" for f, v in zip(curve.fractions, values))

    kind = _class(curve)
    return f'<polyline class="most {kind}" points="{points(curve.most)}"/><polyline class="least {kind}" points="{points(curve.least)}"/>'


def _class(curve: Curve) -> str:
    return {OURS: "ours", INTEGRATED: "integrated", GRADIENT: "gradient"}.get(curve.method, "chance")


def _x(fraction: float) -> float:
    return LEFT + fraction * (WIDE - LEFT - RIGHT)


@dataclass(frozen=True)
class _Scale:
    """From values to heights on a chart, between two round numbers."""

    ticks: tuple[float, ...]

    @classmethod
    def over(cls, low: float, high: float) -> _Scale:
        low, high = min(low, 0.0), max(high, 1e-9)
        unit = 10 ** math.floor(math.log10(high - low))
        step = next(s * unit for s in (0.2, 0.25, 0.5, 1, 2) if (high - low) / (s * unit) <= 5)
        first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
        return cls(tuple(round(i * step, 9) for i in range(first, last + 1)))

    def __call__(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        return TOP + (high - value) / (high - low) * (HIGH - TOP - BOTTOM)


# ------------------------------------------------------------------------------------------------------------------ table


def _machines(machines: tuple[Machine, ...]) -> str:
    def row(name: str, *cells: str) -> str:
        return f"<tr><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"

    def each(show: Any) -> list[str]:
        return [show(m) for m in machines]

    def plans(show: Any) -> list[str]:
        return [f"{show(m.statistics)} <small>{show(m.paper)}</small>" for m in machines]

    rows = [
        row("rules", *each(lambda m: f"{html.escape(m.preset)} <small>the paper’s</small>")),
        row("nodes of the graph", *plans(lambda s: f"{s.nodes:,}")),
        row("nodes that relevance passes", *plans(lambda s: f"{s.live:,}")),
        row("promises", *plans(lambda s: f"{s.promises:,}")),
        row("internal nodes", *plans(lambda s: f"{s.internal_nodes:,}")),
        row("promise depth δ", *plans(lambda s: f"{s.depth:,}")),
        row("promise density ρ", *plans(lambda s: f"{s.density:.3f}")),
        row("gradient x input", *each(lambda m: f"{m.costs[GRADIENT].milliseconds:.0f} ms, {_mb(m, GRADIENT)}")),
        row("LRP", *each(lambda m: f"{m.costs[OURS].milliseconds:.0f} ms, {_mb(m, OURS)}")),
        row("ratio of time", *each(lambda m: f"<b>{m.ratio:.2f}</b>")),
    ]
    head = "".join(f"<th>{html.escape(m.model)}</th>" for m in machines)
    return f'<div class="scroll"><table class="plan"><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _mb(machine: Machine, name: str) -> str:
    return f"{machine.costs[name].peak_bytes / 1e6:,.0f} MB"

"""Results → one HTML page that needs nothing but itself: style, script and data inside, no network.

The page's frame, headings and accounts are written here, so they can be read without a script; scripts (`script/`) draw
tokens, heat maps, sounds and matrices from the data (`data.py`), so that they can be turned and asked.
"""

from __future__ import annotations

import html
import json
from importlib import resources
from typing import Any

from ..attribution import Viewable
from ..comparison import Comparison
from ..generation import Generation
from .account import Sums, percent, sums_table
from .colours import PALETTES, palette, theme_css
from .data import page_data

_REACHED = {"tokens": "reached the tokens", "image": "reached the pixels", "sound": "reached the sound", "table": "reached the input"}  # fmt: skip


def document(result: Viewable, *, palette: str = "red-blue", title: str | None = None) -> str:
    """The whole page."""
    _known(palette)
    data = page_data(result)
    heading = html.escape(title) if title is not None else _heading(result, data)
    plain = html.unescape(heading.replace("<q>", "“").replace("</q>", "”"))
    folder = resources.files(__package__)
    style = theme_css() + folder.joinpath("view.css").read_text("utf-8")
    script = _script(data)
    # "<" may not appear in the data: "</script>" would end it
    embedded = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    body = _generation() if data["generation"] else _panels(data["panels"])
    return f"""<!doctype html>
<html lang="en" data-palette="{palette}">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(plain)}</title>
<style>
{style}</style>
<body>
<header>
  <p class="mark">dynamiclrp</p>
  <h1>{heading}</h1>
  <p class="facts">{_facts(result)}</p>
  <div class="tools">{_legend()}<div class="switches" id="switches"></div>{_palettes(palette)}</div>
</header>
<noscript><p class="note">The tokens, maps and sounds of this page are drawn by a script inside it, which is switched off here.</p></noscript>
<main>{body}
</main>
<div id="tip" role="tooltip" hidden></div>
<script type="application/json" id="dlrp-data">{embedded}</script>
<script>
{script}</script>
</body>
</html>
"""


def _script(data: dict[str, Any]) -> str:
    """What draws this page: only the parts that it has something for."""
    kinds = {i["kind"] for p in data["panels"] for i in p["inputs"]}
    wanted = {
        "base": True,
        "bars": True,
        "tokens": "tokens" in kinds or data["generation"],
        "pictures": "image" in kinds,
        "sounds": "sound" in kinds,
        "generation": data["generation"],
        "start": True,
    }
    folder = resources.files(__package__).joinpath("script")
    parts = [folder.joinpath(f"{name}.js").read_text("utf-8") for name, needed in wanted.items() if needed]
    return '(() => {\n"use strict";\n' + "\n".join(parts) + "})();\n"


def frame(result: Viewable) -> str:
    """The page inside a frame, for notebooks: their style and ours stay apart."""
    text = html.escape(document(result), quote=True)
    grow = "const f=this,d=f.contentDocument;const fit=()=>{f.style.height=d.documentElement.scrollHeight+2+'px'};fit();new ResizeObserver(fit).observe(d.body)"  # fmt: skip
    return (
        f'<iframe srcdoc="{text}" onload="{html.escape(grow, quote=True)}" title="dynamiclrp" '
        'style="width:100%;height:420px;border:0;display:block"></iframe>'
    )


def _known(name: str) -> None:
    palette(name)


def _quote(text: str) -> str:
    return f"<q>{html.escape(text)}</q>"


def _heading(result: Viewable, data: dict[str, Any]) -> str:
    if isinstance(result, Generation):
        return "What each token stands on"
    panels = data["panels"]
    questions = {(p["answer"], p["contrast"]) for p in panels}
    answer, contrast = next(iter(questions))
    if len(questions) > 1:
        return "Why this, why that?"
    if answer is None:
        return "What the score stands on"
    if answer.startswith("“"):  # already a phrase: “Berlin” is B-LOC
        return f"Why {html.escape(answer)}" + (f", rather than {html.escape(contrast)}?" if contrast else "?")
    return f"Why {_quote(answer)}" + (f" rather than {_quote(contrast)}?" if contrast else "?")


def _facts(result: Viewable) -> str:
    a: Any = next(iter(result.parts.values())) if isinstance(result, Comparison) else result
    presets = {p.preset.name for p in result.parts.values()} if isinstance(result, Comparison) else {a.preset.name}
    facts = [a.about.get("model"), a.about.get("task"), *(["preset " + presets.pop()] if len(presets) == 1 else [])]
    if isinstance(a, Generation):
        facts.append(f"{len(a)} generated tokens × {a.matrix.shape[1]:,} of context")
    return " · ".join(html.escape(str(fact)) for fact in facts if fact)


def _legend() -> str:
    return (
        '<p class="legend"><span>against</span><span class="ramp" aria-hidden="true"></span><span>for</span>'
        "<em>no colour: no say</em></p>"
    )


def _palettes(chosen: str) -> str:
    options = "".join(
        f'<option value="{name}"{" selected" if name == chosen else ""}>{name.replace("-", " / ")}</option>'
        for name in PALETTES
    )
    return f'<label class="pick">colours <select id="palette">{options}</select></label>'


def _panels(panels: list[dict[str, Any]]) -> str:
    pictures = all(all(i["kind"] == "image" for i in p["inputs"]) for p in panels)
    alone = len({(p["answer"], p["contrast"]) for p in panels}) == 1 and len(panels) == 1
    articles = "".join(_panel(i, p, alone) for i, p in enumerate(panels))
    grid = pictures and len(panels) > 1
    same = (
        grid and len({p["inputs"][0]["picture"] for p in panels}) == 1 and panels[0]["inputs"][0]["picture"] is not None
    )
    if same:  # what everything else is laid over
        original = '<img id="original" alt="the picture">'
        head = '<div class="answer"><h2>the picture</h2></div>'
        articles = f'<article class="panel">{head}<div class="stack plain">{original}</div></article>' + articles
    return f'<div class="panels{" grid" if grid else ""}">{articles}</div>'


def _panel(index: int, panel: dict[str, Any], alone: bool) -> str:
    answer, contrast = panel["answer"], panel["contrast"]
    words = (
        html.escape(answer) + (f" <small>rather than {html.escape(contrast)}</small>" if contrast else "")
        if answer
        else ""
    )
    label = html.escape(panel["label"])
    said = panel["label"] in (answer, f"{answer} rather than {contrast}")  # the label would only repeat it
    named = f"{words}{f' <small>{label}</small>' if label and not said else ''}" if answer else label
    chance = "" if panel["probability"] is None else f'<span class="chance">{percent(panel["probability"])}</span>'
    head = f'<div class="answer"><h2>{named}</h2>{chance}</div>' if named and not alone else (
        f'<p class="chance alone">probability {percent(panel["probability"])}</p>' if chance else ""
    )  # fmt: skip
    several = len(panel["inputs"]) > 1
    figures = "".join(
        (f"<h3>{html.escape(i['name'])}</h3>" if several else "") + f'<div class="figure {i["kind"]}" data-panel="{index}" data-input="{k}"></div>'
        for k, i in enumerate(panel["inputs"])
    )  # fmt: skip
    kinds = {i["kind"] for i in panel["inputs"]}
    reached = _REACHED[kinds.pop()] if len(kinds) == 1 and not panel["aside"] else "reached the inputs"
    kept = panel["kept"]
    table = sums_table(
        Sums(panel["score"], panel["delivered"], kept, {f"reached {name}": v for name, v in panel["aside"].items()}),
        reached,
        "lead explained" if contrast else "score explained",
    )
    note = (
        ""
        if kept or index  # said once
        else '<p class="note">Biases and other constants keep their share; <code>ledger=True</code> says who.</p>'
    )
    return f'<article class="panel">{head}<div class="body"><div class="figures">{figures}</div><div class="account">{table}{note}</div></div></article>'


def _generation() -> str:
    return """
<div class="generation">
  <section class="reading">
    <div class="text" id="context" aria-label="context"></div>
    <div class="text" id="generated" role="listbox" aria-label="generated tokens; arrow keys move" tabindex="-1"></div>
    <p class="note" id="hint">Point at a generated token, or walk with the arrow keys, to see what it stands on. Click to hold it. Click a
      word of the context to see what it led to.</p>
  </section>
  <aside class="beside" aria-live="polite">
    <div id="chosen"></div>
  </aside>
  <section class="overview">
    <h2>All of it</h2>
    <p class="note">One line per generated token, one column per token of the context. Point or click to choose.</p>
    <div class="matrix" id="matrix"><canvas tabindex="0" aria-label="relevance of the context for every generated token"></canvas></div>
  </section>
</div>"""

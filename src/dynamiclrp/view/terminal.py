"""Results in a terminal: coloured text and a table with `rich`, plain lines without it."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

from ..attribution import Attribution, Viewable, sinks
from ..comparison import Comparison
from ..generation import Generation
from ..media import PADDING, Picture, Tokens, readable
from ..parts import pool
from .account import account_line, number, percent
from .colours import PALETTES

_ROWS = 10


def show(result: Viewable) -> None:
    """The page in a notebook; coloured text in a terminal that rich can draw; plain lines anywhere else."""
    if _in_notebook():
        from IPython.display import HTML, display  # type: ignore[import-not-found,unused-ignore]

        display(HTML(result._repr_html_()))
        return
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        print("\n".join(plain(result)))
        return
    Console().print(renderable(result))


def _in_notebook() -> bool:
    try:
        from IPython import get_ipython  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError:
        return False
    return type(get_ipython()).__name__ == "ZMQInteractiveShell"


def plain(result: Viewable) -> list[str]:
    """Lines of text: the largest parts and the account."""
    lines = [repr(result)]
    if isinstance(result, Generation):
        for i, piece in enumerate(result.generated):
            top = ", ".join(f"{p.label} {number(p.relevance)}" for p in result.top(i, 4))
            lines.append(f"  {readable(piece):16} {percent(float(result.probabilities[i])):>7}  {top}")
        return lines
    attributions = result.parts.items() if isinstance(result, Comparison) else [("", result)]
    for label, a in attributions:
        assert isinstance(a, Attribution)
        lines += [label] if label else []
        lines += [f"  {part.label:24} {number(part.relevance):>10}" for part in a.top(_ROWS)]
        lines.append("  " + account_line(a.account))
    return lines


def renderable(result: Viewable) -> Any:
    """What rich prints."""
    from rich.console import Group
    from rich.text import Text

    if isinstance(result, Generation):
        return _generation(result)
    if isinstance(result, Comparison):
        blocks: list[Any] = []
        for label, a in result.items():
            blocks += [Text(label, style="bold"), _attribution(a), Text("")]
        return Group(*blocks)
    assert isinstance(result, Attribution)
    return Group(*(block for row in range(len(result)) for block in (_attribution(result[row]), Text(""))))


def _attribution(a: Attribution) -> Any:
    from rich.console import Group
    from rich.text import Text

    head = Text()
    for answer in a.answers:
        head.append(f"Why {answer}?", style="bold")
        if answer.probability is not None:
            head.append(f"  {percent(answer.probability)}", style="dim")
    blocks: list[Any] = [head] if a.answers else []
    shown = [name for name in a.relevances if name in a.media] or list(a.relevances)
    for name in shown:
        medium = a.media[name][0] if name in a.media else None
        if isinstance(medium, Tokens):
            blocks.append(coloured(medium, a.relevances[name][0].double().tolist()))
        elif isinstance(medium, Picture):
            blocks.append(painted(medium, a.heat_map(name)))
    blocks += [Text(""), _table(a), Text(account_line(a.account), style="dim")]
    return Group(*blocks)


def coloured(tokens: Tokens, values: list[float], width: int | None = None) -> Any:
    """The text on its relevance. Tokens set apart are underlined, and the line below says what they hold."""
    from rich.text import Text

    positive, negative = (palette[1] for palette in (PALETTES["red-blue"].positive, PALETTES["red-blue"].negative))
    apart = set(sinks(tokens, values))
    full = max((abs(v) for i, v in enumerate(values) if i not in apart), default=0.0) or 1.0
    text = Text()
    for i, (piece, value) in enumerate(zip(tokens.pieces, values)):
        if tokens.kinds[i] == PADDING:
            continue
        strength = min(1.0, abs(value) / full)
        red, green, blue = positive if value > 0 else negative
        # strong ones stand on their colour, weaker ones are written in it: both read on dark and on light
        dark = ",".join(str(round(c * (0.35 + 0.5 * strength))) for c in (red, green, blue))
        style = f"white on rgb({dark})" if strength > 0.4 else f"rgb({red},{green},{blue})" if strength > 0.08 else ""
        text.append(piece.replace("\n", "⏎\n") or "·", style=f"{style} underline".strip() if i in apart else style)
    total = sum(abs(v) for v in values)
    held = sum(abs(values[i]) for i in apart)
    if apart and total:
        names = ", ".join(dict.fromkeys(tokens.pieces[i].strip() or "␣" for i in sorted(apart)))
        text.append(f"\nset apart: {names} hold {percent(held / total)} of all relevance", style="dim")
    return text


def painted(picture: Picture, heat: Tensor, width: int = 56) -> Any:
    """A picture under its heat map in half blocks, two rows of pixels in a line of text."""
    from PIL import Image
    from rich.text import Text

    size = max(1, -(-picture.width // width))
    photo = Image.open(io.BytesIO(picture.file)).convert("L")
    small = pool(heat.double(), size)
    columns, rows = small.shape[1], small.shape[0] - small.shape[0] % 2
    gray = torch.tensor(list(photo.resize((columns, small.shape[0])).tobytes())).reshape(small.shape).double()
    strength = (small / scale_of(small)).clamp(-1, 1)
    hues = torch.tensor([PALETTES["red-blue"].positive[1], PALETTES["red-blue"].negative[1]]).double()
    hue = hues[(strength < 0).long()]
    share = strength.abs().pow(0.8)[..., None]
    colours = (share * hue + (1 - share) * (30 + 0.45 * gray)[..., None]).round().long().tolist()
    text = Text()
    for y in range(0, rows, 2):
        for above, below in zip(colours[y], colours[y + 1]):
            text.append("▀", style=f"rgb({above[0]},{above[1]},{above[2]}) on rgb({below[0]},{below[1]},{below[2]})")
        text.append("\n" if y + 2 < rows else "")
    return text


def scale_of(values: Tensor) -> float:
    """The magnitude that gets the full colour: nearly the largest, so that a single pixel does not bleach the rest."""
    return float(torch.quantile(values.abs().flatten(), 0.995)) or float(values.abs().max()) or 1.0


def _table(a: Attribution) -> Any:
    from rich.table import Table
    from rich.text import Text

    parts = a.top(_ROWS)
    largest = max((abs(part.relevance) for part in parts), default=0.0) or 1.0
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    table.add_column("part", no_wrap=True, max_width=32)
    table.add_column("relevance", justify="right")
    table.add_column("", width=20)
    for part in parts:
        bar = "█" * max(1, round(18 * abs(part.relevance) / largest)) if part.relevance else ""
        style = "red" if part.relevance > 0 else "blue"
        table.add_row(part.label, number(part.relevance), Text(bar, style=style))
    return table


def _generation(g: Generation) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("token", "probability", "score", "stands on"):
        table.add_column(name, justify="right" if name in ("probability", "score") else "left")
    for i, piece in enumerate(g.generated):
        top = Text()
        for part in g.top(i, 4):
            top.append(part.label, style="red" if part.relevance > 0 else "blue")
            top.append(f" {number(part.relevance)}  ", style="dim")
        chance, score = percent(float(g.probabilities[i])), number(float(g.scores[i]))
        table.add_row(readable(piece), chance, score, top)
    return Group(Text(g.text.strip(), style="bold"), table)

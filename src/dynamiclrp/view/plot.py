"""Results as matplotlib figures, for papers and slides."""

from __future__ import annotations

import io
from textwrap import wrap
from typing import Any

import torch

from ..attribution import Attribution, Viewable, sinks
from ..comparison import Comparison
from ..generation import Generation
from ..media import PADDING, Picture, Sound, Tokens, readable
from ..parts import is_picture, pool
from .account import account_line, number, percent
from .colours import palette as find_palette

_BARS = 15


def plot(result: Viewable, *, ax: Any = None, palette: str = "red-blue", words: bool = False, patch: int = 1) -> Any:
    """A figure: heat maps for pictures, coloured text and bars for tokens, a matrix for a generation.

    `ax` draws a single input into axes of yours; `words` adds tokens up to words, `patch` pixels to patches.
    """
    pyplot = _matplotlib()
    colours = _Colours(palette)
    panels = _panels(result)
    if ax is not None:
        if len(panels) != 1:
            raise ValueError(f"plot(ax=…) draws one input, this result has {len(panels)}: leave ax out")
        _draw(ax, *panels[0], colours, words, patch)
        return ax.figure
    columns = min(len(panels), 4) if all(kind == "image" for kind, *_ in panels) else 1
    rows = -(-len(panels) // columns)
    sizes = [_size(kind, value) for kind, _, value in panels]
    width, height = columns * max(w for w, _ in sizes), rows * max(h for _, h in sizes)
    figure, axes = pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, one in zip(axes.flat, panels):
        _draw(axis, *one, colours, words, patch)
    return figure


def _matplotlib() -> Any:
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plot() needs matplotlib: pip install matplotlib") from error
    return pyplot


class _Colours:
    def __init__(self, name: str) -> None:
        from matplotlib.colors import LinearSegmentedColormap

        chosen = find_palette(name)
        self.positive, self.negative = ([c / 255 for c in chosen.positive[0]], [c / 255 for c in chosen.negative[0]])
        self.map = LinearSegmentedColormap.from_list(name, [self.negative, (1, 1, 1), self.positive])
        clear = [(*self.negative, 1.0), (*self.negative, 0.0), (*self.positive, 0.0), (*self.positive, 1.0)]
        self.over = LinearSegmentedColormap.from_list(f"{name} over", list(zip((0, 0.5, 0.5, 1), clear)))

    def of(self, value: float) -> list[float]:
        return self.positive if value >= 0 else self.negative


def _panels(result: Viewable) -> list[tuple[str, str, Any]]:
    """(kind, title, value) of everything that is drawn."""
    if isinstance(result, Generation):
        return [("generation", "", result)]
    named = list(result.items()) if isinstance(result, Comparison) else [("", result)]
    panels: list[tuple[str, str, Any]] = []
    for label, whole in named:
        assert isinstance(whole, Attribution)
        for row in range(len(whole)):
            a = whole[row]
            answer = a.answers[0] if a.answers else None
            title = label or (str(answer) if answer else f"score {number(float(a.seed.sum()))}")
            if answer is not None and answer.probability is not None:
                title += f"  {percent(answer.probability)}"
            for name in [n for n in a.relevances if n in a.media] or list(a.relevances):
                medium = a.media[name][0] if name in a.media else None
                kind = {Tokens: "tokens", Picture: "image", Sound: "sound"}.get(type(medium), "bars")
                if medium is None and is_picture(a.relevances[name][0]):
                    kind = "image"
                panels.append((kind, title, (a, name)))
    return panels


def _short(label: str, most: int = 28) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"


def _size(kind: str, value: Any) -> tuple[float, float]:
    if kind == "generation":
        rows, columns = value.matrix.shape
        return min(16, 2 + 0.22 * columns), min(16, 1.6 + 0.26 * rows)
    if kind == "image":
        return 3.6, 4.3
    if kind == "sound":
        return 8, 2.8
    a, name = value
    return 8, 1.2 + 0.26 * min(_BARS, a.relevances[name][0].numel())


def _draw(axis: Any, kind: str, title: str, value: Any, colours: _Colours, words: bool, patch: int) -> None:
    if kind == "generation":
        _matrix(axis, value, colours, words)
        return
    a, name = value
    if kind == "image":
        _image(axis, a, name, colours, patch)
    elif kind == "sound":
        _sound(axis, a, name, colours)
    else:
        _bars(axis, a, name, colours, words, in_order=kind == "tokens")
    axis.set_title(title, fontsize=11, loc="left")
    says = axis.get_xlabel()
    account = account_line(a.account)
    axis.set_xlabel(
        "\n".join(filter(None, (says, *wrap(account, 58 if kind == "image" else 110)))), fontsize=8, color="0.5"
    )


def _image(axis: Any, a: Attribution, name: str, colours: _Colours, patch: int) -> None:
    heat = pool(a.heat_map(name, original=False), patch).double()
    medium = a.media[name][0] if name in a.media else None
    full = float(torch.quantile(heat.abs().flatten()[: 2**24], 0.995)) or float(heat.abs().max()) or 1.0
    extent = None
    if isinstance(medium, Picture):
        from PIL import Image

        photo = Image.open(io.BytesIO(medium.file)).convert("L").convert("RGB")
        axis.imshow(photo, extent=(0, medium.width, medium.height, 0), alpha=0.55)
        left, top, right, bottom = medium.seen
        extent = (left, right, bottom, top)
    strength = (heat / full).clamp(-1, 1)
    shown = strength.sign() * strength.abs().pow(0.8)
    axis.imshow(
        shown.numpy(),
        cmap=colours.over,
        vmin=-1,
        vmax=1,
        extent=extent,
        interpolation="nearest" if patch > 2 else "bilinear",
    )
    if isinstance(medium, Picture):
        axis.set_xlim(0, medium.width)
        axis.set_ylim(medium.height, 0)
    axis.set_xticks([])
    axis.set_yticks([])


def _bars(axis: Any, a: Attribution, name: str, colours: _Colours, words: bool, in_order: bool) -> None:
    parts = [part for part in a.parts(words=words) if part.input == name]
    medium = a.media[name][0] if name in a.media else None
    note = ""
    if isinstance(medium, Tokens) and not words:
        values = a.relevances[name][0].double().tolist()
        apart = set(sinks(medium, values))
        held = sum(abs(values[i]) for i in apart) / (sum(map(abs, values)) or 1)
        if held:
            note = f"special tokens hold {percent(held)}, not drawn"
        if apart:
            parts = [part for part in parts if part.index not in apart]
    largest = sorted(parts, key=lambda part: -abs(part.relevance))[:_BARS]
    chosen = [part for part in parts if part in largest] if in_order else largest
    rows = range(len(chosen))
    axis.barh(
        rows, [part.relevance for part in chosen], color=[colours.of(part.relevance) for part in chosen], height=0.72
    )
    axis.set_yticks(list(rows), [_short(part.label) for part in chosen])
    axis.invert_yaxis()
    axis.axvline(0, color="0.5", linewidth=0.8)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False)
    hidden = len(parts) - len(chosen)
    rest = f"{hidden} smaller parts not drawn" if hidden else ""
    axis.set_xlabel("relevance" + (f"  ({'; '.join(filter(None, (note, rest)))})" if note or rest else ""), fontsize=9)


def _sound(axis: Any, a: Attribution, name: str, colours: _Colours) -> None:
    sound = a.media[name][0]
    assert isinstance(sound, Sound)
    samples, line = sound.samples.float().cpu(), sound.line(a.relevances[name][0].float().cpu())
    seconds, (begin, end) = sound.seconds, sound.moments()
    values = torch.stack([chunk.sum() for chunk in line.tensor_split(min(400, len(line)))])
    full = float(values.abs().max()) or 1.0
    step = (end - begin) / len(values)
    for i, value in enumerate(values.tolist()):
        left, strength = begin + i * step, min(1.0, abs(value) / full)
        axis.axvspan(left, left + step, color=colours.of(value), alpha=0.6 * strength, linewidth=0)
    chunks = samples.tensor_split(min(800, len(samples)))
    times = [seconds * (i + 0.5) / len(chunks) for i in range(len(chunks))]
    axis.vlines(times, [float(c.min()) for c in chunks], [float(c.max()) for c in chunks], color="0.5", linewidth=0.7)
    axis.set_xlim(0, seconds)
    axis.set_xlabel("seconds")
    axis.set_yticks([])


def _matrix(axis: Any, g: Generation, colours: _Colours, words: bool) -> None:
    if words:
        matrix, rows, columns = g.words()
    else:
        matrix, rows, columns = g.matrix, [readable(p) for p in g.generated], [readable(p) for p in g.tokens]
    plain = (
        [j for j, kind in enumerate(g.context.kinds) if kind not in ("special", PADDING, "first")]
        if not words
        else list(range(matrix.shape[1]))
    )
    full = matrix[:, plain].abs().amax(1, keepdim=True) if plain else matrix.abs().amax(1, keepdim=True)
    shown = matrix / torch.where(full == 0, 1, full)
    drawn = axis.imshow(
        shown.clamp(-1, 1).numpy(), cmap=colours.map, vmin=-1, vmax=1, aspect="auto", interpolation="nearest"
    )
    if len(columns) <= 80:
        axis.set_xticks(range(len(columns)), [_short(c, 14) for c in columns], rotation=90, fontsize=7)
        axis.xaxis.tick_top()
    if len(rows) <= 80:
        axis.set_yticks(range(len(rows)), [_short(r, 14) for r in rows], fontsize=8)
    axis.tick_params(length=0)
    axis.set_xlabel("context")
    axis.set_ylabel("generated")
    axis.figure.colorbar(drawn, ax=axis, shrink=0.6, label="relevance, scaled by row", pad=0.01)

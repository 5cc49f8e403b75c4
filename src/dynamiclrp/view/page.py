"""Relevance → one HTML page that needs nothing but itself.

In come plain values: tensors, strings, floats. Out comes text: a PNG as a data URI, a coloured sentence, a table of sums,
a whole page. Style, images and the one line of script are inside the page, so it opens from a disk or an attachment and
asks the network for nothing. This file must not know the engine, run a model or touch the disk.

Colours are zero-centred everywhere: red spoke for the answer, blue against it, and zero is fully transparent, so that
"no relevance" is the background's own colour in light and in dark.
"""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor

from .account import Sums, decimals, number, percent, sums_table

POSITIVE = (214, 40, 40)
NEGATIVE = (38, 98, 217)


# ---------------------------------------------------------------------------------------------------------------- values


@dataclass(frozen=True)
class Picture:
    """The relevance of a photo's pixels, [height, width], for one answer; `score` says what the sums add up to."""

    answer: str
    relevance: Tensor
    sums: Sums
    probability: float | None = None
    score: str = "score"


@dataclass(frozen=True)
class Answer:
    """A question about a sentence and the relevance of its tokens that answers it; `score` says what the sums add up to."""

    question: str
    relevance: Sequence[float]
    sums: Sums
    score: str


@dataclass(frozen=True)
class Candidate:
    """A next word that a model thinks likely, and what the sentence's tokens had to do with it."""

    word: str
    probability: float
    answers: Sequence[Answer]


@dataclass(frozen=True)
class Machine:
    """How one model was explained: its plan's numbers, and its time beside a gradient's, in milliseconds."""

    model: str
    preset: str
    plan: Mapping[str, str]
    gradient_ms: float
    lrp_ms: float

    @property
    def ratio(self) -> float:
        return self.lrp_ms / self.gradient_ms


# --------------------------------------------------------------------------------------------------------------- colours


def scale_of(values: Tensor | Sequence[float], quantile: float = 1.0) -> float:
    """The magnitude that gets the full colour: a quantile of |values|, never 0.

    >>> scale_of([-4.0, 1.0, 0.0])
    4.0
    """
    magnitudes = torch.as_tensor(values, dtype=torch.float64).abs().flatten()
    if not torch.isfinite(magnitudes).all():
        raise ValueError("cannot colour relevance that is not finite")
    if magnitudes.numel() == 0:
        return 1.0
    rank = max(0, math.ceil(quantile * magnitudes.numel()) - 1)
    scale = magnitudes.sort().values[rank].item()
    return scale or magnitudes.max().item() or 1.0


def heat_pixels(relevance: Tensor, scale: float | None = None) -> Tensor:
    """[H, W] relevance → [H, W, 4] RGBA bytes: hue from the sign, opacity from the size, transparent at zero."""
    if relevance.dim() != 2:
        raise ValueError(f"a heat map is two-dimensional, got a tensor of shape {tuple(relevance.shape)}")
    values = relevance.detach().to("cpu", torch.float64)
    strength = (values / (scale or scale_of(values, 0.995))).clamp(-1, 1)
    hue = torch.where(strength.unsqueeze(-1) >= 0, torch.tensor(POSITIVE), torch.tensor(NEGATIVE))
    # A square root would shout about noise, a straight line would hide the middle: 0.8 reads best over a photo.
    opacity = strength.abs().pow(0.8).mul(255).round().unsqueeze(-1)
    return torch.cat([hue, opacity], dim=-1).to(torch.uint8)


def png(pixels: Tensor) -> bytes:
    """[H, W, 3 or 4] bytes → a PNG file, by the standard library alone."""
    height, width, channels = pixels.shape
    if pixels.dtype != torch.uint8 or channels not in (3, 4):
        raise ValueError(f"a PNG takes [H, W, 3 or 4] uint8, got {tuple(pixels.shape)} {pixels.dtype}")

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    # Each row starts with its filter: 1 stores differences to the pixel on the left, which packs smooth maps well.
    left = torch.zeros_like(pixels)
    left[:, 1:] = pixels[:, :-1]
    rows = (pixels.to(torch.int16) - left).remainder(256).to(torch.uint8).reshape(height, -1)
    rows = torch.cat([torch.ones(height, 1, dtype=torch.uint8), rows], dim=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 6 if channels == 4 else 2, 0, 0, 0)
    packed = zlib.compress(bytes(rows.flatten().tolist()), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def data_uri(data: bytes, mime: str) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode('ascii')}"


def heat_map(relevance: Tensor, scale: float | None = None) -> str:
    """[H, W] relevance → a PNG data URI to lay over the photo."""
    return data_uri(png(heat_pixels(relevance, scale)), "image/png")


# ---------------------------------------------------------------------------------------------------------------- pieces


def token_line(tokens: Sequence[str], relevance: Sequence[float], scale: float | None = None) -> str:
    """Tokens with their relevance as background, value below, exact value on hover."""
    if len(tokens) != len(relevance):
        raise ValueError(f"{len(tokens)} tokens, but {len(relevance)} relevances")
    full = scale or scale_of(relevance)
    words: list[str] = []
    for token, value in zip(tokens, relevance, strict=True):
        strength = max(-1.0, min(1.0, value / full))
        side = "for" if strength > 0 else "against" if strength < 0 else "none"
        shown = html.escape(token.strip(" ")).replace("\n", "⏎") or "␣"
        span = (
            f'<span class="token {side}" tabindex="0" style="--a:{abs(strength):.3f}" '
            f'data-value="{value:+.5f}"><b>{shown}</b><i>{_brief(value, full)}</i></span>'
        )
        # The space before a word belongs to its token: it begins a new word, the other pieces stay together.
        if words and not token.startswith(" "):
            words[-1] += span
        else:
            words.append(span)
    line = " ".join(f'<span class="word">{word}</span>' for word in words)
    return f'<p class="tokens">{line}</p>'


def _brief(value: float, full: float) -> str:
    """A token's value in as many digits as the scale of its sentence deserves."""
    digits = max(0, decimals(full) - 2)
    text = f"{value:+.{digits}f}"
    return text.replace("-", "−") if float(text) else "0"


def legend() -> str:
    return (
        '<p class="legend"><span>against</span><span class="ramp" aria-hidden="true"></span><span>for</span>'
        "<em>no colour: no say</em></p>"
    )


def _picture(photo: str, picture: Picture) -> str:
    answer = html.escape(picture.answer)
    chance = "" if picture.probability is None else f"<span>{percent(picture.probability)}</span>"
    return f"""
      <figure class="heat">
        <div class="stack">
          <img class="under" src="{photo}" alt="">
          <img class="over" src="{heat_map(picture.relevance)}" alt="Relevance of the pixels for {answer}">
        </div>
        <figcaption><strong>{answer}</strong>{chance}</figcaption>
        {sums_table(picture.sums, "reached the pixels", picture.score)}
      </figure>"""


def _candidates(tokens: Sequence[str], candidates: Sequence[Candidate]) -> str:
    largest = max(candidate.probability for candidate in candidates) or 1.0
    # One scale for each question, so that candidates can be compared.
    scales = [
        scale_of([value for answer in answers for value in answer.relevance])
        for answers in zip(*(candidate.answers for candidate in candidates), strict=True)
    ]
    choices, panels = [], []
    for index, candidate in enumerate(candidates):
        choices.append(f"""
        <input type="radio" name="word" id="word-{index}"{" checked" if index == 0 else ""}>
        <label for="word-{index}" style="--p:{candidate.probability / largest:.4f}">
          <b>{html.escape(candidate.word)}</b><span>{percent(candidate.probability)}</span></label>""")
        answers = "".join(
            f"""
            <div class="answer">
              <p class="why">{html.escape(answer.question)}</p>
              {token_line(tokens, answer.relevance, scale)}
              {sums_table(answer.sums, "reached the words", answer.score)}
            </div>"""
            for answer, scale in zip(candidate.answers, scales, strict=True)
        )
        panels.append(f"""
          <div class="panel">{answers}
          </div>""")
    return f"""
      <div class="choice" role="group" aria-label="next word">{"".join(choices)}
        <div class="panels">{"".join(panels)}
        </div>
      </div>"""


def _machine(machine: Machine) -> str:
    slowest = max(machine.gradient_ms, machine.lrp_ms) or 1.0
    plan = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in machine.plan.items()
    )

    def bar(label: str, milliseconds: float, kind: str) -> str:
        return (
            f'<div class="clock {kind}"><span>{label}</span><span class="track"><span class="bar" '
            f'style="width:{100 * milliseconds / slowest:.1f}%"></span></span><span>{number(milliseconds)} ms</span></div>'
        )

    return f"""
      <article class="machine">
        <h3>{html.escape(machine.model)}</h3>
        <p class="preset">{html.escape(machine.preset)}</p>
        <div class="times">
          <p class="ratio"><strong>{machine.ratio:.2f}<small>×</small></strong><span>the time of<br>a gradient</span></p>
          <div>{bar("gradient", machine.gradient_ms, "grey")}{bar("relevance", machine.lrp_ms, "red")}</div>
        </div>
        <dl>{plan}</dl>
      </article>"""


# ------------------------------------------------------------------------------------------------------------------ page


def page(
    *,
    photo: str,
    pictures: Sequence[Picture],
    tokens: Sequence[str],
    candidates: Sequence[Candidate],
    machines: Iterable[Machine],
    facts: Sequence[str] = (),
    credits: Sequence[str] = (),
) -> str:
    """The demo page: a photo (a data URI) with its heat maps, a sentence's tokens with the next words, the plans and the times."""
    style = resources.files(__package__).joinpath("page.css").read_text("utf-8")
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>dynamiclrp: what made it say that?</title>
<style>
{style}</style>
<body>
  <header>
    <p class="mark">dynamiclrp</p>
    <h1>What made it say that?</h1>
    <p class="lede">Two networks, one question each, answered by Layer-wise Relevance Propagation.
      <span class="for">Red</span> spoke for the answer, <span class="against">blue</span> against it, and the parts add up
      to the network’s own score.</p>
  </header>
  <main>
    <section class="photo" style="--heat:1">
      <h2>A photo</h2>
      <p class="intro">One network, one photo: the pixels behind its first answer, those behind its second, and
        those that made the difference. Below each map is the account of its score; what biases keep never reaches a pixel.</p>
      <div class="pictures">
      <figure class="original">
        <div class="stack"><img src="{photo}" alt="The photo"></div>
        <figcaption><strong>what it saw</strong></figcaption>
        {legend()}
        <label class="slider"><span>photo</span><input type="range" min="0" max="1" step="0.01" value="1"
          aria-label="strength of the heat maps"
          oninput="this.closest('section').style.setProperty('--heat', this.value)"><span>relevance</span></label>
      </figure>{"".join(_picture(photo, picture) for picture in pictures)}
      </div>
    </section>
    <section class="words">
      <h2>A sentence</h2>
      <p class="intro">What comes next? Choose one of the model’s own candidates to see which words speak for it.</p>
      {_candidates(tokens, candidates)}
    </section>
    <section class="plans">
      <h2>The machinery</h2>
      <p class="intro">Relevance rides one run of autograd. The plan says which rule acts at which node and promises to
        bring back the activations that autograd threw away: depth δ counts the steps back to values that were kept, density
        ρ is promises per node.</p>
      <div class="machines">{"".join(_machine(machine) for machine in machines)}
      </div>
    </section>
  </main>
  <footer>
    <p>{" · ".join(html.escape(fact) for fact in facts)}</p>
    <p>{"<br>".join(html.escape(credit) for credit in credits)}</p>
  </footer>
</body>
</html>
"""

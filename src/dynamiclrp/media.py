"""What an input is to a person: words, a picture, a sound, columns of a table.

A model sees ids and floats. A `Medium` says what one row of such an input stands for, so that its relevance can be
shown where the person looks: on the words, on the original picture, on the waveform. Media hold plain values; they know
neither models nor pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

PLAIN, SPECIAL, PADDING, FIRST = "", "special", "padding", "first"


@dataclass(frozen=True, eq=False)
class Tokens:
    """A row of tokens. A piece begins with a space where the text has one; `kinds` tells the model's own tokens apart.

    `first` marks the first token of a causal model's context: its position can be seen by every other one, and such
    models park attention there (a sink), whatever the token says.

    >>> Tokens.of(["The", " oven", "s", "."]).words()
    ((0, 1), (1, 3), (3, 4))
    """

    pieces: tuple[str, ...]
    kinds: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.pieces) != len(self.kinds):
            raise ValueError(f"{len(self.pieces)} pieces, but {len(self.kinds)} kinds: expected one each")

    @classmethod
    def of(cls, pieces: Sequence[str], kinds: Sequence[str] | None = None) -> Tokens:
        return cls(tuple(pieces), tuple(kinds) if kinds is not None else (PLAIN,) * len(pieces))

    def words(self) -> tuple[tuple[int, int], ...]:
        """Tokens that make a word together, as ranges. Special tokens and padding stay alone."""
        starts = [i for i in range(len(self.pieces)) if i == 0 or self._begins(i)]
        return tuple(zip(starts, [*starts[1:], len(self.pieces)]))

    def _begins(self, i: int) -> bool:
        """Does token i begin a new word?"""
        alone = {SPECIAL, PADDING}
        if self.kinds[i] in alone or self.kinds[i - 1] in alone:
            return True
        piece = self.pieces[i]
        before = next((p for p in reversed(self.pieces[:i]) if p), "")  # pieces of a split character are empty
        if not before or not piece:
            return False
        if before.isspace() and "\n" not in before:  # a space of its own belongs to the word that follows
            return False
        if before[-1].isspace() or piece[0].isspace():
            return True
        if _ideograph(before[-1]) or _ideograph(piece[0]):  # written without spaces: every token is a word
            return True
        return _class(before[-1]) != _class(piece[0])

    def text(self, start: int, stop: int) -> str:
        return "".join(self.pieces[start:stop])

    def label(self, start: int, stop: int | None = None) -> str:
        """A token, or the tokens up to `stop`, as a name in lists and tables."""
        return readable(self.text(start, start + 1 if stop is None else stop))


def readable(piece: str) -> str:
    """A piece of text without its outer spaces, with what cannot be seen made visible.

    >>> readable(" oven"), readable("\\n"), readable(" "), readable("")
    ('oven', '⏎', '␣', '·')
    """
    return piece.strip(" ").replace("\n", "⏎") or ("␣" if piece else "·")


def _class(character: str) -> str:
    """Letters and digits go together (and apostrophes: don't is one word), signs with signs."""
    return "word" if character.isalnum() or character in "'’_�" or character.isidentifier() else "sign"


def _ideograph(character: str) -> bool:
    code = ord(character)
    return 0x3040 <= code <= 0x30FF or 0x3400 <= code <= 0x9FFF or 0xF900 <= code <= 0xFAFF or 0x0E00 <= code <= 0x0E7F


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture as its file has it, and which part of it the model saw: `seen` = (left, top, right, bottom) in its pixels.

    The part may reach beyond the picture, where preprocessing padded it.
    """

    file: bytes  # PNG or JPEG
    mime: str
    width: int
    height: int
    seen: tuple[float, float, float, float]

    def __repr__(self) -> str:
        return f"Picture({self.width} x {self.height}, {self.mime}, seen={tuple(round(v, 1) for v in self.seen)})"

    def original(self, heat: Tensor) -> Tensor:
        """A map [h, w] of what the model saw → [height, width] of the picture: resize, crop and padding undone.

        Every pixel of the picture gets its area's share, so that the sum stays what the model's own map has inside the
        picture.
        """
        left, top, right, bottom = self.seen
        wide, high = right - left, bottom - top
        rows, columns = heat.shape
        x = (torch.arange(self.width, dtype=torch.float64) + 0.5 - left) / wide  # 0..1 inside what was seen
        y = (torch.arange(self.height, dtype=torch.float64) + 0.5 - top) / high
        grid = torch.stack([(2 * x - 1).expand(self.height, -1), (2 * y - 1)[:, None].expand(-1, self.width)], -1)
        found = functional.grid_sample(
            heat.double()[None, None], grid[None], mode="bilinear", padding_mode="border", align_corners=False
        )[0, 0]
        inside = ((x >= 0) & (x < 1))[None, :] & ((y >= 0) & (y < 1))[:, None]
        return torch.where(inside, found * (rows / high) * (columns / wide), 0).to(heat.dtype)


@dataclass(frozen=True, eq=False)
class Sound:
    """A recording, [samples], and its rate, and what the model was given of it.

    `features` is a spectrogram that stands for the recording, `axis` its time axis and `span` the seconds at which that
    axis begins and ends; without features the model was given the samples themselves.
    """

    samples: Tensor
    rate: int
    features: Tensor | None = None
    axis: int = -1
    span: tuple[float, float] | None = None

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate

    def bands(self, values: Tensor) -> Tensor:
        """Values of the features as [bands, frames]."""
        return values.movedim(self.axis, -1).reshape(-1, values.shape[self.axis])

    def line(self, values: Tensor) -> Tensor:
        """Values over time: of each sample, or of each frame, bands added up."""
        return values.flatten() if self.features is None else self.bands(values).sum(0)

    def moments(self) -> tuple[float, float]:
        """When what the model was given begins and ends, in seconds."""
        return (0.0, self.seconds) if self.span is None else self.span

    def __repr__(self) -> str:
        return f"Sound({self.seconds:.2f} s at {self.rate} Hz)"


@dataclass(frozen=True, eq=False)
class Table:
    """One row of a table: the names of its columns and what stands in them."""

    columns: tuple[str, ...]
    cells: tuple[str, ...]


Medium = Tokens | Picture | Sound | Table

"""A whole program as plain data: what it is made of, its model in torch, its meaning on a tape, and which shapes stand in it.

In: names of an entry, blocks and an end, each with a spelling. Out: an `nn.Module`, inputs, a `Tape`. It knows no preset and no engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .blocks import BLOCKS, Weights, a_map
from .entries import ENDS, ENTRIES
from .tape import Node, Tape

CLASSES = 3
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Part:
    """One block of a program, in one spelling, with trained or frozen weights."""

    name: str
    spelling: str
    frozen: bool = False

    def __repr__(self) -> str:
        return f"Part({self.name!r}, {self.spelling!r}{', frozen=True' if self.frozen else ''})"


@dataclass(frozen=True)
class Program:
    """A program. Its `repr` is Python that makes it again."""

    entry: Part
    blocks: tuple[Part, ...] = ()
    end: str = "mean"
    rows: int = 2
    bias: bool = True  # has the last map one?
    half: str | None = None
    seed: int = 0

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.entry, *self.blocks)

    def shapes(self) -> frozenset[str]:
        """Names of everything notable that stands in it."""
        found = set(ENTRIES[self.entry.name].shapes(self.entry.spelling))
        for part in self.blocks:
            found |= BLOCKS[part.name].shapes(part.spelling)
        found |= {"frozen" if part.frozen else "trained" for part in self.parts}
        found |= {"batch"} if self.rows > 1 else {"one row"}
        found |= {"half"} if self.half else set()
        return frozenset(found)

    def plain(self) -> Program:
        """The same function in the first spelling of every part, all weights trained."""
        parts = [
            replace(part, spelling=next(iter(kind(part, n).spellings)), frozen=False)
            for n, part in enumerate(self.parts)
        ]
        return replace(self, entry=parts[0], blocks=tuple(parts[1:]))

    def weights(self) -> list[Weights]:
        """Of every part, and of the last map."""
        makers = [kind(part, n).weights for n, part in enumerate(self.parts)]
        made = [make(_generator(self.seed, n)) for n, make in enumerate(makers)]
        last = a_map(_generator(self.seed, 99), CLASSES)
        return [*made, last if self.bias else {"w": last["w"]}]

    def inputs(self) -> dict[str, Tensor]:
        return ENTRIES[self.entry.name].inputs(_generator(self.seed, 98), self.rows)


def kind(part: Part, n: int) -> Any:
    """The block or, at the beginning, the entry."""
    return ENTRIES[part.name] if n == 0 else BLOCKS[part.name]


def _generator(seed: int, n: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * seed + n)


_STATISTICS = ("mean", "var")


class Model(nn.Module):
    """A program in torch."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.kept: list[dict[str, Any]] = []
        for n, weights in enumerate(program.weights()):
            frozen = n < len(program.parts) and program.parts[n].frozen
            for key, value in weights.items():
                name = f"_{n}_{key.replace(' ', '_')}"
                if key.startswith("buffer") or key.rstrip("0123456789") in _STATISTICS:
                    self.register_buffer(name, value)
                else:
                    self.register_parameter(name, nn.Parameter(value, requires_grad=not frozen))
            self.kept.append({key: f"_{n}_{key.replace(' ', '_')}" for key in weights})

    def _weights(self, n: int) -> Weights:
        return {key: getattr(self, name) for key, name in self.kept[n].items()}

    def forward(self, x: Any = None, y: Any = None, ids: Any = None, other: Any = None) -> Tensor:
        given = {"x": x, "y": y, "ids": ids, "other": other}
        program = self.program
        h = ENTRIES[program.entry.name].spellings[program.entry.spelling](self._weights(0), given)
        for n, part in enumerate(program.blocks, 1):
            h = BLOCKS[part.name].spellings[part.spelling](self._weights(n), h)
        last = self._weights(len(program.parts))
        return F.linear(ENDS[program.end].run(h), last["w"], last.get("b"))


def meaning(program: Program, preset: str, dtype: torch.dtype = torch.float64, nudge: float = 0.0) -> tuple[Tape, Node]:
    """The program on a tape: its spelling matters only where the preset sees primitives (`dynamic`)."""
    tape = Tape(dtype, primitives=preset == "dynamic")
    tape.noise = nudge
    weights, inputs = program.weights(), program.inputs()
    if nudge:
        weights = [{key: _nudged(value, nudge) for key, value in w.items()} for w in weights]
        inputs = {key: _nudged(value, nudge) for key, value in inputs.items()}
    weights = [{key: value.to(dtype) for key, value in w.items()} for w in weights]
    if preset == "gradient":
        inputs = {
            key: value.to(dtype).requires_grad_() if value.is_floating_point() else value
            for key, value in inputs.items()
        }
        weights = [{key: value.requires_grad_(key.startswith("table")) for key, value in w.items()} for w in weights]
    h = ENTRIES[program.entry.name].mean(tape, weights[0], inputs)
    for n, part in enumerate(program.blocks, 1):
        block = BLOCKS[part.name]
        tape.written = part.spelling in block.written
        h = block.mean(tape, weights[n], h)
    last = weights[-1]
    return tape, tape.linear(ENDS[program.end].mean(tape, h), last["w"], last.get("b"))


def _nudged(value: Tensor, by: float) -> Tensor:
    if not value.is_floating_point():
        return value
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(5), dtype=value.dtype)
    return value * (1 + by * noise)


def model(program: Program, dtype: torch.dtype = torch.float64) -> nn.Module:
    return Model(program).to(dtype).eval()

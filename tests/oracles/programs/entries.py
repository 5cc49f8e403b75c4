"""How a program begins and ends: from its inputs (numbers, pictures, ids) to the hidden state [rows, time, SIZE], and from there to scores.

In: inputs by name, weights. Out: the hidden state; for the tape the same, with every input as a leaf. The shapes' names are in `program.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .blocks import BETWEEN, SIZE, Weights, _set, a_norm, batch_norm, draw, folded
from .tape import Node, Tape

TIME, WORDS, CHANNELS, SIDE = 4, 12, 2, 4
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Entry:
    """One way to begin. See `blocks.Block`: spellings are the same function."""

    inputs: Callable[[torch.Generator, int], Inputs]
    weights: Callable[[torch.Generator], Weights]
    spellings: dict[str, Callable[[Weights, Inputs], Tensor]]
    mean: Callable[[Tape, Weights, Inputs], Node]
    marks: frozenset[str] = frozenset()
    marked: dict[str, frozenset[str]] = field(default_factory=dict)
    written: frozenset[str] = frozenset()

    def shapes(self, spelling: str) -> frozenset[str]:
        return self.marks | self.marked.get(spelling, frozenset())


# ---------------------------------------------------------------- numbers


def floats(*names: str) -> Callable[[torch.Generator, int], Inputs]:
    return lambda g, rows: {name: draw(g, rows, TIME, SIZE) for name in names}


NUMBERS = Entry(
    floats("x"), lambda g: {},
    {"x": lambda w, i: i["x"], "clone": lambda w, i: i["x"].clone(), "view": lambda w, i: i["x"].view(i["x"].shape)},
    lambda tape, w, i: tape.leaf("x", i["x"]),
)  # fmt: skip

TWO_NUMBERS = Entry(
    floats("x", "y"), lambda g: {},
    {"add": lambda w, i: i["x"] + i["y"], "branch first": lambda w, i: i["y"] + i["x"]},
    lambda tape, w, i: tape.add(tape.leaf("x", i["x"]), tape.leaf("y", i["y"])),
)  # fmt: skip


def _row_inputs(g: torch.Generator, rows: int) -> Inputs:
    return {"x": draw(g, rows, TIME, SIZE), "y": draw(g, rows, 1, SIZE)}


BROADCAST_NUMBERS = Entry(
    _row_inputs, lambda g: {},
    {"add": lambda w, i: i["x"] + i["y"], "expand": lambda w, i: i["x"] + i["y"].expand_as(i["x"])},
    lambda tape, w, i: tape.add(tape.leaf("x", i["x"]), tape.leaf("y", i["y"])),
    marks=_set({"broadcasting"}),
)  # fmt: skip

# ---------------------------------------------------------------- pictures


def picture(g: torch.Generator, rows: int) -> Inputs:
    return {"x": draw(g, rows, CHANNELS, SIDE, SIDE)}


def filters(*sizes: tuple[int, int], norms: bool = False, bias: bool = True) -> Callable[[torch.Generator], Weights]:
    """Weights of convolutions in a row, each with its batch norm if so asked."""

    def make(g: torch.Generator) -> Weights:
        made: Weights = {}
        for n, (into, out) in enumerate(sizes):
            made[f"w{n}"] = draw(g, out, into, 3, 3, scale=(9 * into) ** -0.5 * 1.5)
            if bias:
                made[f"b{n}"] = draw(g, out, scale=0.3)
            made |= {f"{key}{n}": value for key, value in a_norm(g, out).items()} if norms else {}
        return made

    return make


def _norm_of(w: Weights, n: int) -> Weights:
    return {key: w[f"{key}{n}"] for key in ("mean", "var", "scale", "shift")}


def conv(w: Weights, n: int, x: Tensor, between: Callable[[Tensor], Tensor] = lambda y: y) -> Tensor:
    """A convolution, its batch norm if it has one, a rectifier."""
    z = F.conv2d(x, w[f"w{n}"], w.get(f"b{n}"), padding=1)
    return (batch_norm(between(z), _norm_of(w, n)) if f"var{n}" in w else z).relu()


def mean_conv(tape: Tape, w: Weights, n: int, x: Node) -> Node:
    norm = folded(_norm_of(w, n)) if f"var{n}" in w else None
    return tape.act(tape.conv(x, w[f"w{n}"], w.get(f"b{n}"), norm, 1), torch.relu)


def tokens(y: Tensor) -> Tensor:
    """[rows, SIZE, height, width] → [rows, time, SIZE]."""
    return y.flatten(2).transpose(1, 2)


CONVS = Entry(
    picture, filters((CHANNELS, 3), (3, SIZE)),
    {
        "plain": lambda w, i: tokens(F.avg_pool2d(conv(w, 1, conv(w, 0, i["x"])), 2)),
        "permute": lambda w, i: F.avg_pool2d(conv(w, 1, conv(w, 0, i["x"])), 2).permute(0, 2, 3, 1).flatten(1, 2),
        "adaptive": lambda w, i: tokens(F.adaptive_avg_pool2d(conv(w, 1, conv(w, 0, i["x"].clone())), 2)),
    },
    lambda tape, w, i: tape.move(tape.pool(mean_conv(tape, w, 1, mean_conv(tape, w, 0, tape.leaf("x", i["x"]))), lambda t: F.avg_pool2d(t, 2)), tokens),
    marks=_set({"convolution", "average_pool"}),
)  # fmt: skip


def _normed(between: Callable[[Tensor], Tensor]) -> Callable[[Weights, Inputs], Tensor]:
    return lambda w, i: tokens(conv(w, 1, conv(w, 0, i["x"], between), between))


CONV_NORMS = Entry(
    picture, filters((CHANNELS, 3), (3, SIZE), norms=True, bias=False),
    {"plain": _normed(lambda y: y)} | {name: _normed(f) for name, f in BETWEEN.items()},
    lambda tape, w, i: tape.move(mean_conv(tape, w, 1, mean_conv(tape, w, 0, tape.leaf("x", i["x"]))), tokens),
    marks=_set({"convolution", "map_and_norm"}),
    marked={name: _set({"moved_between"}) for name in BETWEEN},
)  # fmt: skip


def _deep(pool: Callable[[Tensor], Tensor]) -> Callable[[Weights, Inputs], Tensor]:
    def run(w: Weights, i: Inputs) -> Tensor:
        y = conv(w, 0, i["x"])
        y = y + conv(w, 1, y)
        return tokens(conv(w, 3, conv(w, 2, pool(y))))

    return run


def _mean_deep(tape: Tape, w: Weights, i: Inputs) -> Node:
    y = mean_conv(tape, w, 0, tape.leaf("x", i["x"]))
    y = tape.add(y, mean_conv(tape, w, 1, y))
    places = F.max_pool2d(y.value.detach(), 2, return_indices=True)[1]
    y = tape.move(y, lambda t: t.flatten(2).gather(2, places.flatten(2)).reshape(places.shape))
    return tape.move(mean_conv(tape, w, 3, mean_conv(tape, w, 2, y)), tokens)


DEEP = Entry(
    picture, filters((CHANNELS, 3), (3, 3), (3, 3), (3, SIZE)),
    {
        "max_pool": _deep(lambda y: F.max_pool2d(y, 2)),
        "with indices": _deep(lambda y: F.max_pool2d(y, 2, return_indices=True)[0]),
        "adaptive": _deep(lambda y: F.adaptive_max_pool2d(y, 2)),
    },
    _mean_deep,
    marks=_set({"convolution", "residual", "selection", "chosen_by_value"}),
)  # fmt: skip


def _beside(take: Callable[[Tensor], Tensor]) -> Callable[[Weights, Inputs], Tensor]:
    return lambda w, i: tokens(conv(w, 0, i["x"])) + take(i["x"]).flatten(1)[:, :, None]


BESIDE = Entry(
    picture, filters((CHANNELS, SIZE)),
    {
        "slice": _beside(lambda x: x[:, 1:]),
        "split": _beside(lambda x: x.split(1, 1)[1]),
        "chunk": _beside(lambda x: x.chunk(2, 1)[1]),
        "unbind": _beside(lambda x: x.unbind(1)[1]),
    },
    lambda tape, w, i: (lambda x: tape.add(
        tape.move(mean_conv(tape, w, 0, x), tokens), tape.move(x, lambda t: t[:, 1].flatten(1)[:, :, None])
    ))(tape.leaf("x", i["x"])),
    marks=_set({"convolution", "residual", "broadcasting"}),
    marked={name: _set({"unused_output"}) for name in ("split", "chunk", "unbind")},
)  # fmt: skip

RECTIFIED = Entry(
    picture, filters((CHANNELS, SIZE)),
    {
        "relu": lambda w, i: tokens(conv(w, 0, i["x"].relu())),
        "in place": lambda w, i: tokens(conv(w, 0, i["x"].clone().relu_())),
    },
    lambda tape, w, i: tape.move(mean_conv(tape, w, 0, tape.act(tape.leaf("x", i["x"]), torch.relu)), tokens),
    marks=_set({"convolution", "relevance_at_zeros"}),
    marked={"in place": _set({"in_place"})},
)  # fmt: skip

# ---------------------------------------------------------------- ids


def ids(*names: str) -> Callable[[torch.Generator, int], Inputs]:
    def make(g: torch.Generator, rows: int) -> Inputs:
        # no two alike in a row: neither positions nor the same backwards
        return {name: 1 + torch.rand(rows, WORDS - 1, generator=g).argsort(1)[:, :TIME] for name in names}

    return make


def tables(count: int = 1) -> Callable[[torch.Generator], Weights]:
    return lambda g: {f"table{n}": draw(g, WORDS, SIZE) for n in range(count)}


def places(t: Tensor) -> Tensor:
    return torch.arange(t.numel()).reshape(t.shape)


def looked(tape: Tape, table: Tensor, given: Tensor, name: str = "ids", move: Any = None, change: Any = None) -> Node:
    """A lookup of ids that were changed one by one (`change`) and moved (`move`)."""
    changed, origin = (given if change is None else change(given)), places(given)
    if move is not None:
        changed, origin = move(changed), move(origin + 1) - 1  # what a move fills in comes from nowhere
    return tape.lookup(name, table, changed.long(), origin, given.shape)


_EMBED = {
    "embedding": lambda t, i: F.embedding(i, t),
    "index": lambda t, i: t[i],
    "index_select": lambda t, i: t.index_select(0, i.flatten()).unflatten(0, i.shape),
}
WORDS_ALONE = Entry(
    ids("ids"), tables(),
    {name: (lambda w, i, f=f: f(w["table0"], i["ids"])) for name, f in _EMBED.items()}
    | {"view": lambda w, i: F.embedding(i["ids"].view(-1), w["table0"]).view(*i["ids"].shape, SIZE)},
    lambda tape, w, i: looked(tape, w["table0"], i["ids"]),
    marks=_set({"ids_direct"}),
)  # fmt: skip


def _positions(w: Weights, i: Inputs, given: Callable[[Tensor], Tensor]) -> Tensor:
    return F.embedding(given(i["ids"]), w["table0"]) + F.embedding(torch.arange(TIME), w["table1"])


WORDS_AND_PLACES = Entry(
    ids("ids"), tables(2),
    {"as they are": lambda w, i: _positions(w, i, lambda t: t), "parameter": lambda w, i: F.embedding(i["ids"], w["table0"]) + w["table1"][:TIME]},
    lambda tape, w, i: tape.add(looked(tape, w["table0"], i["ids"]), tape.parameter(w["table1"][:TIME])),
    marks=_set({"ids_direct", "broadcasting"}),
)  # fmt: skip


def _equal_ids(g: torch.Generator, rows: int) -> Inputs:
    return {"ids": torch.arange(TIME).repeat(rows, 1)}


EQUAL_PLACES = Entry(
    _equal_ids, tables(2),
    {
        "clone": lambda w, i: F.embedding(i["ids"].clone(), w["table0"]) + F.embedding(torch.arange(TIME).expand(i["ids"].shape), w["table1"]),
        "cast": lambda w, i: F.embedding(i["ids"].int(), w["table0"]) + F.embedding(torch.arange(TIME).expand(i["ids"].shape), w["table1"]),
    },
    lambda tape, w, i: tape.add(looked(tape, w["table0"], i["ids"]), tape.parameter(w["table1"][:TIME])),
    marks=_set({"positions_equal_to_ids"}),
)  # fmt: skip


def _changed(mark: str, change: Any, **spelled: Any) -> Entry:
    return Entry(
        ids("ids"), tables(),
        {name: (lambda w, i, f=f: F.embedding(f(i["ids"]), w["table0"])) for name, f in spelled.items()},
        lambda tape, w, i: looked(tape, w["table0"], i["ids"], change=change),
        marks=_set({mark}),
    )  # fmt: skip


def _moved(mark: str, move: Any, marked: Any = None, **spelled: Any) -> Entry:
    return Entry(
        ids("ids"), tables(),
        {name: (lambda w, i, f=f: F.embedding(f(i["ids"]), w["table0"])) for name, f in spelled.items()},
        lambda tape, w, i: looked(tape, w["table0"], i["ids"], move=move),
        marks=_set({mark}),
        marked={name: _set({also}) for name, also in (marked or {}).items()},
    )  # fmt: skip


SHIFTED = _changed(
    "ids_shifted", lambda t: (t + 1) % WORDS,
    plus=lambda t: (t + 1) % WORDS, where=lambda t: torch.where(t == WORDS - 1, 0, t + 1), minus=lambda t: (t - (-1)).remainder(WORDS),
)  # fmt: skip
CLIPPED = _changed(
    "ids_clipped", lambda t: t.clamp(2, 7), clamp=lambda t: t.clamp(2, 7), minmax=lambda t: t.clamp(min=2).clamp(max=7)
)
FLIPPED = _moved(
    "ids_flipped",
    lambda t: t.flip(1),
    {"index": "ids_indexed"},
    flip=lambda t: t.flip(1),
    index=lambda t: t[:, [3, 2, 1, 0]],
)
TRANSPOSED = Entry(
    ids("ids"), tables(),
    {
        "contiguous": lambda w, i: F.embedding(i["ids"].t().contiguous(), w["table0"]).transpose(0, 1),
        "t": lambda w, i: F.embedding(i["ids"].t(), w["table0"]).transpose(0, 1),
        "transpose": lambda w, i: F.embedding(i["ids"].transpose(0, 1), w["table0"]).transpose(0, 1),
    },
    lambda tape, w, i: looked(tape, w["table0"], i["ids"]),
    marked={"t": _set({"ids_transposed"}), "transpose": _set({"ids_transposed"})},
)  # fmt: skip
JOINED = _moved(
    "ids_joined", lambda t: F.pad(t, (1, 0)), {"cat": "ids_joined_to_a_constant"},
    pad=lambda t: F.pad(t, (1, 0)), cat=lambda t: torch.cat([torch.zeros_like(t[:, :1]), t], 1),
)  # fmt: skip
CUT = _moved("ids_joined", lambda t: t[:, 1:], slice=lambda t: t[:, 1:], narrow=lambda t: t.narrow(1, 1, TIME - 1))


def _bags(i: Tensor) -> Tensor:
    return i.unflatten(1, (2, TIME // 2))


BAG = Entry(
    ids("ids"), tables(),
    {
        "sum": lambda w, i: F.embedding(_bags(i["ids"]), w["table0"]).sum(2),
        "bag": lambda w, i: F.embedding_bag(_bags(i["ids"]).flatten(0, 1), w["table0"], mode="sum").unflatten(0, (-1, 2)),
        "offsets": lambda w, i: F.embedding_bag(
            i["ids"].flatten(), w["table0"], torch.arange(0, i["ids"].numel(), TIME // 2), mode="sum"
        ).unflatten(0, (-1, 2)),
    },
    lambda tape, w, i: tape.reduce(tape.move(looked(tape, w["table0"], i["ids"]), lambda t: t.unflatten(1, (2, TIME // 2))), 2, mean=False),
    marked={"bag": _set({"ids_in_bags"}), "offsets": _set({"ids_in_bags"}), "sum": _set({"ids_direct"})},
)  # fmt: skip


AVERAGED_BAG = Entry(
    ids("ids"),
    tables(),
    {
        "mean": lambda w, i: F.embedding(_bags(i["ids"]), w["table0"]).mean(2),
        "bag": lambda w, i: F.embedding_bag(_bags(i["ids"]).flatten(0, 1), w["table0"], mode="mean").unflatten(
            0, (-1, 2)
        ),
    },
    lambda tape, w, i: tape.reduce(
        tape.move(looked(tape, w["table0"], i["ids"]), lambda t: t.unflatten(1, (2, TIME // 2))), 2
    ),
    marked={"bag": _set({"ids_in_bags"}), "mean": _set({"ids_direct"})},
)


def _second(change: Any) -> Callable[[Weights, Inputs], Tensor]:
    return lambda w, i: F.embedding(i["ids"], w["table0"]) + F.embedding(change(i["ids"]), w["table1"])


SECOND_TABLE = Entry(
    ids("ids"), tables(2),
    {"hash": _second(lambda t: t * 7 % WORDS), "remainder": _second(lambda t: torch.remainder(t * 7, WORDS))},
    lambda tape, w, i: tape.add(
        looked(tape, w["table0"], i["ids"]), looked(tape, w["table1"], i["ids"], change=lambda t: t * 7 % WORDS)
    ),
    marks=_set({"ids_second_table"}),
)  # fmt: skip
SAME_TABLE = Entry(
    ids("ids"), tables(2),
    {"same": _second(lambda t: t), "view": _second(lambda t: t.view(t.shape))},
    lambda tape, w, i: tape.add(looked(tape, w["table0"], i["ids"]), looked(tape, w["table1"], i["ids"])),
    marks=_set({"ids_two_tables"}),
)  # fmt: skip


def _numbers_and_ids(g: torch.Generator, rows: int) -> Inputs:
    return floats("x")(g, rows) | ids("ids")(g, rows)


def _beside_numbers(mark: str, change: Any, move: Any) -> Entry:
    """Numbers beside ids that are looked up as they are, shifted or flipped."""
    do = lambda t: move(change(t))  # noqa: E731
    return Entry(
        _numbers_and_ids, tables(),
        {
            "add": lambda w, i: i["x"] + F.embedding(do(i["ids"]), w["table0"]),
            "ids first": lambda w, i: F.embedding(do(i["ids"]), w["table0"]) + i["x"],
        },
        lambda tape, w, i: tape.add(tape.leaf("x", i["x"]), looked(tape, w["table0"], i["ids"], change=change, move=move)),
        marks=_set({mark}),
    )  # fmt: skip


def same(t: Tensor) -> Tensor:
    return t


BESIDE_NUMBERS = _beside_numbers("ids_beside_floats", same, same)
MOVED_BESIDE_NUMBERS = _beside_numbers("ids_moved_beside_floats", lambda t: (t + 1) % WORDS, lambda t: t.flip(1))

BESIDE_IDS = Entry(
    ids("ids", "other"), tables(2),
    {
        "add": lambda w, i: F.embedding(i["ids"], w["table0"]) + F.embedding(i["other"], w["table1"]),
        "other first": lambda w, i: F.embedding(i["other"], w["table1"]) + F.embedding(i["ids"], w["table0"]),
    },
    lambda tape, w, i: tape.add(looked(tape, w["table0"], i["ids"]), looked(tape, w["table1"], i["other"], "other")),
    marks=_set({"ids_beside_ids"}),
)  # fmt: skip


def _twins(g: torch.Generator, rows: int) -> Inputs:
    made = ids("ids")(g, rows)
    return made | {"other": made["ids"].clone()}


EQUAL_IDS = Entry(
    _twins, tables(2),
    {"clone": lambda w, i: F.embedding(i["ids"].clone(), w["table0"]) + F.embedding(i["other"].clone(), w["table1"])},
    lambda tape, w, i: tape.add(looked(tape, w["table0"], i["ids"]), looked(tape, w["table1"], i["other"], "other")),
    marks=_set({"equal_ids"}),
)  # fmt: skip

ENTRIES: dict[str, Entry] = {
    "numbers": NUMBERS, "two numbers": TWO_NUMBERS, "broadcast numbers": BROADCAST_NUMBERS, "convs": CONVS,
    "conv norms": CONV_NORMS, "deep": DEEP, "beside": BESIDE, "rectified": RECTIFIED, "words": WORDS_ALONE,
    "words and places": WORDS_AND_PLACES, "equal places": EQUAL_PLACES, "shifted": SHIFTED, "clipped": CLIPPED,
    "flipped": FLIPPED, "transposed": TRANSPOSED, "joined": JOINED, "cut": CUT, "bag": BAG,
    "averaged bag": AVERAGED_BAG, "second table": SECOND_TABLE,
    "same table": SAME_TABLE, "beside numbers": BESIDE_NUMBERS, "moved beside numbers": MOVED_BESIDE_NUMBERS,
    "beside ids": BESIDE_IDS, "equal ids": EQUAL_IDS,
}  # fmt: skip

# ---------------------------------------------------------------- ends


@dataclass(frozen=True)
class End:
    """From the hidden state to what the last map reads."""

    run: Callable[[Tensor], Tensor]
    mean: Callable[[Tape, Node], Node]


ENDS = {
    "mean": End(lambda h: h.mean(1), lambda tape, h: tape.reduce(h, 1)),
    "sum": End(lambda h: h.sum(1), lambda tape, h: tape.reduce(h, 1, mean=False)),
    "first": End(lambda h: h[:, 0], lambda tape, h: tape.move(h, lambda t: t[:, 0])),
}

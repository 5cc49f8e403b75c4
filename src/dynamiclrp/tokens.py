"""Between text and ids: what a tokenizer made of a text, and what each id reads like in it.

In: a `transformers` tokenizer with a text, a pair or a chat. Out: ids ready for a model, and a `Tokens` per row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import TargetError
from .media import FIRST, PADDING, PLAIN, SPECIAL, Tokens

Text = str | tuple[str, str]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class Encoded:
    """Rows of ids, padded on the right; `mask` is 0 where a row is padded, `segments` 1 in the second text of a pair."""

    inputs: dict[str, Tensor]
    tokens: tuple[Tokens, ...]
    lengths: tuple[int, ...]
    segments: tuple[tuple[int | None, ...], ...]


def encode(
    tokenizer: Any,
    texts: Sequence[Text],
    *,
    device: torch.device,
    accepts: Sequence[str],
    causal: bool = False,
    max_length: int | None = None,
) -> Encoded:
    """Texts (or pairs of them) as one padded batch."""
    options: dict[str, Any] = {"truncation": True, "max_length": max_length} if max_length else {}
    made = []
    for text in texts:
        pair = text if isinstance(text, tuple) else (text,)
        if not all(isinstance(part, str) for part in pair):
            raise TypeError(f"text: expected strings, got {text!r:.80}")
        row = tokenizer(*pair, **options)
        if not len(row["input_ids"]):
            raise ValueError(f"the tokenizer made no tokens of {text!r:.80}: there is nothing to explain")
        made.append((row, pair))
    return _batch(tokenizer, made, device, accepts, causal)


def encode_chat(tokenizer: Any, messages: Messages, *, device: torch.device, accepts: Sequence[str]) -> Encoded:
    """A chat through the tokenizer's own template, up to where the assistant speaks."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            "messages: this tokenizer has no chat template, so it does not say how a chat is written for its model. "
            "Pass the prompt as text, or set tokenizer.chat_template."
        )
    wrong = [m for m in messages if not isinstance(m, Mapping) or not {"role", "content"} <= set(m)]
    if isinstance(messages, (str, Mapping)) or not messages or wrong:
        raise TypeError(f"messages: expected a list of {{'role': …, 'content': …}}, got {messages!r:.80}")
    row = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
    return _batch(tokenizer, [(row, ())], device, accepts, True)


def _batch(
    tokenizer: Any,
    made: Sequence[tuple[Any, tuple[str, ...]]],
    device: torch.device,
    accepts: Sequence[str],
    causal: bool,
) -> Encoded:
    rows = [row for row, _ in made]
    longest = max(len(row["input_ids"]) for row in rows)
    filler = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    fill = {"input_ids": filler, "attention_mask": 0, "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0)}
    inputs = {}
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        if name in rows[0] and (name in accepts or not accepts):
            padded = [list(row[name]) + [fill[name]] * (longest - len(row[name])) for row in rows]
            inputs[name] = torch.tensor(padded, device=device)
    tokens, segments = [], []
    for row, texts in made:
        ids = list(row["input_ids"])
        read = read_tokens(tokenizer, ids, causal=causal)
        of: Sequence[int | None] = [None] * len(ids)
        if getattr(row, "is_fast", False) and texts:
            of = row.sequence_ids(0)
            read = Tokens(_as_written(row, of, texts, read), read.kinds)
        gap = longest - len(ids)
        tokens.append(Tokens(read.pieces + (tokenizer.pad_token or "",) * gap, read.kinds + (PADDING,) * gap))
        segments.append((*of, *[None] * gap))
    return Encoded(inputs, tuple(tokens), tuple(len(row["input_ids"]) for row in rows), tuple(segments))


def _as_written(row: Any, of: Sequence[int | None], texts: tuple[str, ...], read: Tokens) -> tuple[str, ...]:
    """The pieces as the person wrote them: tokenizers may lower, strip and normalise."""
    pieces, ends = [], [0] * len(texts)
    for segment, (start, end), kind, piece in zip(of, row.encodings[0].offsets, read.kinds, read.pieces):
        if segment is None or kind == SPECIAL:
            pieces.append(piece)
            if segment is not None:  # a special token that the text itself has: [MASK]
                ends[segment] = end
            continue
        text, last = texts[segment], ends[segment]
        between = text[last:start] if text[last:start].isspace() else " " if start > last else ""
        pieces.append(between + text[max(start, last) : end])  # tokens of one character share its place
        ends[segment] = max(end, last)
    return tuple(pieces)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """The model's own tokens: begin, end, separators, roles of a chat."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    own = frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if getattr(token, "special", False)}
    return own - {tokenizer.unk_token_id}  # an unknown word is a word of the text


def read_tokens(tokenizer: Any, ids: Sequence[int], *, causal: bool = False) -> Tokens:
    """What each id reads like in the text, with the space before it where there is one."""
    special = special_ids(tokenizer)
    # a model's vocabulary may be larger than its tokenizer's
    names = [f"[{i}]" if name is None else name for i, name in zip(ids, tokenizer.convert_ids_to_tokens(list(ids)))]
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    wordpiece = type(model).__name__ == "WordPiece" if model is not None else any(n.startswith("##") for n in names)
    pieces = []
    for token, name in zip(ids, names, strict=True):
        if token in special or name == f"[{token}]":
            pieces.append(name)
        elif wordpiece:
            pieces.append(name[2:] if name.startswith("##") else " " + name)
        elif name.startswith("▁"):
            pieces.append(" " + name[1:].replace("▁", " "))
        else:
            pieces.append(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    pieces = _join_characters(tokenizer, ids, pieces)
    kinds = [SPECIAL if token in special else PLAIN for token in ids]
    if causal and kinds and kinds[0] == PLAIN:
        kinds[0] = FIRST
    if pieces and pieces[0].startswith(" ") and wordpiece:
        pieces[0] = pieces[0][1:]
    return Tokens(tuple(pieces), tuple(kinds))


def _join_characters(tokenizer: Any, ids: Sequence[int], pieces: list[str]) -> list[str]:
    """A character split over several tokens is written on the first of them; the others stay empty."""
    i = 0
    while i < len(pieces):
        if "�" not in pieces[i]:
            i += 1
            continue
        for stop in range(i + 2, min(i + 6, len(pieces)) + 1):
            whole = tokenizer.decode(list(ids[i:stop]), clean_up_tokenization_spaces=False)
            if "�" not in whole:
                pieces[i:stop] = [whole, *[""] * (stop - i - 1)]
                break
        i += 1
    return pieces


def token_id(tokenizer: Any, word: Any, size: int, *, after_space: bool = False) -> int:
    """The id of a word that is one token for this tokenizer."""
    if isinstance(word, int) and not isinstance(word, bool):
        if not 0 <= word < size:
            raise TargetError(f"target {word} is out of range: the vocabulary has {size} tokens")
        return word
    if not isinstance(word, str) or not word:
        raise TargetError(f"target {word!r}: expected a token id or a word")
    forms = [word] if word[0].isspace() else [" " + word, word] if after_space else [word, " " + word]
    tried = []
    for form in forms:
        ids = list(tokenizer(form, add_special_tokens=False)["input_ids"])
        if len(ids) == 1:
            if ids[0] == getattr(tokenizer, "unk_token_id", None) and word != tokenizer.unk_token:
                raise TargetError(f"target {word!r} is unknown to this tokenizer: choose a word of its vocabulary")
            return int(ids[0])
        tried.append(tokenizer.convert_ids_to_tokens(ids))
    exact = tokenizer.convert_tokens_to_ids(word)
    if isinstance(exact, int) and exact != getattr(tokenizer, "unk_token_id", None):
        return exact
    raise TargetError(
        f"target {word!r} is {len(tried[0])} tokens for this tokenizer, {tried[0]}: a score belongs to one token. Name one "
        "of them (by id, or as the tokenizer writes it), or explain a whole text with "
        "explain_generation(…, continuation=…)."
    )

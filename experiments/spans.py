"""Questions as a span model reads them: token ids, which tokens are context, where the gold answers lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from texts import Question
from torch import Tensor


@dataclass(frozen=True)
class Encoded:
    """One question with its context. `gold` are spans of token positions, both ends included."""

    question: Question
    ids: list[int]
    types: list[int]
    context: list[bool]
    offsets: list[tuple[int, int]]
    gold: list[tuple[int, int]]

    def text(self, span: tuple[int, int]) -> str:
        return self.question.context[self.offsets[span[0]][0] : self.offsets[span[1]][1]]


def encode(tokenizer: Any, question: Question, length: int) -> list[Encoded]:
    """One row per distinct gold answer, that answer first; questions that do not fit, or whose answers are cut, give none."""
    out = tokenizer(question.question, question.context, return_offsets_mapping=True)
    if len(out["input_ids"]) > length:
        return []
    context = [s == 1 for s in out.sequence_ids(0)]
    offsets = [tuple(o) for o in out["offset_mapping"]]
    gold = []
    for text, start in dict.fromkeys(question.answers):
        inside = [i for i, (a, b) in enumerate(offsets) if context[i] and a < start + len(text) and b > start]
        if inside:
            gold.append((inside[0], inside[-1]))
    types = out.get("token_type_ids") or [0] * len(context)
    spans = list(dict.fromkeys(gold))
    return [
        Encoded(question, out["input_ids"], types, context, offsets, [span, *(s for s in spans if s != span)])
        for span in spans
    ]


def padded(rows: list[Encoded], pad: int, device: Any) -> dict[str, Tensor]:
    """A batch of questions, padded on the right."""
    length = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), length), pad)
    mask, types = torch.zeros_like(ids), torch.zeros_like(ids)
    for i, row in enumerate(rows):
        n = len(row.ids)
        ids[i, :n], mask[i, :n], types[i, :n] = torch.tensor(row.ids), 1, torch.tensor(row.types)
    return {k: v.to(device) for k, v in {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}.items()}


def context_mask(rows: list[Encoded]) -> Tensor:
    """Which tokens are context, not question, special or padding: [rows, tokens]."""
    found = torch.zeros(len(rows), max(len(row.ids) for row in rows), dtype=torch.bool)
    for i, row in enumerate(rows):
        found[i, : len(row.context)] = torch.tensor(row.context)
    return found


def gold_spans(rows: list[Encoded]) -> Tensor:
    """All gold spans, [rows, several, 2]; unused places hold -1."""
    found = torch.full((len(rows), max(len(row.gold) for row in rows), 2), -1)
    for i, row in enumerate(rows):
        found[i, : len(row.gold)] = torch.tensor(row.gold)
    return found


def predicted_spans(start: Tensor, end: Tensor, rows: list[Encoded], longest: int = 30) -> list[tuple[int, int]]:
    """The best start and end inside the context, not in the wrong order and at most `longest` tokens apart."""
    n = start.shape[1]
    scores = start[:, :, None].float() + end[:, None, :].float()
    band = torch.ones(n, n, device=start.device).triu().tril(longest - 1).bool()
    inside = context_mask(rows).to(start.device)
    scores = scores.masked_fill(~(band & inside[:, :, None] & inside[:, None, :]), float("-inf"))
    best = scores.flatten(1).argmax(1).tolist()
    return [(b // n, b % n) for b in best]

"""Questions as a generating model answers them: its words, where they stand in the text, and what is explained of them.

In: a causal model or an encoder-decoder with its tokenizer and a prompt, questions. Out: `Answer`s, and batches of inputs
whose explained score is the logit of the answer's first token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from texts import Question
from torch import Tensor, nn

Span = tuple[int, int]
PROMPTS = {
    "SmolLM2-135M-Instruct": (
        "<|im_start|>user\nAnswer with a few words copied from the text.\nText: {context}\nQuestion: {question}<|im_end|>\n"
        '<|im_start|>assistant\nAnswer: "'
    ),
    "Flan-T5-small": "Read this and answer the question\n\n{context}\n\n{question}",  # one of Flan's own
    "Flan-T5-large": "question: {question} context: {context}",
}


@dataclass(frozen=True)
class Answer:
    """What a model said to one question. Spans are token positions in its prompt, both ends included; `predicted` are all
    places of the context where the answer stands, none if it does not."""

    question: Question
    ids: list[int]
    context: list[bool]
    text: str
    first: int  # the id of the answer's first token
    predicted: list[Span]
    gold: list[Span]


def _span(offsets: list[Span], start: int, end: int) -> Span | None:
    """The tokens that cover some characters."""
    inside = [i for i, (a, b) in enumerate(offsets) if a < end and b > start and b > a]
    return (inside[0], inside[-1]) if inside else None


def occurrences(text: str, words: str) -> list[int]:
    """Where `words` stand in `text`, upper and lower case alike, as whole words."""
    text, words = text.lower(), words.lower()
    found, at = [], text.find(words) if words else -1
    while at >= 0:
        before, after = text[at - 1 : at], text[at + len(words) : at + len(words) + 1]
        if not (before.isalnum() and words[0].isalnum()) and not (after.isalnum() and words[-1].isalnum()):
            found.append(at)
        at = text.find(words, at + 1)
    return found


def _padded(rows: list[list[int]], pad: int, device: Any, left: bool) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask."""
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), pad), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, place], mask[i, place] = torch.tensor(row), 1
    return ids.to(device), mask.to(device)


@torch.no_grad()
def answer(
    model: nn.Module, tokenizer: Any, prompt: str, questions: list[Question], device: Any, length: int
) -> list[Answer]:
    """Greedy answers, all at once; questions whose prompt is longer than `length` tokens are left out."""
    read = []
    for question in questions:
        text = prompt.format(context=question.context, question=question.question)
        out = tokenizer(text, return_offsets_mapping=True)
        if len(out["input_ids"]) <= length:
            shift = len(prompt.split("{context}")[0].format(question=question.question))
            offsets = [(a - shift, b - shift) for a, b in out["offset_mapping"]]
            read.append((question, list(out["input_ids"]), offsets))
    if not read:
        return []
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    # a causal model goes on at the right end, so padding stands on the left
    ids, mask = _padded([row for _, row, _ in read], pad, device, left=True)
    made = model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=pad)
    start = 1 if model.config.is_encoder_decoder else ids.shape[1]
    found = []
    for (question, row, offsets), said in zip(read, made[:, start:].tolist()):
        words = tokenizer.decode(said, skip_special_tokens=True).strip()
        if not model.config.is_encoder_decoder:  # the prompt ends inside a quotation
            words = words.split("\n")[0].split('"')[0].strip(' ."')
        here = [_span(offsets, at, at + len(words)) for at in occurrences(question.context, words)]
        gold = [_span(offsets, at, at + len(text)) for text, at in dict.fromkeys(question.answers)]
        found.append(
            Answer(
                question,
                row,
                [a >= 0 and a < b <= len(question.context) for a, b in offsets],
                words,
                said[0],
                [span for span in here if span],
                [span for span in gold if span],
            )
        )
    return found


def _spans(rows: list[list[Span]]) -> Tensor:
    """[rows, several, 2]; unused places hold -1."""
    found = torch.full((len(rows), max(map(len, rows)), 2), -1)
    for i, spans in enumerate(rows):
        found[i, : len(spans)] = torch.tensor(spans)
    return found


@dataclass(frozen=True)
class Asked:
    """Questions with what the model answered. `targets` is what is explained, `predicted` where the answer lies."""

    inputs: dict[str, Tensor]
    targets: Tensor
    gold: Tensor
    predicted: Tensor
    allowed: Tensor


def explained(model: nn.Module, answers: list[Answer], pad: int, device: Any) -> Asked:
    """A batch to explain: each row's target is the position and the token of the answer's beginning."""
    ids, mask = _padded([a.ids for a in answers], pad, device, left=False)
    inputs = {"input_ids": ids, "attention_mask": mask}
    positions = mask.sum(1).cpu() - 1
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.full_like(ids[:, :1], model.config.decoder_start_token_id)
        positions = torch.zeros_like(positions)
    allowed = torch.zeros(ids.shape, dtype=torch.bool)
    for i, row in enumerate(answers):
        allowed[i, : len(row.context)] = torch.tensor(row.context)
    targets = torch.stack([positions, torch.tensor([a.first for a in answers])], 1)
    return Asked(inputs, targets, _spans([a.gold for a in answers]), _spans([a.predicted for a in answers]), allowed)

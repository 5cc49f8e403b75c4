"""Question answering: is the answer right, and does relevance sit on it?

In: texts, or relevance per token with spans. Out: one number per question. Spans are token positions, both ends included.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import EvaluationError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise_answer(text: str) -> str:
    """SQuAD's normal form: lower case, no punctuation, no articles, single spaces.

    >>> normalise_answer("The  Eiffel-Tower!")
    'eiffeltower'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: str | Sequence[str]) -> float:
    """1.0 if the prediction equals an answer in normal form, else 0.0. No answers means: unanswerable, say nothing.

    >>> exact_match("the Normans", ["Normans", "Norman people"])
    1.0
    """
    said = normalise_answer(prediction)
    return float(any(said == normalise_answer(answer) for answer in _answers(answers)))


def f1(prediction: str, answers: str | Sequence[str]) -> float:
    """SQuAD's F1 of words, the best over the answers. Where either side says nothing, both must.

    >>> f1("in the 10th century", ["10th century", "10th and 11th centuries"])
    0.8
    """
    return max(_f1(normalise_answer(prediction).split(), normalise_answer(a).split()) for a in _answers(answers))


def _f1(said: list[str], gold: list[str]) -> float:
    if not said or not gold:
        return float(said == gold)
    common = sum((Counter(said) & Counter(gold)).values())
    return 2 * common / (len(said) + len(gold))


def _answers(answers: str | Sequence[str]) -> Sequence[str]:
    found = [answers] if isinstance(answers, str) else [a for a in answers if normalise_answer(a)]
    return found or [""]


def top_in_span(relevance: Tensor, spans: Any, *, k: int = 1, allowed: Tensor | None = None) -> Tensor:
    """Is one of the k most relevant tokens inside a span? One 0.0 or 1.0 per row.

    With gold spans and k=1 this is the paper's TGS, with predicted spans TPS. `spans` is [rows, 2], or [rows, several, 2]
    for several right answers (unused ones hold -1). `allowed` leaves tokens out, such as the question's.

    >>> import torch
    >>> top_in_span(torch.tensor([[0.1, 0.9, 0.3]]), [[1, 2]])
    tensor([1.], dtype=torch.float64)
    """
    scores, inside = _read(relevance, spans, allowed)
    if not 1 <= k <= scores.shape[1]:
        raise EvaluationError(f"k={k}: expected 1 to {scores.shape[1]}")
    top = scores.topk(k, dim=1)
    usable = top.values > -torch.inf
    return (inside.any(1).gather(1, top.indices) & usable).any(1).double()


def span_iou(relevance: Tensor, spans: Any, *, allowed: Tensor | None = None) -> Tensor:
    """Overlap of a span with as many most relevant tokens as it is long: size of intersection / size of union.

    >>> import torch
    >>> span_iou(torch.tensor([[0.1, 0.9, 0.3, 0.8]]), [[1, 2]])
    tensor([0.3333], dtype=torch.float64)
    """
    scores, inside = _read(relevance, spans, allowed)
    ranks = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    sizes = inside.sum(2)
    chosen = (ranks[:, None] < sizes[..., None]) & (scores > -torch.inf)[:, None]
    union = (chosen | inside).sum(2)
    return ((chosen & inside).sum(2).double() / union.clamp(min=1)).amax(1)


def span_agreement(
    relevance: Tensor, gold: Any, predicted: Any = None, *, allowed: Tensor | None = None
) -> dict[str, Tensor]:
    """All of it, one tensor per name: `tgs`, `tgs_top2`, `gold_iou`, and with predictions `tps`, `tps_top2`, `predicted_iou`.

    >>> import torch
    >>> {k: v.tolist() for k, v in span_agreement(torch.tensor([[0.1, 0.9, 0.3]]), [[2, 2]]).items()}
    {'tgs': [0.0], 'tgs_top2': [1.0], 'gold_iou': [0.0]}
    """
    found = {}
    for name, short, spans in (("gold", "tgs", gold), ("predicted", "tps", predicted)):
        if spans is not None:
            found[short] = top_in_span(relevance, spans, k=1, allowed=allowed)
            found[f"{short}_top2"] = top_in_span(relevance, spans, k=2, allowed=allowed)
            found[f"{name}_iou"] = span_iou(relevance, spans, allowed=allowed)
    return found


def _read(relevance: Tensor, spans: Any, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores [rows, tokens], -inf where not allowed, and which tokens are inside: [rows, several, tokens]."""
    scores = relevance.detach().cpu().double()
    if scores.dim() != 2:
        raise EvaluationError(
            f"relevance of shape {tuple(scores.shape)}: expected one number per token, [rows, tokens]"
        )
    if not bool(torch.isfinite(scores).all()):
        raise EvaluationError("relevance holds nan or inf: it cannot be ranked")
    found = torch.as_tensor(spans).cpu()
    found = found[:, None] if found.dim() == 2 else found
    if found.dim() != 3 or found.shape[0] != len(scores) or found.shape[2] != 2:
        raise EvaluationError(
            f"spans of shape {tuple(found.shape)}: expected [{len(scores)}, 2], first and last token of each row"
        )
    start, end = found[..., :1], found[..., 1:]
    used = start >= 0
    if bool((used & ((end < start) | (end >= scores.shape[1]))).any()):
        raise EvaluationError(f"a span ends before it starts or beyond the {scores.shape[1]} tokens")
    if bool((~used.any(1)).any()):
        raise EvaluationError(
            f"row {int((~used.any(1)).nonzero()[0][0])} has no span: leave unanswerable questions out"
        )
    places = torch.arange(scores.shape[1])
    inside = (places >= start) & (places <= end) & used
    if allowed is not None:
        mask = torch.as_tensor(allowed).bool().cpu()
        if mask.shape != scores.shape:
            raise EvaluationError(f"allowed has shape {tuple(mask.shape)}: expected {tuple(scores.shape)}")
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores, inside

"""What to ask a text model: for each task, which scores its answer is made of.

In: the model's output for a padded batch. Out: one score per row, and the answers in words. Each task is one small class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .attribution import Answer
from .errors import TargetError
from .heads import Rank, class_names, label_index
from .media import PADDING
from .tokens import Encoded, read_tokens, token_id

_LONGEST_ANSWER = 30  # tokens of a question's answer, as question-answering pipelines have it


class Task:
    """Chooses scores in the model's output: called with it, remembers the answers in words."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, encoded: Encoded, target: Any, contrast: Any, token: int | str | None
    ) -> None:
        self.config = getattr(model, "config", None)
        self.known = class_names(model)
        self.tokenizer, self.encoded, self.token = tokenizer, encoded, token
        self.rows = len(encoded.tokens)
        self.targets = self._each(target, "target")
        self.contrasts = self._each(contrast, "contrast")
        self.chosen: list[Any] = []
        self.answers: list[Answer] = []
        if token is not None and not self.takes_token:
            raise TypeError("token: only token classifiers and masked language models speak about one token")

    takes_token = False

    def _each(self, given: Any, what: str) -> list[Any]:
        if not isinstance(given, list):
            return [given] * self.rows
        if len(given) != self.rows:
            raise TargetError(f"{len(given)} {what}s for {self.rows} texts: expected one each")
        return given

    def __call__(self, output: Tensor) -> Tensor:
        self.chosen, self.answers = [], []
        return torch.stack([self._row(output[row], row) for row in range(self.rows)])

    def _row(self, output: Tensor, row: int) -> Tensor:
        """The score of one row."""
        logits = self._logits(output, row)
        wanted = Rank(0) if self.targets[row] is None else self.targets[row]
        index = self._index(wanted, len(logits), logits)
        score, other = logits[index], self.contrasts[row]
        against = None
        if other is not None:
            against = self._index(other, len(logits), logits)
            if against == index:
                raise TargetError(f"contrast {other!r} is the target itself: there is no difference to explain")
            score = score - logits[against]
        self.chosen.append(index if against is None else (index, against))
        self.answers.append(
            Answer(
                self._label(index), self._probability(logits, index), None if against is None else self._label(against)
            )
        )
        return score

    def _logits(self, output: Tensor, row: int) -> Tensor:
        raise NotImplementedError

    def _index(self, wanted: Any, size: int, logits: Tensor) -> int:
        return wanted.of(logits) if isinstance(wanted, Rank) else token_id(self.tokenizer, wanted, size)

    def _label(self, index: int) -> str:
        return read_tokens(self.tokenizer, [index]).label(0)

    def _probability(self, logits: Tensor, index: int) -> float | None:
        return float(logits.detach().float().softmax(-1)[index])

    def _position(self, row: int) -> int:
        """The token that `token` means."""
        tokens, length = self.encoded.tokens[row], self.encoded.lengths[row]
        if isinstance(self.token, int):
            if not -length <= self.token < length:
                raise TargetError(f"token {self.token}: the text has {length} tokens")
            return self.token % length
        hits = [
            start for start, stop in tokens.words()
            if self.token in (tokens.text(start, stop).strip(), tokens.pieces[start].strip()) and tokens.kinds[start] != PADDING
        ]  # fmt: skip
        if len(hits) != 1:
            shown = " ".join(f"{i}:{piece.strip()}" for i, piece in enumerate(tokens.pieces[:length]))
            raise TargetError(
                f"token {self.token!r} is {len(hits)} times in the text: give its number. Tokens: {shown}"
            )
        return hits[0]


class _Labels(Task):
    """Sequence classification: one logit per label."""

    def _logits(self, output: Tensor, row: int) -> Tensor:
        return output

    def _names(self, size: int) -> dict[int, str]:
        return {i: self.known.get(i, f"LABEL_{i}") for i in range(size)}

    def _index(self, wanted: Any, size: int, logits: Tensor) -> int:
        self._labels = self._names(size)
        return wanted.of(logits) if isinstance(wanted, Rank) else label_index(wanted, self._labels)

    def _label(self, index: int) -> str:
        return self._labels[index]

    def _probability(self, logits: Tensor, index: int) -> float | None:
        if len(logits) == 1:
            return None
        if getattr(self.config, "problem_type", None) == "multi_label_classification":
            return float(logits[index].detach().float().sigmoid())
        return super()._probability(logits, index)


class _TokenLabels(_Labels):
    """Token classification: one logit per label at every token."""

    takes_token = True

    def _logits(self, output: Tensor, row: int) -> Tensor:
        if self.token is None:
            raise TargetError(
                "a token classifier answers once per token: say which one with token=, by number or by its text"
            )
        self._at = self._position(row)
        self._word = next(
            self.encoded.tokens[row].text(a, b).strip()
            for a, b in self.encoded.tokens[row].words()
            if a <= self._at < b
        )
        return output[self._at]

    def _label(self, index: int) -> str:
        return f"“{self._word}” is {super()._label(index)}"

    def _row(self, output: Tensor, row: int) -> Tensor:
        score = super()._row(output, row)
        if self.answers[-1].contrast is not None:  # the word is named once
            self.answers[-1] = replace(self.answers[-1], contrast=self._labels[self.chosen[-1][1]])
        return score


class _Masked(Task):
    """Masked language model: the word behind the mask."""

    takes_token = True

    def _logits(self, output: Tensor, row: int) -> Tensor:
        if self.token is not None:
            return output[self._position(row)]
        ids = self.encoded.inputs["input_ids"][row]
        masks = (ids == self.tokenizer.mask_token_id).nonzero().flatten().tolist()
        if len(masks) != 1:
            raise TargetError(
                f"the text has {len(masks)} masks ({self.tokenizer.mask_token}): write one where a word is asked for, or say "
                "which token with token="
            )
        return output[masks[0]]


class _Next(Task):
    """Causal language model: the next token."""

    def _logits(self, output: Tensor, row: int) -> Tensor:
        self._open = not self.encoded.tokens[row].pieces[self.encoded.lengths[row] - 1].endswith((" ", "\n"))
        return output[self.encoded.lengths[row] - 1]

    def _index(self, wanted: Any, size: int, logits: Tensor) -> int:
        if isinstance(wanted, Rank):
            return wanted.of(logits)
        return token_id(self.tokenizer, wanted, size, after_space=self._open)


class _Spoken(Task):
    """Seq2seq: the decoder's next token."""

    def _logits(self, output: Tensor, row: int) -> Tensor:
        return output[-1]


class _Span(Task):
    """Extractive question answering: the sum of the first token's start logit and the last one's end logit."""

    def _row(self, output: Tensor, row: int) -> Tensor:
        start, end = self._span(self.targets[row], output, row)
        score = output[start, 0] + output[end, 1]
        chosen: Any = (start, end)
        against = None
        if self.contrasts[row] is not None:
            first, last = self._span(self.contrasts[row], output, row)
            if (first, last) == (start, end):
                raise TargetError(
                    f"contrast {self.contrasts[row]!r} is the target itself: there is no difference to explain"
                )
            score = score - output[first, 0] - output[last, 1]
            chosen, against = ((start, end), (first, last)), self._text(first, last, row)
        chances = output.detach().float()[: self.encoded.lengths[row]].softmax(0)
        self.chosen.append(chosen)
        self.answers.append(Answer(self._text(start, end, row), float(chances[start, 0] * chances[end, 1]), against))
        return score

    def _text(self, start: int, end: int, row: int) -> str:
        return self.encoded.tokens[row].label(start, end + 1)

    def _context(self, row: int) -> list[int]:
        of = self.encoded.segments[row]
        context = [i for i, segment in enumerate(of) if segment == 1]
        if not context:
            raise ValueError(
                "question answering needs a pair: explain_text(model, tokenizer, (question, context)), and a fast tokenizer "
                "that tells the two apart"
            )
        return context

    def _span(self, wanted: Any, output: Tensor, row: int) -> tuple[int, int]:
        context, tokens = self._context(row), self.encoded.tokens[row]
        if isinstance(wanted, Rank) and wanted.place:
            raise TargetError(
                "targets: name the answers; the second likeliest span is mostly the first one, a token longer"
            )
        if wanted is None or isinstance(wanted, Rank):
            values = output.detach().float()
            sums = values[context, 0][:, None] + values[context, 1][None, :]
            allowed = torch.ones_like(sums).triu().tril(_LONGEST_ANSWER - 1).bool()
            best = int(sums.masked_fill(~allowed, -torch.inf).argmax())
            return context[best // len(context)], context[best % len(context)]
        if isinstance(wanted, str):
            plain = "".join(wanted.lower().split())
            for first in context:
                text = ""
                for last in range(first, context[-1] + 1):
                    text += "".join(tokens.pieces[last].lower().split())
                    if text == plain:
                        return first, last
                    if not plain.startswith(text):
                        break
            raise TargetError(f"answer {wanted!r} is not in the context: expected a part of it, whole tokens")
        if isinstance(wanted, tuple) and len(wanted) == 2 and all(isinstance(i, int) for i in wanted):
            first, last = wanted
            if not 0 <= first <= last < self.encoded.lengths[row]:
                raise TargetError(
                    f"answer {wanted!r}: expected first and last token, 0 to {self.encoded.lengths[row] - 1}"
                )
            return first, last
        raise TargetError(f"target {wanted!r}: expected an answer's text or its (first, last) token")


ASK: dict[str, Callable[..., Task]] = {
    "sequence-classification": _Labels,
    "token-classification": _TokenLabels,
    "masked-lm": _Masked,
    "causal-lm": _Next,
    "seq2seq": _Spoken,
    "question-answering": _Span,
}

"""`explain_text`: which words a text model's answer stands on, for every usual head.

In: a `transformers` model, its tokenizer and a text. Out: an `Attribution` whose tokens read like the text. Each task is
one small class that says which scores the answer is made of; everything else is shared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .attribution import Answer, Attribution
from .errors import TargetError
from .explain import Explainer
from .media import PADDING, Tokens
from .presets import Preset
from .tokens import Encoded, Messages, Text, encode, encode_chat, read_tokens, token_id

_LONGEST_ANSWER = 30  # tokens of a question's answer, as question-answering pipelines have it

_HEADS = {
    "ForSequenceClassification": "sequence-classification",
    "ForTokenClassification": "token-classification",
    "ForMaskedLM": "masked-lm",
    "ForQuestionAnswering": "question-answering",
    "ForQuestionAnsweringSimple": "question-answering",
    "ForConditionalGeneration": "seq2seq",
    "MTModel": "seq2seq",
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
}


def explain_text(
    model: nn.Module,
    tokenizer: Any,
    text: Text | Sequence[Text] | None = None,
    *,
    messages: Messages | None = None,
    target: Any = None,
    contrast: Any = None,
    token: int | str | None = None,
    task: str | None = None,
    prefix: str = "",
    preset: str | Preset = "attnlrp",
    ledger: bool = False,
    max_length: int | None = None,
) -> Attribution:
    """Explain a text model's answer by the words it read.

    `text`: a string, a list of them (a padded batch), a pair (question, context) or a list of pairs; a chat goes into
    `messages`. `target`: None for the model's own answer, a label, a word, an id; for questions an answer's text or its
    first and last token. `contrast`: the same, for "why the one rather than the other". Both may be lists, one per text.
    `token` chooses the token that a token classifier or a masked language model speaks about, by number or by its text;
    `prefix` is what a seq2seq model's decoder has said already. `task` is found from the model's class.

        a = dlrp.explain_text(model, tokenizer, "A gripping, beautiful film.", target="POSITIVE", contrast="NEGATIVE")
        a.html("film.html")
    """
    kind = task_of(model, task)
    device = next(model.parameters()).device
    accepts = accepted(model)
    causal = kind == "causal-lm"
    if (text is None) == (messages is None):
        raise TypeError("explain_text: give either a text or messages")
    if messages is not None:
        if not causal:
            raise ValueError(f"messages: a chat is for causal language models, this one does {kind}; pass text")
        encoded = encode_chat(tokenizer, messages, device=device, accepts=accepts)
    else:
        assert text is not None
        texts = list(text) if isinstance(text, list) else [text]
        if not texts:
            raise ValueError("text: an empty list, there is nothing to explain")
        encoded = encode(tokenizer, texts, device=device, accepts=accepts, causal=causal, max_length=max_length)  # type: ignore[arg-type]
    ask = _TASKS[kind](model, tokenizer, encoded, target, contrast, token)
    media: dict[str, tuple[Tokens, ...]] = {"input_ids": encoded.tokens}
    inputs = dict(encoded.inputs)
    if kind == "seq2seq":
        spoken = decoder_start(model, tokenizer, prefix)
        inputs["decoder_input_ids"] = torch.tensor([spoken] * len(encoded.tokens), device=device)
        media["decoder_input_ids"] = (read_tokens(tokenizer, spoken),) * len(encoded.tokens)
    a = Explainer(model, preset)(target=ask, ledger=ledger, **inputs)  # type: ignore[arg-type]
    return replace(
        a,
        target=ask.chosen,
        media={name: m for name, m in media.items() if name in a.relevances},
        answers=tuple(ask.answers),
        about={"model": type(model).__name__, "task": kind},
    )


def task_of(model: nn.Module, task: str | None = None) -> str:
    """What the model's head does, from the name of its class."""
    if task is not None:
        if task not in _TASKS:
            raise ValueError(f"task {task!r}: expected one of {', '.join(_TASKS)}")
        return task
    inner: Any = getattr(model, "get_base_model", None)  # an adapter around a model
    base = model if inner is None else inner()
    for kind in type(base).__mro__:
        for ending, found in _HEADS.items():
            if kind.__name__.endswith(ending):
                return found
    raise ValueError(
        f"cannot tell from its class what {type(base).__name__} answers. Pass task=, one of {', '.join(_TASKS)}; for other "
        "outputs use dynamiclrp.explain with the tokenizer's tensors."
    )


def accepted(model: nn.Module) -> list[str]:
    """Names of the model's arguments; empty if it takes any."""
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and "input_ids" not in parameters:
        return []
    return list(parameters)


def decoder_start(model: nn.Module, tokenizer: Any, prefix: str = "") -> list[int]:
    """Ids that a seq2seq model's decoder begins with."""
    configs = (getattr(model, "generation_config", None), getattr(model, "config", None))
    names = ("decoder_start_token_id", "bos_token_id")
    found = (getattr(config, name, None) for name in names for config in configs)
    start = next((i for i in found if i is not None), tokenizer.pad_token_id)
    if start is None:
        raise ValueError(
            "this model's configuration has no decoder_start_token_id: set model.config.decoder_start_token_id"
        )
    said = tokenizer(prefix, add_special_tokens=False)["input_ids"] if prefix else []
    return [int(start), *said]


class _Task:
    """Chooses scores in the model's output: called with it, remembers the answers in words."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, encoded: Encoded, target: Any, contrast: Any, token: int | str | None
    ) -> None:
        self.config = getattr(model, "config", None)
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
        scores = [self._row(output[row], row) for row in range(self.rows)]
        return torch.stack(scores)

    def _row(self, output: Tensor, row: int) -> Tensor:
        """The score of one row."""
        logits = self._logits(output, row)
        index = self._index(self.targets[row], len(logits), logits)
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
        return int(logits.argmax()) if wanted is None else token_id(self.tokenizer, wanted, size)

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


class _Labels(_Task):
    """Sequence classification: one logit per label."""

    def _logits(self, output: Tensor, row: int) -> Tensor:
        return output

    def _names(self, size: int) -> dict[int, str]:
        names = getattr(self.config, "id2label", None) or {}
        return {i: str(names.get(i, f"LABEL_{i}")) for i in range(size)}

    def _index(self, wanted: Any, size: int, logits: Tensor) -> int:
        self._known = self._names(size)
        return int(logits.argmax()) if wanted is None else label_index(wanted, self._known)

    def _label(self, index: int) -> str:
        return self._known[index]

    def _probability(self, logits: Tensor, index: int) -> float | None:
        if len(logits) == 1:
            return None
        if getattr(self.config, "problem_type", None) == "multi_label_classification":
            return float(logits[index].detach().float().sigmoid())
        return super()._probability(logits, index)


def label_index(wanted: Any, names: dict[int, str]) -> int:
    """A class by number or name."""
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        if wanted not in names:
            raise TargetError(f"target {wanted} is out of range: the model has {len(names)} classes")
        return wanted
    if isinstance(wanted, str):
        hits = [i for i, name in names.items() if name == wanted]
        hits = hits or [i for i, name in names.items() if name.lower() == wanted.lower()]
        hits = hits or [
            i for i, name in names.items() if wanted.lower() in (part.strip().lower() for part in name.split(","))
        ]
        if len(hits) == 1:
            return hits[0]
        from difflib import get_close_matches

        close = get_close_matches(wanted, list(names.values()), n=3)
        shown = ", ".join(close or list(names.values())[:8])
        found = "no class" if not hits else f"{len(hits)} classes"
        raise TargetError(f"{found} of the model is called {wanted!r}. {'Close' if close else 'Known'}: {shown}")
    raise TargetError(f"target {wanted!r}: expected a class number or a class name")


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
            self.answers[-1] = replace(self.answers[-1], contrast=self._known[self.chosen[-1][1]])
        return score


class _Masked(_Task):
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


class _Next(_Task):
    """Causal language model: the next token."""

    def _logits(self, output: Tensor, row: int) -> Tensor:
        self._open = not self.encoded.tokens[row].pieces[self.encoded.lengths[row] - 1].endswith((" ", "\n"))
        return output[self.encoded.lengths[row] - 1]

    def _index(self, wanted: Any, size: int, logits: Tensor) -> int:
        if wanted is None:
            return int(logits.argmax())
        return token_id(self.tokenizer, wanted, size, after_space=self._open)


class _Spoken(_Task):
    """Seq2seq: the decoder's next token."""

    def _logits(self, output: Tensor, row: int) -> Tensor:
        return output[-1]


class _Span(_Task):
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
        if wanted is None:
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


_TASKS: dict[str, Callable[..., _Task]] = {
    "sequence-classification": _Labels,
    "token-classification": _TokenLabels,
    "masked-lm": _Masked,
    "causal-lm": _Next,
    "seq2seq": _Spoken,
    "question-answering": _Span,
}

"""`explain_generation`: what every generated token stands on.

In: a language model, its tokenizer, a prompt. Out: a `Generation`, the matrix [generated x context] of relevance, from
one forward pass over the whole sequence and one backward pass per generated token.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .attribution import Account, Answer, Attribution, Viewable, frame_of
from .errors import TargetError
from .explain import Explainer
from .heads import accepted, task_of
from .media import Tokens
from .parts import Part
from .presets import Preset
from .text import decoder_start
from .tokens import Encoded, Messages, encode, encode_chat, read_tokens, token_id

RUNNER_UP = "runner-up"
_ALTERNATIVES = 5


@dataclass(frozen=True, eq=False, repr=False)
class Generation(Viewable):
    """What each generated token stands on: `matrix[i, j]` is the relevance of context token j for generated token i.

    The context is the prompt (of a seq2seq model: its input and the decoder's start) followed by what was generated
    before; `start` is the column of the first generated token, so row i is zero from column `start + i` on.
    """

    matrix: Tensor  # [generated, context], float32
    context: Tokens
    said: Tokens  # what was generated
    start: int
    scores: Tensor  # [generated], what was explained: logits, or differences of them
    probabilities: Tensor  # [generated]
    alternatives: tuple[tuple[tuple[str, float], ...], ...]  # the likeliest tokens of each step
    contrasts: tuple[str, ...]  # what each token was set against; empty without contrast
    preset: Preset
    about: dict[str, str] = field(default_factory=dict)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The context's pieces: prompt and generated text."""
        return self.context.pieces

    @property
    def generated(self) -> tuple[str, ...]:
        """The generated pieces."""
        return self.said.pieces

    @property
    def text(self) -> str:
        """What was generated."""
        return "".join(self.generated)

    def __len__(self) -> int:
        return len(self.said.pieces)

    def __getitem__(self, i: int) -> Attribution:
        """Generated token i, as an attribution of its own."""
        if not isinstance(i, int) or not -len(self) <= i < len(self):
            raise IndexError(f"generated token {i!r}: expected a number below {len(self)}")
        i %= len(self)
        stop = self.start + i
        contrast = self.contrasts[i] if self.contrasts else None
        return Attribution(
            relevances={"context": self.matrix[i : i + 1, :stop]},
            layers={},
            prediction=self.scores[i : i + 1, None],
            target=self.generated[i],
            seed=self.scores[i : i + 1, None],
            plan=None,
            preset=self.preset,
            media={"context": (Tokens(self.context.pieces[:stop], self.context.kinds[:stop]),)},
            answers=(Answer(self.said.label(i), float(self.probabilities[i]), contrast),),
            about=self.about,
        )

    @property
    def account(self) -> Account:
        """All scores together, and what of them reached the context."""
        return Account(float(self.scores.double().sum()), float(self.matrix.double().sum()))

    def top(self, i: int, k: int = 10, *, words: bool = False) -> list[Part]:
        """The k context tokens that generated token i stands on most, whatever the sign."""
        return self[i].top(k, words=words)

    def words(self) -> tuple[Tensor, list[str], list[str]]:
        """The matrix with tokens added up to words on both sides, and the words of its rows and columns.

        A generated word's score is the sum of its tokens' scores.
        """
        columns = self.context.words()
        rows = self.said.words()
        summed = torch.stack([self.matrix[:, a:b].sum(1) for a, b in columns], 1)
        summed = torch.stack([summed[a:b].sum(0) for a, b in rows])
        return (
            summed,
            [self.said.label(a, b) for a, b in rows],
            [self.context.label(a, b) for a, b in columns],
        )

    def to_pandas(self) -> Any:
        """A DataFrame with one line per generated token and context token before it."""
        parts = [
            Part("context", i, j, self.context.label(j), float(self.matrix[i, j]))
            for i in range(len(self))
            for j in range(self.start + i)
        ]
        frame = frame_of(parts)
        frame.insert(2, "generated", [self.generated[part.row] for part in parts])
        return frame

    def to_dict(self, *, k: int | None = None) -> dict[str, Any]:
        """Plain values for JSON: the text, and what each of its tokens stands on (the largest k, or all)."""
        return {
            **self.about,
            "preset": self.preset.name,
            "context": list(self.context.pieces),
            "text": self.text,
            "start": self.start,
            "tokens": [
                {
                    "token": piece,
                    "probability": float(self.probabilities[i]),
                    "score": float(self.scores[i]),
                    "contrast": self.contrasts[i] if self.contrasts else None,
                    **(
                        {"relevance": self.matrix[i, : self.start + i].tolist()}
                        if k is None
                        else {
                            "top": [
                                {"index": p.index, "label": p.label, "relevance": p.relevance} for p in self.top(i, k)
                            ]
                        }
                    ),
                }
                for i, piece in enumerate(self.generated)
            ],
        }

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else self.text[:57] + "…"
        return (
            f"Generation({text!r}: {len(self)} tokens x {self.matrix.shape[1]} of context, preset={self.preset.name})"
        )


def explain_generation(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | None = None,
    *,
    messages: Messages | None = None,
    continuation: str | Sequence[int] | None = None,
    max_new_tokens: int = 40,
    contrast: Any = None,
    preset: str | Preset = "default",
    batch_size: int = 8,
    progress: bool = True,
    **generate: Any,
) -> Generation:
    """Generate (or read) a text and explain each of its tokens by everything before it.

    `messages` is a chat instead of a prompt. `continuation` is a text (or its ids) to explain instead of sampling.
    `contrast`: a word, or "runner-up" for the likeliest other token of each step. Decoding is greedy unless
    `do_sample=True` or other options of `model.generate` are given. `batch_size` is how many tokens go backwards together.

        g = dlrp.explain_generation(model, tokenizer, "The capital of France is", max_new_tokens=12)
        g.html("france.html")
    """
    task = task_of(model)
    if task not in ("causal-lm", "seq2seq"):
        raise ValueError(
            f"{type(model).__name__} does {task}: expected a causal or seq2seq language model; use explain_text"
        )
    if (prompt is None) == (messages is None):
        raise TypeError("explain_generation: give either a prompt or messages")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r}: expected a positive number")
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r}: expected a positive number")
    device, accepts = next(model.parameters()).device, accepted(model)
    causal = task == "causal-lm"
    if messages is not None:
        encoded = encode_chat(tokenizer, messages, device=device, accepts=accepts)
    else:
        assert prompt is not None
        encoded = encode(tokenizer, [prompt], device=device, accepts=accepts, causal=causal)
    before = encoded.inputs["input_ids"][0].tolist() if causal else decoder_start(model, tokenizer)
    if continuation is None:
        after = _generate(model, tokenizer, encoded, len(before), max_new_tokens, generate)
    else:
        if generate:
            raise TypeError(f"{', '.join(generate)}: options of sampling, but a continuation was given")
        before, after = _continue(tokenizer, prompt, before, continuation, causal)
    if not after:
        raise ValueError("the model generated nothing: it ended at once. Pass continuation=, or another prompt.")
    return _explain(model, tokenizer, encoded, before, after, causal, contrast, preset, batch_size, progress)


def _generate(
    model: nn.Module, tokenizer: Any, encoded: Encoded, begin: int, max_new_tokens: int, options: dict[str, Any]
) -> list[int]:
    if "pad_token_id" not in options and getattr(model.generation_config, "pad_token_id", None) is None:
        options = {**options, "pad_token_id": tokenizer.pad_token_id or tokenizer.eos_token_id or 0}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = model.generate(  # type: ignore[operator]
            **encoded.inputs, **{"do_sample": False, "num_beams": 1, "max_new_tokens": max_new_tokens, **options}
        )
    return ids[0].tolist()[begin:]


def _continue(
    tokenizer: Any, prompt: str | None, before: list[int], continuation: str | Sequence[int], causal: bool
) -> tuple[list[int], list[int]]:
    """Ids of the prompt and of the text that is to be explained after it."""
    if not isinstance(continuation, str):
        ids = [int(i) for i in continuation]
        return before, ids
    if not continuation:
        raise ValueError("continuation: an empty text, there is nothing to explain")
    if not causal:
        return before, list(tokenizer(text_target=continuation)["input_ids"])
    if prompt is not None and (continuation[0].isspace() or not continuation[0].isalnum()):
        # tokenizers that mark a text's beginning would give a text of its own another first token
        whole = tokenizer(prompt + continuation)["input_ids"]
        end = tokenizer("")["input_ids"]
        if end and whole[-1:] == end[-1:] and before[-1:] == end[-1:]:  # closed by an end token
            whole, before = whole[:-1], before[:-1]
        if whole[: len(before)] == before:
            return before, whole[len(before) :]
    return before, list(tokenizer(continuation, add_special_tokens=False)["input_ids"])


def _explain(
    model: nn.Module,
    tokenizer: Any,
    encoded: Encoded,
    before: list[int],
    after: list[int],
    causal: bool,
    contrast: Any,
    preset: str | Preset,
    batch_size: int,
    progress: bool,
) -> Generation:
    device = next(model.parameters()).device
    read = torch.tensor([[*before, *after[:-1]]], device=device)  # the last token is explained, never read
    if causal:
        inputs = {"input_ids": read}
        if "attention_mask" in encoded.inputs:
            inputs["attention_mask"] = torch.ones_like(read)
        columns = ["input_ids"]
    else:
        inputs = {**encoded.inputs, "decoder_input_ids": read}
        columns = ["input_ids", "decoder_input_ids"]
    scored = _Scored(model, tokenizer, len(before) - 1, after, contrast)
    explainer, rows = Explainer(scored, preset), []
    with _bar(progress, len(after), "explaining tokens") as step:
        each = explainer.each(targets=range(len(after)), at_once=batch_size, **inputs)  # type: ignore[arg-type]
        for a in each:
            rows.append(torch.cat([a.relevances[name][0] for name in columns if name in a.relevances]).float().cpu())
            step()
    matrix = torch.stack(rows)
    spoken = read_tokens(tokenizer, [*before, *after], causal=causal)
    context = spoken if causal else Tokens(
        encoded.tokens[0].pieces + spoken.pieces, encoded.tokens[0].kinds + spoken.kinds
    )  # fmt: skip
    start = matrix.shape[1] - len(after) + 1
    cut = matrix.shape[1]
    return Generation(
        matrix=matrix,
        context=Tokens(context.pieces[:cut], context.kinds[:cut]),
        said=Tokens(context.pieces[start:], context.kinds[start:]),
        start=start,
        scores=scored.scores,
        probabilities=scored.probabilities,
        alternatives=scored.alternatives,
        contrasts=scored.contrasts,
        preset=explainer.preset,
        about={"model": type(model).__name__, "task": "causal-lm" if causal else "seq2seq"},
    )


class _Scored(nn.Module):
    """The model with the scores of the generated tokens as its output, [1, generated]; everything else it said is let go.

    Its modules keep their names, so presets that name them mean the same.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, offset: int, ids: list[int], contrast: Any) -> None:
        super().__init__()
        self.model, self.tokenizer, self.offset, self.ids, self.contrast = model, tokenizer, offset, ids, contrast
        self.scores = self.probabilities = torch.zeros(0)
        self.alternatives: tuple[tuple[tuple[str, float], ...], ...] = ()
        self.contrasts: tuple[str, ...] = ()

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.named_modules(*args, **kwargs)

    def forward(self, **inputs: Tensor) -> Tensor:
        steps = len(self.ids)
        if "logits_to_keep" in accepted(self.model):
            logits = self.model(**inputs, logits_to_keep=steps).logits[0]
        else:
            logits = self.model(**inputs).logits[0, self.offset : self.offset + steps]
        chosen = torch.tensor(self.ids, device=logits.device)[:, None]
        scores = logits.gather(1, chosen)
        chances = logits.detach().float().softmax(-1)
        likely = chances.topk(min(_ALTERNATIVES, chances.shape[1]))
        if self.contrast is not None:
            others = self._others(logits.detach(), chosen)
            scores = scores - logits.gather(1, others)
            self.contrasts = tuple(self._read(i) for i in others[:, 0].tolist())
        self.scores = scores.detach()[:, 0].float().cpu()
        self.probabilities = chances.gather(1, chosen)[:, 0].cpu()
        self.alternatives = tuple(
            tuple((self._read(i), p) for i, p in zip(*step))
            for step in zip(likely.indices.tolist(), likely.values.tolist())
        )
        return scores.T

    def _others(self, logits: Tensor, chosen: Tensor) -> Tensor:
        if self.contrast == RUNNER_UP:
            return logits.scatter(1, chosen, -torch.inf).argmax(1, keepdim=True)
        other = token_id(self.tokenizer, self.contrast, logits.shape[1], after_space=True)
        if other in self.ids:
            raise TargetError(
                f"contrast {self.contrast!r} is itself among the generated tokens: choose another word or {RUNNER_UP!r}"
            )
        return torch.full_like(chosen, other)

    def _read(self, token: int) -> str:
        return read_tokens(self.tokenizer, [token]).pieces[0]


@contextmanager
def _bar(wanted: bool, total: int, label: str) -> Iterator[Callable[[], None]]:
    """A progress bar, if it is wanted and something is there to draw it."""
    try:
        from rich.progress import track  # noqa: F401
    except ModuleNotFoundError:
        wanted = False
    if not wanted:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        job = bar.add_task(label, total=total)
        yield lambda: bar.advance(job)

"""`explain_text`: which words a text model's answer stands on, for every usual head.

In: a `transformers` model, its tokenizer and a text. Out: an `Attribution` whose tokens read like the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import nn

from .attribution import Attribution
from .comparison import Comparison, explain_each
from .heads import accepted, task_of
from .media import Tokens
from .presets import Preset
from .tasks import ASK
from .tokens import Messages, Text, encode, encode_chat, read_tokens


@overload
def explain_text(
    model: nn.Module,
    tokenizer: Any,
    text: Text | Sequence[Text] | None = ...,
    *,
    messages: Messages | None = ...,
    target: Any = ...,
    contrast: Any = ...,
    token: int | str | None = ...,
    task: str | None = ...,
    prefix: str = ...,
    preset: str | Preset = ...,
    ledger: bool = ...,
    max_length: int | None = ...,
) -> Attribution: ...


@overload
def explain_text(
    model: nn.Module,
    tokenizer: Any,
    text: Text | Sequence[Text] | None = ...,
    *,
    messages: Messages | None = ...,
    target: Any = ...,
    contrast: Any = ...,
    targets: int | Sequence[Any] | None = ...,
    token: int | str | None = ...,
    task: str | None = ...,
    prefix: str = ...,
    preset: str | Preset = ...,
    presets: Sequence[str | Preset] | None = ...,
    ledger: bool = ...,
    max_length: int | None = ...,
) -> Attribution | Comparison: ...


def explain_text(
    model: nn.Module,
    tokenizer: Any,
    text: Text | Sequence[Text] | None = None,
    *,
    messages: Messages | None = None,
    target: Any = None,
    contrast: Any = None,
    targets: int | Sequence[Any] | None = None,
    token: int | str | None = None,
    task: str | None = None,
    prefix: str = "",
    preset: str | Preset = "default",
    presets: Sequence[str | Preset] | None = None,
    ledger: bool = False,
    max_length: int | None = None,
) -> Attribution | Comparison:
    """Explain a text model's answer by the words it read.

    `text`: a string, a list of them (a padded batch), a pair (question, context) or a list of pairs; a chat goes into
    `messages`. `target`: None for the model's own answer, a label, a word, an id; for questions an answer's text or its
    first and last token. `contrast`: the same, for "why the one rather than the other". Both may be lists, one per text.
    `token` chooses the token that a token classifier or a masked language model speaks about, by number or by its text;
    `prefix` is what a seq2seq model's decoder has said already. `task` is found from the model's class. `targets` (a list,
    or how many of the likeliest) and `presets` give several explanations side by side.

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
    media: dict[str, tuple[Tokens, ...]] = {"input_ids": encoded.tokens}
    inputs = dict(encoded.inputs)
    if kind == "seq2seq":
        spoken = decoder_start(model, tokenizer, prefix)
        inputs["decoder_input_ids"] = torch.tensor([spoken] * len(encoded.tokens), device=device)
        media["decoder_input_ids"] = (read_tokens(tokenizer, spoken),) * len(encoded.tokens)
    return explain_each(
        model,
        inputs,
        lambda one: ASK[kind](model, tokenizer, encoded, one, contrast, token),
        target=target,
        targets=targets,
        preset=preset,
        presets=presets,
        ledger=ledger,
        media=media,
        about={"model": type(model).__name__, "task": kind},
    )


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

"""`explain_multimodal`: one answer, all that it stands on: the picture, the words, the sound, on one page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .attribution import Answer, Attribution
from .errors import TargetError
from .explain import Explainer
from .geometry import seen_part
from .heads import accepted
from .image import as_process, keep_picture, open_picture
from .media import Medium, Tokens
from .outputs import unwrap
from .presets import Preset
from .tokens import Messages, read_tokens, token_id


def explain_multimodal(
    model: nn.Module,
    processor: Any,
    *,
    text: str | list[str] | None = None,
    image: Any = None,
    messages: Messages | None = None,
    target: Any = None,
    contrast: Any = None,
    preset: str | Preset = "default",
    ledger: bool = False,
    **inputs: Any,
) -> Attribution:
    """Explain a model of several modalities (CLIP, LLaVA, …) by everything it was given.

    `processor` is the model's own, from `transformers`. Of a model that speaks, the next token is explained; of one that
    compares a picture with texts, how well the picture fits a text: `target` is the number or the words of the text, and
    `contrast` another one. Further tensors go to the model as they are; `output` is that of `explain`.

        a = dlrp.explain_multimodal(model, processor, image="dog.jpg", text=["a dog", "a cat"], target="a dog")
    """
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is None:
        raise TypeError(f"processor: {type(processor).__name__} has no tokenizer; expected the model's own processor")
    picture = None if image is None else open_picture(image)
    made = _process(processor, text, picture, messages)
    names = accepted(model)
    device = next(model.parameters()).device
    tensors = {k: v.to(device) for k, v in made.items() if isinstance(v, Tensor) and (not names or k in names)}
    media: dict[str, tuple[Medium, ...]] = {}
    if "input_ids" in tensors:
        mask = tensors.get("attention_mask", torch.ones_like(tensors["input_ids"]))
        media["input_ids"] = tuple(
            _read(tokenizer, ids, kept) for ids, kept in zip(tensors["input_ids"].tolist(), mask.tolist())
        )
    if "pixel_values" in tensors and picture is not None and tensors["pixel_values"].dim() == 4:
        process = as_process(processor)
        seen = seen_part(lambda p: process(p).reshape(-1, *process(p).shape[-2:])[:3], picture.width, picture.height)
        if seen is not None:
            media["pixel_values"] = (keep_picture(picture, seen),) * len(tensors["pixel_values"])
    ask = _Ask(tokenizer, text, tensors, target, contrast)
    a = Explainer(model, preset)(target=ask, ledger=ledger, **tensors, **{"output": unwrap, **inputs})  # type: ignore[arg-type]
    return replace(
        a,
        target=ask.chosen,
        media={name: m for name, m in media.items() if name in a.relevances and len(m) == len(a.relevances[name])},
        answers=(ask.answer,),
        about={"model": type(model).__name__, "task": "multimodal"},
    )


def _process(processor: Any, text: Any, picture: Any, messages: Messages | None) -> Mapping[str, Any]:
    if messages is not None:
        if text is not None:
            raise TypeError("explain_multimodal: give text or messages, not both")
        text = processor.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    given = {k: v for k, v in (("text", text), ("images", picture)) if v is not None}
    if not given:
        raise TypeError("explain_multimodal: nothing to explain; give text, messages or image")
    return processor(**given, return_tensors="pt", **({"padding": True} if isinstance(text, list) else {}))


def _read(tokenizer: Any, ids: list[int], mask: list[int]) -> Tokens:
    """Tokens of one row; what the mask leaves out is padding."""
    read = read_tokens(tokenizer, ids)
    return Tokens(read.pieces, tuple(kind if kept else "padding" for kind, kept in zip(read.kinds, mask)))


class _Ask:
    """The score of a text for the picture, or of the next token."""

    def __init__(self, tokenizer: Any, text: Any, tensors: dict[str, Tensor], target: Any, contrast: Any) -> None:
        self.tokenizer, self.target, self.contrast = tokenizer, target, contrast
        self.texts = [text] if isinstance(text, str) else text
        self.tensors = tensors
        self.chosen: Any = None
        self.answer = Answer("")

    def __call__(self, output: Tensor) -> Tensor:
        if output.dim() == 3:
            return self._next(output)
        if output.dim() != 2 or len(output) != 1:
            raise TargetError(
                f"the model's output has shape {tuple(output.shape)}: expected scores of texts for one picture, or of tokens. "
                "For other outputs use dynamiclrp.explain."
            )
        return self._fit(output[0])

    def _next(self, output: Tensor) -> Tensor:
        logits = output[0, -1]
        index = (
            int(logits.argmax())
            if self.target is None
            else token_id(self.tokenizer, self.target, len(logits), after_space=True)
        )
        score, against, self.chosen = logits[index], None, index
        if self.contrast is not None:
            other = token_id(self.tokenizer, self.contrast, len(logits), after_space=True)
            score, against, self.chosen = score - logits[other], self._word(other), (index, other)
        self.answer = Answer(self._word(index), float(logits.detach().float().softmax(-1)[index]), against)
        return score.reshape(1)

    def _word(self, index: int) -> str:
        return read_tokens(self.tokenizer, [index]).label(0)

    def _fit(self, scores: Tensor) -> Tensor:
        index = int(scores.argmax()) if self.target is None else self._text(self.target, len(scores))
        score, against, self.chosen = scores[index], None, index
        if self.contrast is not None:
            other = self._text(self.contrast, len(scores))
            score, against, self.chosen = score - scores[other], self._name(other), (index, other)
        chance = float(scores.detach().float().softmax(-1)[index]) if len(scores) > 1 else None
        self.answer = Answer(self._name(index), chance, against)
        return score.reshape(1)

    def _name(self, index: int) -> str:
        return self.texts[index] if self.texts and index < len(self.texts) else str(index)

    def _text(self, wanted: Any, size: int) -> int:
        if isinstance(wanted, str) and self.texts and wanted in self.texts:
            return self.texts.index(wanted)
        if isinstance(wanted, int) and 0 <= wanted < size:
            return wanted
        raise TargetError(f"target {wanted!r}: expected one of the texts, or its number below {size}")

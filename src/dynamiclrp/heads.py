"""What a model answers and takes, from what it says of itself: its task, its arguments, the names of its classes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn

from .attribution import Answer
from .errors import TargetError

TASKS = ("sequence-classification", "token-classification", "masked-lm", "causal-lm", "seq2seq", "question-answering")

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


def task_of(model: nn.Module, task: str | None = None) -> str:
    """What the model's head does, from the name of its class."""
    if task is not None:
        if task not in TASKS:
            raise ValueError(f"task {task!r}: expected one of {', '.join(TASKS)}")
        return task
    inner: Any = getattr(model, "get_base_model", None)  # an adapter around a model
    base = model if inner is None else inner()
    for kind in type(base).__mro__:
        for ending, found in _HEADS.items():
            if kind.__name__.endswith(ending):
                return found
    raise ValueError(
        f"cannot tell from its class what {type(base).__name__} answers. Pass task=, one of {', '.join(TASKS)}; for other "
        "outputs use dynamiclrp.explain with the tokenizer's tensors."
    )


def accepted(model: nn.Module) -> list[str]:
    """Names of the model's arguments; empty if it takes any."""
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and "input_ids" not in parameters:
        return []
    return list(parameters)


def class_names(model: nn.Module, classes: Sequence[str] | Mapping[int, str] | None = None) -> dict[int, str]:
    """Names of the classes: given, or the model's own; empty if it has none."""
    if classes is not None:
        if isinstance(classes, str):
            raise TypeError("classes: expected a list of names, got one string")
        return {int(i): str(n) for i, n in (classes.items() if isinstance(classes, Mapping) else enumerate(classes))}
    known = getattr(getattr(model, "config", None), "id2label", None)
    if known:
        return {int(i): str(name) for i, name in known.items()}
    listed = (getattr(model, "pretrained_cfg", None) or {}).get("label_names")
    return dict(enumerate(listed)) if listed else {}


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
        close = get_close_matches(wanted, list(names.values()), n=3)
        shown = ", ".join(close or list(names.values())[:8])
        found = "no class" if not hits else f"{len(hits)} classes"
        raise TargetError(f"{found} of the model is called {wanted!r}. {'Close' if close else 'Known'}: {shown}")
    raise TargetError(f"target {wanted!r}: expected a class number or a class name")


@dataclass(frozen=True)
class Rank:
    """A target by its place among the likeliest, from 0."""

    place: int

    def of(self, logits: Tensor) -> int:
        if self.place >= len(logits):
            raise TargetError(f"targets: the model has {len(logits)} answers, there is no place {self.place + 1}")
        return int(logits.topk(self.place + 1).indices[-1])


def several(targets: int | Sequence[Any]) -> list[Any]:
    """The targets of `targets=`: a list of them, or so many of the likeliest."""
    if isinstance(targets, bool) or (isinstance(targets, int) and targets < 1):
        raise TargetError(f"targets={targets!r}: expected a list of targets, or how many of the likeliest")
    if isinstance(targets, str):
        raise TargetError(f"targets={targets!r}: expected a list; for one target use target=")
    found = [Rank(i) for i in range(targets)] if isinstance(targets, int) else list(targets)
    if not found:
        raise TargetError("targets: an empty list, there is nothing to explain")
    return found


class ClassChoice:
    """The score of a class in [1, classes] logits, or its lead over another; remembers the answer in words."""

    def __init__(self, target: int | str | Rank | None, contrast: int | str | None, names: dict[int, str]) -> None:
        self.target, self.contrast, self.names = target, contrast, names
        self.chosen: Any = None
        self.answer = Answer("")

    @property
    def answers(self) -> tuple[Answer, ...]:
        return (self.answer,)

    def __call__(self, output: Tensor) -> Tensor:
        if output.dim() != 2 or len(output) != 1:
            raise TargetError(
                f"the model's output has shape {tuple(output.shape)}: expected one row of class scores, [1, classes]. "
                "For other outputs use dynamiclrp.explain with a callable target."
            )
        logits = output[0]
        names = {i: self.names.get(i, str(i)) for i in range(len(logits))}
        rank = Rank(0) if self.target is None else self.target
        index = rank.of(logits) if isinstance(rank, Rank) else label_index(rank, names)
        score, against = logits[index], None
        self.chosen = index
        if self.contrast is not None:
            other = label_index(self.contrast, names)
            if other == index:
                raise TargetError(f"contrast {self.contrast!r} is the target itself: there is no difference to explain")
            score, against, self.chosen = score - logits[other], names[other], (index, other)
        chances = logits.detach().float().softmax(-1)
        self.answer = Answer(names[index], float(chances[index]) if len(logits) > 1 else None, against)
        return score.reshape(1)

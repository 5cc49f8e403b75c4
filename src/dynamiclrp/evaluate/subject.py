"""A model as evaluation sees it: inputs and perturbations of them in, one score per row out.

Inputs are one tensor (called as `model(x)`) or a mapping (called as `model(**inputs)`). Exactly one tensor in them is the
*explained* one: token ids, or the first float tensor. It must not know methods or metrics.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import EvaluationError, TrainingModeWarning
from ..outputs import unwrap

Measure = str | Callable[[Any, Tensor], Tensor]
MEASURES = ("probability", "logit", "accuracy")
PLAIN = ""  # the name of the only tensor of a model that is called with one tensor
_NOISY = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
_IDS = ("input_ids", "decoder_input_ids")


@dataclass(frozen=True, eq=False)
class Inputs:
    """A batch: named values, and which of them is explained.

    Tensors whose first dimension has as many entries as there are rows belong to the rows; all else goes to every call.
    """

    values: Mapping[str, Any]
    name: str

    @property
    def explained(self) -> Tensor:
        return self.values[self.name]

    @property
    def is_tokens(self) -> bool:
        return not self.explained.is_floating_point()

    def __len__(self) -> int:
        return len(self.explained)

    def pick(self, rows: Tensor | slice) -> Inputs:
        """Some of the rows; values without a row per input stay as they are."""
        n = len(self)
        return replace(self, values={k: v[rows] if _is_batched(v, n) else v for k, v in self.values.items()})

    def put(self, value: Tensor) -> Inputs:
        """The same with another explained tensor."""
        return replace(self, values={**self.values, self.name: value})

    def to(self, device: torch.device) -> Inputs:
        return replace(self, values={k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.values.items()})

    def batched(self) -> dict[str, Tensor]:
        return {k: v for k, v in self.values.items() if _is_batched(v, len(self))}


def _is_batched(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows


def read_inputs(raw: Any, name: str | None = None) -> Inputs:
    """A tensor or a mapping of tensors as `Inputs`."""
    if isinstance(raw, Inputs):
        return raw
    if isinstance(raw, Tensor):
        if raw.dim() < 2:
            raise EvaluationError(f"inputs of shape {tuple(raw.shape)}: expected a batch, rows first")
        return Inputs({PLAIN: raw}, PLAIN)
    if not isinstance(raw, Mapping):
        raise EvaluationError(
            f"inputs of type {type(raw).__name__}: expected a tensor or a mapping of tensors such as a tokenizer returns "
            "with return_tensors='pt'"
        )
    values = dict(raw)
    if name is None:
        floats = [k for k, v in values.items() if isinstance(v, Tensor) and v.is_floating_point()]
        ids = [k for k in _IDS if isinstance(values.get(k), Tensor)]
        found = [*ids, *floats]
        if not found:
            raise EvaluationError(
                f"no float tensor and no input_ids among the inputs {sorted(values)}: pass input='NAME'"
            )
        name = found[0]
    elif not isinstance(values.get(name), Tensor):
        raise EvaluationError(f"input={name!r} is not a tensor among the inputs {sorted(values)}")
    if values[name].dim() < 2:
        raise EvaluationError(f"{name!r} has shape {tuple(values[name].shape)}: expected a batch, rows first")
    return Inputs(values, name)


def read_targets(targets: Any, rows: int) -> Tensor:
    """One class per row, or a pair (start and end of a span; position and token)."""
    found = torch.as_tensor(targets)
    pairs = found.dim() == 2 and found.shape[1] == 2
    if found.is_floating_point() or found.dtype == torch.bool or (found.dim() > 1 and not pairs):
        raise EvaluationError(
            f"targets {found.dtype} of shape {tuple(found.shape)}: expected integers, one or a pair per row"
        )
    if found.dim() == 0:
        found = found.expand(rows)
    if len(found) != rows:
        raise EvaluationError(f"{len(found)} targets for {rows} inputs: expected one per row")
    return found.long()


class Subject:
    """A model with the way it is asked.

    `hidden` names entries of the inputs that are for evaluation alone and are not handed to the model.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        measure: Measure = "probability",
        embedding: str | None = None,
        hidden: tuple[str, ...] = (),
    ) -> None:
        if not callable(model):
            raise EvaluationError(f"model: expected a torch.nn.Module or a function, got {type(model).__name__}")
        if not callable(measure) and measure not in MEASURES:
            raise EvaluationError(f"measure={measure!r}: expected one of {', '.join(MEASURES)} or a function")
        self.model, self.measure, self.hidden = model, measure, frozenset(hidden)
        self._embedding = embedding
        self._accepts = _parameters(model)
        self._spans: bool | None = None  # learnt from the first output

    @property
    def device(self) -> torch.device | None:
        """Where the model lives; None if it does not say."""
        if isinstance(self.model, nn.Module):
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                return tensor.device
        return None

    def read(self, raw: Any, name: str | None = None) -> Inputs:
        inputs = read_inputs(raw, name)
        return inputs if self.device is None else inputs.to(self.device)

    # ------------------------------------------------------------------------------------------------------------ running

    def arguments(self, inputs: Inputs, targets: Tensor | None) -> dict[str, Any]:
        """What the model is called with: nothing computed that nobody looks at."""
        values = {k: v for k, v in inputs.values.items() if k not in self.hidden}
        if inputs.name == PLAIN:
            return values
        if "use_cache" in self._accepts:
            values.setdefault("use_cache", False)
        kept = self._kept(inputs, targets)
        if kept is not None:
            values["logits_to_keep"] = kept
        return values

    def _kept(self, inputs: Inputs, targets: Tensor | None) -> int | Tensor | None:
        """The positions whose logits are asked for, where a model lets us choose: all of them would dwarf the model."""
        if "logits_to_keep" not in self._accepts or "logits_to_keep" in inputs.values or callable(self.measure):
            return None  # a user's measure gets the whole output
        positions = self._positions(inputs, targets)
        if positions is None or bool((positions == inputs.explained.shape[1] - 1).all()):
            return 1
        return positions.unique()

    def call(self, inputs: Inputs, targets: Tensor | None = None) -> Any:
        values = self.arguments(inputs, targets)
        return self.model(values[PLAIN]) if inputs.name == PLAIN else self.model(**values)

    def _positions(self, inputs: Inputs, targets: Tensor | None) -> Tensor | None:
        """Where each row's scores are in an output token by token: where its target says, or at its last attended token;
        None where nothing says so, for the last of all."""
        device = inputs.explained.device
        if targets is not None and targets.dim() == 2:
            return targets[:, 0].to(device)
        name = "decoder_attention_mask" if "decoder_input_ids" in inputs.values else "attention_mask"
        mask = inputs.values.get(name)
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            return None
        return (torch.arange(mask.shape[1], device=mask.device) * (mask != 0)).amax(1)

    def heads(self, raw: Any, inputs: Inputs, targets: Tensor | None) -> list[Tensor]:
        """The score vectors [rows, choices] that a target chooses from: one, or two for spans (start, end)."""
        start, end = getattr(raw, "start_logits", None), getattr(raw, "end_logits", None)
        self._spans = isinstance(start, Tensor) and isinstance(end, Tensor)
        if isinstance(start, Tensor) and isinstance(end, Tensor):
            return [start, end]
        return self.heads_of(unwrap(raw), inputs, targets)

    def heads_of(self, output: Tensor, inputs: Inputs, targets: Tensor | None, span: bool = False) -> list[Tensor]:
        """The same of a plain tensor; `span` says that it is start and end logits stacked."""
        rows = len(inputs)
        if output.dim() == 0 or len(output) != rows:
            raise EvaluationError(
                f"the model's output has shape {tuple(output.shape)} for {rows} inputs: expected one row per input"
            )
        if span:
            return [output[..., 0], output[..., 1]]
        if output.dim() < 3 and targets is not None and targets.dim() == 2:
            raise EvaluationError(
                f"targets of shape {tuple(targets.shape)} for an output of shape {tuple(output.shape)}: expected one number per row"
            )
        if output.dim() == 1:
            return [output[:, None]]
        if output.dim() == 2:
            return [output]
        if output.dim() > 3:
            raise EvaluationError(
                f"the model's output has shape {tuple(output.shape)}: expected [rows, classes] or [rows, positions, tokens]; "
                "pass measure=function(output, targets) and wrap the model to return the scores to explain"
            )
        positions, kept = self._positions(inputs, targets), self._kept(inputs, targets)
        if positions is None or output.shape[1] == 1:
            return [output[:, -1]]
        if isinstance(kept, Tensor):
            positions = torch.searchsorted(kept, positions.contiguous())
        elif isinstance(inputs.values.get("logits_to_keep"), int):  # the user's own choice: the last so many
            positions = positions - (inputs.explained.shape[1] - output.shape[1])
        if bool((positions < 0).any() | (positions >= output.shape[1]).any()):
            raise EvaluationError(f"positions {positions.tolist()[:8]}: the output has {output.shape[1]} of them")
        return [output[torch.arange(rows, device=output.device), positions.to(output.device)]]

    @torch.no_grad()
    def answers_spans(self, inputs: Inputs) -> bool:
        """Does the model give start and end logits? Asks it once."""
        if self._spans is None:
            self.heads(self.call(inputs.pick(slice(0, 1))), inputs.pick(slice(0, 1)), None)
        return bool(self._spans)

    def columns(self, heads: list[Tensor], targets: Tensor) -> list[Tensor]:
        """The chosen column of each head."""
        given = targets[:, None] if targets.dim() == 1 else targets if len(heads) > 1 else targets[:, -1:]
        if given.shape[1] != len(heads):
            raise EvaluationError(f"targets of shape {tuple(targets.shape)}: expected {len(heads)} numbers per row")
        for head, column in zip(heads, given.T):
            if bool((column < 0).any() | (column >= head.shape[1]).any()):
                raise EvaluationError(f"targets {column.tolist()[:8]}: the output has {head.shape[1]} choices per row")
        return [column.to(head.device)[:, None] for head, column in zip(heads, given.T)]

    def score(self, raw: Any, inputs: Inputs, targets: Tensor) -> Tensor:
        """The measured score, one number per row."""
        if callable(self.measure):
            found = self.measure(raw, targets)
            if not isinstance(found, Tensor) or found.shape != (len(inputs),):
                shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise EvaluationError(f"the measure returned {shape}: expected a tensor of shape ({len(inputs)},)")
            return found.detach().cpu().double()
        heads = self.heads(raw, inputs, targets)
        return choose(heads, self.columns(heads, targets), self.measure)

    def logits(self, output: Tensor, inputs: Inputs, targets: Tensor, span: bool) -> Tensor:
        """The explained score, differentiable, one number per row."""
        heads = self.heads_of(output, inputs, targets, span)
        picked = [head.gather(1, column) for head, column in zip(heads, self.columns(heads, targets))]
        return torch.cat(picked, 1).sum(1)

    @torch.no_grad()
    def predict(self, inputs: Inputs) -> Tensor:
        """What the model answers: [rows], or [rows, 2] for spans."""
        answers = [head.argmax(1) for head in self.heads(self.call(inputs), inputs, None)]
        return answers[0] if len(answers) == 1 else torch.stack(answers, 1)

    # --------------------------------------------------------------------------------------------------------- embeddings

    def embedding(self) -> nn.Module:
        """The module that looks token ids up."""
        if not isinstance(self.model, nn.Module):
            raise EvaluationError("token embeddings need a torch.nn.Module: use a token fill (pad, mask) for functions")
        if self._embedding is not None:
            modules = dict(self.model.named_modules())
            if self._embedding not in modules:
                raise EvaluationError(
                    f"embedding={self._embedding!r}: no such module. Known: {', '.join(list(modules)[1:9])}, …"
                )
            return modules[self._embedding]
        getter = getattr(self.model, "get_input_embeddings", None)
        found = getter() if callable(getter) else None
        if isinstance(found, nn.Module):
            return found
        tables = [m for m in self.model.modules() if isinstance(m, nn.Embedding)]
        if len(tables) != 1:
            raise EvaluationError(
                f"the model has {len(tables)} embedding tables: say which looks the tokens up, embedding='NAME'"
            )
        return tables[0]

    @contextmanager
    def embedded(self, ids: Tensor, change: Callable[[Tensor], Tensor]) -> Iterator[list[int]]:
        """Within: the embeddings of `ids` go through `change`. Ids, positions and masks stay as they are, unlike with
        `inputs_embeds`, from which models cannot tell padding or positions. Yields a list that grows with each use."""
        used: list[int] = []

        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            given = args[0] if args else None
            if not isinstance(given, Tensor) or given.shape != ids.shape or not torch.equal(given, ids):
                return output
            used.append(1)
            return change(output)

        table = self.embedding()
        assert isinstance(self.model, nn.Module)
        # encoder and decoder may each have a module over one shared table
        weight = getattr(table, "weight", None)
        tables = [
            m
            for m in self.model.modules()
            if m is table or (weight is not None and getattr(m, "weight", None) is weight)
        ]
        handles = []
        try:
            for module in tables:
                handles.append(module.register_forward_hook(hook))
            yield used
        finally:
            for handle in handles:
                handle.remove()

    def call_embedded(self, inputs: Inputs, targets: Tensor | None, change: Callable[[Tensor], Tensor]) -> Any:
        """Run with changed embeddings, and make sure that they were."""
        with self.embedded(inputs.explained, change) as used:
            raw = self.call(inputs, targets)
        if not used:
            raise EvaluationError(
                f"the embedding {type(self.embedding()).__name__} was never called with {inputs.name!r}: "
                "say which module looks them up, embedding='NAME'"
            )
        return raw


def choose(heads: list[Tensor], columns: list[Tensor], measure: str) -> Tensor:
    """Logits add over heads, probabilities multiply, an answer is right if all of it is."""
    total: Tensor | None = None
    for head, column in zip(heads, columns):
        head = head.float() if head.device.type == "mps" else head.double()  # it has no float64
        if measure == "accuracy":
            value = (head.argmax(1, keepdim=True) == column).double()
        else:
            value = (head.softmax(1) if measure == "probability" else head).gather(1, column)
        total = value if total is None else total + value if measure == "logit" else total * value
    assert total is not None
    return total[:, 0]


def warn_training(model: Callable[..., Any]) -> None:
    """Dropout would answer otherwise at every point of a curve."""
    if isinstance(model, nn.Module) and any(m.training and isinstance(m, _NOISY) for m in model.modules()):
        warnings.warn(
            "the model is in training mode: dropout and batch norm make every score of a curve different. "
            "Call model.eval() first.",
            TrainingModeWarning,
            stacklevel=3,
        )


def _parameters(model: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(getattr(model, "forward", model)).parameters)
    except (TypeError, ValueError):
        return frozenset()

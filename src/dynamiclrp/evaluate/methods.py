"""Ways to explain, named alike everywhere: our presets, Captum's methods, Zennit's composites, random, functions.

In: a name or an object. Out: a `Method`, which turns a batch of inputs with targets into relevance per row. For token ids
that is one number per token; baselines see the embeddings and are summed over their width.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import EvaluationError
from ..explain import Explainer
from ..outputs import unwrap
from ..presets import PRESETS, Preset
from ..presets import preset as find_preset
from .subject import PLAIN, Inputs, Subject, read_targets


class Method:
    """A named way to explain. `describe` says in words what decides its result, so that stored results can be trusted."""

    name: str

    def relevance(self, subject: Subject, inputs: Inputs, targets: Tensor, indices: Sequence[int]) -> Tensor:
        """Relevance of the explained tensor, rows first. `indices` are the rows' places in the data."""
        raise NotImplementedError

    def describe(self) -> str:
        return self.name


class Ours(Method):
    """One of dynamiclrp's presets; a batch is one forward and one backward pass."""

    def __init__(self, preset: str | Preset, name: str | None = None) -> None:
        self.preset = find_preset(preset)
        self.name = name or self.preset.name
        self._explainer: Explainer | None = None

    def relevance(self, subject: Subject, inputs: Inputs, targets: Tensor, indices: Sequence[int]) -> Tensor:
        if not isinstance(subject.model, nn.Module):
            raise EvaluationError(
                f"method {self.name!r} explains a torch.nn.Module, not {type(subject.model).__name__}"
            )
        if self._explainer is None or self._explainer.model is not subject.model:
            self._explainer = Explainer(subject.model, self.preset)  # keeps its plans
        target = explained_score(subject, inputs, targets)
        values = subject.arguments(inputs, targets)
        if inputs.name == PLAIN:
            found = self._explainer(values[PLAIN], target=target, output=unwrap)
            return found.relevance
        found = self._explainer(target=target, output=unwrap, **values)
        if inputs.name not in found.relevances:
            raise EvaluationError(f"{inputs.name!r} got no relevance; explained were {', '.join(found.relevances)}")
        return found.relevances[inputs.name]

    def describe(self) -> str:
        return str(self.preset)


def explained_score(subject: Subject, inputs: Inputs, targets: Tensor) -> Callable[[Tensor], Tensor]:
    """The target for `explain`: each row's own logit, found in the model's output."""
    span = subject.answers_spans(inputs)
    return lambda output: subject.logits(output, inputs, targets, span)


class Random(Method):
    """Normal noise, seeded per input: what chance would rank."""

    def __init__(self, seed: int = 0, name: str = "random") -> None:
        self.name, self.seed = name, seed

    def relevance(self, subject: Subject, inputs: Inputs, targets: Tensor, indices: Sequence[int]) -> Tensor:
        shape = inputs.explained.shape[1:]
        rows = [torch.randn(shape, generator=torch.Generator().manual_seed(self._seed(i))) for i in indices]
        return torch.stack(rows)

    def _seed(self, index: int) -> int:
        return zlib.crc32(f"{self.seed}/{index}".encode())

    def describe(self) -> str:
        return f"random, seed {self.seed}"


class Function(Method):
    """A user's `(model, inputs, targets) -> relevance`; inputs as the data gave them, on the model's device."""

    def __init__(self, function: Callable[..., Tensor], name: str | None = None) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))

    def relevance(self, subject: Subject, inputs: Inputs, targets: Tensor, indices: Sequence[int]) -> Tensor:
        given = inputs.explained if inputs.name == PLAIN else dict(inputs.values)
        found = self.function(subject.model, given, targets)
        if not isinstance(found, Tensor) or len(found) != len(inputs):
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise EvaluationError(f"method {self.name!r} returned {shape}: expected a tensor with {len(inputs)} rows")
        return found


def find_method(method: Any, name: str | None = None) -> Method:
    """A method from what a user writes.

    >>> find_method("gamma").name, find_method("captum:Saliency").name
    ('gamma', 'captum:Saliency')
    """
    if isinstance(method, Method):
        if name is not None:
            method = copy.copy(method)
            method.name = name
        return method
    if isinstance(method, Preset):
        return Ours(method, name)
    if isinstance(method, str):
        from .baselines import Captum, Zennit  # here: they know the other packages

        source, _, rest = method.partition(":")
        if rest and source == "captum":
            return Captum(rest, name=name)
        if rest and source == "zennit":
            return Zennit(rest, name=name)
        if method == "random":
            return Random(name=name or "random")
        if method not in PRESETS:
            raise EvaluationError(
                f"unknown method {method!r}. Expected a preset ({', '.join(PRESETS)}), 'captum:NAME', 'zennit:NAME', 'random', "
                "a Preset or a function (model, inputs, targets) -> relevance"
            )
        return Ours(method, name)
    if callable(method):
        return Function(method, name)
    raise EvaluationError(
        f"method {method!r:.80}: expected a name, a Preset, or a function (model, inputs, targets) -> relevance"
    )


def relevance_of(
    method: Any, model: Callable[..., Any], inputs: Any, targets: Any = None, *, embedding: str | None = None
) -> Tensor:
    """Relevance of a batch by any method, rows first: of float inputs in their shape, of token ids one number each.

    >>> import torch
    >>> relevance_of("captum:Saliency", torch.nn.Linear(4, 2), torch.randn(3, 4)).shape
    torch.Size([3, 4])
    """
    subject = Subject(model, embedding=embedding)
    batch = subject.read(inputs)
    wanted = subject.predict(batch) if targets is None else read_targets(targets, len(batch))
    return find_method(method).relevance(subject, batch, wanted, range(len(batch)))


def find_methods(methods: Any) -> list[Method]:
    """A list of methods, or a mapping from label to method; labels must differ."""
    if isinstance(methods, Mapping):
        found = [find_method(method, str(label)) for label, method in methods.items()]
    elif isinstance(methods, (str, Preset, Method)) or not isinstance(methods, Sequence):
        found = [find_method(methods)]
    else:
        found = [find_method(method) for method in methods]
    names = [method.name for method in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise EvaluationError(f"methods named twice: {', '.join(twice)}; use a mapping, methods={{'label': method}}")
    if not found:
        raise EvaluationError("methods is empty: name at least one")
    return found


@contextmanager
def frozen(model: Callable[..., Any]) -> Iterator[None]:
    """Within: no parameter asks for gradients, so nobody pays for those of weights."""
    parameters = [p for p in model.parameters() if p.requires_grad] if isinstance(model, nn.Module) else []
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


class Scores(nn.Module):
    """The model as a function of the explained tensor (floats, or embeddings of ids) to one score per row.

    Baselines call it with `forward(x, rows)`; `rows` holds each row's place in the batch, so that methods which repeat
    rows (noise, steps along a path) repeat everything that belongs to them.
    """

    def __init__(self, subject: Subject, inputs: Inputs, targets: Tensor) -> None:
        super().__init__()
        self.subject, self.inputs, self.targets = subject, inputs, targets
        if isinstance(subject.model, nn.Module):
            self.model = subject.model  # registered, so that hooks of other packages find the layers
        self.span = subject.answers_spans(inputs)

    def start(self) -> Tensor:
        """Where explanations start: the float input itself, or the embeddings of its ids."""
        if not self.inputs.is_tokens:
            return self.inputs.explained.detach().clone()
        with torch.no_grad():
            return self.subject.embedding()(self.inputs.explained).detach()

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        inputs, targets = self.inputs.pick(rows), self.targets[rows.to(self.targets.device)]
        if inputs.is_tokens:
            raw = self.subject.call_embedded(inputs, targets, lambda embeddings: x.to(embeddings.dtype))
        else:
            raw = self.subject.call(inputs.put(x), targets)
        output = torch.stack([raw.start_logits, raw.end_logits], -1) if self.span else unwrap(raw)
        return self.subject.logits(output, inputs, targets, self.span)

    def finish(self, relevance: Tensor) -> Tensor:
        """Relevance of embeddings becomes one number per token."""
        return relevance.sum(-1) if self.inputs.is_tokens else relevance

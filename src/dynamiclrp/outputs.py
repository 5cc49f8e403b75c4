"""What a model returned → the tensor that is explained, and what is asked of it.

In: whatever the model gave back, a target, and what `output=` says. Out: `Scores`. It must not know graphs or rules.

One tensor, or one that is plainly the prediction, is taken; of several others none is, before somebody says which. A
callable target gets what the model returned, whole; where it uses several tensors of that, they are explained side by side.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import TargetError
from .targets import Target

Output = str | int | Callable[[Any], Tensor] | None
Place = tuple[Any, ...]  # keys and numbers, from the top

_PREDICTIONS = ("logits", "prediction_logits", "logits_per_image", "last_hidden_state")
_HOW = (
    "To dynamiclrp.explain say which with output=, a name, an index or a function of what the model returned; with target=(name, 1), class 1 of "
    "that one; or with a callable target, which gets all of it."
)


@dataclass(frozen=True, eq=False)
class Scores:
    """The tensor that is explained, what results call it, and the target as a question to it."""

    tensor: Tensor
    name: str  # empty, if the model returned nothing else
    target: Target
    raw: Any = None  # what the model returned, where it is more than a tensor
    output: Output = None

    def ask(self, target: Target) -> Scores | None:
        """Another target's question; None, if that speaks of another tensor."""
        if self.raw is None:
            return self if target is self.target else read(self.tensor, target, None)
        other = read(self.raw, target, self.output)
        return other if other.name == self.name else None

    def held(self) -> Scores:
        """The same without autograd's graph, to be kept."""
        raw = None if self.raw is None else _filled(self.raw, {p: t.detach() for p, t in tensors(self.raw).items()})
        return Scores(self.tensor.detach(), self.name, None, raw, self.output)


def read(raw: Any, target: Target = None, output: Output = None) -> Scores:
    """What of `raw` a target speaks of."""
    named = output
    if isinstance(target, tuple) and target and isinstance(target[0], str):  # ("sex", 1): a head, and the target there
        if output is not None and output is not unwrap:
            raise TargetError(f"target {target!r} names an output, and output={output!r} another: give one of them")
        named, rest = target[0], target[1:]
        target = rest[0] if len(rest) == 1 else rest or None
    if isinstance(raw, Tensor) and (named is None or named is unwrap):
        return Scores(raw, "", target)
    if callable(named) and named is not unwrap:
        tensor = named(raw)
        if not isinstance(tensor, Tensor):
            raise TargetError(
                f"output={named!r} returned {type(tensor).__name__}: expected a tensor of what the model gave"
            )
        return Scores(tensor, getattr(named, "__name__", "output"), target, raw, output)
    if named is None and callable(target):
        return _whole(raw, target)
    name, tensor = prediction(raw) if named is None or named is unwrap else _named(raw, named)
    return Scores(tensor, name, target, raw, output)


def unwrap(raw: Any) -> Tensor:
    """The tensor to explain in what a model returned: itself, the one that is plainly the prediction, or the only one."""
    return prediction(raw)[1]


def prediction(raw: Any) -> tuple[str, Tensor]:
    """The same with its name. Start and end logits are one prediction, stacked last."""
    if isinstance(raw, Tensor):
        return "", raw
    start, end = _field(raw, "start_logits"), _field(raw, "end_logits")
    if isinstance(start, Tensor) and isinstance(end, Tensor):
        return "start and end logits", torch.stack([start, end], -1)
    for name in _PREDICTIONS:
        value = _field(raw, name)
        if isinstance(value, Tensor):
            return name, value
    top = {place: tensor for place, tensor in tensors(raw).items() if len(place) == 1}
    if len({id(tensor) for tensor in top.values()}) == 1:
        place, tensor = next(iter(top.items()))
        return _name(place), tensor
    if tensors(raw):
        raise TargetError(
            f"the model returned several tensors, and none is plainly the prediction: {_list(raw)}. {_HOW}"
        )
    raise TargetError(
        f"the model returned {type(raw).__name__}, in which no tensor to explain was found. "
        "Expected a tensor, .logits, start/end logits, or a tuple or dict of tensors; wrap the model to return one."
    )


def leading(raw: Any) -> Tensor:
    """What a layer on the way puts out: the first tensor, where it hands on more than that."""
    try:
        return unwrap(raw)
    except TargetError:
        found = tensors(raw)
        if not found:
            raise
        return next(iter(found.values()))


def tensors(raw: Any, above: Place = ()) -> dict[Place, Tensor]:
    """All float tensors and where they stand."""
    if isinstance(raw, Tensor):
        return {above: raw} if raw.is_floating_point() else {}
    return {p: t for key, value in _items(raw, not above) for p, t in tensors(value, (*above, key)).items()}


def _items(raw: Any, top: bool) -> Iterable[tuple[Any, Any]]:
    if isinstance(raw, Mapping):
        return raw.items()
    if isinstance(raw, tuple) and hasattr(raw, "_fields"):
        return zip(raw._fields, raw)
    if isinstance(raw, (tuple, list)):
        return enumerate(raw)
    # caches and the like, further down, are no outputs
    return vars(raw).items() if top and hasattr(raw, "__dict__") and not callable(raw) else ()


def _field(raw: Any, name: str) -> Any:
    return raw.get(name) if isinstance(raw, Mapping) else getattr(raw, name, None)


def _name(place: Place) -> str:
    return ".".join(map(str, place))


def _list(raw: Any) -> str:
    return ", ".join(f"{_name(place)!r} {tuple(tensor.shape)}" for place, tensor in tensors(raw).items()) or "none"


def _named(raw: Any, output: Any) -> tuple[str, Tensor]:
    if isinstance(raw, Tensor):
        raise TargetError(
            f"output {output!r}: the model returned one tensor, of shape {tuple(raw.shape)}, which has no name"
        )
    known = {_name(place): tensor for place, tensor in tensors(raw).items()}
    keys = [key for key, _ in _items(raw, True)]
    if isinstance(output, int) and not isinstance(output, bool) and -len(keys) <= output < len(keys):
        output = _name((keys[output],))
    if not isinstance(output, str) or output not in known:
        raise TargetError(f"output {output!r}: the model returned no float tensor there. Known: {_list(raw)}. {_HOW}")
    return output, known[output]


def _whole(raw: Any, target: Callable[[Any], Tensor]) -> Scores:
    """A callable on all that the model returned: which tensors does it use?"""
    known = tensors(raw)
    probes = {place: tensor.detach().requires_grad_() for place, tensor in known.items()}
    try:
        with torch.enable_grad():
            chosen = target(_filled(raw, probes))
    except (TypeError, IndexError, KeyError, AttributeError, ValueError) as error:
        raise TargetError(
            f"the target callable failed ({type(error).__name__}: {error}). It gets what the model returned, "
            f"{type(raw).__name__} with {_list(raw)}: take the tensor from that, or say output=, then it gets that tensor."
        ) from error
    if not isinstance(chosen, Tensor) or not chosen.requires_grad:
        raise TargetError(
            f"the target callable returned {type(chosen).__name__} that does not depend on the outputs ({_list(raw)}): "
            "expected a tensor computed from them, such as lambda out: out['logits'][:, 3]"
        )
    reached = torch.autograd.grad(chosen.sum(), list(probes.values()), allow_unused=True)
    used = [place for place, gradient in zip(known, reached) if gradient is not None]
    if len(used) == 1:
        return Scores(known[used[0]], _name(used[0]), lambda y: target(_filled(raw, {used[0]: y})), raw)
    parts = {place: known[place] for place in used}

    def question(joined: Tensor) -> Tensor:
        return target(_filled(raw, _split(joined, parts)))

    return Scores(_join(list(parts.values())), " + ".join(map(_name, used)), question, raw)


def _join(parts: list[Tensor]) -> Tensor:
    """Side by side: [rows, all scores], or all in a row where they have no rows in common."""
    if any(part.dim() == 0 or len(part) != len(parts[0]) for part in parts):
        return torch.cat([part.reshape(-1) for part in parts])
    return torch.cat([part.reshape(len(part), -1) for part in parts], 1)


def _split(joined: Tensor, parts: Mapping[Place, Tensor]) -> dict[Place, Tensor]:
    rows = len(joined) if joined.dim() > 1 else 1
    pieces = joined.split([part.numel() // rows for part in parts.values()], -1)
    return {place: y.reshape(part.shape).to(part.dtype) for (place, part), y in zip(parts.items(), pieces)}


def _filled(raw: Any, values: Mapping[Place, Tensor], above: Place = ()) -> Any:
    """The same kind of thing, with these tensors in their places."""
    if above in values:
        return values[above]
    made = {key: _filled(value, values, (*above, key)) for key, value in _items(raw, not above)}
    if not made:
        return raw
    if isinstance(raw, (tuple, list)):
        return type(raw)(*made.values()) if hasattr(raw, "_fields") else type(raw)(made.values())
    other = copy.copy(raw)
    for key, value in made.items():
        if isinstance(raw, Mapping):
            other[key] = value
        else:
            object.__setattr__(other, key, value)
    return other

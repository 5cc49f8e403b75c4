"""The arguments of a call: the tensors in them by name, and what each forward pass gets of them.

In: what the user hands to a model. Out: for each forward pass the same once more, with tensors and containers (lists,
dicts, key/value caches) of our own, so that no pass sees what another one wrote; in the end the user's containers
hold what one pass leaves in them. It must not know graphs, lookups or rules.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Mapping, MutableMapping
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .capture import refuse_nested
from .errors import UnsupportedTensorError

_CLOSED = (
    nn.Module,
    type,
    Enum,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    Tensor,
    torch.dtype,
    torch.device,
)


class Arguments:
    """What the user gave. Tensors in containers are called as one reads them: `more.z`, `past[0]`."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.floats: dict[str, Tensor] = {}  # leaves of our own on the user's memory
        self.integers: dict[str, Tensor] = {}  # as the last pass got them
        names, self.order = argument_names(model)
        names = [*names, *(f"argument {i}" for i in range(len(names), len(args)))]
        self._given = (dict(zip(names, args)), dict(kwargs))
        self._passed: dict[int, tuple[Any, Any, int]] = {}  # ours by id → (ours, theirs, version of ours)
        by_place, by_name = ({n: rebuilt(v, n, self._take, {}) for n, v in given.items()} for given in self._given)
        self.args, self.kwargs = tuple(by_place.values()), by_name

    def rank(self, name: str) -> int:
        """Where an argument stands in the model's signature."""
        root = name.split(".")[0].split("[")[0]
        return self.order.index(root) if root in self.order else len(self.order)

    def _take(self, name: str, value: Tensor) -> Tensor:
        if not _inside(name):
            refuse_nested(value, f"argument {name!r}")
            if value.is_complex() or value.layout != torch.strided:
                raise UnsupportedTensorError(
                    f"argument {name!r} is {'complex' if value.is_complex() else 'sparse'} ({value.dtype}, {value.layout}): "
                    "expected a dense real tensor; pass torch.view_as_real(x) or x.to_dense()"
                )
        if value.is_floating_point() and value.layout == torch.strided:
            value = value.clone() if value.is_inference() else value.detach()
            self.floats[name] = value.requires_grad_()
        elif value.layout == torch.strided and not value.is_complex() and value.dtype != torch.bool:
            self.integers[name] = value
        return value

    def fresh(self, clone: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for one forward pass. `clone`: the model writes into its float inputs."""
        self._passed = {}
        made: dict[int, Any] = {}

        def ours(name: str, value: Tensor) -> Tensor:
            if name in self.floats:
                leaf = self.floats[name]
                own = leaf.clone() if clone else leaf
            else:  # one that is written into, or looked up under two names, is another one each time
                own = value.detach().clone()
            if name in self.integers:
                self.integers[name] = own
            self._passed[id(own)] = (own, value, own._version)
            return own

        by_place, by_name = ({n: rebuilt(v, n, ours, made) for n, v in given.items()} for given in self._given)
        for theirs, own in made.values():
            self._passed[id(own)] = (own, theirs, 0)
        return tuple(by_place.values()), by_name

    def hand_back(self) -> None:
        """Have the user's containers hold what the last pass left in ours."""
        seen: dict[int, Any] = {}
        for own, theirs, _ in list(self._passed.values()):
            if not isinstance(theirs, Tensor):
                self._returned(own, seen)
        self._passed = {}

    def _returned(self, value: Any, seen: dict[int, Any]) -> Any:
        _, theirs, version = self._passed.get(id(value), (None, None, 0))
        if isinstance(value, Tensor):
            return theirs if theirs is not None and value._version == version else value.detach()
        if id(value) in seen or not _is_container(value):
            return seen.get(id(value), value)
        if isinstance(value, tuple):
            return _tuple(value, [self._returned(item, seen) for item in value])
        target = seen[id(value)] = value if theirs is None else theirs
        children = {key: self._returned(child, seen) for key, child in _children(value).items()}
        _fill(target, children)
        return target


def rebuilt(value: Any, name: str, change: Callable[[str, Tensor], Tensor], made: dict[int, Any]) -> Any:
    """The same with `change(name, tensor)` for each tensor, in containers of our own; `made` has both by theirs' id."""
    if isinstance(value, Tensor):
        return change(name, value)
    if not _is_container(value):
        return value
    if id(value) in made:
        return made[id(value)][1]
    if isinstance(value, tuple):
        return _tuple(value, [rebuilt(item, f"{name}[{i}]", change, made) for i, item in enumerate(value)])
    try:
        own = copy.copy(value)
    except TypeError as error:
        raise UnsupportedTensorError(
            f"argument {name!r} is a {type(value).__name__} that cannot be copied ({error}), and each forward pass that we "
            "need gets a copy. Remedy: pass its tensors as arguments of their own, or hold it in the model."
        ) from None
    made[id(value)] = (value, own)
    label = "{}[{}]" if isinstance(value, list) else "{}.{}"
    children = {key: rebuilt(v, label.format(name, key), change, made) for key, v in _children(value).items()}
    _fill(own, children)
    return own


def holds_tensors(value: Any) -> bool:
    """May a model find tensors in it, or put some there?"""
    if isinstance(value, tuple):
        return any(isinstance(item, Tensor) or holds_tensors(item) for item in value)
    return _is_container(value)


def _is_container(value: Any) -> bool:
    if value is None or isinstance(value, (str, int, float, *_CLOSED)):
        return False
    if isinstance(value, tuple):
        return type(value) is tuple or hasattr(value, "_fields")
    return isinstance(value, (list, MutableMapping)) or bool(getattr(value, "__dict__", None))


def _children(value: Any) -> dict[Any, Any]:
    if isinstance(value, list):
        return dict(enumerate(value))
    return dict(value) if isinstance(value, MutableMapping) else dict(vars(value))


def _fill(value: Any, children: dict[Any, Any]) -> None:
    """Have a container hold these and no others."""
    if isinstance(value, list):
        value[:] = children.values()
        return
    content = value if isinstance(value, MutableMapping) else vars(value)
    for key in [key for key in content if key not in children]:
        del content[key]
    for key, child in children.items():
        if key not in content or content[key] is not child:
            content[key] = child


def _tuple(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    if all(one is other for one, other in zip(value, items)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def _inside(name: str) -> bool:
    return "." in name or "[" in name


def argument_names(model: nn.Module) -> tuple[list[str], list[str]]:
    """The arguments that a model takes by position, and all of them in order."""
    function = getattr(model.forward, "__func__", model.forward)
    try:
        if function not in _names:
            parameters = inspect.signature(model.forward).parameters.values()
            positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            _names[function] = positional, [p.name for p in parameters]
        return _names[function]
    except (TypeError, ValueError):
        return [], []


def takes(model: nn.Module, name: str) -> bool:
    """Has the model an argument of this name?"""
    return name in argument_names(model)[1]


_names: WeakKeyDictionary[Any, tuple[list[str], list[str]]] = WeakKeyDictionary()  # a memo: signatures are slow

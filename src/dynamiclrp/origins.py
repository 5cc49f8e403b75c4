"""Where integers come from: which element of which argument each element of a tensor is, or was made of.

In: the integer arguments of a call and, while `Origins` is entered, the operations of the forward pass. Out: for any
tensor its origins. Each block of memory that holds elements of an argument has a shadow, in which places of the
argument stand (counted from 1; 0: from nowhere; -1: told by the argument without being one of its elements, such as
how many there are). Views need no following, nor does what is written through them. It must not know graphs, models
or rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .saved import next_sequence_number

aten = torch.ops.aten
Key = tuple[str, int]  # an argument, and a number: what is made of two of its elements has two origins

# Operations that put elements elsewhere. Those that choose by values (a mask) leave origins where what they put has none.
_CHOICES = frozenset({"where", "masked_fill", "masked_scatter"})
_MOVES = _CHOICES | {
    "cat", "stack", "copy", "clone", "index", "index_select", "gather", "take", "masked_select", "roll", "flip", "repeat",
    "constant_pad_nd", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put", "scatter", "index_copy",
    "index_fill", "fill", "zero", "select_scatter", "slice_scatter", "diagonal_scatter", "as_strided_scatter", "tril",
    "triu", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "unfold_copy",
}  # fmt: skip
_TABLES = frozenset({
    aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default,
    aten._embedding_bag.default, aten._embedding_bag_forward_only.default,
})  # fmt: skip
_LOOKUPS = frozenset({"index", "_unsafe_index", "index_select", "gather", "take"})  # by index, in `_MOVES` too
_ELEMENTWISE = frozenset({"_to_copy", "floor_divide", "__and__", "__or__", "__xor__", "__lshift__", "__rshift__"})
_CHOOSERS = frozenset({"index", "indices", "mask", "condition"})  # operands that say where, not what
_FILLS = frozenset({"value", "fill_value"})
_PRODUCTS = frozenset({"mul", "bitwise_and", "__and__"})


class Origins(TorchDispatchMode):
    """Knows the arguments' own memory; entered, it follows what is made of them."""

    supports_higher_order_operators = True  # which it leaves alone

    def __init__(self, arguments: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}  # computed ones that were looked into, by sequence number
        self.frozen: set[int] = set()  # memory of those that autograd does not follow
        self._shadows: dict[int, dict[Key, Tensor]] = {}  # by address
        self._alive: list[Tensor] = []  # so that no address is used twice
        for name, ids in arguments.items():
            if not ids.numel():
                continue
            places = torch.arange(1, ids.numel() + 1, device=ids.device)
            if ids.is_contiguous() and ids.untyped_storage().nbytes() == ids.nbytes:  # the shadow itself
                self._shadows[address(ids)] = {(name, 0): places}
                self._alive.append(ids)
            else:
                self._write(ids, {(name, 0): places.view(ids.shape)})

    def of(self, tensor: Tensor) -> dict[Key, Tensor]:
        """The origins of a tensor's elements; empty, if it is from nowhere."""
        shadows = None if tensor.is_floating_point() else self._shadows.get(address(tensor))
        if not shadows or next(iter(shadows.values())).numel() != _length(tensor):  # seen as another type
            return {}
        return {key: _seen(shadow, tensor) for key, shadow in shadows.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        of_floats = bool(args) and isinstance(args[0], Tensor) and args[0].is_floating_point()
        plain = isinstance(func, torch._ops.OpOverload)
        if (
            not plain
            or (of_floats and func not in _TABLES)
            or not any(map(self._is_known, _tensors((args, tuple(kwargs.values())))))
        ):
            return func(*args, **kwargs)
        if of_floats:
            self._note(args[0])
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        named = {a.name: v for a, v in zip(func._schema.arguments, args)} | kwargs
        made = self._origins(func, name, named) if not func.is_view else None  # before it overwrites what it reads
        result = func(*args, **kwargs)
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        if made is None or not isinstance(first, Tensor) or first.is_floating_point() or first.dtype == torch.bool:
            return result
        if _tells_places(func):
            made = _chosen(made, named, result)
        if not (func._schema.is_mutable is False and self._is_known(first)):  # which is a view by another name
            self._write(first, made)
        return result

    def _origins(self, func: Any, name: str, named: dict[str, Any]) -> dict[Key, Tensor] | None:
        """Those of what an operation will make; None: what it makes has nothing to do with its operands' values."""
        if name.startswith("new_") or name.endswith("_like"):
            return None
        if name in _LOOKUPS and not self._of_values(named):
            return self._by_index(named)
        if name in _MOVES and not named.get("accumulate") and named.get("reduce") is None:
            return self._moved(func, name, named)
        if _tells_places(func):
            return self.of(named["self"])
        operands = [t for t in _tensors(tuple(named.values())) if not t.is_floating_point()]
        if torch.Tag.pointwise in func.tags or name in _ELEMENTWISE:
            return self._together(operands, name in _PRODUCTS)
        told = {key[0]: operand.device for operand in operands for key in self.of(operand)}
        return {(argument, 0): torch.full((), -1, device=device) for argument, device in told.items()}

    def _of_values(self, named: dict[str, Any]) -> set[Key]:
        values = _tensors(tuple(value for name, value in named.items() if name not in _CHOOSERS))
        return {key for tensor in values for key in self.of(tensor)}

    def _moved(self, func: Any, name: str, named: dict[str, Any]) -> dict[Key, Tensor]:
        """Move shadows as the operation moves elements."""
        indices = named.get("indices")
        chooses = name in _CHOICES or any(t.dtype == torch.bool for t in _tensors((indices,)))
        stay = [v for n, v in named.items() if n in ("self", "other") and isinstance(v, Tensor)] if chooses else []
        made = {}
        for key in self._of_values(named):
            swapped = {n: v if n in _CHOOSERS else 0 if n in _FILLS else self._swap(v, key) for n, v in named.items()}
            swapped = {n: v for n, v in swapped.items() if n not in ("dtype", "memory_format")}
            if isinstance(named.get("value"), Tensor) and "value" in swapped:
                swapped["value"] = self._swap(named["value"], key)
            made[key] = func(**swapped)
        if stay and name != "index" and made:
            nothing = torch.stack([origin == 0 for origin in made.values()]).all(0)
            for before, key in [(origin, key) for operand in stay for key, origin in self.of(operand).items()]:
                made[key] = torch.where(nothing & (made[key] == 0), before, made[key])
        return made

    def _swap(self, value: Any, key: Key) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
            return [self._swap(item, key) for item in value]
        if not isinstance(value, Tensor):
            return value
        origin = self.of(value).get(key)
        zeros = torch.zeros(value.shape, dtype=torch.int64, device=value.device)
        return zeros if origin is None else origin.clone()

    def _by_index(self, named: dict[str, Any]) -> dict[Key, Tensor] | None:
        """What is looked up in a table of integers belongs to what it was looked up with."""
        index = named["index"] if "index" in named else named["indices"]
        found = [tensor for tensor in _tensors((index,)) if tensor.dtype != torch.bool]
        table = named["self"]
        made = self._together(found, False)
        if "dim" in named or isinstance(index, Tensor):
            return made
        after = table.dim() - len(index)
        return {key: origin.reshape(*origin.shape, *[1] * after) for key, origin in made.items()}

    def _together(self, operands: list[Tensor], product: bool) -> dict[Key, Tensor]:
        """The origins of what is made elementwise: those of all operands, but of a factor that only masks the other."""
        operands = [x for x in operands if x.dim()] or operands  # a lone number only shifts the others
        known = [(x, origins) for x in operands if (origins := self.of(x))]
        layers = [origins for _, origins in known]
        if product and len(layers) == 2:
            layers = _unmasked(*known[0], *known[1])
        if len(layers) == 1:
            return layers[0]
        made: dict[Key, Tensor] = {}
        for origins in layers:
            for (name, _), origin in origins.items():
                same = [key for key in made if key[0] == name]
                for key in same:
                    origin = torch.where(origin == made[key], 0, origin)
                made[name, len(same)] = origin
        for name in {key[0] for key in made}:
            keys = [key for key in made if key[0] == name]
            if len(keys) > 1:
                counted = torch.stack(torch.broadcast_tensors(*[made[key] == -1 for key in keys])).any(0)
                for key in keys:
                    made[key] = torch.where(counted, -1, made[key])
        return made

    def _note(self, table: Tensor) -> None:
        if not table.requires_grad:
            self.frozen.add(address(table))
        elif not table.is_leaf:
            self.tables[next_sequence_number() - 1] = table.detach()

    def _is_known(self, tensor: Tensor) -> bool:
        return not tensor.is_floating_point() and address(tensor) in self._shadows

    def _write(self, tensor: Tensor, origins: Mapping[Key, Tensor]) -> None:
        """Have the memory of a tensor hold these origins and no others."""
        shadows = self._shadows.get(address(tensor))
        if shadows is None:
            if not origins:
                return
            shadows = self._shadows[address(tensor)] = {}
            self._alive.append(tensor)
        for key in {*shadows, *origins}:
            if key not in shadows or shadows[key].numel() != _length(tensor):
                shadows[key] = torch.zeros(_length(tensor), dtype=torch.int64, device=tensor.device)
            origin = origins.get(key)
            place = _seen(shadows[key], tensor)
            if origin is None:
                place.zero_()
            else:
                place.copy_(origin)


def _unmasked(
    first: Tensor, one: dict[Key, Tensor], second: Tensor, other: dict[Key, Tensor]
) -> list[dict[Key, Tensor]]:
    """Origins of two factors, without those of one that masks the other: of another argument, zeros and ones alone."""
    if {name for name, _ in one} & {name for name, _ in other}:
        return [one, other]
    masks = ((second == 0) | (second == 1)).all()
    masked = ~masks & ((first == 0) | (first == 1)).all()
    return [
        {key: torch.where(dropped, 0, origin) for key, origin in origins.items()}
        for dropped, origins in ((masked, one), (masks, other))
    ]


def _chosen(origins: dict[Key, Tensor], named: dict[str, Any], result: Any) -> dict[Key, Tensor]:
    """Origins of the first of two results, which the second tells the places of."""
    dim, places = named.get("dim", -1), result[1]
    given = next(iter(origins.values())) if origins else None
    if given is None or given.dim() == 0:
        return origins
    places = places if places.dim() == given.dim() else places.unsqueeze(dim)
    return {key: origin.gather(dim, places).reshape(result[0].shape) for key, origin in origins.items()}


def _tells_places(func: Any) -> bool:
    """Does it give values and where they stood (sort, topk, max along a dimension)?"""
    returns = func._schema.returns
    return len(returns) == 2 and returns[1].name == "indices"


def _length(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.itemsize


def _seen(shadow: Tensor, tensor: Tensor) -> Tensor:
    return shadow.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def address(tensor: Tensor) -> int:
    """Which block of memory a tensor is in."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _tensors(arguments: Any) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)

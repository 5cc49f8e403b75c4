"""Frozen dataclasses that are copied often: graphs and steps."""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any, TypeVar

Self = TypeVar("Self", bound="Frozen")


class Frozen:
    """A base for them."""

    def changed(self: Self, **what: Any) -> Self:
        """A copy with other values; `dataclasses.replace` takes many times as long.

        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Number(Frozen):
        ...     value: int
        ...     @cached_property
        ...     def double(self):
        ...         return 2 * self.value
        >>> one = Number(1)
        >>> one.double, one.changed(value=3).double
        (2, 6)
        """
        kind: Any = type(self)
        made = object.__new__(kind)
        made.__dict__.update(self.__dict__, **what)
        for name in _worked_out(kind):
            made.__dict__.pop(name, None)
        return made


@cache
def _worked_out(kind: type) -> tuple[str, ...]:
    return tuple(name for name, value in vars(kind).items() if isinstance(value, cached_property))

"""Fields of a `transformers` configuration, wherever in it they stand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def configs(config: Any) -> Iterator[Any]:
    """The configuration and all inside it, outermost first."""
    from transformers import PretrainedConfig

    queue, seen = [config], set()
    while queue:
        current = queue.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        queue += [v for v in vars(current).values() if isinstance(v, PretrainedConfig)]


def find(config: Any, *names: str, within: str = "", default: Any = None) -> Any:
    """The first of these fields that is set, in the configuration or inside it (first where `within` is in the key)."""
    everywhere = list(configs(config))
    if within:
        inside = [v for c in everywhere for k, v in vars(c).items() if within in k and hasattr(v, "to_dict")]
        everywhere = [d for c in inside for d in configs(c)] + everywhere
    for c in everywhere:
        for name in names:
            value = getattr(c, name, None)
            if value is not None:
                return value
    return default

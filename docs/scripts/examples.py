"""For the API reference: examples in docstrings (paragraphs that begin with `>>>`) become blocks of code."""

from __future__ import annotations

import re
from typing import Any

import griffe


def fenced(text: str) -> str:
    """The docstring with its examples fenced."""
    parts = re.split(r"\n\s*\n", text)
    return "\n\n".join(f"```pycon\n{part}\n```" if part.startswith(">>>") else part for part in parts)


class Examples(griffe.Extension):
    """Fences the examples of every docstring that griffe reads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

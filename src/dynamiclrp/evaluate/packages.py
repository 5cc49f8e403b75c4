"""Packages of extras, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import EvaluationError


def need(module: str, package: str) -> Any:
    """Import a package of an extra, or say how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != package:
            raise
        raise EvaluationError(f"this needs the package {package!r}: pip install {package}") from error

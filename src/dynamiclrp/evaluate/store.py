"""Finished results on disk, one JSON line each, so that a run can be stopped and taken up again.

The first line says what was asked. A second run must ask the same; it then skips what is finished. Lines are written
after each batch, so a killed run loses one batch at most, and a line cut short by the kill is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import EvaluationError

FORMAT = 1


class Store:
    """An append-only file of results."""

    def __init__(self, path: str | os.PathLike[str], setup: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.records: list[dict[str, Any]] = []
        header = {"dynamiclrp evaluation": FORMAT, "setup": json.loads(json.dumps(setup))}
        if self.path.exists() and self.path.stat().st_size:
            self._open(header["setup"])
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._append([header])

    def _open(self, setup: dict[str, Any]) -> None:
        whole = self.path.read_bytes()
        end = whole.rfind(b"\n") + 1
        try:
            header, *records = [json.loads(line) for line in whole[:end].splitlines()]
            stored = header["setup"]
        except (ValueError, KeyError, TypeError) as error:
            raise EvaluationError(f"{self.path} is not a store of results ({error}): choose another path") from None
        changed = sorted(k for k in {*stored, *setup} if stored.get(k) != setup.get(k))
        if changed:
            shown = "; ".join(f"{k} was {stored.get(k)!r}, now {setup.get(k)!r}" for k in changed)
            raise EvaluationError(
                f"{self.path} holds results of another setup ({shown}). Use another path, delete it, or ask the same again."
            )
        if end < len(whole):
            os.truncate(self.path, end)
        self.records = records

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Append results and see that they are on disk."""
        self._append(records)
        self.records += records

    def _append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())

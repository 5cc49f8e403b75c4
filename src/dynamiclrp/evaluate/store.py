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
    """An append-only file of results, for one run at a time: `with Store(path, setup) as store`."""

    def __init__(self, path: str | os.PathLike[str], setup: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.records: list[dict[str, Any]] = []
        header = {"dynamiclrp evaluation": FORMAT, "setup": json.loads(json.dumps(setup))}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab")  # noqa: SIM115  # closed by __exit__
        try:
            self._lock()
            if self.path.stat().st_size:
                self._open(header["setup"])
            else:
                self._append([header])
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _lock(self) -> None:
        """Two runs must not write the same results twice. The system lifts the lock when a run ends, however it ends."""
        try:
            import fcntl
        except ModuleNotFoundError:  # not on Windows
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise EvaluationError(
                f"{self.path} is in use by another run: wait for it, or choose another path"
            ) from None

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
        self._file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

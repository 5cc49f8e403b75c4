"""A progress bar on standard error: rich if installed, nothing where nobody looks."""

from __future__ import annotations

import importlib
import sys
from types import TracebackType
from typing import Any


class Progress:
    """`with Progress("perturbing", total) as bar: bar.advance(n)`. `show=None` means: if standard error is a terminal."""

    def __init__(self, label: str, total: int | None, show: bool | None = None) -> None:
        self.label, self.total = label, total
        self._bar: Any = None
        self._task: Any = None
        if sys.stderr.isatty() if show is None else show:
            self._bar = _rich_bar()

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self.label, total=self.total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, steps: int = 1, label: str | None = None) -> None:
        if self._bar is not None:
            self._bar.update(self._task, advance=steps, **({"description": label} if label else {}))


def _rich_bar() -> Any:
    try:
        rich, console = importlib.import_module("rich.progress"), importlib.import_module("rich.console")
    except ModuleNotFoundError:
        return None
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
    )
    return rich.Progress(*columns, console=console.Console(stderr=True))

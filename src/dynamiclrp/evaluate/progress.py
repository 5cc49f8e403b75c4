"""A progress bar on standard error, by rich. Where nobody looks, or rich is missing and nobody insisted, there is none."""

from __future__ import annotations

import importlib.util
import sys
from types import TracebackType
from typing import Any

from .packages import need


class Progress:
    """`with Progress("perturbing", total) as bar: bar.advance(n)`. `show=None` means: if standard error is a terminal."""

    def __init__(self, label: str, total: int | None, show: bool | None = None) -> None:
        self.label, self.total = label, total
        self._bar: Any = None
        self._task: Any = None
        if show or (show is None and sys.stderr.isatty() and importlib.util.find_spec("rich") is not None):
            self._bar = _rich_bar(need("rich.progress", "rich"))

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


def _rich_bar(rich: Any) -> Any:
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
    )
    return rich.Progress(*columns, console=need("rich.console", "rich").Console(stderr=True))

"""What commands print and write: tables for people, JSON for programs, files that are whole or absent."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .exits import Code, UserError


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Libraries that print while they load do so on stderr: stdout is for the result."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def working(label: str) -> Iterator[None]:
    """A spinner on stderr while something takes its time."""
    from rich.console import Console

    with quiet_stdout(), Console(stderr=True).status(label):
        yield


def columns(*extra: Any) -> list[Any]:
    """The columns of a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return [
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(), *extra,
    ]  # fmt: skip


def show(console: Any, title: str, head: Sequence[str], rows: Sequence[Sequence[Any]], left: int = 1) -> None:
    """A table: the first column (or so many) to the left, numbers to the right."""
    from rich.table import Table

    shown = Table(title=title)
    for number, name in enumerate(head):
        shown.add_column(name, justify="left" if number < left else "right")
    for row in rows:
        shown.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in row))
    console.print(shown)


def print_json(result: Any) -> None:
    """The result, alone on stdout."""
    sys.stdout.write(json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def check_out(out: Path | None, endings: Sequence[str]) -> None:
    """Refuse a file that could not be written, before anything is computed."""
    if out is None:
        return
    if out.suffix.lower() not in endings:
        raise UserError(
            Code.USAGE,
            f"--out {out}: expected a name that ends in {', '.join(endings)}",
            "The ending says what is written",
        )
    if not out.parent.is_dir():
        raise UserError(Code.INPUT, f"--out {out}: there is no folder {out.parent}", f"Make it: mkdir -p {out.parent}")
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        raise UserError(Code.INPUT, f"--out {out}: cannot be written", "Give another name")


def write(out: Path, make: Callable[[Path], Any]) -> None:
    """Make a file under a temporary name and rename it: it is whole, or it is not there."""
    part = out.with_name(f".{out.stem}.part{out.suffix}")
    try:
        make(part)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


def write_json(out: Path, result: Any) -> None:
    """The result as a JSON file."""
    text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write(out, lambda part: part.write_text(text, "utf-8"))


RESULTS = (".html", ".json", ".png", ".svg", ".pdf", ".csv", ".safetensors")


def write_result(out: Path, result: Any) -> None:
    """An explanation as a page, numbers, a picture, a table or a file to load again, by the ending of the name."""
    match out.suffix.lower():
        case ".html":
            write(out, lambda part: result.html(part))
        case ".json":
            write_json(out, result.to_dict())
        case ".csv":
            write(out, lambda part: result.to_pandas().to_csv(part, index=False))
        case ".safetensors":
            write(out, lambda part: result.save(part))
        case _:
            write(out, lambda part: result.plot().savefig(part, dpi=160, bbox_inches="tight"))


def finish(result: Any, json: bool, out: Path | None) -> None:
    """Show an explanation, or print it as JSON; write it where asked."""
    from rich.console import Console

    if out is not None:
        write_result(out, result)
    if json:
        print_json(result.to_dict())
        return
    console = Console()
    console.print(result)
    if out is not None:
        console.print(f"written: {out}", highlight=False, soft_wrap=True)

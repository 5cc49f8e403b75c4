"""How a command ends: exit codes, and one line with a remedy in place of a traceback."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

import dynamiclrp

from ..errors import EvaluationError, LRPError, PresetError, TargetError


class Code(IntEnum):
    """What the exit code of `dynamiclrp` says."""

    OK = 0
    FAULTS = 1  # it ran, and what it measured has faults (coverage)
    USAGE = 2  # arguments that do not fit: an unknown option, preset or target
    MODEL = 3  # the model could not be loaded
    INPUT = 4  # a file could not be read or written
    EXPLAIN = 5  # the model could not be explained
    PACKAGE = 6  # a package is not installed
    BUG = 70  # something that should not happen
    STOPPED = 130  # Ctrl-C


LEGEND = (
    "[bold]Exit codes:[/] 0 done; 1 faults found (coverage); 2 arguments that do not fit; 3 model not loaded; 4 file not "
    "read or written; 5 model not explained; 6 package missing; 70 unexpected; 130 stopped. "
    "Every command takes [cyan]--debug[/] for the traceback."
)


class UserError(Exception):
    """Something the user can mend; the message says what it is and how."""

    def __init__(self, code: Code, what: str, remedy: str = "") -> None:
        super().__init__(f"{what.rstrip('.')}. {remedy}" if remedy else what)
        self.code = code


def code_of(error: BaseException) -> Code:
    """The exit code that an error ends with."""
    match error:
        case UserError():
            return error.code
        case PresetError() | TargetError() | EvaluationError():
            return Code.USAGE
        case LRPError():
            return Code.EXPLAIN
        case ImportError():
            return Code.PACKAGE
        case OSError():
            return Code.INPUT
        case KeyboardInterrupt():
            return Code.STOPPED
        case _ if type(error).__name__ == "OutOfMemoryError" or _place_in_model(error):
            return Code.EXPLAIN
    return Code.BUG


def _place_in_model(error: BaseException) -> str | None:
    """Where in the model it was raised; None, if it was not: the last lines of ours are those that called the model."""
    ours, torchs = (str(Path(module.__file__ or "").parent) for module in (dynamiclrp, torch))
    frames = traceback.extract_tb(error.__traceback__)
    last = max((i for i, f in enumerate(frames) if f.filename.startswith(ours)), default=-1)
    if last < 0 or (Path(frames[last].filename).name, frames[last].name) != ("forward.py", "_run"):
        return None
    inside = [f for f in frames[last:] if not f.filename.startswith(torchs)]
    return f"{Path(inside[-1].filename).name}:{inside[-1].lineno}"


def line_of(error: BaseException) -> str:
    """What to tell the user, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    match code_of(error):
        case Code.STOPPED:
            return "stopped"
        case Code.PACKAGE if "pip install" not in text:
            return f"{text}. Remedy: pip install 'dynamiclrp[all]', or the package that is missing"
        case Code.EXPLAIN if type(error).__name__ == "OutOfMemoryError":
            return f"out of memory: {text[:160]}. Remedy: a shorter input, --dtype bfloat16, or --device cpu"
        case Code.EXPLAIN if not isinstance(error, (LRPError, UserError)):
            place = _place_in_model(error)
            return f"the model itself failed at {place}: {type(error).__name__}: {text}. See --debug for the traceback"
        case Code.BUG:
            return f"{type(error).__name__}: {text}. Run again with --debug for the traceback"
    return text


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """Around the verbs: a value that they refuse is an argument that does not fit."""
    try:
        yield
    except ValueError as error:
        if _place_in_model(error) is not None:
            raise
        raise UserError(Code.USAGE, str(error)) from error


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command whose errors end in one line on stderr and an exit code; `debug=True` lets them through."""
    import click
    import typer

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (click.ClickException, typer.Exit, click.exceptions.Exit, click.Abort):
            raise
        except (Exception, KeyboardInterrupt) as error:
            if kwargs.get("debug"):
                raise
            typer.echo(f"dynamiclrp {command.__module__.rpartition('.')[2]}: {line_of(error)}", err=True)
            raise typer.Exit(code_of(error)) from None

    return run

"""Many models, one after the other, in a worker process that may crash, hang or run out of memory without harm.

In: zoo names. Out: findings, written down as they come, so that a sweep which was stopped goes on where it stood.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from .case import NotBuilt
from .check import Finding, check, say

ZOOS = ("transformers", "timm", "torchvision")


def zoo(name: str) -> Any:
    """The module of a zoo."""
    return importlib.import_module(f".zoo_{name}", __package__)


def examine(zoo_name: str, name: str, built: Callable[[], None] = lambda: None) -> Finding:
    """Build one model and check it; `built` is called in between."""
    finding = Finding(zoo_name, name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case = zoo(zoo_name).build(name)
    except Exception as error:
        finding.why_not_built = str(error) if isinstance(error, NotBuilt) else say(error)
        return finding
    built()
    return check(case, finding)


class Store:
    """Findings in one JSON file; every write replaces the file as a whole."""

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.path = path
        self.findings: dict[tuple[str, str], Finding] = {}
        if path.exists() and not fresh:
            for row in json.loads(path.read_text())["findings"]:
                finding = Finding.from_dict(row)
                self.findings[finding.zoo, finding.name] = finding

    def add(self, finding: Finding) -> None:
        self.findings[finding.zoo, finding.name] = finding

    def save(self) -> None:
        rows = [self.findings[key].to_dict() for key in sorted(self.findings)]
        text = '{"findings": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]}\n"
        write(self.path, text)


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


def sweep(
    models: Iterable[tuple[str, str]], timeout: float, *, recycle: int = 100, threads: int = 1
) -> Iterator[Finding]:
    """Findings of (zoo, name) pairs in their order. A model that crashes or hangs its worker is a finding too."""
    worker = Worker(_found, threads)
    try:
        for done, (zoo_name, name) in enumerate(models):
            if done and done % recycle == 0:
                worker.stop()
            try:
                yield Finding.from_dict(worker.ask(zoo_name, name, timeout))
            except WorkerLost as lost:
                if lost.built:
                    yield Finding(zoo_name, name, built=True, error=f"WorkerError: {lost}")
                else:
                    yield Finding(zoo_name, name, why_not_built=str(lost))
    finally:
        worker.stop()


def _found(zoo_name: str, name: str, built: Callable[[], None]) -> dict[str, Any]:
    return examine(zoo_name, name, built).to_dict()


class WorkerLost(Exception):
    """A worker crashed or hung: why, and was its model built by then?"""

    def __init__(self, reason: str, built: bool) -> None:
        super().__init__(reason)
        self.built = built


class Worker:
    """A process that does something with one model after the other, started when needed and again after it died.

    `what` takes a zoo, a name and what to call when the model is built, and returns plain data.
    """

    def __init__(self, what: Callable[[str, str, Callable[[], None]], dict[str, Any]], threads: int) -> None:
        self.what, self.threads = what, threads
        self.process: Any = None
        self.pipe: Any = None
        self.stage: Any = None  # shared with the process: how far it got

    def ask(self, zoo_name: str, name: str, timeout: float) -> dict[str, Any]:
        """What it found out about a model."""
        if self.process is None or not self.process.is_alive():
            self._start()
        self.pipe.send((zoo_name, name))
        try:
            if self.pipe.poll(timeout):
                return self.pipe.recv()
            reason = f"took longer than {timeout:.0f} s"
        except (EOFError, ConnectionError):
            self.process.join(5)
            reason = f"the worker process died (exit code {self.process.exitcode})"
        built = self.stage.value == b"built"
        self.stop()
        raise WorkerLost(reason, built)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.stage = context.Array("c", 16)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(self.what, theirs, self.stage, self.threads), daemon=True)
        self.process.start()
        theirs.close()

    def stop(self) -> None:
        """End the process; the next question starts another."""
        if self.process is None:
            return
        self.pipe.close()
        self.process.kill()
        self.process.join()
        self.process = None


def _serve(what: Callable[..., dict[str, Any]], pipe: Any, stage: Any, threads: int) -> None:
    import signal

    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.set_num_threads(threads)

    def built() -> None:
        stage.value = b"built"

    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            zoo_name, name = pipe.recv()
            stage.value = b"building"
            found = what(zoo_name, name, built)
            gc.collect()
            pipe.send(found)


def by_zoo(only: str | None, match: Callable[[str], bool], limit: int | None) -> list[tuple[str, str]]:
    """The models to sweep."""
    models: list[tuple[str, str]] = []
    for name in ZOOS if only is None else (only,):
        found = [(name, model) for model in zoo(name).names() if match(model)]
        models += found[:limit]
    return models

"""Two commits beside each other: a folder for each, and a process that answers with the code of one of them.

In: a commit (or a folder that holds one's `src`), the words of a script that answers. Out: what it answered.
A script that answers calls `answer` with a function from a line of text to plain data or tensors.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SINCE = "0c78600"  # the commit before issue "less"


@contextmanager
def tree_of(since: str) -> Iterator[Path]:
    """The `src` of a commit, in a worktree that is gone afterwards; or of a folder."""
    if (Path(since) / "src" / "dynamiclrp").is_dir():
        yield Path(since).resolve() / "src"
        return
    with tempfile.TemporaryDirectory(prefix="beside-") as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        made = subprocess.run([*git, "add", "--detach", str(tree), since], capture_output=True, text=True)
        if made.returncode:
            raise SystemExit(
                f"--since {since}: neither a commit nor a folder with src/dynamiclrp. git says: {made.stderr}"
            )
        try:
            yield tree / "src"
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True, capture_output=True)


class Lost(Exception):
    """The process died or hung."""


class Side:
    """A process with the code of one folder, started when needed and again after it died."""

    def __init__(self, source: Path, words: Sequence[str], threads: int) -> None:
        self.source, self.words, self.threads = source, words, threads
        self.process: subprocess.Popen[str] | None = None

    def ask(self, question: str, patience: float) -> Any:
        """What it answers within so many seconds."""
        if self.process is None:
            paths = os.pathsep.join([str(self.source), str(HERE)])
            environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(self.threads)}
            self.process = subprocess.Popen(
                [sys.executable, *self.words, "--answer", str(self.source)],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
        process = self.process
        assert process.stdin is not None and process.stdout is not None
        stop = threading.Timer(patience, process.kill)
        stop.start()
        try:
            process.stdin.write(question + "\n")
            process.stdin.flush()
            path = Path(process.stdout.readline().rstrip("\n") or "no answer")
        except BrokenPipeError:
            path = Path("no answer")
        finally:
            stop.cancel()
        if not path.exists():
            self.close()
            raise Lost(f"died or took longer than {patience:.0f} s (exit code {process.returncode})")
        try:
            return torch.load(path, weights_only=False)
        finally:
            path.unlink()

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def answer(source: str, to: Callable[[str], Any]) -> None:
    """Answer the questions of a `Side`, one a line; what is printed meanwhile goes to stderr."""
    import dynamiclrp

    if not Path(dynamiclrp.__file__).is_relative_to(source):
        raise SystemExit(f"dynamiclrp comes from {dynamiclrp.__file__}, not from {source}")
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        made = to(line.rstrip("\n"))
        handle, path = tempfile.mkstemp(suffix=".pt")
        os.close(handle)
        torch.save(made, path)
        print(path, file=out, flush=True)

"""Data as a user has it → batches of `Inputs` with targets and each row's place.

Taken: a tensor, a mapping of tensors (rows first), a pair (inputs, targets), a `torch.utils.data.Dataset`, or an iterable
of batches of those forms (a DataLoader, a list of tokenised texts of different lengths).
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..errors import EvaluationError
from .subject import Inputs, Subject, read_inputs, read_targets


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows that are explained together. `targets` is None where the model's own answers are meant."""

    inputs: Inputs
    targets: Tensor | None
    indices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.indices)

    def pick(self, rows: list[int]) -> Batch:
        chosen = torch.tensor(rows)
        return Batch(
            self.inputs.pick(chosen.to(self.inputs.explained.device)),
            None if self.targets is None else self.targets[chosen],
            tuple(self.indices[row] for row in rows),
        )

    def digest(self, row: int) -> str:
        """What identifies a row of data, whatever batch it came in."""
        found = hashlib.blake2b(digest_size=8)
        for name, value in sorted(self.inputs.batched().items()):
            found.update(f"{name} {value.dtype} {tuple(value.shape[1:])}".encode())
            found.update(raw_bytes(value[row]))
        if self.targets is not None:
            found.update(repr(self.targets[row].tolist()).encode())
        return found.hexdigest()


def raw_bytes(tensor: Tensor) -> bytes:
    """A tensor's memory, without numpy."""
    flat = tensor.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())


def batches(
    subject: Subject, data: Any, targets: Any, size: int, *, name: str | None = None, limit: int | None = None
) -> Iterator[Batch]:
    """The data in batches of at most `size` rows, on the model's device."""
    if size < 1 or (limit is not None and limit < 1):
        raise EvaluationError(f"batches of {size}, limit={limit}: expected 1 or more")
    start = 0
    for raw, wanted in _items(data, targets, size):
        inputs = read_inputs(raw, name)
        if not len(inputs):
            continue
        chosen = None if wanted is None else read_targets(wanted, len(inputs))
        for first in range(0, len(inputs), size):
            last = min(first + size, len(inputs), len(inputs) if limit is None else first + limit - start)
            if last <= first:
                return
            yield Batch(
                subject.read(inputs.pick(slice(first, last))),
                None if chosen is None else chosen[first:last],
                tuple(range(start, start + last - first)),
            )
            start += last - first
    if start == 0:
        raise EvaluationError("the data is empty")


def count(data: Any, limit: int | None) -> int | None:
    """How many inputs there are, if that can be told without looking at them all."""
    inputs = data[0] if _is_pair(data) else data
    found: int | None = None
    if isinstance(inputs, Tensor):
        found = len(inputs)
    elif isinstance(inputs, Mapping):
        found = next((len(v) for v in inputs.values() if isinstance(v, Tensor) and v.dim()), None)
    elif isinstance(inputs, DataLoader) and hasattr(inputs.dataset, "__len__"):
        found = len(inputs.dataset)
    elif isinstance(inputs, Dataset) and hasattr(inputs, "__len__"):
        found = len(inputs)
    elif isinstance(inputs, (list, tuple)):
        counts = [count(item, None) for item in inputs]
        found = None if None in counts else sum(n for n in counts if n is not None)
    return found if limit is None else limit if found is None else min(found, limit)


def _items(data: Any, targets: Any, size: int) -> Iterator[tuple[Any, Any]]:
    if isinstance(data, (Tensor, Mapping)):
        yield data, targets
        return
    if _is_pair(data):
        if targets is not None:
            raise EvaluationError("targets are given twice: in the data's pair and as targets=")
        yield data
        return
    if targets is not None:
        raise EvaluationError("targets= goes with one tensor or mapping; give other data as pairs (inputs, targets)")
    if isinstance(data, Dataset):
        data = DataLoader(data, batch_size=size)
    if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
        raise EvaluationError(
            f"data of type {type(data).__name__}: expected a tensor, a mapping of tensors, (inputs, targets), a Dataset or an "
            "iterable of batches"
        )
    for item in data:
        if isinstance(item, (list, tuple)):
            if len(item) != 2:
                raise EvaluationError(
                    f"the data yields {len(item)} things at a time: expected inputs or (inputs, targets)"
                )
            yield item[0], item[1]
        else:
            yield item, None


def _is_pair(data: Any) -> bool:
    """(inputs, targets), and not two batches: targets are integers."""
    if not isinstance(data, tuple) or len(data) != 2 or not isinstance(data[0], (Tensor, Mapping)):
        return False
    second = data[1]
    if isinstance(second, Tensor):
        return not second.is_floating_point() and second.dim() <= 2
    return isinstance(second, (int, list)) or second is None

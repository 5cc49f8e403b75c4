"""From what a user asks about to the relevance at the output: `target` → `Seed`.

Nothing here waits for the device: what could be wrong with a seed is a flag on the device, read once, after the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import LRPError, TargetError, ZeroOutputError

Target = int | Sequence[Any] | Tensor | Callable[[Any], Tensor] | None


@dataclass(frozen=True, eq=False)
class Seed:
    """Relevance at an output, and the coefficient s that carries it: relevance = output · s."""

    coefficient: Tensor  # all zeros if there is nothing to hand back
    relevance: Tensor
    scores: Tensor  # the values that are explained: what is not finite cannot be
    error: Callable[[], LRPError]  # what to say then
    good: Tensor | None = None  # on the device, 0 if there is no value to carry some of it, where that may be
    differs: Tensor | None = None  # on the device, positive if gradient x output is not what a callable chose


def plain(target: Any) -> Any:
    """Numbers and arrays of numpy, pandas and torch as Python has them; anything else as it is.

    >>> import numpy
    >>> plain(numpy.array([2, 1])), plain((numpy.int64(3), 4)), plain(5)
    ([2, 1], (3, 4), 5)
    """
    if isinstance(target, (list, tuple)):
        made = [_number(item) for item in target]
        same = all(one is other for one, other in zip(made, target))
        return target if same else made if isinstance(target, list) else tuple(made)
    if isinstance(target, Tensor) or not hasattr(target, "tolist"):
        return target
    if getattr(target.dtype, "kind", "") == "f" and getattr(target, "shape", ()):  # a seed
        return torch.tensor(target.tolist(), dtype=torch.float64)
    return target.tolist()


def _number(item: Any) -> Any:
    if isinstance(item, Tensor):
        return item.item() if item.dim() == 0 and not item.is_floating_point() else item
    return item.tolist() if hasattr(item, "tolist") else item


def row_dim(output: Tensor, batch_dim: int | None) -> int | None:
    """Where the rows of an output stand; None: it is one row. A single dimension is one of rows if `batch_dim` is known."""
    if output.dim() < 2:
        return None if batch_dim is None or output.dim() == 0 else 0
    return (batch_dim or 0) if output.dim() > 2 else 0


def batch_of(output: Tensor, inputs: Iterable[tuple[torch.Size, bool]], given: int | None = None) -> int | None:
    """The dimension of rows, as far as an output needs it said: given, or 0 where [rows] scores come from as many rows.

    `inputs`: shapes of what is explained, and whether it is ids, of which a row may be a single one.
    """
    if given is not None:
        if (
            isinstance(given, bool)
            or not isinstance(given, int)
            or given < 0
            or (output.dim() > 2 and given >= output.dim())
        ):
            raise TargetError(
                f"batch_dim={given!r}: expected a dimension of the output, whose shape is {tuple(output.shape)}"
            )
        return given
    if output.dim() != 1:
        return None
    rows = any((len(shape) > 1 or (ids and shape)) and shape[0] == len(output) for shape, ids in inputs)
    return 0 if rows else None


def seed_for(output: Tensor, target: Target, batch_dim: int | None = None) -> Seed:
    """The chosen scores keep their own value as relevance, all else has none."""
    if not output.numel():
        raise TargetError(
            f"the output of shape {tuple(output.shape)} is empty: there is no score to explain (a detector that found nothing?)"
        )
    if callable(target):
        return _from_callable(output, target, row_dim(output, batch_dim))
    if isinstance(target, Tensor) and target.is_floating_point():
        return given_seed(target, output)
    relevance, scores = _chosen(output.detach(), target, row_dim(output, batch_dim))
    where = "the largest logit of every row" if target is None else f"target {target!r}"
    return Seed(
        torch.ne(relevance, 0, out=torch.empty_like(relevance)),
        relevance,
        scores,
        lambda: ZeroOutputError(
            f"the output is exactly zero at {where} (output shape {tuple(relevance.shape)}): there is no score to hand back. "
            "Choose another target, or explain a score before the operation that made it zero."
        ),
    )


def given_seed(seed: Tensor, output: Tensor) -> Seed:
    """A seed of the output's shape, with relevance only where the output has a value to carry it."""
    if seed.shape != output.shape:
        raise TargetError(f"the seed has shape {tuple(seed.shape)}: expected the output's, {tuple(output.shape)}")
    seed, values = seed.to(output.device, output.dtype), output.detach()
    nowhere = (values == 0) & (seed != 0)
    return Seed(
        torch.where(seed == 0, 0, seed / torch.where(values == 0, 1, values)),
        torch.where(nowhere, 0, seed),
        torch.where(seed == 0, 0, values),
        lambda: ZeroOutputError(
            f"{int(nowhere.sum())} of {int((seed != 0).sum())} seeded elements are where the output is exactly zero; "
            "relevance is handed back in proportion to values, so it has nowhere to go. Seed only where the output is not zero."
        ),
        (~nowhere.any()).to(values.dtype),
    )


def _from_callable(output: Tensor, target: Callable[[Tensor], Tensor], dim: int | None) -> Seed:
    """A callable picks or combines scores; its gradient times the output is the seed (exact for linear choices)."""
    probe = output.detach().requires_grad_()
    with torch.enable_grad():
        chosen = target(probe)
    if not isinstance(chosen, Tensor) or not chosen.requires_grad:
        raise TargetError(
            f"the target callable returned {type(chosen).__name__} that does not depend on the output: expected a tensor "
            "computed from it, such as lambda logits: logits[:, 3] - logits[:, 5]"
        )
    (gradient,) = torch.autograd.grad(chosen.sum(), probe)
    values = output.detach()
    gradient = torch.where(values == 0, 0, gradient)
    # where nothing was asked for values may be infinite (a mask)
    relevance = torch.where(gradient == 0, 0, values * gradient)
    return Seed(
        gradient,
        relevance,
        chosen.detach(),
        lambda: ZeroOutputError(
            "the target callable chose only scores that are exactly zero: there is nothing to hand back"
        ),
        differs=_differs(chosen.detach().to(relevance.device), relevance, dim),
    )


def _differs(chosen: Tensor, relevance: Tensor, dim: int | None) -> Tensor:
    """On the device: by how much, beyond rounding, is a target's value in any row not the relevance that stands for it?"""
    if dim is None or chosen.dim() == 0 or len(chosen) != relevance.shape[dim]:
        value, shares = chosen.sum()[None], relevance.reshape(1, -1)
    else:
        value = chosen if chosen.dim() == 1 else chosen.flatten(1).sum(1)
        shares = _in_rows(relevance, dim).flatten(1)
    off, all_of_it = (value - shares.sum(1)).abs(), torch.linalg.vector_norm(shares, 1, 1)
    return torch.sub(off, all_of_it, alpha=torch.finfo(shares.dtype).eps ** 0.5).max()


def _in_rows(values: Tensor, dim: int | None) -> Tensor:
    """Rows first; a single dimension holds one row, or one score of each."""
    if dim is None:
        return values[None]
    if values.dim() == 1:
        return values[:, None]
    return values.movedim(dim, 0) if dim else values


def _chosen(values: Tensor, target: Any, dim: int | None) -> tuple[Tensor, Tensor]:
    """The output where the target is, zero elsewhere, and what is there.

    Rows are the dimension `dim`; of outputs token by token (rank 3) the last position is meant, of [rows] the only score.
    """
    if values.dim() == 0:
        if target not in (None, 0):
            raise TargetError(f"target {target!r} for a single score: expected None")
        return values.clone(), values
    made = torch.zeros_like(values)
    rows, chosen = _in_rows(values, dim), _in_rows(made, dim)
    if isinstance(target, tuple):  # an index into one row's output
        if len(target) != rows.dim() - 1:
            raise TargetError(
                f"target {target!r} has {len(target)} indices: expected {rows.dim() - 1} for rows of shape {tuple(rows.shape[1:])}"
            )
        index: Any = (slice(None), *(_check(i, n, target, values) for i, n in zip(target, rows.shape[1:])))
        chosen[index] = rows[index]
        return made, rows[index]
    if rows.dim() > 3:
        raise TargetError(
            f"target {target!r} for an output of shape {tuple(values.shape)}, which has scores {tuple(rows.shape[2:])} of each "
            "class: which pixels? Say (class, row, column), or all indices of one score in a row's output; a callable, such "
            "as lambda y: y[:, 1].sum((1, 2)) for class 1 everywhere; or a seed tensor."
        )
    if rows.dim() == 3:
        rows, chosen = rows[:, -1], chosen[:, -1]
    if target is None:
        scores, column = rows.max(-1, keepdim=True)
    else:
        column = _columns(rows, target)[:, None]
        scores = rows.gather(1, column)
    chosen.scatter_(1, column, scores)
    return made, scores


def _columns(rows: Tensor, target: Any) -> Tensor:
    """One class or token per row."""
    given = target.tolist() if isinstance(target, Tensor) else target
    if isinstance(given, bool) or not isinstance(given, (int, list)):
        raise TargetError(
            f"target {target!r}: expected an int, one int per row, a tuple of indices, a callable or a seed tensor"
        )
    if isinstance(given, int):
        return torch.full((len(rows),), _check(given, rows.shape[-1], target, rows), device=rows.device)
    if len(given) != len(rows):
        raise TargetError(f"{len(given)} targets for {len(rows)} rows of the output: expected one per row")
    return torch.tensor([_check(c, rows.shape[-1], target, rows) for c in given], device=rows.device)


def _check(index: Any, size: int, target: Any, values: Tensor) -> int:
    if isinstance(index, bool) or not isinstance(index, int):
        raise TargetError(f"target {target!r} holds {index!r}: expected integers")
    if not -size <= index < size:
        raise TargetError(
            f"target {target!r} is out of range: the output of shape {tuple(values.shape)} has {size} there"
        )
    return index % size

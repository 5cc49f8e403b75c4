"""From what a user asks about to the relevance at the output: `target` → seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import TargetError, ZeroOutputError

Target = int | Sequence[Any] | Tensor | Callable[[Tensor], Tensor] | None


def unwrap(output: Any) -> Tensor:
    """The tensor to explain in what a model returned: itself, `logits`, start and end logits, or the first float tensor."""
    if isinstance(output, Tensor):
        return output
    if getattr(output, "start_logits", None) is not None and getattr(output, "end_logits", None) is not None:
        return torch.stack([output.start_logits, output.end_logits], -1)
    for name in ("logits", "prediction_logits", "last_hidden_state"):
        value = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise TargetError(
        f"the model returned {type(output).__name__}, in which no tensor to explain was found. "
        "Expected a tensor, .logits, start/end logits, or a tuple or dict of tensors; wrap the model to return one."
    )


def seed_for(output: Tensor, target: Target) -> Tensor:
    """Relevance at the output, of its shape: the chosen scores keep their own value, all else is zero."""
    values = output.detach()
    if callable(target):
        return _from_callable(output, target)
    if isinstance(target, Tensor) and target.is_floating_point():
        return check_seed(target, output)
    seed = _chosen(values, target)
    if not seed.any():
        where = "the largest logit of every row" if target is None else f"target {target!r}"
        raise ZeroOutputError(
            f"the output is exactly zero at {where} (output shape {tuple(output.shape)}): there is no score to hand back. "
            "Choose another target, or explain a score before the operation that made it zero."
        )
    return seed


def check_seed(seed: Tensor, output: Tensor) -> Tensor:
    """A seed of the output's shape, with relevance only where the output has a value to carry it."""
    if seed.shape != output.shape:
        raise TargetError(f"the seed has shape {tuple(seed.shape)}: expected the output's, {tuple(output.shape)}")
    seed = seed.to(output.device, output.dtype)
    lost = (output.detach() == 0) & (seed != 0)
    if lost.any():
        raise ZeroOutputError(
            f"{int(lost.sum())} of {int((seed != 0).sum())} seeded elements are where the output is exactly zero; relevance "
            "is handed back in proportion to values, so it has nowhere to go. Seed only where the output is not zero."
        )
    return seed


def _from_callable(output: Tensor, target: Callable[[Tensor], Tensor]) -> Tensor:
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
    seed = gradient * output.detach()
    if not seed.any():
        raise ZeroOutputError(
            "the target callable chose only scores that are exactly zero: there is nothing to hand back"
        )
    return seed


def _chosen(values: Tensor, target: Any) -> Tensor:
    """The values at the target, zero elsewhere.

    Rows are the first dimension; of outputs token by token (rank 3 and more) the last position is meant.
    """
    if values.dim() == 0:
        if target not in (None, 0):
            raise TargetError(f"target {target!r} for a single score: expected None")
        return values.clone()
    seed = torch.zeros_like(values)
    rows, seeds = (values, seed) if values.dim() > 1 else (values[None], seed[None])
    if isinstance(target, tuple):  # an index into one row's output
        if len(target) != rows.dim() - 1:
            raise TargetError(
                f"target {target!r} has {len(target)} indices: expected {rows.dim() - 1} for rows of shape {tuple(rows.shape[1:])}"
            )
        index: Any = (slice(None), *(_check(i, n, target, values) for i, n in zip(target, rows.shape[1:])))
        seeds[index] = rows[index]
        return seed
    for _ in range(rows.dim() - 2):
        rows, seeds = rows[:, -1], seeds[:, -1]
    column = rows.argmax(-1) if target is None else _columns(rows, target)
    seeds.scatter_(1, column[:, None], rows.gather(1, column[:, None]))
    return seed


def _columns(rows: Tensor, target: Any) -> Tensor:
    """One class or token per row."""
    given = target.tolist() if isinstance(target, Tensor) else target
    if isinstance(given, bool) or not isinstance(given, (int, list)):
        raise TargetError(
            f"target {target!r}: expected an int, one int per row, a tuple of indices, a callable or a seed tensor"
        )
    chosen = [given] * len(rows) if isinstance(given, int) else given
    if len(chosen) != len(rows):
        raise TargetError(f"{len(chosen)} targets for {len(rows)} rows of the output: expected one per row")
    return torch.tensor([_check(c, rows.shape[-1], target, rows) for c in chosen], device=rows.device)


def _check(index: Any, size: int, target: Any, values: Tensor) -> int:
    if isinstance(index, bool) or not isinstance(index, int):
        raise TargetError(f"target {target!r} holds {index!r}: expected integers")
    if not -size <= index < size:
        raise TargetError(
            f"target {target!r} is out of range: the output of shape {tuple(values.shape)} has {size} there"
        )
    return index % size

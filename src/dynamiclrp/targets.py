"""From what a user asks about to the relevance at the output: `target` → `Seed`.

Nothing here waits for the device: what could be wrong with a seed is a flag on the device, read once, after the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import LRPError, TargetError, ZeroOutputError

Target = int | Sequence[Any] | Tensor | Callable[[Tensor], Tensor] | None


@dataclass(frozen=True, eq=False)
class Seed:
    """Relevance at an output, and the coefficient s that carries it: relevance = output · s."""

    coefficient: Tensor  # all zeros if there is nothing to hand back
    relevance: Tensor
    error: Callable[[], LRPError]  # what to say then
    good: Tensor | None = None  # on the device, 0 if there is no value to carry some of it, where that may be


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


def seed_for(output: Tensor, target: Target) -> Seed:
    """The chosen scores keep their own value as relevance, all else has none."""
    if not output.numel():
        raise TargetError(
            f"the output of shape {tuple(output.shape)} is empty: there is no score to explain (a detector that found nothing?)"
        )
    if callable(target):
        return _from_callable(output, target)
    if isinstance(target, Tensor) and target.is_floating_point():
        return given_seed(target, output)
    relevance = _chosen(output.detach(), target)
    where = "the largest logit of every row" if target is None else f"target {target!r}"
    return Seed(
        torch.ne(relevance, 0, out=torch.empty_like(relevance)),
        relevance,
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
        lambda: ZeroOutputError(
            f"{int(nowhere.sum())} of {int((seed != 0).sum())} seeded elements are where the output is exactly zero; "
            "relevance is handed back in proportion to values, so it has nowhere to go. Seed only where the output is not zero."
        ),
        (~nowhere.any()).to(values.dtype),
    )


def _from_callable(output: Tensor, target: Callable[[Tensor], Tensor]) -> Seed:
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
    return Seed(
        gradient,
        torch.where(gradient == 0, 0, values * gradient),  # where nothing was asked for values may be infinite (a mask)
        lambda: ZeroOutputError(
            "the target callable chose only scores that are exactly zero: there is nothing to hand back"
        ),
    )


def _chosen(values: Tensor, target: Any) -> Tensor:
    """The output where the target is, zero elsewhere.

    Rows are the first dimension; of outputs token by token (rank 3 and more) the last position is meant.
    """
    if values.dim() == 0:
        if target not in (None, 0):
            raise TargetError(f"target {target!r} for a single score: expected None")
        return values.clone()
    made = torch.zeros_like(values)
    rows, chosen = (values, made) if values.dim() > 1 else (values[None], made[None])
    if isinstance(target, tuple):  # an index into one row's output
        if len(target) != rows.dim() - 1:
            raise TargetError(
                f"target {target!r} has {len(target)} indices: expected {rows.dim() - 1} for rows of shape {tuple(rows.shape[1:])}"
            )
        index: Any = (slice(None), *(_check(i, n, target, values) for i, n in zip(target, rows.shape[1:])))
        chosen[index] = rows[index]
        return made
    for _ in range(rows.dim() - 2):
        rows, chosen = rows[:, -1], chosen[:, -1]
    if target is None:
        scores, column = rows.max(-1, keepdim=True)
    else:
        column = _columns(rows, target)[:, None]
        scores = rows.gather(1, column)
    chosen.scatter_(1, column, scores)
    return made


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

"""The engine against the oracle, and against itself, on one program.

In: a `Program`. Out: `Failure`s. This is the one file here that calls the engine, through its public verbs and a wrapper around
`dynamiclrp.values.Values.take`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import dynamiclrp as dlrp
from dynamiclrp.presets import PRESETS
from dynamiclrp.values import Values

from .draw import smaller
from .exceptions import allowance
from .program import HALVES, Program, meaning, model
from .rules import EXACT, HIGH, LOW
from .tape import Tied, relevance

# Float64 carries 16 digits. The rules divide by sums that nearly cancel, which costs up to half of them in a handful of layers; formulas
# that differ only in where a stabiliser of 1e-11 stands agree to 1e-9, and a wrong rule is off by 1e-3 and more.
TOLERANCE = 1e-6
LEDGER = 1e-4
TAKERS = frozenset({
    "bias", "stabiliser", "normalisation", "softmax", "attention", "parameter", "constant", "nonlinearity", "blocked", "zeros",
    "rounding",
})  # fmt: skip
CHECKS = ("oracle", "ledger", "values", "row", "again", "spelling")


@dataclass(frozen=True)
class Failure:
    """What was found and what was expected."""

    check: str
    preset: str
    text: str
    off: float = float("nan")

    def __str__(self) -> str:
        return f"{self.check} under {self.preset}: {self.text}"


class Discarded(Exception):
    """The program's relevance has no stable value: an operation is at a pole."""


def rule(preset: str) -> Any:
    return dlrp.preset(preset, low=LOW, high=HIGH) if preset == "epsilon-gamma-box" else preset


def explain(program: Program, preset: str, dtype: torch.dtype = torch.float64, made: Any = None, **words: Any) -> Any:
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in program.inputs().items()}
    made = model(program, dtype) if made is None else made
    return dlrp.explain(made, **(words.pop("inputs", None) or inputs), preset=rule(preset), **words)


def off(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest relevance; infinite where other inputs are explained."""
    if found.keys() != expected.keys() or any(found[name].shape != expected[name].shape for name in expected):
        return float("inf")
    scale = max(float(r.abs().max()) for r in expected.values())
    worst = max(float((found[name].double() - r.double()).abs().max()) for name, r in expected.items())
    return worst / max(scale, 1e-12) if worst == worst else float("inf")


def oracle(
    program: Program, preset: str, targets: list[int], dtype: torch.dtype = torch.float64, nudge: float = 0.0
) -> dict[str, Tensor]:
    tape, out = meaning(program, preset, dtype, nudge)
    seed = torch.zeros_like(out.value.detach())
    chosen = torch.arange(len(seed)), torch.tensor(targets)
    seed[chosen] = out.value.detach()[chosen]
    return {name: r.detach() for name, r in relevance(tape, out, seed, preset).items()}


def targets_of(program: Program) -> list[int]:
    """The score furthest from 0 in each row."""
    scores = meaning(program, "attnlrp")[1].value.abs()
    if bool((scores.amax(1) == 0).any()):
        raise Discarded
    return scores.argmax(1).tolist()


def stable(program: Program, preset: str, targets: list[int], expected: dict[str, Tensor]) -> bool:
    """Does the oracle itself keep nine digits when its inputs change in the thirteenth?"""
    return off(oracle(program, preset, targets, nudge=1e-13), expected) < 1e-9


# ---------------------------------------------------------------- the checks


def check(program: Program, presets: Any = tuple(PRESETS), checks: Any = CHECKS, rest: Any = None) -> Iterator[Failure]:
    """Compare with the oracle under all `presets`; do the other checks under those in `rest` (default: all)."""
    try:
        targets = targets_of(program)
    except Tied:
        raise Discarded from None
    rest = presets if rest is None else rest
    if program.half:
        yield from check_half(program, rest, targets)
    made, plain = model(program), program.plain()
    built = model(plain) if "spelling" in checks and plain != program else None
    for preset in presets:
        try:
            found = explain(program, preset, made=made, target=targets).relevances
            yield from _compare(program, preset, targets, found)
            if preset in rest:
                yield from _itself(program, preset, targets, found, made, built, checks)
        except Discarded:
            raise
        except Exception as error:
            yield Failure("raises", preset, f"{type(error).__name__}: {str(error)[:300]}")


def known_meaning(program: Program, preset: str) -> bool:
    """Complex numbers have no sign and no stabiliser that RULES.md names: no formula for sums of them but the proportional one."""
    return preset in EXACT or "complex_sums" not in program.shapes()


def _compare(program: Program, preset: str, targets: list[int], found: dict[str, Tensor]) -> Iterator[Failure]:
    if not known_meaning(program, preset):
        return
    expected = oracle(program, preset, targets)
    wrong = off(found, expected)
    if not wrong < TOLERANCE:
        if not stable(program, preset, targets, expected):
            raise Discarded
        text = f"off by {wrong:.3g}: found {_shown(found)}, expected {_shown(expected)}"
        yield Failure("oracle", preset, text, wrong)


def allowed(program: Program, preset: str) -> float:
    """How far another spelling's explanation may be: as far as the table of exceptions says."""
    return max(TOLERANCE, allowance(program, preset))


def _shown(r: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {[round(float(v), 6) for v in value.flatten()[:6]]}" for name, value in r.items())


def _itself(
    program: Program, preset: str, targets: list[int], found: dict[str, Tensor], made: Any, built: Any, checks: Any
) -> Iterator[Failure]:
    """What the engine says of itself must agree with itself."""
    if "again" in checks:
        again = explain(program, preset, made=made, target=targets).relevances
        if off(again, found) != 0:
            yield Failure("again", preset, f"a second call is off by {off(again, found):.3g}")
    if "ledger" in checks or "values" in checks:
        yield from _check_ledger(program, preset, targets, found, made)
    if "row" in checks and program.rows > 1:
        first = {name: value[:1] for name, value in program.inputs().items()}
        alone = explain(program, preset, made=made, inputs=first, target=targets[:1]).relevances
        wrong = off(alone, {name: r[:1] for name, r in found.items()})
        if not wrong < TOLERANCE:
            yield Failure("row", preset, f"row 0 alone is off by {wrong:.3g} from row 0 of the batch")
    if built is not None:
        other = explain(program.plain(), preset, made=built, target=targets).relevances
        wrong = off(found, other)
        if not wrong < allowed(program, preset):
            yield Failure("spelling", preset, f"off by {wrong:.3g} from {program.plain()}")


def _check_ledger(
    program: Program, preset: str, targets: list[int], found: dict[str, Tensor], made: Any
) -> Iterator[Failure]:
    with remembering() as seen, comparing(seen) as wrongs:
        a = explain(program, preset, made=made, target=targets, ledger=True)
    yield from (Failure("values", preset, text) for text in wrongs[:1])
    if not off(a.relevances, found) < TOLERANCE:
        yield Failure("ledger", preset, f"with a ledger the relevance is off by {off(a.relevances, found):.3g}")
    book = a.ledger
    scale = max(sum(e.scale for e in book.entries[:1]), abs(book.total), 1e-12)
    if abs(book.residual) > LEDGER * scale:
        yield Failure("ledger", preset, f"residual {book.residual:.3g} of {scale:.3g}")
    for entry in book.entries:
        unnamed = {
            reason: amount
            for reason, amount in entry.kept.items()
            if reason not in TAKERS and abs(amount) > LEDGER * scale
        }
        if unnamed:
            yield Failure("ledger", preset, f"{entry.op} kept {unnamed}")
        lost = abs(entry.kept.get("rounding", 0.0))
        if lost > LEDGER * max(entry.scale, 1e-12):
            yield Failure(
                "ledger", preset, f"{entry.op} under {entry.rule} calls {lost:.3g} of {entry.scale:.3g} rounding"
            )


class Remembering(TorchFunctionMode):
    """Every value that a forward pass makes, by the autograd node that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[tuple[int, int], tuple[Any, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and getattr(tensor, "grad_fn", None) is not None:
                node = tensor.grad_fn
                with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                    self.made[id(node), tensor.output_nr] = node, tensor.detach().clone()
        return result


@contextmanager
def remembering() -> Iterator[dict[tuple[int, int], tuple[Any, Tensor]]]:
    with Remembering() as mode:
        yield mode.made


@contextmanager
def comparing(seen: dict[tuple[int, int], tuple[Any, Tensor]]) -> Iterator[list[str]]:
    """Compare every value that a rule fetches with what the forward pass made."""
    wrongs: list[str] = []
    take = Values.take

    def compared(self: Values, key: Any) -> Any:
        value = take(self, key)
        if key[0] == "value" and isinstance(value, Tensor):
            node = self.graph.handles[key[1]]
            kept = seen.get((id(node), key[2]))
            if kept is not None and not _equal(value, kept[1]):
                name = type(node).__name__
                wrongs.append(
                    f"output {key[2]} of {name}: fetched {_few(value)}, the forward pass made {_few(kept[1])}"
                )
        return value

    Values.take = compared  # type: ignore[method-assign]
    try:
        yield wrongs
    finally:
        Values.take = take  # type: ignore[method-assign]


def _equal(value: Tensor, made: Tensor) -> bool:
    if value.shape != made.shape:
        return False
    scale = float(made.abs().max()) if made.numel() else 0.0
    return bool((value - made).abs().max() <= 1e-9 * max(scale, 1e-9)) if made.numel() else True


def _few(t: Tensor) -> str:
    return f"{tuple(t.shape)} {[round(float(v.real), 5) for v in t.flatten()[:4]]}"


def check_half(program: Program, presets: Any, targets: list[int]) -> Iterator[Failure]:
    """Finite, and no further from float64 than the oracle in that type (three times, and some of the type's last digits: orders of sums differ)."""
    dtype = HALVES[program.half or "bfloat16"]
    if not _runs(program, dtype):
        return
    for preset in presets:
        if not known_meaning(program, preset):
            continue
        exact = oracle(replace(program, half=None), preset, targets)
        try:
            found = explain(program, preset, dtype, target=targets).relevances
        except Exception as error:
            yield Failure("half", preset, f"{program.half}: {type(error).__name__}: {str(error)[:200]}")
            continue
        if not all(bool(r.isfinite().all()) for r in found.values()):
            yield Failure("half", preset, f"{program.half}: not finite")
            continue
        slow = _slow(program, preset, targets, dtype, exact)
        # what rounding the weights alone does: chance decides which of two roundings is luckier
        nudged = off(oracle(program, preset, targets, nudge=float(torch.finfo(dtype).eps)), exact)
        wrong, limit = off(found, exact), 4 * max(slow, nudged) + 16 * float(torch.finfo(dtype).eps)
        if wrong > limit:
            yield Failure(
                "half",
                preset,
                f"{program.half}: off by {wrong:.3g} from float64, the oracle in that type by {slow:.3g}",
            )


def _runs(program: Program, dtype: torch.dtype) -> bool:
    """Has torch kernels of this type for all of it (Fourier transforms have none), and is the result finite?"""
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in program.inputs().items()}
    try:
        with torch.no_grad():
            return bool(model(program, dtype)(**inputs).isfinite().all())
    except RuntimeError:
        return False


def _slow(program: Program, preset: str, targets: list[int], dtype: torch.dtype, exact: dict[str, Tensor]) -> float:
    """How far the oracle itself is off in that type; as far as one likes where rounding may make another value the largest."""
    if "chosen_by_value" in program.shapes():
        return float("inf")
    return off(oracle(program, preset, targets, dtype), exact)


def shrink(program: Program, failure: Failure, limit: int = 200) -> Program:
    """A smaller program that fails in the same way."""
    for _ in range(limit):
        for one in smaller(program):
            if fails(one, failure):
                program = one
                break
        else:
            return program
    return program


def fails(program: Program, failure: Failure) -> bool:
    """Does it fail the same check under the same preset?"""
    try:
        return any(f.check == failure.check for f in check(program, [failure.preset], [failure.check]))
    except Discarded:
        return False

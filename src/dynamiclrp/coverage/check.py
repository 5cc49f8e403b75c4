"""Explain one case and say what was found: coverage, finite, repeatable, the same alone and in a batch, accounts closed.

In: a `Case`. Out: a `Finding`, plain data that can be written down. An explanation that fails is a finding, not an error.
"""

from __future__ import annotations

import copy
import dataclasses
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

import dynamiclrp as dlrp
from dynamiclrp.outputs import unwrap

from .case import Case, last_tensor

TOLERANCE = 1e-3  # float32, relative to the largest relevance


@dataclass
class Finding:
    """What is known about one model. `None` means: not tried, or not applicable."""

    zoo: str
    name: str
    model: str = ""
    built: bool = False
    why_not_built: str = ""
    explained: bool = False
    refusal: str = ""  # why nothing can be explained here: the model's own doing, said by an error with a remedy
    error: str = ""  # of the explanation
    where: str = ""  # the innermost lines of its traceback
    nodes: int = 0
    live: int = 0
    unknown: dict[str, int] = field(default_factory=dict)
    ops: dict[str, int] = field(default_factory=dict)
    coverage: float | None = None
    finite: bool | None = None
    repeats: bool | None = None
    batch_error: float | None = None  # row by row against the batch, relative
    batch_note: str = ""
    way_error: float | None = None  # without a ledger against with one, relative
    residual: float | None = None  # of the ledger, relative
    kept: dict[str, float] = field(default_factory=dict)  # by reason, relative to the seed
    unexplained: list[str] = field(default_factory=list)  # nodes that claim to conserve and do not
    dynamic: str = ""  # "" not tried, "ok", "float64: …" where float32 overflows, or the error
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Everything that was tried holds."""
        return self.built and not self.faults

    @property
    def faults(self) -> list[str]:
        """What is wrong with the explanation, if anything."""
        if not self.built:
            return []
        found = [self.error] if self.error else []
        found += ["no rule for " + ", ".join(self.unknown)] if self.unknown and not self.error else []
        found += ["not finite"] if self.finite is False else []
        found += ["second run differs"] if self.repeats is False else []
        if self.batch_error is not None and self.batch_error > TOLERANCE:
            found.append(f"batch differs from its rows by {self.batch_error:.1e}")
        if self.way_error is not None and self.way_error > TOLERANCE:
            found.append(f"the ledger's own run differs by {self.way_error:.1e}")
        if self.residual is not None and self.residual > TOLERANCE:
            found.append(f"ledger open by {self.residual:.1e}")
        found += [f"conserving rule that does not conserve: {self.unexplained[0]}"] if self.unexplained else []
        if self.dynamic not in ("", "ok") and not self.dynamic.startswith("float64"):
            found.append(f"dynamic: {self.dynamic}")
        return found

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"good": self.good, "faults": self.faults}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Finding:
        known = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
        return cls(**known)


def check(case: Case, finding: Finding, *, dynamic: bool = True) -> Finding:
    """Fill in what can be learnt by explaining the case."""
    start = time.perf_counter()
    finding.built, finding.model = True, case.note
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _check(case, finding)
    except dlrp.OpaqueGraphError as error:
        finding.refusal = say(error)
    except (dlrp.NoInputError, dlrp.NoGraphError) as error:
        if _has_path(case):
            finding.error, finding.where = say(error), _where(error)
        else:
            finding.refusal = (
                "the output is not differentiable with respect to the input: it is made from codes or indices, or the "
                "model detaches its features"
            )
    except Exception as error:
        finding.error, finding.where = say(error), _where(error)
    if dynamic and finding.explained:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            finding.dynamic = under_dynamic(case)
    finding.seconds = round(time.perf_counter() - start, 3)
    return finding


def under_dynamic(case: Case) -> str:
    """`ok`, what float64 made of it where float32 overflows, or the error.

    The paper's identity rules hand relevance to values that may cancel (LRP-0 then divides by them), so on random weights it
    may grow from layer to layer, beyond float32 in deep networks. That is the rule, not the engine: what counts is that
    float64 takes it.
    """
    try:
        return "ok" if _finite(_explain_dynamic(case).relevances) else "not finite"
    except dlrp.NonFiniteError as error:
        try:
            found = _explain_dynamic(in_double(case))
            largest = max(float(r.abs().max()) for r in found.relevances.values())
            return f"float64: float32 overflows, relevance grows to {largest:.0e} for a score of {float(found.seed.abs().max()):.0e}"
        except Exception:
            return say(error)
    except Exception as error:
        return say(error) + " @ " + _where(error)


def _explain_dynamic(case: Case) -> dlrp.Attribution:
    try:
        return dlrp.explain(case.model, **case.inputs, preset="dynamic")
    except dlrp.TargetError:
        return dlrp.explain(case.model, **case.inputs, preset="dynamic", target=all_of_it)


def in_double(case: Case) -> Case:
    """A copy of the case in float64."""
    with torch.no_grad():  # what some models keep of their last run can only be copied if it has no graph
        case.model(**case.inputs)
    inputs: dict[str, Any] = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in case.inputs.items()
    }
    return dataclasses.replace(case, model=copy.deepcopy(case.model).double(), inputs=inputs)


def _check(case: Case, finding: Finding) -> None:
    explainer = dlrp.Explainer(case.model)
    report = explainer.inspect(**case.inputs)
    finding.nodes, finding.live = report.nodes, report.live
    finding.unknown, finding.coverage = report.unknown, report.coverage
    if report.plan is not None:
        for step in report.plan.steps:
            finding.ops[step.name] = finding.ops.get(step.name, 0) + 1
    torch.manual_seed(0)
    target: Any = None
    try:
        first = explainer(**case.inputs)
    except dlrp.TargetError:  # a map of scores, or a zero at the default: explain the output as a whole
        target = all_of_it
        first = explainer(**case.inputs, target=target)
    finding.explained, finding.finite = True, _finite(first.relevances)
    torch.manual_seed(0)
    second = explainer(**case.inputs, target=target)
    finding.repeats = all(torch.equal(first.relevances[k], second.relevances[k]) for k in first.relevances)
    if case.batched:
        _rows(case, explainer, first, finding)
        if finding.batch_error is not None and finding.batch_error > TOLERANCE:
            _rows_in_double(case, finding, target)
    torch.manual_seed(0)
    watched = explainer(**case.inputs, target=target, ledger=True)
    finding.way_error = difference(first, watched)
    if finding.way_error > TOLERANCE:
        finding.way_error = _ways_in_double(case, target, finding.way_error)
    book = watched.ledger
    assert isinstance(book, dlrp.Ledger)
    finding.residual = abs(book.residual) / _scale(book)
    finding.kept = {reason: amount / (abs(book.total) or 1.0) for reason, amount in book.kept.items()}
    finding.unexplained = _unexplained(book)
    if finding.unexplained:  # rounding, as of a value that is the small difference of two sums, goes away in float64
        exact = in_double(case)
        book = dlrp.explain(exact.model, **exact.inputs, target=target, ledger=True).ledger
        assert isinstance(book, dlrp.Ledger)
        finding.unexplained = _unexplained(book)


def _scale(book: dlrp.Ledger) -> float:
    return max(abs(book.total), max((entry.scale for entry in book.entries), default=0.0), 1e-30)


def _unexplained(book: dlrp.Ledger) -> list[str]:
    """Nodes that claim to conserve and do not."""
    scale = _scale(book)
    return [
        f"{e.op} (node {e.node}) under {e.rule}: off by {e.error:.1e}"
        for e in book.entries
        if e.conserves and e.error > TOLERANCE and e.scale > 1e-6 * scale
    ]


def _has_path(case: Case) -> bool:
    """Does autograd itself see a way from a float input, or from any token ids, to the output?"""
    floats = {k: v for k, v in case.inputs.items() if isinstance(v, Tensor) and v.is_floating_point()}
    if len(floats) < sum(isinstance(v, Tensor) for v in case.inputs.values()):
        return True
    leaves = {name: value.clone().requires_grad_() for name, value in floats.items()}
    output = last_tensor(case.model(**case.inputs | leaves))
    if output is None or not output.requires_grad:
        return False
    found = torch.autograd.grad(output.sum(), list(leaves.values()), allow_unused=True)
    return any(g is not None for g in found)


def all_of_it(output: Any) -> Tensor:
    """The sum of a row's output; of a map of scores the largest, since sums of what was normalised are zero."""
    output = unwrap(output)
    if output.dim() > 3:
        return output.flatten(1).amax(1)
    return output.reshape(len(output), -1).sum(1) if output.dim() else output


def difference(one: dlrp.Attribution, other: dlrp.Attribution) -> float:
    """Of two relevances, relative to the largest."""
    return max(
        float((one.relevances[name] - relevance).abs().max()) / max(float(relevance.abs().max()), 1e-12)
        for name, relevance in other.relevances.items()
    )


def _ways_in_double(case: Case, target: Any, in_single: float) -> float:
    """Rounding goes away in float64, a mistake does not; what does not run there counts as it was."""
    try:
        exact = in_double(case)
        explainer = dlrp.Explainer(exact.model)
        found = []
        for ledger in (False, True):
            torch.manual_seed(0)
            found.append(explainer(**exact.inputs, target=target, ledger=ledger))
    except Exception:
        return in_single
    return difference(*found)


def _rows_in_double(case: Case, finding: Finding, target: Any) -> None:
    """Tell an ill-conditioned model from a mistake: rounding goes away in float64, a mistake does not."""
    in_single = finding.batch_error
    try:
        exact = in_double(case)
        torch.manual_seed(0)
        explainer = dlrp.Explainer(exact.model)
        _rows(exact, explainer, explainer(**exact.inputs, target=target), finding)
    except Exception as error:
        finding.batch_error, finding.batch_note = in_single, f"does not run in float64: {say(error)[:120]}"
    else:
        finding.batch_note = f"float64; in float32 rounding alone is {in_single:.0e}"


def _rows(case: Case, explainer: dlrp.Explainer, whole: dlrp.Attribution, finding: Finding) -> None:
    if whole.seed.dim() == 0 or len(whole.seed) != 2 or any(len(r) != 2 for r in whole.relevances.values()):
        finding.batch_note = "output or inputs have no rows"
        return
    worst = 0.0
    for row in range(2):
        torch.manual_seed(0)
        seed = whole.seed[row : row + 1]
        try:
            with torch.no_grad():
                case.model(**case.row(row))
        except Exception as error:
            finding.batch_note = f"the model does not take a single row: {say(error)[:120]}"
            return
        try:
            single = explainer(**case.row(row), target=seed if seed.any() else None)
        except dlrp.TargetError as error:
            finding.batch_note = f"the output of one row cannot take the batch's seed: {error}"
            return
        drift = float((single.prediction - whole.prediction[row : row + 1]).abs().max())
        if drift > TOLERANCE * max(float(whole.prediction.abs().max()), 1e-9):
            finding.batch_note = f"the model itself predicts otherwise alone (by {drift:.1e})"
            return
        for name, relevance in single.relevances.items():
            expected = whole.relevances[name][row : row + 1]
            scale = max(float(expected.abs().max()), 1e-12)
            worst = max(worst, float((relevance - expected).abs().max()) / scale)
    finding.batch_error = worst


def _finite(relevances: dict[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(r).all()) for r in relevances.values())


def say(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno} {f.name}" for f in reversed(frames[-4:]))

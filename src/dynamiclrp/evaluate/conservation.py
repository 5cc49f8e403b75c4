"""Does relevance add up? The sum of relevance against the explained score, and for our presets who kept the rest.

In: a model, inputs, methods. Out: a `Conservation` per method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..explain import Explainer
from ..outputs import unwrap
from .methods import Ours, explained_score, find_methods
from .metrics import Interval, bootstrap
from .subject import PLAIN, Inputs, Subject, read_targets


@dataclass(frozen=True, eq=False)
class Conservation:
    """One method's sums. `ratios` is (sum of relevance of all inputs) / score, one per row; 1 where all of it arrives.

    For our presets `kept` says what share of the total score stayed elsewhere, by reason, and `residual` is what the
    ledger cannot explain (rounding); both are None for other methods.
    """

    method: str
    ratios: Tensor
    kept: Mapping[str, float] | None
    residual: float | None

    @property
    def interval(self) -> Interval:
        return bootstrap(self.ratios)

    def __str__(self) -> str:
        text = f"{self.method}: sum of relevance / score = {self.interval}"
        if self.kept is None:
            return text
        reasons = ", ".join(f"{reason} {share:.3g}" for reason, share in list(self.kept.items())[:4])
        return f"{text}; kept elsewhere: {reasons or 'nothing'}; unexplained {self.residual:.2g}"


def conservation(
    model: nn.Module,
    inputs: Any,
    methods: Any = ("default",),
    targets: Any = None,
    *,
    input: str | None = None,
    embedding: str | None = None,
) -> list[Conservation]:
    """How much of the score each method hands to the inputs, and where the rest went.

    >>> import torch
    >>> (found,) = conservation(torch.nn.Linear(4, 3, bias=False), torch.randn(5, 4), ["epsilon"])
    >>> torch.allclose(found.ratios, torch.ones(5, dtype=torch.float64), atol=1e-4)
    True
    """
    subject = Subject(model, measure="logit", embedding=embedding)
    batch = subject.read(inputs, input)
    wanted = subject.predict(batch) if targets is None else read_targets(targets, len(batch))
    with torch.no_grad():
        scores = subject.score(subject.call(batch, wanted), batch, wanted).cpu()
    found = []
    for method in find_methods(methods):
        if isinstance(method, Ours):
            found.append(_with_ledger(method, subject, batch, wanted, scores))
        else:
            sums = method.relevance(subject, batch, wanted, range(len(batch))).cpu().double().flatten(1).sum(1)
            found.append(Conservation(method.name, sums / scores, None, None))
    return found


def _with_ledger(method: Ours, subject: Subject, batch: Inputs, targets: Tensor, scores: Tensor) -> Conservation:
    values = subject.arguments(batch, targets)
    args = (values.pop(PLAIN),) if batch.name == PLAIN else ()
    explainer = Explainer(subject.model, method.preset)  # type: ignore[arg-type]  # Ours refuses anything but a Module
    result = explainer(*args, target=explained_score(subject, batch, targets), ledger=True, output=unwrap, **values)
    sums = torch.stack([r.cpu().double().flatten(1).sum(1) for r in result.relevances.values()]).sum(0)
    ledger = result.ledger
    assert ledger is not None
    total = ledger.total or 1.0
    kept = {reason: share / total for reason, share in ledger.kept.items()}
    return Conservation(method.name, sums / scores, kept, ledger.residual / total)

"""What holds for the explanation of any model: the tests of hard architectures call this before they compare values."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dynamiclrp as dlrp
from oracles import error

PRESETS = ("attnlrp", "cp-lrp", "gamma", "epsilon-plus", "dynamic")


def holds(
    model: nn.Module,
    given: dict[str, Any],
    presets: Sequence[str] = PRESETS,
    *,
    rows: bool = True,
    tolerance: float = 1e-6,
    **options: Any,
) -> dict[str, dict[str, Tensor]]:
    """Explain the model under each preset, and check what must be true of every explanation. Relevances by preset.

    `given` are arguments by name; tensors among them are batches of rows, unless `rows=False` says otherwise. Every node has
    a rule, all is finite, a second call is equal, a batch equals its rows, nothing is lost from the books.
    """
    found = {}
    for preset in presets:
        explainer = dlrp.Explainer(model, preset)
        report = explainer.inspect(**given)
        assert report.coverage == 1.0, report.unknown
        first = explainer(**given, **options)
        for name, r in first.relevances.items():
            assert torch.isfinite(r).all(), f"{preset}: relevance of {name} is not finite"
        assert any(r.any() for r in first.relevances.values()), f"{preset}: no relevance at all"
        again = explainer(**given, **options)
        assert all(torch.equal(r, again.relevances[name]) for name, r in first.relevances.items()), f"{preset}: differs"
        if rows:
            _rows(explainer, given, first, tolerance)
        _books(explainer(**given, **options, ledger=True).ledger, preset)
        found[preset] = dict(first.relevances)
    return found


def _rows(explainer: dlrp.Explainer, given: dict[str, Any], whole: dlrp.Attribution, tolerance: float) -> None:
    for row in range(len(whole.prediction)):
        alone = {k: v[row : row + 1] if isinstance(v, Tensor) and v.dim() else v for k, v in given.items()}
        single = explainer(**alone, target=whole.seed[row : row + 1])
        for name, r in single.relevances.items():
            expected = whole.relevances[name][row : row + 1]
            assert (not expected.any() and not r.any()) or error(r, expected) < tolerance, f"row {row} of {name}"


def _books(book: Any, preset: str) -> None:
    assert isinstance(book, dlrp.Ledger)
    scale = max([abs(book.total), *(entry.scale for entry in book.entries)])
    assert abs(book.residual) < 1e-6 * scale, f"{preset}: books open by {book.residual}"
    assert "uncounted" not in book.kept, f"{preset}: values are lost"
    for entry in book.entries:
        assert not entry.conserves or entry.error < 1e-6 or entry.scale < 1e-9 * scale, f"{preset}: {entry}"

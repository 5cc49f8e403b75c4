"""`make same` and `make beside`: they see a difference where there is one, and leave nothing behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# isort: off
import oracles  # noqa: F401  mends torchvision before transformers imports it

# isort: on

ROOT = Path(__file__).parent.parent
NAMES = ("beside", "cases", "same", "sides")


@pytest.fixture
def same(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import same

    yield same
    for name in NAMES:
        sys.modules.pop(name, None)


def found(scale: float = 1.0, **accounts: float) -> dict:
    made = {"relevance": {"x": scale * torch.tensor([1.0, -2.0], dtype=torch.float64)}, "score": torch.ones(1)}
    return made | ({"accounts": accounts} if accounts else {})


def made(**changed: dict) -> dict:
    """What one side says; each way may be changed."""
    ways = {"float64": found(), "ledger": found(bias=0.5), "float32": found(1 + 1e-7), "nudged": found(1 + 1e-15)}
    return {"built": 1.0} | {("dynamic", way): answer for way, answer in (ways | changed).items()}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"float64": found(1 + 1e-9)}, "float64"),
        ({"ledger": found(bias=0.6)}, "ledger"),
        ({"ledger": found(taker=0.5)}, "ledger"),
        ({"float32": found(1 + 1e-5)}, "float32"),
        ({"float64": {"error": "NonFiniteError: relevance"}}, "float64: an answer → NonFiniteError"),
        ({"float64": {**found(), "score": 2 * torch.ones(1)}}, "float64"),
        ({"float64": {**found(), "relevance": {"y": torch.ones(2)}}}, "float64"),
        ({"float64": found(float("nan"))}, "float64"),
    ],
)
def test_what_differs_is_said(same, changed, says):
    assert list(same.differences(made(), made())) == []
    (difference,) = same.differences(made(**changed), made())
    what, how, fault = difference
    assert (
        fault
        and f"dynamic, {what}: {how}".startswith("dynamic, ")
        and says in f"{what}: {how}".replace("dynamic, ", "")
    )


def test_rounding_is_told_from_a_difference(same):
    ill = {"nudged": found(1 + 1e-8)}  # rounding alone moves it so far
    ((_, how, fault),) = same.differences(made(**ill, float64=found(1 + 5e-8)), made(**ill))
    assert not fault and "rounding alone" in how
    ((_, _, fault),) = same.differences(made(**ill, float64=found(1 + 5e-7)), made(**ill))
    assert fault


def test_errors_that_agree_are_the_same(same):
    error = {way: {"error": "NonFiniteError: relevance"} for way in ("float64", "ledger", "float32", "nudged")}
    assert list(same.differences(made(**error), made(**error))) == []


def test_other_weights_and_models_that_cannot_be_built_are_said(same):
    ((_, how, fault),) = same.differences({**made(), "built": 2.0}, made())
    assert fault and "others" in how
    ((_, how, fault),) = same.differences(made(), {"not built": "ImportError: timm"})
    assert fault and "timm" in how


def test_casts_to_float32_are_left_out(same):
    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = x.to(torch.float32)
            return (wide.float() * torch.softmax(x, -1, dtype=torch.float32)).to(x.dtype)

    x = torch.randn(3, dtype=torch.float64)
    torch.testing.assert_close(same.in_float64(Norm())(x), x * x.softmax(-1), rtol=1e-14, atol=0)


def test_a_wrong_rule_is_found(same, tmp_path, capfd):
    """Another gamma in a copy of the source: from the two processes to the exit code."""
    shutil.copytree(ROOT / "src" / "dynamiclrp", tmp_path / "src" / "dynamiclrp")
    rules = tmp_path / "src" / "dynamiclrp" / "presets.py"
    rules.write_text(rules.read_text().replace("gamma: float = 0.5, last", "gamma: float = 0.501, last"))
    assert same.compare(str(tmp_path), ["ResNet-50", "GPT-2"], ["default", "attnlrp"], "cpu") == 3
    said = capfd.readouterr().out
    assert "DIFFERS default, float64" in said and "attnlrp" not in said
    assert "GPT-2                          same" in said


def test_an_unknown_commit_and_unknown_models_are_refused():
    def run(*words: str) -> str:
        made = subprocess.run([sys.executable, str(ROOT / "bench" / "same.py"), *words], capture_output=True, text=True)
        assert made.returncode == 1
        return made.stderr

    assert "neither a commit nor a folder" in run("--since", "nothing-of-the-kind", "--only", "GPT-2")
    assert "no model is called so" in run("--only", "nothing of the kind")
    assert "known are" in run("--presets", "nothing")


def test_costs_are_compared_in_turns(same, tmp_path):
    """Both sides the same code: a ratio near 1, and memory that is equal."""
    import beside
    from sides import Side

    sides = {name: Side(ROOT / "src", [beside.__file__, "--device", "cpu"], 1) for name in ("new", "old")}
    try:
        row = beside.row(sides, "a small Llama, batch 1\tattnlrp", rounds=1, patience=120)
    finally:
        for side in sides.values():
            side.close()
    assert 0.5 < row["times"] < 2 and row["memory"] == row["memory was"] and row["cost"] > 0.5


def test_every_case_is_named_once_and_can_be_built(same):
    import cases

    names = cases.names(published=False)
    assert len(names) == len(set(names)) == 60 and set(cases.QUICK) <= set(names)
    assert len(cases.names(published=True)) == 15
    for name in ("state space", "Whisper-small"):
        case = cases.build(name)
        assert case.model(**case.inputs) is not None

"""What is explained is said: targets that are not linear in the output, and operations without a rule.

`a.score` is gradient x output of a callable target. Where that is another number than the target's value, a `TargetWarning`
says so, and the result's `notes` keep it.
"""

import warnings

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp

torch.set_num_threads(1)

TARGETS = {
    "probability": lambda y: y.softmax(-1)[:, 0],
    "log-probability": lambda y: y.log_softmax(-1)[:, 0],
    "square": lambda y: y[:, 0] ** 2,
    "exponential": lambda y: y[:, 0].exp(),
    "distance": lambda y: (y - 1).square().sum(-1),
    "constant added": lambda y: y[:, 0] + 10,
}


def explained(target):
    """Is the score the target's value, and if not, was the user told?"""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3).eval(), torch.randn(2, 4)
    with torch.no_grad():
        value = target(model(x))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            score = dlrp.explain(model, x, target=target, preset="attnlrp").score
        except dlrp.TargetError:
            return True, ""
    same = torch.allclose(score, value, rtol=1e-4, atol=1e-5)
    return same or bool(told), f"score {score.tolist()}, the target's value is {value.tolist()}, no word of it"


@pytest.mark.parametrize("name", TARGETS)
def test_score_is_the_target_or_the_user_is_told(name):
    good, what = explained(TARGETS[name])
    assert good, what


def test_control_a_linear_target():
    """Right today: must stay so, without a warning."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3).eval(), torch.randn(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a = dlrp.explain(model, x, target=lambda y: y[:, 0] - 2 * y[:, 1], preset="attnlrp")
    y = model(x).detach()
    torch.testing.assert_close(a.score, y[:, 0] - 2 * y[:, 1], rtol=1e-4, atol=1e-5)


def nonlinear(**options):
    torch.manual_seed(0)
    with pytest.warns(dlrp.TargetWarning, match="not linear.*Remedy"):
        return dlrp.explain(nn.Linear(4, 3).eval(), torch.randn(2, 4), target=TARGETS["probability"], **options)


@pytest.mark.parametrize("ledger", [False, True])
def test_the_result_keeps_it(ledger):
    a = nonlinear(ledger=ledger)
    assert "not linear" in a.notes[0] and "not linear" in repr(a) and a.account.notes == a.notes
    assert a.to_dict()["notes"] == list(a.notes)


def test_a_file_keeps_it(tmp_path):
    pytest.importorskip("safetensors")
    a = nonlinear()
    a.save(tmp_path / "a.safetensors")
    assert dlrp.load(tmp_path / "a.safetensors").notes == a.notes


def test_each_of_several_targets_is_judged():
    torch.manual_seed(0)
    with pytest.warns(dlrp.TargetWarning) as told:
        plain, bent = dlrp.explain(nn.Linear(4, 3), torch.randn(2, 4), targets=[0, TARGETS["square"]])
    assert len(told) == 1 and told[0].filename == __file__
    assert not plain.notes and bent.notes


def test_rows_that_cancel_are_seen():
    """A constant added to one row and taken from the other leaves the sum as it was."""
    with pytest.warns(dlrp.TargetWarning):
        dlrp.explain(nn.Linear(4, 3), torch.randn(2, 4), target=lambda y: y[:, 0] + torch.tensor([5.0, -5.0]))


LINEAR = {
    "difference": lambda y: y[:, 0] - y[:, 1],
    "mean": lambda y: y.mean(-1),
    "one number": lambda y: y[:, 2].sum(),
    "several numbers": lambda y: y[:, :2],
    "largest": lambda y: y.max(-1).values,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LINEAR)
def test_control_linear_targets(name, dtype):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a = dlrp.explain(nn.Linear(40, 30).to(dtype), torch.randn(8, 40, dtype=dtype), target=LINEAR[name])
    assert not a.notes and "notes" not in a.to_dict()


class Strange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, s):
        return s * 2


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(4, 3)

    def forward(self, x):
        return self.map(Strange.apply(x))


def test_operations_by_gradient_are_said():
    a = dlrp.explain(Odd(), torch.randn(2, 4), on_missing="gradient")
    (note,) = a.notes
    assert "1 x Strange" in note and "plain gradient" in note and "on_missing='gradient'" in note
    assert note in repr(a) and a.account.notes == a.notes

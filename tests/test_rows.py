"""Rows: a model that returns one score per row, of shape [rows], and batches whose rows are not the first dimension.

An output of one dimension holds a score for each row where an explained batch has as many rows, else the scores of one row.
`batch_dim` says where rows stand in other layouts, as of recurrent nets.
"""

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp

torch.set_num_threads(1)


class Scores(nn.Module):
    """A regression. `keep` the last dimension, or squeeze it away."""

    def __init__(self, keep):
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.head = nn.Linear(5, 8), nn.Linear(8, 1)
        self.keep = keep

    def forward(self, x):
        y = self.head(self.hidden(x).relu())
        return y if self.keep else y.squeeze(-1)


def rows():
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(1)).double()


def explained(target, preset):
    wanted = dlrp.explain(Scores(keep=True).double().eval(), rows(), target=0, preset=preset).relevance
    return dlrp.explain(Scores(keep=False).double().eval(), rows(), target=target, preset=preset).relevance, wanted


@pytest.mark.parametrize("preset", ["default", "attnlrp", "epsilon-plus"])
@pytest.mark.parametrize("target", [None, 0], ids=["no target", "target 0"])
def test_every_row_is_explained(target, preset):
    found, wanted = explained(target, preset)
    empty = int((found.abs().sum(1) == 0).sum())
    assert empty == 0, f"{empty} of {len(found)} rows have no relevance at all"
    torch.testing.assert_close(found, wanted)


def test_the_score_has_one_number_per_row():
    a = dlrp.explain(Scores(keep=False).double().eval(), rows())
    assert int((a.score != 0).sum()) == 8, f"score {a.score.tolist()}"


def test_control_one_row_of_several_classes():
    """Without a dimension of rows the largest class is meant."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double().eval()
    x = rows()[0]
    whole = dlrp.explain(model, x[None]).relevance[0]
    torch.testing.assert_close(dlrp.explain(model, x).relevance, whole)


def test_a_single_row_has_one_score():
    model, x = nn.Linear(3, 3).eval(), torch.randn(3)
    a = dlrp.explain(model, x)
    assert len(a) == 1 and a.score.shape == (1,)
    assert float(a.score) == pytest.approx(float(model(x).max().detach()), rel=1e-5)


def test_rows_are_rows_everywhere():
    """In the length, in single rows, in files and as data; several targets, a callable and a graph of one's own too."""
    model, x = Scores(keep=False).double().eval(), rows()
    a = dlrp.explain(model, x)
    assert len(a) == 8 and a.score.shape == (8,)
    for row in (0, 7):
        torch.testing.assert_close(a[row].relevance, dlrp.explain(model, x[row : row + 1]).relevance)
    assert len(a.to_dict()["rows"]) == 8
    for other in dlrp.explain(model, x, targets=[None, 0, [0] * 8, (0,), lambda y: y]):
        torch.testing.assert_close(other.relevance, a.relevance)
    x = x.requires_grad_()
    torch.testing.assert_close(dlrp.relevance(model(x), x)[0], a.relevance)


def test_rows_stay_rows_in_a_file(tmp_path):
    pytest.importorskip("safetensors")
    dlrp.explain(Scores(keep=False).double().eval(), rows()).save(tmp_path / "a.safetensors")
    assert len(dlrp.load(tmp_path / "a.safetensors")) == 8


def test_a_class_that_a_score_per_row_does_not_have():
    with pytest.raises(dlrp.TargetError, match="target 1 is out of range"):
        dlrp.explain(Scores(keep=False).double().eval(), rows(), target=1)


class Ratings(nn.Module):
    """One id is a row: matrix factorisation."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(9, 4), nn.Embedding(9, 4)

    def forward(self, user, item):
        return (self.users(user) * self.items(item)).sum(-1)


def test_a_row_may_be_one_id():
    torch.manual_seed(0)
    model, user, item = Ratings(), torch.tensor([1, 5, 2]), torch.tensor([3, 3, 8])
    a = dlrp.explain(model, user, item)
    torch.testing.assert_close(a.score, model(user, item).detach())
    assert all((relevance != 0).all() for relevance in a.relevances.values())


class Recurrent(nn.Module):
    """[positions, rows, features] → the classes of each row, after the last position or at every one."""

    def __init__(self, last=True):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head, self.last = nn.RNN(3, 6), nn.Linear(6, 4), last

    def forward(self, x):
        y, _ = self.cell(x)
        return self.head(y[-1] if self.last else y)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("positions", [5, 2], ids=["longer", "as long as there are rows"])
def test_rows_of_a_second_dimension(last, positions):
    model, x = Recurrent(last).eval(), torch.randn(positions, 2, 3, generator=torch.Generator().manual_seed(1))
    a = dlrp.explain(model, x, target=[1, 3], batch_dim=1)
    assert len(a) == 2 and a.score.shape == (2,)
    for row, target in enumerate((1, 3)):
        alone = dlrp.explain(model, x[:, row : row + 1], target=target, batch_dim=1)
        torch.testing.assert_close(a[row].relevance[0], alone.relevance[:, 0])
        torch.testing.assert_close(alone[0].relevance, a[row].relevance)
        assert a[row].target == target and a[row].relevance.shape == (1, positions, 3)
        assert len(a[row]) == 1 and torch.equal(a[row][0].relevance, a[row].relevance)
    assert [part.row for part in a.parts()] == [0] * positions * 3 + [1] * positions * 3


def test_rows_that_no_input_has_are_asked_for():
    a = dlrp.explain(Recurrent().eval(), torch.randn(5, 2, 3), target=1)
    with pytest.raises(ValueError, match="batch_dim=1"):
        a[1]
    with pytest.raises(IndexError, match="rows of the output"):
        a[2]


@pytest.mark.parametrize("wrong", [-1, 3, True, "x"])
def test_a_dimension_that_is_none(wrong):
    with pytest.raises(dlrp.TargetError, match="batch_dim"):
        dlrp.explain(Recurrent(last=False).eval(), torch.randn(5, 2, 3), target=1, batch_dim=wrong)

"""Targets that come from numpy, pandas and torch: `logits.numpy().argmax()`, labels of a data set, a column of a frame.

They get what the same number in Python gets, and files keep them; what is no integer is refused.
"""

import numpy as np
import pytest
import torch
from torch import nn

import dynamiclrp as dlrp

torch.set_num_threads(1)

TARGETS = {
    "a number": (np.int64(3), 3),
    "a number of 32 bits": (np.int32(3), 3),
    "an array": (np.array([3, 1]), [3, 1]),
    "a list of numbers": (list(np.array([3, 1])), [3, 1]),
    "an index": ((np.int64(3),), (3,)),
    "an array without a dimension": (np.array(3), 3),
    "a list of torch's numbers": ([torch.tensor(3), torch.tensor(1)], [3, 1]),
    "an index of torch's numbers": ((torch.tensor(3),), (3,)),
    "small unsigned numbers": (np.array([3, 1], dtype=np.uint8), [3, 1]),
}


def relevance(target):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)).eval()
    return dlrp.explain(model, torch.randn(2, 6, generator=torch.Generator().manual_seed(1)), target=target).relevance


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_of_numpy_is_a_target(name):
    given, plain = TARGETS[name]
    torch.testing.assert_close(relevance(given), relevance(plain))


@pytest.mark.parametrize("target", [3, [3, 1], (3,), torch.tensor(3), torch.tensor([3, 1])], ids=str)
def test_control_targets_of_python_and_torch(target):
    assert relevance(target).abs().sum() > 0


def test_columns_of_a_frame():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"label": [3, 1]})
    torch.testing.assert_close(relevance(frame["label"]), relevance([3, 1]))
    torch.testing.assert_close(relevance(frame.loc[0, "label"]), relevance(3))
    torch.testing.assert_close(relevance(frame["label"].astype("Int64")), relevance([3, 1]))


def test_an_array_of_floats_is_a_seed():
    seed = np.random.default_rng(0).normal(size=(2, 5)).astype("float32")
    torch.testing.assert_close(relevance(seed), relevance(torch.tensor(seed)))


def test_several_targets():
    torch.manual_seed(0)
    found = dlrp.explain(nn.Linear(6, 5), torch.randn(2, 6), targets=np.array([0, 4]))
    assert [a.target for a in found] == [0, 4]


def test_a_file_keeps_it(tmp_path):
    pytest.importorskip("safetensors")
    a = dlrp.explain(nn.Linear(6, 5), torch.randn(2, 6), target=np.array([0, 4]))
    a.save(tmp_path / "a.safetensors")
    assert dlrp.load(tmp_path / "a.safetensors").target == a.target == [0, 4]


@pytest.mark.parametrize(
    "target",
    [np.bool_(True), np.array([True, False]), np.float64(1), torch.tensor(True), [np.bool_(True), 1]],
    ids=repr,
)
def test_no_integer_is_refused(target):
    with pytest.raises(dlrp.TargetError, match="int"):
        relevance(target)

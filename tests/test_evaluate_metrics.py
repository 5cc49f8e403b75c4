"""Metrics of curves by hand; intervals that hold what they say."""

import pytest
import torch

from dynamiclrp import evaluate as ev
from dynamiclrp.errors import EvaluationError


def curves(fractions, morf, lerf) -> ev.Curves:
    one = [torch.tensor(values, dtype=torch.float64) for values in (fractions, morf, lerf)]
    return ev.Curves((one[0],), (one[1],), (one[2],))


def test_eraser_reads_the_curves_where_its_bins_are():
    """On straight lines the values at every bin are known: f falls from 1 to 0 (MoRF) and is 1 until 0.5 (LeRF)."""
    found = curves([0, 0.5, 1], [1.0, 0.5, 0.0], [1.0, 1.0, 0.0])
    bins = [0.01, 0.05, 0.1, 0.2, 0.5]
    assert found.metric("eraser_comprehensiveness").item() == pytest.approx(sum(bins) / 5)
    # keeping the top q is LeRF at 1 - q, where the curve is 2q
    assert found.metric("eraser_sufficiency").item() == pytest.approx(sum(1 - 2 * q for q in bins) / 5)


def test_the_scale_of_the_paper_is_four_times_the_mean_gap():
    found = curves([0, 1], [1.0, 0.0], [1.0, 0.0])
    assert found.metric("comprehensiveness").item() == pytest.approx(0.5)
    for name in ("abpc", "comprehensiveness", "sufficiency"):
        assert found.metric(f"{name}_paper").item() == pytest.approx(4 * found.metric(name).item())
    assert ev.PAPER_SCALE == 4


def test_uneven_last_steps_weigh_what_they_span():
    """Ten units in steps of four: points at 0, 0.4, 0.8, 1."""
    found = curves([0, 0.4, 0.8, 1], [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0])
    assert found.metric("abpc").item() == pytest.approx(0.4 * 0.5 + 0.4 + 0.2 * 0.5)


def test_curves_of_different_lengths_average_on_one_grid():
    a = curves([0, 1], [1.0, 0.0], [1.0, 0.0])
    b = curves([0, 0.5, 1], [1.0, 0.0, 0.0], [1.0, 1.0, 0.0])
    grid, morf, lerf = (a + b).mean(points=5)
    assert grid.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert morf.tolist() == pytest.approx([1, 0.625, 0.25, 0.125, 0])
    assert lerf.tolist() == pytest.approx([1, 0.875, 0.75, 0.375, 0])
    assert len(a + b) == 2


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Of 200 samples from a known distribution about 95 % have the true mean inside."""
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for seed in range(200):
        values = torch.randn(60, generator=generator, dtype=torch.float64) + 3
        inside += 3.0 in ev.bootstrap(values, resamples=1_000, seed=seed)
    assert 180 <= inside <= 198


def test_intervals_are_those_of_resampled_means():
    """Against the normal approximation, and seeded."""
    values = torch.randn(500, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = ev.bootstrap(values)
    error = float(values.std()) / 500**0.5
    assert found.low == pytest.approx(found.mean - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(found.mean + 1.96 * error, abs=0.1 * error)
    assert ev.bootstrap(values) == found
    assert ev.bootstrap(values, seed=1) != found
    assert ev.bootstrap(values, level=0.5).high < found.high


def test_pairing_sees_what_separate_intervals_hide():
    """A small constant lead under a large spread between inputs."""
    spread = 10 * torch.randn(50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    lead = spread + 0.1 + 0.01 * torch.randn(50, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    a, b = ev.bootstrap(spread), ev.bootstrap(lead)
    assert a.low < b.low < a.high  # they overlap
    assert 0 not in ev.paired_difference(lead, spread)
    assert 0 in ev.paired_difference(spread, spread)


def test_bad_asks_are_refused():
    with pytest.raises(EvaluationError, match="nothing to resample"):
        ev.bootstrap([])
    with pytest.raises(EvaluationError, match=r"level=1\.5"):
        ev.bootstrap([1.0], level=1.5)
    with pytest.raises(EvaluationError, match="same inputs"):
        ev.paired_difference([1.0], [1.0, 2.0])
    with pytest.raises(EvaluationError, match=r"unknown metric 'abp'\. Known: abpc"):
        curves([0, 1], [1.0, 0.0], [1.0, 0.0]).metric("abp")


def test_one_input_is_sure_of_nothing():
    one = ev.bootstrap([3.0])
    assert str(one) == "3 (one input)" and 0 in one
    assert 0 not in ev.bootstrap([3.0, 3.1])

"""Perturbation curves and their metrics against closed forms and slow loops."""

import pytest
import torch
from torch import Tensor, nn

import dynamiclrp as dlrp
from dynamiclrp import evaluate as ev
from dynamiclrp.errors import EvaluationError


def linear(weights: list[list[float]]) -> nn.Linear:
    model = nn.Linear(len(weights[0]), len(weights), bias=False).double()
    model.weight.data = torch.tensor(weights, dtype=torch.float64)
    return model


def test_curves_of_a_linear_model_are_sums_of_its_contributions():
    """Zeroing a feature takes its contribution away: MoRF and LeRF are known in closed form."""
    model = linear([[3.0, -1.0, 2.0, 0.5]])
    x = torch.ones(1, 4, dtype=torch.float64)
    curves = ev.perturb(model, x, x * model.weight[0], [0], measure="logit", step=1)
    assert curves.fractions[0].tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert curves.morf[0].tolist() == [4.5, 1.5, -0.5, -1.0, 0.0]
    assert curves.lerf[0].tolist() == [4.5, 5.5, 5.0, 3.0, 0.0]
    # the mean over the curve, by trapezes: interior points count 1/4 each
    assert curves.metric("abpc").item() == pytest.approx((4.0 + 5.5 + 4.0) / 4)
    assert curves.metric("abpc_paper").item() == pytest.approx(4 * (4.0 + 5.5 + 4.0) / 4)
    assert curves.metric("comprehensiveness").item() == pytest.approx((3.0 + 5.0 + 5.5 + 4.5 / 2) / 4)
    assert curves.metric("sufficiency").item() == pytest.approx((-1.0 - 0.5 + 1.5 + 4.5 / 2) / 4)


def test_batches_do_not_change_curves():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3)).double().eval()
    x, r = torch.randn(5, 12, dtype=torch.float64), torch.randn(5, 12, dtype=torch.float64)
    whole = ev.perturb(model, x, r, batch_size=1000)
    single = ev.perturb(model, x, r, batch_size=1)
    odd = ev.perturb(model, x, r, batch_size=7)
    for a, b, c in zip(whole.morf + whole.lerf, single.morf + single.lerf, odd.morf + odd.lerf):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        torch.testing.assert_close(a, c, rtol=0, atol=1e-12)


def by_hand(
    model: nn.Module, x: Tensor, filled: Tensor, units: list[tuple[slice, slice]], order: list[int], target: int
):
    """One image, one unit at a time, in a plain loop."""
    x, points = x.clone(), []
    for unit in [None, *order]:
        if unit is not None:
            rows, columns = units[unit]
            x[:, rows, columns] = filled[:, rows, columns]
        with torch.no_grad():
            points.append(model(x[None]).softmax(-1)[0, target].item())
    return torch.tensor(points, dtype=torch.float64)


@pytest.mark.parametrize("fill", ["blur", "mean", "zero", lambda x: -x])
def test_regions_against_a_loop(fill):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)).double().eval()
    x = torch.randn(2, 3, 10, 12, dtype=torch.float64)
    model(x)
    relevance = torch.randn_like(x)
    fill = ev.Blur(7, 2.0) if fill == "blur" else fill
    curves = ev.perturb(model, x, relevance, [0, 2], unit=ev.Regions(4), fill=fill, step=1)
    units = [(slice(i, i + 4), slice(j, j + 4)) for i in (0, 4, 8) for j in (0, 4, 8)]
    for row, target in enumerate((0, 2)):
        pooled = [relevance[row, :, a, b].sum().item() for a, b in units]
        order = sorted(range(9), key=lambda u: -pooled[u])
        filled = {
            "mean": x.mean((2, 3), keepdim=True).expand_as(x),
            "zero": torch.zeros_like(x),
        }.get(fill) if isinstance(fill, str) else None  # fmt: skip
        if isinstance(fill, ev.Blur):
            filled = slow_blur(x, 7, 2.0)
        elif callable(fill):
            filled = -x
        morf = by_hand(model, x[row], filled[row], units, order, target)
        lerf = by_hand(model, x[row], filled[row], units, order[::-1], target)
        torch.testing.assert_close(curves.morf[row], morf, rtol=0, atol=1e-10)
        torch.testing.assert_close(curves.lerf[row], lerf, rtol=0, atol=1e-10)


def slow_blur(x: Tensor, kernel: int, sigma: float) -> Tensor:
    """A two-dimensional Gaussian as one kernel, pixel by pixel."""
    half = kernel // 2
    grid = torch.arange(kernel, dtype=torch.float64) - half
    weights = torch.exp(-(grid[:, None] ** 2 + grid[None, :] ** 2) / (2 * sigma**2))
    weights /= weights.sum()
    padded = nn.functional.pad(x, (half,) * 4, mode="reflect")
    return (padded.unfold(2, kernel, 1).unfold(3, kernel, 1) * weights).sum((-2, -1))


def test_exact_contributions_beat_every_other_ranking():
    torch.manual_seed(2)
    model = linear(torch.randn(1, 9).tolist())
    x = torch.randn(4, 9, dtype=torch.float64)
    best = ev.perturb(model, x, x * model.weight[0], [0] * 4, measure="logit").metric()
    for _ in range(20):
        other = ev.perturb(model, x, torch.randn_like(x), [0] * 4, measure="logit").metric()
        assert (other <= best + 1e-12).all()


def test_an_attribution_goes_in_as_it_is():
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    a = dlrp.explain(model, x, target=0)
    for inputs in (x, {"input": x}):
        found = ev.perturb(model, inputs, a, [0] * 3)
        assert torch.equal(found.metric(), ev.perturb(model, x, a.relevance, [0] * 3).metric())


def test_ties_are_broken_by_chance_not_by_place():
    """A constant explanation ranks like chance: over many inputs the first unit goes first no more often than others."""
    model = linear([[1.0, 0.0, 0.0, 0.0]])
    x, nothing = torch.ones(400, 4, dtype=torch.float64), torch.zeros(400, 4)
    found, again, other = (ev.perturb(model, x, nothing, [0] * 400, measure="logit", step=1, seed=s) for s in (0, 0, 1))
    first_gone = torch.tensor([curve[1].item() == 0 for curve in found.morf]).double().mean().item()
    assert 0.17 < first_gone < 0.33
    assert abs(found.interval().mean) < 0.08
    assert torch.equal(found.metric(), again.metric()) and not torch.equal(found.metric(), other.metric())


def test_accuracy_and_own_measures():
    model = linear([[1.0, 1.0, 0.0], [0.0, 0.0, 1.5]])
    x = torch.ones(1, 3, dtype=torch.float64)
    relevance = torch.tensor([[3.0, 2.0, 1.0]])
    found = ev.perturb(model, x, relevance, [0], measure="accuracy", step=1)
    assert found.morf[0].tolist() == [
        1,
        0,
        0,
        1,
    ]  # 2 against 1.5; 1 against 1.5; 0 against 1.5; a tie goes to the first
    assert found.lerf[0].tolist() == [1, 1, 1, 1]
    margin = ev.perturb(model, x, relevance, [0], measure=lambda out, t: out[:, 0] - out[:, 1], step=1)
    assert margin.morf[0].tolist() == [0.5, -0.5, -1.5, 0]


@pytest.mark.parametrize(("unit", "count"), [("pixel", 144), ("region", 144), (ev.Regions(5), 9), (ev.Patches(6), 4)])
def test_units_cover_an_image_once(unit, count):
    """With every unit removed nothing of the image is left."""
    x = torch.rand(2, 3, 12, 12) + 1
    gone = []

    def model(x):
        gone.append((x == 0).all(1).flatten(1).sum(1).max().item())
        return x.mean((2, 3))

    found = ev.perturb(model, x, torch.randn(2, 12, 12), unit=unit, fill="zero", step=1)
    assert len(found.fractions[0]) == count + 1
    assert max(gone) == 144


def test_long_curves_have_fifty_steps_unless_told():
    model, x = nn.Linear(1000, 2), torch.randn(1, 1000)
    assert len(ev.perturb(model, x, x).fractions[0]) == 51
    assert ev.perturb(model, x, x, step=300).fractions[0].tolist() == pytest.approx([0, 0.3, 0.6, 0.9, 1])


def test_bad_relevance_is_refused():
    model, x = nn.Linear(4, 2), torch.randn(2, 4)
    with pytest.raises(EvaluationError, match="nan or inf"):
        ev.perturb(model, x, torch.full((2, 4), torch.nan))
    with pytest.raises(EvaluationError, match="expected"):
        ev.perturb(model, x, torch.randn(2, 5))
    with pytest.raises(EvaluationError, match="3 rows"):
        ev.perturb(model, x, torch.randn(3, 4))

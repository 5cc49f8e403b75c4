"""Parameter randomisation: what changes, in which order, and that nothing stays changed."""

import pytest
import torch
from torch import nn

from dynamiclrp import evaluate as ev
from dynamiclrp.errors import EvaluationError
from dynamiclrp.evaluate.randomise import ranks


class Backwards(nn.Module):
    """Registered in the opposite order of use, with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5, bias=False)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
        self.first = nn.Linear(5, 6)
        self.tied = nn.Linear(6, 5, bias=False)
        self.tied.weight = self.head.weight

    def forward(self, x):
        return self.head(self.middle(self.first(x)).relu())


def model() -> Backwards:
    torch.manual_seed(0)
    return Backwards().eval()


X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))


def bits(net: nn.Module) -> dict[str, bytes]:
    return {name: p.detach().numpy().tobytes() for name, p in net.state_dict().items()}


def test_layers_go_from_the_output_down_by_use_not_by_registration():
    assert ev.randomisation(model(), X, ["epsilon"]).layers == ("head", "middle.2", "middle.0", "first")
    assert ev.randomisation(model(), X, ["epsilon"], depth=1).layers == ("head", "middle", "first")
    assert ev.randomisation(model(), X, ["epsilon"], layers=["middle"]).layers == ("middle",)


def test_what_a_model_owns_itself_goes_with_its_beginning():
    """Positions and a class token are added before the layers inside run, though the model itself ends last."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.randn(5))
            self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.first(x + self.position).relu())

    assert ev.randomisation(Positions(), X, ["epsilon"]).layers == ("head", "first", "Positions")


@pytest.mark.parametrize("mode", ["cascading", "independent"])
def test_relevance_is_that_of_the_randomised_model(mode):
    """Against randomising a copy by hand: the first layer below the output only, and all of it."""
    net = model()
    targets = net(X).argmax(1)
    before = ev.relevance_of("epsilon", net, X, targets)
    seen = []

    def spy(net, x, t):
        seen.append({n: p.detach().clone() for n, p in net.named_parameters()})
        return ev.relevance_of("epsilon", net, x, t)

    found = ev.randomisation(net, X, {"spy": spy}, mode=mode, explain_batch_size=6)
    trained, *stages = seen
    touched = [{n for n, p in stage.items() if not torch.equal(p, trained[n])} for stage in stages]
    by_layer = [{"head.weight"}, {"middle.2.weight", "middle.2.bias"}, {"middle.0.weight", "middle.0.bias"}, {"first.weight", "first.bias"}]  # fmt: skip
    expected = by_layer if mode == "independent" else [set().union(*by_layer[: i + 1]) for i in range(4)]
    assert touched == expected
    for layer, stage in zip(found.layers, stages):
        copy = model()
        copy.load_state_dict(stage, strict=False)
        after = ev.relevance_of("epsilon", copy, X, targets)
        slow = [slow_spearman(a, b) for a, b in zip(before.double(), after.double())]
        assert found.values("spy", layer).tolist() == pytest.approx(slow, abs=1e-9)
        slow = [slow_spearman(a.abs(), b.abs()) for a, b in zip(before.double(), after.double())]
        assert found.values("spy", layer, "absolute").tolist() == pytest.approx(slow, abs=1e-9)


def slow_spearman(a, b) -> float:
    """Without ties: 1 - 6 * sum of squared rank differences / (n (n^2 - 1))."""
    n = len(a)
    ranks = [[sorted(x.tolist()).index(v) for v in x.tolist()] for x in (a, b)]
    return 1 - 6 * sum((i - j) ** 2 for i, j in zip(*ranks)) / (n * (n**2 - 1))


def test_equal_values_share_their_rank():
    # ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: Pearson of those
    a, b = torch.tensor([0.0, 1.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert ev.spearman(a, b) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert ev.spearman(a, torch.ones(4)) == 0
    assert ev.spearman(a, -a) == pytest.approx(-1)


def test_rows_are_ranked_on_their_own():
    rows = torch.tensor([[3.0, 1.0, 1.0, 2.0], [0.0, 0.0, 0.0, -1.0]])
    assert ranks(rows).tolist() == [[4, 1.5, 1.5, 3], [3, 3, 3, 1]]


def test_only_tokens_that_count_are_ranked():
    """Relevance of padding differs wildly between the models and must not enter."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 6), nn.Flatten(), nn.Linear(30, 2))

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, input_ids, attention_mask):
            return self.net(input_ids)

    ids = torch.randint(1, 9, (3, 5))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    seen = []

    def spy(net, inputs, t):
        seen.append(torch.randn(3, 5, generator=torch.Generator().manual_seed(len(seen))))
        return seen[-1]

    found = ev.randomisation(Padded(), {"input_ids": ids, "attention_mask": mask}, {"spy": spy}, layers=["net.2"])
    expected = [ev.spearman(a[m.bool()], b[m.bool()]) for a, b, m in zip(seen[0], seen[1], mask)]
    assert found.values("spy", "net.2").tolist() == pytest.approx(expected)


def test_noise_keeps_mean_and_spread_and_the_model_comes_back_bit_for_bit():
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    net[0].weight.data += 2
    before, means = bits(net), {n: (p.mean().item(), p.std().item()) for n, p in net.named_parameters()}
    during = {}

    def spy(net, x, t):
        during.update({n: (p.mean().item(), p.std().item()) for n, p in net.named_parameters()})
        return torch.randn_like(x)

    ev.randomisation(net, torch.randn(2, 64), {"spy": spy})
    assert bits(net) == before
    for name, (mean, std) in means.items():
        assert during[name] != (mean, std)
        assert during[name][0] == pytest.approx(mean, abs=4 * std / 3**0.5)
    assert during["0.weight"] == pytest.approx(means["0.weight"], rel=0.1)


def test_the_model_comes_back_after_an_error():
    net = model()
    before = bits(net)
    calls = []

    def breaks(net, x, t):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return torch.randn_like(x)

    with pytest.raises(KeyboardInterrupt):
        ev.randomisation(net, X, {"breaks": breaks})
    assert bits(net) == before
    assert net.tied.weight is net.head.weight
    assert not any(m._forward_hooks for m in net.modules())

    def fails(net, x, t):
        raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        ev.randomisation(net, X, {"fails": fails}, on_error="raise")
    found = ev.randomisation(net, X, {"fails": fails, "epsilon": "epsilon"})
    assert "fails after head: ValueError: no luck" in str(found)
    assert len(found.values("epsilon", "first")) == 6
    assert bits(net) == before


def test_the_same_seed_gives_the_same_noise():
    first, again, other = (ev.randomisation(model(), X, ["epsilon"], seed=s) for s in (0, 0, 1))
    assert first.records == again.records != other.records


def test_a_result_can_be_kept_and_shown(tmp_path):
    found = ev.randomisation(model(), X, ["epsilon", "gradient"])
    found.save(tmp_path / "r.json")
    again = ev.Randomisation.load(tmp_path / "r.json")
    assert str(again) == str(found) and again.rows == found.rows
    assert [line.split()[0] for line in str(found).splitlines()[3:]] == list(found.layers)
    found.plot(tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 5_000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.json", "r.png"]
    with pytest.raises(EvaluationError, match="not a saved Randomisation"):
        (tmp_path / "x.json").write_text("{}")
        ev.Randomisation.load(tmp_path / "x.json")


def test_bad_asks_are_refused():
    with pytest.raises(EvaluationError, match="mode='all'"):
        ev.randomisation(model(), X, mode="all")
    with pytest.raises(EvaluationError, match=r"layers \['tail'\]: no such module"):
        ev.randomisation(model(), X, layers=["tail"])
    with pytest.raises(EvaluationError, match="no parameter"):
        ev.randomisation(nn.Sequential(nn.Flatten()), X)

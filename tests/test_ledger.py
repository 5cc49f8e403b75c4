"""Double-entry bookkeeping: what is put in comes out at the inputs or is kept by somebody, who is named."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dynamiclrp as dlrp
from models import IDS, Gated, ResNet, Twice, bert, example, gaussian, gpt2, llama, mlp, randomise, resnet, t5
from oracles import error

EXACT = 1e-5


class Vgg(nn.Module):
    """Plain convolutions with biases, both pools, no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        return self.head(F.avg_pool2d(F.relu(self.conv2(x)), 2).flatten(1))


MODELS = {
    "mlp": mlp,
    "vgg": lambda: randomise(Vgg()),
    "resnet": resnet,
    "gated": lambda: randomise(Gated()),
    "gpt2": gpt2,
    "gpt2 eager": lambda: gpt2(attn_implementation="eager"),
    "llama": llama,
    "bert": bert,
}
CONV = ("attnlrp", "dynamic", "epsilon", "gamma", "epsilon-plus", "epsilon-plus-flat", "epsilon-alpha2-beta1")
TEXT = ("attnlrp", "cp-lrp", "dynamic", "epsilon", "gamma")
CASES = [
    (name, preset) for name in MODELS for preset in (TEXT if name in ("gpt2", "gpt2 eager", "llama", "bert") else CONV)
]
every_case = pytest.mark.parametrize("name, preset", CASES)


def booked(name: str, preset, **options) -> dlrp.Attribution:
    model = MODELS[name]()
    text = name in ("gpt2", "gpt2 eager", "llama", "bert")
    given = IDS if text else gaussian(2, 6) if name == "mlp" else gaussian(2, 3, 8, 8, seed=5)
    return dlrp.explain(model, given, target=1, preset=preset, ledger=True, **options)


def scale(ledger: dlrp.Ledger) -> float:
    """The most relevance, of both signs, that moved anywhere."""
    return max(entry.scale for entry in ledger.entries)


@every_case
def test_the_books_balance(name, preset):
    a = booked(name, preset)
    book = a.ledger
    assert book.total == pytest.approx(a.seed.double().sum().item(), rel=1e-6)
    assert book.delivered == pytest.approx(
        sum(r.double().sum().item() for r in a.relevances.values()), rel=1e-4, abs=EXACT * scale(book)
    )
    assert book.residual == pytest.approx(book.total - book.delivered - sum(book.kept.values()), abs=1e-9)
    assert abs(book.residual) <= EXACT * scale(book)


@every_case
def test_rules_that_claim_to_conserve_do(name, preset):
    entries = booked(name, preset).ledger.entries
    liars = [(entry.op, entry.rule, entry.error) for entry in entries if entry.conserves and entry.error > EXACT]
    assert any(entry.conserves for entry in entries)
    assert not liars


@every_case
def test_every_node_has_one_entry_that_adds_up(name, preset):
    a = booked(name, preset)
    assert sorted(entry.node for entry in a.ledger.entries) == sorted(step.node for step in a.plan.steps)
    for entry in a.ledger.entries:
        assert sum(entry.kept.values()) == pytest.approx(
            entry.arrived - entry.delivered, rel=1e-6, abs=1e-9 * scale(a.ledger)
        )
        assert entry.scale >= abs(entry.arrived) * (1 - 1e-9)


@every_case
def test_the_books_change_nothing(name, preset):
    a = booked(name, preset)
    model = MODELS[name]()
    given = (
        IDS
        if a.relevance.dim() == 2 and a.relevance.shape == IDS.shape
        else gaussian(*a.relevance.shape, seed=0 if name == "mlp" else 5)
    )
    b = dlrp.explain(model, given, target=1, preset=preset)
    assert b.ledger is None
    assert error(a.relevance, b.relevance) < (1e-3 if preset == "dynamic" else EXACT)


# ---------------------------------------------------------------- who kept it


def test_without_biases_nothing_is_kept():
    book = dlrp.explain(mlp(bias=False), gaussian(3, 6), target=2, ledger=True).ledger
    assert set(book.kept) <= {"rounding"}
    assert all(entry.conserves for entry in book.entries)
    assert book.delivered == pytest.approx(book.total, rel=EXACT)


@pytest.mark.parametrize("build", [mlp, lambda: randomise(Vgg())])
def test_biases_keep_their_gradient_times_value(build):
    """Under LRP-0 the score of a ReLU net is the sum of gradient times value over inputs and biases."""
    model = build().double()
    x = (
        example(model, dtype=torch.float64).detach()
        if hasattr(model, "shape")
        else gaussian(2, 3, 8, 8, dtype=torch.float64)
    )
    score = model(x)[:, 1].sum()
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    expected = sum(
        (b.detach() * g).sum().item() for b, g in zip(biases, torch.autograd.grad(score, biases), strict=True)
    )
    book = dlrp.explain(model, x, target=1, ledger=True, preset="attnlrp").ledger
    assert book.kept["bias"] == pytest.approx(expected, rel=1e-8)
    assert set(book.kept) <= {"bias", "rounding"}
    assert book.total - book.delivered == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("bias", [False, True])
def test_the_stabiliser_keeps_its_part(bias):
    layer = randomise(nn.Linear(4, 3, bias=bias), std=0.5).double()
    x = gaussian(2, 4, dtype=torch.float64)
    book = dlrp.explain(layer, x, target=1, preset=dlrp.preset("epsilon", eps=0.3), ledger=True).ledger
    z = layer(x)[:, 1].detach()
    u = z / (z + 0.3 * z.sign())
    b = layer.bias[1].item() if bias else 0.0
    assert book.delivered == pytest.approx((u * (z - b)).sum().item(), rel=1e-9)
    assert book.kept["stabiliser"] == pytest.approx((z - u * z).sum().item(), rel=1e-6)
    assert book.kept.get("bias", 0.0) == pytest.approx((u * b).sum().item(), rel=1e-6)


def test_a_constant_that_is_added_keeps_its_part():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3, bias=False)
            self.register_buffer("k", gaussian(4, seed=2))

        def forward(self, x):
            return self.head(x + self.k)

    model = randomise(Shifted(), std=0.5)
    book = dlrp.explain(model, gaussian(2, 4), target=1, ledger=True).ledger
    assert book.kept["constant"] == pytest.approx(2 * (model.head.weight[1] @ model.k).item(), rel=1e-5)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.position, self.head = nn.Parameter(gaussian(1, 3, 4, seed=2)), nn.Linear(4, 3, bias=False)

    def forward(self, x):
        return self.head((x + self.position).mean(1))


def test_a_parameter_that_is_added_keeps_its_share():
    """Under the paper's rule |p| / (|x| + |p|) of what arrives at the sum."""
    model = randomise(Positions(), std=0.5).double()
    x = gaussian(2, 3, 4, dtype=torch.float64)
    book = dlrp.explain(model, x, target=1, preset="dynamic", ledger=True).ledger
    h, w = (x + model.position).detach(), model.head.weight[1].detach()
    pooled = h.mean(1)
    at_mean = w * pooled  # the linear map's shares, without a bias
    at_sum = at_mean[:, None] * h.abs() / h.abs().sum(1, keepdim=True)
    p = model.position.detach().abs()
    assert book.kept["parameter"] == pytest.approx((at_sum * p / (x.abs() + p)).sum().item(), rel=1e-6)


def test_a_blocked_branch_is_booked():
    preset = dlrp.preset("attnlrp") | {"activation": dlrp.Nothing()}
    book = dlrp.explain(mlp(bias=False), gaussian(2, 6), target=1, preset=preset, ledger=True).ledger
    assert book.delivered == 0
    assert book.kept["blocked"] == pytest.approx(book.total, rel=EXACT)


@pytest.mark.parametrize(
    "name, preset, reasons",
    [
        ("gpt2 eager", "attnlrp", {"softmax", "normalisation", "bias", "parameter"}),
        ("gpt2", "attnlrp", {"attention", "normalisation", "bias", "parameter"}),
        ("gpt2", "dynamic", {"bias", "attention", "parameter"}),
        ("bert", "attnlrp", {"attention", "normalisation", "bias", "parameter"}),
        ("resnet", "gamma", {"bias"}),
        ("resnet", "epsilon-plus", {"bias"}),
    ],
)
def test_reasons_are_named(name, preset, reasons):
    kept = booked(name, preset).ledger.kept
    assert reasons <= set(kept), kept
    assert list(kept) == sorted(kept, key=lambda reason: -abs(kept[reason]))


def test_a_training_step_later_the_old_books_stand():
    model = mlp()
    a = dlrp.explain(model, gaussian(2, 6), target=1, ledger=True)
    before = dict(a.ledger.kept)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert a.ledger.kept == before


# ---------------------------------------------------------------- several inputs, layers, tokens


def test_what_several_inputs_get_is_added_up():
    model = randomise(Twice(), std=0.5)
    a = dlrp.explain(model, gaussian(3, 6), gaussian(3, 5, seed=1), target=1, preset="gamma", ledger=True)
    assert a.ledger.delivered == pytest.approx(sum(r.sum().item() for r in a.relevances.values()), rel=1e-5)
    assert abs(a.ledger.residual) <= EXACT * scale(a.ledger)


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic", "gamma"])
def test_layers_on_the_way_are_no_end(preset):
    model = randomise(ResNet(), std=0.4)
    x = gaussian(2, 3, 8, 8, seed=5)
    with_layers = dlrp.explain(model, x, target=1, preset=preset, ledger=True, layers=["blocks.0", "stem"]).ledger
    without = dlrp.explain(model, x, target=1, preset=preset, ledger=True).ledger
    assert abs(with_layers.residual) <= EXACT * scale(with_layers)
    assert with_layers.delivered == pytest.approx(without.delivered, rel=1e-3, abs=1e-4 * scale(without))


def test_an_encoder_and_a_decoder():
    model = t5()
    a = dlrp.explain(model, input_ids=IDS, decoder_input_ids=IDS[:, :3], target=4, ledger=True)
    assert abs(a.ledger.residual) <= EXACT * scale(a.ledger)


# ---------------------------------------------------------------- printing


def test_the_books_print():
    book = booked("gpt2", "dynamic").ledger
    lines = str(book).splitlines()
    assert lines[0].startswith("seed") and f"{book.total: .6g}" in lines[0]
    assert lines[1].startswith("delivered to inputs") and f"{book.delivered: .6g}" in lines[1]
    assert [line.split(": ")[1].split("  ")[0].strip() for line in lines[2:-1]] == list(book.kept)
    assert lines[-1].startswith("residual")


def test_an_entry_prints_what_and_by_which_rule():
    entry = booked("mlp", "gamma").ledger.entries[0]
    assert "Addmm" in repr(entry) and "Gamma" in repr(entry)

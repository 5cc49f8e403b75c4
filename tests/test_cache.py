"""The plan cache: a graph gets a cached plan exactly when that plan is right for it; long graphs are no trouble."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dynamiclrp as dlrp
from dynamiclrp.ops import OPS
from dynamiclrp.parameters import Inventory
from models import IDS, Mlp, bert, gaussian, gpt2, llama, mlp, randomise, resnet
from oracles import error

engine = sys.modules["dynamiclrp.explain"]  # the name `dynamiclrp.explain` is the function
Plans = engine.Plans

PRESETS = ["attnlrp", "dynamic", "gamma", "epsilon-plus-flat"]
TOLERANCE = 1e-8


@pytest.fixture
def plans(monkeypatch) -> Plans:
    """An empty cache for `relevance`."""
    empty = Plans()
    monkeypatch.setattr(engine, "_plans", empty)
    return empty


def relevance(y: Tensor, x, **options):
    return dlrp.relevance(y, x, retain_graph=True, **options)


def fresh(y: Tensor, x, **options) -> tuple[Tensor, ...]:
    """Relevance by a plan made for this very graph."""
    kept, engine._plans = engine._plans, Plans()
    try:
        return relevance(y, x, **options)
    finally:
        engine._plans = kept


def check(y: Tensor, x, preset) -> None:
    """The shared cache gives what an empty one gives, twice; and it does not give what an empty one refuses."""
    try:
        expected = fresh(y, x, preset=preset)
    except dlrp.LostActivationError:
        with pytest.raises(dlrp.LostActivationError):
            relevance(y, x, preset=preset)
        return
    for _ in range(2):
        for actual, wanted in zip(relevance(y, x, preset=preset), expected, strict=True):
            assert torch.equal(actual, wanted)


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return gaussian(*shape, seed=seed, dtype=torch.float64).requires_grad_()


# ---------------------------------------------------------------- the same graph, other numbers


@pytest.mark.parametrize("ledger", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_one_plan_for_other_values_batches_and_shapes(preset, ledger):
    model = resnet().double()
    explainer = dlrp.Explainer(model, preset)
    for seed, shape in enumerate(
        [(2, 3, 8, 8), (2, 3, 8, 8), (1, 3, 8, 8), (5, 3, 8, 8), (2, 3, 12, 10), (1, 3, 16, 4)]
    ):
        x = gaussian(*shape, seed=seed, dtype=torch.float64)
        a = explainer(x, ledger=ledger)
        b = dlrp.explain(model, x, preset=preset, ledger=ledger)
        assert torch.equal(a.relevance, b.relevance)
        assert a.relevance.shape == x.shape
        # one more, where the first plan read no parameter: from then on none is followed
        assert len(explainer.plans) <= (1 if ledger or preset in ("dynamic", "gamma") else 2)
        if ledger:
            assert a.ledger.kept == b.ledger.kept


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic", "gamma"])
@pytest.mark.parametrize("build", [gpt2, llama, bert])
def test_one_plan_for_other_token_ids_batches_and_lengths(build, preset):
    model = build()
    explainer = dlrp.Explainer(model, preset)
    sizes = []
    for ids in (IDS, IDS.flip(1), IDS[:1], IDS[:, :3], torch.cat([IDS, IDS[:1]])):
        a, b = explainer(ids, target=1), dlrp.explain(model, ids, target=1, preset=preset)
        assert torch.equal(a.relevance, b.relevance)
        sizes.append(len(explainer.plans))
    # one more, where the first plan read no bias: from then on none is followed
    assert sizes[0] == 1 and set(sizes[1:]) in ({1}, {2})
    assert sizes[-1] == 1 or preset == "attnlrp"


def test_one_plan_for_other_targets():
    model = mlp()
    explainer = dlrp.Explainer(model, "dynamic")
    x = gaussian(2, 6)
    for target in (0, 3, [1, 2], (2,), lambda out: out[:, 0] - out[:, 1], None):
        a, b = explainer(x, target=target), dlrp.explain(model, x, target=target, preset="dynamic")
        assert torch.equal(a.relevance, b.relevance)
    assert len(explainer.plans) == 1


def test_weights_may_change():
    """A plan holds no values: after a training step it is still right."""
    model = mlp()
    explainer = dlrp.Explainer(model, "gamma")
    x = gaussian(2, 6)
    before = explainer(x, target=1).relevance
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.7).add_(0.1)
    after = explainer(x, target=1).relevance
    assert not torch.allclose(before, after)
    assert torch.equal(after, dlrp.explain(model, x, target=1, preset="gamma").relevance)
    assert len(explainer.plans) == 1


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("change", ["bias", "no bias", "module", "table"])
def test_modules_and_parameters_may_come_and_go(preset, change):
    """What is followed of a model is worked out anew when it holds others."""
    torch.manual_seed(0)
    table = change == "table"
    first: list[nn.Module] = [nn.Embedding(9, 6)] if table else [nn.Linear(6, 6)]
    model = nn.Sequential(*first, nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).double().eval()
    x = torch.tensor([[1, 2, 5]]) if table else gaussian(2, 6).double()
    explainer = dlrp.Explainer(model, preset)
    explainer(x)
    before, inventory = explainer(x).relevance, Inventory(model)
    inventory.choose(True, True, table)
    fresh = nn.Linear(6, 6).double()
    if change == "module":
        model[1] = fresh
    elif change == "table":
        model[0] = nn.Embedding(9, 6).double()
    else:
        model[1].bias = fresh.bias if change == "bias" else None
    found = Inventory(model, inventory).choose(True, True, table)
    assert found == Inventory(model).choose(True, True, table) != inventory.choose(True, True, table)
    after = [explainer(x).relevance for _ in range(2)]
    assert not torch.allclose(before, after[0])
    for relevance in after:
        assert torch.equal(relevance, dlrp.explain(model, x, preset=preset).relevance)


@pytest.mark.parametrize("preset", PRESETS)
def test_another_model_of_the_same_structure_shares_the_plan(plans, preset):
    x = leaf(3, 6)
    for seed in range(3):
        check(randomise(Mlp(), seed=seed).double()(x), x, preset)
    assert len(plans) == 1


# ---------------------------------------------------------------- graphs that look alike


def powers() -> Iterator[tuple[Tensor, Tensor]]:
    for exponent in (2, 3, 0.5, 1):
        x = leaf(3, 6)
        yield x.abs().pow(exponent) @ leaf(6, 4, seed=1), x


def convolutions() -> Iterator[tuple[Tensor, Tensor]]:
    for options in ({"bias": True}, {"bias": False}, {"bias": True, "stride": 2}, {"bias": False, "padding": 1}):
        for frozen in (False, True):
            torch.manual_seed(0)
            net = nn.Sequential(
                nn.Conv2d(3, 4, 3, **options), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3, **options)
            )
            net = randomise(net).double().requires_grad_(not frozen)
            x = leaf(2, 3, 9, 9)
            yield net(x).mean((2, 3)), x


def transposed() -> Iterator[tuple[Tensor, Tensor]]:
    for kind in (nn.Conv2d, nn.ConvTranspose2d):
        net = randomise(nn.Sequential(kind(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())).double()
        x = leaf(2, 4, 6, 6)
        yield net(x).mean((2, 3)), x


def frozen() -> Iterator[tuple[Tensor, Tensor]]:
    for weights, biases in ((True, True), (False, True)):
        net = mlp().double()
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(biases if name.endswith("bias") else weights)
        x = leaf(3, 6)
        yield net(x), x


def batch_norms() -> Iterator[tuple[Tensor, Tensor]]:
    for training in (False, True, False):
        for affine in (True, False):
            net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=affine), nn.ReLU())
            net = randomise(net).double().train(training)
            x = leaf(4, 3, 6, 6)
            yield net(x).mean((2, 3)), x


def norms() -> Iterator[tuple[Tensor, Tensor]]:
    for affine in (True, False):
        for training in (True, False):
            net = nn.Sequential(
                nn.LayerNorm(6, elementwise_affine=affine), nn.Linear(6, 4), nn.GroupNorm(2, 4, affine=affine)
            )
            net = randomise(net).double().requires_grad_(training)
            x = leaf(3, 6)
            yield net(x), x


def alphas() -> Iterator[tuple[Tensor, Tensor]]:
    w, v = leaf(6, 4, seed=1), leaf(6, 4, seed=2)
    for alpha in (1, 2, -0.5):
        x = leaf(3, 6)
        yield torch.add(x @ w, x @ v, alpha=alpha) @ leaf(4, 4, seed=3), x
        yield torch.addmm(leaf(4, seed=4), x, w, alpha=alpha, beta=2), x


def dimensions() -> Iterator[tuple[Tensor, Tensor]]:
    w = leaf(4, 4, seed=1)
    for dim in (1, 2):
        x = leaf(3, 4, 4)
        yield x.mean(dim) @ w, x
        yield torch.cat([x, 2 * x], dim).sum(dim) @ w, x
        yield x.softmax(dim).sum(1) @ w, x
        yield (x.transpose(1, 2) if dim == 1 else x.transpose(2, 1).neg().neg())[:, 0] @ w, x


def activations() -> Iterator[tuple[Tensor, Tensor]]:
    w = leaf(6, 4, seed=1)
    for function in (
        lambda h: F.leaky_relu(h, 0.1),
        lambda h: F.leaky_relu(h, 0.5),
        lambda h: F.gelu(h),
        lambda h: F.gelu(h, approximate="tanh"),
        lambda h: F.elu(h, 0.5),
        lambda h: F.elu(h, 2.0),
        lambda h: h.clamp(-1, 1),
        lambda h: h.clamp(0, 6),
        lambda h: F.hardtanh(h, -0.5, 0.5),
    ):
        x = leaf(3, 6)
        yield function(x @ leaf(6, 6, seed=2)) @ w, x


ALIKE = [powers, convolutions, transposed, frozen, batch_norms, norms, alphas, dimensions, activations]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("family", ALIKE, ids=lambda family: family.__name__)
def test_graphs_that_look_alike_get_their_own_numbers(plans, family, preset):
    for y, x in family():
        check(y, x, preset)


@pytest.mark.parametrize("preset", PRESETS)
def test_each_set_of_inputs_has_its_own_plan(plans, preset):
    net = mlp().double()
    x = leaf(3, 6)
    hidden = F.relu(net.first(x))
    above = F.relu(net.second(hidden))
    y = net.third(above)
    for inputs in ([x], [hidden], [x, hidden], [hidden, x], [above, x, hidden], [above]):
        check(y, inputs, preset)
    assert len(plans) == 6


def test_each_set_of_outputs_has_its_own_plan(plans):
    net = mlp().double()
    x = leaf(3, 6)
    hidden = F.relu(net.first(x))
    y = net.third(F.relu(net.second(hidden)))
    for outputs in ([y], [hidden], [y, hidden], [hidden, y]):
        expected = fresh(outputs, x, preset="dynamic")
        assert torch.equal(relevance(outputs, x, preset="dynamic")[0], expected[0])
    assert len(plans) == 4


def test_presets_do_not_mix(plans):
    net = mlp().double()
    x = leaf(3, 6)
    y = net(x)
    presets = [
        "attnlrp", "epsilon", dlrp.preset("epsilon", eps=0.1), dlrp.preset("gamma"), dlrp.preset("gamma", gamma=1.0),
        dlrp.preset("gamma") | {"first": dlrp.Flat()}, dlrp.preset("gamma") | {"Relu": dlrp.Gradient()},
        dlrp.preset("epsilon-gamma-box", low=-3.0, high=3.0), dlrp.preset("epsilon-gamma-box", low=-4.0, high=4.0),
        dlrp.preset("gamma") | {"first": dlrp.Box(-3.0, 3.0)}, dlrp.preset("gamma") | {"first": dlrp.Box(-4.0, 4.0)},
        dlrp.preset("dynamic", top=0.5), dlrp.preset("dynamic"),
    ]  # fmt: skip
    for preset in (*presets, *presets):
        check(y, x, preset)


def test_a_ledger_has_its_own_plan():
    model = mlp()
    explainer = dlrp.Explainer(model, "gamma")
    x = gaussian(2, 6)
    plain, booked, again = (explainer(x, ledger=ledger) for ledger in (False, True, False))
    assert plain.ledger is None and again.ledger is None and booked.ledger is not None
    assert torch.equal(plain.relevance, again.relevance)
    assert again.plan is plain.plan


@pytest.mark.parametrize("preset", ["dynamic", "attnlrp", "gamma"])
def test_a_parameter_that_is_broadcast_in_one_batch_and_not_in_another(plans, preset):
    """A [1, N, D] position embedding: in a batch of one nothing is broadcast, and the graph looks the same."""
    position, w, v = leaf(1, 4, 5, seed=1), leaf(5, 3, seed=2), leaf(5, 5, seed=3)

    def net(x: Tensor) -> Tensor:
        h = x @ v + position
        return (h + torch.tanh(h)).mean(1) @ w

    rows = gaussian(3, 4, 5, dtype=torch.float64)
    for size in (1, 2, 3, 1):
        x = rows[:size].clone().requires_grad_()
        y = net(x)
        check(y, x, preset)
        alone = [fresh(net(row), row, preset=preset)[0] for row in (r[None].detach().requires_grad_() for r in x)]
        assert error(relevance(y, x, preset=preset)[0], torch.cat(alone)) < TOLERANCE
    assert len(plans) == 1


def test_module_overrides_do_not_mix():
    """The same operations in modules of other names."""

    class Named(nn.Module):
        def __init__(self, names):
            super().__init__()
            self.order = names
            for name in names:
                setattr(self, name, nn.Linear(6, 6))

        def forward(self, x):
            for name in self.order:
                x = F.relu(getattr(self, name)(x))
            return x.sum(-1, keepdim=True)

    preset = dlrp.preset("attnlrp") | {"b": dlrp.Epsilon(0.5)}
    x = gaussian(2, 6)
    one, two = randomise(Named(["a", "b"])), randomise(Named(["a", "b"]))
    two.order = ["b", "a"]
    two.a, two.b = two.b, two.a
    explainer = dlrp.Explainer(one, preset)
    first = explainer(x).relevance
    explainer.model = two  # the same plans, another model
    second = explainer(x).relevance
    assert torch.equal(second, dlrp.explain(two, x, preset=preset).relevance)
    assert not torch.equal(first, second)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad * ctx.saved_tensors[0] ** 2


def test_a_row_that_is_replaced_replaces_the_plan(plans):
    x = leaf(3, 6)
    y = Cube.apply(x) @ leaf(6, 4, seed=1)
    rows = dict(OPS)
    try:
        dlrp.register("CubeBackward", "function")  # its gradient: three times the relevance
        (gradient,) = relevance(y, x)
        dlrp.register("CubeBackward", "activation", replace=True, forward=lambda n, x: x**3)  # passes it on
        (identity,) = relevance(y, x)
    finally:
        OPS.clear()
        OPS.update(rows)
    assert error(gradient, 3 * identity) < TOLERANCE


# ---------------------------------------------------------------- size


def test_the_cache_is_bounded(plans):
    plans.size = 3
    w = leaf(6, 6, seed=1)
    x = leaf(2, 6)
    graphs = []
    for depth in range(1, 8):
        y = x
        for _ in range(depth):
            y = torch.relu(y @ w)
        graphs.append(y + 0 * x.sum())
    for y in graphs:
        relevance(y, x, seed=y.detach())
        assert len(plans) <= 3
    for y in graphs:  # those that were dropped are made again
        assert torch.equal(relevance(y, x, seed=y.detach())[0], fresh(y, x, seed=y.detach())[0])
    assert len(plans) == 3


def test_the_plan_that_was_used_last_stays(plans):
    plans.size = 2
    x = leaf(2, 6)
    a, b, c = x * 2, torch.tanh(x), torch.relu(x) * 3
    (first,) = {id(dlrp.plan(a, x))}
    dlrp.plan(b, x)
    dlrp.plan(a, x)
    dlrp.plan(c, x)  # drops b, the one not used for longest
    assert id(dlrp.plan(a, x)) == first


# ---------------------------------------------------------------- long graphs


def with_a_deep_stack(call: Callable[[], None]) -> None:
    """In torch 2.13 a graph whose nodes Python has seen is freed by recursion (pytorch/pytorch#181139).

    Some 50,000 nodes in a chain overflow a main thread's stack of 8 MiB when the last tensor goes, with or without us.
    """
    problems: list[BaseException] = []

    def work() -> None:
        try:
            call()
        except BaseException as problem:
            problems.append(problem.with_traceback(None))  # frames would keep the graph for another thread to free

    size = threading.stack_size(512 << 20)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(size)
    if problems:
        raise problems[0]


def test_a_chain_of_a_hundred_thousand_nodes():
    def check() -> None:
        x = gaussian(1, 2, dtype=torch.float64).requires_grad_()
        y = x
        for i in range(50_000):
            y = -torch.tanh(y) if i % 5_000 == 0 else -(y * 1.0001)
        begin = time.thread_time()
        (r,) = dlrp.relevance(y, x, seed=y.detach(), preset="attnlrp")
        assert time.thread_time() - begin < 15
        # tanh passes relevance on, products with constants too: all of it arrives
        assert error(r, y.detach()) < 1e-9
        plan = dlrp.plan(y, x)
        assert plan.nodes == 100_001  # and the leaf
        assert plan.statistics.live == 100_000
        assert "100000 live" in str(plan)

    with_a_deep_stack(check)


def test_explaining_a_chain_of_sixty_thousand_nodes():
    """Here the graph is ours to free, so no stack is too small for it (in a process of its own, which may crash)."""
    program = """
import torch, dynamiclrp as dlrp

class Chain(torch.nn.Module):
    def forward(self, x):
        for _ in range(30_000):
            x = -(x * 1.0001)
        return x

a = dlrp.explain(Chain(), torch.ones(1, 2), target=0)
assert a.relevance[0, 0] == a.prediction[0, 0]
print("done")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr[-500:]


def test_a_deep_promise_chain():
    """3,000 sums with parameters: nobody keeps a partial sum, so all of them are rebuilt."""
    depth = 3_000
    p = nn.Parameter(gaussian(4, dtype=torch.float64))
    x = gaussian(1, 4, seed=1, dtype=torch.float64).requires_grad_()
    y = x
    for _ in range(depth):
        y = y + p
    seed = y.detach()
    begin = time.thread_time()
    (r,) = dlrp.relevance(y, x, seed=seed, preset="dynamic")
    assert time.thread_time() - begin < 10
    # by hand, from the top: each sum hands |h| / (|h| + |p|) of its relevance to the partial sum h
    values = [x.detach()]
    for _ in range(depth):
        values.append(values[-1] + p.detach())
    expected = seed
    for h in reversed(values[:-1]):
        expected = expected * h.abs() / (h.abs() + p.detach().abs() + 1e-11)
    torch.testing.assert_close(r, expected, rtol=1e-6, atol=1e-12)


def test_a_deep_residual_net():
    """1,000 residual steps under the paper's rules: many promises that share their values."""
    torch.manual_seed(0)
    w = (0.05 * gaussian(4, 4, dtype=torch.float64)).requires_grad_()
    x = gaussian(2, 4, seed=1, dtype=torch.float64).requires_grad_()
    y = x
    for _ in range(1_000):
        y = y + torch.tanh(y @ w)
    begin = time.thread_time()
    (r,) = dlrp.relevance(y, x, seed=y.detach(), preset="dynamic")
    assert time.thread_time() - begin < 10
    assert torch.isfinite(r).all()
    torch.testing.assert_close(
        r.sum(-1), y.detach().sum(-1), rtol=1e-4, atol=1e-6
    )  # no parameter is added: all arrives

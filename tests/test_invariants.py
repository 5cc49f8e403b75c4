"""What must hold whatever the model and the preset: batches, repetition, sharing, precision, threads, memory."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dynamiclrp as dlrp
from models import (
    IDS,
    Gated,
    Mlp,
    ResNet,
    Twice,
    example,
    gaussian,
    gpt2,
    leaves_nothing_behind,
    llama,
    logits,
    mlp,
    randomise,
    resnet,
)
from oracles import error

MODELS = {"mlp": mlp, "resnet": resnet, "gpt2": gpt2, "llama": llama}
CASES = [
    (name, preset)
    for name, presets in {
        "mlp": ("attnlrp", "dynamic", "gamma", "epsilon-plus-flat", "gradient"),
        "resnet": ("attnlrp", "dynamic", "gamma", "epsilon-plus-flat", "epsilon-alpha2-beta1"),
        "gpt2": ("attnlrp", "dynamic", "gamma", "cp-lrp"),
        "llama": ("attnlrp", "gamma", "cp-lrp"),  # under the paper's rules, its norms' eps is lost without `explain`
    }.items()
    for preset in presets
]
every_case = pytest.mark.parametrize("name, preset", CASES)
SOME = [("mlp", "dynamic"), ("resnet", "attnlrp"), ("resnet", "gamma"), ("resnet", "epsilon-plus-flat"),
        ("resnet", "dynamic"), ("gpt2", "attnlrp"), ("gpt2", "dynamic"), ("llama", "gamma")]  # fmt: skip
some_cases = pytest.mark.parametrize("name, preset", SOME)

explained_cases = pytest.mark.parametrize("name, preset", [*CASES, ("llama", "dynamic")])

TOLERANCE = 1e-8


def double(name: str) -> nn.Module:
    return MODELS[name]().double()


def tolerance(name: str) -> float:
    """transformers' Llama rounds to float32 in its norms."""
    return 1e-4 if name == "llama" else TOLERANCE


def relevance(model: nn.Module, x: Tensor, preset, **options) -> Tensor:
    return dlrp.relevance(logits(model, x), x, preset=preset, **options)[0]


# ---------------------------------------------------------------- batches and repetition


@every_case
def test_a_batch_equals_single_runs(name, preset):
    model = double(name)
    x = example(model, rows=2, dtype=torch.float64)
    together = relevance(model, x, preset)
    alone = [relevance(model, row[None].detach().requires_grad_(), preset) for row in x]
    assert error(together, torch.cat(alone)) < tolerance(name)


@every_case
def test_the_second_call_equals_the_first(name, preset):
    model = MODELS[name]()
    x = example(model)
    assert torch.equal(relevance(model, x, preset), relevance(model, x, preset))


@every_case
def test_a_retained_graph_can_be_asked_again(name, preset):
    model = MODELS[name]()
    x = example(model)
    y = logits(model, x)
    results = [dlrp.relevance(y, x, preset=preset, retain_graph=keep)[0] for keep in (True, True, False)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@some_cases
def test_presets_take_turns_on_one_graph(name, preset):
    """What one preset left on the graph, another would meet."""
    model = MODELS[name]()
    x = example(model)
    y = logits(model, x)
    presets = ("gradient", preset, "epsilon", preset)
    mixed = [dlrp.relevance(y, x, preset=p, retain_graph=True)[0] for p in presets]
    for p, r in zip(presets, mixed, strict=True):
        assert torch.equal(r, relevance(model, x, p))


@explained_cases
def test_explaining_again_and_in_another_batch(name, preset):
    model = double(name)
    given = IDS if name in ("gpt2", "llama") else example(model, dtype=torch.float64).detach()
    explainer = dlrp.Explainer(model, preset)
    first, second = (explainer(given, target=1).relevance for _ in range(2))
    assert torch.equal(first, second)
    alone = [explainer(row[None], target=1).relevance for row in given]
    assert error(first, torch.cat(alone)) < tolerance(name)


@some_cases
def test_explain_equals_relevance(name, preset):
    """Whether parameters are frozen or followed, values recorded or not."""
    model = double(name)
    x = example(model, dtype=torch.float64)
    expected = relevance(model, x, preset)
    if name in ("gpt2", "llama"):
        ids = IDS[:2]
        y = model(ids, use_cache=False).logits
        found = dlrp.explain(model, ids, use_cache=False, preset=preset, target=y[:, -1].argmax(-1).tolist())
        assert error(found.relevance, expected.sum(-1)) < tolerance(name)
    else:
        assert error(dlrp.explain(model, x.detach(), preset=preset).relevance, expected) < tolerance(name)


# ---------------------------------------------------------------- the same tensor twice, two tensors at once


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic", "gamma", "epsilon-plus-flat"])
def test_a_leaf_used_twice_takes_both_parts(preset):
    model = randomise(Twice(), std=0.5).double()
    model.right = nn.Linear(6, 7).double()
    x = gaussian(3, 6, dtype=torch.float64).requires_grad_()
    a, b = x.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    (both,) = dlrp.relevance(model(x, x), x, preset=preset)
    left, right = dlrp.relevance(model(a, b), [a, b], preset=preset)
    assert error(both, left + right) < TOLERANCE


@every_case
def test_the_same_tensor_asked_for_twice(name, preset):
    model = MODELS[name]()
    x = example(model)
    first, second = dlrp.relevance(logits(model, x), [x, x], preset=preset)
    assert torch.equal(first, second)
    assert torch.equal(first, relevance(model, x, preset))


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic", "gamma", "epsilon-plus-flat", "epsilon-alpha2-beta1"])
def test_two_inputs_at_once_equal_each_alone(preset):
    model = randomise(Twice(), std=0.5).double()
    a = gaussian(3, 6, dtype=torch.float64).requires_grad_()
    b = gaussian(3, 5, seed=1, dtype=torch.float64).requires_grad_()
    both = dlrp.relevance(model(a, b), [a, b], preset=preset)
    swapped = dlrp.relevance(model(a, b), [b, a], preset=preset)
    (left,) = dlrp.relevance(model(a, b), a, preset=preset)
    (right,) = dlrp.relevance(model(a, b), b, preset=preset)
    for actual, expected in ((both[0], left), (both[1], right), (swapped[1], left), (swapped[0], right)):
        assert error(actual, expected) < TOLERANCE


class Taps(nn.Module):
    """Runs a model and keeps what flows out of some of its modules."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.kept = model, {}
        for name in names:
            model.get_submodule(name).register_forward_hook(self._keep(name))

    def _keep(self, name: str) -> Callable:
        def hook(module, args, output):
            self.kept[name] = output[0] if isinstance(output, tuple) else output

        return hook

    def forward(self, x: Tensor) -> Tensor:
        return logits(self.model, x)


TAPS = {"mlp": "second", "resnet": "blocks.0", "gpt2": "transformer.h.0", "llama": "model.layers.0"}


@every_case
def test_intermediate_tensors_are_inputs_too(name, preset):
    """The relevance of a hidden state is that of the rest of the model run on it alone; and x keeps its own."""
    model = double(name)
    tapped = Taps(model, (TAPS[name],))
    x = example(model, dtype=torch.float64)

    y = tapped(x)
    hidden = tapped.kept[TAPS[name]]
    (alone,) = dlrp.relevance(y, hidden, preset=preset, retain_graph=True)
    assert alone.shape == hidden.shape
    together = dlrp.relevance(y, [hidden, x], preset=preset)
    assert error(together[0], alone) < tolerance(name)
    if preset != "epsilon-plus-flat":  # there the layer above a requested tensor is a first layer
        assert error(together[1], relevance(model, x, preset)) < tolerance(name)


def test_the_relevance_of_the_output_is_the_seed():
    model = mlp()
    y = model(example(model))
    seed = gaussian(2, 4, seed=3)
    (r,) = dlrp.relevance(y, y, seed=seed)
    torch.testing.assert_close(r, seed)


# ---------------------------------------------------------------- outputs and seeds


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic", "gamma", "epsilon-plus-flat"])
def test_relevance_of_several_outputs_adds_up(preset):
    class Heads(Mlp):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(9, 3)

        def forward(self, x):
            hidden = F.relu(self.first(x))
            return hidden, self.third(F.relu(self.second(hidden))), self.other(hidden)

    model = randomise(Heads(), std=0.5).double()
    x = gaussian(3, 6, dtype=torch.float64).requires_grad_()
    outputs = model(x)
    (all_at_once,) = dlrp.relevance(outputs, x, preset=preset, retain_graph=True)
    alone = [dlrp.relevance(output, x, preset=preset, retain_graph=True)[0] for output in outputs]
    assert error(all_at_once, sum(alone)) < TOLERANCE
    (twice,) = dlrp.relevance([outputs[1], outputs[1]], x, preset=preset)
    assert error(twice, 2 * alone[1]) < TOLERANCE


@every_case
def test_relevance_is_linear_in_the_seed(name, preset):
    model = double(name)
    x = example(model, dtype=torch.float64)
    y = logits(model, x)
    one, two = (gaussian(*y.shape, seed=seed, dtype=torch.float64) for seed in (1, 2))
    r1, r2, mixed = (
        dlrp.relevance(y, x, seed=seed, preset=preset, retain_graph=True)[0] for seed in (one, two, 2 * one - 0.5 * two)
    )
    assert error(mixed, 2 * r1 - 0.5 * r2) < tolerance(name)


@pytest.mark.parametrize("times", [1e-6, 1e6])
@every_case
def test_relevance_scales_with_the_seed(name, preset, times):
    model = MODELS[name]()
    x = example(model)
    y = logits(model, x)
    seed = gaussian(*y.shape, seed=1)
    plain, scaled = (dlrp.relevance(y, x, seed=s, preset=preset, retain_graph=True)[0] for s in (seed, times * seed))
    assert error(scaled / times, plain) < 1e-4


@pytest.mark.parametrize("preset", ["dynamic", dlrp.preset("attnlrp") | {"pool": dlrp.UniformPool()}])
def test_relevance_of_zeros_scales_too(preset):
    """The uniform pool hands relevance to exact zeros, and the product below it has to take it."""
    model = randomise(Gated())
    x = gaussian(2, 3, 8, 8, seed=5).requires_grad_()
    y = model(x)
    seed = gaussian(*y.shape, seed=1)
    plain, scaled = (dlrp.relevance(y, x, seed=s, preset=preset, retain_graph=True)[0] for s in (seed, 1e6 * seed))
    assert error(scaled / 1e6, plain) < 1e-4


def test_one_seed_for_each_output():
    model = mlp().double()
    x = example(model, dtype=torch.float64)
    y = model(x)
    seed = gaussian(2, 4, dtype=torch.float64)
    (r,) = dlrp.relevance([y, y], x, seed=[seed, None], retain_graph=True)
    (a,) = dlrp.relevance(y, x, seed=seed, retain_graph=True)
    (b,) = dlrp.relevance(y, x)
    assert error(r, a + b) < TOLERANCE


# ---------------------------------------------------------------- known special cases


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 5, 3, stride=2, bias=False)
        self.head = nn.Linear(5, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        return self.head(F.relu(self.conv2(x)).mean((2, 3)))


@pytest.mark.parametrize(
    "preset", ["attnlrp", "cp-lrp", dlrp.preset("epsilon", eps=0.0), dlrp.preset("gamma", gamma=0.0, eps=0.0)]
)
@pytest.mark.parametrize("build, shape", [(lambda: Mlp(bias=False), (3, 6)), (ConvNet, (3, 3, 10, 10))])
def test_gradient_times_input_is_lrp_0_without_biases(build, shape, preset):
    model = randomise(build(), std=0.5).double()
    x = gaussian(*shape, dtype=torch.float64).requires_grad_()
    score = model(x)[:, 2]
    (gradient,) = torch.autograd.grad(score.sum(), x)
    a = dlrp.explain(model, x.detach(), target=2, preset=preset)
    assert error(a.relevance, x.detach() * gradient) < TOLERANCE
    assert error(a.relevance.flatten(1).sum(1), score.detach()) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_preset_is_gradient_times_input(name):
    model = MODELS[name]()
    x = example(model)
    y = logits(model, x)
    seed = torch.zeros_like(y)
    seed[:, 1] = y.detach()[:, 1]
    (gradient,) = torch.autograd.grad(y[:, 1].sum(), x, retain_graph=True)
    (r,) = dlrp.relevance(y, x, seed=seed, preset="gradient")
    torch.testing.assert_close(r, x.detach() * gradient)


# ---------------------------------------------------------------- sharing


class Recurrent(nn.Module):
    """One module three times, its weight tied to the head's."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        if tied:
            self.head.weight = self.inner.weight
            self.steps = [self.inner] * 3
        else:
            self.copies = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.steps = list(self.copies)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = x + F.relu(step(self.norm(x)))
        return self.head(x)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("preset", ["attnlrp", "dynamic", "gamma", "epsilon-plus-flat"])
def test_shared_modules_and_tied_weights(preset, frozen):
    tied, untied = randomise(Recurrent(tied=True)).double(), Recurrent(tied=False).double().eval()
    state = tied.state_dict()
    for i in range(3):
        state |= {f"copies.{i}.{key}": state[f"inner.{key}"] for key in ("weight", "bias")}
    untied.load_state_dict(state)
    for model in (tied, untied):
        model.requires_grad_(not frozen)
    x = gaussian(3, 6, dtype=torch.float64)
    a, b = (dlrp.explain(model, x, preset=preset) for model in (tied, untied))
    assert error(a.relevance, b.relevance) < TOLERANCE
    if not frozen:
        x = x.requires_grad_()
        (a,), (b,) = (dlrp.relevance(model(x), x, preset=preset) for model in (tied, untied))
        assert error(a, b) < TOLERANCE


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic", "gamma", "cp-lrp"])
def test_tied_embeddings(preset):
    tied, untied = gpt2().double(), gpt2(tie_word_embeddings=False).double()
    untied.load_state_dict(tied.state_dict())
    assert tied.lm_head.weight is tied.transformer.wte.weight
    assert untied.lm_head.weight is not untied.transformer.wte.weight
    a, b = (dlrp.explain(model, IDS, target=3, preset=preset) for model in (tied, untied))
    assert error(a.relevance, b.relevance) < TOLERANCE


@pytest.mark.parametrize(
    "preset", ["attnlrp", "dynamic", "gamma", "epsilon-plus", "epsilon-plus-flat", "epsilon-alpha2-beta1"]
)
@pytest.mark.parametrize("build", [mlp, resnet])
def test_in_place_relu_equals_out_of_place(build, preset):
    inside, outside = build(inplace=True).double(), build(inplace=False).double()
    outside.load_state_dict(inside.state_dict())
    x = example(inside, dtype=torch.float64)
    assert error(relevance(inside, x, preset), relevance(outside, x, preset)) < TOLERANCE
    a, b = (dlrp.explain(model, x.detach(), preset=preset) for model in (inside, outside))
    assert error(a.relevance, b.relevance) < TOLERANCE


# ---------------------------------------------------------------- checkpointing


class Checkpointed(ResNet):
    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.stem, x, use_reentrant=False)
        x = self.pool(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.mean(x).flatten(1))


CHECKPOINTED = ["attnlrp", "dynamic", "gamma", "epsilon-plus", "epsilon-plus-flat", "gradient"]


@pytest.mark.parametrize("preset", CHECKPOINTED)
def test_checkpointing_a_conv_net_changes_nothing(preset):
    plain = resnet()
    model = Checkpointed().eval()
    model.load_state_dict(plain.state_dict())
    x = example(plain)
    expected = relevance(plain, x, preset)
    y = model(x)
    for keep in (True, False):
        torch.testing.assert_close(dlrp.relevance(y, x, preset=preset, retain_graph=keep)[0], expected)
    torch.testing.assert_close(dlrp.explain(model, x.detach(), preset=preset).relevance, expected)


@pytest.mark.parametrize(
    "build, preset",
    [(gpt2, "attnlrp"), (gpt2, "dynamic"), (gpt2, "gamma"), (gpt2, "cp-lrp"), (llama, "attnlrp"), (llama, "gamma")],
)
def test_checkpointing_a_transformer_changes_nothing(build, preset):
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if build is gpt2 else {}
    model = build(**quiet)
    x = example(model)
    expected = relevance(model, x, preset)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()  # transformers checkpoints in training mode only
    y = logits(model, x)
    for keep in (True, False):
        torch.testing.assert_close(dlrp.relevance(y, x, preset=preset, retain_graph=keep)[0], expected)


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic", "gamma"])
def test_a_ledger_of_a_checkpointed_model(preset):
    plain = resnet()
    model = Checkpointed().eval()
    model.load_state_dict(plain.state_dict())
    x = gaussian(2, 3, 8, 8)
    a, b = (dlrp.explain(net, x, preset=preset, ledger=True) for net in (plain, model))
    torch.testing.assert_close(b.relevance, a.relevance)
    assert b.ledger.kept == pytest.approx(a.ledger.kept, abs=1e-4)


# ---------------------------------------------------------------- precision


def ranks(x: Tensor) -> Tensor:
    return x.flatten().double().argsort().argsort().double()


def agrees(low: Tensor, full: Tensor, preset: str) -> bool:
    """By Spearman's correlation; by Pearson's where a flat first layer makes ties, whose ranks mean nothing."""
    pair = [x.flatten().double() if preset == "epsilon-plus-flat" else ranks(x) for x in (low, full)]
    return torch.corrcoef(torch.stack(pair))[0, 1].item() > (0.8 if preset == "dynamic" else 0.9)


@every_case
def test_float64_equals_float32(name, preset):
    model = MODELS[name]()
    x = example(model)
    low = relevance(model, x, preset)
    high = relevance(copy.deepcopy(model).double(), x.detach().double().requires_grad_(), preset)
    assert low.dtype == torch.float32 and high.dtype == torch.float64
    assert error(low.double(), high) < (1e-2 if preset == "dynamic" else 1e-4)


@every_case
def test_bfloat16_keeps_the_ranks(name, preset):
    model = MODELS[name]()
    x = example(model)
    y = logits(model, x).detach()
    seed = torch.zeros_like(y)
    seed[:, 1] = y[:, 1]
    full = relevance(model, x, preset, seed=seed)
    half = relevance(model.bfloat16(), x.detach().bfloat16().requires_grad_(), preset, seed=seed)
    assert half.dtype == torch.bfloat16
    assert torch.isfinite(half).all()
    assert agrees(half, full, preset)


@every_case
@pytest.mark.parametrize("inside", [True, False])
def test_autocast(name, preset, inside):
    """The forward pass under autocast, relevance under it or not."""
    model = MODELS[name]()
    x = example(model)
    y = logits(model, x).detach()
    seed = torch.zeros_like(y)
    seed[:, 1] = y[:, 1]
    full = relevance(model, x, preset, seed=seed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = logits(model, x)
        if inside:
            (r,) = dlrp.relevance(mixed, x, seed=seed, preset=preset)
    if not inside:
        (r,) = dlrp.relevance(mixed, x, seed=seed, preset=preset)
    assert r.dtype == x.dtype
    assert torch.isfinite(r).all()
    assert agrees(r, full, preset)


@some_cases
def test_explain_under_autocast(name, preset):
    model = MODELS[name]()
    given = IDS if name in ("gpt2", "llama") else example(model).detach()
    full = dlrp.explain(model, given, target=1, preset=preset).relevance
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = dlrp.explain(model, given, target=1, preset=preset)
    assert torch.isfinite(a.relevance).all()
    if full.numel() > 20:  # ranks of ten tokens say little
        assert agrees(a.relevance, full, preset)
    else:
        assert torch.nn.functional.cosine_similarity(a.relevance.flatten(), full.flatten(), 0) > 0.9


# ---------------------------------------------------------------- threads


def in_threads(count: int, call: Callable[[int], Tensor]) -> list[Tensor]:
    results: list[Tensor | BaseException | None] = [None] * count

    def work(i: int) -> None:
        try:
            results[i] = call(i)
        except BaseException as problem:
            results[i] = problem

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@some_cases
def test_four_threads_on_one_model_agree_with_single_runs(name, preset):
    model = MODELS[name]()
    inputs = [example(model).detach() * (1 + i) for i in range(4)]
    alone = [relevance(model, x.clone().requires_grad_(), preset) for x in inputs]
    for _ in range(3):
        together = in_threads(4, lambda i: relevance(model, inputs[i].clone().requires_grad_(), preset))
        assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


class Meeting(Mlp):
    """Forward passes of several threads meet half-way, unless something keeps them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier: threading.Barrier | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first(x))
        if self.barrier is not None:
            with suppress(threading.BrokenBarrierError):  # one at a time: as good
                self.barrier.wait(0.3)
        return self.third(F.relu(self.second(hidden)))


@pytest.mark.parametrize(
    "preset", ["attnlrp", "dynamic", "gamma", dlrp.preset("attnlrp") | {"second": dlrp.Epsilon(0.5)}]
)
def test_four_threads_on_one_explainer_agree_with_single_runs(preset):
    """And the model is as it was: the second thread must not take the first one's frozen parameters for the user's."""
    model = randomise(Meeting(), std=0.5)
    inputs = [gaussian(2, 6, seed=i) for i in range(4)]
    explainer = dlrp.Explainer(model, preset)
    alone = [explainer(x, target=1, layers=["first"]) for x in inputs]
    model.barrier = threading.Barrier(4)
    with leaves_nothing_behind(model):
        together = in_threads(4, lambda i: explainer(inputs[i], target=1, layers=["first"]))
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a.relevance, b.relevance)
        assert torch.equal(a.layers["first"], b.layers["first"])


# ---------------------------------------------------------------- nothing left behind


class Broken(dlrp.Rule):
    """Raises in the middle of the backward pass."""

    def after(self, here, grads, s):
        raise ZeroDivisionError("this rule is broken")


class BrokenBefore(dlrp.Rule):
    def before(self, here, s):
        raise ZeroDivisionError("this rule is broken")


def broken(name: str, rule: dlrp.Rule) -> dlrp.Preset:
    """The rule for something deep inside, after other hooks have run."""
    deep = {"mlp": "Relu", "resnet": "MaxPool2DWithIndices", "gpt2": "NativeLayerNorm", "llama": "Silu"}
    return dlrp.preset("gamma") | {deep[name]: rule}


def own_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(logits(model, x).square().sum(), [x, *model.parameters()], allow_unused=True))


def equal(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return all((p is None and q is None) or torch.equal(p, q) for p, q in zip(a, b, strict=True))


@every_case
def test_a_call_changes_nothing(name, preset):
    model = MODELS[name]()
    x = example(model)
    before = own_gradients(model, x)
    y = logits(model, x)
    weight = gaussian(*y.shape, seed=4)
    (true,) = torch.autograd.grad(y, x, weight, retain_graph=True)
    with leaves_nothing_behind(model, x, y):
        dlrp.relevance(y, x, preset=preset, retain_graph=True)
    (after,) = torch.autograd.grad(y, x, weight, retain_graph=True)
    assert torch.equal(after, true)  # no hook is left on any node
    assert equal(own_gradients(model, x), before)
    given = IDS if name in ("gpt2", "llama") else x.detach()
    with leaves_nothing_behind(model, given):
        dlrp.explain(model, given, preset=preset, ledger=True)
    assert equal(own_gradients(model, x), before)


@pytest.mark.parametrize("rule", [Broken(), BrokenBefore()], ids=["after", "before"])
@pytest.mark.parametrize("name", MODELS)
def test_an_exception_in_a_rule_changes_nothing(name, rule):
    model = MODELS[name]()
    x = example(model)
    before = own_gradients(model, x)
    y = logits(model, x)
    weight = gaussian(*y.shape, seed=4)
    (true,) = torch.autograd.grad(y, x, weight, retain_graph=True)
    with leaves_nothing_behind(model, x, y), pytest.raises(ZeroDivisionError, match="this rule is broken"):
        dlrp.relevance(y, x, preset=broken(name, rule), retain_graph=True)
    (after,) = torch.autograd.grad(y, x, weight, retain_graph=True)
    assert torch.equal(after, true)
    (r,) = dlrp.relevance(y, x, preset="gamma")
    assert torch.equal(r, relevance(model, x, "gamma"))
    assert equal(own_gradients(model, x), before)
    given = IDS if name in ("gpt2", "llama") else x.detach()
    with leaves_nothing_behind(model, given), pytest.raises(ZeroDivisionError, match="this rule is broken"):
        dlrp.explain(model, given, preset=broken(name, rule))
    assert equal(own_gradients(model, x), before)


def test_mixed_requires_grad_flags_come_back():
    model = mlp()
    model.first.requires_grad_(False)
    model.third.bias.requires_grad_(False)
    for preset in ("attnlrp", "dynamic"):
        with leaves_nothing_behind(model):
            dlrp.explain(model, gaussian(2, 6), preset=preset)


def test_gradients_that_were_there_stay():
    model = mlp()
    model(gaussian(2, 6)).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    x = gaussian(2, 6).requires_grad_()
    model(x).sum().backward()
    kept, before = x.grad.clone(), [p.grad.clone() for p in model.parameters()]
    dlrp.relevance(model(x), x, preset="dynamic")
    dlrp.explain(model, x, preset="dynamic")
    assert torch.equal(x.grad, kept)
    assert equal([p.grad for p in model.parameters()], before)


def test_the_callers_hooks_stay_and_do_not_matter():
    """A hook of the user's own on a tensor or module is none of our business, and stays."""
    model = mlp()
    calls = []
    handle = model.second.register_forward_hook(lambda *_: calls.append(1))
    with leaves_nothing_behind(model):
        dlrp.explain(model, gaussian(2, 6))
    assert calls
    handle.remove()


# ---------------------------------------------------------------- memory


class Probe:
    pass


@contextmanager
def no_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def plant(model: nn.Module, living: list) -> list:
    """Watch every module's output: its memory, and the autograd node that made it."""

    def hook(module, args, output):
        tensor = output[0] if isinstance(output, tuple) else getattr(output, "logits", output)
        if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
            probe = Probe()
            tensor.grad_fn.metadata["probe"] = probe  # lives as long as the node in C++
            living.append(weakref.ref(probe))
            living.append(weakref.ref(tensor.untyped_storage()))

    return [module.register_forward_hook(hook) for module in model.modules()]


def alive(living: list) -> int:
    return sum(ref() is not None for ref in living)


@every_case
def test_the_graph_is_freed_without_the_garbage_collector(name, preset):
    model = MODELS[name]()
    x = example(model)
    living: list = []
    plant(model, living)
    with no_collector():
        y = logits(model, x)
        held = alive(living)
        dlrp.relevance(y, x, preset=preset, retain_graph=True)
        r = dlrp.relevance(y, x, preset=preset)
        del y
        assert held > 4
        assert alive(living) == 0
        assert r[0].grad_fn is None


@explained_cases
@pytest.mark.parametrize("ledger", [False, True])
def test_an_attribution_does_not_hold_the_graph(name, preset, ledger):
    model = MODELS[name]()
    given = IDS if name in ("gpt2", "llama") else example(model).detach()
    explainer = dlrp.Explainer(model, preset)
    living: list = []
    plant(model, living)
    with no_collector():
        a = explainer(given, ledger=ledger)
        last = a.prediction.untyped_storage()
        left = [ref() for ref in living if ref() is not None]
        assert living
        assert all(isinstance(thing, torch.UntypedStorage) and thing.data_ptr() == last.data_ptr() for thing in left)


@pytest.mark.parametrize("rule", [Broken(), BrokenBefore()], ids=["after", "before"])
@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_freed_after_an_exception(name, rule):
    model = MODELS[name]()
    x = example(model)
    preset = broken(name, rule)
    living: list = []
    plant(model, living)
    given = IDS if name in ("gpt2", "llama") else x.detach()

    def fails(call: Callable[..., object], *args: object) -> bool:
        try:
            call(*args, preset=preset)
        except ZeroDivisionError:
            return True
        return False

    with no_collector():
        y = logits(model, x)
        assert fails(dlrp.relevance, y, x)
        del y
        assert living and alive(living) == 0
        assert fails(dlrp.explain, model, given)
        assert alive(living) == 0


def test_a_refused_call_frees_the_graph():
    model = mlp()
    x = example(model)
    living: list = []
    plant(model, living)
    with no_collector():
        y = model(x)
        for options in ({"preset": "nonsense"}, {"seed": torch.ones(3)}):
            with suppress(dlrp.LRPError):
                dlrp.relevance(y, x, **options)
        del y
        assert living and alive(living) == 0

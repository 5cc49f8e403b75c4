"""Shortcuts hand down what the nodes that they pass would: the same relevance, and nothing left behind."""

from __future__ import annotations

# isort: off
import oracles  # noqa: F401  mends torchvision before transformers imports it

# isort: on
import gc
import importlib
import weakref
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import dynamiclrp as dlrp
from dynamiclrp.plan import Plan
from models import gaussian, randomise
from oracles import error

plans = importlib.import_module("dynamiclrp.planning")
DOUBLE = torch.float64


def kinds(plan: Plan) -> Counter[str]:
    return Counter(type(shortcut).__name__ for shortcut in plan.shortcuts)


@pytest.fixture
def without(monkeypatch):
    """Run something without shortcuts."""

    def run(call):
        with monkeypatch.context() as patch:
            patch.setattr(plans, "find_shortcuts", lambda graph, steps: ())
            return call()

    return run


# ---------------------------------------------------------------- real architectures

DECODER = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4,
}  # fmt: skip
SMALL_T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
# model → what is found under `attnlrp`; every norm but the first, which is beside an input, and the last, which is beside nothing
MODELS = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**DECODER)), {"Rotation": 6, "Scaling": 5}),
    "qwen 3": (lambda: Qwen3ForCausalLM(Qwen3Config(**DECODER)), {"Rotation": 6, "Scaling": 5}),
    "gemma 3": (lambda: Gemma3ForCausalLM(Gemma3TextConfig(**DECODER)), {"Rotation": 6, "Scaling": 5}),
    "t5": (
        lambda: T5ForConditionalGeneration(T5Config(**SMALL_T5, feed_forward_proj="gated-gelu", decoder_start_token_id=0)),
        {"Scaling": 3 + 5},
    ),
    "mamba": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=16, state_size=4, num_hidden_layers=3)),
        {"Selections": 9, "Scaling": 2},
    ),
}  # fmt: skip


def built(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, object]]:
    model = randomise(MODELS[name][0](), std=0.1).to(dtype)
    inputs: dict[str, object] = {"inputs_embeds": gaussian(2, 7, 16, dtype=dtype), "use_cache": False}
    if name == "t5":
        inputs["decoder_inputs_embeds"] = gaussian(2, 4, 16, seed=1, dtype=dtype)
    return model, inputs


@pytest.mark.parametrize("preset", ["attnlrp", "default", "gamma", "cp-lrp", "dynamic", "gradient"])
@pytest.mark.parametrize("name", MODELS)
def test_architectures_get_the_same_relevance(name, preset, without):
    model, inputs = built(name)

    def call():
        return dlrp.explain(model, preset=preset, target=3, **inputs)

    found, expected = call(), without(call)
    assert not expected.plan.shortcuts
    if preset == "attnlrp":
        assert kinds(found.plan) == MODELS[name][1]
    for key, relevance in expected.relevances.items():
        assert error(found.relevances[key], relevance) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_half_types_keep_their_ranks(name, without):
    model, inputs = built(name, torch.bfloat16)

    def call():
        return dlrp.explain(model, preset="attnlrp", target=3, **inputs).relevances["inputs_embeds"].float()

    pair = torch.stack([call().flatten(), without(call).flatten()])
    assert torch.corrcoef(pair)[0, 1] > 0.999


# ---------------------------------------------------------------- selections


class Scan(nn.Module):
    """A loop over selections, which a test may choose."""

    def __init__(self, indices=(0, 1, 2, 3), dim: int = 1, how=None) -> None:
        super().__init__()
        self.inner, self.head, self.indices, self.dim, self.how = nn.Linear(4, 4), nn.Linear(4, 3), indices, dim, how

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.how == "split":
            first, x = x.repeat(1, 1, 2).split(4, -1)
        state: Tensor | float = 0.0
        for index in self.indices:
            part = x.select(self.dim, index)
            state = torch.tanh(part + 0.5 * state) * part
        if self.how == "beside":
            state = state + x.mean(1)
        if self.how == "mixed":
            state = state + x.select(2, 1)
        if self.how == "unused":  # a gate takes nothing
            state = state * torch.sigmoid(x.select(self.dim, 1))
        if self.how == "split":
            state = state + first.sum(1)
        return self.head(state)


@pytest.mark.parametrize("preset", ["attnlrp", "cp-lrp", "gamma", "dynamic", "gradient"])
@pytest.mark.parametrize(
    ("scan", "expected"),
    [
        ({}, 1),
        ({"indices": (3, -2, 0, 1)}, 1),
        ({"indices": (0, 2, 2, 2, 0)}, 1),  # some twice, some not at all
        ({"indices": (0, 2, 1), "dim": -2}, 1),
        ({"indices": (0, 1)}, 0),
        ({"how": "beside"}, 0),
        ({"how": "split"}, 1),
        ({"how": "mixed"}, 1),
        ({"how": "unused"}, None),
    ],
    ids=str,
)
def test_selections(scan, expected, preset, without):
    torch.manual_seed(0)
    model, x = Scan(**scan).double().eval(), gaussian(2, 4, 4, dtype=DOUBLE)

    def call():
        return dlrp.explain(model, x, preset=preset, target=1)

    found = call()
    if expected is not None and preset != "cp-lrp":  # where relevance comes from the last one alone
        assert kinds(found.plan)["Selections"] == expected
    assert error(found.relevance, without(call).relevance) < 1e-12


def test_selections_from_an_input_and_from_a_layer_that_is_watched(without):
    torch.manual_seed(0)
    model, x = Scan().double().eval(), gaussian(2, 4, 4, dtype=DOUBLE)

    def call():
        return dlrp.explain(model, x, layers=["inner"], preset="attnlrp", target=1)

    found, expected = call(), without(call)
    assert not found.plan.shortcuts  # what is asked for is noted before hooks are called
    assert error(found.layers["inner"], expected.layers["inner"]) < 1e-12

    class FromInput(Scan):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.stack([x.select(1, i) * x.select(1, 3 - i) for i in range(4)]).sum(0))

    assert not dlrp.explain(FromInput().double().eval(), x, preset="attnlrp").plan.shortcuts


def test_selections_are_put_together_once():
    """The own backward of each selection fills a tensor of the whole size."""
    torch.manual_seed(0)
    model, x = Scan(tuple(range(50))).eval(), gaussian(2, 50, 4)
    counts = counted(dlrp.Explainer(model, "attnlrp"), x)
    assert counts["aten::select_backward"] == 1
    assert counts["aten::stack"] == 1


# ---------------------------------------------------------------- norms


class Norms(nn.Module):
    """Residual blocks whose norm is written out."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.maps = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.weights = nn.ParameterList(nn.Parameter(0.5 + torch.rand(6)) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def norm(self, x: Tensor, i: int) -> Tensor:
        how = self.how
        if how == "quotient":
            return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * self.weights[i]
        if how == "plain":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        if how == "casts":
            wide = x.float()
            return ((wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)) * (1 + self.weights[i].float())).to(
                x
            )
        if how == "centred":
            x = x - x.mean(-1, keepdim=True)
        return self.weights[i] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) / 2

    def forward(self, x: Tensor) -> Tensor:
        x = self.maps[0](x)
        for i in (1, 2):
            more = self.maps[i](F.silu(self.norm(x, i)))
            if self.how == "parallel":
                more = more + self.norm(x, 0)
            x = more if self.how == "no residual" else x * torch.sigmoid(more) if self.how == "gated" else x + more
        return self.head(self.norm(x, 0)).mean(1)


@pytest.mark.parametrize("preset", ["attnlrp", "default", "cp-lrp", "gamma", "epsilon", "dynamic"])
@pytest.mark.parametrize(
    ("how", "expected"),
    [("quotient", 2), ("plain", 2), ("casts", 2), ("weighted", 2), ("centred", 0), ("parallel", 4), ("no residual", 0), ("gated", None)],
)  # fmt: skip
def test_norms(how, expected, preset, without):
    torch.manual_seed(0)
    model, x = Norms(how).double().eval(), gaussian(2, 4, 6, dtype=DOUBLE)

    def call():
        return dlrp.explain(model, x, preset=preset, target=1)

    found = call()
    if preset == "attnlrp" and expected is not None:
        assert kinds(found.plan)["Scaling"] == expected
    assert error(found.relevance, without(call).relevance) < (1e-6 if how == "casts" else 1e-12)


def counted(explainer: dlrp.Explainer, x: Tensor) -> Counter[str]:
    """Torch's operations in the second of two explanations."""
    explainer(x)
    with torch.profiler.profile() as profile:
        explainer(x)
    return Counter({event.key: event.count for event in profile.key_averages()})


def test_the_statistic_is_not_worked_out(without):
    model, x = Norms("plain").eval(), gaussian(2, 4, 6)
    shorter = counted(dlrp.Explainer(model, "attnlrp"), x)
    longer = without(lambda: counted(dlrp.Explainer(model, "attnlrp"), x))
    assert longer["aten::sum"] - shorter["aten::sum"] == 2  # by broadcasting of the statistic, in each block
    assert shorter["aten::mul"] < longer["aten::mul"]


# ---------------------------------------------------------------- rotary embeddings


class Rotary(nn.Module):
    """Queries that are turned, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner, self.head = how, nn.Linear(8, 8), nn.Linear(8, 3)
        angles = torch.rand(5, 1 if how == "one angle" else 8, generator=torch.Generator().manual_seed(1)).double()
        self.cos, self.sin = angles.cos(), angles.sin()

    def turned(self, x: Tensor) -> Tensor:
        if self.how == "thirds":
            return torch.cat((x[..., 5:], -x[..., :2], x[..., 2:5]), -1)
        if self.how == "overlapping":
            return torch.cat((-x[..., 2:6], x[..., 1:5]), -1)
        if self.how == "strided":
            return torch.cat((-x[..., 1::2], x[..., ::2]), -1)
        if self.how == "rows":
            return torch.cat((-x[:, 3:], x[:, :3]), 1)
        return torch.cat((-x[..., 4:], x[..., :-4]), -1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.how == "halved":
            x = torch.add(x * self.cos, self.turned(x) * self.sin, alpha=0.5)
        elif self.how == "other order":
            x = self.sin * self.turned(x) + self.cos * x
        else:
            x = (x * self.cos) + (self.turned(x) * self.sin)
        return self.head(x.tanh()).mean(1)


@pytest.mark.parametrize("preset", ["attnlrp", "gamma", "dynamic"])
@pytest.mark.parametrize(
    "how", ["halves", "thirds", "overlapping", "strided", "rows", "halved", "other order", "one angle"]
)
def test_rotary_embeddings(how, preset, without):
    torch.manual_seed(0)
    model, x = Rotary(how).double().eval(), gaussian(2, 5, 8, dtype=DOUBLE)

    def call():
        return dlrp.explain(model, x, preset=preset, target=1)

    found = call()
    assert kinds(found.plan)["Rotation"] == (preset != "dynamic")
    assert error(found.relevance, without(call).relevance) < 1e-12


def test_a_rotary_embedding_fills_nothing():
    model, x = Rotary("halves").float().eval(), gaussian(2, 5, 8)
    model.cos, model.sin = model.cos.float(), model.sin.float()
    counts = counted(dlrp.Explainer(model, "attnlrp"), x)
    assert "aten::slice_backward" not in counts
    assert counts["aten::addcmul_"] == 2


# ---------------------------------------------------------------- all of them

OWN = {"scan": (Scan, (2, 4, 4)), "norms": (lambda: Norms("weighted"), (2, 4, 6)), "rotary": (lambda: Rotary("halves"), (2, 5, 8))}  # fmt: skip


def own(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, shape = OWN[name]
    return make().double().eval(), gaussian(*shape, dtype=DOUBLE)


@pytest.mark.parametrize("name", OWN)
def test_a_callers_graph_is_as_it_was(name):
    model, x = own(name)
    x.requires_grad_()
    output = model(x)
    score = output[:, 1].sum()
    (before,) = torch.autograd.grad(score, x, retain_graph=True)
    seed = output.detach() * torch.tensor([0.0, 1, 0])
    first, second = (dlrp.relevance(output, x, seed=seed, preset="attnlrp", retain_graph=True)[0] for _ in range(2))
    (after,) = torch.autograd.grad(score, x)
    assert torch.equal(before, after)
    assert torch.equal(first, second)
    assert error(first, dlrp.explain(model, x.detach(), target=1, preset="attnlrp").relevance) < 1e-12


@pytest.mark.parametrize("name", OWN)
def test_several_targets_ledgers_and_second_calls(name):
    model, x = own(name)
    explainer = dlrp.Explainer(model, "attnlrp")
    one = explainer(x, target=1)
    assert one.plan.shortcuts
    assert torch.equal(explainer(x, target=1).relevance, one.relevance)
    _, batched = dlrp.explain(model, x, targets=[0, 1], preset="attnlrp")
    assert error(batched.relevance, one.relevance) < 1e-12
    assert error(dlrp.explain(model, x, target=1, preset="attnlrp", ledger=True).relevance, one.relevance) < 1e-12


@pytest.mark.parametrize("name", OWN)
def test_checkpointed_models(name):
    model, x = own(name)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.model, x, use_reentrant=False)

    found = dlrp.explain(Checkpointed(), x, target=1, preset="attnlrp").relevance
    assert error(found, dlrp.explain(model, x, target=1, preset="attnlrp").relevance) < 1e-12


@pytest.mark.parametrize("name", OWN)
def test_nothing_outlives_a_call(name):
    model, x = own(name)
    kept: list[weakref.ref] = []

    class Resident:
        """Lives as long as the node that it hooks on."""

        def __call__(self, *grads: object) -> None:
            pass

    def note(module: nn.Module, args: object, output: Tensor) -> None:
        resident = Resident()
        output.grad_fn.register_hook(resident)
        kept.append(weakref.ref(resident))

    model.head.register_forward_hook(note)
    gc.collect()
    gc.disable()
    try:
        dlrp.explain(model, x, target=1, preset="attnlrp")
        assert kept and all(ref() is None for ref in kept)
    finally:
        gc.enable()


def test_what_a_stopped_pass_leaves_behind():
    """Also where the pass ends in the middle, hooks are taken off."""
    model, x = own("scan")
    x.requires_grad_()
    seen: list[Tensor] = []
    model.inner.register_forward_hook(lambda module, args, output: seen.append(output))
    output = model(x)
    expected = torch.autograd.grad(output[:, 1].sum(), x, retain_graph=True)[0]

    def stop(grad: Tensor) -> None:  # the parts have been taken, and not put back
        raise KeyboardInterrupt

    handle = seen[0].register_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        dlrp.relevance(output, x, preset="attnlrp", retain_graph=True)
    handle.remove()
    assert torch.equal(torch.autograd.grad(output[:, 1].sum(), x)[0], expected)


def test_the_plan_says_how_many():
    model, x = own("norms")
    assert "2 shortcuts, " in str(dlrp.inspect(model, x, preset="attnlrp").plan)
    assert "shortcuts" not in str(dlrp.inspect(model, x, preset="dynamic").plan)


# ---------------------------------------------------------------- on a GPU

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_on_a_gpu(name, dtype, without):
    model, inputs = built(name, dtype)
    model.cuda()
    inputs = {key: value.cuda() if isinstance(value, Tensor) else value for key, value in inputs.items()}

    def call(cuda_graph: bool = False):
        explainer = dlrp.Explainer(model, "attnlrp", cuda_graph=cuda_graph)
        return explainer(target=3, **inputs).relevances["inputs_embeds"].float().flatten()

    expected = without(call)
    for found in (call(), call(cuda_graph=True)):
        if dtype is torch.float32:
            assert error(found, expected) < 1e-4
        else:
            assert torch.corrcoef(torch.stack([found, expected]))[0, 1] > 0.999


@cuda
def test_what_other_streams_made_is_waited_for(without):
    """The norm's branch runs beside the residual connection: what is carried past autograd's own hand-over must not be read early."""

    class Beside(Norms):
        def norm(self, x: Tensor, i: int) -> Tensor:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                made = super().norm(x, i)
                for _ in range(20):  # its turn takes long
                    made = made @ self.slow
            torch.cuda.current_stream().wait_stream(stream)
            made.record_stream(torch.cuda.current_stream())
            return made

    torch.manual_seed(0)
    model, x = Beside("weighted").cuda().eval(), torch.randn(2, 20_000, 6, device="cuda")
    model.slow = torch.linalg.qr(torch.randn(6, 6))[0].cuda()
    explainer = dlrp.Explainer(model, "attnlrp")
    expected = without(lambda: dlrp.explain(model, x, preset="attnlrp", target=1).relevance)
    assert explainer(x, target=1).plan.shortcuts
    for _ in range(20):
        assert error(explainer(x, target=1).relevance, expected) < 1e-4

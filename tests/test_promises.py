"""The Promise System: every value it hands to a rule is the one the forward pass computed, made once, let go in time.

The truth is written down by a dispatch mode while the forward pass runs: each tensor as it was when it was made, by the
autograd node that made it. It shares nothing with the engine but autograd's nodes.
"""

import oracles  # noqa: F401  before transformers: makes its import of torchvision work

# isort: split
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import dynamiclrp as dlrp
import dynamiclrp.capture
import dynamiclrp.run
from dynamiclrp.promise import Absent, Given, Kept, Leaf, Recorded, Replay, Rest, Undo
from samples import RANDOM, Sample, every

# torch announces changes of some of the operations that are sampled
pytestmark = pytest.mark.filterwarnings("ignore:index_reduce", "ignore:torch.triangular_solve")

PRESETS = ["dynamic", "gamma", "epsilon-plus", "epsilon"]
IDS = torch.tensor([[3, 14, 15, 9, 26], [2, 7, 18, 28, 1]])
# Operations whose replay, or what is computed from it, may differ in the last bit.
ANOTHER_KERNEL = {
    "NativeLayerNormBackward0": "computed from its saved statistics",
    "NativeDropoutBackward0": "computed from its saved mask",
    "CloneBackward0": "the same values in another order of memory, which sums may add up in another order",
}
MATRIX_PRODUCTS = {"Mm", "Addmm", "Bmm", "Baddbmm", "Convolution"}


# ---------------------------------------------------------------- truth


def flat(arguments: Any):
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            yield from flat(argument)
        else:
            yield argument


def copied(argument: Any) -> Any:
    return argument.detach().clone() if isinstance(argument, Tensor) else argument


class Truth(TorchDispatchMode):
    """Tensors by (autograd node, output number), and the arguments of each node's call, as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[tuple[Any, int], Tensor] = {}
        self.arguments: dict[Any, list[Any]] = {}
        self.pending: list[tuple[Tensor, Tensor, list[Any]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with _disable_current_modes():  # the engine's own recorder must not see the copies
            self.settle()
            before = [copied(argument) for argument in flat(args)]
        result = func(*args, **(kwargs or {}))
        made = [t for t in flat([result]) if isinstance(t, Tensor)]
        if func._schema.is_mutable:  # a write through a view is a write to all that it is a view of
            made += [t._base for t in made if t._base is not None]
        with _disable_current_modes():
            self.pending = [(t, t.detach().clone(), before) for t in made]
        return result

    def settle(self) -> None:
        """Autograd gives a tensor its node after the operation returned, so nodes are read one operation later."""
        for tensor, value, before in self.pending:
            if tensor.grad_fn is not None:
                self.values.setdefault((tensor.grad_fn, tensor.output_nr), value)
                self.arguments[tensor.grad_fn] = before
        self.pending = []

    def __exit__(self, *exception: Any):
        self.settle()
        return super().__exit__(*exception)


def is_exact(plan: dlrp.Plan, graph: dlrp.Graph, key: tuple) -> bool:
    """Was the value kept, or replayed by the same kernels on kept values?"""
    stack, seen = [key], set()
    while stack:
        source = plan.sources[stack.pop()]
        match source:
            case Rest():
                return False
            case Undo(node) if graph.name(node) in ("Sqrt", "Rsqrt", "Reciprocal"):
                return False
            case Replay(node) if graph.types[node].__name__ in ANOTHER_KERNEL:
                return False
        stack += [operand for operand in source.operands if operand not in seen]
        seen.update(source.operands)
    return True


class Watch:
    """What the engine's values were, compared with the truth as they are handed out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.truth = Truth()
        self.compared: Counter[str] = Counter()  # by the way they were had
        self.runs: list[Any] = []
        watch = self

        class Values(dynamiclrp.run.Values):
            def __init__(self, plan: dlrp.Plan, *arguments: Any, **keywords: Any) -> None:
                self.built: Counter[tuple] = Counter()
                self.names = {id(source): key for key, source in plan.sources.items()}
                super().__init__(plan, *arguments, **keywords)
                watch.runs.append(self)
                for key, value in self.ready.items():
                    watch.compare(self, key, value)

            def take(self, key: tuple) -> Any:
                value = super().take(key)
                watch.compare(self, key, value)
                return value

            def _build(self, source: Any) -> Any:
                value = super()._build(source)
                key = self.names[id(source)]
                self.built[key] += 1
                watch.compare(self, key, value)
                return value

        monkeypatch.setattr(dynamiclrp.run, "Values", Values)

    def compare(self, values: Any, key: tuple, value: Any) -> None:
        source, (kind, node, number) = values.plan.sources[key], key
        self.compared[type(source).__name__] += 1
        handle = values.graph.handles[node]
        where = f"{values.graph.where(node)}, {key}, {source}"
        if value is None:
            assert kind == "constant" and None in [a for a in self.truth.arguments[handle] if a is None], where
        elif kind == "constant":
            assert any(same(value, argument) for argument in self.truth.arguments[handle]), where
        elif type(handle).__name__ == "AccumulateGrad":
            assert torch.equal(value, handle.variable), where
        else:
            true = self.truth.values[handle, number]
            assert value.shape == true.shape and value.dtype == true.dtype, where
            if is_exact(values.plan, values.graph, key):
                assert torch.equal(value, true), where
            else:
                scale = max(float(true.abs().max()), 1.0)
                assert float((value - true).abs().max()) <= 1e-6 * scale, where

    def check_built_once(self) -> None:
        assert self.runs
        assert all(count == 1 for values in self.runs for count in values.built.values())

    def check_let_go(self) -> None:
        """No value that the plan counted on is still held."""
        for values in self.runs:
            assert not values.keep
            held = [key for key in values.ready if values.plan.uses.get(key)]
            assert held == [], [values.graph.where(node) for _, node, _ in held]

    def relevance(self, outputs: Tensor, inputs: Tensor, preset: str) -> dlrp.Plan:
        """Of a graph that was made under this watch's truth."""
        dlrp.relevance(outputs, inputs, preset=preset)
        self.check_built_once()
        return self.runs[-1].plan

    def explain(self, model: nn.Module, *arguments: Any, preset: str, **keywords: Any) -> dlrp.Plan:
        forward = model.forward

        @functools.wraps(forward)
        def watched(*arguments: Any, **keywords: Any) -> Any:
            with self.truth:
                return forward(*arguments, **keywords)

        model.forward = watched
        dlrp.explain(model, *arguments, preset=preset, **keywords)
        self.check_built_once()
        return self.runs[-1].plan


def same(value: Any, argument: Any) -> bool:
    if argument is None or isinstance(argument, (str, bool, torch.dtype, torch.device)):
        return False
    value, argument = (torch.as_tensor(t, dtype=torch.float64) for t in (value, argument))
    return value.shape == argument.shape and torch.equal(value, argument)


@pytest.fixture
def watch(monkeypatch) -> Watch:
    return Watch(monkeypatch)


# ---------------------------------------------------------------- models


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def randomise(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not tensor.is_floating_point():
                continue
            noise = 0.3 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            if name.endswith("running_var") or (name.endswith("weight") and tensor.dim() == 1):
                tensor.copy_(1 + noise.abs())
            elif not name.endswith("inv_freq"):
                tensor.copy_(noise)
    return model.to(dtype).eval()


class ResidualConvNet(nn.Module):
    """Batch-norm everywhere; a plain block, a projected and strided block, a mean over the picture."""

    shape = (2, 3, 8, 8)

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.a1, self.a1_norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.a2, self.a2_norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.b1, self.b2 = nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.project, self.project_norm = nn.Conv2d(4, 6, 1, stride=2, bias=False), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)
        self.relu = nn.ReLU(inplace)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.relu(self.stem_norm(self.stem(x))), 3, 2, 1)
        x = self.relu(x + self.a2_norm(self.a2(self.relu(self.a1_norm(self.a1(x))))))
        x = self.relu(self.project_norm(self.project(x)) + self.b2(self.relu(self.b1(x))))
        return self.head(x.mean((2, 3)))


class InPlaceConvNet(nn.Module):
    """Rectifiers that overwrite what convolutions and sums made, average pools, and one vector that is added in place."""

    shape = (2, 3, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=1)
        self.hidden, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x), inplace=True)
        x = F.relu_(self.second(x).add_(x))
        x = F.avg_pool2d(x, 3).flatten(1)
        return self.head(F.relu(self.hidden(x).add_(x), inplace=True))


class Encoder(nn.Module):
    """nn.TransformerEncoderLayer, twice, and a last norm."""

    shape = (2, 5, 8)

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, activation="gelu", batch_first=True, norm_first=norm_first)
            for _ in range(2)
        )
        self.positions = nn.Parameter(torch.zeros(5, 8))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class Odds(nn.Module):
    """Constants of all sorts, splits, gathers, where, concatenation, casts, written-out norms and gates."""

    shape = (3, 8)

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)
        self.register_buffer("offset", torch.zeros(8))
        self.register_buffer("scale", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = 2 - (x - self.offset) * (self.scale + 1.5)
        a, b, c = self.up(x).split([4, 4, 4], -1)
        y = torch.cat([a * torch.sigmoid(b), torch.where(c > 0, c, torch.zeros_like(c) + 0.1), b.flip(-1)], -1)
        y = self.down(y) + x / (1 + x.pow(2).mean(-1, keepdim=True)).sqrt()
        y = y.float().masked_fill(torch.eye(3, 8).bool(), -0.5).to(x.dtype)
        y = y.gather(-1, torch.arange(7, -1, -1).expand(3, 8)) + torch.ones(8, dtype=x.dtype).cumsum(0)
        return torch.stack([y[:, :4], y[:, 4:]], 1).amax(1)


VISION = {
    "residual conv net": ResidualConvNet,
    "residual conv net, in place": lambda: ResidualConvNet(inplace=True),
    "in-place conv net": InPlaceConvNet,
    "pre-LN encoder": lambda: Encoder(norm_first=True),
    "post-LN encoder": lambda: Encoder(norm_first=False),
}
ODDS = VISION | {"odds": Odds}


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=1))  # fmt: skip


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True,
    ))  # fmt: skip


def bert() -> nn.Module:
    return BertForSequenceClassification(BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16,
    ))  # fmt: skip


def t5() -> nn.Module:
    return T5ForConditionalGeneration(T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_decoder_layers=1, num_heads=2,
        decoder_start_token_id=0, feed_forward_proj="gated-gelu",
    ))  # fmt: skip


TEXT = {"gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5}


def text_arguments(name: str, model: nn.Module, embedded: bool) -> dict[str, Tensor]:
    """Token ids, or the embeddings of them as a leaf."""
    given = (
        {"inputs_embeds": model.get_input_embeddings()(IDS).detach().requires_grad_()}
        if embedded
        else {"input_ids": IDS}
    )
    if name == "t5":
        given["decoder_inputs_embeds" if embedded else "decoder_input_ids"] = (
            model.get_input_embeddings()(IDS[:, :2]).detach() if embedded else IDS[:, :2]
        )
    return given | ({"use_cache": False} if name != "bert" else {})


# ---------------------------------------------------------------- every promised value is the true one


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", VISION)
def test_promised_values_where_parameters_require_gradients(name, dtype, preset, watch):
    model = randomise(VISION[name](), dtype)
    x = gaussian(*model.shape, dtype=dtype).requires_grad_()
    with watch.truth:
        output = model(x)
    watch.relevance(output, x, preset)
    assert sum(watch.compared.values()) > 0


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", VISION)
def test_promised_values_where_all_parameters_are_frozen(name, preset, watch):
    """Their values may be lost; then the plan is refused, and no value is made up."""
    model = randomise(VISION[name]()).requires_grad_(False)
    x = gaussian(*model.shape).requires_grad_()
    with watch.truth:
        output = model(x)
    try:
        watch.relevance(output, x, preset)
    except dlrp.LostActivationError:
        assert not watch.runs


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("name", ODDS)
def test_promised_values_in_explain(name, frozen, preset, watch):
    model = randomise(ODDS[name]()).requires_grad_(not frozen)
    watch.explain(model, gaussian(*model.shape), preset=preset)
    assert sum(watch.compared.values()) > 0


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", TEXT)
def test_promised_values_of_transformers_where_parameters_require_gradients(name, preset, watch):
    model = randomise(TEXT[name]())
    arguments = text_arguments(name, model, embedded=True)
    with watch.truth:
        output = model(**arguments).logits
    watch.relevance(output, arguments["inputs_embeds"], preset)
    assert sum(watch.compared.values()) > 0


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", TEXT)
def test_promised_values_of_transformers_in_explain(name, preset, watch):
    model = randomise(TEXT[name]())
    watch.explain(model, preset=preset, **text_arguments(name, model, embedded=False))
    assert sum(watch.compared.values()) > 0


class TopOf(nn.Module):
    """A sample under a product with a constant, which keeps nothing of it, and a sum, whose rule asks for everything."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.sample = sample

    def forward(self, *operands: Tensor) -> Tensor:
        live = iter(operands)
        given = enumerate(self.sample.make(torch.float64))
        made = [t if t is None or i in self.sample.frozen else next(live) for i, t in given]
        total = sum((y * 0.7).sum() for y in self.sample.outputs(*made)).double()
        # an output of zeros has no relevance to hand back
        return total if total.detach() else total + sum((x * 0.7).sum() for x in operands).double()


@pytest.mark.parametrize("sample", every(), ids=str)
def test_the_output_of_every_operation_can_be_promised(sample, watch):
    given = enumerate(sample.make(torch.float64))
    operands = [t for i, t in given if t is not None and i not in sample.frozen]
    try:
        watch.explain(TopOf(sample).eval(), *operands, preset="dynamic")
        assert watch.compared["Replay"] > 0
    except dlrp.LostActivationError:  # what was drawn at random is gone: refused, never drawn again
        assert sample.node in RANDOM


def test_every_way_of_having_a_value_is_taken(watch):
    """Otherwise the comparisons above would not mean much."""
    ways = Counter()
    no_bias = nn.Sequential(nn.Conv1d(3, 4, 3, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(8, 4))
    for model, shape in ((randomise(Encoder(norm_first=True)), Encoder.shape), (randomise(no_bias), (2, 3, 4))):
        x = gaussian(*shape).requires_grad_()
        with watch.truth:
            output = model(x)
        watch.relevance(output, x, "dynamic")
        ways += watch.compared
    watch.explain(randomise(Odds()), gaussian(*Odds.shape), preset="dynamic")
    ways += watch.compared
    assert {kind.__name__ for kind in (Kept, Leaf, Given, Absent, Recorded, Rest, Undo, Replay)} <= set(ways)


def test_a_wrong_value_would_be_noticed(watch, monkeypatch):
    """The harness itself: a row with a wrong forward fails the comparison."""
    neg = dynamiclrp.ops.OPS["NegBackward0"]
    monkeypatch.setitem(dynamiclrp.ops.OPS, "NegBackward0", dynamiclrp.ops.Op(neg.kind, forward=lambda n, x: x))
    x, w = gaussian(3, 4).requires_grad_(), gaussian(4, seed=1).requires_grad_()
    with watch.truth:
        output = (-x + w)[1:]
    with pytest.raises(AssertionError):
        watch.relevance(output, x, "dynamic")


# ---------------------------------------------------------------- values that are constants of the forward pass


def written_into_zeros(x: Tensor) -> Tensor:
    whole = torch.zeros(3, 6, dtype=x.dtype)
    whole[:, 1:5] = x
    return whole


CONSTANTS = {
    "added": lambda x: x + torch.linspace(-1, 1, 4, dtype=x.dtype),
    "number added": lambda x: x + 0.7,
    "subtracted from": lambda x: torch.linspace(-1, 1, 4, dtype=x.dtype) - x,
    "number subtracted from": lambda x: 2 - x,
    "alpha": lambda x: torch.add(x, torch.ones(4, dtype=x.dtype), alpha=-3),
    "concatenated": lambda x: torch.cat([x, torch.ones(3, 2, dtype=x.dtype)], -1),
    "concatenated in front": lambda x: torch.cat([torch.ones(3, 2, dtype=x.dtype), x], -1),
    "stacked": lambda x: torch.stack([torch.full_like(x, 0.3), x]),
    "filled": lambda x: x.masked_fill(x > 0.5, -2.5),
    "chosen": lambda x: torch.where(x > 0.5, torch.full_like(x, 0.3), x),
    "chosen, number": lambda x: torch.where(x > 0.5, x, 0.3),
    "padded": lambda x: F.pad(x, (1, 1), value=0.4),
    "added in place to zeros": lambda x: torch.zeros(3, 4, dtype=x.dtype).add_(x),
    "added in place to ones": lambda x: torch.ones(3, 4, dtype=x.dtype).add_(x, alpha=2),
    "multiplied in place into a constant": lambda x: torch.full((3, 4), 1.5, dtype=x.dtype).mul_(x),
    "copied into zeros": lambda x: torch.zeros(3, 4, dtype=x.dtype).copy_(x),
    "written into zeros": written_into_zeros,
    "put at indices of ones": lambda x: torch.ones(5, 4, dtype=x.dtype).index_put_((torch.tensor([4, 0, 2]),), x),
    "put at indices of ones, out of place": lambda x: torch.ones(5, 4, dtype=x.dtype).index_put(
        (torch.tensor([4, 0, 2]),), x
    ),
    "scattered into ones": lambda x: torch.ones(3, 6, dtype=x.dtype).scatter(1, torch.tensor([[5, 0, 1, 2]] * 3), x),
    "clamped": lambda x: x.clamp(-0.5, 0.8),
    "lerp": lambda x: torch.lerp(x, torch.ones(4, dtype=x.dtype), 0.3),
    "addcmul": lambda x: torch.addcmul(torch.ones(4, dtype=x.dtype), x, torch.full((4,), 0.3, dtype=x.dtype)),
    "addmm": lambda x: torch.addmm(
        torch.ones(5, dtype=x.dtype), x, torch.linspace(-1, 1, 20, dtype=x.dtype).reshape(4, 5)
    ),
}


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return (self.function(torch.tanh(x)) * 0.7).sum(-1)


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_recorded(name, watch):
    watch.explain(Function(CONSTANTS[name]).eval(), gaussian(3, 4), preset="dynamic")
    assert watch.compared["Replay"] > 0


def overwritten(x: Tensor) -> Tensor:
    constant = torch.linspace(-1, 1, 4, dtype=x.dtype)
    y = x + constant
    constant.mul_(5)
    return y + constant


def test_a_constant_that_is_overwritten_later(watch):
    """Its value at the time is used, or the plan is refused; the later value never."""
    try:
        watch.explain(Function(overwritten).eval(), gaussian(3, 4), preset="dynamic")
    except dlrp.LostActivationError:
        assert not any(watch.compared[kind] for kind in ("Recorded", "Replay"))


def test_a_value_derived_from_a_branch_that_ran_before(watch):
    """z = t - e, where e is picked by indices that the backward pass has freed when z is asked for."""
    x, c = gaussian(3, 4).requires_grad_(), gaussian(5, 6, seed=1).requires_grad_()
    weight = gaussian(4, 6, seed=2).requires_grad_()
    with watch.truth:
        z = x @ weight
        e = torch.tanh(c)[torch.tensor([4, 0, 4])]
        output = F.gelu(z + e)
    watch.relevance(output, (x, c), "epsilon")
    assert watch.compared["Rest"] > 0


# ---------------------------------------------------------------- half types


def ranks(x: Tensor) -> Tensor:
    return x.flatten().argsort().argsort().double()


@pytest.mark.parametrize("preset", ["gamma", "dynamic", "epsilon"])
def test_half_types_take_no_differences(preset):
    """A branch that is small beside its residual is lost in their difference: in bf16 it is replayed, and ranks survive."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=64, n_layer=8, n_head=4)).eval()
    x = torch.randn(1, 48, 64)
    exact = dlrp.explain(model, inputs_embeds=x, target=0, preset=preset)
    found = dlrp.explain(model.bfloat16(), inputs_embeds=x.bfloat16(), target=0, preset=preset)
    assert exact.plan.differences
    assert not found.plan.differences
    both = torch.stack([ranks(a.relevance.float().sum(-1)) for a in (exact, found)])
    assert torch.corrcoef(both)[0, 1] > 0.97


def test_a_residual_is_normalised_again_before_a_product_is_repeated(watch):
    """Behind a layer norm, as in BERT: one pass over memory and a difference, instead of a product."""
    model = randomise(Encoder(norm_first=False))
    watch.explain(model, gaussian(*Encoder.shape), preset="gamma")
    assert watch.compared["Rest"] > 0


# ---------------------------------------------------------------- housekeeping


def test_a_value_that_two_promises_need_is_computed_once(watch):
    x = gaussian(3, 4).requires_grad_()
    weight, shift = gaussian(4, 4, seed=1).requires_grad_(), gaussian(4, seed=2).requires_grad_()
    with watch.truth:
        shared = (x @ weight).neg()
        output = ((shared + shift) + shared.mul(0.5))[1:]
    plan = watch.relevance(output, x, "dynamic")
    (values,) = watch.runs
    assert max(plan.uses.values()) > 1
    assert set(values.built.values()) == {1}
    assert values.ready == {}


def test_a_value_that_two_branches_of_one_promise_need_is_computed_once(watch):
    """Its own operand is let go when the first branch has it; the second must not ask for it again."""
    x = gaussian(3, 4).requires_grad_()
    weight, shift = gaussian(4, 4, seed=1).requires_grad_(), gaussian(4, seed=2).requires_grad_()
    with watch.truth:
        shared = (x @ weight).neg().neg()
        output = (torch.cat([shared, shared.mul(0.5)]) + shift)[1:]
    watch.relevance(output, x, "dynamic")
    (values,) = watch.runs
    assert set(values.built.values()) == {1}
    assert values.ready == {}


@pytest.mark.parametrize("preset", ["dynamic", "gamma"])
@pytest.mark.parametrize("name", VISION)
def test_values_are_let_go_after_their_last_use(name, preset, watch):
    model = randomise(VISION[name]())
    x = gaussian(*model.shape).requires_grad_()
    with watch.truth:
        output = model(x)
    watch.relevance(output, x, preset)
    watch.check_let_go()


@pytest.mark.parametrize("preset", ["dynamic", "gamma", "attnlrp"])
@pytest.mark.parametrize("name", TEXT)
def test_values_are_let_go_after_their_last_use_in_transformers(name, preset, watch):
    """Also where a rule hands nothing down: gates, statistics, queries and keys."""
    model = randomise(TEXT[name]())
    watch.explain(model, preset=preset, **text_arguments(name, model, embedded=False))
    watch.check_let_go()


def test_values_are_let_go_while_the_run_goes_on(watch):
    """Twenty residual blocks: far fewer values are held at any time than there are promises."""
    x = h = gaussian(3, 4).requires_grad_()
    with watch.truth:
        for i in range(20):
            h = h + torch.mm(h, gaussian(4, 4, seed=i).requires_grad_()) * 0.3
        output = h[1:]
    held: list[int] = []
    take = dynamiclrp.run.Values.take

    def counting(values: Any, key: tuple) -> Any:
        value = take(values, key)
        fetched = sum(not source.operands for source in values.plan.sources.values())
        held.append(len(values.ready) - fetched)
        return value

    dynamiclrp.run.Values.take = counting  # the fixture puts the original class back
    watch.relevance(output, x, "dynamic")
    assert held[-1] <= 0


def test_a_long_chain_is_replayed_without_recursion():
    """5,000 views and negations between a sum and the value it asks for."""
    x, w = gaussian(2, 2).requires_grad_(), gaussian(2, 2, seed=1).requires_grad_()
    y = x
    for _ in range(2500):
        y = -y.t()
    output = (y + w)[1:]
    plan = dlrp.plan(output, x, preset="dynamic")
    assert plan.statistics.internal_nodes == 5000
    r, _ = dlrp.relevance(output, (x, w), seed=output.detach(), preset="dynamic")
    a, b = x.detach(), w.detach()
    torch.testing.assert_close(r[1:], ((a + b) * a.abs() / (a.abs() + b.abs()))[1:])
    assert str(plan)


# ---------------------------------------------------------------- plans


def distance(plan: dlrp.Plan, key: tuple) -> int:
    """Steps from a consumer of a value to the farthest Arg node behind it; an Arg node itself is one step away."""
    source = plan.sources[key]
    below = [operand for operand in source.operands if operand[0] == "value"]
    return 1 + max((distance(plan, operand) for operand in below), default=0) if isinstance(source, Replay) else 1


def depth(plan: dlrp.Plan, origin: int, keys: list[tuple]) -> int:
    """The longest way from an origin to an Arg node; its own output is no step away."""
    return max(max(1, distance(plan, key) - (key[:2] == ("value", origin))) for key in keys)


def origins(plan: dlrp.Plan) -> dict[int, list[tuple]]:
    """The nodes whose rule asks for values that they did not save themselves."""
    asked = {step.node: [place for place in step.places.values() if isinstance(place, tuple)] for step in plan.steps}
    return {node: keys for node, keys in asked.items() if keys}


def shared_branches() -> tuple[Tensor, Tensor]:
    """Two sums that ask for one value, four steps away from the one and five from the other."""
    x, w, v = (
        gaussian(3, 4).requires_grad_(),
        gaussian(4, seed=1).requires_grad_(),
        gaussian(4, seed=2).requires_grad_(),
    )
    deep = -torch.tanh(x).t().unsqueeze(0).squeeze(0).t()
    return ((-deep + w) * 0.5 + (deep + v))[1:], x


def plans() -> list[tuple[str, dlrp.Plan]]:
    made = []
    for name in ("residual conv net", "pre-LN encoder", "post-LN encoder", "in-place conv net"):
        model = randomise(VISION[name]())
        x = gaussian(*model.shape).requires_grad_()
        made += [(f"{name}, {preset}", dlrp.plan(model(x), x, preset=preset)) for preset in ("dynamic", "gamma")]
    return [*made, ("shared branches", dlrp.plan(*shared_branches(), preset="dynamic"))]


def test_the_number_of_promises_and_their_density():
    for name, plan in plans():
        s = plan.statistics
        assert s.promises == len(plan.promises) == len(origins(plan)), name
        assert s.density == pytest.approx(s.promises / s.nodes), name


def test_internal_nodes_are_those_inside_of_chains():
    for name, plan in plans():
        replayed = [source for source in plan.sources.values() if isinstance(source, Replay)]
        chained = [source for source in replayed if sum(operand[0] == "value" for operand in source.operands) == 1]
        assert plan.statistics.internal_nodes == len(chained), name


def test_depth_is_the_way_to_the_farthest_arg_node_summed_over_promises():
    for name, plan in plans():
        for promise in plan.promises:
            expected = depth(plan, promise.origin, origins(plan)[promise.origin])
            assert promise.depth == expected, f"{name}: {promise.op} {promise.origin}\n{promise}"
        assert plan.statistics.depth == sum(promise.depth for promise in plan.promises), name


def test_a_shared_branch_is_drawn_once_and_named_twice():
    output, x = shared_branches()
    plan = dlrp.plan(output, x, preset="dynamic")
    text = str(plan)
    assert text.count("Squeeze ← Unsqueeze") == 1
    assert "shared" in text
    for promise in plan.promises:
        assert f"{promise.op} (node {promise.origin})" in text


def test_a_printed_plan_shows_each_promise_with_its_chain_and_arg_node():
    for name, plan in plans():
        text = str(plan)
        for promise in plan.promises:
            assert f"{promise.op} (node {promise.origin})" in text, name
            for branch in promise.branches:
                assert " ← ".join((*branch.chain, branch.arg)) in text, name
        s = plan.statistics
        assert f"{s.promises} promises" in text and f"depth {s.depth}" in text and f"density {s.density:.3f}" in text


def replayed_products(output: Tensor, x: Tensor) -> list[str]:
    graph = dynamiclrp.capture.capture([output], [x], dynamiclrp.ops.OPS)
    plan = dlrp.plan(output, x, preset="dynamic")
    replayed = [source.node for source in plan.sources.values() if isinstance(source, Replay)]
    return [graph.where(node) for node in replayed if graph.name(node) in MATRIX_PRODUCTS]


class HandWrittenPreLN(nn.Module):
    """Pre-LN blocks with fused attention, as in RULES.md: who saved what."""

    shape = (2, 5, 8)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "norm1": nn.LayerNorm(8), "q": nn.Linear(8, 8), "k": nn.Linear(8, 8), "v": nn.Linear(8, 8),
                "out": nn.Linear(8, 8), "norm2": nn.LayerNorm(8), "up": nn.Linear(8, 12), "down": nn.Linear(12, 8),
            })
            for _ in range(3)
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            q, k, v = (block[name](block["norm1"](x)).unflatten(-1, (2, 4)).transpose(1, 2) for name in "qkv")
            attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + block["out"](attended)
            x = x + block["down"](F.gelu(block["up"](block["norm2"](x))))
        return self.head(self.norm(x)[:, 0])


def test_no_matrix_product_is_replayed_under_dynamic_in_a_pre_ln_transformer():
    model = randomise(HandWrittenPreLN())
    x = gaussian(*model.shape).requires_grad_()
    assert replayed_products(model(x), x) == []


def test_no_matrix_product_is_replayed_under_dynamic_in_gpt2():
    model = randomise(gpt2())
    x = model.get_input_embeddings()(IDS).detach().requires_grad_()
    assert replayed_products(model(inputs_embeds=x, use_cache=False).logits, x) == []


def test_only_the_packed_projection_is_replayed_under_dynamic_in_an_encoder_layer():
    """Of `in_proj`, attention saved the three thirds, but nobody saved the whole."""
    model = randomise(Encoder(norm_first=True))
    x = gaussian(*model.shape).requires_grad_()
    assert len(replayed_products(model(x), x)) <= len(model.layers)

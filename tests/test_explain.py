"""The user's verb: which arguments are explained, what a target may be, layers, overrides, and what comes back."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dynamiclrp as dlrp
from models import (
    IDS,
    Mlp,
    Twice,
    bert,
    bert_qa,
    example,
    gaussian,
    gpt2,
    leaves_nothing_behind,
    llama,
    mlp,
    randomise,
    resnet,
    t5,
)
from oracles import error

TOLERANCE = 1e-8
DOUBLE = torch.float64


def chosen(logits: Tensor, target: int) -> Tensor:
    """The seed that keeps one score of each row; of token by token scores, the last token's."""
    seed = torch.zeros_like(logits)
    row = (slice(None), *(-1 for _ in logits.shape[1:-1]), target)
    seed[row] = logits.detach()[row]
    return seed


# ---------------------------------------------------------------- float arguments


def test_positional_and_keyword_arguments_are_the_same():
    model = randomise(Twice(), std=0.5)
    a, b = gaussian(3, 6), gaussian(3, 5, seed=1)
    both = dlrp.explain(model, a, b, target=1)
    for other in (
        dlrp.explain(model, a, b=b, target=1),
        dlrp.explain(model, a=a, b=b, target=1),
        dlrp.explain(model, b=b, a=a, target=1),
    ):
        assert list(other.relevances) == ["a", "b"]  # the model's order, not the caller's
        for name in ("a", "b"):
            assert torch.equal(other.relevances[name], both.relevances[name])
    assert both.relevance is both.relevances["a"]


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic", "gamma", "epsilon-plus-flat"])
def test_several_inputs_equal_relevance_on_the_graph(preset):
    model = randomise(Twice(), std=0.5).double()
    a, b = (gaussian(3, n, seed=n, dtype=DOUBLE) for n in (6, 5))
    found = dlrp.explain(model, a, b, target=1, preset=preset)
    a, b = a.requires_grad_(), b.requires_grad_()
    y = model(a, b)
    expected = dlrp.relevance(y, [a, b], seed=chosen(y, 1), preset=preset)
    for actual, wanted in zip(found.relevances.values(), expected, strict=True):
        assert error(actual, wanted) < TOLERANCE


def test_arguments_that_are_no_tensors_go_through():
    class Scaled(Mlp):
        def forward(self, x, scale, *, power=1, mask=None):
            return super().forward(x) * scale**power if mask is None else super().forward(x * mask)

    model = randomise(Scaled())
    x = gaussian(2, 6)
    a = dlrp.explain(model, x, 2.0, power=3, target=1)
    assert list(a.relevances) == ["x"]
    assert torch.equal(a.prediction, model(x, 2.0, power=3).detach())
    masked = dlrp.explain(model, x, 1.0, mask=torch.tensor([True, False] * 3), target=1)
    assert list(masked.relevances) == ["x"]
    assert (masked.relevance[:, 1::2] == 0).all() and (masked.relevance[:, ::2] != 0).any()


def test_variadic_arguments_have_names_too():
    class Sums(nn.Module):
        def forward(self, *parts, **more):
            return sum(parts) + sum(more.values())

    a = dlrp.explain(Sums(), gaussian(2, 3), gaussian(2, 3, seed=1), extra=gaussian(2, 3, seed=2), target=1)
    assert len(a.relevances) == 3 and "extra" in a.relevances
    assert sum(r.sum() for r in a.relevances.values()).item() == pytest.approx(a.score.sum().item(), rel=1e-5)


def test_a_float_argument_that_does_not_matter_is_left_out():
    class Ignores(Mlp):
        def forward(self, x, unused):
            return super().forward(x)

    a = dlrp.explain(randomise(Ignores()), gaussian(2, 6), gaussian(3), target=1)
    assert list(a.relevances) == ["x"]


@pytest.mark.parametrize(
    "prepare", [lambda x: x.requires_grad_(), lambda x: x.requires_grad_() * 1.0], ids=["leaf", "not a leaf"]
)
def test_the_callers_tensor_is_not_touched(prepare):
    model = mlp()
    x = prepare(gaussian(2, 6))
    before, graph, flag = x.detach().clone(), x.grad_fn, x.requires_grad
    a = dlrp.explain(model, x, target=1)
    assert torch.equal(x.detach(), before) and x.grad_fn is graph and x.requires_grad == flag
    assert not x.is_leaf or x.grad is None
    assert torch.equal(a.relevance, dlrp.explain(model, gaussian(2, 6), target=1).relevance)


def test_a_model_that_writes_into_its_input():
    """It does so outside of explain too; the caller's tensor is not to be spoilt, nor the call refused."""
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 4)).eval()
    x = gaussian(2, 6)
    a = dlrp.explain(model, x, target=1)
    assert torch.equal(x, gaussian(2, 6))
    out_of_place = nn.Sequential(nn.ReLU(), model[1]).eval()
    assert torch.equal(a.relevance, dlrp.explain(out_of_place, x, target=1).relevance)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("preset", ["attnlrp", "dynamic", "gamma"])
def test_under_any_gradient_mode(mode, preset):
    model, x = resnet(), gaussian(2, 3, 8, 8)
    expected = dlrp.explain(model, x, target=1, preset=preset)
    with mode(), leaves_nothing_behind(model):
        a = dlrp.explain(model, x, target=1, preset=preset)
    assert torch.equal(a.relevance, expected.relevance)


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic", "gamma", "cp-lrp"])
@pytest.mark.parametrize(
    "build, given", [(mlp, gaussian(2, 6, dtype=DOUBLE)), (resnet, gaussian(2, 3, 8, 8, dtype=DOUBLE)), (gpt2, IDS)]
)
def test_a_frozen_model_gives_the_same(build, given, preset):
    model = build().double()
    expected = dlrp.explain(model, given, target=1, preset=preset)
    model.requires_grad_(False)
    with leaves_nothing_behind(model):
        a = dlrp.explain(model, given, target=1, preset=preset)
    assert not any(p.requires_grad for p in model.parameters())
    assert error(a.relevance, expected.relevance) < TOLERANCE


# ---------------------------------------------------------------- token ids


def at_the_embeddings(model: nn.Module, ids: Tensor, target: int, preset: str, **options) -> Tensor:
    """Relevance per token, by way of the embeddings' own values."""
    x = model.get_input_embeddings()(ids).detach().requires_grad_()
    y = model(inputs_embeds=x, **options).logits
    return dlrp.relevance(y, x, seed=chosen(y, target), preset=preset)[0].sum(-1)


@pytest.mark.parametrize("preset", ["attnlrp", "cp-lrp", "gamma"])
@pytest.mark.parametrize("build", [gpt2, llama, bert])
def test_token_ids_get_one_number_each(build, preset):
    model = build().double()
    for a in (
        dlrp.explain(model, IDS, target=2, preset=preset),
        dlrp.explain(model, input_ids=IDS, target=2, preset=preset),
    ):
        assert list(a.relevances) == ["input_ids"]
        assert a.relevance.shape == IDS.shape
        assert error(a.relevance, at_the_embeddings(model, IDS, 2, preset)) < (1e-4 if build is llama else TOLERANCE)


@pytest.mark.parametrize(
    "change", [lambda ids: ids.int(), lambda ids: ids.t().contiguous().t()], ids=["int32", "strided"]
)
def test_token_ids_of_another_kind(change):
    model = gpt2()
    a, b = dlrp.explain(model, change(IDS), target=2), dlrp.explain(model, IDS, target=2)
    torch.testing.assert_close(a.relevance, b.relevance)


@pytest.mark.parametrize(
    "ids", [torch.arange(5)[None], torch.zeros(1, 5, dtype=torch.int64)], ids=["like positions", "like types"]
)
@pytest.mark.parametrize("build", [gpt2, bert])
def test_ids_that_look_like_positions_or_types(build, ids):
    """The model looks up 0, 1, 2, … for positions and 0, 0, 0, … for types: those are not the caller's tokens."""
    model = build().double()
    a = dlrp.explain(model, ids, target=2, preset="attnlrp")
    assert list(a.relevances) == ["input_ids"]
    assert error(a.relevance, at_the_embeddings(model, ids, 2, "attnlrp")) < TOLERANCE


def test_an_attention_mask_is_not_explained():
    model = bert().double()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    a = dlrp.explain(model, input_ids=IDS, attention_mask=mask, target=2, preset="attnlrp")
    assert list(a.relevances) == ["input_ids"]
    assert error(a.relevance, at_the_embeddings(model, IDS, 2, "attnlrp", attention_mask=mask)) < TOLERANCE
    assert (a.relevance[1, 3:].abs() < 1e-12).all()  # nothing of the padding is used


def test_labels_are_not_explained():
    model = gpt2()
    a = dlrp.explain(model, labels=IDS, input_ids=IDS, target=2)
    assert list(a.relevances) == ["input_ids"]
    assert torch.equal(a.relevance, dlrp.explain(model, IDS, target=2).relevance)


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic"])
def test_token_types_are_explained_apart(preset):
    model = bert().double()
    types = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
    a = dlrp.explain(model, token_type_ids=types, input_ids=IDS, target=2, preset=preset)
    assert list(a.relevances) == ["input_ids", "token_type_ids"]
    assert a.relevances["token_type_ids"].shape == types.shape
    # at the sum of the three embeddings: by hand, from what arrives there
    parts = {}
    table = model.bert.embeddings
    hooks = [
        table.word_embeddings.register_forward_hook(lambda m, args, out: parts.update(words=out)),
        table.token_type_embeddings.register_forward_hook(lambda m, args, out: parts.update(types=out)),
    ]
    y = model(input_ids=IDS, token_type_ids=types).logits
    for hook in hooks:
        hook.remove()
    words, kinds = dlrp.relevance(y, [parts["words"], parts["types"]], seed=chosen(y, 2), preset=preset)
    assert error(a.relevances["input_ids"], words.sum(-1)) < TOLERANCE
    assert error(a.relevances["token_type_ids"], kinds.sum(-1)) < TOLERANCE


class Table(nn.Module):
    """A lookup without nn.Embedding, with a float input beside it if one is given."""

    def __init__(self, lookup) -> None:
        super().__init__()
        self.table, self.lookup = nn.Parameter(torch.empty(12, 5)), lookup
        self.inner, self.beside, self.head = nn.Linear(5, 7), nn.Linear(3, 7), nn.Linear(7, 4)

    def embed(self, ids: Tensor) -> Tensor:
        return self.lookup(ids, self.table)

    def rest(self, e: Tensor, x: Tensor | None = None) -> Tensor:
        hidden = torch.tanh(self.inner(e)).mean(1)
        return self.head(F.relu(hidden if x is None else hidden + self.beside(x)))

    def forward(self, ids: Tensor, x: Tensor | None = None) -> Tensor:
        return self.rest(self.embed(ids), x)


LOOKUPS = {
    "functional": lambda ids, table: F.embedding(ids, table),
    "indexing": lambda ids, table: table[ids],
    "indexing a view": lambda ids, table: table.t().t()[ids],
    "a cast table": lambda ids, table: F.embedding(ids, table.float()).double(),
    "copied ids": lambda ids, table: F.embedding(ids.clone(), table),
    "flat ids": lambda ids, table: table.index_select(0, ids.reshape(-1)).reshape(*ids.shape, -1),
}


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic", "gamma"])
@pytest.mark.parametrize("lookup", LOOKUPS)
def test_lookups_are_found_on_the_graph(lookup, preset):
    model = randomise(Table(LOOKUPS[lookup]), std=0.5).double()
    ids = torch.tensor([[3, 1, 3], [7, 11, 0]])
    a = dlrp.explain(model, ids, target=2, preset=preset)
    assert list(a.relevances) == ["ids"]
    assert a.relevance.shape == ids.shape
    e = model.embed(ids).detach().requires_grad_()
    y = model.rest(e)
    (expected,) = dlrp.relevance(y, e, seed=chosen(y, 2), preset=preset)
    assert error(a.relevance, expected.sum(-1)) < (1e-5 if lookup == "a cast table" else TOLERANCE)


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic", "gamma"])
@pytest.mark.parametrize("lookup", ["functional", "indexing"])
def test_ids_and_floats_together(lookup, preset):
    model = randomise(Table(LOOKUPS[lookup]), std=0.5).double()
    ids, x = torch.tensor([[3, 1, 3], [7, 11, 0]]), gaussian(2, 3, dtype=DOUBLE)
    a = dlrp.explain(model, ids, x, target=2, preset=preset)
    assert list(a.relevances) == ["ids", "x"]
    e, x = model.embed(ids).detach().requires_grad_(), x.requires_grad_()
    y = model.rest(e, x)
    tokens, floats = dlrp.relevance(y, [e, x], seed=chosen(y, 2), preset=preset)
    assert error(a.relevances["ids"], tokens.sum(-1)) < TOLERANCE
    assert error(a.relevances["x"], floats) < TOLERANCE


def test_ids_and_floats_together_with_a_module():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head, self.beside = nn.Embedding(12, 5), nn.Linear(5, 4), nn.Linear(3, 5)

        def forward(self, ids, x):
            return self.head(torch.tanh(self.words(ids).mean(1) + self.beside(x)))

    model = randomise(Both(), std=0.5)
    a = dlrp.explain(model, torch.tensor([[3, 1, 3], [7, 11, 0]]), gaussian(2, 3), target=2)
    assert {name: tuple(r.shape) for name, r in a.relevances.items()} == {"ids": (2, 3), "x": (2, 3)}


def test_a_lookup_made_twice_counts_twice():
    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(12, 5), nn.Linear(5, 4, bias=False)

        def forward(self, ids):
            return self.head(self.words(ids).mean(1) + 0.5 * self.words(ids).mean(1))

    model = randomise(Doubled(), std=0.5)
    a = dlrp.explain(model, torch.tensor([[3, 1, 3], [7, 11, 0]]), target=2)
    torch.testing.assert_close(a.relevance.sum(1), a.score)


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic"])
def test_an_encoder_and_a_decoder(preset):
    model = t5()
    decoder_ids = torch.tensor([[0, 5, 9], [0, 8, 2]])
    a = dlrp.explain(model, decoder_input_ids=decoder_ids, input_ids=IDS, target=4, preset=preset)
    assert list(a.relevances) == ["input_ids", "decoder_input_ids"]
    assert a.relevances["input_ids"].shape == IDS.shape
    assert a.relevances["decoder_input_ids"].shape == decoder_ids.shape
    assert all((r != 0).all() for r in a.relevances.values())
    if preset == "attnlrp":
        table = model.get_input_embeddings()
        source, prompt = (table(ids).detach().requires_grad_() for ids in (IDS, decoder_ids))
        y = model(inputs_embeds=source, decoder_inputs_embeds=prompt).logits
        expected = dlrp.relevance(y, [source, prompt], seed=chosen(y, 4), preset=preset)
        for actual, wanted in zip(a.relevances.values(), expected, strict=True):
            torch.testing.assert_close(actual, wanted.sum(-1), rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------- outputs


def test_question_answering():
    """Start and end logits, stacked last: [rows, tokens, 2]."""
    model = bert_qa().double()
    with torch.no_grad():
        out = model(IDS)
    a = dlrp.explain(model, IDS, target=lambda out: out.start_logits[:, 1] + out.end_logits[:, 3])
    assert torch.equal(a.prediction, torch.cat([out.start_logits, out.end_logits], 1))  # side by side
    x = model.get_input_embeddings()(IDS).detach().requires_grad_()
    out = model(inputs_embeds=x)
    seeds = [torch.zeros_like(out.start_logits), torch.zeros_like(out.end_logits)]
    seeds[0][:, 1], seeds[1][:, 3] = out.start_logits.detach()[:, 1], out.end_logits.detach()[:, 3]
    (expected,) = dlrp.relevance([out.start_logits, out.end_logits], x, seed=seeds)
    assert error(a.relevance, expected.sum(-1)) < TOLERANCE
    one = dlrp.explain(model, IDS, target=(1, 0))
    assert torch.equal(one.prediction, torch.stack([out.start_logits, out.end_logits], -1))
    other = dlrp.explain(model, IDS, target=(3, 1))
    assert error(a.relevance, one.relevance + other.relevance) < TOLERANCE


class Wrapped(Mlp):
    def __init__(self, wrap) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(super().forward(x))


class Output:
    """Like transformers': scores under a name, among other things."""

    def __init__(self, logits: Tensor) -> None:
        self.loss, self.logits = None, logits


WRAPS = {
    "tuple": lambda y: (y, [y * 2]),
    "list": lambda y: [y],
    "dict": lambda y: {"scores": y, "ids": y.argmax(-1)},
    "ids first": lambda y: (y.argmax(-1), y),
    "logits": Output,
    "logits among others": lambda y: {"hidden": y * 2, "logits": y},
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_outputs_are_unwrapped(wrap):
    model, plain = Wrapped(WRAPS[wrap]).eval(), mlp()
    model.load_state_dict(plain.state_dict())
    x = gaussian(2, 6)
    a, b = dlrp.explain(model, x, target=1), dlrp.explain(plain, x, target=1)
    assert torch.equal(a.prediction, b.prediction)
    assert torch.equal(a.relevance, b.relevance)


def test_rows_and_single_scores():
    model = mlp()
    x = gaussian(2, 6)
    batch = dlrp.explain(model, x, target=2)
    single = dlrp.explain(model, x[0], target=2)  # no batch: the output has one dimension
    torch.testing.assert_close(single.relevance, batch.relevance[0])
    score = dlrp.explain(Wrapped(lambda y: y[0, 2]).eval(), x)
    assert score.relevance.shape == x.shape and score.prediction.dim() == 0


# ---------------------------------------------------------------- targets


def test_the_default_target_is_the_largest_score_of_each_row():
    model, x = mlp(), 3 * gaussian(12, 6, seed=1)
    top = model(x).argmax(-1)
    assert len(set(top.tolist())) > 1
    a = dlrp.explain(model, x)
    assert a.target is None
    for target in (top.tolist(), top):
        assert torch.equal(a.relevance, dlrp.explain(model, x, target=target).relevance)
    torch.testing.assert_close(a.score, model(x).detach().max(-1).values)


TARGETS = {
    "int": (2, lambda y: chosen(y, 2)),
    "negative int": (-2, lambda y: chosen(y, 2)),
    "tuple": ((2,), lambda y: chosen(y, 2)),
    "int tensor": (torch.tensor(2), lambda y: chosen(y, 2)),
    "one each": ([1, 3], lambda y: torch.stack([chosen(y[:1], 1)[0], chosen(y[1:], 3)[0]])),
    "one each, tensor": (torch.tensor([1, 3]), lambda y: torch.stack([chosen(y[:1], 1)[0], chosen(y[1:], 3)[0]])),
    "callable": (lambda y: y[:, 2], lambda y: chosen(y, 2)),
    "callable to one number": (lambda y: y[:, 2].sum(), lambda y: chosen(y, 2)),
    "contrast": (lambda y: y[:, 2] - y[:, 0], lambda y: chosen(y, 2) - chosen(y, 0)),
    "mean": (lambda y: y.mean(-1), lambda y: y.detach() / 4),
    "seed": (gaussian(2, 4, seed=8), lambda y: gaussian(2, 4, seed=8)),
}


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic"])
@pytest.mark.parametrize("form", TARGETS)
def test_targets_in_all_forms(form, preset):
    model, x = mlp().double(), gaussian(2, 6, dtype=DOUBLE)
    target, seed = TARGETS[form]
    a = dlrp.explain(model, x, target=target, preset=preset)
    assert a.target is target
    x = x.requires_grad_()
    y = model(x)
    expected = seed(y).to(DOUBLE)
    torch.testing.assert_close(a.seed, expected)
    torch.testing.assert_close(a.score, expected.sum(-1))
    assert error(a.relevance, dlrp.relevance(y, x, seed=expected, preset=preset)[0]) < TOLERANCE


def test_a_contrast_is_the_difference_of_two():
    model, ids = gpt2().double(), IDS
    one, two = (dlrp.explain(model, ids, target=token).relevance for token in (4, 9))
    both = dlrp.explain(model, ids, target=lambda out: out.logits[:, -1, 4] - out.logits[:, -1, 9])
    assert error(both.relevance, one - two) < TOLERANCE


def test_targets_of_token_by_token_scores():
    """An int is a token after the last position; a tuple says which position."""
    model = gpt2().double()
    last = dlrp.explain(model, IDS, target=4)
    assert error(last.relevance, dlrp.explain(model, IDS, target=(-1, 4)).relevance) < TOLERANCE
    second = dlrp.explain(model, IDS, target=(1, 4))
    assert (second.relevance[:, 2:] == 0).all()  # a causal model does not look ahead
    assert error(second.relevance[:, :2], dlrp.explain(model, IDS[:, :2], target=4).relevance) < TOLERANCE


# ---------------------------------------------------------------- layers


LAYERS = {
    "mlp": (mlp, gaussian(2, 6, dtype=DOUBLE), ["second", "first"]),
    "resnet": (resnet, gaussian(2, 3, 8, 8, dtype=DOUBLE), ["stem", "blocks.0", "pool"]),
    "gpt2": (gpt2, IDS, ["transformer.h.0", "transformer.ln_f"]),
    "bert": (bert, IDS, ["bert.encoder.layer.0", "bert.embeddings"]),
}


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic", "gamma"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_the_relevance_of_their_outputs(name, preset):
    build, given, layers = LAYERS[name]
    model = build().double()
    a = dlrp.explain(model, given, target=1, preset=preset, layers=layers)
    assert list(a.layers) == layers
    kept = {}
    hooks = [
        model.get_submodule(layer).register_forward_hook(
            lambda m, args, out, layer=layer: kept.update({layer: out[0] if isinstance(out, tuple) else out})
        )
        for layer in layers
    ]
    given = given if given.dtype == torch.int64 else given.clone().requires_grad_()
    y = model(given)
    for hook in hooks:
        hook.remove()
    y = getattr(y, "logits", y)
    for layer in layers:
        (expected,) = dlrp.relevance(y, kept[layer], seed=chosen(y, 1), preset=preset, retain_graph=True)
        assert a.layers[layer].shape == kept[layer].shape
        assert error(a.layers[layer], expected) < TOLERANCE


@pytest.mark.parametrize(
    "preset", ["attnlrp", "dynamic", "gamma", "epsilon-plus", "epsilon-plus-flat", "epsilon-alpha2-beta1"]
)
@pytest.mark.parametrize("layer", ["stem", "stem.0", "stem.1", "blocks.0.conv1", "blocks.0", "mean", "head"])
def test_asking_for_a_layer_does_not_change_the_answer(layer, preset):
    """To look at a convolution's output does not unfold its batch norm, nor make a first layer of what stands above."""
    model, x = resnet().double(), gaussian(2, 3, 8, 8, dtype=DOUBLE)
    a, b = (dlrp.explain(model, x, target=1, preset=preset, layers=layers) for layers in ([layer], []))
    assert error(a.relevance, b.relevance) < 1e-6


@pytest.mark.parametrize("preset", ["attnlrp", "gamma", "dynamic"])
@pytest.mark.parametrize("layer", ["stem.1", "blocks.0.norm1"])
def test_a_layer_whose_output_is_overwritten(layer, preset):
    """An in-place ReLU follows: the layer's relevance is that of what it put out."""
    inside, outside = resnet(inplace=True).double(), resnet(inplace=False).double()
    outside.load_state_dict(inside.state_dict())
    x = gaussian(2, 3, 8, 8, dtype=DOUBLE)
    a, b = (dlrp.explain(model, x, target=1, preset=preset, layers=[layer]) for model in (inside, outside))
    assert error(a.layers[layer], b.layers[layer]) < TOLERANCE


def test_the_whole_model_is_a_layer():
    model, x = mlp(), gaussian(2, 6)
    a = dlrp.explain(model, x, target=1, layers=["third"])
    torch.testing.assert_close(a.layers["third"], a.seed)


# ---------------------------------------------------------------- overrides


def slow(model: Mlp, x: Tensor, target: int, eps: dict[str, float]) -> Tensor:
    """Epsilon-LRP of the small net in relevance form, with an eps of its own for each layer."""
    first = F.relu(model.first(x))
    second = F.relu(model.second(first))
    y = model.third(second)
    r = chosen(y, target)
    for name, below in (("third", second), ("second", first), ("first", x)):
        layer = getattr(model, name)
        z = layer(below)
        z = z + eps.get(name, 0.0) * torch.where(z < 0, -1.0, 1.0)
        r = below * ((r / z) @ layer.weight)
    return r.detach()


@pytest.mark.parametrize(
    "overrides, eps",
    [
        ({"second": 0.5}, {"second": 0.5}),
        ({"s*": 0.5}, {"second": 0.5}),
        ({"second": 0.5, "third": 0.1}, {"second": 0.5, "third": 0.1}),
        ({"*": 0.2, "second": 0.5}, {"first": 0.2, "second": 0.5, "third": 0.2}),  # the newest wins
        ({"second": 0.5, "*": 0.2}, {"first": 0.2, "second": 0.2, "third": 0.2}),
        ({"Addmm": 0.3, "second": 0.5}, {"first": 0.3, "second": 0.5, "third": 0.3}),  # module > op
        ({"linear": 0.1, "Addmm": 0.3}, {"first": 0.3, "second": 0.3, "third": 0.3}),  # op > kind
        ({"first": 0.4}, {"first": 0.4}),  # a kind: the first linear map; here also a module's name
    ],
)
def test_overrides_by_module_op_and_kind(overrides, eps):
    model, x = mlp().double(), gaussian(3, 6, dtype=DOUBLE)
    preset = dlrp.preset("attnlrp") | {key: dlrp.Epsilon(value) for key, value in overrides.items()}
    a = dlrp.explain(model, x, target=1, preset=preset)
    assert error(a.relevance, slow(model, x, 1, eps)) < 1e-6
    assert error(a.relevance, slow(model, x, 1, {})) > 1e-3  # the override matters


def test_overrides_by_the_name_of_a_parent():
    model, x = resnet(), gaussian(2, 3, 8, 8)
    whole = dlrp.preset("attnlrp") | {"blocks": dlrp.Gamma(0.5)}
    parts = dlrp.preset("attnlrp") | {f"blocks.{i}.conv{j}": dlrp.Gamma(0.5) for i in (0, 1) for j in (1, 2)}
    one = dlrp.preset("attnlrp") | {"blocks.1": dlrp.Gamma(0.5)}
    a, b, c, plain = (dlrp.explain(model, x, target=1, preset=p).relevance for p in (whole, parts, one, "attnlrp"))
    torch.testing.assert_close(a, b)
    assert error(c, a) > 1e-3 and error(c, plain) > 1e-3


def test_a_later_override_replaces_an_earlier_one():
    model, x = mlp(), gaussian(3, 6)
    once = dlrp.preset("attnlrp") | {"second": dlrp.Epsilon(0.5)}
    twice = dlrp.preset("attnlrp") | {"second": dlrp.Epsilon(9.0)} | {"second": dlrp.Epsilon(0.5)}
    assert torch.equal(dlrp.explain(model, x, preset=once).relevance, dlrp.explain(model, x, preset=twice).relevance)
    assert repr(once) == "Preset(attnlrp | second)"


@pytest.mark.parametrize("build", [gpt2, llama], ids=["fused", "written out"])
def test_an_override_by_kind_holds_for_written_out_operations(build):
    """The last norm lets nothing pass, whether it is one operation or several."""
    model = build()
    preset = dlrp.preset("attnlrp") | {"normalise": dlrp.Nothing()}
    a = dlrp.explain(model, IDS, target=1, preset=preset)
    assert (a.relevance == 0).all()


# ---------------------------------------------------------------- what comes back


def test_an_attribution_says_what_it_is():
    model, x = mlp(), gaussian(2, 6)
    a = dlrp.explain(model, x, target=1, preset=dlrp.preset("gamma", gamma=0.1))
    text = repr(a)
    assert "x: (2, 6)" in text and "target=1" in text and "gamma(gamma=0.1)" in text
    assert f"{a.score.sum():.4g}" in text and f"{a.relevance.sum():.4g}" in text
    assert a.ledger is None and a.layers == {}
    assert a.preset == dlrp.preset("gamma", gamma=0.1)
    assert "Addmm" in str(a.plan)
    for tensor in (a.relevance, a.prediction, a.seed):
        assert not tensor.requires_grad and tensor.grad_fn is None
    assert torch.equal(a.prediction, model(x).detach())


def test_an_explainer_is_explain_that_remembers():
    model = mlp()
    explainer = dlrp.Explainer(model, "dynamic")
    for seed in (1, 2):
        x = gaussian(2, 6, seed=seed)
        assert torch.equal(
            explainer(x, target=1).relevance, dlrp.explain(model, x, target=1, preset="dynamic").relevance
        )
    assert len(explainer.plans) == 1


# ---------------------------------------------------------------- inspect


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic", "gamma"])
@pytest.mark.parametrize("build, given", [(resnet, gaussian(2, 3, 8, 8)), (gpt2, IDS), (llama, IDS), (bert, IDS)])
def test_inspect_counts_and_prints(build, given, preset):
    model = build()
    with leaves_nothing_behind(model):
        report = dlrp.inspect(model, given, preset=preset)
    assert report.coverage == 1.0 and report.unknown == {}
    assert 0 < report.live <= report.nodes
    assert report.plan.statistics.live == report.live
    text = str(report)
    assert f"{report.nodes} nodes" in text and f"{report.live} live" in text and "coverage 100.00%" in text
    assert preset in text
    if preset == "dynamic":
        assert report.plan.statistics.promises > 0 and "Promises:" in text
    assert "Convolution" in text or "Addmm" in text or "Mm" in text


class Strange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_inspect_lists_what_is_unknown_without_raising():
    class Odd(Mlp):
        def forward(self, x):
            return super().forward(Strange.apply(Strange.apply(x)))

    report = dlrp.inspect(randomise(Odd()), gaussian(2, 6))
    assert list(report.unknown.values()) == [2] and "Strange" in next(iter(report.unknown))
    assert report.plan is None
    assert report.coverage == pytest.approx(1 - 2 / report.live)
    assert f"{next(iter(report.unknown))} x2" in str(report)


def test_an_example_from_the_documentation():
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    (r,) = dlrp.relevance(x @ torch.tensor([[3.0], [-1.0]]), x)
    assert r.tolist() == [[3.0, -2.0]]


def test_the_model_runs_once():
    """A second forward pass is paid for only where something has to be recorded."""

    class Counting(Mlp):
        runs = 0

        def forward(self, x):
            self.runs += 1
            return super().forward(x)

    model = randomise(Counting())
    explainer = dlrp.Explainer(model, "attnlrp")
    explainer(example(model).detach())
    explainer(example(model).detach())
    assert model.runs == 2

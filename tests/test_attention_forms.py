"""Attention as models write it: rotary and linear position biases, windows, shared heads, caches, cross attention, padding."""

# isort: off
import oracles  # noqa: F401  mends torchvision before transformers imports it

# isort: on
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    MistralConfig,
    MistralForCausalLM,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import dynamiclrp as dlrp
from contract import PRESETS, holds
from models import IDS, bert, gaussian, llama, randomise
from oracles import error

DOUBLE = torch.float64


# ---------------------------------------------------------------- eager equals fused, in the libraries' own models


def mistral() -> nn.Module:
    config = MistralConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=2,
    )  # fmt: skip
    return randomise(MistralForCausalLM(config)).double()


def bart() -> nn.Module:
    config = BartConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=16,
    )  # fmt: skip
    return randomise(BartForConditionalGeneration(config)).double()


def whisper() -> nn.Module:
    config = WhisperConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=8, max_source_positions=6, max_target_positions=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return randomise(WhisperForConditionalGeneration(config)).double()


MODELS = {
    "grouped queries, rotary, sliding window": (mistral, {"input_ids": IDS, "use_cache": False}),
    "cross attention": (bart, {"input_ids": IDS, "decoder_input_ids": IDS[:, :3], "use_cache": False}),
    "cross attention to sound": (
        whisper,
        {"input_features": gaussian(2, 8, 12, dtype=DOUBLE), "decoder_input_ids": IDS[:, :3], "use_cache": False},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_eager_equals_fused(name):
    build, given = MODELS[name]
    model = build()
    presets = ("attnlrp", "cp-lrp", "gamma")
    model.set_attn_implementation("sdpa")
    fused = holds(model, given, presets)
    assert "ScaledDotProductFlashAttentionForCpu" in {step.name for step in dlrp.inspect(model, **given).plan.steps}
    model.set_attn_implementation("eager")
    written = holds(model, given, presets)
    for preset in presets:
        for argument in fused[preset]:
            assert error(written[preset][argument], fused[preset][argument]) < 1e-6, (preset, argument)


def test_a_sliding_window_ends_where_it_ends():
    """Two layers with a window of two tokens see three tokens back: what lies before takes exactly nothing."""
    model = mistral()
    r = dlrp.explain(model, input_ids=IDS, use_cache=False).relevance
    assert r.shape == IDS.shape and not r[:, :2].any() and (r[:, 2:] != 0).all()


# ---------------------------------------------------------------- positions

Q, K, V = (gaussian(2, 2, 5, 8, seed=seed, dtype=DOUBLE) for seed in (1, 2, 3))
ANGLES = torch.arange(5, dtype=DOUBLE)[:, None] * 100.0 ** (-torch.arange(4, dtype=DOUBLE) / 4)


def half_turn(x: Tensor) -> Tensor:
    """As Llama has it: the two halves are the coordinates."""
    cos, sin = (torch.cat([f(ANGLES)] * 2, -1) for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def half_complex(x: Tensor) -> Tensor:
    """The same by complex numbers."""
    z = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(ANGLES), ANGLES)
    return torch.cat([z.real, z.imag], -1)


def half_matrix(x: Tensor) -> Tensor:
    """The same by rotation matrices, slowly."""
    rows = []
    for t in range(5):
        c, s = torch.diag(ANGLES[t].cos()), torch.diag(ANGLES[t].sin())
        rows.append(x[:, :, t] @ torch.cat([torch.cat([c, s], 1), torch.cat([-s, c], 1)], 0))
    return torch.stack(rows, 2)


class Rotary(nn.Module):
    def __init__(self, turn) -> None:
        super().__init__()
        self.turn = turn

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)[:, :, -1].mean(1)


@pytest.mark.parametrize("turn", [half_turn, half_complex])
def test_rotary_embeddings_are_a_rotation(turn):
    given = {"q": Q, "k": K, "v": V}
    presets = ("attnlrp", "cp-lrp", "gradient")
    expected = {preset: dlrp.explain(Rotary(half_matrix), **given, preset=preset).relevances for preset in presets}
    for preset, relevances in holds(Rotary(turn), given, presets).items():
        for name, r in relevances.items():
            if preset == "cp-lrp" and name != "v":
                assert not r.any()
            else:
                assert error(r, expected[preset][name]) < 1e-9


def test_linear_biases_equal_a_mask_and_take_nothing():
    """ALiBi: a constant for each head, added to the scores, as BLOOM writes it (baddbmm) and as a mask of fused attention."""
    slopes = torch.tensor([0.5, 0.25], dtype=DOUBLE)
    bias = slopes[:, None, None] * torch.arange(5, dtype=DOUBLE)
    mask = torch.full((5, 5), -math.inf, dtype=DOUBLE).triu(1)

    class Written(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            flat = [t.flatten(0, 1) for t in (q, k, v)]
            scores = torch.baddbmm(bias.repeat(len(q), 1, 1), flat[0], flat[1].mT, alpha=1 / math.sqrt(8))
            weights = (scores.unflatten(0, q.shape[:2]) + mask).softmax(-1)
            return torch.bmm(weights.flatten(0, 1), flat[2]).unflatten(0, q.shape[:2])[:, :, -1].mean(1)

    class Fused(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            full = (bias + mask).expand(len(q), 2, 5, 5)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=full)[:, :, -1].mean(1)

    given = {"q": Q, "k": K, "v": V}
    for preset in ("attnlrp", "cp-lrp"):
        written, fused = (dlrp.explain(model, **given, preset=preset).relevances for model in (Written(), Fused()))
        for name in given if preset == "attnlrp" else ("v",):
            assert error(written[name], fused[name]) < 1e-9


def test_bloom():
    config = BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=2)
    holds(randomise(BloomForCausalLM(config)).double(), {"input_ids": IDS, "use_cache": False})


# ---------------------------------------------------------------- caches


@pytest.mark.parametrize("preset", ["attnlrp", "cp-lrp", "gamma"])
def test_a_cache_given_as_input(preset):
    """Keys and values of a prefix are constants; the new tokens take what they take when the model reads everything."""
    model = llama().double()
    whole = dlrp.explain(model, input_ids=IDS, use_cache=False, preset=preset)
    with torch.no_grad():
        prefix = model(input_ids=IDS[:, :3], use_cache=True).past_key_values
    legacy = [(layer.keys.clone(), layer.values.clone()) for layer in prefix.layers]

    def cache() -> DynamicCache:
        made = DynamicCache()
        for number, (keys, values) in enumerate(legacy):
            made.update(keys.clone(), values.clone(), number)
        return made

    new = dlrp.explain(model, input_ids=IDS[:, 3:], past_key_values=cache(), use_cache=True, preset=preset)
    torch.testing.assert_close(new.prediction, whole.prediction[:, 3:], rtol=1e-9, atol=1e-9)
    assert error(new.relevance, whole.relevance[:, 3:]) < 1e-6
    again = dlrp.explain(model, input_ids=IDS[:, 3:], past_key_values=cache(), use_cache=True, preset=preset)
    assert torch.equal(new.relevance, again.relevance)


def test_cached_keys_and_values_may_be_explained_themselves():
    class Step(nn.Module):
        def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            k, v = torch.cat([keys, x], 2), torch.cat([values, x * 2], 2)
            return F.scaled_dot_product_attention(x, k, v)[:, :, -1].mean(1)

    class Whole(nn.Module):  # all keys and values are given
        def forward(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, k, v)[:, :, -1].mean(1)

    x, keys, values = Q[:, :, :2], K[:, :, :3], V[:, :, :3]
    cached = holds(Step(), {"x": x, "keys": keys, "values": values}, ("attnlrp",))["attnlrp"]
    whole = dlrp.explain(
        Whole(), x, torch.cat([keys, x], 2), torch.cat([values, x * 2], 2), preset="attnlrp"
    ).relevances
    assert error(cached["keys"], whole["k"][:, :, :3]) < 1e-9
    assert error(cached["values"], whole["v"][:, :, :3]) < 1e-9
    assert error(cached["x"], whole["x"] + whole["k"][:, :, 3:] + whole["v"][:, :, 3:]) < 1e-9


# ---------------------------------------------------------------- padding


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("preset", PRESETS)
def test_padding_takes_nothing_and_changes_nothing(preset, implementation):
    model = bert().double()
    model.set_attn_implementation(implementation)
    padded, mask = IDS.clone(), torch.ones_like(IDS)
    padded[0, 3:], mask[0, 3:] = 0, 0
    r = dlrp.explain(model, input_ids=padded, attention_mask=mask, preset=preset, target=1).relevance
    alone = dlrp.explain(model, input_ids=IDS[:1, :3], preset=preset, target=1).relevance
    assert not r[0, 3:].any() and r[1, 3:].any()
    assert error(r[:1, :3], alone) < 1e-6


@pytest.mark.parametrize("preset", ["attnlrp", "gamma", "dynamic"])
def test_padding_on_the_left_of_a_causal_model(preset):
    model = llama().double()
    padded, mask = IDS.clone(), torch.ones_like(IDS)
    padded[0], mask[0, :2] = torch.tensor([0, 0, *IDS[0, :3]]), 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
    r = dlrp.explain(model, input_ids=padded, **given, preset=preset, target=(-1, 5)).relevances["input_ids"]
    alone = dlrp.explain(model, input_ids=IDS[:1, :3], use_cache=False, preset=preset, target=(-1, 5)).relevance
    assert not r[0, :2].any()
    assert error(r[:1, 2:], alone) < 1e-6


# ---------------------------------------------------------------- torch's own layers

TOKENS = gaussian(2, 5, 8, seed=5, dtype=DOUBLE)
PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])


class Attends(nn.Module):
    def __init__(self, weights: bool, padding: Tensor | None = None) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)
        self.weights, self.padding = weights, padding

    def forward(self, x: Tensor) -> Tensor:
        made, _ = self.attention(x, x, x, need_weights=self.weights, key_padding_mask=self.padding)
        return self.head(made[:, 0])


@pytest.mark.parametrize("padding", [None, PADDING], ids=["plain", "padded"])
def test_multihead_attention_with_and_without_weights(padding):
    model = randomise(Attends(True, padding), std=0.5).double()
    presets = ("attnlrp", "cp-lrp", "gamma", "epsilon-plus")
    written = holds(model, {"x": TOKENS}, presets, rows=padding is None)
    model.weights = False
    for preset, found in holds(model, {"x": TOKENS}, presets, rows=padding is None).items():
        assert error(found["x"], written[preset]["x"]) < 1e-6
        if padding is not None:
            assert not found["x"][1, 3:].any()


class ByHand(nn.Module):
    """nn.TransformerEncoderLayer, written out."""

    def __init__(self, layer: nn.TransformerEncoderLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, src: Tensor) -> Tensor:
        layer, x = self.layer, src
        attention = layer.self_attn
        q, k, v = (
            F.linear(x, w, b).unflatten(-1, (2, 4)).transpose(1, 2)
            for w, b in zip(attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True)
        )
        made = (q @ k.mT / 2).softmax(-1) @ v
        x = layer.norm1(x + attention.out_proj(made.transpose(1, 2).flatten(2)))
        return layer.norm2(x + layer.linear2(layer.activation(layer.linear1(x))))


@pytest.mark.parametrize("frozen", [False, True])
def test_an_encoder_layer_equals_itself_written_out_and_takes_no_fast_path(frozen):
    """A layer in eval mode without gradients would run as one fused kernel, in which nothing can be seen."""
    layer = randomise(nn.TransformerEncoderLayer(8, 2, 12, activation="gelu", batch_first=True), std=0.5).double()
    layer.requires_grad_(not frozen)
    presets = ("attnlrp", "cp-lrp", "gamma")
    with torch.no_grad():
        found = holds(layer, {"src": TOKENS}, presets, target=(0, 3))
    for preset in presets:
        expected = dlrp.explain(ByHand(layer), TOKENS, preset=preset, target=(0, 3)).relevance
        assert error(found[preset]["src"], expected) < 1e-6


def test_an_encoder_of_nested_tensors_equals_the_padded_one():
    """nn.TransformerEncoder makes nested tensors of padded batches on its fast path: not under an explanation."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    encoder = randomise(nn.TransformerEncoder(layer, 2, enable_nested_tensor=True), std=0.5).double()

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            return self.encoder(x, src_key_padding_mask=padding)[:, 0]

    r = dlrp.explain(Encoder(), TOKENS, padding=PADDING).relevances["x"]
    alone = dlrp.explain(Encoder(), TOKENS[1:, :3], padding=PADDING[1:, :3]).relevances["x"]
    assert not r[1, 3:].any()
    assert error(r[1:, :3], alone) < 1e-6

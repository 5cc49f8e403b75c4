"""`attnlrp` and `cp-lrp` against the relevance-form oracles, on small Llama-, GPT-2- and BERT-like transformers."""

from oracles import attnlrp, error  # before transformers: makes its import of torchvision work

# isort: split
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.llama import modeling_llama

import dynamiclrp as dlrp

TOLERANCE = 1e-6
ATTENTION = ["eager", "sdpa"]
IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35], [2, 7, 18, 28, 1, 8, 2]])


# ---------------------------------------------------------------- models: tiny, float64, far from linear


def randomise(model: nn.Module, seed: int = 0, std: float = 0.3) -> nn.Module:
    """Every parameter random, biases and norm scales too: nothing cancels because it is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = std * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_scale = name.endswith("weight") and ("norm" in name.lower() or "ln_" in name)
            parameter.copy_(1 + noise if is_scale else noise)
    return model.eval()


def llama(attention: str, **options) -> LlamaForCausalLM:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 2} | options
    config = LlamaConfig(vocab_size=50, num_attention_heads=4, attn_implementation=attention, **shape)
    return randomise(LlamaForCausalLM(config).double())


def gpt2(attention: str, activation: str = "gelu_new") -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=1,
        activation_function=activation, attn_implementation=attention,
    )  # fmt: skip
    return randomise(GPT2LMHeadModel(config).double())


def bert(attention: str) -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=32, num_labels=3, attn_implementation=attention,
    )  # fmt: skip
    return randomise(BertForSequenceClassification(config).double())


@pytest.fixture
def pure_float64(monkeypatch):
    """transformers' Llama rounds to float32 inside RMSNorm and eager softmax; the same code without those casts."""

    def rms_norm(self, hidden):
        variance = hidden.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden * torch.rsqrt(variance + self.variance_epsilon))

    def eager(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        key = modeling_llama.repeat_kv(key, module.num_key_value_groups)
        value = modeling_llama.repeat_kv(value, module.num_key_value_groups)
        weights = torch.matmul(query, key.transpose(2, 3)) * scaling
        if attention_mask is not None:
            weights = weights + attention_mask
        weights = nn.functional.softmax(weights, dim=-1)
        return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", rms_norm)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", eager)


# ---------------------------------------------------------------- seeds: relevance of the logits


def largest_at_the_end(logits: Tensor) -> Tensor:
    """The predicted next token of each row, with its logit as relevance."""
    seed = torch.zeros_like(logits)
    last, winner = logits[:, -1], logits[:, -1].argmax(-1, keepdim=True)
    seed[:, -1].scatter_(-1, winner, last.gather(-1, winner))
    return seed


def contrast(logits: Tensor) -> Tensor:
    """Token 11 against token 7 after the third and the last token: relevance of both signs at two positions."""
    seed = torch.zeros_like(logits)
    for position in (2, -1):
        seed[:, position, 11] = logits[:, position, 11]
        seed[:, position, 7] = -logits[:, position, 7]
    return seed


def anything(logits: Tensor) -> Tensor:
    """Random relevance everywhere, bearing no relation to the logits' signs."""
    return torch.randn(logits.shape, generator=torch.Generator().manual_seed(7), dtype=logits.dtype)


SEEDS = [largest_at_the_end, contrast, anything]
LANGUAGE_MODELS = {"llama": (llama, attnlrp.Llama), "gpt2": (gpt2, attnlrp.GPT2)}


def run_language_model(model: nn.Module, ids: Tensor, seed, preset="attnlrp") -> tuple[Tensor, Tensor]:
    """Relevance of the token embeddings as the engine has it, and the seed that was used."""
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeddings, use_cache=False).logits
    relevance_of_logits = seed(logits.detach())
    (r,) = dlrp.relevance(logits, embeddings, seed=relevance_of_logits, preset=preset)
    return r, relevance_of_logits


def run_bert(model: nn.Module, ids: Tensor, padding: Tensor, seed=None, preset="attnlrp") -> tuple[Tensor, Tensor]:
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeddings, attention_mask=padding).logits
    (r,) = dlrp.relevance(logits, embeddings, seed=seed, preset=preset)
    return r, logits.detach()


def one_class(logits: Tensor, target: int) -> Tensor:
    seed = torch.zeros_like(logits)
    seed[:, target] = logits[:, target]
    return seed


# ---------------------------------------------------------------- the oracles stand on their own


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_the_oracle_computes_the_model(name, attention, pure_float64):
    build, oracle = LANGUAGE_MODELS[name]
    model = build(attention)
    with torch.no_grad():
        assert error(oracle(model).forward(IDS).logits, model(IDS).logits) < 1e-12


@pytest.mark.parametrize("attention", ATTENTION)
def test_the_oracle_computes_bert_with_padding(attention):
    model, padding = bert(attention), torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    with torch.no_grad():
        logits = model(IDS, attention_mask=padding).logits
    assert error(attnlrp.Bert(model).forward(IDS, padding).logits, logits) < 1e-12


def test_the_cp_lrp_oracle_conserves_relevance_without_biases():
    model = llama("eager")
    oracle = attnlrp.Llama(model, attnlrp.CP_LRP)
    seed = largest_at_the_end(oracle.forward(IDS).logits)
    assert torch.allclose(oracle.relevance(IDS, seed).sum((1, 2)), seed.sum((1, 2)), rtol=1e-9)


# ---------------------------------------------------------------- attnlrp equals the oracle


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.__name__)
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_attnlrp_of_a_language_model(name, attention, seed, pure_float64):
    build, oracle = LANGUAGE_MODELS[name]
    model = build(attention)
    r, relevance_of_logits = run_language_model(model, IDS, seed)
    assert error(r, oracle(model).relevance(IDS, relevance_of_logits)) < TOLERANCE


@pytest.mark.parametrize("target", [0, 1, 2])
@pytest.mark.parametrize("attention", ATTENTION)
def test_attnlrp_of_bert(attention, target):
    model, padding = bert(attention), torch.ones_like(IDS)
    seed = one_class(attnlrp.Bert(model).forward(IDS, padding).logits, target)
    r, _ = run_bert(model, IDS, padding, seed)
    assert error(r, attnlrp.Bert(model).relevance(IDS, padding, seed)) < TOLERANCE


@pytest.mark.parametrize("attention", ATTENTION)
def test_attnlrp_of_bert_with_padding(attention):
    model, padding = bert(attention), torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    seed = one_class(attnlrp.Bert(model).forward(IDS, padding).logits, 1)
    r, _ = run_bert(model, IDS, padding, seed)
    assert error(r, attnlrp.Bert(model).relevance(IDS, padding, seed)) < TOLERANCE
    assert (r[1, 4:] == 0).all()


@pytest.mark.parametrize("attention", ATTENTION)
def test_attnlrp_of_llama_as_transformers_ships_it(attention):
    """With its casts to float32 in the middle of a float64 model."""
    model = llama(attention)
    r, seed = run_language_model(model, IDS, largest_at_the_end)
    assert error(r, attnlrp.Llama(model).relevance(IDS, seed)) < 2e-5


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh"])
def test_attnlrp_of_gpt2_is_the_same_for_a_fused_and_a_written_out_gelu(activation):
    model = gpt2("sdpa", activation)
    r, seed = run_language_model(model, IDS, largest_at_the_end)
    assert error(r, attnlrp.GPT2(model).relevance(IDS, seed)) < TOLERANCE


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("attention", ATTENTION)
def test_attnlrp_of_multi_query_and_full_attention(attention, kv_heads, pure_float64):
    model = llama(attention, hidden_size=16, num_hidden_layers=1, num_key_value_heads=kv_heads)
    r, seed = run_language_model(model, IDS, contrast)
    assert error(r, attnlrp.Llama(model).relevance(IDS, seed)) < TOLERANCE


# ---------------------------------------------------------------- seeds, verbs, batches


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_the_largest_logit_is_the_default_seed(name, pure_float64):
    build, oracle = LANGUAGE_MODELS[name]
    model = build("sdpa")
    embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
    logits = model(inputs_embeds=embeddings, use_cache=False).logits
    (r,) = dlrp.relevance(logits[:, -1], embeddings, preset="attnlrp")
    assert error(r, oracle(model).relevance(IDS, largest_at_the_end(logits.detach()))) < TOLERANCE


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_explain_gives_relevance_per_token(name, attention, pure_float64):
    build, oracle = LANGUAGE_MODELS[name]
    model = build(attention)
    seed = largest_at_the_end(oracle(model).forward(IDS).logits)
    a = dlrp.explain(model, input_ids=IDS, target=seed, preset="attnlrp")
    assert error(a.relevance, oracle(model).relevance(IDS, seed).sum(-1)) < TOLERANCE


@pytest.mark.parametrize("attention", ATTENTION)
def test_explain_gives_relevance_per_token_of_bert(attention):
    model, padding = bert(attention), torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    seed = one_class(attnlrp.Bert(model).forward(IDS, padding).logits, 2)
    a = dlrp.explain(model, input_ids=IDS, attention_mask=padding, target=2, preset="attnlrp")
    assert error(a.relevance, attnlrp.Bert(model).relevance(IDS, padding, seed).sum(-1)) < TOLERANCE


@pytest.mark.parametrize("preset", ["attnlrp", "cp-lrp"])
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_eager_equals_sdpa(name, preset, pure_float64):
    build, _ = LANGUAGE_MODELS[name]
    eager, sdpa = (run_language_model(build(attention), IDS, contrast, preset)[0] for attention in ATTENTION)
    assert error(eager, sdpa) < 1e-9


@pytest.mark.parametrize("preset", ["attnlrp", "cp-lrp"])
def test_eager_equals_sdpa_in_bert(preset):
    padding = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    eager, sdpa = (run_bert(bert(attention), IDS, padding, preset=preset)[0] for attention in ATTENTION)
    assert error(eager, sdpa) < 1e-9


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_a_batch_equals_single_runs(name, attention, pure_float64):
    model = LANGUAGE_MODELS[name][0](attention)
    together, _ = run_language_model(model, IDS, contrast)
    singles = torch.cat([run_language_model(model, ids[None], contrast)[0] for ids in IDS])
    assert error(together, singles) < 1e-9


@pytest.mark.parametrize("attention", ATTENTION)
def test_a_padded_batch_equals_single_runs(attention):
    model, padding = bert(attention), torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    together, _ = run_bert(model, IDS, padding)
    for row, length in enumerate([7, 4]):
        single, _ = run_bert(model, IDS[row : row + 1, :length], torch.ones(1, length, dtype=torch.long))
        assert error(together[row : row + 1, :length], single) < 1e-9


# ---------------------------------------------------------------- cp-lrp


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.__name__)
@pytest.mark.parametrize("attention", ATTENTION)
def test_cp_lrp_of_llama(attention, seed, pure_float64):
    model = llama(attention)
    r, relevance_of_logits = run_language_model(model, IDS, seed, "cp-lrp")
    assert error(r, attnlrp.Llama(model, attnlrp.CP_LRP).relevance(IDS, relevance_of_logits)) < TOLERANCE


@pytest.mark.parametrize("attention", ATTENTION)
def test_cp_lrp_of_llama_conserves_relevance(attention, pure_float64):
    r, seed = run_language_model(llama(attention), IDS, largest_at_the_end, "cp-lrp")
    assert torch.allclose(r.sum((1, 2)), seed.sum((1, 2)), rtol=1e-9)


@pytest.mark.parametrize("attention", ATTENTION)
def test_cp_lrp_of_gpt2(attention):
    model = gpt2(attention)
    r, seed = run_language_model(model, IDS, contrast, "cp-lrp")
    assert error(r, attnlrp.GPT2(model, attnlrp.CP_LRP).relevance(IDS, seed)) < TOLERANCE


@pytest.mark.parametrize("attention", ATTENTION)
def test_cp_lrp_of_bert_with_padding(attention):
    model, padding = bert(attention), torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    seed = one_class(attnlrp.Bert(model).forward(IDS, padding).logits, 0)
    r, _ = run_bert(model, IDS, padding, seed, "cp-lrp")
    assert error(r, attnlrp.Bert(model, attnlrp.CP_LRP).relevance(IDS, padding, seed)) < TOLERANCE

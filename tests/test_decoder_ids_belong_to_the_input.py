"""Encoder-decoders that make their decoder's ids from the input's (BART and T5 for classification and question
answering) put a slice of the ids into a new tensor behind a start token. What the decoder looks up there belongs to
the ids that were put there.
"""

import pytest
import torch

import dynamiclrp as dlrp
import oracles  # noqa: F401  mends torchvision before transformers imports it

transformers = pytest.importorskip("transformers")

IDS = torch.tensor([[0, 11, 12, 13, 14, 2], [0, 21, 22, 23, 24, 2]])


def bart(kind):
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=80, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
    )  # fmt: skip
    return getattr(transformers, f"BartFor{kind}")(config).eval()


def t5(kind):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=80, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0, pad_token_id=0,
        eos_token_id=2, num_labels=2,
    )  # fmt: skip
    return getattr(transformers, f"T5For{kind}")(config).eval()


MODELS = {
    "BART classifies": lambda: bart("SequenceClassification"),
    "T5 classifies": lambda: t5("SequenceClassification"),
    "BART finds answers": lambda: bart("QuestionAnswering"),
    "T5 finds answers": lambda: t5("QuestionAnswering"),
}


def score(output):
    first = output["logits"] if "logits" in output else output["start_logits"]
    return first[:, 1]


def truth(model):
    """Gradient x input of both lookups; what stands at position i + 1 of the decoder is the input's token i."""
    made = []

    def keep(module, args, output):
        output.retain_grad()
        made.append((args[0], output))

    parts = [m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m.num_embeddings == 80]
    hooks = [part.register_forward_hook(keep) for part in set(parts)]
    try:
        score(model(input_ids=IDS)).sum().backward()
    finally:
        for hook in hooks:
            hook.remove()
    wanted = torch.zeros(IDS.shape)
    for ids, output in made:
        found = (output.grad * output).sum(-1).detach()
        if torch.equal(ids, IDS):
            wanted += found
        else:
            assert torch.equal(ids[:, 1:], IDS[:, :-1])
            wanted[:, :-1] += found[:, 1:]
    return wanted


@pytest.mark.parametrize("name", MODELS)
def test_what_the_decoder_looks_up_belongs_to_the_ids_it_was_made_from(name):
    model = MODELS[name]()
    wanted = truth(model)
    model.zero_grad(set_to_none=True)
    # start and end scores are stacked last
    found = dlrp.explain(model, input_ids=IDS, target=score, preset="gradient")
    torch.testing.assert_close(found.relevance, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


def test_control_ids_given_to_the_decoder():
    model = bart("SequenceClassification")
    given = torch.cat([torch.full((2, 1), 2), IDS[:, :-1]], 1)
    found = dlrp.explain(model, input_ids=IDS, decoder_input_ids=given, target=[1, 1], preset="gradient")
    both = (
        sum(r.sum(1) for r in found.relevances.values())
        if isinstance(found.relevances, dict)
        else sum(r.sum(1) for r in found.relevances)
    )
    assert torch.isfinite(both).all() and (both.abs() > 1e-4).all()

"""Perturbing and explaining token models: embeddings, masks, positions, spans, against slow loops."""

import oracles  # noqa: F401  # before transformers: makes its import of torchvision work

# isort: split
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from dynamiclrp import evaluate as ev
from dynamiclrp.errors import EvaluationError

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 60}
IDS = torch.randint(4, 60, (3, 7), generator=torch.Generator().manual_seed(0))
R = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
PADDED = torch.ones_like(IDS)
PADDED[1, 5:] = 0


def make(kind, config, **extra) -> nn.Module:
    torch.manual_seed(0)
    model = kind(config(**SMALL, **extra)).eval().double()
    for name, p in model.named_parameters():  # random models hardly react: make every weight count
        if p.dim() > 1:
            p.data *= 4 if "layer" in name else 8
    return model


def orders(relevance: Tensor) -> tuple[list[int], list[int]]:
    morf = relevance.argsort(descending=True).tolist()
    return morf, morf[::-1]


def loop(score, order: list[int]) -> Tensor:
    """The score after each removal, one by one."""
    gone: list[int] = []
    points = [score(gone)]
    for unit in order:
        gone = [*gone, unit]
        points.append(score(gone))
    return torch.tensor(points, dtype=torch.float64)


def check(found: ev.Curves, row: int, score, relevance: Tensor) -> None:
    for curve, order in zip((found.morf[row], found.lerf[row]), orders(relevance)):
        expected = loop(score, order)
        assert expected.std() > 1e-6  # the model reacts
        torch.testing.assert_close(curve, expected, rtol=0, atol=1e-7)  # rotary tables are float32


@torch.no_grad()
def test_zeroed_embeddings_of_an_encoder():
    model = make(BertForSequenceClassification, BertConfig, num_labels=3)
    found = ev.perturb(model, {"input_ids": IDS}, R, [0, 1, 2], fill="zero", step=1, batch_size=5)
    for row in range(3):

        def score(gone, row=row):
            embeddings = model.get_input_embeddings()(IDS[row : row + 1]).clone()
            embeddings[:, gone] = 0
            return model(inputs_embeds=embeddings).logits.softmax(-1)[0, row].item()

        check(found, row, score, R[row])


@torch.no_grad()
def test_zeroed_embeddings_keep_positions_and_padding():
    """RoBERTa counts positions by which ids are padding, which inputs_embeds would hide from it."""
    model = make(
        RobertaForSequenceClassification, RobertaConfig, num_labels=3, pad_token_id=1, max_position_embeddings=20
    )
    ids = torch.where(PADDED.bool(), IDS, 1)
    found = ev.perturb(model, {"input_ids": ids, "attention_mask": PADDED}, R, [0, 1, 2], step=1)
    assert [len(points) for points in found.fractions] == [8, 6, 8]  # padding is never removed
    for row, length in enumerate((7, 5, 7)):

        def score(gone, row=row, length=length):
            embeddings = model.get_input_embeddings()(ids[row : row + 1, :length]).clone()
            embeddings[:, gone] = 0
            positions = torch.arange(2, length + 2)[None]  # RoBERTa's first position is pad + 1
            return model(inputs_embeds=embeddings, position_ids=positions).logits.softmax(-1)[0, row].item()

        check(found, row, score, R[row, :length])


@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_next_token_of_padded_rows(side):
    """The last attended position of each row is asked, on whichever side the padding is."""
    model = make(LlamaForCausalLM, LlamaConfig, num_key_value_heads=2, pad_token_id=0)
    mask = PADDED if side == "right" else PADDED.flip(1)
    ids = IDS * mask
    found = ev.perturb(model, {"input_ids": ids, "attention_mask": mask}, R, [5, 6, 7], measure="logit", step=1)
    for row in range(3):
        real = mask[row].bool()

        def score(gone, row=row, real=real):
            embeddings = model.get_input_embeddings()(ids[row][real][None]).clone()
            embeddings[:, gone] = 0
            return model(inputs_embeds=embeddings).logits[0, -1, 5 + row].item()

        check(found, row, score, R[row][real])


@torch.no_grad()
def test_position_and_token_as_target():
    model = make(LlamaForCausalLM, LlamaConfig, num_key_value_heads=2, pad_token_id=0)
    found = ev.perturb(model, {"input_ids": IDS}, R, [[3, 9], [6, 9], [4, 8]], measure="logit", step=1)
    whole = model(input_ids=IDS).logits
    expected = [whole[0, 3, 9].item(), whole[1, 6, 9].item(), whole[2, 4, 8].item()]
    assert [curve[0].item() for curve in found.morf] == pytest.approx(expected)
    relevance = ev.relevance_of("attnlrp", model, {"input_ids": IDS}, [[3, 9], [6, 9], [4, 8]])
    assert not relevance[0, 4:].any() and relevance[0, :4].all()  # a causal model does not see ahead


@torch.no_grad()
def test_classifier_that_looks_for_the_last_token():
    """Llama's classifier finds the end of a text by its ids; that must survive zeroing."""
    model = make(LlamaForSequenceClassification, LlamaConfig, num_key_value_heads=2, pad_token_id=0, num_labels=3)
    found = ev.perturb(model, {"input_ids": IDS * PADDED, "attention_mask": PADDED}, R, [0, 1, 2], step=1)

    def score(gone):
        embeddings = model.get_input_embeddings()(IDS[1:2, :5]).clone()
        embeddings[:, gone] = 0
        return model(inputs_embeds=embeddings).logits.softmax(-1)[0, 1].item()

    check(found, 1, score, R[1, :5])


@pytest.mark.parametrize(("fill", "token"), [("pad", 0), (ev.Token(3), 3), (lambda ids: ids * 0 + 9, 9)])
@torch.no_grad()
def test_other_tokens_as_fill(fill, token):
    model = make(BertForSequenceClassification, BertConfig, num_labels=3, pad_token_id=0)
    found = ev.perturb(model, {"input_ids": IDS}, R, [0, 1, 2], fill=fill, step=1)
    for row in range(3):

        def score(gone, row=row):
            ids = IDS[row : row + 1].clone()
            ids[:, gone] = token
            return model(input_ids=ids).logits.softmax(-1)[0, row].item()

        check(found, row, score, R[row])


@torch.no_grad()
def test_only_some_tokens_may_go():
    model = make(BertForSequenceClassification, BertConfig, num_labels=3)
    question = torch.zeros_like(IDS, dtype=torch.bool)
    question[:, 1:5] = True
    inputs = {"input_ids": IDS.clone(), "question": question}
    inputs["input_ids"][:, 2] = 55
    unit = ev.Tokens(skip=(55,), only="question")
    found = ev.perturb(model, inputs, R, [0, 1, 2], unit=unit, step=1)

    def score(gone):
        embeddings = model.get_input_embeddings()(inputs["input_ids"][:1]).clone()
        embeddings[:, [(1, 3, 4)[g] for g in gone]] = 0
        return model(inputs_embeds=embeddings).logits.softmax(-1)[0, 0].item()

    check(found, 0, score, R[0, [1, 3, 4]])
    with pytest.raises(EvaluationError, match="no unit that may be removed"):
        ev.perturb(model, {**inputs, "question": question & False}, R, unit=unit)
    with pytest.raises(EvaluationError, match="expected a mask of shape"):
        ev.perturb(model, {"input_ids": IDS}, R, unit=unit)


@torch.no_grad()
def test_spans_multiply_probabilities_and_add_logits():
    model = make(BertForQuestionAnswering, BertConfig)
    inputs, spans = {"input_ids": IDS, "attention_mask": PADDED}, torch.tensor([[2, 3], [4, 4], [0, 6]])
    out = model(**inputs)
    rows = torch.arange(3)
    starts, ends = out.start_logits, out.end_logits
    expected = {
        "logit": starts[rows, spans[:, 0]] + ends[rows, spans[:, 1]],
        "probability": starts.softmax(1)[rows, spans[:, 0]] * ends.softmax(1)[rows, spans[:, 1]],
        "accuracy": (starts.argmax(1) == spans[:, 0]) & (ends.argmax(1) == spans[:, 1]),
    }
    for measure, values in expected.items():
        found = ev.perturb(model, inputs, R, spans, measure=measure)
        assert [curve[0].item() for curve in found.morf] == pytest.approx(values.double().tolist())
    relevance = ev.relevance_of("gradient", model, inputs, spans)
    embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
    with torch.enable_grad():
        out = model(inputs_embeds=embeddings, attention_mask=PADDED)
        score = out.start_logits[rows, spans[:, 0]] + out.end_logits[rows, spans[:, 1]]
        (gradient,) = torch.autograd.grad(score.sum(), embeddings)
    torch.testing.assert_close(relevance, (gradient * embeddings).sum(-1).detach())
    assert torch.equal(ev.compare(model, inputs, ["random"]).curves("random").fractions[0], found.fractions[0])


@torch.no_grad()
def test_float_sequences_are_perturbed_by_position():
    """Zeroed positions of inputs_embeds are zeroed embeddings of ids; relevance is summed over their width."""
    model = make(BertForSequenceClassification, BertConfig, num_labels=3)
    embeddings = model.get_input_embeddings()(IDS)
    by_ids = ev.perturb(model, {"input_ids": IDS}, R, [0, 1, 2], fill="zero")
    wide = torch.randn(3, 7, 32, dtype=torch.float64)
    wide = wide + ((R - wide.sum(-1)) / 32)[..., None]  # sums to R
    by_floats = ev.perturb(model, {"inputs_embeds": embeddings}, wide, [0, 1, 2], fill="zero")
    torch.testing.assert_close(by_floats.metric(), by_ids.metric())
    found = ev.compare(model, {"inputs_embeds": embeddings}, ["gradient"], [0, 1, 2])
    same = ev.compare(model, {"input_ids": IDS}, ["gradient"], [0, 1, 2])
    torch.testing.assert_close(found.metric("gradient"), same.metric("gradient"))


def test_half_precision():
    """bfloat16 models are ranked and scored; the probability is that of their own logits, in float64."""
    model = make(BertForSequenceClassification, BertConfig, num_labels=3).to(torch.bfloat16)
    methods = ["attnlrp", "gradient", "captum:IntegratedGradients", "random"]
    found = ev.compare(model, {"input_ids": IDS}, methods, on_error="raise")
    with torch.no_grad():
        expected = model(input_ids=IDS).logits.double().softmax(-1).amax(-1)
    assert [curve[0].item() for curve in found.curves("attnlrp").morf] == pytest.approx(expected.tolist(), rel=1e-6)


@torch.no_grad()
def test_encoder_decoder():
    torch.manual_seed(0)
    config = T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval().double()
    inputs = {"input_ids": IDS, "attention_mask": PADDED, "decoder_input_ids": torch.tensor([[0, 5]] * 3)}
    found = ev.perturb(model, inputs, R, [3, 4, 5], measure="logit", step=1)

    def score(gone):
        embeddings = model.get_input_embeddings()(IDS[1:2, :5]).clone()
        embeddings[:, gone] = 0
        return model(inputs_embeds=embeddings, decoder_input_ids=torch.tensor([[0, 5]])).logits[0, -1, 4].item()

    check(found, 1, score, R[1, :5])
    table = ev.compare(model, inputs, ["attnlrp", "captum:InputXGradient"], on_error="raise", measure="logit")
    assert len(table.of("attnlrp")) == 3


@torch.no_grad()
def test_patches_of_a_vision_transformer_are_max_pooled():
    sizes = {k: v for k, v in SMALL.items() if k != "vocab_size"}
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=12, patch_size=4, num_labels=3)).eval().double()
    for p in model.parameters():
        p.data *= 4
    x, relevance = torch.randn(2, 3, 12, 12, dtype=torch.float64), torch.randn(2, 3, 12, 12, dtype=torch.float64)
    found = ev.perturb(model, {"pixel_values": x}, relevance, [0, 1], unit=ev.Patches(4), fill="zero", step=1)
    patches = [(slice(i, i + 4), slice(j, j + 4)) for i in (0, 4, 8) for j in (0, 4, 8)]
    for row in range(2):
        pooled = torch.tensor([relevance[row].sum(0)[patch].max() for patch in patches])

        def score(gone, row=row):
            picture = x[row : row + 1].clone()
            for patch in gone:
                picture[:, :, patches[patch][0], patches[patch][1]] = 0
            return model(pixel_values=picture).logits.softmax(-1)[0, row].item()

        check(found, row, score, pooled)
    with pytest.raises(EvaluationError, match="patches of 5 do not divide"):
        ev.perturb(model, {"pixel_values": x}, relevance, unit=ev.Patches(5))


@torch.no_grad()
def test_a_users_measure_gets_the_whole_output():
    """The likelihood of the last two tokens needs two positions; the shortcut of asking for one must not be taken."""
    model = make(LlamaForCausalLM, LlamaConfig, num_key_value_heads=2, pad_token_id=0)

    def likelihood(raw, targets):
        scores = raw.logits.log_softmax(-1)
        return scores[:, -2, 5] + scores[torch.arange(len(targets)), -1, targets]

    found = ev.perturb(model, {"input_ids": IDS}, R, [5, 6, 7], measure=likelihood, step=1)
    scores = model(input_ids=IDS).logits.log_softmax(-1)
    expected = scores[:, -2, 5] + scores[torch.arange(3), -1, [5, 6, 7]]
    assert [curve[0].item() for curve in found.morf] == pytest.approx(expected.tolist())
    whole = ev.compare(model, {"input_ids": IDS}, ["attnlrp", "random"], measure=likelihood, on_error="raise")
    assert len(whole.of("attnlrp")) == 3 and whole.rows[0]["conservation"] is None


@torch.no_grad()
def test_the_users_own_choice_of_logits_is_respected():
    model = make(LlamaForCausalLM, LlamaConfig, num_key_value_heads=2, pad_token_id=0)
    inputs = {"input_ids": IDS * PADDED, "attention_mask": PADDED}
    expected = ev.perturb(model, inputs, R, [5, 6, 7], measure="logit")
    found = ev.perturb(model, {**inputs, "logits_to_keep": 4}, R, [5, 6, 7], measure="logit")
    torch.testing.assert_close(found.metric(), expected.metric())
    with pytest.raises(EvaluationError, match="the output has 2 of them"):
        ev.perturb(model, {**inputs, "logits_to_keep": 2}, R, [5, 6, 7], measure="logit")  # row 1 ends at 4 of 7


def test_masks_for_evaluation_are_not_handed_to_the_model():
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(60, 4), nn.Linear(4, 2)

        def forward(self, input_ids):
            return self.out(self.table(input_ids).mean(1))

    inputs = {"input_ids": IDS, "mine": torch.ones_like(IDS, dtype=torch.bool)}
    unit = ev.Tokens(only="mine")
    assert len(ev.perturb(Strict(), inputs, R, [0, 0, 1], unit=unit)) == 3
    methods = ["attnlrp", "captum:InputXGradient", "random"]
    found = ev.compare(Strict(), inputs, methods, unit=unit, on_error="raise")
    assert all(len(found.of(m)) == 3 for m in methods)
    assert len(ev.randomisation(Strict(), inputs, ["attnlrp"], unit=unit, on_error="raise").records) == 6


def test_lost_embeddings_are_named():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Embedding(60, 4), nn.Embedding(60, 4), nn.Linear(4, 2)

        def forward(self, input_ids):
            return self.out(self.a(input_ids).mean(1))

    model = Odd()
    with pytest.raises(EvaluationError, match="2 embedding tables: say which"):
        ev.perturb(model, {"input_ids": IDS}, R)
    with pytest.raises(EvaluationError, match="was never called with 'input_ids'"):
        ev.perturb(model, {"input_ids": IDS}, R, embedding="b")
    with pytest.raises(EvaluationError, match="no such module"):
        ev.perturb(model, {"input_ids": IDS}, R, embedding="c")
    assert len(ev.perturb(model, {"input_ids": IDS}, R, embedding="a")) == 3
    assert not any(m._forward_hooks for m in model.modules())
    with pytest.raises(EvaluationError, match=r"no mask_token_id: use Token\(tokenizer.mask_token_id\)"):
        ev.perturb(model, {"input_ids": IDS}, R, fill="mask", embedding="a")

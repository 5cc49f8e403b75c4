"""explain_generation: the matrix against explanations one by one, chats, contrasts, seq2seq, and bad input."""

import pytest
import torch

import dynamiclrp as dlrp
import words  # first: makes transformers' import of torchvision work
from dynamiclrp.generation import _Scored

PROMPT = "Alice put the cake in the oven, Bob put the letter in the"


@pytest.fixture(scope="module")
def tokenizer():
    return words.bytelevel(chat=True)


@pytest.fixture(scope="module")
def model():
    return words.llama()


@pytest.fixture(scope="module")
def made(model, tokenizer):
    return dlrp.explain_generation(model, tokenizer, PROMPT, max_new_tokens=9, progress=False, batch_size=4)


def ids_of(g, model, tokenizer):
    """Prompt and generated ids, by asking the model itself."""
    prompt = tokenizer(PROMPT, return_tensors="pt")
    return model.generate(**prompt, max_new_tokens=9, do_sample=False)[0], prompt["input_ids"].shape[1]


def test_every_row_equals_an_explanation_of_its_token(made, model, tokenizer):
    ids, start = ids_of(made, model, tokenizer)
    assert made.start == start and len(made) == len(ids) - start and made.matrix.shape == (len(made), len(ids) - 1)
    for i in range(len(made)):
        before = ids[None, : start + i]
        alone = dlrp.explain(model, input_ids=before, target=int(ids[start + i]))
        row = made.matrix[i]
        assert torch.allclose(row[: start + i], alone.relevance[0], atol=1e-5 * float(alone.relevance.abs().max()))
        assert not row[start + i :].any()
        assert float(made.scores[i]) == pytest.approx(float(alone.score), abs=1e-5)
        chances = alone.prediction[0, -1].softmax(-1)
        assert float(made.probabilities[i]) == pytest.approx(float(chances[ids[start + i]]), abs=1e-6)
        assert made.alternatives[i][0][1] == pytest.approx(float(chances.max()), abs=1e-6)


def test_the_model_runs_forward_once(model, tokenizer):
    calls = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        dlrp.explain_generation(
            model, tokenizer, PROMPT, continuation=" drawer. Bob opened", progress=False, batch_size=2
        )
    finally:
        handle.remove()
    assert len(calls) == 1


def test_batch_size_changes_nothing(made, model, tokenizer):
    one = dlrp.explain_generation(model, tokenizer, PROMPT, max_new_tokens=9, progress=False, batch_size=1)
    assert torch.allclose(one.matrix, made.matrix, atol=1e-6)


def test_a_given_text_is_explained_without_sampling(model, tokenizer):
    text = " drawer. Bob opened the drawer"
    g = dlrp.explain_generation(model, tokenizer, PROMPT, continuation=text, progress=False)
    assert g.text == text and "".join(g.tokens[: g.start]) == PROMPT
    ids = tokenizer(PROMPT + text)["input_ids"]
    again = dlrp.explain_generation(model, tokenizer, PROMPT, continuation=ids[g.start :], progress=False)
    assert torch.equal(g.matrix, again.matrix)


def test_contrast_is_the_difference_of_two(model, tokenizer):
    text = " drawer."
    g = dlrp.explain_generation(model, tokenizer, PROMPT, continuation=text, contrast="oven", progress=False)
    ids = tokenizer(PROMPT + text, return_tensors="pt")["input_ids"]
    oven = tokenizer(" oven")["input_ids"][0]
    for i in range(len(g)):
        at, token = g.start + i, int(ids[0, g.start + i])
        plain = dlrp.explain(
            model,
            input_ids=ids[:, :at],
            target=lambda out, token=token: out.logits[0, -1, token] - out.logits[0, -1, oven],
        )
        assert torch.allclose(g.matrix[i, :at], plain.relevance[0], atol=1e-5)
    assert set(g.contrasts) == {" oven"}
    runner = dlrp.explain_generation(model, tokenizer, PROMPT, continuation=text, contrast="runner-up", progress=False)
    for i in range(len(runner)):
        best = [piece for piece, _ in runner.alternatives[i] if piece != runner.generated[i]]
        assert runner.contrasts[i] == best[0]


def test_chat(model, tokenizer):
    messages = [{"role": "user", "content": "Bob opened the"}]
    g = dlrp.explain_generation(model, tokenizer, messages=messages, max_new_tokens=3, progress=False)
    assert "".join(g.tokens[: g.start]).endswith("<|im_start|>assistant\n")
    assert g.context.kinds[0] == "special"


def test_seq2seq_rows_hold_encoder_and_decoder():
    pieces, model = words.wordpiece(), words.t5()
    g = dlrp.explain_generation(model, pieces, "who opened the drawer?", continuation="bob opened", progress=False)
    source = pieces("who opened the drawer?", return_tensors="pt")["input_ids"]
    said = pieces(text_target="bob opened")["input_ids"]
    assert g.start == source.shape[1] + 1 and len(g) == len(said)
    for i, token in enumerate(said):
        spoken = torch.tensor([[0, *said[:i]]])
        alone = dlrp.explain(model, input_ids=source, decoder_input_ids=spoken, target=token)
        row = torch.cat([alone.relevances["input_ids"][0], alone.relevances["decoder_input_ids"][0]])
        assert torch.allclose(g.matrix[i, : g.start + i], row, atol=1e-5)


def test_presets_that_name_modules_mean_the_same(model, tokenizer):
    preset = dlrp.preset("attnlrp") | {"model.layers.0.mlp": dlrp.Nothing()}
    scored = _Scored(model, tokenizer, 0, [1], None)
    assert dict(scored.named_modules()) == dict(model.named_modules())
    g = dlrp.explain_generation(model, tokenizer, PROMPT, continuation=" drawer", preset=preset, progress=False)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    alone = dlrp.explain(model, input_ids=ids, target=tokenizer(" drawer")["input_ids"][0], preset=preset)
    plain = dlrp.explain(model, input_ids=ids, target=tokenizer(" drawer")["input_ids"][0])
    assert torch.allclose(g.matrix[0, : g.start], alone.relevance[0], atol=1e-5)
    assert not torch.allclose(alone.relevance, plain.relevance, atol=1e-4)


def test_one_token_is_an_attribution(made):
    a = made[2]
    assert torch.equal(a.relevance[0], made.matrix[2, : made.start + 2])
    assert a.answers[0].label == made.said.label(2) and float(a.score) == float(made.scores[2])
    assert [p.relevance for p in made.top(2, 3)] == [p.relevance for p in a.top(3)]
    assert made[-1].answers[0].label == made.said.label(len(made) - 1)
    with pytest.raises(IndexError, match="below 9"):
        made[9]


def test_words_sum_to_tokens(made):
    matrix, rows, columns = made.words()
    assert matrix.shape == (len(rows), len(columns)) and len(columns) < len(made.tokens)
    assert float(matrix.sum()) == pytest.approx(float(made.matrix.sum()), abs=1e-4)


def test_save_and_load_bit_for_bit(made, tmp_path):
    pytest.importorskip("safetensors")
    made.save(tmp_path / "g.safetensors")
    back = dlrp.load(tmp_path / "g.safetensors")
    for name in ("matrix", "scores", "probabilities"):
        assert torch.equal(getattr(back, name), getattr(made, name))
    assert (back.tokens, back.generated, back.start, back.about) == (
        made.tokens,
        made.generated,
        made.start,
        made.about,
    )
    assert back.alternatives == made.alternatives and back.preset == made.preset
    assert back.html() == made.html() and repr(back) == repr(made)


def test_pandas_and_json(made):
    pytest.importorskip("pandas")
    frame = made.to_pandas()
    assert len(frame) == sum(made.start + i for i in range(len(made)))
    assert frame.relevance.sum() == pytest.approx(float(made.matrix.double().sum()), abs=1e-5)
    data = made.to_dict()
    assert data["tokens"][1]["relevance"] == made.matrix[1, : made.start + 1].tolist()
    assert len(made.to_dict(k=3)["tokens"][0]["top"]) == 3


def test_the_model_is_left_as_it_was(model, tokenizer):
    before = [(name, p.requires_grad) for name, p in model.named_parameters()]
    dlrp.explain_generation(model, tokenizer, PROMPT, max_new_tokens=2, progress=True)
    assert before == [(name, p.requires_grad) for name, p in model.named_parameters()]
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_bad_input_is_refused(model, tokenizer):
    def explain(*args, **options):
        return dlrp.explain_generation(model, tokenizer, *args, **{"progress": False, **options})

    with pytest.raises(TypeError, match="either a prompt or messages"):
        explain()
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        explain(PROMPT, max_new_tokens=0)
    with pytest.raises(ValueError, match="batch_size=0"):
        explain(PROMPT, batch_size=0)
    with pytest.raises(ValueError, match="empty text"):
        explain(PROMPT, continuation="")
    with pytest.raises(TypeError, match="temperature: options of sampling"):
        explain(PROMPT, continuation=" drawer", temperature=0.5)
    with pytest.raises(dlrp.TargetError, match="itself among the generated tokens"):
        explain(PROMPT, continuation=" drawer", contrast="drawer")
    with pytest.raises(ValueError, match="does sequence-classification: expected a causal or seq2seq"):
        dlrp.explain_generation(words.bert("SequenceClassification"), words.wordpiece(), "a letter")

"""explain_text: every head, batches, contrasts, words, and what it says about bad input."""

import pytest
import torch

pytest.importorskip("transformers")

import dynamiclrp as dlrp
import words
from dynamiclrp.heads import task_of
from dynamiclrp.media import Tokens
from dynamiclrp.tokens import read_tokens

SENTENCE = "Alice opened the oven, Bob opened the drawer."


@pytest.fixture(scope="module")
def pieces():
    return words.wordpiece()


@pytest.fixture(scope="module")
def bytelevel():
    return words.bytelevel()


def labels():
    return {"num_labels": 3, "id2label": {0: "sad", 1: "glad", 2: "so-so"}}


def test_sequence_classification_equals_explain(pieces):
    model = words.bert("SequenceClassification", **labels())
    a = dlrp.explain_text(model, pieces, SENTENCE, target="glad")
    plain = dlrp.explain(model, **pieces(SENTENCE, return_tensors="pt"), target=1)
    assert torch.equal(a.relevances["input_ids"], plain.relevances["input_ids"])
    assert a.answers[0].label == "glad" and a.target == [1]
    assert a.answers[0].probability == pytest.approx(float(a.prediction[0].softmax(-1)[1]))


def test_target_none_is_the_models_answer(pieces):
    model = words.bert("SequenceClassification", **labels())
    a = dlrp.explain_text(model, pieces, SENTENCE)
    assert a.target == [int(a.prediction[0].argmax())]


def test_contrast_is_the_difference_of_two(pieces):
    model = words.bert("SequenceClassification", **labels())
    a = dlrp.explain_text(model, pieces, SENTENCE, target="glad", contrast="sad")
    one, other = (dlrp.explain_text(model, pieces, SENTENCE, target=t).relevance for t in ("glad", "sad"))
    assert torch.allclose(a.relevance, one - other, atol=1e-6)
    assert a.answers[0].contrast == "sad" and float(a.score) == pytest.approx(
        float(a.prediction[0, 1] - a.prediction[0, 0])
    )


def test_several_targets_share_a_forward_pass(pieces, bytelevel):
    model = words.llama()
    calls = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    c = dlrp.explain_text(model, bytelevel, "Bob opened the", targets=3)
    handle.remove()
    logits = model(**bytelevel("Bob opened the", return_tensors="pt")).logits[0, -1]
    assert [a.target for _, a in c.items()] == [[i] for i in logits.topk(3).indices.tolist()] and len(calls) == 1
    for _, a in c.items():
        alone = dlrp.explain_text(model, bytelevel, "Bob opened the", target=a.target[0])
        assert torch.allclose(a.relevance, alone.relevance, atol=1e-6) and a.answers == alone.answers
    judge = words.bert("SequenceClassification", **labels())
    named = dlrp.explain_text(
        judge, pieces, SENTENCE, targets=["sad", "glad"], presets=["attnlrp", "gradient"], ledger=True
    )
    assert list(named) == ["sad · attnlrp", "glad · attnlrp", "sad · gradient", "glad · gradient"]
    assert named["glad · gradient"].preset.name == "gradient" and named["sad · attnlrp"].ledger is not None
    batch = dlrp.explain_text(judge, pieces, [SENTENCE, "a cake"], targets=2)
    assert all(len(a) == 2 for _, a in batch.items())
    with pytest.raises(dlrp.TargetError, match="the model has 3 answers, there is no place 4"):
        dlrp.explain_text(judge, pieces, SENTENCE, targets=4)
    for wrong in (0, True, "glad", []):
        with pytest.raises(dlrp.TargetError, match="targets"):
            dlrp.explain_text(judge, pieces, SENTENCE, targets=wrong)
    with pytest.raises(dlrp.PresetError, match="expected a list of presets"):
        dlrp.explain_text(judge, pieces, SENTENCE, presets="gamma")
    with pytest.raises(dlrp.TargetError, match="name the answers"):
        dlrp.explain_text(words.bert("QuestionAnswering"), pieces, ("who?", "Bob"), targets=2)


def test_batch_rows_equal_single_texts(pieces):
    model = words.bert("SequenceClassification", **labels())
    texts = [SENTENCE, "Bob put the cake in the drawer", "a letter?"]
    batch = dlrp.explain_text(model, pieces, texts, target=["sad", "glad", 2])
    assert len(batch) == 3
    for row, (text, target) in enumerate(zip(texts, ("sad", "glad", "so-so"))):
        alone = dlrp.explain_text(model, pieces, text, target=target)
        length = alone.relevance.shape[1]
        assert torch.allclose(batch.relevance[row, :length], alone.relevance[0], atol=1e-5)
        assert not batch.relevance[row, length:].any()
        assert [part.label for part in batch[row].parts()] == [part.label for part in alone.parts()]
        assert batch[row].answers == alone.answers or batch[row].answers[0].label == alone.answers[0].label


def test_token_classification_speaks_about_one_token(pieces):
    model = words.bert("TokenClassification", num_labels=2, id2label={0: "O", 1: "THING"})
    a = dlrp.explain_text(model, pieces, SENTENCE, token="drawer", target="THING", contrast="O")
    at = pieces(SENTENCE).tokens().index("drawer")
    plain = dlrp.explain(
        model, **pieces(SENTENCE, return_tensors="pt"), target=lambda out: out.logits[0, at, 1] - out.logits[0, at, 0]
    )
    assert torch.allclose(a.relevances["input_ids"], plain.relevances["input_ids"], atol=1e-7)
    assert str(a.answers[0]) == "“drawer” is THING rather than O"
    with pytest.raises(dlrp.TargetError, match="token="):
        dlrp.explain_text(model, pieces, SENTENCE)
    with pytest.raises(dlrp.TargetError, match="'opened' is 2 times in the text: give its number"):
        dlrp.explain_text(model, pieces, SENTENCE, token="opened")


def test_masked_language_model_fills_the_mask(pieces):
    model = words.bert("MaskedLM")
    text = "Bob opened the [MASK]."
    a = dlrp.explain_text(model, pieces, text, target="drawer", contrast="oven")
    ids = pieces(text, return_tensors="pt")
    at = int((ids["input_ids"][0] == pieces.mask_token_id).nonzero())
    drawer, oven = pieces.convert_tokens_to_ids(["drawer", "oven"])
    plain = dlrp.explain(model, **ids, output="logits", target=lambda y: y[0, at, drawer] - y[0, at, oven])
    assert torch.allclose(a.relevances["input_ids"], plain.relevances["input_ids"], atol=1e-7)
    assert str(a.answers[0]) == "drawer rather than oven"
    with pytest.raises(dlrp.TargetError, match="0 masks"):
        dlrp.explain_text(model, pieces, "Bob opened the drawer.")


def test_causal_language_model_explains_the_next_token(bytelevel):
    model = words.llama()
    text = "To read the letter, Bob opened the"
    a = dlrp.explain_text(model, bytelevel, text, target="drawer", contrast="oven")
    drawer, oven = (bytelevel(f" {word}")["input_ids"][0] for word in ("drawer", "oven"))
    plain = dlrp.explain(
        model,
        **bytelevel(text, return_tensors="pt"),
        output="logits",
        target=lambda y: y[0, -1, drawer] - y[0, -1, oven],
    )
    assert torch.allclose(a.relevance, plain.relevance, atol=1e-7)
    assert "".join(a.media["input_ids"][0].pieces) == text


def test_causal_batch_is_read_at_each_rows_own_end(bytelevel):
    model = words.llama()
    texts = ["Bob opened the", "Alice put the cake in the"]
    batch = dlrp.explain_text(model, bytelevel, texts)
    for row, text in enumerate(texts):
        alone = dlrp.explain_text(model, bytelevel, text)
        assert torch.allclose(batch.relevance[row, : alone.relevance.shape[1]], alone.relevance[0], atol=1e-5)
        assert batch.answers[row].label == alone.answers[0].label


def test_seq2seq_explains_encoder_and_decoder(pieces):
    a = dlrp.explain_text(
        words.t5(), pieces, "who opened the drawer?", prefix="bob", target="opened" if False else "open"
    )
    assert set(a.relevances) == {"input_ids", "decoder_input_ids"} == set(a.media)
    assert a.relevances["decoder_input_ids"].shape[1] == 2
    plain = dlrp.explain(
        words.t5(), input_ids=pieces("who opened the drawer?", return_tensors="pt")["input_ids"],
        decoder_input_ids=torch.tensor([[0, *pieces("bob", add_special_tokens=False)["input_ids"]]]),
        target=pieces.convert_tokens_to_ids("open"),
    )  # fmt: skip
    assert torch.allclose(a.relevances["input_ids"], plain.relevances["input_ids"], atol=1e-6)


def span(first, last):
    return lambda out: out.start_logits[0, first] + out.end_logits[0, last]


def test_question_answering_explains_a_span(pieces):
    model = words.bert("QuestionAnswering")
    pair = ("who opened the drawer?", "Alice opened the oven. Bob opened the drawer.")
    a = dlrp.explain_text(model, pieces, pair)
    ids = pieces(*pair, return_tensors="pt")
    ((start, end),) = a.target
    assert ids.sequence_ids(0)[start] == ids.sequence_ids(0)[end] == 1 and start <= end
    out = model(**ids)
    best = max(
        float(out.start_logits[0, i] + out.end_logits[0, j])
        for i in range(len(ids["input_ids"][0])) for j in range(i, min(i + 30, len(ids["input_ids"][0])))
        if ids.sequence_ids(0)[i] == ids.sequence_ids(0)[j] == 1
    )  # fmt: skip
    assert float(a.score) == pytest.approx(best, abs=1e-5)
    b = dlrp.explain_text(model, pieces, pair, target="Bob", contrast="Alice")
    assert str(b.answers[0]) == "Bob rather than Alice"
    plain = dlrp.explain(model, **ids, target=span(*b.target[0][0]))
    other = dlrp.explain(model, **ids, target=span(*b.target[0][1]))
    assert torch.allclose(
        b.relevances["input_ids"], (plain.relevances["input_ids"] - other.relevances["input_ids"]), atol=1e-6
    )
    with pytest.raises(dlrp.TargetError, match="not in the context"):
        dlrp.explain_text(model, pieces, pair, target="Carol")
    with pytest.raises(ValueError, match="needs a pair"):
        dlrp.explain_text(model, pieces, "who opened the drawer?")


def test_chat_goes_through_the_template():
    tokenizer = words.bytelevel(chat=True)
    a = dlrp.explain_text(words.llama(), tokenizer, messages=[{"role": "user", "content": "Bob opened the"}])
    tokens = a.media["input_ids"][0]
    assert "".join(tokens.pieces) == "<|im_start|>user\nBob opened the<|end|><|im_start|>assistant\n"
    assert tokens.kinds.count("special") == 3
    with pytest.raises(ValueError, match="no chat template"):
        dlrp.explain_text(words.llama(), words.bytelevel(), messages=[{"role": "user", "content": "?"}])
    with pytest.raises(TypeError, match="expected a list of"):
        dlrp.explain_text(words.llama(), tokenizer, messages=["hello"])


def test_words_sum_to_tokens(pieces, bytelevel):
    for model, tokenizer in ((words.bert("SequenceClassification"), pieces), (words.llama(), bytelevel)):
        a = dlrp.explain_text(model, tokenizer, SENTENCE)
        tokens, merged = (a.parts(words=flag) for flag in (False, True))
        tokens = [part for part in tokens if part.input == "input_ids"]
        merged = [part for part in merged if part.input == "input_ids"]
        assert sum(p.relevance for p in merged) == pytest.approx(sum(p.relevance for p in tokens), abs=1e-9)
        for part in merged:
            start, stop = part.index
            assert part.relevance == pytest.approx(sum(p.relevance for p in tokens[start:stop]), abs=1e-9)
        plain = [part.label.lower() for part in merged if not part.label.startswith("[")]
        assert plain == ["alice", "opened", "the", "oven", ",", "bob", "opened", "the", "drawer", "."]


def test_tokens_read_as_they_were_written(pieces, bytelevel):
    text = "ALICE opened  the OVENS,\nBob🍰 [MASK] put?"
    for tokenizer, model in ((pieces, words.bert("SequenceClassification")), (bytelevel, words.llama())):
        (tokens,) = dlrp.explain_text(model, tokenizer, text).media["input_ids"]
        written = [piece for piece, kind in zip(tokens.pieces, tokens.kinds) if kind != "special"]
        assert "".join("".join(written).split()) == "".join(
            text.replace("[MASK]", "" if tokenizer is pieces else "[MASK]").split()
        )
        shown = [tokens.label(a, b) for a, b in tokens.words()]
        assert "OVENS" in shown and "ALICE" in shown and "put" in shown and "Bob" in "".join(shown)
    (pair,) = dlrp.explain_text(words.bert("QuestionAnswering"), pieces, ("WHO put?", "Bob  did.")).media["input_ids"]
    assert "".join(pair.pieces) == "[CLS]WHO put?[SEP]Bob  did.[SEP]"


def test_characters_of_several_tokens_are_read_whole(bytelevel):
    ids = bytelevel("Bob 🍰 naïve")["input_ids"]
    read = read_tokens(bytelevel, ids)
    assert "".join(read.pieces) == "Bob 🍰 naïve" and "" in read.pieces
    assert [read.text(a, b) for a, b in read.words()] == ["Bob", " 🍰", " naïve"]


def test_words_of_languages_without_spaces():
    assert Tokens.of(["我", "喜欢", "猫", "。"]).words() == ((0, 1), (1, 2), (2, 3), (3, 4))
    assert Tokens.of(["don", "'t", " stop", "-", "now"]).words() == ((0, 2), (2, 3), (3, 4), (4, 5))


def test_unknown_heads_and_targets_are_refused(pieces, bytelevel):
    model = words.bert("SequenceClassification", **labels())
    with pytest.raises(dlrp.TargetError, match=r"no class of the model is called 'glat'. Close: glad"):
        dlrp.explain_text(model, pieces, SENTENCE, target="glat")
    with pytest.raises(dlrp.TargetError, match="out of range: the model has 3 classes"):
        dlrp.explain_text(model, pieces, SENTENCE, target=3)
    with pytest.raises(dlrp.TargetError, match="is the target itself"):
        dlrp.explain_text(model, pieces, SENTENCE, target="glad", contrast="glad")
    with pytest.raises(dlrp.TargetError, match="2 targets for 1 texts"):
        dlrp.explain_text(model, pieces, [SENTENCE], target=[0, 1])
    with pytest.raises(TypeError, match="token: only token classifiers"):
        dlrp.explain_text(model, pieces, SENTENCE, token=1)
    with pytest.raises(TypeError, match="either a text or messages"):
        dlrp.explain_text(model, pieces)
    with pytest.raises(ValueError, match="empty list"):
        dlrp.explain_text(model, pieces, [])
    with pytest.raises(ValueError, match="task 'poetry': expected one of"):
        task_of(model, "poetry")
    with pytest.raises(ValueError, match="cannot tell from its class what Linear answers"):
        dlrp.explain_text(torch.nn.Linear(2, 2), pieces, SENTENCE)
    with pytest.raises(dlrp.TargetError, match=r"is \d+ tokens for this tokenizer"):
        dlrp.explain_text(words.llama(), bytelevel, "Bob opened the", target="refrigerator")

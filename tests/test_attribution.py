"""Attribution and Comparison: rows, parts, pooling, tables, JSON, files, and what is said about bad input."""

import doctest
import importlib
import json
import struct
import subprocess
import sys

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp
from dynamiclrp.archive import write_whole
from dynamiclrp.attribution import Account, sinks
from dynamiclrp.media import FIRST, PADDING, SPECIAL, Picture, Sound, Table, Tokens, readable
from dynamiclrp.parts import pool


def linear(rows=1, **options):
    torch.manual_seed(0)
    return dlrp.explain(nn.Linear(5, 3), torch.randn(rows, 5), target=1, **options)


def words(rows=1):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(48, 2))
    a = dlrp.explain(model, torch.randint(0, 20, (rows, 6)), target=0)
    kinds = (SPECIAL, "", "", "", SPECIAL, PADDING)
    tokens = Tokens(("[CLS]", "the", " oven", "s", "[SEP]", "[PAD]"), kinds)
    return a.seen_as(**{next(iter(a.relevances)): (tokens,) * rows})


def image(height=12, width=20):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    return dlrp.explain(model, torch.randn(1, 3, height, width), target=0)


# Sums and rows -------------------------------------------------------------------------------------------------------


def test_account_with_and_without_a_ledger():
    plain, booked = linear(), linear(ledger=True)
    assert plain.account.total == pytest.approx(float(plain.score)) and not plain.account.kept
    assert plain.account.residual == pytest.approx(booked.account.kept["bias"], abs=1e-6)
    assert booked.account.residual == pytest.approx(0, abs=1e-6)


def test_rows_are_attributions_of_their_own():
    a = words(rows=3)
    assert len(a) == 3
    for row in range(3):
        one = a[row]
        assert torch.equal(one.relevance, a.relevance[row : row + 1]) and len(one) == 1
        assert float(one.score) == float(a.score[row])
    assert torch.equal(a[-1].relevance, a[2].relevance)
    with pytest.raises(IndexError, match="below 3"):
        a[3]


def test_the_whole_does_not_change_when_rows_are_taken():
    a = linear(rows=2)
    before = a.relevance.clone()
    a[0], a[1]
    assert torch.equal(a.relevance, before)


# Parts ---------------------------------------------------------------------------------------------------------------


def test_words_sum_to_tokens_and_padding_is_left_out_where_it_is_nothing():
    a = words()
    name = next(iter(a.relevances))
    values = a.relevance[0].double()
    tokens, merged = a.parts(), a.words()
    assert [p.label for p in merged] == ["[CLS]", "the", "ovens", "[SEP]", "[PAD]"]  # this model reads its padding
    assert merged[2].index == (2, 4) and merged[2].relevance == pytest.approx(float(values[2:4].sum()), abs=1e-12)
    assert sum(p.relevance for p in merged) == pytest.approx(float(values.sum()), abs=1e-9)
    quiet = a.relevance.clone()
    quiet[0, 5] = 0
    hushed = dlrp.Attribution(
        {name: quiet}, {}, a.prediction, 0, a.seed, None, a.preset, media=a.media
    )  # fmt: skip
    assert "[PAD]" not in [p.label for p in hushed.parts()] and len(tokens) == 6


def test_top_is_by_magnitude():
    a = linear()
    values = a.relevance[0].tolist()
    top = a.top(3)
    assert [p.relevance for p in top] == pytest.approx(sorted(values, key=lambda v: -abs(v))[:3])
    assert all(values[p.index] == pytest.approx(p.relevance) for p in top)
    with pytest.raises(ValueError, match=r"top\(0\)"):
        a.top(0)


def test_pooling_adds_up_channels_and_patches():
    a = image()
    pooled = a.pool(5)
    assert pooled.shape == (1, 3, 4)
    assert float(pooled[0, 1, 2]) == pytest.approx(float(a.relevance[0, :, 5:10, 10:15].sum()), abs=1e-6)
    assert float(pooled.sum()) == pytest.approx(float(a.relevance.sum()), abs=1e-5)
    assert float(pooled[0, 2, 3]) == pytest.approx(float(a.relevance[0, :, 10:, 15:].sum()), abs=1e-6)
    with pytest.raises(ValueError, match="pool size 0"):
        a.pool(0)
    with pytest.raises(ValueError, match="expected a batch of pictures"):
        linear().pool(2)
    with pytest.raises(KeyError, match="no input 'pixels'"):
        a.pool(2, "pixels")


def test_regions_are_named_by_the_original_pictures_pixels():
    a = image(28, 28).seen_as(input=Picture(b"", "image/png", 112, 90, (8.0, 0.0, 64.0, 84.0)))
    parts = a.parts()
    assert len(parts) == 14 * 14 and (parts[15].index, parts[15].label) == ((1, 1), "x 12–16, y 6–12")
    assert parts[15].relevance == pytest.approx(float(a.relevance[0, :, 2:4, 2:4].double().sum()), abs=1e-9)
    assert sum(p.relevance for p in parts) == pytest.approx(float(a.relevance.sum()), abs=1e-5)
    assert [p.relevance for p in image(28, 28).parts()] == [
        p.relevance for p in parts
    ]  # pixels are known without a picture


def test_heat_maps_add_up_channels():
    a = image()
    assert torch.allclose(a.heat_map(), a.relevance[0].sum(0))
    with pytest.raises(ValueError, match="expected pictures"):
        linear().heat_map()


def test_sums_over_patches_at_the_edge():
    assert pool(torch.ones(3, 5), 2).tolist() == [[4, 4, 2], [2, 2, 1]]


def test_media_must_fit():
    a = words()
    with pytest.raises(KeyError, match="no input 'pixels' was explained"):
        a.seen_as(pixels=Tokens.of(["a"]))
    with pytest.raises(ValueError, match="2 media for 1 rows"):
        a.seen_as(**{next(iter(a.relevances)): (Tokens.of(["a"]),) * 2})
    with pytest.raises(ValueError, match="3 pieces, but 1 kinds"):
        Tokens(("a", "b", "c"), ("",))


def test_other_inputs_are_one_part_each():
    a = words()
    both = dlrp.Attribution(
        {**a.relevances, "segments": torch.ones(1, 6)}, {}, a.prediction, 0, a.seed, None, a.preset, media=a.media
    )  # fmt: skip
    assert [(p.label, p.relevance) for p in both.parts()][-1] == ("segments", 6.0)


# Sinks ---------------------------------------------------------------------------------------------------------------


def test_special_tokens_and_a_heavy_first_token_stand_apart():
    tokens = Tokens(("Q", " a", "<s>"), (FIRST, "", SPECIAL))
    assert sinks(tokens, [9.0, 1.0, 0.5]) == [0, 2]
    assert sinks(tokens, [1.2, 1.0, 50.0]) == [2]
    assert sinks(Tokens.of(["a", "b"]), [100.0, 1.0]) == []  # not a causal model's first token: a word like others


def test_what_cannot_be_seen_is_made_visible():
    assert [readable(p) for p in (" oven", "\n", " ", "", "a\n")] == ["oven", "⏎", "␣", "·", "a⏎"]


# Other forms ---------------------------------------------------------------------------------------------------------


def test_pandas():
    pandas = pytest.importorskip("pandas")
    frame = words().to_pandas(words=True)
    assert isinstance(frame, pandas.DataFrame) and list(frame.columns) == [
        "input",
        "row",
        "index",
        "label",
        "relevance",
    ]
    assert frame.relevance.sum() == pytest.approx(float(words().relevance.sum()), abs=1e-5)
    both = dlrp.compare({"a": words(), "b": words()}).to_pandas()
    assert len(both) == 12 and set(both.compared) == {"a", "b"}


def test_dict_is_json():
    a = words()
    data = json.loads(json.dumps(a.to_dict()))
    assert [p["relevance"] for p in data["rows"][0]["parts"]] == pytest.approx(a.relevance[0].tolist())
    assert data["account"]["total"] == pytest.approx(float(a.score)) and data["preset"] == a.preset.name
    assert len(a.to_dict(k=2)["rows"][0]["parts"]) == 2


def test_repr_says_what_was_explained():
    assert repr(linear()).startswith("Attribution(input: (1, 5); target=1, score=")
    assert repr(dlrp.compare({"x": linear(), "y": linear()})) == "Comparison(x, y)"


def test_compare_takes_other_methods_tensors():
    a = linear()
    c = dlrp.compare({"LRP": a, "ones": torch.ones(1, 5)})
    assert torch.equal(c["ones"].relevance, torch.ones(1, 5)) and list(c) == ["LRP", "ones"] and len(c) == 2
    with pytest.raises(ValueError, match=r"'x' has shape \(5,\)"):
        dlrp.compare({"LRP": a, "x": torch.ones(5)})
    with pytest.raises(TypeError, match="at least one Attribution"):
        dlrp.compare({"x": torch.ones(5)})
    with pytest.raises(TypeError, match="'x': expected an Attribution or a tensor, got int"):
        dlrp.compare({"LRP": a, "x": 3})


# Files ---------------------------------------------------------------------------------------------------------------

pytest.importorskip("safetensors")


def full():
    """An attribution with everything a file must hold."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    preset = dlrp.preset("gamma", gamma=0.1) | {"0": dlrp.Epsilon(1e-4), "linear": dlrp.Gamma(0.3)}
    a = dlrp.explain(
        model, torch.randn(2, 4, dtype=torch.float32), target=[0, 1], preset=preset, layers=["1"], ledger=True
    )
    rows = tuple(Table(("a", "b", "c", "d"), ("1", "2", "3", "−4")) for _ in range(2))
    made = a.seen_as(input=rows)
    return dlrp.Attribution(
        **{**vars(made), "answers": (dlrp.Answer("x", 0.25), dlrp.Answer("y", None, "z")), "about": {"model": "M"}}
    )


def test_save_and_load_bit_for_bit(tmp_path):
    a = full()
    a.save(tmp_path / "a.safetensors")
    b = dlrp.load(tmp_path / "a.safetensors")
    assert list(b.relevances) == list(a.relevances) and list(b.layers) == ["1"]
    for x, y in (
        (a.relevance, b.relevance),
        (a.layers["1"], b.layers["1"]),
        (a.prediction, b.prediction),
        (a.seed, b.seed),
    ):
        assert x.dtype == y.dtype and torch.equal(x, y)
    assert b.target == [0, 1] and b.answers == a.answers and b.about == a.about
    assert b.preset == a.preset and str(b.preset) == str(a.preset)
    assert b.account == a.account and b.media["input"][1].cells == ("1", "2", "3", "−4")
    assert b.plan is None
    assert a.html() == b.html()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_are_kept(tmp_path, dtype):
    a = dlrp.compare({"a": linear(), "b": torch.ones(1, 5)})
    a["b"].relevances["input"] = torch.randn(1, 5).to(dtype)
    a.save(tmp_path / "c")
    b = dlrp.load(tmp_path / "c")
    assert b["b"].relevance.dtype == dtype and torch.equal(b["b"].relevance, a["b"].relevance)


def test_all_media_are_kept(tmp_path):
    a = image()
    shown = Picture(b"\x00\xffjpeg", "image/jpeg", 20, 12, (0.0, -1.5, 20.0, 13.25))
    a.seen_as(input=shown).save(tmp_path / "i")
    back = dlrp.load(tmp_path / "i").media["input"][0]
    assert vars(back) == vars(shown)
    sound = Sound(torch.randn(50), 16000, torch.randn(3, 7), 1, (0.0, 1.0))
    b = linear().seen_as(input=sound)
    b.save(tmp_path / "s")
    again = dlrp.load(tmp_path / "s").media["input"][0]
    assert torch.equal(again.samples, sound.samples) and torch.equal(again.features, sound.features)
    assert (again.rate, again.axis, again.span) == (16000, 1, (0.0, 1.0))


def test_large_sparse_seeds_are_kept_small_and_exact(tmp_path):
    a = words()
    seed = torch.zeros(1, 40, 5000)
    seed[0, -1, 17], seed[0, -1, 4] = 3.25, -1.5
    b = dlrp.Attribution(a.relevances, {}, a.prediction, 17, seed, None, a.preset)
    b.save(tmp_path / "b")
    assert (tmp_path / "b").stat().st_size < 20_000
    assert torch.equal(dlrp.load(tmp_path / "b").seed, seed)


def test_a_target_that_was_code_is_kept_by_name(tmp_path):
    a = dlrp.explain(nn.Linear(3, 2), torch.randn(1, 3), target=lambda out: out[:, 0])
    a.save(tmp_path / "f")
    assert "lambda" in dlrp.load(tmp_path / "f").target


def test_nothing_is_left_half_written(tmp_path, monkeypatch):
    target = tmp_path / "x.safetensors"
    target.write_bytes(b"before")
    import os

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        linear().save(target)
    assert target.read_bytes() == b"before" and list(tmp_path.iterdir()) == [target]


def test_files_are_readable_by_others_as_usual(tmp_path):
    import os

    write_whole(tmp_path / "w", b"x")
    (tmp_path / "p").write_bytes(b"x")
    assert os.stat(tmp_path / "w").st_mode == os.stat(tmp_path / "p").st_mode


def test_bad_files_are_refused(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(FileNotFoundError, match="no file"):
        dlrp.load(tmp_path / "none")
    (tmp_path / "text").write_text("hello there, this is no tensor")
    with pytest.raises(ValueError, match="not a safetensors file"):
        dlrp.load(tmp_path / "text")
    save_file({"x": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(ValueError, match="of something else"):
        dlrp.load(tmp_path / "other")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        linear().save(tmp_path / "no" / "where")
    linear().save(tmp_path / "good")
    raw = (tmp_path / "good").read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    for old, new, message in (
        ('\\"version\\": 1', '\\"version\\": 9', "newer dynamiclrp"),
        ('\\"class\\": \\"Attribution\\"', '\\"class\\": \\"subprocesses\\"', "does not know"),
    ):
        head = raw[8 : 8 + size].decode().replace(old, new)
        assert new in head
        encoded = head.encode()
        (tmp_path / "bad").write_bytes(struct.pack("<Q", len(encoded)) + encoded + raw[8 + size :])
        with pytest.raises(ValueError, match=message):
            dlrp.load(tmp_path / "bad")


def test_importing_the_package_imports_none_of_its_extras():
    code = (
        "import sys, dynamiclrp\n"
        "heavy = {'transformers', 'PIL', 'matplotlib', 'pandas', 'rich', 'safetensors', 'IPython'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert 'explain_text' in dir(dynamiclrp) and not hasattr(dynamiclrp, 'explain_poetry')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_account_adds_up():
    assert Account(10.0, 7.5, {"bias": 2.0}).residual == 0.5


@pytest.mark.parametrize(
    "module", ["attribution", "audio", "comparison", "image", "media", "parts", "table", "view.account"]
)
def test_examples_of(module):
    found = doctest.testmod(importlib.import_module(f"dynamiclrp.{module}"), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 0 and found.failed == 0

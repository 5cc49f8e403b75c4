"""Comparing methods: what is measured, kept, resumed, refused and shown."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dynamiclrp import evaluate as ev
from dynamiclrp.errors import EvaluationError, TrainingModeWarning


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 3)).double().eval()


X = torch.randn(12, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
METHODS = ["epsilon", "gradient", "random"]
ASK = {"measure": "logit", "fill": "zero", "explain_batch_size": 4}


def numbers(found: ev.Comparison) -> list[list]:
    """What must not depend on batches, stores or the machine's mood (but for rounding)."""
    keys = ("morf", "lerf", "score", "relevance")
    rounded = [
        [torch.tensor(r[k], dtype=torch.float64).add(0.0).round(decimals=9).tolist() for k in keys]
        for r in found.records
    ]
    return [[r["input"], r["method"], r["target"], *values] for r, values in zip(found.records, rounded)]


def test_compare_is_explain_and_perturb():
    model = net()
    found = ev.compare(model, X, METHODS, **ASK)
    targets = model(X).argmax(1)
    for method in ("epsilon", "gradient"):
        relevance = ev.relevance_of(method, model, X, targets)
        slow = ev.perturb(model, X, relevance, targets, measure="logit", fill="zero", batch_size=1)
        for a, b in zip(found.curves(method).morf + found.curves(method).lerf, slow.morf + slow.lerf):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    assert [r["target"] for r in found.of("epsilon").values()] == targets.tolist()
    sums = torch.tensor([r["relevance"] for r in found.of("epsilon").values()], dtype=torch.float64)
    torch.testing.assert_close(sums, ev.relevance_of("epsilon", model, X, targets).sum(1))


def test_chance_is_zero_as_often_as_its_interval_says():
    chances = {f"chance {seed}": ev.Random(seed) for seed in range(20)}
    found = ev.compare(net(), torch.randn(60, 10, dtype=torch.float64), chances, measure="logit", batch_size=600)
    assert sum(0 in found.interval(name) for name in chances) >= 16  # 19 expected


def test_exact_contributions_are_best():
    """On a linear model gradient x input is the exact contribution: nothing ranks better."""
    torch.manual_seed(0)
    model = nn.Linear(16, 1, bias=False).double()
    x = torch.randn(150, 16, dtype=torch.float64)
    noisy = lambda m, x, t: x * m.weight[0] + 2 * torch.randn_like(x)  # noqa: E731
    found = ev.compare(model, x, {"exact": "gradient", "noisy": noisy, "random": "random"}, [0] * 150, **ASK)
    assert [row["method"] for row in found.rows] == ["exact", "noisy", "random"]
    assert 0 not in found.interval("noisy")
    assert (found.metric("exact") >= found.metric("noisy") - 1e-12).all()
    assert 0 not in found.difference("exact", "noisy") and found.difference("exact", "noisy").mean > 0
    # closed form: with contributions sorted, MoRF after k is the sum of the rest, so the gap is known
    c = (x * model.weight[0].detach()).sort(1, descending=True).values
    morf = torch.cat([torch.zeros(150, 1, dtype=torch.float64), c.cumsum(1)], 1)
    lerf = torch.cat([torch.zeros(150, 1, dtype=torch.float64), c.flip(1).cumsum(1)], 1)
    gap = (morf - lerf)[:, 1:-1].sum(1) / 16
    torch.testing.assert_close(found.metric("exact"), gap)


@pytest.mark.parametrize(
    "data",
    [
        (X, None),
        [X[:5], X[5:6], X[6:]],
        TensorDataset(X, torch.zeros(12, dtype=torch.long)),
        DataLoader(TensorDataset(X, torch.zeros(12, dtype=torch.long)), batch_size=5),
        [(X[:7], [0] * 7), (X[7:], torch.zeros(5, dtype=torch.long))],
        {"input": X},
    ],
    ids=["pair", "batches", "dataset", "loader", "pairs", "mapping"],
)
def test_data_comes_in_many_forms(data):
    labelled = not isinstance(data, (tuple, dict)) and not isinstance(
        data[0] if isinstance(data, list) else None, torch.Tensor
    )
    model = net()
    expected = ev.compare(model, X, METHODS, [0] * 12 if labelled else None, **ASK)
    found = ev.compare(model, data, METHODS, **ASK)
    assert len(found.of("epsilon")) == 12
    for method in METHODS:
        torch.testing.assert_close(found.metric(method), expected.metric(method), rtol=0, atol=1e-10)
    assert len(ev.compare(model, data, ["epsilon"], limit=6, **ASK).records) == 6


def test_functions_can_be_judged_too():
    """A model that is no Module: curves need only a call."""
    weights = torch.randn(10, 3, dtype=torch.float64)
    mine = lambda f, x, t: x * weights.T[t]  # noqa: E731
    found = ev.compare(lambda x: x @ weights, X, {"mine": mine, "random": "random"}, **ASK)
    assert found.rows[0]["method"] == "mine" and found.rows[0]["time_ratio"] is None


# -------------------------------------------------------------------------------------------------------------- resuming


def counting(calls: list[int]):
    def method(model, x, t):
        calls.append(len(x))
        return x * 1.0

    return method


def test_a_second_run_does_only_what_is_missing(tmp_path):
    store, calls = tmp_path / "deep" / "run.jsonl", []
    ask = ASK | {"store": store}
    first = ev.compare(net(), X, {"mine": counting(calls)}, limit=6, **ask)
    assert calls == [4, 2]
    whole = ev.compare(net(), X, {"mine": counting(calls)}, **ask)
    assert calls == [4, 2, 2, 4]  # rows 6 and 7 of the second batch, then the third
    assert numbers(whole)[:6] == numbers(first)
    assert numbers(whole) == numbers(ev.compare(net(), X, {"mine": counting([])}, **ASK))
    again = ev.compare(net(), X, {"mine": counting(calls)}, **ask)
    assert len(calls) == 4 and numbers(again) == numbers(whole)
    more = ev.compare(net(), X, {"mine": counting(calls), "random": "random"}, **ask)  # another method joins
    assert len(calls) == 4 and len(more.of("random")) == 12
    assert len(ev.compare(net(), X, {"mine": counting(calls)}, limit=3, **ask).records) == 3


KILLED = """
import os, signal, sys, torch
sys.path.insert(0, {tests!r})
import test_evaluate_compare as t
from dynamiclrp import evaluate as ev
seen = []
def method(model, x, targets):
    seen.append(1)
    if len(seen) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return x * 1.0
ev.compare(t.net(), t.X, {{"mine": method}}, store={store!r}, **t.ASK)
"""


@pytest.mark.skipif(not hasattr(os, "kill") or sys.platform == "win32", reason="needs POSIX signals")
def test_a_killed_run_loses_one_batch_at_most(tmp_path):
    store = tmp_path / "run.jsonl"
    code = KILLED.format(tests=str(Path(__file__).parent), store=str(store))
    source = str(Path(ev.__file__).parents[2])
    died = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": source}, capture_output=True)
    assert died.returncode == -9, died.stderr.decode()
    assert len(store.read_text().splitlines()) == 1 + 8  # two batches of four are safe
    with open(store, "a") as file:
        file.write('{"input": 8, "meth')  # and what a kill in the middle of a write leaves
    calls: list[int] = []
    found = ev.compare(net(), X, {"mine": counting(calls)}, store=store, **ASK)
    assert calls == [4]
    assert numbers(found) == numbers(ev.compare(net(), X, {"mine": counting([])}, **ASK))
    assert all(json.loads(line) for line in store.read_text().splitlines())


def test_a_changed_setup_is_refused(tmp_path):
    store = tmp_path / "run.jsonl"
    ask = ASK | {"store": store}
    ev.compare(net(), X, METHODS, **ask)
    before = store.read_bytes()
    for change, message in (
        ({"measure": "probability"}, "measure was 'logit', now 'probability'"),
        ({"fill": "mean"}, r"fill was 'Zero\(\)', now 'Mean\(\)'"),
        ({"step": 2}, "step was None, now 2"),
        ({"seed": 1}, "seed was 0, now 1"),
    ):
        with pytest.raises(EvaluationError, match=message):
            ev.compare(net(), X, METHODS, **(ask | change))
    with pytest.raises(EvaluationError, match="model was 'Sequential"):
        ev.compare(net(seed=1), X, METHODS, **ask)
    with pytest.raises(EvaluationError, match="another input there now"):
        ev.compare(net(), X.flip(0), METHODS, **ask)
    with pytest.raises(EvaluationError, match="another method under the name 'epsilon'"):
        ev.compare(net(), X, {"epsilon": "gamma"}, **ask)
    assert store.read_bytes() == before
    other = tmp_path / "notes.txt"
    other.write_text("my notes\n")
    with pytest.raises(EvaluationError, match="not a store of results"):
        ev.compare(net(), X, METHODS, **(ask | {"store": other}))
    assert other.read_text() == "my notes\n"


@pytest.mark.skipif(sys.platform == "win32", reason="no locks there")
def test_one_run_at_a_time(tmp_path):
    store = tmp_path / "run.jsonl"

    def inner(model, x, t):
        with pytest.raises(EvaluationError, match="in use by another run"):
            ev.compare(net(), X, ["random"], store=store, **ASK)
        return x

    ev.compare(net(), X, {"outer": inner}, limit=2, store=store, on_error="raise", **ASK)


# --------------------------------------------------------------------------------------------------------------- failing


def test_a_failing_method_is_reported_beside_the_others():
    """One bad input costs no others of its batch."""

    def sometimes(model, x, t):
        if (x == X[5]).all(1).any():
            raise ValueError("too hard\nand a long story")
        return x

    def never(model, x, t):
        return x * torch.nan

    methods = {"epsilon": "epsilon", "sometimes": sometimes, "never": never}
    found = ev.compare(net(), X, methods, **ASK)
    assert [len(found.of(m)) for m in methods] == [12, 11, 0]
    assert set(range(12)) - set(found.of("sometimes")) == {5}
    assert found.errors("sometimes") == ["ValueError: too hard"]
    assert "sometimes failed on 1: ValueError: too hard" in str(found) and "nan or inf" in str(found)
    assert found.rows[-1]["method"] == "never" and found.rows[-1]["failed"] == 12
    assert found.difference("epsilon", "sometimes").n == 11
    alone = ev.compare(net(), X, {"x": lambda model, x, t: x}, **ASK)
    torch.testing.assert_close(found.metric("sometimes"), alone.metric("x")[torch.arange(12) != 5])
    with pytest.raises(ValueError, match="too hard"):
        ev.compare(net(), X, {"sometimes": sometimes}, on_error="raise", **ASK)
    with pytest.raises(EvaluationError, match="every method failed on every input"):
        ev.compare(net(), X, {"never": never}, **ASK)


def test_failed_inputs_are_tried_again(tmp_path):
    broken = [True]

    def method(model, x, t):
        if broken[0]:
            raise ValueError("not yet")
        return x

    ask = ASK | {"store": tmp_path / "s.jsonl"}
    assert len(ev.compare(net(), X, {"epsilon": "epsilon", "mine": method}, **ask).errors("mine")) == 12
    broken[0] = False
    found = ev.compare(net(), X, {"epsilon": "epsilon", "mine": method}, **ask)
    assert len(found.of("mine")) == 12 and not found.errors("mine")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ["epsilon", "epsilon"]}, "named twice: epsilon"),
        ({"methods": []}, "methods is empty"),
        ({"unit": "word"}, "unit='word'"),
        ({"unit": "pixel"}, "pixels need images"),
        ({"fill": "noise"}, "fill='noise'"),
        ({"fill": "blur"}, "blur needs float images"),
        ({"fill": "mask"}, "not token ids"),
        ({"measure": "loss"}, "measure='loss'"),
        ({"measure": lambda out, t: out}, r"the measure returned \(.*, 3\)"),
        ({"step": 0}, "step=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"limit": 0}, "limit=0"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
        ({"targets": [3] * 12}, "the output has 3 choices"),
        ({"targets": [0] * 5}, "5 targets for 12 inputs"),
        ({"data": "photos"}, "data of type str"),
        ({"data": []}, "the data is empty"),
        ({"data": X[0]}, "expected a batch"),
        ({"data": {"labels": [1, 2]}}, "no float tensor and no input_ids"),
        ({"data": [(X, [0] * 12, "id")]}, "3 things at a time"),
    ],
)
def test_bad_asks_are_refused(change, message):
    ask = {"model": net(), "data": X, "methods": METHODS, "fill": "zero"} | change
    with pytest.raises(EvaluationError, match=message):
        ev.compare(**ask)


def test_training_mode_is_warned_about():
    model = nn.Sequential(nn.Linear(10, 4), nn.Dropout(0.5)).double()
    with pytest.warns(TrainingModeWarning, match="every score of a curve"):
        ev.compare(model, X, ["random"])


# --------------------------------------------------------------------------------------------------------------- showing


def test_a_comparison_can_be_kept_and_shown(tmp_path):
    pandas = pytest.importorskip("pandas")
    found = ev.compare(net(), X, METHODS, **ASK)
    found.save(tmp_path / "c.json")
    again = ev.Comparison.load(tmp_path / "c.json")
    assert again.rows == found.rows and str(again) == str(found)
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]
    table = found.to_pandas()
    assert isinstance(table, pandas.DataFrame) and table.loc["epsilon", "abpc"] == pytest.approx(
        found.interval("epsilon").mean
    )
    lines = str(found).splitlines()
    assert "means over the curve" in lines[0] and "logit" in lines[0]
    assert [line.split()[0] for line in lines[3:]] == [row["method"] for row in found.rows]
    with pytest.raises(EvaluationError, match="not a saved Comparison"):
        (tmp_path / "x.json").write_text("[]")
        ev.Comparison.load(tmp_path / "x.json")
    with pytest.raises(EvaluationError, match=r"no method 'gamma' here\. Known: epsilon"):
        found.metric("gamma")


def test_rows_say_what_they_are():
    row = ev.compare(net(), X, METHODS, **ASK).rows[0]
    assert row["abpc_paper"] == pytest.approx(4 * row["abpc"])
    assert row["abpc_low"] <= row["abpc"] <= row["abpc_high"]
    assert row["abpc"] == pytest.approx(row["comprehensiveness"] - row["sufficiency"])
    assert row["seconds"] > 0 and row["time_ratio"] > 0


def test_rows_resample_as_single_intervals_do():
    """Rows are made for all methods at once; that changes nothing, also where methods finished different inputs."""

    def sometimes(model, x, t):
        return x if (x != X[3]).any(1).all() else x * torch.nan

    found = ev.compare(net(), X, {"epsilon": "epsilon", "sometimes": sometimes, "random": "random"}, **ASK)
    assert {row["method"]: row["n"] for row in found.rows} == {"epsilon": 12, "sometimes": 11, "random": 12}
    for row in found.rows:
        for name in ev.METRICS:
            one = found.interval(row["method"], name)
            assert [row[name], row[f"{name}_low"], row[f"{name}_high"]] == pytest.approx([one.mean, one.low, one.high])
    for row in found.rows[1:]:
        one = found.difference(found.rows[0]["method"], row["method"])
        assert [row["behind"], row["behind_low"], row["behind_high"]] == pytest.approx([one.mean, one.low, one.high])


def test_the_plot_has_every_method(tmp_path):
    found = ev.compare(net(), X, METHODS, **ASK)
    figure = found.plot(tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="not supported"):
        found.plot(tmp_path / "c.docx")
    assert [p.name for p in tmp_path.iterdir()] == ["c.png"]
    morf, lerf, bars = figure.axes
    assert len(morf.lines) == len(lerf.lines) == 3
    _, mean, _ = found.curves(found.rows[0]["method"]).mean()
    assert morf.lines[0].get_ydata() == pytest.approx(mean.tolist())
    assert [t.get_text() for t in bars.get_yticklabels()] == [row["method"] for row in found.rows]


def test_a_notebook_shows_the_same_table():
    found = ev.compare(net(), X, {"<b>": "epsilon", "random": "random"}, **ASK)
    text = found._repr_html_()
    assert text.count("<tr>") == 3 and "&lt;b&gt;" in text and "<b>" not in text


def test_progress_is_shown_where_asked(capfd):
    ev.compare(net(), X, ["random"], progress=True, **ASK)
    assert "12/12" in capfd.readouterr().err
    ev.compare(net(), X, ["random"], **ASK)  # not a terminal: nothing
    assert capfd.readouterr().err == ""


def test_a_missing_package_says_how_to_get_it(monkeypatch):
    found = ev.compare(net(), X, ["random"], **ASK)
    for module in ("pandas", "matplotlib.figure", "rich.progress", "captum.attr", "zennit.core"):
        monkeypatch.setitem(sys.modules, module, None)
    for call, package in (
        (found.to_pandas, "pandas"),
        (found.plot, "matplotlib"),
        (lambda: ev.compare(net(), X, ["random"], progress=True, **ASK), "rich"),
        (lambda: ev.Captum("Saliency"), "captum"),
        (lambda: ev.Zennit("EpsilonPlus"), "zennit"),
    ):
        with pytest.raises(EvaluationError, match=f"pip install {package}"):
            call()


def test_plots_tell_many_methods_apart_and_survive_little_data(tmp_path):
    found = ev.compare(net(), X, {f"chance {i}": ev.Random(i) for i in range(12)}, **ASK)
    lines = found.plot().axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 12
    flat = ev.compare(lambda x: x.sum(1) * 0 + 1, X[:1], ["random"], fill="zero", measure="logit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flat.plot(tmp_path / "flat.svg")  # one input, a model that does not care
    assert flat.rows[0]["abpc"] == 0


def test_rich_shows_the_same_table():
    rich = pytest.importorskip("rich.console")
    found = ev.compare(net(), X, METHODS, **ASK)
    console = rich.Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(found)
    text = console.export_text()
    assert all(method in text for method in METHODS) and f"{found.rows[0]['abpc']:.2f}" in text

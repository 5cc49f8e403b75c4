"""The harness of bench/: what counts on a machine that others use too."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

# isort: off
import oracles  # noqa: F401  mends torchvision before transformers imports it

# isort: on
import dynamiclrp as dlrp


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "bench"))
    for name in ("host", "methods", "models", "speed"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import host
    import speed

    yield host, speed
    for name in ("host", "methods", "models", "speed"):
        sys.modules.pop(name, None)


def test_calls_beside_a_busy_core_do_not_count(bench):
    host, _ = bench
    machine = host.Host()
    machine.fastest = 1.0
    calm, busy = host.Timed(10.0, 1.1), host.Timed(30.0, 1.8)
    assert machine.calm([calm, busy, calm, busy, calm]) == [10.0, 10.0, 10.0]
    assert machine.calm([calm, busy, calm]) == []  # too few to say anything


@pytest.mark.parametrize("fastest", [1e9, 0.0], ids=["calm", "busy"])
def test_the_ratio_is_that_of_calls_in_turns(bench, fastest, monkeypatch):
    host, speed = bench
    monkeypatch.setattr(host.Host, "_loop", lambda self: 1.0)
    machine = host.Host()
    machine.fastest = fastest

    def call(seconds: float) -> object:
        time.sleep(seconds)
        return torch.zeros(100)  # memory is measured too

    calls = {speed.FLOOR: lambda: call(0.01), "thrice": lambda: call(0.03)}
    rows = speed.rows_for(calls, 1, repeats=3, patience=5, host=machine)
    assert rows["thrice"]["ratio"] == pytest.approx(3, rel=0.3)
    assert rows["thrice"]["calls"] == 9
    assert rows["thrice"]["calm"] == (9 if fastest else 0)
    assert rows[speed.FLOOR]["ratio"] == 1


def test_it_moves_to_cores_that_nobody_slows_down(bench, monkeypatch):
    host, _ = bench
    machine, moved = host.Host(), []
    machine._cores, machine.fastest = set(range(8)), 1.0
    monkeypatch.setattr(host.os, "sched_setaffinity", lambda task, cores: moved.append(set(cores)), raising=False)
    monkeypatch.setattr(host.Host, "_loop", lambda self: 1.0 if moved[-1] <= {1, 3, 5, 6} else 1.8)
    assert machine.settle()
    assert moved[-1] == {1, 3, 5, 6}
    assert not machine.settle()  # again only after a while


def test_rows_that_are_run_alone_join_the_others(bench, monkeypatch, tmp_path):
    _, speed = bench
    path = tmp_path / "speed.json"

    def run(*options: str) -> dict[str, dict[str, float]]:
        monkeypatch.setattr(sys, "argv", ["speed.py", "--batches", "1", "--json", str(path), *options])
        speed.main()
        (made,) = json.loads(path.read_text())["models"].values()
        return made["rows"]

    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(8, 4)).eval().requires_grad_(False)
    monkeypatch.setattr(speed, "build", lambda *what: (net, {"input": torch.randn(1, 8)}))
    short = ("--models", "Mamba-130m, 64 tokens", "--repeats", "1", "--patience", "0")
    whole = run(*short)
    assert list(whole) == ["forward", speed.FLOOR, "attnlrp"]
    again = run(*short, "--only", "attnlrp")
    assert list(again) == list(whole)
    assert again["attnlrp"]["earlier"] == [whole["attnlrp"]["ratio"]]
    with pytest.raises(SystemExit, match="no such row here; it has forward, gradient x input, attnlrp"):
        run(*short, "--only", "atnlrp")
    assert json.loads(path.read_text())["models"]["Mamba-130m, 64 tokens, batch 1"]["rows"] == again
    assert [again[label] for label in ("forward", speed.FLOOR)] == [whole[label] for label in ("forward", speed.FLOOR)]


@pytest.fixture
def zoo(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "bench"))
    import zoo

    yield zoo
    sys.modules.pop("zoo", None)


def test_the_zoo_on_a_device_is_compared_with_the_cpu(zoo):
    built = []
    found = zoo.examine("transformers", "gpt2", lambda: built.append(True), device="cpu")
    assert built
    assert (found["default"], found["dynamic"]) == ("same", "same")
    assert found["default, bf16"].startswith("ranks 0.99")


def test_another_relevance_there_is_a_fault(zoo, monkeypatch):
    """Also in float64, so it is no rounding."""
    there = zoo.back

    def twice(attribution):
        found = there(attribution)
        return dlrp.Attribution(**{**vars(found), "relevances": {k: 2 * v for k, v in found.relevances.items()}})

    monkeypatch.setattr(zoo, "back", twice)
    found = zoo.examine("transformers", "gpt2", lambda: None, device="cpu")
    assert found["default"] == "fault: differs by 1e+00 in float64"


def test_what_a_library_cannot_build_says_so(zoo):
    (why,) = zoo.examine("transformers", "timm_backbone", lambda: None, device="cpu").values()
    assert why.startswith("NotBuilt")

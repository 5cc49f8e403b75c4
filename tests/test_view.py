"""Pages, terminal and figures: the values in them are the relevance, and pages need nothing but themselves."""

import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp
import shown
from dynamiclrp.view.account import Sums, account_line, number, percent, sums_table
from dynamiclrp.view.colours import PALETTES
from dynamiclrp.view.data import from_integers, integers, page_data
from dynamiclrp.view.terminal import plain

pytest.importorskip("PIL")


class Reader(HTMLParser):
    """Text, attributes and balance of tags."""

    void = frozenset({"meta", "img", "input", "br", "link"})

    def __init__(self, page):
        super().__init__()
        self.open, self.words, self.found = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, text):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(text)


# Numbers and accounts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (11.677, "11.7"), (-0.5, "−0.500"), (1234.4, "1,234"), (1.5e-7, "1.5e−07"), (float("inf"), "inf")],
)
def test_numbers_have_three_digits_and_a_true_minus(value, text):
    assert number(value) == text


def test_percent_never_rounds_a_small_chance_to_nothing():
    assert [percent(0.95), percent(0.009), percent(1e-6)] == ["95 %", "0.9 %", "<0.1 %"]


def rows_of(table):
    cells = re.findall(
        r'<th scope="row">(.*?)</th>.*?class="bar[^"]*" style="left:([\d.]+)%;width:([\d.]+)%".*?<td class="value">(.*?)</td>',
        table,
    )
    return [
        (label, float(left), float(width), float(value.replace("−", "-").replace(",", "")))
        for label, left, width, value in cells
    ]


def test_the_account_is_a_waterfall_that_adds_up():
    rows = rows_of(
        sums_table(Sums(10.0, 7.5, {"bias": 3.5, "rounding": 1e-9}, {"reached segments": -1.0}), "reached", "score")
    )
    assert [row[0] for row in rows] == ["reached", "reached segments", "kept by bias", "score"]
    assert sum(row[3] for row in rows[:-1]) == pytest.approx(rows[-1][3]) == pytest.approx(10)
    ends = [(left, left + width) for _, left, width, _ in rows]
    assert ends[0][1] == pytest.approx(ends[1][1], abs=0.02)  # the negative line ends where the first did
    assert ends[2][1] == pytest.approx(ends[3][1], abs=0.02)  # the last line ends at the score


def test_what_no_line_explains_has_a_line():
    assert Sums(10.0, 7.5, {"bias": 2.0}).rest == 0.5
    assert [row[0] for row in rows_of(sums_table(Sums(10.0, 7.5), "reached", "score"))][1] == "kept on the way"
    assert [row[0] for row in rows_of(sums_table(Sums(10.0, 7.5, {"bias": 2.0}), "reached", "score"))][
        2
    ] == "unaccounted"


def test_account_in_one_line():
    a = dlrp.explain(nn.Linear(3, 2), torch.ones(1, 3), ledger=True)
    assert "kept by bias" in account_line(a.account) and "rounding" not in account_line(a.account)


# Pages ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(shown.everything()))
def test_pages_are_whole_and_need_nothing_else(name):
    page = shown.everything()[name].html()
    reader = Reader(page)
    assert reader.open == ["html", "body"] or not reader.open or reader.open == ["html"]
    fetched = [a.get("src") or a.get("href") for _, a in reader.found if a.get("src") or a.get("href")]
    assert all(address.startswith("data:") for address in fetched)
    style = page[: page.index("<body>")]
    assert "url(" not in style and "@import" not in style and "http" not in page.replace("http://www.w3.org", "")
    assert "fetch(" not in page and "XMLHttpRequest" not in page and "import(" not in page
    assert '<meta charset="utf-8">' in page and "viewport" in page
    for palette in PALETTES:
        assert f'[data-palette="{palette}"]' in page


def test_tokens_in_the_page_are_the_relevance():
    a = shown.text(rows=2)
    data = shown.data(a.html())
    assert len(data["panels"]) == 2
    for row, panel in enumerate(data["panels"]):
        (tokens,) = panel["inputs"]
        assert tokens["values"] == a.relevance[row].tolist() and tokens["pieces"] == list(shown.TEXT)
        assert panel["score"] == pytest.approx(float(a.score[row])) and tokens["words"] == [0, 1, 2, 3, 4, 6, 7]
        assert panel["delivered"] == pytest.approx(float(a.relevance[row].sum()), abs=1e-5)


def test_text_of_the_user_cannot_break_the_page():
    a = shown.text(answer="</script><b>x", contrast="<i>&")
    page = a.html(title="</title><script>alert(1)</script>")
    assert "</script><b>" not in page and "<script>alert" not in page
    assert shown.data(page)["panels"][0]["inputs"][0]["pieces"][6] == "<script>&"
    assert "&lt;b&gt;" in shown.text(answer="<b>").html()


def test_pictures_in_the_page_are_the_relevance():
    data = shown.data(shown.pictures().html())
    assert [p["label"] for p in data["panels"]] == ["mine", "other"] and len(data["pictures"]) == 1
    heat = shown.picture().heat_map(original=False).double()
    for panel, factor in zip(data["panels"], (1, -2)):
        (image,) = panel["inputs"]
        found = from_integers(image["map"])
        assert torch.allclose(found, factor * heat, atol=float(2 * heat.abs().max()) / 32767)
        assert image["seen"] == [10, 5, 90, 55] and (image["width"], image["height"]) == (100, 60)


def test_matrices_in_the_page_are_the_relevance():
    g = shown.generation()
    data = shown.data(g.html())["generation"]
    found = from_integers(data["matrix"])
    largest = g.matrix.abs().amax(1, keepdim=True)
    assert bool(((found - g.matrix).abs() <= (g.matrix.abs() * largest).sqrt() / 32767 + largest / 1e9).all())
    assert data["start"] == g.start and data["generated"] == list(g.generated) and data["scores"] == g.scores.tolist()


def test_sounds_and_tables_in_the_page_are_the_relevance():
    for features in (False, True):
        a = shown.sound(features)
        (panel,) = shown.data(a.html())["panels"]
        (sound,) = panel["inputs"]
        assert sum(sound["values"]) == pytest.approx(float(a.relevance.sum()), abs=1e-4)
        assert sound["span"] == ([0, 0.6] if features else [0, 0.5]) and sound["audio"].startswith("data:audio/wav")
        if features:
            assert torch.allclose(
                from_integers(sound["map"]).float(), a.relevance[0], atol=float(a.relevance.abs().max()) / 3e4
            )
            assert len(sound["values"]) == 40
    a = shown.table()
    (table,) = shown.data(a.html())["panels"][0]["inputs"]
    assert table["values"] == a.relevance[0].tolist() and table["columns"][3] == "column 3"


def test_large_tensors_show_their_largest_and_the_sum_of_the_rest():
    a = shown.everything()["tensor"]
    (table,) = shown.data(a.html())["panels"][0]["inputs"]
    assert len(table["values"]) == 60
    assert sum(table["values"]) + table["rest"] == pytest.approx(float(a.relevance.sum()), abs=1e-5)
    first = tuple(int(i) for i in table["columns"][0].strip("[]").split(","))
    assert float(a.relevance[0][first]) == pytest.approx(table["values"][0])


def test_several_modalities_share_a_page():
    (panel,) = shown.data(shown.both().html())["panels"]
    assert [i["kind"] for i in panel["inputs"]] == ["tokens", "image"]


def test_inputs_without_a_picture_are_in_the_account():
    a = shown.text()
    extra = dlrp.Attribution(**{**vars(a), "relevances": {**a.relevances, "segments": torch.full((1, 8), 0.5)}})
    page = extra.html()
    panel = shown.data(page)["panels"][0]
    assert panel["aside"] == {"segments": 4.0} and len(panel["inputs"]) == 1 and "reached segments" in page


def test_sixteen_bits_are_exact_enough():
    values = torch.randn(7, 9, dtype=torch.float64)
    values[3] = 0
    values[:, 0] *= 1000
    for by_row in (False, True):
        largest = values.abs().amax(1, keepdim=True) if by_row else values.abs().max()
        error = (from_integers(integers(values, by_row)) - values).abs()
        assert bool((error <= (values.abs() * largest).sqrt() / 32767 + largest / 1e9).all())
    with pytest.raises(ValueError, match="not finite"):
        integers(torch.tensor([[float("nan")]]))


def test_headings_ask_the_question():
    def heading(result, **options):
        return re.search(r"<h1>(.*?)</h1>", result.html(**options)).group(1)

    assert heading(shown.text()) == "Why <q>drawer</q>?"
    assert heading(shown.text(contrast="oven")) == "Why <q>drawer</q> rather than <q>oven</q>?"
    assert heading(shown.text(answer="“Bob” is PER")) == "Why “Bob” is PER?"
    assert heading(shown.generation()) == "What each token stands on"
    assert heading(shown.text(), title="Mine & yours") == "Mine &amp; yours"


def test_pages_are_written_whole(tmp_path):
    page = shown.text().html(tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text("utf-8") == page and [p.name for p in tmp_path.iterdir()] == ["a.html"]
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        shown.text().html(tmp_path / "no" / "a.html")
    with pytest.raises(ValueError, match="palette 'rainbow': expected one of red-blue, orange-blue, purple-green"):
        shown.text().html(palette="rainbow")
    assert '<html lang="en" data-palette="orange-blue">' in shown.text().html(palette="orange-blue")


def test_long_generations_stay_small():
    page = shown.generation(rows=500, start=2000).html()
    assert len(page) < 4_000_000  # 500 x 2,499 numbers, their words, style and script
    assert page.count("<span") < 100  # the script draws, no node per cell


def test_pages_and_files_need_no_numpy(tmp_path):
    code = """
import sys
sys.modules["numpy"] = None
import torch, warnings
import dynamiclrp as dlrp
from dynamiclrp.media import Picture
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
a = dlrp.explain(model, torch.randn(1, 3, 4, 4), target=0).seen_as(input=Picture(b"abc", "image/png", 4, 4, (0.0, 0.0, 4.0, 4.0)))
a.html(sys.argv[1] + "/a.html")
print(a.top(2))
"""
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert (tmp_path / "a.html").stat().st_size > 10_000


def test_notebooks_get_a_frame_of_their_own():
    inside = shown.text()._repr_html_()
    assert inside.startswith("<iframe srcdoc=") and "&lt;!doctype html&gt;" in inside and inside.count("<") == 2


def test_no_page_of_anything_else():
    with pytest.raises(TypeError, match="expected an Attribution, Comparison or Generation"):
        page_data(3)


# Terminal ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(shown.everything()))
def test_terminal(name, capsys, monkeypatch):
    console = pytest.importorskip("rich.console")
    result = shown.everything()[name]
    printed = console.Console(width=100, force_terminal=True, color_system="truecolor")
    with printed.capture() as captured:
        printed.print(result)
    assert captured.get().strip()
    result.show()
    assert capsys.readouterr().out.strip()
    assert all(isinstance(line, str) for line in plain(result))


def test_terminal_tells_what_stands_apart():
    console = pytest.importorskip("rich.console").Console(width=200)
    with console.capture() as captured:
        console.print(shown.text())
    a = shown.text()
    share = float(a.relevance[0, [0, 7]].abs().sum() / a.relevance.abs().sum())
    assert f"set apart: [CLS], [SEP] hold {percent(share)} of all relevance" in captured.get()


def test_terminal_paints_pictures():
    from dynamiclrp.view.terminal import painted

    a = shown.picture(seen=(0.0, 0.0, 100.0, 60.0))
    heat = torch.zeros(60, 100)
    heat[:4, :4], heat[-4:, -4:] = 1.0, -1.0
    lines = painted(a.media["input"][0], heat).split("\n")
    assert len(lines) in (15, 16) and len(lines[0].plain) == 50
    first, last = lines[0], lines[14]
    assert first.plain[0] == last.plain[-1] == "▀"
    red, blue = (spans[place].style for spans, place in ((lines[0].spans, 0), (lines[14].spans, -1)))
    assert "240,76,64" in red and "84,142,255" in blue


def test_terminal_without_rich(monkeypatch, capsys):
    import sys

    monkeypatch.setitem(sys.modules, "rich.console", None)
    shown.text().show()
    assert "reached the inputs" in capsys.readouterr().out


# Figures -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pyplot(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


@pytest.mark.parametrize("name", list(shown.everything()))
def test_figures(name, pyplot):
    figure = shown.everything()[name].plot(palette="purple-green")
    assert figure.axes
    figure.canvas.draw()


def test_bars_are_the_relevance(pyplot):
    a = shown.table(8)
    (axis,) = a.plot().axes
    drawn = {t.get_text(): p.get_width() for t, p in zip(axis.get_yticklabels(), axis.patches)}
    assert drawn == pytest.approx(
        {p.label if len(p.label) < 28 else p.label[:27] + "…": p.relevance for p in a.parts()}
    )


def test_figures_tell_their_sums(pyplot):
    a = shown.picture()
    (axis,) = a.plot().axes
    assert axis.get_xlabel().replace("\n", " ") == account_line(a.account)


def test_own_axes_take_one_input(pyplot):
    _, axes = pyplot.subplots(1, 2)
    assert shown.picture().plot(ax=axes[0], patch=4) is axes[0].figure
    with pytest.raises(ValueError, match="draws one input, this result has 2"):
        shown.both().plot(ax=axes[1])


def test_packages_of_extras_are_named(monkeypatch):
    import sys

    for package, call in (
        ("matplotlib", lambda a: a.plot()),
        ("pandas", lambda a: a.to_pandas()),
        ("safetensors.torch", lambda a: a.save("/nowhere/x")),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(ModuleNotFoundError, match="pip install"):
                call(shown.text())

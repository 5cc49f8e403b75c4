"""The page: values in, text out. Its pieces are checked one by one, then a whole page is read back."""

import base64
import io
import math
import re
from html.parser import HTMLParser

import pytest
import torch

from dynamiclrp.view.page import (
    NEGATIVE,
    POSITIVE,
    Answer,
    Candidate,
    Machine,
    Picture,
    Sums,
    heat_map,
    heat_pixels,
    number,
    page,
    percent,
    png,
    scale_of,
    sums_table,
    token_line,
)

Image = pytest.importorskip("PIL.Image")


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

    def every(self, tag: str, name: str | None = None) -> list[dict[str, str | None]]:
        return [a for t, a in self.found if t == tag and (name is None or name in (a.get("class") or "").split())]


def decode(uri: str) -> "torch.Tensor":
    head, body = uri.split(",", 1)
    assert head == "data:image/png;base64"
    image = Image.open(io.BytesIO(base64.b64decode(body)))
    image.load()
    channels = len(image.getbands())
    return torch.tensor(list(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, channels)


# ---------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (11.677, "11.7"), (-0.5, "−0.500"), (1234.4, "1,234"), (1.5e-7, "1.5e−07"), (math.inf, "inf")],
)
def test_numbers_have_three_digits_and_a_true_minus(value, text):
    assert number(value) == text


def test_percent_never_rounds_a_small_chance_to_nothing():
    assert [percent(0.95), percent(0.009), percent(1e-6)] == ["95 %", "0.9 %", "<0.1 %"]


# ---------------------------------------------------------------------------------------------------------------- colours


@pytest.mark.parametrize("channels", [3, 4])
def test_png_reads_back_byte_for_byte(channels):
    pixels = torch.randint(0, 256, (7, 5, channels), dtype=torch.uint8)
    image = Image.open(io.BytesIO(png(pixels)))
    assert image.mode == {3: "RGB", 4: "RGBA"}[channels]
    assert list(image.tobytes()) == pixels.flatten().tolist()


def test_png_refuses_what_it_cannot_hold():
    with pytest.raises(ValueError, match=r"got \(2, 2, 4\) torch.float32"):
        png(torch.zeros(2, 2, 4))
    with pytest.raises(ValueError, match="uint8"):
        png(torch.zeros(2, 2, 1, dtype=torch.uint8))


def test_zero_is_neutral_and_signs_have_their_hues():
    pixels = heat_pixels(torch.tensor([[0.0, 2.0, -2.0]]))
    assert pixels[0, 0, 3] == 0
    assert pixels[0, 1].tolist() == [*POSITIVE, 255]
    assert pixels[0, 2].tolist() == [*NEGATIVE, 255]


def test_equal_sizes_are_equally_strong_and_larger_is_stronger():
    pixels = heat_pixels(torch.tensor([[0.2, -0.2, 0.5, -0.5, 1.0]]))
    opacity = pixels[0, :, 3].tolist()
    assert opacity[0] == opacity[1] < opacity[2] == opacity[3] < opacity[4]


def test_a_map_of_zeros_is_empty():
    assert heat_pixels(torch.zeros(3, 3))[..., 3].sum() == 0


def test_one_scale_makes_maps_comparable():
    assert (
        heat_pixels(torch.tensor([[1.0]]), scale=2.0)[0, 0, 3] < heat_pixels(torch.tensor([[2.0]]), scale=2.0)[0, 0, 3]
    )


def test_an_outlier_does_not_bleach_the_rest():
    relevance = torch.ones(100, 100)
    relevance[0, 0] = 1e6
    assert heat_pixels(relevance)[50, 50, 3] == 255


def test_heat_map_decodes_to_its_pixels_and_takes_any_dtype():
    relevance = torch.randn(6, 9, dtype=torch.bfloat16, requires_grad=True)
    assert torch.equal(decode(heat_map(relevance)), heat_pixels(relevance))


def test_heat_map_refuses_a_channel_dimension():
    with pytest.raises(ValueError, match=r"\(3, 4, 4\)"):
        heat_map(torch.zeros(3, 4, 4))


def test_scale_is_never_zero_and_refuses_nan():
    assert scale_of([]) == scale_of([0.0, 0.0]) == 1.0
    assert scale_of([0.0] * 999 + [3.0], quantile=0.9) == 3.0
    with pytest.raises(ValueError, match="not finite"):
        scale_of([1.0, math.nan])


# ----------------------------------------------------------------------------------------------------------------- tokens


def test_tokens_are_escaped():
    text = token_line(["<script>", ' "&', "'"], [1.0, -1.0, 0.0])
    assert "<script>" not in text
    read = Reader(text)
    assert [word.strip() for word in read.words if word.strip()][::2] == ["<script>", '"&', "'"]
    assert not read.open


def test_tokens_carry_value_side_and_strength():
    spans = Reader(token_line(["a", " b", " c", " d"], [2.0, -1.0, 0.0, 1e-9])).every("span", "token")
    assert [span["class"] for span in spans] == ["token for", "token against", "token none", "token for"]
    assert [span["style"] for span in spans] == ["--a:1.000", "--a:0.500", "--a:0.000", "--a:0.000"]
    assert [span["data-value"] for span in spans] == ["+2.00000", "-1.00000", "+0.00000", "+0.00000"]


def test_words_stay_apart_and_pieces_stay_together():
    read = Reader(token_line(["un", "believ", "able", " story", "\n"], [0.1] * 5))
    text = re.sub(r"\+[\d.]+", "", "".join(read.words))
    assert text == "unbelievable story⏎"
    assert len(read.every("span", "word")) == 2


def test_token_count_must_match():
    with pytest.raises(ValueError, match="2 tokens, but 1 relevances"):
        token_line(["a", "b"], [1.0])


# ------------------------------------------------------------------------------------------------------------------- sums


def bars(table: str) -> list[tuple[float, float]]:
    styles = [span["style"] or "" for span in Reader(table).every("span", "bar")]
    return [tuple(float(n) for n in re.findall(r"[\d.]+", style)) for style in styles]  # type: ignore[misc]


def test_sums_show_every_part_and_its_name():
    table = sums_table(Sums(10.0, 7.5, {"bias": 3.0, "<const>": -0.5}), "reached the pixels", "score")
    words = Reader(table).words
    assert words[0::2] == ["reached the pixels", "kept by bias", "kept by <const>", "score"]
    assert words[1::2] == ["+7.50", "+3.00", "−0.50", "10.00"]


def test_sums_are_a_waterfall_that_ends_at_the_score():
    delivered, bias, score = bars(sums_table(Sums(10.0, 4.0, {"bias": 6.0}), "reached", "score"))
    assert delivered == (0.0, 40.0)
    assert bias == (40.0, 60.0)
    assert score == (0.0, 100.0)


def test_negative_parts_go_to_the_left_of_where_they_begin():
    delivered, bias, score = bars(sums_table(Sums(5.0, 10.0, {"bias": -5.0}), "reached", "score"))
    assert delivered == (0.0, 100.0)
    assert bias == (50.0, 50.0)
    assert score == (0.0, 50.0)


def test_a_negative_score_has_its_bars_inside_the_track():
    for left, width in bars(sums_table(Sums(-2.0, 1.0, {"bias": -3.0}), "reached", "score")):
        assert 0 <= left <= 100 and left + width <= 100.01


def test_parts_too_small_to_show_share_one_line_or_none():
    kept = {"bias": 3.0, "constant": 0.004, "rounding": 0.003, "attention": 0.0}
    words = Reader(sums_table(Sums(10.0, 6.993, kept), "reached", "score")).words
    assert words == ["reached", "+6.99", "kept by bias", "+3.00", "small change", "+0.01", "score", "10.00"]
    words = Reader(sums_table(Sums(10.0, 7.0, {"bias": 3.0, "rounding": 1e-6}), "reached", "score")).words
    assert words == ["reached", "+7.00", "kept by bias", "+3.00", "score", "10.00"]


def test_what_nobody_accounts_for_is_not_hidden():
    assert "unaccounted" in sums_table(Sums(10.0, 7.0, {"bias": 2.0}), "reached", "score")
    assert "unaccounted" not in sums_table(Sums(10.0, 7.0, {"bias": 3.0 - 1e-6}), "reached", "score")
    assert "kept on the way" in sums_table(Sums(10.0, 7.0), "reached", "score")


def test_a_score_of_zero_is_drawn():
    assert "NaN" not in sums_table(Sums(0.0, 0.0, {}), "reached", "score")


# ------------------------------------------------------------------------------------------------------------------- page

PHOTO = "data:image/jpeg;base64,AAAA"


def whole_page() -> str:
    tokens = ["The", " capital", " is"]
    candidates = [
        Candidate(
            f"word <{i}>",
            0.5 / (i + 1),
            [
                Answer("Why <this>?", [0.5, -0.25, 0.125], Sums(1.0, 0.375, {"bias": 0.625}), "score"),
                Answer("Why rather?", [0.1, 0.2, -0.1], Sums(0.2, 0.2), "lead"),
            ],
        )
        for i in range(3)
    ]
    return page(
        photo=PHOTO,
        pictures=[
            Picture("tripod & co", torch.randn(8, 8), Sums(11.677, 3.21, {"bias": 8.467}), 0.95),
            Picture("binoculars", torch.randn(8, 8), Sums(6.98, 1.5, {"bias": 5.48}), score="lead"),
        ],
        tokens=tokens,
        candidates=candidates,
        machines=[Machine("Net <1>", "gamma", {"nodes": "423", "depth δ": "3"}, 40.0, 50.0)],
        facts=["torch 2"],
        credits=["Photo: <CC0>"],
    )


def test_page_is_well_formed_and_asks_the_network_for_nothing():
    text = whole_page()
    read = Reader(text)
    assert read.open == ["html"] or not read.open
    for _, attributes in read.found:
        for name in ("src", "href"):
            assert (attributes.get(name) or "data:").startswith("data:")
    assert not re.search(r"https?://|@import|url\(", text)


def test_page_shows_maps_sums_plan_and_ratio():
    read = Reader(whole_page())
    words = " ".join(" ".join(read.words).split())
    for shown in (
        "tripod & co",
        "95 %",
        "+3.21",
        "11.68",
        "binoculars",
        "+8.47",
        "423",
        "depth δ",
        "1.25",
        "Photo: <CC0>",
    ):
        assert shown in words
    assert len(read.every("img", "over")) == 2
    assert [decode(image["src"] or "").shape for image in read.every("img", "over")] == [(8, 8, 4)] * 2


def test_page_escapes_what_it_is_given():
    text = whole_page()
    for raw in ("tripod & co", "word <0>", "Why <this>", "Net <1>", "<CC0>"):
        assert raw not in text


def test_one_candidate_is_chosen_and_each_has_its_panel():
    read = Reader(whole_page())
    radios = [a for a in read.every("input") if a.get("type") == "radio"]
    assert ["checked" in radio for radio in radios] == [True, False, False]
    assert len(read.every("div", "panel")) == 3
    assert [a["for"] for a in read.every("label") if "for" in a] == [radio["id"] for radio in radios]

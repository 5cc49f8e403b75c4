"""Pages in a real browser: what is drawn, pointed at, clicked and typed shows the relevance it says."""

import os
import shutil
import time

import pytest
import torch

import dynamiclrp as dlrp
import shown
from dynamiclrp.demo.page import _frame
from dynamiclrp.media import Tokens

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium was found on the PATH: apt-get install chromium")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as made:
        opened = made.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def look(browser, tmp_path):
    """Open a result's page; anything that it logs, throws or asks of the network fails the test."""
    complaints = []
    contexts = []

    def opened(result, *, width=1200, height=900, scheme="light", **options):
        result.html(tmp_path / "page.html", **options)
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        # the tests read canvases back, which pages do not
        page.on("console", lambda m: None if "Canvas2D: Multiple readback" in m.text else complaints.append(m.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda request: None if request.url.startswith(("file:", "data:")) else complaints.append(request.url),
        )
        page.goto((tmp_path / "page.html").as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not complaints


def alpha(page, selector):
    return float(page.eval_on_selector(selector, "e => e.style.getPropertyValue('--a')"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_draw_without_a_word_and_fit_narrow_screens(look, tmp_path, scheme):
    page = look(shown.text(), width=390, scheme=scheme)
    for name, result in shown.everything().items():
        result.html(tmp_path / f"{name}.html")
        page.goto((tmp_path / f"{name}.html").as_uri())
        assert page.locator("h1").inner_text()
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{name} is {wide} pixels too wide"
        cut = page.evaluate(
            """() => [...document.querySelectorAll('.value, .token, .chance, h1, h2, button')].filter((e) => e.closest('.matrix') === null
            && e.getBoundingClientRect().right > innerWidth).map((e) => e.textContent)"""
        )
        assert not cut, f"{name}: {cut[:3]} reach beyond the screen"


@pytest.mark.parametrize("width", [330, 560, 965, 1120])
def test_accounts_fit_under_the_maps_of_the_demo(look, tmp_path, width):
    a = shown.picture()
    side_by_side = dlrp.compare({"one": a, "two": 1000 * a.relevance, "three": -a.relevance})
    page = look(a, width=1200)
    (tmp_path / "demo.html").write_text(
        f"<!doctype html><style>iframe{{width:{width}px;border:0}}</style>{_frame(side_by_side, 'maps')}", "utf-8"
    )
    page.goto((tmp_path / "demo.html").as_uri())
    page.frame_locator("iframe").locator(".sums").first.wait_for()
    beyond = page.frames[1].evaluate(
        """() => [...document.querySelectorAll('.sums')].map((e) =>
        e.getBoundingClientRect().right - e.closest('.panel').getBoundingClientRect().right)"""
    )
    assert len(beyond) == 3 and max(beyond) <= 0.5


def test_tokens_are_coloured_by_their_relevance(look):
    a = shown.text()
    page = look(a)
    values = a.relevance[0].tolist()
    tokens = page.locator(".token")
    assert tokens.count() == 8
    full = max(abs(v) for v in values[1:7])  # special tokens do not make the scale
    for i, value in enumerate(values):
        token = tokens.nth(i)
        assert float(token.get_attribute("data-value")) == pytest.approx(value, abs=1e-7)
        classes = token.get_attribute("class").split()
        assert ("for" if value > 0 else "against") in classes and ("apart" in classes) == (i in (0, 7))
        strength = float(token.evaluate("e => e.style.getPropertyValue('--a')"))
        assert strength == pytest.approx(min(1, abs(value) / full), abs=1e-3)
    share = sum(abs(values[i]) for i in (0, 7)) / sum(map(abs, values))
    assert f"Special tokens hold {100 * share:.0f} % of all relevance" in page.locator(".apart-strip").inner_text()


def test_one_scale_makes_texts_comparable(look):
    a = shown.text()
    page = look(dlrp.compare({"one": a, "two": 4 * a.relevance}))
    strength = "e => e.map((t) => Number(t.style.getPropertyValue('--a')))"
    assert max(page.eval_on_selector_all(".panel:nth-child(1) .token", strength)) == 1
    page.get_by_role("button", name="one scale").click()
    first, second = (page.eval_on_selector_all(f".panel:nth-child({i}) .token:not(.apart)", strength) for i in (1, 2))
    assert max(second) == 1 and first == pytest.approx([v / 4 for v in second], abs=2e-3)


def test_texts_run_in_their_own_direction(look):
    tokens = Tokens.of(
        ["[CLS]", "مرحبا", " بالعالم", " كيف", " حالك", "؟", " اليوم", "[SEP]"], ["special", *[""] * 6, "special"]
    )
    page = look(shown.text().seen_as(input=tokens))
    assert page.locator(".line").get_attribute("dir") == "rtl"
    first, second = (page.locator(".token").nth(i).bounding_box()["x"] for i in (1, 2))
    assert second < first
    assert look(shown.text()).locator(".line").get_attribute("dir") == "ltr"


def test_words_are_sums_of_tokens(look):
    a = shown.text()
    page = look(a)
    page.get_by_role("button", name="words").click()
    tokens = page.locator(".token")
    assert tokens.count() == 7 and tokens.nth(4).inner_text().startswith("drawer")
    assert float(tokens.nth(4).get_attribute("data-value")) == pytest.approx(
        float(a.relevance[0, 4:6].double().sum()), abs=1e-6
    )


def test_long_texts_list_their_strongest_tokens_and_lead_to_them(look):
    a = shown.long_text()
    page = look(a, height=500)
    rows = page.locator(".strongest tr")
    assert rows.count() == 10
    best = int(a.relevance[0].abs().argmax())
    assert float(rows.first.get_attribute("data-value")) == pytest.approx(float(a.relevance[0, best]), abs=1e-7)
    rows.first.locator("button").click()
    token = page.locator(f".token[data-index='{best}']")
    token.wait_for()
    assert "found" in token.get_attribute("class")


def test_the_tip_shows_the_value_by_mouse_and_by_keyboard(look):
    a = shown.text()
    page = look(a)
    page.locator(".token").nth(2).hover()
    tip = page.locator("#tip")
    assert tip.is_visible() and "opened" in tip.inner_text()
    page.mouse.move(5, 5)
    assert not tip.is_visible()
    page.locator(".token").nth(3).focus()
    assert tip.is_visible() and "the" in tip.inner_text()


def test_palettes_change_the_colours(look):
    page = look(shown.text())
    before = page.locator(".token.for").first.evaluate("e => getComputedStyle(e).backgroundColor")
    page.locator("#palette").select_option("purple-green")
    page.wait_for_timeout(200)  # colours fade
    after = page.locator(".token.for").first.evaluate("e => getComputedStyle(e).backgroundColor")
    assert before != after and "123, 50, 148" in after.replace("rgb(", "").replace("rgba(", "")


def pixels(page, index=0):
    return page.evaluate(
        """i => { const c = document.querySelectorAll('.stack canvas')[i];
        return {w: c.width, h: c.height, data: Array.from(c.getContext('2d').getImageData(0, 0, c.width, c.height).data)} }""",
        index,
    )


def test_heat_maps_are_drawn_where_the_model_looked(look):
    a = shown.picture()
    page = look(a)
    seen = page.locator(".seen").bounding_box()
    stack = page.locator(".stack").bounding_box()
    assert (seen["x"] - stack["x"]) / stack["width"] == pytest.approx(0.1, abs=0.01)
    assert (seen["y"] - stack["y"]) / stack["height"] == pytest.approx(5 / 60, abs=0.01)
    assert seen["width"] / stack["width"] == pytest.approx(0.8, abs=0.01)
    drawn = pixels(page)
    heat = a.heat_map(original=False)
    assert (drawn["h"], drawn["w"]) == tuple(heat.shape)
    colours = torch.tensor(drawn["data"]).reshape(*heat.shape, 4)
    strong = heat.abs() > 0.2 * heat.abs().max()
    assert bool(((colours[..., 0] > colours[..., 2]) == (heat > 0))[strong].all())
    order = heat.abs().flatten().argsort()
    opacity = colours[..., 3].flatten()[order]
    assert bool((opacity.diff() >= -1).all())  # the larger, the stronger


def test_patches_are_sums_of_pixels(look):
    a = shown.picture()
    page = look(a)
    page.get_by_label("patch").fill("3")  # 8 pixels
    drawn = pixels(page)
    pooled = a.pool(8)[0]
    assert (drawn["h"], drawn["w"]) == tuple(pooled.shape)
    colours = torch.tensor(drawn["data"]).reshape(*pooled.shape, 4)
    strong = pooled.abs() > 0.05 * pooled.abs().max()
    assert bool(((colours[..., 0] > colours[..., 2]) == (pooled > 0))[strong].all())
    page.locator(".stack canvas").hover(position={"x": 5, "y": 5})
    assert page.locator("#tip").inner_text().startswith("8 × 8 pixels at 0, 0")


def test_one_scale_makes_maps_comparable(look):
    page = look(shown.pictures())
    own = [max(pixels(page, i)["data"][3::4]) for i in (0, 1)]
    assert own == [255, 255]
    page.get_by_role("button", name="one scale").click()
    first, second = (max(pixels(page, i)["data"][3::4]) for i in (0, 1))
    assert second == 255 and first < 200  # the other one is twice as large


def test_pictures_show_one_side_and_their_own_colours_on_request(look):
    page = look(shown.picture())
    page.get_by_role("button", name="against", exact=True).click()
    drawn = torch.tensor(pixels(page)["data"]).reshape(-1, 4)
    seen = drawn[drawn[:, 3] > 20]
    assert len(seen) and bool((seen[:, 2] > seen[:, 0]).all())
    for choice, expected in (("colour", "none"), ("gray photo", "grayscale")):
        page.get_by_role("button", name=choice).click()
        assert page.locator(".stack img").first.evaluate("e => getComputedStyle(e).filter").startswith(expected)


def test_tables_show_all_columns_on_request(look):
    page = look(shown.table())
    rows = page.locator(".figure .signed tr")
    assert rows.count() == 20
    values = [abs(float(rows.nth(i).get_attribute("data-value"))) for i in range(20)]
    assert values == sorted(values, reverse=True)
    page.get_by_role("button", name="all 30").click()
    assert rows.count() == 30


# Generation ----------------------------------------------------------------------------------------------------------


def strengths(page):
    return page.evaluate(
        """() => [...document.querySelectorAll('.text .token')].map(e =>
        (e.classList.contains('against') ? -1 : e.classList.contains('for') ? 1 : 0) * Number(e.style.getPropertyValue('--a')))"""
    )


def test_pointing_at_a_token_shows_its_row(look):
    g = shown.generation()
    page = look(g)
    for i in (3, 11, 0):
        page.locator(f"#t{i}").hover()
        row = g.matrix[i, : g.start + i]
        full = float(row[1:].abs().max())  # the first token is a sink and does not make the scale
        expected = (row / full).clamp(-1, 1).tolist()
        assert strengths(page)[: g.start + i] == pytest.approx(expected, abs=5e-3)
        assert page.locator("#chosen h2").inner_text() == g.said.label(i)
        assert f"token {i + 1} of 12" in page.locator("#chosen").inner_text()
        assert "The first token holds" in page.locator("#chosen").inner_text()
        top = max(range(1, g.start + i), key=lambda j: abs(float(row[j])))
        first = page.locator("#chosen .signed tr").first
        assert float(first.get_attribute("data-value")) == pytest.approx(float(row[top]), rel=1e-3)


def test_one_scale_for_all_tokens(look):
    g = shown.generation()
    page = look(g)
    page.get_by_role("button", name="one scale").click()
    page.locator("#t4").hover()
    full = float(g.matrix[:, 1:].abs().max())
    row = (g.matrix[4, : g.start + 4] / full).clamp(-1, 1).tolist()
    assert strengths(page)[: g.start + 4] == pytest.approx(row, abs=5e-3)


def test_keyboard_walks_and_holds(look):
    g = shown.generation()
    page = look(g)
    page.locator("#t0").focus()
    page.keyboard.press("Home")
    for key, expected in (
        ("ArrowRight", 1),
        ("ArrowDown", 2),
        ("ArrowLeft", 1),
        ("End", 11),
        ("PageUp", 1),
        ("Home", 0),
    ):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.id") == f"t{expected}"
        assert page.locator(f"#t{expected}").get_attribute("aria-selected") == "true"
    page.keyboard.press("Enter")
    page.locator("#t7").hover()
    assert "token 1 of 12, held" in page.locator("#chosen").inner_text()
    page.locator("#t0").focus()
    page.keyboard.press("Escape")
    page.locator("#t8").hover()
    assert "token 9 of 12" in page.locator("#chosen").inner_text()
    assert page.locator(".text [tabindex='0']").count() == 1  # one stop for the tab key


def test_clicking_the_context_shows_what_it_led_to(look):
    g = shown.generation()
    page = look(g)
    page.locator("#context .token").nth(5).click()
    assert "what it led to" in page.locator("#chosen").inner_text()
    column = g.matrix[:, 5]
    found = strengths(page)[g.start :]
    assert found == pytest.approx((column / column.abs().max()).tolist(), abs=5e-3)


def test_the_matrix_chooses_rows(look):
    g = shown.generation()
    page = look(g)
    canvas = page.locator("#matrix canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 3, box["y"] + box["height"] * 6.5 / 12)
    assert "token 7 of 12" in page.locator("#chosen").inner_text()
    assert page.evaluate("[...document.querySelectorAll('#matrix canvas')].map(c => [c.width, c.height])") == [[31, 12]]


def test_words_of_the_context(look):
    g = shown.generation()
    page = look(g)
    page.get_by_role("button", name="words").click()
    page.locator("#t6").hover()
    start, stop = next((a, b) for a, b in g.context.words() if b - a == 2)
    summed = float(g.matrix[6, start:stop].sum())
    found = strengths(page)
    assert found[start] == found[start + 1] and (found[start] > 0) == (summed > 0)


def test_long_generations_answer_quickly(look):
    g = shown.generation(rows=500, start=2000)
    begin = time.perf_counter()
    page = look(g)
    page.locator("#t0").wait_for()
    assert time.perf_counter() - begin < 30
    spent = page.evaluate(
        """() => { const t = performance.now();
        for (let i = 100; i < 110; i++) document.getElementById('t' + i).dispatchEvent(new MouseEvent('mouseover', {bubbles: true}));
        document.body.offsetHeight; return (performance.now() - t) / 10; }"""
    )
    assert spent < 400, f"{spent:.0f} ms for each token"
    page.locator("#t109").hover()
    row = g.matrix[109, : g.start + 109]
    expected = (row / row[1:].abs().max()).clamp(-1, 1).tolist()
    assert strengths(page)[: g.start + 109] == pytest.approx(expected, abs=5e-3)
    assert page.evaluate("document.querySelectorAll('*').length") < 3200


def test_frames_of_notebooks_grow_and_take_their_theme(browser, tmp_path):
    outer = f'<!doctype html><body data-jp-theme-light="false">{shown.text()._repr_html_()}</body>'
    (tmp_path / "notebook.html").write_text(outer, "utf-8")
    page = browser.new_page(viewport={"width": 900, "height": 900}, color_scheme="light")
    page.goto((tmp_path / "notebook.html").as_uri())
    page.wait_for_timeout(300)
    frame = page.frames[1]
    assert frame.locator(".token").count() == 8
    assert frame.evaluate("document.documentElement.dataset.theme") == "dark"
    inner = frame.evaluate("document.documentElement.scrollHeight")
    assert abs(page.locator("iframe").bounding_box()["height"] - inner) <= 4
    page.close()

"""The documentation is true: its code runs, prints what it says, its names and paths exist, and the site builds."""

import contextlib
import doctest
import importlib
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CHECKER = doctest.OutputChecker()
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(page: Path) -> list[tuple[str, int, str, str]]:
    """(code, its line, what kind of block follows at once, that block's text), in order."""
    text = page.read_text("utf-8")
    found = list(BLOCK.finditer(text))
    made = []
    for number, match in enumerate(found):
        if match[1] != "python":
            continue
        after = found[number + 1] if number + 1 < len(found) else None
        follows = after is not None and after[1] == "text" and not text[match.end() : after.start()].strip()
        line = text[: match.start()].count("\n") + 1
        made.append((match[2], line, "text" if follows else "", after[2] if follows and after else ""))
    return made


def run(page: Path) -> None:
    """Execute all blocks of a page in one namespace; what a `text` block below one shows must be what it printed."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for code, line, follows, shown in blocks(page):
        where = f"{page.name}:{line}"
        if code.lstrip().startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(code, namespace, where, str(page), line)
            runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
            report = io.StringIO()
            runner.run(test, out=report.write, clear_globs=False)
            namespace.update(test.globs)
            assert runner.summarize(verbose=False).failed == 0, report.getvalue()
            continue
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(code, where, "exec"), namespace)
        except Exception as error:
            raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
        if follows:
            wanted = shown.replace("…", "...")
            assert CHECKER.check_output(wanted, printed.getvalue(), FLAGS), (
                f"{where} printed\n{printed.getvalue()}\nand the page shows\n{shown}"
            )


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_every_code_block_runs(page, tmp_path, monkeypatch):
    from dynamiclrp.coverage.case import mend_torchvision
    from dynamiclrp.ops import OPS

    mend_torchvision()
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    rows = dict(OPS)
    try:
        run(page)
    finally:
        OPS.clear()
        OPS.update(rows)


def test_a_block_that_prints_something_else_would_be_caught(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    with pytest.raises(AssertionError, match="the page shows"):
        run(page)
    page.write_text("```python\n1 / 0\n```\n")
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run(page)
    page.write_text("```python\n>>> 1 + 1\n3\n```\n")
    with pytest.raises(AssertionError, match="Expected"):
        run(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_and_name_exists(page):
    text = page.read_text("utf-8")
    paths = set(re.findall(r"`((?:src|tests|bench|docs|experiments)/[\w./-]+)`", text))
    missing = {path for path in paths if not (ROOT / path).exists()}
    assert not missing, f"{page.name} names {missing}"
    for name, path in re.findall(r"`(\w+)`(?:, `\w+`)* in `(src/[\w./]+\.py)`", text):
        assert re.search(rf"\b(class|def) {name}\b|^{name}\b", (ROOT / path).read_text("utf-8"), re.MULTILINE), (
            f"{page.name}: {name} is not in {path}"
        )
    for module, name in re.findall(r"\[`[^`]+`\]\[(dynamiclrp)\.(\w+)\]", text):
        assert hasattr(importlib.import_module(module), name), f"{page.name}: {module}.{name}"


def test_every_link_of_the_readme_leads_somewhere():
    text = (ROOT / "README.md").read_text("utf-8")
    for target in re.findall(r"\]\(([^)#]+)|(?:src|srcset|href)=\"([^\"]+)\"", text):
        link = target[0] or target[1]
        if not link.startswith("http"):
            assert (ROOT / link).exists(), link


def test_every_number_of_the_readme_stands_in_the_table_it_links_to():
    text = (ROOT / "README.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|") and line.rstrip(" |").endswith(".md)")]
    assert rows
    for row in rows:
        *cells, link = (cell.strip() for cell in row.strip("|").split("|"))
        table = (ROOT / re.findall(r"\(([^)]+)\)", link)[0]).read_text("utf-8")
        for number in re.findall(r"\d[\d,]*(?:\.\d+)?", " ".join(cells[1:])):
            assert number in table, f"README says {number}, which {link} does not have: {row}"


def test_the_whole_paper_is_mapped_to_code():
    text = (ROOT / "docs/paper.md").read_text("utf-8")
    counts = {"Definition": 5, "Theorem": 1, "Proposition": 2, "Algorithm": 4, "Table": 6, "Figure": 3}
    wanted = {f"{what} {n}" for what, last in counts.items() for n in range(1, last + 1)}
    assert {name for name in wanted if not re.search(rf"\b{name}\b", text)} == set()
    equations = set()
    for first, last in re.findall(r"\beq\. (\d)(?:–(\d))?", text):
        equations |= set(range(int(first), int(last or first) + 1))
    assert equations == set(range(1, 10))
    assert all(re.search(rf"^\| {letter}[,.]", text, re.MULTILINE) for letter in "ABCDEF")


def test_the_pictures_are_what_their_script_draws(tmp_path):
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs/scripts/figures.py")
    assert spec and spec.loader
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    figures.main(tmp_path)
    drawn = {file.name: file.read_text("utf-8") for file in tmp_path.glob("*.svg")}
    assert len(drawn) == 4
    for name, text in drawn.items():
        assert (ROOT / "docs/img" / name).read_text("utf-8") == text, f"{name}: run docs/scripts/figures.py"


def test_the_site_builds_without_a_warning_and_asks_the_network_for_nothing(tmp_path):
    pytest.importorskip("mkdocs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert (tmp_path / "site/index.html").exists()
    for file in (tmp_path / "site").rglob("*.html"):
        loads = re.findall(
            r"<(?:script|img|link|iframe)[^>]+(?:src|href)=\"?(https?://[^\s\">]+)", file.read_text("utf-8")
        )
        assert not loads, f"{file.name} loads {loads}"

"""The examples in the docstrings run, and print what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
MODULES = sorted(
    ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for file in (SOURCE / "dynamiclrp").rglob("*.py")
    if ">>> " in file.read_text("utf-8")
)


def test_the_verbs_have_examples():
    assert {"dynamiclrp", "dynamiclrp.explain", "dynamiclrp.presets", "dynamiclrp.image", "dynamiclrp.timing"} <= set(
        MODULES
    )


@pytest.mark.parametrize("module", MODULES)
def test_examples_of(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some of them write files
    found = doctest.testmod(
        importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    )
    assert found.attempted > 0 and found.failed == 0

"""The examples in the docstrings run, and print what they say."""

import doctest
import importlib

import pytest

MODULES = ["", ".explain", ".presets", ".ops.table", ".ops.refused"]


@pytest.mark.parametrize("module", MODULES)
def test_examples_of(module):
    found = doctest.testmod(importlib.import_module(f"dynamiclrp{module}"), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 0 and found.failed == 0

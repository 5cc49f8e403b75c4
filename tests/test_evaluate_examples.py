"""The examples in the docstrings of evaluation run, and print what they say; its public names say what they are."""

import doctest
import importlib
import pkgutil

import pytest

from dynamiclrp import evaluate

MODULES = ["dynamiclrp.evaluate", *(f"dynamiclrp.evaluate.{m.name}" for m in pkgutil.iter_modules(evaluate.__path__))]


@pytest.mark.parametrize("module", MODULES)
def test_examples_of(module):
    found = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.failed == 0


@pytest.mark.parametrize("name", sorted(evaluate.__all__))
def test_public_names_are_documented(name):
    value = getattr(evaluate, name)
    if callable(value):
        assert value.__doc__ and not value.__doc__.startswith(f"{name}("), name  # not a dataclass's generated line


@pytest.mark.parametrize(
    "name", ["compare", "perturb", "randomisation", "conservation", "cost", "relevance_of", "quantus_explain", "bootstrap",
             "paired_difference", "exact_match", "f1", "top_in_span", "span_iou", "span_agreement", "spearman"]
)  # fmt: skip
def test_public_functions_have_examples(name):
    assert ">>>" in getattr(evaluate, name).__doc__

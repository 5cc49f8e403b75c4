"""The table of operations is complete: every node type of the installed torch has a row or a reason to be refused."""

import os
from fnmatch import fnmatchcase

import pytest
import torch
import torchgen
from torchgen.packaged.autograd.load_derivatives import load_derivatives

import dynamiclrp as dlrp
import oracles  # noqa: F401  one thread
from dynamiclrp.ops import OPS, REFUSED, Kind, refusal
from dynamiclrp.presets import PRESETS
from samples import LIBRARIES, ROWS

# Rows for node types that are classes of no module of torch, and where they come from.
FROM_ELSEWHERE = {
    name: "an operator that torch registers from Python, whose node type is made at its first call"
    for name in ROWS
    if name.startswith("GeneratedBackwardFor_torch_nn__linear_cross_entropy")
} | dict.fromkeys(LIBRARIES, "an autograd.Function of a library (test_libraries.py, test_torchvision.py)")


def node_types() -> set[str]:
    """Those that torch's table of derivatives makes, and those written by hand."""
    packaged = os.path.join(os.path.dirname(torchgen.__file__), "packaged")
    native = os.path.join(packaged, "ATen", "native")
    derivatives, _ = load_derivatives(
        os.path.join(packaged, "autograd", "derivatives.yaml"),
        os.path.join(native, "native_functions.yaml"),
        os.path.join(native, "tags.yaml"),
    )
    made = {info.op for infos in derivatives.values() for info in infos.values() if info.op is not None}
    return made | {name for name in dir(torch._C._functions) if not name.startswith("__")}


NODE_TYPES = node_types()


def test_torch_has_about_650_node_types():
    assert len(NODE_TYPES) > 600


def test_every_node_type_has_a_row_or_is_refused():
    assert sorted(name for name in NODE_TYPES if name not in ROWS and refusal(name) is None) == []


def test_no_row_is_refused():
    assert sorted(name for name in ROWS if refusal(name) is not None) == []


def test_every_row_is_a_node_type_of_torch():
    assert sorted(ROWS - NODE_TYPES - set(FROM_ELSEWHERE)) == []


def test_every_refusal_is_a_node_type_of_torch():
    assert [name for name in REFUSED if not any(fnmatchcase(kind, name) for kind in NODE_TYPES)] == []


def test_every_refusal_says_why_and_what_to_do():
    """A reason, then the remedy; torch's own tests need none."""
    reasons = {reason for name, reason in REFUSED.items() if not name.startswith("Test")}
    assert [reason for reason in reasons if "; " not in reason] == []


@pytest.mark.parametrize("name", sorted(ROWS - set(FROM_ELSEWHERE)))
def test_a_row_names_values_that_its_node_keeps(name):
    op, node = OPS[name], getattr(torch._C._functions, name)
    attributes = [attribute for attribute, _ in op.saved.values()] + ([op.result] if op.result else [])
    assert [attribute for attribute in attributes if not hasattr(node, f"_saved_{attribute}")] == []


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_row_has_what_its_kind_needs(name):
    op = OPS[name]
    if op.kind in (Kind.LINEAR, Kind.CONV):
        assert op.linear is not None
    if op.kind in (Kind.NORMALISE, Kind.BATCHNORM):
        assert op.fixed is not None
    if op.kind is Kind.POOL or (op.kind is Kind.SUM and op.weights is None):
        assert op.forward is not None, "the absolute share adds up magnitudes by the operation's own forward"


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "epsilon-gamma-box"])
def test_every_preset_has_a_rule_for_every_kind(name):
    kinds = dict(dlrp.preset(name).kinds)
    assert [str(kind) for kind in Kind if str(kind) not in kinds] == []
    assert [str(kind) for kind in Kind if not kinds[str(kind)].fits(kind)] == []


def test_a_refused_operation_says_why():
    x = torch.randn(3, 3, requires_grad=True)
    with pytest.raises(dlrp.UnknownOpError, match=r"LinalgSvdBackward0.*no shares by entry"):
        dlrp.relevance(torch.linalg.svdvals(x).sum(), x)

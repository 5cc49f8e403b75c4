"""Scripted and compiled functions and modules are explained as the plain ones they were made from."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dynamiclrp as dlrp

Scripted = torch._C.ScriptFunction


def inner(x: Tensor) -> Tensor:
    return torch.tanh(x) * torch.sigmoid(x)


def gate(x: Tensor, scale: float = 1.5) -> Tensor:
    y = inner(x) * scale
    return y + x


@pytest.fixture(scope="module")
def scripted_gate():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated; libraries use it
        return torch.jit.script(gate)


class Net(nn.Module):
    def __init__(self, function, checkpointed: bool = False) -> None:
        super().__init__()
        self.function, self.checkpointed = function, checkpointed
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def middle(self, x: Tensor) -> Tensor:
        return self.function(self.first(x), scale=0.7)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.middle, x, use_reentrant=False) if self.checkpointed else self.middle(x))


@pytest.mark.parametrize("preset", ["attnlrp", "default", "dynamic"])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("warm", [0, 5])
def test_it_is_explained_like_the_plain_function(scripted_gate, preset, checkpointed, warm):
    torch.manual_seed(0)
    plain, x = Net(gate, checkpointed).double(), torch.randn(2, 4, dtype=torch.float64)
    model = Net(scripted_gate, checkpointed).double()
    model.load_state_dict(plain.state_dict())
    for _ in range(warm):  # after some runs torch.jit fuses the operations
        Net(scripted_gate).double()(x.clone().requires_grad_()).sum().backward()
    call = Scripted.__call__
    expected = dlrp.explain(plain, x, target=1, preset=preset).relevance
    for _ in range(3):
        torch.testing.assert_close(dlrp.explain(model, x, target=1, preset=preset).relevance, expected)
    assert Scripted.__call__ is call


def test_nothing_is_left_behind_after_an_error(scripted_gate):
    call = Scripted.__call__
    with pytest.raises(RuntimeError):
        dlrp.explain(Net(scripted_gate), torch.randn(2, 5))
    assert Scripted.__call__ is call


def test_a_scripted_module_inside_is_refused_with_a_remedy():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inside = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    model, x = nn.Sequential(inside, nn.Linear(4, 2)), torch.randn(1, 4)
    for _ in range(5):
        model(x.clone().requires_grad_()).sum().backward()
    with pytest.raises(dlrp.OpaqueGraphError, match="PYTORCH_JIT=0"):
        for _ in range(5):
            dlrp.explain(model, x, preset="epsilon")


# ---------------------------------------------------------------- torch.compile


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.norm, self.last = nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.act(self.first(x))))


def small() -> nn.Module:
    return Small().double()


@pytest.mark.parametrize("preset", ["attnlrp", "default", "dynamic"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["whole", "in place", "a layer", "a function"])
def test_compiled_models_are_explained_like_plain_ones(how, backend, preset):
    plain, model, x = small(), small(), torch.randn(2, 4, dtype=torch.float64)
    if how == "whole":
        model = torch.compile(model, backend=backend)
    elif how == "in place":
        model.compile(backend=backend)
    elif how == "a layer":
        model.act = torch.compile(model.act, backend=backend)
    else:
        model.act.forward = torch.compile(nn.functional.gelu, backend=backend)
    with torch.no_grad():
        model(x)
    expected = dlrp.explain(plain, x, target=1, preset=preset).relevance
    explainer = dlrp.Explainer(model, preset)
    for _ in range(3):
        torch.testing.assert_close(explainer(x, target=1).relevance, expected)
    many = list(explainer.each(x, targets=[0, 1]))
    torch.testing.assert_close(many[1].relevance, expected)
    torch._dynamo.reset()  # which gives up a code that was compiled for many models
    if how == "in place" and backend == "aot_eager":  # as it was before
        assert type(model(x.requires_grad_()).grad_fn).__name__ == "CompiledFunctionBackward"


def test_layers_of_a_compiled_model_have_their_own_names():
    a = dlrp.explain(torch.compile(small(), backend="eager"), torch.randn(2, 4, dtype=torch.float64), layers=["first"])
    assert list(a.layers) == ["first"]


def test_a_compiled_model_is_inspected():
    model = small()
    model.compile(backend="aot_eager")
    assert dlrp.inspect(model, torch.randn(2, 4, dtype=torch.float64)).coverage == 1.0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_checkpointed_layer_that_is_compiled(backend):
    torch.manual_seed(0)
    plain, x = Net(gate, checkpointed=True).double(), torch.randn(2, 4, dtype=torch.float64)
    torch._dynamo.reset()
    model = Net(torch.compile(gate, backend=backend), checkpointed=True).double()
    model.load_state_dict(plain.state_dict())
    explainer = dlrp.Explainer(model, "default")
    for _ in range(2):
        found = explainer(x, target=1).relevance
        torch.testing.assert_close(found, dlrp.explain(plain, x, target=1).relevance)

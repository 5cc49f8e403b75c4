"""Explanations replayed as CUDA graphs equal eager ones; what cannot be captured says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(body, nn.Flatten(), nn.Linear(64 * 6, 9)).eval()


def test_tensors_on_the_cpu_are_refused():
    with pytest.raises(dlrp.CaptureError, match=r"on cpu.*leave out cuda_graph"):
        dlrp.Explainer(nn.Linear(3, 2), cuda_graph=True)(torch.ones(1, 3))


def test_arguments_that_are_no_plain_values_are_refused():
    with pytest.raises(dlrp.CaptureError, match=r"'extra' is a list.*plain values"):
        dlrp.Explainer(nn.Linear(3, 2), cuda_graph=True)(extra=[torch.ones(1, 3)])


@gpu
@pytest.mark.parametrize("preset", ["attnlrp", "cp-lrp", "gamma", "epsilon", "dynamic"])
def test_replays_equal_eager_for_other_values_targets_and_shapes(preset):
    torch.manual_seed(0)
    model = encoder().cuda()
    eager, graph = dlrp.Explainer(model, preset), dlrp.Explainer(model, preset, cuda_graph=True)
    target_forms = [None, 3, lambda y: y[:, 1] - y[:, 2]]
    for batch in (2, 3, 2):
        for target in (*target_forms, list(range(batch))):
            x = torch.randn(batch, 6, 64, device="cuda")
            a, b = eager(x, target=target), graph(x, target=target)
            scale = a.relevance.abs().max().item()
            torch.testing.assert_close(b.relevance, a.relevance, rtol=1e-4, atol=1e-5 * scale)
            torch.testing.assert_close(b.prediction, a.prediction)
            torch.testing.assert_close(b.seed, a.seed)
    assert len(graph.captures) == 2
    assert all(c.memory > 0 for c in graph.captures) and "MiB" in repr(graph.captures[0])


@gpu
def test_results_are_not_overwritten_by_the_next_replay():
    model = encoder().cuda()
    graph = dlrp.Explainer(model, cuda_graph=True)
    x, y = torch.randn(2, 1, 6, 64, device="cuda")
    first = graph(x)
    kept = first.relevance.clone(), first.prediction.clone()
    graph(y)
    assert torch.equal(first.relevance, kept[0]) and torch.equal(first.prediction, kept[1])


@gpu
def test_many_targets_from_one_replayed_forward_pass():
    model = encoder().cuda()
    x = torch.randn(1, 6, 64, device="cuda")
    graph = dlrp.Explainer(model, cuda_graph=True)
    for target, found in enumerate(graph.each(x, targets=range(9))):
        alone = dlrp.explain(model, x, target=target)
        torch.testing.assert_close(found.relevance, alone.relevance, rtol=1e-4, atol=1e-6)


@gpu
def test_explanations_between_the_targets_of_another():
    model = encoder().cuda()
    x, y = torch.randn(2, 1, 6, 64, device="cuda")
    graph = dlrp.Explainer(model, cuda_graph=True)
    for (target, a), b in zip(enumerate(graph.each(x, targets=[0, 1, 2])), graph.each(y, targets=[2, 1, 0])):
        torch.testing.assert_close(a.relevance, dlrp.explain(model, x, target=target).relevance, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(
            b.relevance, dlrp.explain(model, y, target=2 - target).relevance, rtol=1e-4, atol=1e-6
        )


@gpu
def test_new_weights_in_place_and_moved():
    model = encoder().cuda()
    graph = dlrp.Explainer(model, cuda_graph=True)
    x = torch.randn(1, 6, 64, device="cuda")
    graph(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    torch.testing.assert_close(graph(x).relevance, dlrp.explain(model, x).relevance, rtol=1e-4, atol=1e-6)
    for module in model.modules():  # other memory: the capture must not be used
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach() * 1.1)
    torch.testing.assert_close(graph(x).relevance, dlrp.explain(model, x).relevance, rtol=1e-4, atol=1e-6)


@gpu
def test_a_model_that_looks_at_its_values_cannot_be_captured_and_works_afterwards():
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            return self.linear(x) * (1.0 if x.sum().item() > 0 else 2.0)

    model, x = Looks().cuda(), torch.randn(1, 4, device="cuda")
    with pytest.raises(dlrp.CaptureError, match=r"Looks cannot be captured.*leave out cuda_graph"):
        dlrp.Explainer(model, cuda_graph=True)(x)
    assert torch.isfinite(dlrp.explain(model, x).relevance).all()


@gpu
def test_token_ids_and_a_bounded_number_of_captures():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50)
    model = transformers.GPT2LMHeadModel(config).eval().cuda()
    graph = dlrp.Explainer(model, cuda_graph=True)
    for length in range(3, 14):
        ids = torch.randint(0, 50, (1, length), device="cuda")
        a, b = dlrp.explain(model, input_ids=ids), graph(input_ids=ids)
        torch.testing.assert_close(b.relevance, a.relevance, rtol=1e-3, atol=1e-6)
    assert len(graph.captures) == 8


@gpu
def test_a_zero_output_is_an_error_and_the_capture_stays_good():
    model = nn.Linear(3, 2, bias=False).cuda()
    graph = dlrp.Explainer(model, cuda_graph=True)
    good = torch.ones(1, 3, device="cuda")
    graph(good)
    with pytest.raises(dlrp.ZeroOutputError):
        graph(torch.zeros(1, 3, device="cuda"), target=0)
    torch.testing.assert_close(graph(good, target=0).relevance, dlrp.explain(model, good, target=0).relevance)

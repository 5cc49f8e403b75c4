"""Explanations replayed as CUDA graphs equal eager ones; what cannot be captured says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp
from dynamiclrp.uploads import Uploads

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
    with pytest.raises(
        dlrp.CaptureError, match=r"Looks cannot be captured.*at test_cuda_graph.py:\d+ .*leave out cuda_graph"
    ):
        dlrp.Explainer(model, cuda_graph=True)(x)
    assert torch.isfinite(dlrp.explain(model, x).relevance).all()


class Constants(nn.Module):
    """Makes constants on the CPU in every call, in all the ways that models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        device = x.device
        x = self.linear(x) * torch.tensor([1.0, 2.0, 3.0, 4.0], device=device) + torch.arange(4).to(device, x.dtype)
        x = x * x.new_tensor([[0.5], [0.25]]) + torch.as_tensor([1, 0, 1, 0], device=device)
        x = torch.where(x > 0, x, torch.tensor(0.125))
        x = x[:, torch.tensor([3, 1, 0, 2])]
        mask = torch.zeros(2, 4, device=device)
        mask[:, 1:3] = torch.tensor([0.5, 0.75])
        return x * (1 + mask) + torch.eye(4)[:2].double().to(x)


def test_counting_what_is_copied_changes_nothing():
    model, x = Constants().eval(), torch.randn(2, 4)
    with Uploads():
        found = dlrp.explain(model, x)
    assert torch.equal(found.relevance, dlrp.explain(model, x).relevance)


class Draws(nn.Linear):
    """A constant from the CPU, and noise where it is asked for."""

    def __init__(self, noisy: bool) -> None:
        super().__init__(4, 3)
        self.noisy = noisy

    def forward(self, x):
        more = torch.rand(4) if self.noisy else torch.tensor([1.0, float("nan"), 2.0, 0.0]).nan_to_num()
        return super().forward(x + more.to(x.device, x.dtype))


@pytest.mark.parametrize("noisy", [False, True])
def test_constants_that_are_none_are_noticed(noisy, monkeypatch):
    monkeypatch.setattr("dynamiclrp.uploads._is_gpu", lambda device: device is not None)  # casts count as copies
    uploads, model = Uploads(), Draws(noisy).double()
    for _ in range(2):
        with uploads:
            dlrp.explain(model, torch.ones(1, 4, dtype=torch.float64))
    assert (4,) in [tuple(copied.shape) for copied in uploads._copied]
    if noisy:
        with pytest.raises(dlrp.CaptureError, match=r"Draws copies other numbers from the CPU.*leave out cuda_graph"):
            uploads.reserve("Draws")
    else:
        monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **kwargs: torch.zeros(*size, **kwargs))
        uploads.reserve("Draws")
        assert len(uploads._memory) > 4 * 8


@gpu
def test_a_model_that_draws_on_the_cpu_is_refused():
    x = torch.randn(1, 4, device="cuda")
    with pytest.raises(dlrp.CaptureError, match="Draws copies other numbers from the CPU"):
        dlrp.Explainer(Draws(True).cuda(), cuda_graph=True)(x)
    assert dlrp.Explainer(Draws(False).cuda(), cuda_graph=True)(x).relevance.isfinite().all()


def test_what_is_kept_for_a_graph_has_its_layout_and_a_place_of_its_own():
    uploads = Uploads()
    uploads._memory = torch.empty(4096, dtype=torch.uint8)
    tensors = [
        torch.randn(3, 4).T, torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(1, 5).expand(4, 5),
        torch.tensor(2.5, dtype=torch.float64), torch.arange(7)[::2], torch.tensor([True, False]), torch.empty(0, 3),
    ]  # fmt: skip
    held = [uploads._pinned(tensor) for tensor in tensors]  # one after the other
    for tensor, kept in zip(tensors, held):
        assert torch.equal(kept, tensor) and kept.dtype == tensor.dtype
        assert kept.stride() == tensor.clone().stride()
    with pytest.raises(dlrp.CaptureError, match=r"over 4,096 bytes.*leave out cuda_graph"):
        uploads._pinned(torch.zeros(4096))


@gpu
@pytest.mark.parametrize("preset", ["default", "dynamic"])
def test_constants_from_the_cpu_are_part_of_the_graph(preset):
    model = Constants().cuda().eval()
    eager, graph = dlrp.Explainer(model, preset), dlrp.Explainer(model, preset, cuda_graph=True)
    for _ in range(3):
        x = torch.randn(2, 4, device="cuda")
        junk = [torch.full((64,), 7.0).pin_memory() for _ in range(8)]  # nobody else may write where they are kept
        torch.testing.assert_close(graph(x).relevance, eager(x).relevance)
        del junk


@gpu
def test_a_model_that_predicts_otherwise_while_it_is_captured():
    class Sees(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2 if torch.cuda.is_current_stream_capturing() else 1)

    model, x = Sees(4, 3).cuda(), torch.randn(1, 4, device="cuda")
    graph = dlrp.Explainer(model, cuda_graph=True)
    with pytest.raises(dlrp.CaptureError, match=r"Sees predicts otherwise as a CUDA graph.*leave out cuda_graph"):
        graph(x)
    assert not graph.captures


@gpu
def test_a_model_that_fails_while_it_is_captured():
    class Fails(nn.Linear):
        def forward(self, x):
            if torch.cuda.is_current_stream_capturing():
                raise ValueError("an attention mask of another size")
            return super().forward(x)

    model, x = Fails(4, 3).cuda(), torch.randn(1, 4, device="cuda")
    wanted = r"Fails cannot be captured.*ValueError: an attention mask of another size at test_cuda_graph.py:\d+ "
    with pytest.raises(dlrp.CaptureError, match=wanted):
        dlrp.Explainer(model, cuda_graph=True)(x)
    assert torch.isfinite(dlrp.explain(model, x).relevance).all()
    assert dlrp.Explainer(nn.Linear(4, 3).cuda(), cuda_graph=True)(x).relevance.isfinite().all()


@gpu
def test_noise_is_no_reason_to_refuse():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.Linear(64, 3)).cuda()
    with pytest.warns(dlrp.TrainingModeWarning):
        assert dlrp.Explainer(model, cuda_graph=True)(torch.randn(8, 64, device="cuda")).relevance.isfinite().all()


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

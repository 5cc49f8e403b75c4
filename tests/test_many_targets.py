"""Many targets of one input: one forward pass, and the same numbers as one explanation each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp
from dynamiclrp.coverage.case import mend_torchvision


class Counting(nn.Module):
    """A model that counts its forward passes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.passes = model, 0

    def forward(self, x):
        self.passes += 1
        return self.model(x)


def attention_net() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, "gelu", batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(body, nn.Flatten(), nn.Linear(16 * 5, 7)).eval(), torch.randn(2, 5, 16)


def conv_net() -> tuple[nn.Module, torch.Tensor]:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 7),
    )  # fmt: skip
    return net.eval(), torch.randn(2, 3, 12, 12)


@pytest.mark.parametrize("preset", [name for name in dlrp.PRESETS if name != "epsilon-gamma-box"])
@pytest.mark.parametrize("build", [attention_net, conv_net])
@pytest.mark.parametrize("at_once", [1, 3])
def test_targets_together_equal_targets_alone(build, preset, at_once):
    torch.manual_seed(1)
    net, x = build()
    counting = Counting(net)
    explainer = dlrp.Explainer(counting, preset)
    explainer(x)  # a first call may have to learn that constants must be recorded
    counting.passes = 0
    targets = [0, 3, [1, 2], (4,), None, lambda logits: logits[:, 1] - logits[:, 2]]
    together = list(explainer.each(x, targets=targets, at_once=at_once))
    assert counting.passes == 1
    for target, found in zip(targets, together):
        alone = explainer(x, target=target)
        scale = alone.relevance.abs().max().item()
        torch.testing.assert_close(found.relevance, alone.relevance, rtol=1e-4, atol=1e-5 * scale)
        torch.testing.assert_close(found.seed, alone.seed)
        assert found.target is target


def test_operations_that_cannot_be_batched_are_explained_one_by_one():
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, s):
            return torch.from_numpy(s.numpy() * 2)  # no batch can pass

    class Net(nn.Module):
        def forward(self, x):
            return Odd.apply(x) @ torch.arange(6.0).reshape(2, 3)

    a, b = dlrp.explain(Net(), torch.tensor([[1.0, 2.0]]), targets=[1, 2], on_missing="gradient")
    torch.testing.assert_close(a.relevance, torch.tensor([[2.0, 16.0]]))
    torch.testing.assert_close(b.relevance, torch.tensor([[4.0, 20.0]]))


def test_a_real_model_layers_and_tokens():
    mend_torchvision()
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=40,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 40, (1, 6))
    targets = [(position, 7) for position in range(6)]
    together = dlrp.explain(model, input_ids=ids, targets=targets, layers=["model.layers.0"])
    for target, found in zip(targets, together):
        alone = dlrp.explain(model, input_ids=ids, target=target, layers=["model.layers.0"])
        torch.testing.assert_close(found.relevance, alone.relevance, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.layers["model.layers.0"], alone.layers["model.layers.0"], rtol=1e-4, atol=1e-6)
        assert (
            found.relevance[0, target[0] + 1 :].abs().max() == 0 if target[0] < 5 else True
        )  # nothing from the future


def test_bad_targets():
    net, x = conv_net()
    with pytest.raises(dlrp.TargetError, match="out of range"):
        dlrp.explain(net, x, targets=[0, 99])
    with pytest.raises(ValueError, match="leave out target="):
        dlrp.explain(net, x, target=1, targets=[0])
    with pytest.raises(ValueError, match="at_once=0"):
        list(dlrp.Explainer(net).each(x, targets=[0], at_once=0))
    assert dlrp.explain(net, x, targets=[]) == []


def test_a_target_that_is_zero_is_named():
    net = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    with pytest.raises(dlrp.ZeroOutputError, match="target 1"):
        dlrp.explain(net, torch.ones(1, 2), targets=[0, 1])

"""On a CUDA device: the same relevance as on the CPU, for kernels that exist only there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp
from dynamiclrp.presets import PRESETS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def exact():
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    yield
    for backend, allowed in zip(backends, before):
        backend.allow_tf32 = allowed


class Last(nn.Module):
    """The last state of a recurrent layer, as scores."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.LazyLinear(3)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


@pytest.mark.parametrize("preset", ["default", "attnlrp", "epsilon", "dynamic"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind, preset):
    torch.manual_seed(0)
    model, x = Last(kind(4, 5, num_layers=2, bidirectional=True, batch_first=True)).eval(), torch.randn(2, 6, 4)
    with torch.no_grad():
        model(x)
    there = dlrp.explain(model, x, preset=preset, target=1).relevance
    here = dlrp.explain(model.cuda(), x.cuda(), preset=preset, target=1).relevance
    torch.testing.assert_close(here.cpu(), there, rtol=1e-3, atol=1e-5 * there.abs().max().item())


@pytest.mark.parametrize("activation", [nn.GELU(), nn.GELU("tanh"), nn.SiLU()])
def test_activations_in_one_kernel(activation):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), activation, nn.Linear(8, 3)), torch.randn(5, 6)
    there = dlrp.explain(model, x, preset="attnlrp", target=0).relevance
    here = dlrp.explain(model.cuda(), x.cuda(), preset="attnlrp", target=0).relevance
    torch.testing.assert_close(here.cpu(), there, rtol=1e-4, atol=1e-6)


class Block(nn.Module):
    """Convolution and batch norm, a residual sum, a gate, attention: every rule that has a kernel of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.conv = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.norm, self.qkv = nn.LayerNorm(8), nn.Linear(8, 24)
        self.gate, self.up, self.head = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, x):
        x = self.stem(x)
        x = torch.relu(x + self.conv(x)).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head((nn.functional.silu(self.gate(x)) * self.up(x)).mean(1))


def block() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = Block().eval()
    for norm in (model.stem[1], model.conv[1]):
        nn.init.normal_(norm.weight, 1, 0.5)
        nn.init.normal_(norm.bias, 0, 0.3)
        norm.running_mean.normal_(0, 0.3)
        norm.running_var.uniform_(0.5, 2)
    return model, torch.randn(2, 3, 6, 6)


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "epsilon-gamma-box"])  # it asks for bounds
def test_every_preset(preset):
    model, x = block()
    there = dlrp.explain(model, x, preset=preset, target=1).relevance
    model.cuda()
    here = dlrp.explain(model, x.cuda(), preset=preset, target=1).relevance
    scale = there.abs().max().item()
    torch.testing.assert_close(here.cpu(), there, rtol=1e-3, atol=2e-5 * scale)
    again = dlrp.Explainer(model, preset, cuda_graph=True)(x.cuda(), target=1).relevance
    torch.testing.assert_close(again, here, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "epsilon-gamma-box"])
@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_that_is_one_node_only_there(affine, preset):
    torch.manual_seed(0)
    norm = nn.RMSNorm(6, elementwise_affine=affine)
    model, x = nn.Sequential(nn.Linear(5, 6), norm, nn.Linear(6, 3)).double(), torch.randn(2, 4, 5).double()
    if affine:
        nn.init.normal_(norm.weight)
    there = dlrp.explain(model, x, preset=preset, target=lambda y: y.sum((1, 2)))
    here = dlrp.explain(model.cuda(), x.cuda(), preset=preset, target=lambda y: y.sum((1, 2)))
    assert "FusedRmsNorm" in {step.name for step in here.plan.steps} - {step.name for step in there.plan.steps}
    torch.testing.assert_close(here.relevance.cpu(), there.relevance)


@pytest.mark.parametrize("preset", ["attnlrp", "default", "gamma", "dynamic"])
def test_half_precision_is_near(preset):
    model, x = block()
    there = dlrp.explain(model, x, preset=preset, target=1).relevance.flatten()
    here = dlrp.explain(model.cuda().bfloat16(), x.cuda().bfloat16(), preset=preset, target=1).relevance
    assert torch.corrcoef(torch.stack([there, here.cpu().float().flatten()]))[0, 1] > 0.98


def test_targets_of_a_batched_backward_pass():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, "gelu", batch_first=True, norm_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(80, 7))
    model, x = model.eval().cuda(), torch.randn(1, 5, 16, device="cuda")
    for target, found in enumerate(dlrp.explain(model, x, targets=range(7))):
        torch.testing.assert_close(
            found.relevance, dlrp.explain(model, x, target=target).relevance, rtol=1e-3, atol=1e-6
        )

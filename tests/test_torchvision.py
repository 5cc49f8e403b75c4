"""C++ functions of torchvision, known by the name that autograd gives them: the real ones where they load, and a stand-in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dynamiclrp as dlrp
from dynamiclrp.capture import cpp_function


def gaussian(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def test_cpp_functions_are_told_apart_by_name():
    assert cpp_function("torch::autograd::CppNode<vision::ops::(anonymous namespace)::DeformConv2dFunction>") == (
        "DeformConv2dFunctionBackward"
    )
    assert cpp_function("torch::autograd::CppNode<Fused>") == "FusedBackward"
    assert cpp_function("torch::jit::(anonymous namespace)::DifferentiableGraphBackward") is None


def deformed(x: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    """A modulated deformable 3x3 convolution (padding 1), sampled tap by tap: the definition, written out."""
    h, w = x.shape[2:]
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    total = bias.reshape(1, -1, 1, 1)
    for tap in range(9):
        dy, dx = tap // 3 - 1, tap % 3 - 1
        y_at = rows + dy + offset[:, 2 * tap]
        x_at = columns + dx + offset[:, 2 * tap + 1]
        grid = torch.stack([2 * x_at / (w - 1) - 1, 2 * y_at / (h - 1) - 1], -1)
        sampled = F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=True)
        total = total + torch.einsum("oc,nchw->nohw", weight[:, :, dy + 1, dx + 1], sampled * mask[:, tap : tap + 1])
    return total


class DeformConv2dFunction(torch.autograd.Function):
    """Stands for torchvision's C++ function of this name, whose operands it has in the same order."""

    @staticmethod
    def forward(ctx, x, weight, offset, mask, bias):
        ctx.save_for_backward(x, weight, offset, mask, bias)
        return deformed(x, weight, offset, mask, bias)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            given = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            return torch.autograd.grad(deformed(*given), given, grad)


class Deformable(nn.Module):
    """Offsets and mask come from the picture itself, as in DCNv2."""

    def __init__(self, function, steered: bool = True) -> None:
        super().__init__()
        self.function, self.steered = function, steered
        self.steer, self.head = nn.Conv2d(3, 27, 3, padding=1), nn.Linear(4, 2)
        self.weight, self.bias = nn.Parameter(gaussian(4, 3, 3, 3, seed=1)), nn.Parameter(gaussian(4, seed=2))

    def forward(self, x: Tensor) -> Tensor:
        offset, mask = self.steer(x).split([18, 9], 1)
        offset, mask = offset if self.steered else offset.detach(), mask if self.steered else mask.detach()
        return self.head(F.relu(self.function(x, self.weight, offset, mask.sigmoid(), self.bias)).mean((2, 3)))


def real(name: str):
    """torchvision's own C++ operator, where its build fits the torch that is installed."""
    ops = pytest.importorskip("torchvision.ops", exc_type=Exception)
    try:
        getattr(torch.ops.torchvision, name)
    except (AttributeError, RuntimeError) as why:
        pytest.skip(f"torchvision's operators do not load here: {why}")
    return getattr(ops, name)


def own_deform_conv2d(x: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    return real("deform_conv2d")(x, offset, weight, bias, padding=1, mask=mask)


@pytest.mark.parametrize(
    "function", [DeformConv2dFunction.apply, own_deform_conv2d], ids=["stand-in", "torchvision's own"]
)
def test_a_deformable_convolution_hands_all_to_its_input(function):
    """What only steers (offsets, mask) takes nothing: as if both were constants, written out tap by tap."""
    torch.manual_seed(0)
    model, written = Deformable(function).double().eval(), Deformable(deformed, steered=False).double().eval()
    written.load_state_dict(model.state_dict())
    x = gaussian(2, 3, 5, 6, seed=3, dtype=torch.float64)
    assert dlrp.inspect(model, x).coverage == 1.0
    for preset in ("attnlrp", "cp-lrp"):
        expected = dlrp.explain(written, x, preset=preset).relevance
        assert error(dlrp.explain(model, x, preset=preset).relevance, expected) < 1e-9
    gradient = dlrp.explain(model, x, preset="gradient").relevance
    assert error(gradient, expected) > 1e-3  # in which the offsets do take part


@pytest.mark.parametrize("name", ["roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool"])
def test_torchvision_s_own_regions_hand_all_to_the_features(name):
    regions = real(name)
    x = gaussian(2, 8, 9, 9, seed=1, dtype=torch.float64).requires_grad_()
    boxes = torch.tensor([[0, 1.0, 1.0, 6.0, 7.0], [1, 0.0, 2.0, 5.0, 8.0]], dtype=torch.float64)
    y = regions(x, boxes, 2)
    for preset in ("attnlrp", "default", "epsilon", "gradient"):
        (found,) = dlrp.relevance(y, x, seed=y.detach(), preset=preset, retain_graph=True)
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        torch.testing.assert_close(found, x.detach() * gradient, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.sum(), y.detach().sum(), rtol=1e-9, atol=1e-12)

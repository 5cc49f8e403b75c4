"""Functions with a backward of their own that popular libraries carry, in Python and in C++, have rows of their own."""

# isort: off
import oracles  # noqa: F401  mends torchvision before transformers and timm import it

# isort: on
import pytest
import torch
from timm.layers import activations_me
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.bloom.modeling_bloom import GeLUFunction
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import SqrtBoundDerivative
from transformers.models.sew_d.modeling_sew_d import XSoftmax
from transformers.models.yoso.modeling_yoso import YosoCumulation

import dynamiclrp as dlrp
from contract import holds
from models import gaussian
from oracles import error


def relevance(function, preset: str) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    head = nn.Linear(6, 3, dtype=torch.float64)
    (r,) = dlrp.relevance(head(function(x)), x, preset=preset)
    return r


def test_blooms_gelu_is_the_tanh_gelu():
    for preset in ("attnlrp", "dynamic", "epsilon"):
        expected = relevance(lambda x: F.gelu(x, approximate="tanh"), preset)
        torch.testing.assert_close(relevance(GeLUFunction.apply, preset), expected, rtol=1e-6, atol=1e-9)


def test_recurrent_gemmas_square_root_is_a_square_root():
    for preset in ("attnlrp", "dynamic"):
        expected = relevance(lambda x: torch.sqrt(x.exp()), preset)
        found = relevance(lambda x: SqrtBoundDerivative.apply(x.exp()), preset)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_a_custom_function_gets_a_row_in_one_line():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 3 * x**2 * grad

    dlrp.register("CubeBackward", "activation", ratio=lambda n: n.tensors[0] ** 2)
    try:
        for preset in ("attnlrp", "epsilon"):
            torch.testing.assert_close(relevance(Cube.apply, preset), relevance(lambda x: x**3, preset))
    finally:
        del dlrp.ops.OPS["CubeBackward"]


TIMM = {
    "swish_me": F.silu,
    "mish_me": F.mish,
    "hard_swish_me": F.hardswish,
    "hard_sigmoid_me": F.hardsigmoid,
    "hard_mish_me": lambda x: x * ((x + 2).clamp(0, 2) / 2),
}


@pytest.mark.parametrize("name", TIMM)
def test_timms_activations_are_those_of_torch(name):
    for preset in ("attnlrp", "dynamic", "gamma", "cp-lrp"):
        expected = relevance(TIMM[name], preset)
        torch.testing.assert_close(relevance(getattr(activations_me, name), preset), expected, rtol=1e-6, atol=1e-9)


MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0], [1, 0, 1, 1]])


class Masked(nn.Module):
    """Attention with a softmax of its own."""

    def __init__(self, softmax) -> None:
        super().__init__()
        self.softmax, self.head = softmax, nn.Linear(6, 3, dtype=torch.float64)
        nn.init.constant_(self.head.bias, 0.3)
        self.head.weight.data = gaussian(3, 6, seed=1, dtype=torch.float64)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.head(self.softmax(q @ k.mT) @ v).mean(1)


def test_debertas_softmax_is_a_masked_softmax():
    """One that weighs values, too: under cp-lrp and dynamic it takes nothing."""
    q, k, v = (gaussian(2, n, 6, seed=n, dtype=torch.float64) for n in (3, 4, 4))
    plain = Masked(lambda scores: scores.masked_fill(MASK == 0, -torch.inf).softmax(-1))
    found = holds(Masked(lambda scores: XSoftmax.apply(scores, MASK, -1)), {"q": q, "k": k, "v": v})
    for preset, relevances in found.items():
        expected = dlrp.explain(plain, q, k, v, preset=preset).relevances
        assert error(relevances["v"], expected["v"]) < 1e-9
        for name in ("q", "k"):
            if preset in ("cp-lrp", "dynamic"):
                assert not relevances[name].any() and not expected[name].any()
            else:
                assert error(relevances[name], expected[name]) < 1e-9


def test_yosos_attention_is_an_attention():
    """Half of its gradient to the values, a quarter to queries and keys (as its backward has it), as in fused attention."""
    q, k = (F.normalize(gaussian(2, n, 4, seed=n, dtype=torch.float64), dim=-1) for n in (3, 5))
    tensors = [t.requires_grad_() for t in (q, k, gaussian(2, 5, 6, seed=9, dtype=torch.float64))]
    masks = torch.ones(2, 3, dtype=torch.float64), torch.ones(2, 5, dtype=torch.float64)
    y = YosoCumulation.apply(*masks, *tensors, {"hash_code_len": 3})
    s = gaussian(*y.shape, seed=4, dtype=torch.float64)
    gradients = torch.autograd.grad(y, tensors, s, retain_graph=True)
    for preset, parts in (("attnlrp", (0.25, 0.25, 0.5)), ("cp-lrp", (0, 0, 1)), ("dynamic", (0, 0, 0.5))):
        found = dlrp.relevance(y, tensors, seed=y.detach() * s, preset=preset, retain_graph=True)
        for x, g, part, r in zip(tensors, gradients, parts, found, strict=True):
            torch.testing.assert_close(r, part * x.detach() * g, rtol=1e-9, atol=1e-9)

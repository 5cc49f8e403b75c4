"""Python `autograd.Function`s that popular libraries carry have rows of their own."""

# isort: off
import oracles  # noqa: F401  mends torchvision before transformers imports it

# isort: on
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.bloom.modeling_bloom import GeLUFunction
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import SqrtBoundDerivative

import dynamiclrp as dlrp


def relevance(function, preset: str) -> torch.Tensor:
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

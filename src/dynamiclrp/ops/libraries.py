"""Python `autograd.Function`s that popular libraries carry; their nodes are called after them."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .table import Kind, row


def _tanh_gelu_ratio(n: Any) -> Tensor:
    x = n.tensors[0]
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# transformers: BLOOM's GELU, RecurrentGemma's square root with a bounded derivative
row("GeLUFunctionBackward", Kind.ACTIVATION, forward=lambda n, x: F.gelu(x, approximate="tanh"), ratio=_tanh_gelu_ratio)
row("SqrtBoundDerivativeBackward", Kind.FUNCTION, forward=lambda n, x: x.sqrt())
# transformers: masked softmax of DeBERTa; operands: scores, mask
row("XSoftmaxBackward", Kind.SOFTMAX, forward=lambda n, x, mask: n.tensors[0], absent=lambda signature: (1,))
# transformers: YOSO's attention in expectation, whose weights are (1 - arccos(q·k)/π)^τ; the masks come first
row("YosoCumulationBackward", Kind.ATTENTION, factors=(2, 3, 4))
# timm: activations that keep only their input
row("SwishAutoFnBackward", Kind.ACTIVATION, forward=lambda n, x: F.silu(x), ratio=lambda n: n.tensors[0].sigmoid())
row("MishAutoFnBackward", Kind.ACTIVATION, forward=lambda n, x: F.mish(x),
    ratio=lambda n: torch.tanh(F.softplus(n.tensors[0])))  # fmt: skip
row("HardSwishAutoFnBackward", Kind.ACTIVATION, forward=lambda n, x: F.hardswish(x),
    ratio=lambda n: F.hardsigmoid(n.tensors[0]))  # fmt: skip
row("HardMishAutoFnBackward", Kind.ACTIVATION, forward=lambda n, x: x * (x + 2).clamp(0, 2) / 2,
    ratio=lambda n: (n.tensors[0] + 2).clamp(0, 2) / 2)  # fmt: skip
row("HardSigmoidAutoFnBackward", Kind.FUNCTION, forward=lambda n, x: F.hardsigmoid(x))
# torchvision, in C++: regions read off a map of features, which carries all; boxes only steer
row("ROIAlignFunctionBackward ROIPoolFunctionBackward PSROIAlignFunctionBackward PSROIPoolFunctionBackward",
    Kind.TRANSFORM, carriers=(0,))  # fmt: skip
# input, weight, offset, mask, bias: linear in its input, which carries all; the offsets and the mask only steer
row("DeformConv2dFunctionBackward", Kind.TRANSFORM, carriers=(0,), fills=True)
# peft: the weight of LoHa, a Hadamard product of two low-rank products of parameters
row("HadaWeightBackward HadaWeightCPBackward", Kind.STATISTIC)

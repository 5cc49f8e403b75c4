"""One sample per row of the op table, and more of them where parameters are odd.

A sample builds operands and calls one operation, so that the output's `grad_fn` is a node of the row's type. The
function's arguments are the node's operands, in the order of its edges (None: an optional operand left out); where
torch reshapes or casts an argument on the way, `operands` says what the node truly saw.

    sample("NegBackward0", signed((3, 4)), lambda x: -x)

To add an operation: a row in `dynamiclrp.ops`, a sample here. `ELSEWHERE` names the rows that have no sample, and why.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import dynamiclrp.ops

ROWS = frozenset(dynamiclrp.ops.OPS)  # before any test registers a row of its own
aten = torch.ops.aten

Make = Callable[[torch.dtype], tuple[Tensor | None, ...]]


@dataclass(frozen=True)
class Sample:
    """One call of one operation."""

    node: str
    make: Make  # dtype → operands
    function: Callable[..., Any]  # operands → output or outputs
    label: str = ""
    operands: Callable[..., Sequence[Any]] = lambda *operands: operands  # arguments → what the node saw
    frozen: tuple[int, ...] = ()  # operands that never require a gradient

    def __str__(self) -> str:
        return f"{self.node} {self.label}" if self.label else self.node

    def outputs(self, *operands: Tensor | None) -> tuple[Tensor, ...]:
        """The differentiable outputs."""
        made = self.function(*operands)
        made = (made,) if isinstance(made, Tensor) else tuple(made)
        return tuple(y for y in made if y.grad_fn is not None)


SAMPLES: dict[str, list[Sample]] = {}


def sample(node: str, make: Make, function: Callable[..., Any], label: str = "", **what: Any) -> None:
    SAMPLES.setdefault(node, []).append(Sample(node, make, function, label, **what))


def every() -> list[Sample]:
    """The samples of all rows; one whose row is gone is named by a test of its own."""
    return [each for node, samples in SAMPLES.items() if node in ROWS for each in samples]


# ---------------------------------------------------------------- operands


def draw(shape: tuple[int, ...], number: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Values of both signs, no smaller than 0.3 and no larger than 1.7, all different."""
    generator = torch.Generator().manual_seed(100 + number)
    magnitude = 0.3 + 1.4 * torch.rand(shape, generator=generator, dtype=torch.float64)
    sign = torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0)
    return (magnitude * sign).to(dtype)


def signed(*shapes: tuple[int, ...] | None) -> Make:
    return lambda dtype: tuple(None if shape is None else draw(shape, i, dtype) for i, shape in enumerate(shapes))


def positive(*shapes: tuple[int, ...]) -> Make:
    return lambda dtype: tuple(draw(shape, i, dtype).abs() for i, shape in enumerate(shapes))


def small(*shapes: tuple[int, ...]) -> Make:
    """Of both signs, no larger than 0.85."""
    return lambda dtype: tuple(draw(shape, i, dtype) / 2 for i, shape in enumerate(shapes))


def probabilities(*shapes: tuple[int, ...]) -> Make:
    return lambda dtype: tuple(draw(shape, i, dtype).sigmoid() for i, shape in enumerate(shapes))


def strided(*shapes: tuple[int, ...]) -> Make:
    """Operands whose memory lies in the opposite order of their dimensions."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(
            draw(shape[::-1], i, dtype).permute(*reversed(range(len(shape)))) for i, shape in enumerate(shapes)
        )

    return make


def integers(*values: Any) -> Tensor:
    return torch.tensor(values)


def other(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float64 else torch.float64


MASK = torch.tensor([[True, False, True, True], [False, True, True, False], [True, True, False, True]])
X = signed((3, 4))
XY = signed((3, 4), (3, 4))
IMAGE = signed((2, 3, 5, 6))

# ---------------------------------------------------------------- activations

sample("ReluBackward0", X, F.relu)
sample("ReluBackward0", X, lambda x: x.clone().relu_(), "in place")
sample("ReluBackward0", positive(()), F.relu, "of a number")
sample("ReluBackward0", strided((3, 4)), F.relu, "strided")
sample("GeluBackward0", X, F.gelu)
sample("GeluBackward0", X, lambda x: F.gelu(x, approximate="tanh"), "tanh")
sample("SiluBackward0", X, F.silu)
sample("SiluBackward0", X, lambda x: F.silu(x.clone(), inplace=True), "in place")
sample("MishBackward0", X, F.mish)
sample("HardswishBackward0", X, lambda x: F.hardswish(4 * x), operands=lambda x: (4 * x,))
sample("LeakyReluBackward0", X, lambda x: F.leaky_relu(x, 0.1))
sample("LeakyReluBackward0", X, lambda x: F.leaky_relu(x, -0.2), "negative slope")
sample("LeakyReluBackward1", X, lambda x: F.leaky_relu_(x.clone(), 0.1))
sample("PreluKernelBackward0", signed((2, 3, 4), (1, 3, 1)), aten._prelu_kernel)
sample("PreluKernelBackward0", signed((2, 3, 4), (3,)), F.prelu, "one slope a channel",
       operands=lambda x, w: (x, w.reshape(1, 3, 1)))  # fmt: skip
sample("HardtanhBackward0", X, F.hardtanh)
sample("HardtanhBackward0", X, lambda x: F.relu6(5 * x), "relu6", operands=lambda x: (5 * x,))
sample("HardtanhBackward0", X, lambda x: F.hardtanh(x, -0.2, 0.5), "of two bounds")
sample("HardtanhBackward0", X, lambda x: F.hardtanh(x, -2, 0), "not positive")
sample("HardtanhBackward0", X, lambda x: F.hardtanh(x, 0.1, 0.9), "positive")
sample("EluBackward0", X, lambda x: F.elu(x, 0.7))
sample("EluBackward0", X, F.selu, "selu")
sample("CeluBackward0", X, lambda x: F.celu(x, 0.8))
sample("TanhBackward0", X, torch.tanh)
sample("TanhBackward0", X, lambda x: x.clone().tanh_(), "in place")
sample("ErfBackward0", X, torch.erf)
sample("SinBackward0", X, torch.sin)
sample("AbsBackward0", X, torch.abs)
sample("PowBackward0", X, lambda x: x.pow(3))
sample("PowBackward0", X, lambda x: x**2, "square")
sample("PowBackward0", positive((3, 4)), lambda x: x**0.5, "root")
sample("PowBackward0", X, lambda x: x.pow(-1), "inverse")
sample("ThresholdBackward0", X, lambda x: F.threshold(x, 0.5, 0.0))
sample("ThresholdBackward0", X, lambda x: F.threshold(x, 0.5, -0.3), "other value")
sample("ClampBackward1", X, lambda x: x.clamp(-0.5, 0.8))
sample("ClampBackward1", X, lambda x: x.clamp(min=-0.5), "from below")
sample("ClampBackward0", signed((3, 4), (4,), (3, 1)), lambda x, a, b: x.clamp(a.abs() - 1.5, b.abs() + 0.2),
       operands=lambda x, a, b: (x, a.abs() - 1.5, b.abs() + 0.2))  # fmt: skip
sample("ClampMinBackward0", X, lambda x: x.clamp_min(-0.5))
sample("ClampMaxBackward0", X, lambda x: x.clamp_max(0.8))
sample("Log1PBackward0", positive((3, 4)), torch.log1p)
sample("Expm1Backward0", X, torch.expm1)

# ---------------------------------------------------------------- functions that are not 0 at 0

sample("SigmoidBackward0", X, torch.sigmoid)
sample("SigmoidBackward0", X, lambda x: x.clone().sigmoid_(), "in place")
sample("HardsigmoidBackward0", X, lambda x: F.hardsigmoid(3 * x), operands=lambda x: (3 * x,))
sample("LogSigmoidBackward0", X, F.logsigmoid)
sample("SoftplusBackward0", X, lambda x: F.softplus(x, beta=2.0, threshold=3.0))
sample("ExpBackward0", X, torch.exp)
sample("LogBackward0", positive((3, 4)), torch.log)
sample("CosBackward0", X, torch.cos)
sample("SqrtBackward0", positive((3, 4)), torch.sqrt)
sample("RsqrtBackward0", positive((3, 4)), torch.rsqrt)
sample("ReciprocalBackward0", X, torch.reciprocal)

for dim in (-1, 0, 1):
    sample("SoftmaxBackward0", signed((2, 3, 4)), lambda x, dim=dim: x.softmax(dim), f"dim {dim}")
    sample("LogSoftmaxBackward0", signed((2, 3, 4)), lambda x, dim=dim: x.log_softmax(dim), f"dim {dim}")
sample("SoftmaxBackward0", X, lambda x: torch.softmax(x, -1, dtype=other(x.dtype)), "cast",
       operands=lambda x: (x.to(other(x.dtype)),))  # fmt: skip
sample("SafeSoftmaxBackward0", X, lambda x: torch._safe_softmax(x, -1))
sample("LogsumexpBackward0", X, lambda x: x.logsumexp(-1))
sample("LogsumexpBackward0", signed((2, 3, 4)), lambda x: x.logsumexp((0, -1), keepdim=True), "dims, keepdim")

# ---------------------------------------------------------------- statistics

sample("VarBackward0", X, lambda x: x.var(-1))
sample("VarBackward0", X, lambda x: x.var(), "all")
sample(
    "VarBackward0", signed((2, 3, 4)), lambda x: x.var((-1, 0), correction=0, keepdim=True), "dims, keepdim, correction"
)
sample("StdBackward0", X, lambda x: x.std(-1, keepdim=True))
sample("StdBackward0", signed((2, 3, 4)), lambda x: x.std((0, 1), unbiased=False), "dims, biased")
sample("VarMeanBackward0", X, lambda x: torch.var_mean(x, -1, keepdim=True))
sample("StdMeanBackward0", X, lambda x: torch.std_mean(x, 0))
sample("LinalgVectorNormBackward0", X, lambda x: torch.linalg.vector_norm(x, 2, -1, keepdim=True))
sample("LinalgVectorNormBackward0", X, lambda x: torch.linalg.vector_norm(x), "all")
sample("LinalgVectorNormBackward0", signed((2, 3, 4)), lambda x: torch.linalg.vector_norm(x, 3, (0, -1)), "ord 3, dims")
sample("NormBackward0", X, lambda x: aten.norm.Scalar(x, 2))
sample("NormBackward1", X, lambda x: aten.norm.ScalarOpt_dim(x, 3, [-1], True))
sample("NormBackward2", X, lambda x: aten.norm.ScalarOpt_dtype(x, 2, dtype=x.dtype))

# ---------------------------------------------------------------- fused attention

QKV = signed((2, 2, 5, 4), (2, 2, 6, 4), (2, 2, 6, 4))
CAUSAL = signed((2, 2, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4))
sample("ScaledDotProductFlashAttentionForCpuBackward0", QKV, F.scaled_dot_product_attention)
sample("ScaledDotProductFlashAttentionForCpuBackward0", CAUSAL,
       lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7), "causal, scaled")  # fmt: skip
sample("ScaledDotProductFlashAttentionForCpuBackward0", QKV,
       lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=draw((5, 6), 9, q.dtype)), "bias")  # fmt: skip
sample("ScaledDotProductFlashAttentionForCpuBackward0", QKV,
       lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(5, 6).tril().bool()), "mask")  # fmt: skip

# ---------------------------------------------------------------- linear maps

sample("MmBackward0", signed((3, 4), (4, 5)), torch.mm)
sample("MmBackward0", strided((3, 4), (4, 5)), torch.mm, "strided")
sample("BmmBackward0", signed((2, 3, 4), (2, 4, 5)), torch.bmm)
sample("BmmBackward0", strided((2, 3, 4), (2, 4, 5)), torch.bmm, "strided")
sample("AddmmBackward0", signed((5,), (3, 4), (4, 5)), torch.addmm)
sample(
    "AddmmBackward0",
    signed((3, 5), (3, 4), (4, 5)),
    lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=-2),
    "beta, alpha",
)
sample("AddmmBackward0", signed((3, 1), (3, 4), (4, 5)), lambda c, a, b: torch.addmm(c, a, b, beta=3), "column, beta")
sample("AddmmBackward0", signed((3, 5), (3, 4), (4, 5)), lambda c, a, b: c.clone().addmm_(a, b, alpha=0.5), "in place")
sample("BaddbmmBackward0", signed((2, 3, 5), (2, 3, 4), (2, 4, 5)), torch.baddbmm)
sample(
    "BaddbmmBackward0",
    signed((1, 5), (2, 3, 4), (2, 4, 5)),
    lambda c, a, b: torch.baddbmm(c, a, b, beta=-1, alpha=0.3),
    "beta, alpha",
)
sample("MvBackward0", signed((3, 4), (4,)), torch.mv)
sample("DotBackward0", signed((4,), (4,)), torch.dot)


def convolution(
    label: str, x: tuple, w: tuple, bias: tuple | None, function: Callable[..., Tensor], **how: Any
) -> None:
    sample("ConvolutionBackward0", signed(x, w, bias), lambda x, w, b: function(x, w, b, **how), label)


convolution("2d", (2, 3, 5, 6), (4, 3, 3, 2), (4,), F.conv2d)
convolution("1d, strided, padded", (2, 3, 7), (4, 3, 3), (4,), F.conv1d, stride=2, padding=1)
convolution("1d, no bias", (2, 3, 7), (4, 3, 3), None, F.conv1d)
convolution(
    "2d, dilated, strided", (1, 2, 7, 8), (3, 2, 2, 3), (3,), F.conv2d, stride=(1, 2), dilation=(2, 1), padding=(1, 2)
)
convolution("2d, grouped", (2, 4, 5, 5), (6, 2, 3, 3), (6,), F.conv2d, groups=2)
convolution("2d, depthwise", (2, 4, 5, 5), (4, 1, 3, 3), None, F.conv2d, groups=4, padding=1)
convolution("2d, padding same", (1, 2, 5, 5), (3, 2, 3, 3), (3,), F.conv2d, padding="same")
convolution("3d", (1, 2, 4, 4, 5), (3, 2, 2, 3, 2), (3,), F.conv3d, stride=(1, 1, 2), padding=(0, 1, 0))
convolution("transposed 1d", (2, 3, 5), (3, 4, 3), (4,), F.conv_transpose1d, stride=2, padding=1, output_padding=1)
convolution(
    "transposed 2d",
    (1, 3, 4, 3),
    (3, 2, 2, 3),
    (2,),
    F.conv_transpose2d,
    stride=(2, 3),
    output_padding=(1, 2),
    dilation=(2, 1),
)
convolution("transposed 2d, grouped", (1, 4, 3, 3), (4, 2, 3, 3), None, F.conv_transpose2d, groups=2, padding=1)
convolution("transposed 3d", (1, 2, 3, 2, 3), (2, 3, 2, 2, 2), (3,), F.conv_transpose3d, stride=2)
sample("ConvolutionBackward0", strided((2, 3, 5, 6), (4, 3, 3, 2), (4,)), F.conv2d, "strided memory")

# ---------------------------------------------------------------- movement

sample("ViewBackward0", X, lambda x: x.view(2, 6))
sample("ViewBackward0", X, lambda x: x.view(2, -1, 3), "guessed size")
sample("ViewBackward0", X, lambda x: x.flatten(), "flatten")
sample("ViewBackward0", signed((1,)), lambda x: x.view(()), "to a number")
sample("UnsafeViewBackward0", X, lambda x: aten._unsafe_view(x, [2, 6]))
sample("ReshapeAliasBackward0", strided((2, 3, 4)), lambda x: aten._reshape_alias(x, [2, 3, 2, 2], [1, 2, 12, 6]))
sample("TBackward0", X, lambda x: x.t())
sample("TBackward0", signed((4,)), lambda x: x.t(), "of a vector")
sample("TransposeBackward0", signed((2, 3, 4)), lambda x: x.transpose(0, -1))
sample("TransposeBackward0", signed((2, 3, 4)), lambda x: x.mT, "mT")
sample("PermuteBackward0", signed((2, 3, 4)), lambda x: x.permute(-1, 0, -2))
sample("PermuteBackward0", signed((2, 3, 4)), lambda x: x.movedim(-1, 0), "movedim")
sample("ExpandBackward0", signed((3, 1)), lambda x: x.expand(3, 4))
sample("ExpandBackward0", signed((3, 1)), lambda x: x.expand(2, -1, 4), "a new dim, and -1")
sample("ExpandBackward0", signed(()), lambda x: x.expand(2, 3), "of a number")
sample("RepeatBackward0", X, lambda x: x.repeat(2, 1))
sample("RepeatBackward0", X, lambda x: x.repeat(2, 3, 1), "a new dim")
sample("SqueezeBackward0", signed((1, 3, 1, 4)), lambda x: x.squeeze())
sample("SqueezeBackward1", signed((3, 1, 4)), lambda x: x.squeeze(-2))
sample("SqueezeBackward1", X, lambda x: x.squeeze(0), "of nothing")
sample("SqueezeBackward2", signed((1, 3, 1, 4)), lambda x: x.squeeze((0, -2)))
sample("SqueezeBackward3", signed((1, 3, 1)), lambda x: x.clone().squeeze_())
sample("UnsqueezeBackward0", X, lambda x: x.unsqueeze(-1))
sample("UnsqueezeBackward0", X, lambda x: x.unsqueeze(-3), "at the front")
sample("AsStridedBackward0", X, lambda x: x.as_strided((2, 3), (4, 1), 1))
sample("AsStridedBackward0", X, lambda x: x.as_strided((3, 2, 2), (4, 1, 1)), "overlapping")
sample("AliasBackward0", X, aten.alias)
sample("CloneBackward0", X, torch.clone)
sample("CloneBackward0", strided((3, 4)), lambda x: x.contiguous(), "contiguous")
sample("LiftFreshBackward0", X, aten.lift_fresh)
sample("ToCopyBackward0", X, lambda x: x.to(other(x.dtype)))
sample("ToCopyBackward0", X, lambda x: x.to(x.dtype, copy=True, memory_format=torch.preserve_format), "same dtype")
sample("CopyBackwards", XY, lambda x, y: x.clone().copy_(y))
sample("CopyBackwards", signed((3, 4), (4,)), lambda x, y: x.clone().copy_(y), "broadcast")


def write(x: Tensor, y: Tensor, edit: Callable[[Tensor, Tensor], Any]) -> Tensor:
    whole = x.clone()
    edit(whole, y)
    return whole


sample("CopySlices", signed((3, 4), (2, 4)), lambda x, y: write(x, y, lambda z, y: z[1:].copy_(y)))
sample("CopySlices", signed((3, 4), (4,)), lambda x, y: write(x, y, lambda z, y: z[0].copy_(y)), "row")
sample("CopySlices", signed((3, 4), (3, 2)), lambda x, y: write(x, y, lambda z, y: z[:, ::2].add_(y)), "added to")
sample("SliceBackward0", X, lambda x: x[1:])
sample("SliceBackward0", X, lambda x: x[:, 1:-1], "negative end")
sample("SliceBackward0", X, lambda x: x[:, -3:-1], "negative start and end")
sample("SliceBackward0", signed((3, 9)), lambda x: x[:, 1:-2:3], "step")
sample("SliceBackward0", X, lambda x: x.narrow(-1, 1, 2), "narrow")
sample("SliceBackward0", X, lambda x: aten.slice.Tensor(x, -1, -3, 100, 2), "far end, negative dim")
sample("SelectBackward0", X, lambda x: x[1])
sample("SelectBackward0", signed((2, 3, 4)), lambda x: x.select(-1, -2), "negative dim and index")
sample("IndexBackward0", X, lambda x: x[integers(0, 2, 2)])
sample("IndexBackward0", signed((2, 3, 4)), lambda x: aten.index.Tensor(x, [None, integers(0, 2), None]), "None")
sample("IndexBackward0", signed((2, 3, 4)), lambda x: x[integers(0, 1), :, integers(3, 1)], "two tensors apart")
sample("IndexBackward0", X, lambda x: x[integers([0], [2]), integers(1, 3, 3)], "two tensors that broadcast")
sample("IndexBackward0", X, lambda x: x[MASK], "mask")
sample("IndexBackward0", X, lambda x: x[MASK[:, 0], integers(-1, 0)], "mask and tensor")
sample("IndexSelectBackward0", X, lambda x: x.index_select(-1, integers(3, 0, 0)))
sample("GatherBackward0", X, lambda x: x.gather(-1, integers([0, 0], [3, 1], [2, 2])))
sample("GatherBackward0", X, lambda x: torch.take_along_dim(x, integers([1, 2, 0, 0]), 0), "take_along_dim")
sample("EmbeddingBackward0", signed((7, 4)), lambda w: F.embedding(integers([1, 6], [1, 0]), w))
sample("EmbeddingBackward0", signed((7, 4)), lambda w: F.embedding(integers(1, 0, 6), w, padding_idx=0), "padding")
sample("CatBackward0", signed((3, 2), (3, 4)), lambda a, b: torch.cat((a, b), -1))
sample("CatBackward0", signed((1, 4), (3, 4), (2, 4)), lambda *xs: torch.cat(xs), "three")
sample("StackBackward0", XY, lambda a, b: torch.stack((a, b), -2))
sample("SplitBackward0", signed((3, 7)), lambda x: x.split(3, -1))
sample("SplitBackward0", signed((7, 2)), lambda x: x.chunk(3), "chunk")
sample("SplitWithSizesBackward0", signed((3, 7)), lambda x: x.split([1, 4, 2], -1))
sample("UnbindBackward0", X, lambda x: x.unbind(-1))
sample("UnsafeSplitBackward0", signed((3, 7)), lambda x: torch.unsafe_split(x, 3, -1))
sample("FlipBackward0", signed((2, 3, 4)), lambda x: x.flip((0, -1)))
sample("RollBackward0", X, lambda x: x.roll(1, -1))
sample("RollBackward0", X, lambda x: x.roll((1, -2), (0, -1)), "two dims")
sample("RollBackward0", X, lambda x: x.roll(5), "flattened")
sample("UnfoldBackward0", signed((3, 7)), lambda x: x.unfold(-1, 3, 2))
sample("DiagonalBackward0", signed((2, 3, 4)), lambda x: x.diagonal(1, -1, 0))
sample("TrilBackward0", X, lambda x: x.tril(1))
sample("TriuBackward0", X, lambda x: x.triu(-1))
sample("ConstantPadNdBackward0", X, lambda x: F.pad(x, (1, 2)))
sample("ConstantPadNdBackward0", X, lambda x: F.pad(x, (-1, 2, 0, 1), value=0.7), "cropped, value")
sample("ReflectionPad1DBackward0", signed((2, 3, 4)), lambda x: F.pad(x, (2, 1), mode="reflect"))
sample("ReflectionPad2DBackward0", IMAGE, lambda x: F.pad(x, (2, 1, 0, 3), mode="reflect"))
sample("ReplicationPad2DBackward0", IMAGE, lambda x: F.pad(x, (2, 1, 0, 3), mode="replicate"))
sample("MaskedFillBackward0", X, lambda x: x.masked_fill(MASK, 0.0))
sample("MaskedFillBackward0", X, lambda x: x.masked_fill(MASK[0], -2.5), "broadcast, value")
sample("MaskedSelectBackward0", X, lambda x: x.masked_select(MASK))
sample("MaskedSelectBackward0", X, lambda x: x.masked_select(MASK[0]), "broadcast")
sample("WhereBackward0", XY, lambda a, b: torch.where(MASK, a, b))
sample("WhereBackward0", signed((3, 1), ()), lambda a, b: torch.where(MASK, a, b), "broadcast")
sample("IndexPutBackward0", signed((3, 4), (2, 4)), lambda x, v: x.index_put((integers(2, 0),), v))
sample(
    "IndexPutBackward0",
    signed((3, 4), (3, 4)),
    lambda x, v: x.index_put((integers(2, 0, 2),), v, accumulate=True),
    "accumulated",
)
sample(
    "IndexPutBackward0",
    signed((3, 4), ()),
    lambda x, v: write(x, v, lambda z, v: z.__setitem__(MASK, v)),
    "mask, in place",
)
sample("ScatterBackward0", signed((3, 4), (3, 2)), lambda x, v: x.scatter(-1, integers([0, 1], [3, 1], [2, 0]), v))
sample("ScatterBackward1", X, lambda x: x.scatter(-1, integers([0, 1], [3, 1], [2, 0]), 0.5))
sample("SelectScatterBackward0", signed((3, 4), (3,)), lambda x, v: x.select_scatter(v, -1, -2))
sample("SliceScatterBackward0", signed((3, 7), (3, 2)), lambda x, v: x.slice_scatter(v, -1, 1, -2, 2))
sample("PixelShuffleBackward0", signed((2, 8, 3, 2)), lambda x: F.pixel_shuffle(x, 2))
sample("NativeDropoutBackward0", signed((4, 5)), lambda x: torch.native_dropout(x, 0.4, True))
sample("MaxBackward0", X, lambda x: x.max(-1))
sample("MaxBackward0", signed((2, 3, 4)), lambda x: x.max(1, keepdim=True), "keepdim")
sample("MinBackward0", X, lambda x: x.min(-1))
sample("MinBackward0", signed((2, 3, 4)), lambda x: x.min(-2, keepdim=True), "keepdim")
sample("MaxBackward1", X, lambda x: x.max())
sample("MinBackward1", X, lambda x: x.min())
sample("AmaxBackward0", X, lambda x: x.amax(-1))
sample("AmaxBackward0", signed((2, 3, 4)), lambda x: x.amax((0, -1), keepdim=True), "dims, keepdim")
sample("AminBackward0", X, lambda x: x.amin(-1))
sample("MaximumBackward0", XY, torch.maximum)
sample("MaximumBackward0", signed((3, 1), (4,)), torch.maximum, "broadcast")
sample("MinimumBackward0", XY, torch.minimum)
sample("TopkBackward0", X, lambda x: x.topk(2, -1))
sample("SortBackward0", X, lambda x: x.sort(0, descending=True))
sample("MaxPool2DWithIndicesBackward0", IMAGE, lambda x: F.max_pool2d(x, 2))
sample(
    "MaxPool2DWithIndicesBackward0", IMAGE, lambda x: F.max_pool2d(x, (3, 2), 2, 1, 1, ceil_mode=True), "ceil, padded"
)
sample("MaxPool2DWithIndicesBackward0", IMAGE, lambda x: F.max_pool2d(x, 2, 1, 0, (2, 3)), "dilated")
sample("MaxPool3DWithIndicesBackward0", signed((1, 2, 4, 5, 5)), lambda x: F.max_pool3d(x, 2, ceil_mode=True))
sample("AdaptiveMaxPool2DBackward0", IMAGE, lambda x: F.adaptive_max_pool2d(x, (2, 4)))
sample("UpsampleNearest1DBackward0", signed((2, 3, 5)), lambda x: F.interpolate(x, scale_factor=1.7))
sample("UpsampleNearest1DBackward0", signed((2, 3, 5)), lambda x: F.interpolate(x, size=8), "size")
sample("UpsampleNearest2DBackward0", IMAGE, lambda x: F.interpolate(x, size=(7, 4)))
sample("UpsampleNearest2DBackward0", IMAGE, lambda x: F.interpolate(x, scale_factor=(1.7, 0.6)), "scale")
sample(
    "UpsampleNearest2DBackward0",
    IMAGE,
    lambda x: F.interpolate(x, scale_factor=1.3, recompute_scale_factor=True),
    "recomputed scale",
)
sample("UpsampleNearestExact2DBackward0", IMAGE, lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest-exact"))

# ---------------------------------------------------------------- sums

sample("AddBackward0", XY, torch.add)
sample("AddBackward0", signed((3, 1), (4,)), lambda a, b: torch.add(a, b, alpha=-0.5), "broadcast, alpha")
sample("AddBackward0", XY, lambda a, b: a.clone().add_(b, alpha=2), "in place, alpha")
sample("AddBackward0", signed((), (3, 4)), torch.add, "a number first")
sample("AddBackward1", X, lambda x: aten.add.Scalar(x, 0.7, 2))
sample("SubBackward0", XY, torch.sub)
sample("SubBackward0", signed((3, 1), (4,)), lambda a, b: torch.sub(a, b, alpha=-0.5), "broadcast, alpha")
sample("SubBackward1", X, lambda x: aten.sub.Scalar(x, 0.7, 2))
sample("RsubBackward0", XY, lambda a, b: torch.rsub(a, b, alpha=2))
sample("RsubBackward1", X, lambda x: 2 - x)
sample("RsubBackward1", X, lambda x: torch.rsub(x, 0.5, alpha=3), "alpha")
sample("SumBackward0", X, torch.sum)
sample("SumBackward0", X, lambda x: x.sum(dtype=other(x.dtype)), "cast")
sample("SumBackward0", signed(()), torch.sum, "of a number")
sample("SumBackward1", X, lambda x: x.sum(-1))
sample("SumBackward1", signed((2, 3, 4)), lambda x: x.sum((0, -1), keepdim=True), "dims, keepdim")
sample("SumBackward1", signed((2, 3, 4)), lambda x: x.sum((-2,), dtype=other(x.dtype)), "cast")
sample("SumBackward1", X, lambda x: x.sum((), keepdim=True), "no dims, keepdim")
sample("MeanBackward0", X, torch.mean)
sample("MeanBackward1", X, lambda x: x.mean(-1))
sample("MeanBackward1", signed((2, 3, 4)), lambda x: x.mean((0, -1), keepdim=True), "dims, keepdim")
sample("MeanBackward1", signed((2, 3, 4)), lambda x: x.mean(-2, dtype=other(x.dtype)), "cast")
sample("MeanBackward1", X, lambda x: torch.mean(x, (), keepdim=True), "no dims, keepdim")
sample("CumsumBackward0", X, lambda x: x.cumsum(-1))
sample("CumsumBackward0", X, lambda x: x.cumsum(0, dtype=other(x.dtype)), "cast")
sample("LerpBackward0", XY, lambda a, b: torch.lerp(a, b, 0.3))
sample("IndexAddBackward0", signed((3, 4), (3, 2)), lambda x, v: x.index_add(-1, integers(3, 0), v, alpha=0.5))
sample(
    "ScatterAddBackward0",
    signed((3, 4), (3, 3)),
    lambda x, v: x.scatter_add(1, integers([0, 0, 1], [3, 3, 3], [2, 0, 2]), v),
)
sample("UpsampleLinear1DBackward0", signed((2, 3, 5)), lambda x: F.interpolate(x, scale_factor=1.7, mode="linear"))
for align in (False, True):
    sample("UpsampleBilinear2DBackward0", IMAGE,
           lambda x, align=align: F.interpolate(x, scale_factor=1.7, mode="bilinear", align_corners=align), f"align {align}")  # fmt: skip
    sample("UpsampleBicubic2DBackward0", IMAGE,
           lambda x, align=align: F.interpolate(x, size=(4, 9), mode="bicubic", align_corners=align), f"align {align}")  # fmt: skip
sample(
    "UpsampleBilinear2DAaBackward0",
    IMAGE,
    lambda x: F.interpolate(x, scale_factor=0.6, mode="bilinear", antialias=True),
)
sample("UpsampleBicubic2DAaBackward0", IMAGE, lambda x: F.interpolate(x, size=(3, 4), mode="bicubic", antialias=True))

sample("AvgPool2DBackward0", IMAGE, lambda x: F.avg_pool2d(x, 2))
sample("AvgPool2DBackward0", IMAGE, lambda x: F.avg_pool2d(x, (3, 2), 2, 1, True, False), "ceil, padding not counted")
sample("AvgPool2DBackward0", IMAGE, lambda x: F.avg_pool2d(x, 3, 2, 1, True, True), "ceil, padding counted")
sample("AvgPool2DBackward0", IMAGE, lambda x: F.avg_pool2d(x, 2, divisor_override=3), "divisor")
sample("AvgPool3DBackward0", signed((1, 2, 4, 5, 5)), lambda x: F.avg_pool3d(x, 2, ceil_mode=True))
sample("AdaptiveAvgPool2DBackward0", IMAGE, lambda x: F.adaptive_avg_pool2d(x, (2, 4)))
sample(
    "AdaptiveAvgPool2DBackward0", signed((3, 5, 6)), lambda x: F.adaptive_avg_pool2d(x, (None, 4)), "unbatched, None"
)
sample("AdaptiveAvgPool3DBackward0", signed((1, 2, 4, 5, 5)), lambda x: F.adaptive_avg_pool3d(x, (2, 3, 4)))

# ---------------------------------------------------------------- products

sample("MulBackward0", XY, torch.mul)
sample("MulBackward0", signed((3, 1), (4,)), torch.mul, "broadcast")
sample("MulBackward0", XY, lambda a, b: a.clone().mul_(b), "in place")
sample("MulBackward0", signed((), ()), torch.mul, "of numbers")
sample("MulBackward1", X, lambda x: aten.mul.Scalar(x, -0.7))
sample("DivBackward0", XY, torch.div)
sample("DivBackward0", signed((4,), (3, 1)), torch.div, "broadcast")
sample("DivBackward1", X, lambda x: aten.div.Scalar(x, -0.7))
sample("NegBackward0", X, torch.neg)
sample("NegBackward0", X, lambda x: x.clone().neg_(), "in place")
sample("AddcmulBackward0", signed((3, 4), (3, 4), (3, 4)), torch.addcmul)
sample(
    "AddcmulBackward0",
    signed((3, 1), (4,), (3, 4)),
    lambda a, b, c: torch.addcmul(a, b, c, value=-2),
    "broadcast, value",
)

# ---------------------------------------------------------------- normalisations

sample("NativeLayerNormBackward0", signed((2, 3, 4), (4,), (4,)), lambda x, w, b: F.layer_norm(x, (4,), w, b))
sample(
    "NativeLayerNormBackward0",
    signed((2, 3, 4), (3, 4), None),
    lambda x, w, b: F.layer_norm(x, (3, 4), w, b, 0.1),
    "two dims, no bias",
)
sample("NativeLayerNormBackward0", signed((2, 3, 4), None, None), lambda x, w, b: F.layer_norm(x, (4,)), "plain")
sample("NativeGroupNormBackward0", signed((2, 4, 3), (4,), (4,)), lambda x, w, b: F.group_norm(x, 2, w, b))
sample(
    "NativeGroupNormBackward0", signed((2, 4, 3, 2), None, None), lambda x, w, b: F.group_norm(x, 2, eps=0.1), "plain"
)
STATISTICS = (torch.tensor([0.3, -0.2, 0.1, 0.5]), torch.tensor([0.7, 1.2, 0.5, 2.0]))


def batch_norm(x: Tensor, w: Tensor | None, b: Tensor | None, training: bool = False) -> Tensor:
    mean, var = (statistic.to(x.dtype) for statistic in STATISTICS)
    return F.batch_norm(x, mean.clone(), var.clone(), w, b, training, 0.1, 1e-3)


sample("NativeBatchNormBackward0", signed((3, 4), (4,), (4,)), batch_norm)
sample("NativeBatchNormBackward0", signed((2, 4, 3, 2), (4,), (4,)), batch_norm, "of images")
sample("NativeBatchNormBackward0", signed((2, 4, 3), None, None), batch_norm, "plain")
sample("NativeBatchNormBackward0", signed((2, 4, 3), (4,), (4,)), lambda x, w, b: batch_norm(x, w, b, True), "training")
sample(
    "NativeBatchNormBackward0",
    signed((4, 4), None, None),
    lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    "training, plain",
)

# ---------------------------------------------------------------- functions of mathematics

UNIT = small((3, 4))
for name in ("asin", "atanh", "erfinv"):
    sample(f"{name.capitalize()}Backward0", UNIT, getattr(torch, name))
for name in ("asinh", "atan", "sinh", "tan", "cosh", "erfc", "exp2", "i0", "sinc", "frac"):
    sample(f"{name.capitalize()}Backward0", X, getattr(torch, name))
for name in ("digamma", "lgamma", "log10", "log2"):
    sample(f"{name.capitalize()}Backward0", positive((3, 4)), getattr(torch, name))
for name, node in (("i1", "I1"), ("i1e", "I1E"), ("i0e", "I0E"), ("erfcx", "Erfcx"), ("log_ndtr", "LogNdtr")):
    sample(f"Special{node}Backward0", X, getattr(torch.special, name))
sample("AcosBackward0", UNIT, torch.acos)
sample("AcoshBackward0", positive((3, 4)), lambda x: torch.acosh(x + 1), operands=lambda x: (x + 1,))
sample("SpecialEntrBackward0", positive((3, 4)), torch.special.entr)
sample("SpecialNdtriBackward0", probabilities((3, 4)), torch.special.ndtri)
sample("LogitBackward0", probabilities((3, 4)), torch.logit)
sample("LogitBackward0", probabilities((3, 4)), lambda x: torch.logit(x, 0.01), "eps")
sample("MvlgammaBackward0", positive((3, 4)), lambda x: torch.mvlgamma(x + 2, 3), operands=lambda x: (x + 2,))
sample("PolygammaBackward0", positive((3, 4)), lambda x: torch.polygamma(2, x))
sample("PolygammaBackward1", positive((3, 4)), lambda x: x.clone().polygamma_(1))
sample("StandardGammaBackward0", positive((3, 4)), torch._standard_gamma)
sample("CopysignBackward1", X, lambda x: torch.copysign(x, -1.0))
sample("FmodBackward0", X, lambda x: x.fmod(0.7))
sample("RemainderBackward0", X, lambda x: x.remainder(0.7))
sample("PowBackward2", X, lambda x: 2.0**x)
sample("XlogyBackward1", positive((3, 4)), lambda x: torch.xlogy(0.7, x))
sample("SpecialXlog1PyBackward1", positive((3, 4)), lambda x: torch.special.xlog1py(0.7, x))
sample("SpecialZetaBackward1", positive((3, 4)), lambda x: torch.special.zeta(2.0, x))
sample("NegViewBackward0", X, torch._neg_view)
sample("NegViewBackward0_copy", X, torch._neg_view_copy)
sample("Deg2RadBackward0", X, torch.deg2rad)
sample("Rad2DegBackward0", X, torch.rad2deg)
sample("FrexpBackward0", X, torch.frexp)
sample("XlogyBackward2", X, lambda x: torch.xlogy(x, 0.7))
sample("SpecialXlog1PyBackward2", X, lambda x: torch.special.xlog1py(x, 0.7))
sample("RreluWithNoiseBackward0", X, lambda x: F.rrelu(x, 0.1, 0.3))
sample("RreluWithNoiseBackward0", X, lambda x: F.rrelu(x, 0.1, 0.3, training=True), "training")
sample("RreluWithNoiseBackward1", X, lambda x: F.rrelu_(x.clone(), 0.1, 0.3))
sample("RreluWithNoiseFunctionalBackward0", X,
       lambda x: aten.rrelu_with_noise_functional(x, torch.zeros_like(x), 0.1, 0.3, True)[0])  # fmt: skip
sample("EluBackward1", X, lambda x: F.elu_(x.clone(), 0.7))
sample("CeluBackward1", X, lambda x: F.celu_(x.clone(), 0.8))
sample("ThresholdBackward1", X, lambda x: F.threshold_(x.clone(), 0.5, -0.3))
sample("HardshrinkBackward0", X, lambda x: F.hardshrink(x, 0.6))
sample("SoftshrinkBackward0", X, lambda x: F.softshrink(x, 0.6))

# ---------------------------------------------------------------- nonlinear functions of several values

sample("NormBackward3", X, lambda x: aten.norm.ScalarOpt_dim_dtype(x, 2, [0], False, dtype=x.dtype))
sample("LogcumsumexpBackward0", X, lambda x: x.logcumsumexp(-1))
sample("ProdBackward0", X, torch.prod)
sample("ProdBackward1", X, lambda x: x.prod(-1, keepdim=True))
sample("CumprodBackward0", X, lambda x: x.cumprod(-1))
sample("RenormBackward0", X, lambda x: x.renorm(2, 0, 1.5))
sample("CdistBackward0", XY, lambda a, b: torch.cdist(a, b, p=1.0))
sample("EuclideanDistBackward0", XY, lambda a, b: aten._euclidean_dist(a, b))
sample("DistBackward0", XY, torch.dist)
sample("PdistBackward0", X, torch.pdist)
sample("Atan2Backward0", XY, torch.atan2)
sample("LogaddexpBackward0", XY, torch.logaddexp)
sample("Logaddexp2Backward0", XY, torch.logaddexp2)
sample("XlogyBackward0", positive((3, 4), (3, 4)), torch.xlogy)
sample("SpecialXlog1PyBackward0", positive((3, 4), (3, 4)), torch.special.xlog1py)
sample("HypotBackward0", XY, torch.hypot)
sample("CopysignBackward0", XY, torch.copysign)
sample("PowBackward1", positive((3, 4), (3, 4)), torch.pow)
sample("DivBackward2", XY, lambda a, b: torch.div(a, b, rounding_mode="trunc"))
sample("FmodBackward1", XY, torch.fmod)
sample("RemainderBackward1", XY, torch.remainder)
sample("LdexpBackward0", XY, torch.ldexp)
sample("NextafterBackward0", XY, torch.nextafter)
sample("IgammaBackward0", positive((3, 4), (3, 4)), torch.igamma, frozen=(0,))
sample("IgammacBackward0", positive((3, 4), (3, 4)), torch.igammac, frozen=(0,))
sample("AngleBackward0", X, torch.angle)
sample("SgnBackward0", X, torch.sgn)
sample("MaskedSoftmaxBackward0", X, lambda x: aten._masked_softmax(x, ~MASK, 1, 2))

# ---------------------------------------------------------------- more linear maps

sample("VdotBackward0", signed((4,), (4,)), torch.vdot)
sample("AddmvBackward0", signed((3,), (3, 4), (4,)), lambda c, a, b: torch.addmv(c, a, b, beta=0.5, alpha=2))
sample("AddrBackward0", signed((3, 4), (3,), (4,)), lambda c, a, b: torch.addr(c, a, b, beta=0.5, alpha=2))
sample(
    "AddbmmBackward0", signed((3, 5), (2, 3, 4), (2, 4, 5)), lambda c, a, b: torch.addbmm(c, a, b, beta=0.5, alpha=2)
)
sample("LinalgCrossBackward0", signed((4, 3), (4, 3)), torch.linalg.cross)
sample("LinalgCrossBackward0", signed((3, 4), (3, 1)), lambda a, b: torch.linalg.cross(a, b, dim=0), "broadcast, dim")
sample("ConvolutionBackward1", signed((1, 2, 4, 4), (3, 2, 2, 2), (3,)),
       lambda x, w, b: aten._convolution(x, w, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, False, False))  # fmt: skip
sample("ConvTbcBackward0", signed((5, 2, 3), (3, 3, 4), (4,)), lambda x, w, b: torch.conv_tbc(x, w, b, 1))
sample("SlowConv2DBackward0", signed((1, 2, 5, 5), (3, 2, 3, 3), (3,)),
       lambda x, w, b: aten._slow_conv2d_forward(x, w, [3, 3], b, [1, 2], [1, 0]))  # fmt: skip
sample("SlowConv3DBackward0", signed((1, 2, 4, 4, 4), (3, 2, 2, 2, 2), (3,)),
       lambda x, w, b: aten.slow_conv3d_forward(x, w, [2, 2, 2], b, [1, 1, 1], [0, 0, 0]))  # fmt: skip
sample("SlowConvDilated2DBackward0", signed((1, 2, 5, 5), (3, 2, 2, 2), (3,)),
       lambda x, w, b: aten.slow_conv_dilated2d(x, w, [2, 2], b, [1, 1], [0, 0], [2, 2]))  # fmt: skip
sample("SlowConvDilated3DBackward0", signed((1, 2, 4, 4, 4), (3, 2, 2, 2, 2), (3,)),
       lambda x, w, b: aten.slow_conv_dilated3d(x, w, [2, 2, 2], b, [1, 1, 1], [0, 0, 0], [2, 2, 2]))  # fmt: skip
sample("SlowConvTranspose2DBackward0", signed((1, 2, 4, 4), (2, 3, 3, 3), (3,)),
       lambda x, w, b: aten.slow_conv_transpose2d(x, w, [3, 3], b, [2, 2], [1, 1], [1, 1], [1, 1]))  # fmt: skip
sample("SlowConvTranspose3DBackward0", signed((1, 2, 3, 3, 3), (2, 3, 2, 2, 2), (3,)),
       lambda x, w, b: aten.slow_conv_transpose3d(x, w, [2, 2, 2], b, [1, 1, 1], [0, 0, 0], [0, 0, 0], [1, 1, 1]))  # fmt: skip
sample("TrilinearBackward0", signed((3, 4), (2, 4, 5), (3, 5)),
       lambda a, w, b: aten._trilinear(a, w, b, [1, 3], [0], [1, 2], [2, 3]))  # fmt: skip
sample("GluBackward0", signed((3, 8)), F.glu)
sample("GluBackward0", signed((6, 2)), lambda x: F.glu(x, 0), "dim")
sample("AddcdivBackward0", signed((3, 4), (3, 4), (3, 4)), torch.addcdiv)
sample(
    "AddcdivBackward0",
    signed((3, 1), (4,), (3, 4)),
    lambda a, b, c: torch.addcdiv(a, b, c, value=-2),
    "broadcast, value",
)

# ---------------------------------------------------------------- transforms

sample("Col2ImBackward0", signed((1, 12, 6)), lambda x: F.fold(x, (4, 3), 2))
sample("UnfoldBackwardBackward0", signed((2, 3, 4)), lambda x: aten.unfold_backward(x, [2, 8], 1, 4, 2))
sample("Im2ColBackward0", signed((1, 3, 4, 3)), lambda x: F.unfold(x, 2))
sample(
    "UpsampleTrilinear3DBackward0",
    signed((1, 2, 2, 3, 2)),
    lambda x: F.interpolate(x, scale_factor=1.7, mode="trilinear"),
)
sample("UpsampleLanczos2DAaBackward0", IMAGE, lambda x: aten._upsample_lanczos2d_aa(x, [3, 4], False))
sample("UpsampleNearest3DBackward0", signed((1, 2, 2, 3, 2)), lambda x: F.interpolate(x, scale_factor=1.7))
sample("UpsampleNearestExact1DBackward0", signed((1, 2, 5)), lambda x: F.interpolate(x, size=7, mode="nearest-exact"))
sample(
    "UpsampleNearestExact3DBackward0",
    signed((1, 2, 2, 3, 2)),
    lambda x: F.interpolate(x, size=(3, 3, 3), mode="nearest-exact"),
)
sample(
    "GridSampler2DBackward0",
    small((1, 2, 4, 4), (1, 3, 3, 2)),
    lambda x, grid: F.grid_sample(x, grid, align_corners=False),
)
sample(
    "GridSampler3DBackward0",
    small((1, 2, 3, 3, 3), (1, 2, 2, 2, 3)),
    lambda x, grid: F.grid_sample(x, grid, align_corners=True),
)
sample("AffineGridGeneratorBackward0", signed((1, 2, 3)), lambda x: F.affine_grid(x, [1, 1, 3, 4], align_corners=False))
sample("LerpBackward1", signed((3, 4), (3, 4), (3, 4)), torch.lerp)
sample(
    "EmbeddingBagBackward0", signed((7, 4), None), lambda w, _: F.embedding_bag(integers([1, 6], [1, 0]), w, mode="sum")
)
sample("EmbeddingBagBackward0", signed((7, 4), (2, 2)),
       lambda w, s: F.embedding_bag(integers([1, 6], [1, 0]), w, mode="sum", per_sample_weights=s), "weighted")  # fmt: skip
sample("SegmentReduceBackward0", signed((5, 2)), lambda x: torch.segment_reduce(x, "sum", lengths=integers(2, 3)))
sample("ScatterReduceBackward0", signed((3, 4), (3, 2)),
       lambda x, v: x.scatter_reduce(1, integers([0, 0], [3, 1], [2, 2]), v, "sum"))  # fmt: skip
sample("IndexReduceBackward0", signed((3, 4), (2, 4)), lambda x, v: x.index_reduce(0, integers(2, 0), v, "mean"))


def system(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A triangular matrix and right-hand sides."""
    return draw((3, 3), 0, dtype).tril() + 2 * torch.eye(3, dtype=dtype), draw((3, 2), 1, dtype)


def right_hand_side_first(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return system(dtype)[::-1]


sample("LinalgSolveExBackward0", system, torch.linalg.solve)
sample("LinalgSolveTriangularBackward0", system, lambda a, b: torch.linalg.solve_triangular(a, b, upper=False))
sample(
    "LinalgLuSolveBackward0", system, lambda a, b: torch.linalg.lu_solve(a, torch.arange(1, 4, dtype=torch.int32), b)
)
sample(
    "TriangularSolveBackward0", right_hand_side_first, lambda b, a: torch.triangular_solve(b, a, upper=False).solution
)
sample("CholeskySolveBackward0", right_hand_side_first, torch.cholesky_solve)
sample("NansumBackward0", X, lambda x: x.nansum(-1))
sample("TraceBackward0", X, torch.trace)

# ---------------------------------------------------------------- more movement

COPIES: dict[str, Any] = {
    "Alias": torch.alias_copy, "AsStrided": lambda x: torch.as_strided_copy(x, (2, 3), (4, 1), 1),
    "Diagonal": torch.diagonal_copy, "Expand": lambda x: torch.expand_copy(x, (2, 3, 4)),
    "LiftFresh": aten.lift_fresh_copy, "Permute": lambda x: torch.permute_copy(x, (-1, 0)),
    "ReshapeAlias": lambda x: aten._reshape_alias_copy(x, [2, 6], [6, 1]), "Select": lambda x: torch.select_copy(x, -1, -2),
    "Slice": lambda x: torch.slice_copy(x, -1, 1, -1), "Split": lambda x: torch.split_copy(x, 3, -1),
    "SplitWithSizes": lambda x: torch.split_with_sizes_copy(x, (1, 3), -1), "T": torch.t_copy,
    "Transpose": lambda x: torch.transpose_copy(x, 0, -1), "Unbind": lambda x: torch.unbind_copy(x, -1),
    "Unfold": lambda x: torch.unfold_copy(x, -1, 2, 1), "Unsqueeze": lambda x: torch.unsqueeze_copy(x, -1),
    "View": lambda x: torch.view_copy(x, (2, 6)),
}  # fmt: skip
for name, function in COPIES.items():
    sample(f"{name}Backward0_copy", X, function)
ONES = signed((1, 3, 1, 4))
sample("SqueezeBackward0_copy", ONES, torch.squeeze_copy)
sample("SqueezeBackward1_copy", ONES, lambda x: torch.squeeze_copy(x, -2))
sample("SqueezeBackward2_copy", ONES, lambda x: torch.squeeze_copy(x, (0, -2)))
sample("SqueezeBackward4", ONES, lambda x: x.clone().squeeze_(-2))
sample("SqueezeBackward5", ONES, lambda x: aten.squeeze_.dims(x.clone(), [0, -2]))
sample("UnsqueezeBackward1", X, lambda x: x.clone().unsqueeze_(-1))
sample("TBackward1", X, lambda x: x.clone().t_())
sample("TransposeBackward1", X, lambda x: x.clone().transpose_(0, -1))
sample("AsStridedBackward1", X, lambda x: x.clone().as_strided_((2, 3), (4, 1), 1))
sample("ReshapeCopyBackward0", X, lambda x: aten._reshape_copy(x, [2, 6]))
sample("NarrowCopyBackward0", X, lambda x: torch.narrow_copy(x, -1, 1, 2))
sample("UnsafeSplitWithSizesBackward0", signed((3, 7)), lambda x: torch.unsafe_split_with_sizes(x, (1, 4, 2), -1))
sample("LiftBackward0", X, aten.lift)
sample("ConjPhysicalBackward1", X, lambda x: x.clone().conj_physical_(), "of real numbers")
sample("LazyCloneBackward0", X, aten._lazy_clone)
sample("BlockDiagBackward0", signed((2, 3), (1, 2)), torch.block_diag)
sample("Rot90Backward0", X, lambda x: x.rot90(1, (0, -1)))
sample("DiagEmbedBackward0", X, lambda x: x.diag_embed(1, -1, 0))
sample("PixelUnshuffleBackward0", signed((2, 2, 6, 4)), lambda x: F.pixel_unshuffle(x, 2))
sample("ChannelShuffleBackward0", signed((2, 6, 3)), lambda x: F.channel_shuffle(x, 2))
sample("ReflectionPad3DBackward0", signed((1, 2, 3, 3, 3)), lambda x: F.pad(x, (1, 2, 0, 1, 2, 2), mode="reflect"))
sample("ReplicationPad1DBackward0", signed((2, 3, 4)), lambda x: F.pad(x, (2, 1), mode="replicate"))
sample("ReplicationPad3DBackward0", signed((1, 2, 3, 3, 3)), lambda x: F.pad(x, (1, 2, 0, 1, 2, 2), mode="replicate"))
sample("PackPaddedSequenceBackward0", signed((4, 2, 3)),
       lambda x: torch._pack_padded_sequence(x, integers(4, 2), False)[0])  # fmt: skip
QUANTISED = {"quant_min": -4, "quant_max": 3}
sample("FakeQuantizePerTensorAffineCachemaskTensorQparamsBackward0", X,
       lambda x: torch.fake_quantize_per_tensor_affine(x, torch.tensor(0.3), torch.tensor(0, dtype=torch.int32), **QUANTISED))  # fmt: skip
sample("FakeQuantizePerChannelAffineCachemaskBackward0", X,
       lambda x: torch.fake_quantize_per_channel_affine(
           x, torch.full((3,), 0.3), torch.zeros(3, dtype=torch.int32), 0, **QUANTISED))  # fmt: skip
sample(
    "FakeQuantizePerTensorAffineCachemaskBackward0",
    X,
    lambda x: torch.fake_quantize_per_tensor_affine(x, 0.3, 0, -4, 3),
)

# ---------------------------------------------------------------- more selection

sample("TakeBackward0", X, lambda x: x.take(integers(0, 11, 5, 5)))
sample("UnsafeIndexBackward0", X, lambda x: aten._unsafe_index.Tensor(x, [integers(0, 2, 2)]))
sample("UnsafeMaskedIndexBackward0", X,
       lambda x: aten._unsafe_masked_index(x, MASK[:, :1], [integers(0, 1, 2)], 0.0))  # fmt: skip
sample("UnsafeMaskedIndexPutAccumulateBackward0", signed((3, 4), (3, 4)),
       lambda x, v: aten._unsafe_masked_index_put_accumulate(x, MASK[:, :1], [integers(0, 1, 2)], v))  # fmt: skip
sample("MaskedFillBackward1", signed((3, 4), ()), lambda x, v: x.masked_fill(MASK, v))
sample(
    "MaskedFillBackward1", signed((3, 4), ()), lambda x, v: x.clone().masked_fill_(MASK[0], v), "in place, broadcast"
)
sample("IndexFillBackward0", X, lambda x: x.index_fill(-1, integers(3, 0), 0.4))
sample("IndexFillBackward1", signed((3, 4), ()), lambda x, v: x.index_fill(-1, integers(3, 0), v))
sample("MaskedScatterBackward0", signed((3, 4), (12,)), lambda x, v: x.masked_scatter(MASK, v))
sample(
    "IndexPutImplBackward0", signed((3, 4), (2, 4)), lambda x, v: aten._index_put_impl_(x.clone(), [integers(2, 0)], v)
)
sample("UnsafeIndexPutBackward0", signed((3, 4), (2, 4)), lambda x, v: aten._unsafe_index_put(x, [integers(2, 0)], v))
sample("PutBackward0", signed((3, 4), (2,)), lambda x, v: x.put(integers(2, 7), v))
sample("IndexCopyBackward0", signed((3, 4), (2, 4)), lambda x, v: x.index_copy(0, integers(2, 0), v))
sample("DiagonalScatterBackward0", signed((3, 4), (3,)), lambda x, v: x.diagonal_scatter(v, 1))
sample("AsStridedScatterBackward0", signed((3, 4), (2, 3)), lambda x, v: x.as_strided_scatter(v, (2, 3), (4, 1), 1))
UNPOOL = integers([[[0, 3], [8, 15]]])
sample("MaxUnpool2DBackward0", signed((1, 1, 2, 2)), lambda x: F.max_unpool2d(x, UNPOOL, 2))
sample("MaxUnpool3DBackward0", signed((1, 1, 1, 2, 2)), lambda x: F.max_unpool3d(x, UNPOOL[:, None], (1, 2, 2)))
sample("NanToNumBackward0", X, torch.nan_to_num)
sample("KthvalueBackward0", X, lambda x: x.kthvalue(2, -1))
sample("MedianBackward0", X, lambda x: x.median())
sample("MedianBackward1", X, lambda x: x.median(-1, keepdim=True))
sample("NanmedianBackward0", X, lambda x: x.nanmedian())
sample("NanmedianBackward1", X, lambda x: x.nanmedian(0))
sample("ModeBackward0", X, lambda x: x.mode(-1))
sample("AminmaxBackward0", X, lambda x: torch.aminmax(x, dim=-1))
sample("SortBackward1", X, lambda x: x.sort(dim=-1, stable=True))
sample("CummaxBackward0", X, lambda x: x.cummax(-1))
sample("CumminBackward0", X, lambda x: x.cummin(0))
sample("FmaxBackward0", XY, torch.fmax)
sample("FminBackward0", XY, torch.fmin)
sample("ClampMinBackward1", XY, torch.clamp_min)
sample("ClampMaxBackward1", XY, torch.clamp_max)
sample("AdaptiveMaxPool3DBackward0", signed((1, 2, 4, 4, 4)), lambda x: F.adaptive_max_pool3d(x, (2, 3, 2)))
sample("FractionalMaxPool2DBackward0", signed((1, 2, 5, 5)),
       lambda x: F.fractional_max_pool2d(x, 2, (3, 3), _random_samples=torch.full((1, 2, 2), 0.4, dtype=x.dtype)))  # fmt: skip
sample("FractionalMaxPool3DBackward0", signed((1, 2, 5, 5, 5)),
       lambda x: F.fractional_max_pool3d(x, 2, (3, 3, 3), _random_samples=torch.full((1, 2, 3), 0.4, dtype=x.dtype)))  # fmt: skip

# ---------------------------------------------------------------- constants: the derivative is zero

for name in ("ceil", "floor", "trunc", "sign"):
    sample(f"{name.capitalize()}Backward0", X, getattr(torch, name))
sample("RoundBackward0", X, torch.round)
sample("RoundBackward1", X, lambda x: torch.round(x, decimals=1))
sample("DivBackward3", X, lambda x: aten.div.Scalar_mode(x, 0.7, rounding_mode="floor"))
for name in ("eq", "ge", "gt", "le", "lt", "ne"):
    sample(f"{name.capitalize()}Backward0", X, lambda x, name=name: getattr(x.clone(), f"{name}_")(0.5))
    sample(f"{name.capitalize()}Backward1", XY, lambda x, y, name=name: getattr(x.clone(), f"{name}_")(y))
sample("FillBackward0", X, lambda x: torch.fill(x, 0.3))
sample("FillBackward1", signed((3, 4), ()), lambda x, v: torch.fill(x, v))
sample("FillBackward2", X, lambda x: x.clone().fill_(0.3))
sample("FillBackward3", signed((3, 4), ()), lambda x, v: x.clone().fill_(v))
sample("ZeroBackward0", X, lambda x: x.clone().zero_())
sample("BernoulliBackward0", probabilities((3, 4)), torch.bernoulli)
sample("BernoulliBackward1", probabilities((3, 4), (3, 4)), lambda x, p: x.clone().bernoulli_(p))
sample("BernoulliBackward2", X, lambda x: x.clone().bernoulli_(0.4))
sample("CauchyBackward0", X, lambda x: x.clone().cauchy_())
sample("ExponentialBackward0", X, lambda x: x.clone().exponential_())
sample("GeometricBackward0", X, lambda x: x.clone().geometric_(0.4))
sample("LogNormalBackward0", X, lambda x: x.clone().log_normal_())
sample("NormalBackward0", X, lambda x: x.clone().normal_())
sample("NormalBackward1", X, lambda x: torch.normal(x, 1.0))
sample("NormalBackward2", positive((3, 4)), lambda x: torch.normal(0.3, x))
sample("NormalBackward3", positive((3, 4), (3, 4)), torch.normal)
sample("PoissonBackward0", positive((3, 4)), torch.poisson)
sample("RandomBackward0", X, lambda x: x.clone().random_(2, 7))
sample("RandomBackward1", X, lambda x: x.clone().random_(7))
sample("RandomBackward2", X, lambda x: x.clone().random_())
sample("UniformBackward0", X, lambda x: x.clone().uniform_())

# These draw anew at each call, so that a replay would not give the same.
RANDOM = frozenset({
    "BernoulliBackward0", "BernoulliBackward1", "BernoulliBackward2", "CauchyBackward0", "ExponentialBackward0",
    "GeometricBackward0", "LogNormalBackward0", "NormalBackward0", "NormalBackward1", "NormalBackward2",
    "NormalBackward3", "PoissonBackward0", "RandomBackward0", "RandomBackward1", "RandomBackward2",
    "RreluWithNoiseFunctionalBackward0", "UniformBackward0",
})  # fmt: skip

# ---------------------------------------------------------------- losses

sample("MseLossBackward0", XY, F.mse_loss)
sample("SmoothL1LossBackward0", XY, F.smooth_l1_loss)
sample("HuberLossBackward0", XY, F.huber_loss)
sample("BinaryCrossEntropyBackward0", probabilities((3, 4), (3, 4)), F.binary_cross_entropy)
sample("BinaryCrossEntropyWithLogitsBackward0", signed((3, 4), (3, 4)), F.binary_cross_entropy_with_logits)
sample("NllLossBackward0", X, lambda x: F.nll_loss(x, integers(0, 3, 1)))
sample(
    "NllLoss2DBackward0", signed((2, 3, 2, 2)), lambda x: F.nll_loss(x, integers([[0, 1], [2, 1]], [[2, 2], [0, 1]]))
)
sample("MultiMarginLossBackward0", X, lambda x: F.multi_margin_loss(x, integers(0, 3, 1)))
sample(
    "MultilabelMarginLossBackward0",
    X,
    lambda x: F.multilabel_margin_loss(x, integers([3, 0, -1, 1], [0, -1, 1, 2], [1, 2, -1, 0])),
)
sample("SoftMarginLossBackward0", X, lambda x: F.soft_margin_loss(x, draw((3, 4), 5, x.dtype).sign()))

# ---------------------------------------------------------------- more normalisations

sample("WeightNormInterfaceBackward0", signed((3, 4), (3, 1)), lambda v, g: torch._weight_norm_interface(v, g, 0))


def legit_batch_norm(x: Tensor, w: Tensor | None, b: Tensor | None, name: str, training: tuple[bool, ...]) -> Tensor:
    mean, var = (statistic.to(x.dtype).clone() for statistic in STATISTICS)
    return getattr(aten, name)(x, w, b, mean, var, *training, 0.1, 1e-3)[0]


BATCH = signed((2, 4, 3), (4,), (4,))
sample(
    "NativeBatchNormLegitBackward0",
    BATCH,
    lambda x, w, b: legit_batch_norm(x, w, b, "_native_batch_norm_legit", (True,)),
    "training",
)
sample(
    "NativeBatchNormLegitBackward0",
    BATCH,
    lambda x, w, b: legit_batch_norm(x, w, b, "_native_batch_norm_legit", (False,)),
)
sample(
    "NativeBatchNormLegitBackward1",
    BATCH,
    lambda x, w, b: aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-3)[0],
    "training",
)
sample(
    "NativeBatchNormLegitNoTrainingBackward0",
    BATCH,
    lambda x, w, b: legit_batch_norm(x, w, b, "_native_batch_norm_legit_no_training", ()),
)
sample(
    "BatchNormWithUpdateBackward0",
    BATCH,
    lambda x, w, b: legit_batch_norm(x, w, b, "_batch_norm_with_update", ()),
    "training",
)
sample("BatchNormNoUpdateBackward0", BATCH, lambda x, w, b: legit_batch_norm(x, w, b, "_batch_norm_no_update", ()))

# ---------------------------------------------------------------- rows without a sample

CUDA, COMPLEX = "CUDA", "its output or its operand is complex: tests/test_opinfo.py"
NESTED = "tensors of unequal sizes, which have no dense value to compare"
ONEDNN = "oneDNN's own layout or dtype"
OTHER_BACKENDS = "a backend outside of CPU and CUDA"

ELSEWHERE = {
    "AccumulateGrad": "a leaf, not an operation: it is under every sample",
    "ChunkBackward0": OTHER_BACKENDS + "; elsewhere chunk is a split",
    "FakeQuantizeLearnablePerChannelAffineBackward0": "float32 only",
    "FakeQuantizeLearnablePerTensorAffineBackward0": "float32 only",
    "FusedMovingAvgObsFqHelperBackward0": "an observer that changes its own statistics at each call",
    "GridSampler2DCpuFallbackBackward0": "float32 only",
    "LinearBackward0": OTHER_BACKENDS + "; elsewhere linear is addmm",
    "MatmulBackward0": NESTED,
    "PinMemoryBackward0": CUDA,
    "SliceInverseBackward0": "only functionalisation calls it",
}


def elsewhere(reason: str, names: str) -> None:
    ELSEWHERE.update(dict.fromkeys(names.split(), reason))


elsewhere(CUDA, """
    ConvDepthwise2DBackward0 ConvDepthwise3DBackward0 CudnnAffineGridGeneratorBackward0 CudnnAttentionBackward0
    CudnnBatchNormBackward0 CudnnConvolutionBackward0 CudnnConvolutionTransposeBackward0 CudnnGridSamplerBackward0
    EfficientAttentionBackward0 FlashAttentionBackward0 FusedDropoutBackward0 FusedRmsNormBackward0 GroupedMmBackward0
    ScaledDotProductCudnnAttentionBackward0 ScaledDotProductEfficientAttentionBackward0
    ScaledDotProductFlashAttentionBackward0
""")  # fmt: skip
elsewhere(OTHER_BACKENDS, """
    ConvolutionOverrideableBackward0 MaxPool2DBackward0 MiopenBatchNormBackward0 MiopenConvolutionBackward0
    MiopenConvolutionTransposeBackward0 MiopenDepthwiseConvolutionBackward0 MpsConvolutionBackward0
    MpsConvolutionTransposeBackward0 NnpackSpatialConvolutionBackward0
    ScaledDotProductFusedAttentionOverrideableBackward0
""")  # fmt: skip
elsewhere(ONEDNN, """
    MkldnnAdaptiveAvgPool2DBackward0 MkldnnConvolutionBackward0 MkldnnLinearBackward0 MkldnnMaxPool2DBackward0
    MkldnnMaxPool3DBackward0 MkldnnReshapeBackward0
""")  # fmt: skip
elsewhere(COMPLEX, """
    ComplexBackward0 ConjBackward0 ConjBackward0_copy ConjPhysicalBackward0 FftC2CBackward0 FftC2RBackward0
    FftR2CBackward0 PolarBackward0 ViewAsComplexBackward0 ViewAsComplexBackward0_copy ViewAsRealBackward0
    ViewAsRealBackward0_copy
""")  # fmt: skip
elsewhere(NESTED, " ".join(name for name in ROWS if "Nested" in name or "ToPadded" in name))
elsewhere(
    "an operator that torch registers from Python",
    " ".join(name for name in ROWS if name.startswith("GeneratedBackwardFor_")),
)
LIBRARIES = (
    "GeLUFunctionBackward",
    "SqrtBoundDerivativeBackward",
    "XSoftmaxBackward",
    "YosoCumulationBackward",
    "ROIAlignFunctionBackward",
    "ROIPoolFunctionBackward",
    "PSROIAlignFunctionBackward",
    "PSROIPoolFunctionBackward",
    "DeformConv2dFunctionBackward",
    "SwishAutoFnBackward",
    "MishAutoFnBackward",
    "HardSwishAutoFnBackward",
    "HardMishAutoFnBackward",
    "HardSigmoidAutoFnBackward",
    "HadaWeightBackward",
    "HadaWeightCPBackward",
)
elsewhere("an autograd.Function of a library (test_libraries.py, test_torchvision.py)", " ".join(LIBRARIES))

"""Convolutions of every backend, each with the product and its two transposed products."""

from typing import Any

import torch
from torch import Tensor

from .table import Kind, LinearMap, row

_SIGNATURE = ("bias_sym_sizes_opt", "transposed")
_GEOMETRY = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


def _geometry(n: Any) -> tuple[Any, ...]:
    """Stride, padding, dilation, transposed, output padding, groups; a backend's variant may lack some of them."""
    made = n.scratch.get(n.node)
    if made is None:
        try:
            made = n.several(_GEOMETRY)
        except AttributeError:
            stride = n.stride
            dilation = getattr(n, "dilation", (1,) * len(stride))
            output_padding = getattr(n, "output_padding", (0,) * len(stride))
            made = stride, n.padding, dilation, _is_transposed(n), output_padding, getattr(n, "groups", 1)
        n.scratch[n.node] = made
    return made


def _is_transposed(n: Any) -> bool:
    return getattr(n, "transposed", "Transpose" in type(n.node).__name__)


def _convolve(n: Any, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.convolution(x, w, bias, *_geometry(n))


def _convolve_transposed(n: Any, which: int, u: Tensor, x: Tensor, w: Tensor) -> Tensor:
    mask = [which == 0, which == 1, False]
    return torch.ops.aten.convolution_backward.default(u, x, w, None, *_geometry(n), mask)[which]


def _filters(n: Any) -> tuple[int, ...]:
    return (-1, 1, *_ones(n))


def _ones(n: Any) -> tuple[int, ...]:
    return (1,) * len(_geometry(n)[0])


def _signature(n: Any) -> tuple[bool, bool]:
    """Whether there is a bias, and whether the convolution is transposed."""
    try:
        bias, transposed = n.several(_SIGNATURE)
    except AttributeError:  # a variant that does not say may have had one, unless it takes none
        bias, transposed = (1,) * (len(n.node.next_functions) - 2), _is_transposed(n)
    return bool(bias) and bias != (0,), transposed


_CONVOLUTION: dict[str, Any] = {
    "forward": _convolve,
    "linear": LinearMap(
        (0, 1), _convolve, _convolve_transposed, bias=2, channels=_filters,
        spread=lambda n: (-1, *_ones(n)),
    ),
    "signature": _signature,
    "absent": lambda signature: () if signature[0] else (2,),
}  # fmt: skip

for _names, _input in (
    ("ConvolutionBackward0 ConvolutionBackward1 ConvolutionOverrideableBackward0", "input"),
    ("NnpackSpatialConvolutionBackward0", "input"),
    ("CudnnConvolutionBackward0 CudnnConvolutionTransposeBackward0 MkldnnConvolutionBackward0", "self"),
    ("MiopenConvolutionBackward0 MiopenConvolutionTransposeBackward0 MiopenDepthwiseConvolutionBackward0", "self"),
    ("MpsConvolutionBackward0 MpsConvolutionTransposeBackward0", "self"),
    ("ConvDepthwise2DBackward0 ConvDepthwise3DBackward0 SlowConv2DBackward0 SlowConv3DBackward0", "self"),
    ("SlowConvDilated2DBackward0 SlowConvDilated3DBackward0", "self"),
    ("SlowConvTranspose2DBackward0 SlowConvTranspose3DBackward0", "self"),
):
    row(_names, Kind.CONV, saved={0: (_input, None), 1: ("weight", None)}, **_CONVOLUTION)


def _convolve_tbc(n: Any, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.conv_tbc(x, w, w.new_zeros(w.shape[-1]) if bias is None else bias, n.pad)


def _convolve_tbc_transposed(n: Any, which: int, u: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return torch.ops.aten.conv_tbc_backward(u, x, w, w.new_zeros(w.shape[-1]), n.pad)[which]


row("ConvTbcBackward0", Kind.CONV, saved={0: ("self", None), 1: ("weight", None), 2: ("bias", None)},
    forward=_convolve_tbc, linear=LinearMap((0, 1), _convolve_tbc, _convolve_tbc_transposed, bias=2),
    signature=lambda n: (True, False))  # fmt: skip

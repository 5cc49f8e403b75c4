"""Fixed linear maps without parameters: in every preset their own backward.

Where some operands only steer the map (a sampling grid, a weight of interpolation), `carriers` names the others.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .table import Kind, row

T = Kind.TRANSFORM
aten = torch.ops.aten


def _resized(function: Any) -> Any:
    return lambda n, x: function(x, n.output_size, n.align_corners, n.scales_h, n.scales_w)


def _sampled(n: Any, x: Tensor, grid: Tensor) -> Tensor:
    function = torch.grid_sampler_2d if x.dim() == 4 else torch.grid_sampler_3d
    return function(x, grid, n.interpolation_mode, n.padding_mode, n.align_corners)


# Fourier transforms.
row("FftC2CBackward0", T, forward=lambda n, x: aten._fft_c2c(x, n.dim, n.normalization, n.forward))
row("FftR2CBackward0", T, saved={0: ("self", None)},
    forward=lambda n, x: aten._fft_r2c(x, n.dim, n.normalization, n.onesided))  # fmt: skip
row("FftC2RBackward0", T, forward=lambda n, x: aten._fft_c2r(x, n.dim, n.normalization, n.shape[n.dim[-1]]))

# Complex numbers, made of two real ones: a pair of relevances is no relevance of a complex number.
row("ComplexBackward0", T, forward=lambda n, a, b: torch.complex(a, b))
row("ConjBackward0 ConjBackward0_copy ConjPhysicalBackward0 ConjPhysicalBackward1", T, forward=lambda n, x: x.conj())
row("ViewAsRealBackward0 ViewAsRealBackward0_copy", T, forward=lambda n, x: torch.view_as_real(x.resolve_conj()))
row("ViewAsComplexBackward0 ViewAsComplexBackward0_copy", T, forward=lambda n, x: torch.view_as_complex(x))

# Scans and windows.
row("CumsumBackward0", T, forward=lambda n, x: x.cumsum(n.dim, dtype=n.dtype))
row("Col2ImBackward0", T,
    forward=lambda n, x: F.fold(x, n.shape[-2:], n.kernel_size, n.dilation, n.padding, n.stride))  # fmt: skip
# Windows put back where they were, their overlaps added up, as `torch.istft` does: the forward pass of another's backward.
row("UnfoldBackwardBackward0", T, forward=lambda n, x: aten.unfold_backward(x, n.shape, n.dim, n.size, n.step))

# Interpolation and sampling.
row("UpsampleLinear1DBackward0", T,
    forward=lambda n, x: aten.upsample_linear1d(x, n.output_size, n.align_corners, n.scales))  # fmt: skip
row("UpsampleBilinear2DBackward0", T, forward=_resized(aten.upsample_bilinear2d))
row("UpsampleBicubic2DBackward0", T, forward=_resized(aten.upsample_bicubic2d))
row("UpsampleBilinear2DAaBackward0", T, forward=_resized(aten._upsample_bilinear2d_aa))
row("UpsampleBicubic2DAaBackward0", T, forward=_resized(aten._upsample_bicubic2d_aa))
row("UpsampleLanczos2DAaBackward0 UpsampleTrilinear3DBackward0", T)
row("GridSampler2DBackward0 GridSampler3DBackward0 GridSampler2DCpuFallbackBackward0", T, carriers=(0,),
    saved={0: ("input", None), 1: ("grid", None)}, forward=_sampled)  # fmt: skip
row("CudnnGridSamplerBackward0", T, carriers=(0,), saved={0: ("self", None), 1: ("grid", None)})
row("AffineGridGeneratorBackward0", T,
    forward=lambda n, theta: F.affine_grid(theta, n.size, n.align_corners))  # fmt: skip
row("CudnnAffineGridGeneratorBackward0", T)
row("LerpBackward1", T, carriers=(0, 1), saved={0: ("self", 2), 1: ("end", 2), 2: ("weight", None)},
    forward=lambda n, a, b, weight: torch.lerp(a, b, weight))  # fmt: skip

# Reductions by index: sums, means, selections or products, as their mode says.
row("SegmentReduceBackward0", T, fills=True, saved={0: ("data", None)}, result="result")
row("ScatterReduceBackward0", T, fills=True, saved={0: ("self", None), 1: ("src", None)}, result="result")
row("IndexReduceBackward0", T, fills=True, saved={0: ("self", None), 1: ("source", None)}, result="result")

# Systems of linear equations, linear in their right-hand side.
row("LinalgSolveExBackward0", T, carriers=(1,), saved={0: ("A", None)}, result="result")
row("LinalgSolveTriangularBackward0", T, carriers=(1,), saved={0: ("self", None)}, result="result")
row("TriangularSolveBackward0", T, fills=True, saved={0: ("self", None), 1: ("A", None)}, result="solution")
row("CholeskySolveBackward0", T, carriers=(0,), saved={0: ("self", None), 1: ("input2", None)}, result="result")
row("LinalgLuSolveBackward0", T, carriers=(1,), saved={0: ("LU", None)}, result="result")

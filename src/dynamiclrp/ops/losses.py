"""Losses: their gradient, in every preset."""

from .table import Kind, row

L = Kind.LOSS
KEEPS_BOTH = {0: ("self", None), 1: ("target", None)}

row("MseLossBackward0 SmoothL1LossBackward0 HuberLossBackward0", L, saved=KEEPS_BOTH)
row("BinaryCrossEntropyBackward0 BinaryCrossEntropyWithLogitsBackward0", L, saved=KEEPS_BOTH)
row("NllLossBackward0 NllLoss2DBackward0 MultiMarginLossBackward0 MultilabelMarginLossBackward0", L,
    saved={0: ("self", None)})  # fmt: skip
row("SoftMarginLossBackward0", L, saved={0: ("self", None)})

# Fused with the linear map before them, as operators that torch registers from Python.
row("GeneratedBackwardFor_torch_nn__linear_cross_entropy_batch_chunked_defaultBackward", L)
row("GeneratedBackwardFor_torch_nn__linear_cross_entropy_batch_chunked_no_reduction_defaultBackward", L)

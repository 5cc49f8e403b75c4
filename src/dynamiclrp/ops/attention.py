"""Fused attention: the same operands in every backend."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from .table import Kind, row


def _attend(n: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, n.is_causal, scale=n.scale)


_QKV: Any = {"saved": {0: ("query", None), 1: ("key", None), 2: ("value", None)}, "result": "output"}
row("ScaledDotProductFlashAttentionForCpuBackward0", Kind.ATTENTION, **_QKV,
    forward=lambda n, q, k, v: _attend(n, q, k, v, n.attn_mask))  # fmt: skip
row("ScaledDotProductFlashAttentionBackward0 ScaledDotProductCudnnAttentionBackward0", Kind.ATTENTION,
    **_QKV, forward=lambda n, q, k, v, bias=None: _attend(n, q, k, v, bias))  # fmt: skip
row("ScaledDotProductEfficientAttentionBackward0 ScaledDotProductFusedAttentionOverrideableBackward0", Kind.ATTENTION,
    **_QKV, forward=lambda n, q, k, v, bias=None: _attend(n, q, k, v, bias))  # fmt: skip
row("FlashAttentionBackward0 EfficientAttentionBackward0 CudnnAttentionBackward0", Kind.ATTENTION,
    **_QKV)  # fmt: skip

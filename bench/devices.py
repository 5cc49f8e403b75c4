"""The same relevance on CPU and GPU, in every attention backend: small models, float64 or float32 on both sides.

    python bench/devices.py

Prints the largest error, relative to the largest relevance, for each model and preset; exits with 1 above the tolerance.
"""

from __future__ import annotations

import copy
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import dynamiclrp as dlrp


class Block(nn.Module):
    """A pre-norm decoder block with grouped-query attention, RMSNorm written out and SwiGLU."""

    def __init__(self, width: int = 64, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.size) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)
        self.norms = nn.ParameterList(nn.Parameter(torch.rand(width) + 0.5) for _ in range(2))

    def norm(self, x: Tensor, i: int) -> Tensor:
        return self.norms[i] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x, 0)
        q, k, v = (p(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for p in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        h = self.norm(x, 1)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Encoder(nn.Module):
    """Post-norm encoder with LayerNorm and GELU."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)[:, 0])


def decoder() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(64, 5), nn.Flatten())


def convnet() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, groups=2), nn.BatchNorm2d(16), nn.SiLU(), nn.AdaptiveAvgPool2d(2), nn.GroupNorm(4, 16),
        nn.Flatten(), nn.Linear(64, 5),
    )  # fmt: skip
    for module in net:
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias)
    return net


def main() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    cases = {
        "decoder": (decoder(), torch.randn(2, 16, 64)),
        "encoder": (Encoder(), torch.randn(2, 16, 64)),
        "conv net": (convnet(), torch.randn(2, 3, 32, 32)),
    }
    presets = ["attnlrp", "cp-lrp", "epsilon", "gamma", "epsilon-plus", "epsilon-plus-flat", "dynamic", "gradient"]
    backends = {
        "math": (SDPBackend.MATH, torch.float64, 1e-9),
        "efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.float32, 5e-3),
        "flash": (SDPBackend.FLASH_ATTENTION, torch.bfloat16, 0.3),
        "cudnn": (SDPBackend.CUDNN_ATTENTION, torch.bfloat16, 0.3),
    }
    failed = False
    for name, (model, x) in cases.items():
        model = model.eval()
        for label, (backend, dtype, tolerance) in backends.items():
            if name == "conv net" and label in ("flash", "cudnn"):
                continue
            here, there = copy.deepcopy(model).double(), copy.deepcopy(model).to("cuda", dtype)
            for preset in presets:
                if dtype == torch.bfloat16 and preset in (
                    "dynamic",
                    "epsilon",
                    "gamma",
                    "epsilon-plus",
                    "epsilon-plus-flat",
                ):
                    continue  # ill-conditioned where z is near 0: digits are not comparable
                truth = dlrp.explain(here, x.double(), target=1, preset=preset).relevance
                with sdpa_kernel(backend):
                    a = dlrp.explain(there, x.to("cuda", dtype), target=1, preset=preset)
                attention = sorted({s.name for s in a.plan.steps if str(s.kind) == "attention"})
                error = float((a.relevance.cpu().double() - truth).abs().max() / truth.abs().max())
                failed |= not error < tolerance
                print(f"{name:9} {label:9} {preset:18} {error:.2e} {'' if error < tolerance else 'FAILED'} {attention}")
    sys.exit(failed)


if __name__ == "__main__":
    main()

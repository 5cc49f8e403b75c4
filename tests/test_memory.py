"""Ways to need less memory: the same relevance with saved tensors elsewhere or recomputed; no attention matrix is built."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import dynamiclrp as dlrp
from dynamiclrp.timing import peak_bytes


class Block(nn.Module):
    def __init__(self, width: int, checkpointed: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.checkpointed = checkpointed

    def block(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)


class Net(nn.Module):
    def __init__(self, layers: int = 3, width: int = 16, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, checkpointed) for _ in range(layers))
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


@pytest.mark.parametrize("preset", ["attnlrp", "gamma", "dynamic"])
def test_saved_tensors_kept_elsewhere(preset):
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(2, 7, 16)
    plain = dlrp.explain(net, x, preset=preset).relevance
    with save_on_cpu():
        moved = dlrp.explain(net, x, preset=preset).relevance
    torch.testing.assert_close(moved, plain)
    kept: list[torch.Tensor] = []

    def put_away(tensor: torch.Tensor) -> int:
        kept.append(tensor.clone())
        return len(kept) - 1

    with saved_tensors_hooks(put_away, lambda number: kept[number]):
        fetched = dlrp.explain(net, x, preset=preset).relevance
    assert kept
    torch.testing.assert_close(fetched, plain)


@pytest.mark.parametrize("preset", ["attnlrp", "gamma", "dynamic"])
def test_checkpointed_layers(preset):
    torch.manual_seed(0)
    net = Net().eval()
    recomputed = Net(checkpointed=True).eval()
    recomputed.load_state_dict(net.state_dict())
    x = torch.randn(2, 7, 16)
    torch.testing.assert_close(
        dlrp.explain(recomputed, x, preset=preset).relevance, dlrp.explain(net, x, preset=preset).relevance
    )


@pytest.mark.parametrize("preset", ["attnlrp", "cp-lrp", "gamma", "dynamic"])
def test_no_attention_matrix_is_built_for_fused_attention(preset):
    """Memory grows with the number of tokens, not with its square."""
    net = Net(1).eval()
    explainer = dlrp.Explainer(net, preset)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        sizes = []
        for tokens in (512, 2048):
            x = torch.randn(1, tokens, 16)
            explainer(x)
            sizes.append(peak_bytes(lambda x=x: explainer(x)))
    assert sizes[1] < 4.6 * sizes[0]
    assert sizes[1] < 4 * 4 * 2048 * 2048  # one matrix of all heads


@pytest.mark.parametrize(("preset", "most"), [("attnlrp", 1.35), ("gamma", 2.2), ("dynamic", 2.2)])
def test_memory_against_gradient_times_input(preset, most):
    """Deep and narrow: what hooks held until the end would add up."""
    net = Net(12).eval().requires_grad_(False)
    x = torch.randn(1, 1024, 16)
    explainer = dlrp.Explainer(net, preset)
    explainer(x)

    def gradient() -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        return leaf.detach() * torch.autograd.grad(net(leaf).amax(-1).sum(), leaf)[0]

    gradient()
    assert peak_bytes(lambda: explainer(x)) < most * peak_bytes(gradient)


PAGES = """
import resource
import torch, dynamiclrp as dlrp

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(4 << 20) for _ in range(3)]  # 48 MiB together
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

dlrp.explain(torch.nn.Linear(3, 2), torch.ones(1, 3))
print(sorted(faults() for _ in range(11))[5])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that gives memory back")
def test_after_an_explanation_blocks_find_their_pages():
    counted = subprocess.run([sys.executable, "-c", PAGES], capture_output=True, text=True, check=True)
    assert int(counted.stdout) < 1000  # of 12,288; without an explanation 8,160, nearly every time

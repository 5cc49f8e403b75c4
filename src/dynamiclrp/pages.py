"""Memory that the C library keeps for the next explanation, on a CPU.

glibc hands free memory back to the system where more than a limit of it lies at the end of its heap, and takes large blocks from
the system one by one; each page of theirs is then made anew, which may cost a quarter of an explanation. Its limits grow with the
largest block that was ever freed, up to 32 MiB: any program that frees such a tensor has them. Elsewhere this does nothing.

What for: three explanations in a new process, `default` on a CPU (`bench/beside.py --fresh`): with it ResNet-50 takes 2.3 gradients and
MobileNetV2 2.5, without it 2.9 and 3.0.
"""

from __future__ import annotations

from functools import cache

import torch

_LARGEST = (32 << 20) - (1 << 16)  # bytes; of larger blocks glibc learns nothing


@cache
def keep_pages() -> None:
    """Have glibc's limits as high as they grow by themselves. The block is never written to, so it takes no memory."""
    torch.empty(_LARGEST, dtype=torch.uint8, device="cpu")

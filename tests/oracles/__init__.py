"""Slow re-implementations of LRP in relevance form, for the engine to be compared with.

In: the weights of a model and its inputs. Out: relevance, computed layer by layer from the textbook formulas.
Nothing here knows the engine: no coefficients, no autograd graph, no hooks. Readable first, fast never.

    attnlrp      AttnLRP and CP-LRP of Llama-, GPT-2- and BERT-like transformers
    dynamic      the DynamicLRP paper's rules on a tape of a few operations
    zennit_nets  small networks and the call of Zennit on them
    programs     whole random programs under every preset, and what the engine is asked about them
"""

import torch

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other


def _make_torchvision_importable() -> None:
    """Declare the two operators that torchvision's CUDA wheel cannot bring to a CPU-only torch.

    Zennit and transformers import torchvision, whose import fails without them; nothing here calls them.
    """
    global _torchvision_operators
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return
    except RuntimeError:
        _torchvision_operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _torchvision_operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_make_torchvision_importable()


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference, relative to the largest expected value."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert torch.isfinite(expected).all(), "the oracle is not finite"
    scale = expected.abs().max().item()
    assert scale > 0, "the oracle is all zero: nothing is compared"
    return (actual - expected).abs().max().item() / scale

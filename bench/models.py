"""The models that speed is measured on: published sizes, random weights, float inputs (pixels or embeddings)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dynamiclrp.coverage.case import mend_torchvision

Built = tuple[nn.Module, dict[str, Any]]


def _vision(name: str) -> Callable[[int], Built]:
    def build(batch: int) -> Built:
        import torchvision

        return getattr(torchvision.models, name)(weights=None), {"x": torch.randn(batch, 3, 224, 224)}

    return build


def roberta(batch: int, tokens: int = 384) -> Built:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        vocab_size=50265, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        max_position_embeddings=max(514, tokens + 2),
    )  # fmt: skip
    return RobertaForSequenceClassification(config), {"inputs_embeds": 0.02 * torch.randn(batch, tokens, 1024)}


def llama(batch: int, tokens: int = 512, layers: int = 16) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5, max_position_embeddings=131072, tie_word_embeddings=True,
    )  # fmt: skip
    inputs = {"inputs_embeds": 0.02 * torch.randn(batch, tokens, 2048), "use_cache": False, "logits_to_keep": 1}
    return LlamaForCausalLM(config), inputs


def small_llama(batch: int, tokens: int = 512, layers: int = 8) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4,
    )  # fmt: skip
    inputs = {"inputs_embeds": 0.02 * torch.randn(batch, tokens, 256), "use_cache": False, "logits_to_keep": 1}
    return LlamaForCausalLM(config), inputs


def flan_t5(batch: int, tokens: int = 384) -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32128, d_model=1024, d_kv=64, d_ff=2816, num_layers=24, num_decoder_layers=24, num_heads=16,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), {
        "inputs_embeds": torch.randn(batch, tokens, 1024),
        "decoder_inputs_embeds": torch.randn(batch, 8, 1024),
        "use_cache": False,
    }


def mamba(batch: int, tokens: int = 64) -> Built:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=50280, hidden_size=768, num_hidden_layers=24, state_size=16)
    return MambaForCausalLM(config), {"inputs_embeds": 0.02 * torch.randn(batch, tokens, 768), "use_cache": False}


MODELS: dict[str, tuple[Callable[..., Built], torch.dtype, tuple[str, ...]]] = {
    "VGG16": (_vision("vgg16"), torch.float32, ("attnlrp", "default", "epsilon-plus", "gamma", "dynamic")),
    "ResNet-50": (_vision("resnet50"), torch.float32, ("attnlrp", "default", "epsilon-plus", "gamma", "dynamic")),
    "ViT-b-16": (_vision("vit_b_16"), torch.float32, ("attnlrp", "default", "gamma", "dynamic")),
    "RoBERTa-large, 384 tokens": (roberta, torch.float32, ("attnlrp", "default", "gamma", "dynamic")),
    "Llama-3.2-1B, 512 tokens": (llama, torch.float32, ("attnlrp", "gamma", "dynamic")),
    "Llama-3.2-1B bf16, 512 tokens": (llama, torch.bfloat16, ("attnlrp", "default", "dynamic")),
    "Flan-T5-large, 384 tokens": (flan_t5, torch.float32, ("attnlrp", "dynamic")),
    "Mamba-130m, 64 tokens": (mamba, torch.float32, ("attnlrp",)),
}
SMALL = {
    "a small Llama": (small_llama, torch.float32, ("attnlrp", "gamma", "dynamic")),
    "a small Llama, 32 tokens": (partial(small_llama, tokens=32), torch.float32, ("attnlrp", "gamma", "dynamic")),
    "MobileNetV2": (_vision("mobilenet_v2"), torch.float32, ("attnlrp", "default", "dynamic")),
}


def build(name: str, batch: int, device: str, **sizes: int) -> Built:
    """The model in eval mode with frozen parameters, and its inputs, on a device."""
    mend_torchvision()
    torch.manual_seed(0)
    make, dtype, _ = (MODELS | SMALL)[name]
    with torch.device(device):
        model, inputs = make(batch, **sizes)
    model = model.eval().requires_grad_(False).to(device, dtype)
    with torch.no_grad():  # a head that is zero at first has nothing to explain
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(std=0.02)
    moved = {k: v.to(device, dtype) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    return model, moved

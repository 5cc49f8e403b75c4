"""Sixty small models that cover what users bring: the paper's fifteen, forty of the zoos, five of our own.

In: a name. Out: a `Case` (a model in eval mode, its inputs). Random weights from a fixed seed. Read by `same.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dynamiclrp.coverage.case import Case, mend_torchvision, wake
from dynamiclrp.coverage.paper import architectures
from dynamiclrp.coverage.sweep import zoo

Made = tuple[nn.Module, dict[str, Any]]


def _ids(length: int = 12, vocabulary: int = 90) -> Tensor:
    return torch.randint(5, vocabulary, (2, length))


def _transformers() -> Any:
    mend_torchvision()
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


# ---------------------------------------------------------------- the paper's fifteen, small

_TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def _vgg() -> Made:
    from torchvision.models.vgg import VGG, make_layers

    widths = [8, 8, "M", 12, 12, "M", 16, 16, 16, "M", 24, 24, 24, "M", 24, 24, 24, "M"]
    model = VGG(make_layers(widths, batch_norm=False), num_classes=10)
    model.classifier = nn.Sequential(nn.Linear(24 * 49, 48), nn.ReLU(), nn.Dropout(), nn.Linear(48, 10))
    return model, {"x": torch.randn(2, 3, 64, 64)}


def _resnet() -> Made:
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [2, 2, 2, 2], num_classes=10, width_per_group=8), {"x": torch.randn(2, 3, 64, 64)}


def _vit() -> Made:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 8, num_layers=3, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=10)
    return model, {"x": torch.randn(2, 3, 32, 32)}


def _efficientnet() -> Made:
    from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig

    blocks = [
        FusedMBConvConfig(1, 3, 1, 8, 8, 1),
        FusedMBConvConfig(4, 3, 2, 8, 16, 2),
        MBConvConfig(4, 3, 2, 16, 24, 2),
        MBConvConfig(6, 3, 1, 24, 32, 1),
    ]
    return EfficientNet(blocks, 0.2, num_classes=10, last_channel=48), {"x": torch.randn(2, 3, 48, 48)}


def _siglip2() -> Made:
    t = _transformers()
    return t.SiglipVisionModel(t.SiglipVisionConfig(**_TEXT, image_size=32, patch_size=8)), {
        "pixel_values": torch.randn(2, 3, 32, 32)
    }


def _xls_r() -> Made:
    t = _transformers()
    config = t.Wav2Vec2Config(
        **_TEXT, feat_extract_norm="layer", conv_bias=True, do_stable_layer_norm=True, conv_dim=(16, 16, 16),
        conv_kernel=(10, 3, 2), conv_stride=(5, 2, 2), num_feat_extract_layers=3, num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4, classifier_proj_size=16,
    )  # fmt: skip
    return t.Wav2Vec2ForSequenceClassification(config), {"input_values": torch.randn(2, 800)}


def _whisper() -> Made:
    t = _transformers()
    config = t.WhisperConfig(
        vocab_size=100, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=20, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return t.WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(2, 8, 40),
        "decoder_input_ids": _ids(6),
    }


def _gpt2() -> Made:
    t = _transformers()
    config = t.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    return t.GPT2LMHeadModel(config), {"input_ids": _ids()}


def _roberta() -> Made:
    t = _transformers()
    config = t.RobertaConfig(**_TEXT, vocab_size=100, max_position_embeddings=40, type_vocab_size=1)
    return t.RobertaForQuestionAnswering(config), {"input_ids": _ids()}


def _llama() -> Made:
    t = _transformers()
    config = t.LlamaConfig(**_TEXT, vocab_size=100, num_key_value_heads=2, tie_word_embeddings=True)
    return t.LlamaForCausalLM(config), {"input_ids": _ids(), "use_cache": False}


def _gemma() -> Made:
    t = _transformers()
    config = t.Gemma3TextConfig(
        **_TEXT,
        vocab_size=100,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=8,
        query_pre_attn_scalar=8,
        pad_token_id=0,
    )
    return t.Gemma3ForCausalLM(config), {"input_ids": _ids(), "use_cache": False}


def _qwen() -> Made:
    t = _transformers()
    config = t.Qwen3Config(**_TEXT, vocab_size=100, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)
    return t.Qwen3ForCausalLM(config), {"input_ids": _ids(), "use_cache": False}


def _flan_t5() -> Made:
    t = _transformers()
    config = t.T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0,
    )  # fmt: skip
    return t.T5ForConditionalGeneration(config), {"input_ids": _ids(), "decoder_input_ids": _ids(5)}


def _deplot() -> Made:
    t = _transformers()
    text = t.Pix2StructTextConfig(
        vocab_size=100, hidden_size=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, is_decoder=True
    )
    vision = t.Pix2StructVisionConfig(
        hidden_size=32, patch_embed_hidden_size=27, d_ff=48, d_kv=8, num_hidden_layers=2, num_attention_heads=4
    )
    patches = torch.randn(2, 16, 29)
    patches[..., 0], patches[..., 1] = torch.arange(16) // 4 + 1, torch.arange(16) % 4 + 1  # rows and columns
    model = t.Pix2StructForConditionalGeneration(t.Pix2StructConfig(text_config=text, vision_config=vision))
    return model, {"flattened_patches": patches, "decoder_input_ids": _ids(5)}


def _mamba() -> Made:
    t = _transformers()
    config = t.MambaConfig(vocab_size=100, hidden_size=24, state_size=4, num_hidden_layers=2)
    return t.MambaForCausalLM(config), {"input_ids": _ids(8), "use_cache": False}


PAPER: dict[str, Callable[[], Made]] = {
    "VGG16": _vgg,
    "ResNet-50": _resnet,
    "ViT-b-16": _vit,
    "EfficientNetV2-m": _efficientnet,
    "SigLIP2-So400m-14-384": _siglip2,
    "Wav2Vec2-XLS-R-300m": _xls_r,
    "Whisper-small": _whisper,
    "GPT-2": _gpt2,
    "RoBERTa-large": _roberta,
    "Llama-3.2-1B": _llama,
    "Gemma-3-270m": _gemma,
    "Qwen3-0.6B": _qwen,
    "Flan-T5-large": _flan_t5,
    "DePlot": _deplot,
    "Mamba-130m": _mamba,
}


# ---------------------------------------------------------------- our own five


class Checkpointed(nn.Module):
    """Two residual blocks whose activations are thrown away and made again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, 2, 1), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = F.gelu(x + checkpoint(block, x, use_reentrant=False))
        return self.head(x.mean((2, 3)))


class Compiled(nn.Module):
    """A layer that is compiled inside a model that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 16), nn.Linear(16, 5)
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.layer = torch.compile(layer, backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x)).mean(1))


class Recurrent(nn.Module):
    """A bidirectional LSTM under a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True, bidirectional=True)
        self.gru, self.head = nn.GRU(16, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(x)
        x, _ = self.gru(x)
        return self.head(x[:, -1])


class Experts(nn.Module):
    """Each token goes to two of four experts, weighed by a softmax over the best scores."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head, self.norm = nn.Linear(12, 4, bias=False), nn.Linear(12, 5), nn.RMSNorm(12)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(12, 16), nn.SiLU(), nn.Linear(16, 12)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(tokens).topk(2, -1)
        weights = weights.softmax(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, rank = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, rank, None])
        return self.head((x + out.view_as(x)).mean(1))


class StateSpace(nn.Module):
    """A selective scan, token by token, with a gate beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.step, self.out = nn.Linear(8, 24), nn.Linear(12, 12), nn.Linear(12, 5)
        self.decay = nn.Parameter(torch.rand(12, 3))
        self.read, self.write = nn.Linear(12, 3), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.into(x).chunk(2, -1)
        step, read, write = F.softplus(self.step(x)), self.read(x), self.write(x)
        decay = torch.exp(-step[..., None] * self.decay)
        new = (step * x)[..., None] * write[:, :, None]
        state, outputs = torch.zeros_like(new[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + new[:, t]
            outputs.append((state * read[:, t, None]).sum(-1))
        return self.out((torch.stack(outputs, 1) * F.silu(gate)).mean(1))


OWN: dict[str, Callable[[], Made]] = {
    "checkpointed": lambda: (Checkpointed(), {"x": torch.randn(2, 3, 16, 16)}),
    "compiled": lambda: (Compiled(), {"x": torch.randn(2, 6, 12)}),
    "recurrent": lambda: (Recurrent(), {"x": torch.randn(2, 6, 6)}),
    "experts": lambda: (Experts(), {"x": torch.randn(2, 5, 12)}),
    "state space": lambda: (StateSpace(), {"x": torch.randn(2, 6, 8)}),
}

# ---------------------------------------------------------------- forty of the zoos

ZOO = {
    "torchvision": (
        "densenet121", "googlenet", "inception_v3", "mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf", "resnet18",
        "shufflenet_v2_x0_5", "squeezenet1_1", "swin_v2_t",
    ),
    "timm": (
        "byobnet", "cait", "coat", "convnext", "crossvit", "davit", "edgenext", "ghostnet", "mlp_mixer", "metaformer", "nfnet", "pvt_v2",
        "res2net", "xcit",
    ),
    "transformers": (
        "albert", "bart", "bert", "bloom", "clip", "convbert", "deberta-v2", "distilbert", "falcon", "gpt_neox", "mixtral", "opt",
        "perceiver", "rwkv", "segformer", "xlnet",
    ),
}  # fmt: skip

# One of each sort, for a minute's run.
QUICK = (
    "VGG16", "ResNet-50", "ViT-b-16", "EfficientNetV2-m", "Wav2Vec2-XLS-R-300m", "GPT-2", "Llama-3.2-1B", "Flan-T5-large", "Mamba-130m",
    "checkpointed", "compiled", "recurrent", "experts", "torchvision: mobilenet_v2", "timm: convnext", "transformers: bert",
)  # fmt: skip


def names(published: bool) -> list[str]:
    """All cases; of published sizes there are the paper's."""
    if published:
        return [architecture.name for architecture in architectures()]
    return [*PAPER, *OWN, *(f"{library}: {name}" for library, members in ZOO.items() for name in members)]


def build(name: str, published: bool = False) -> Case:
    """The case of that name."""
    torch.manual_seed(0)
    library, _, member = name.partition(": ")
    if member:
        return zoo(library).build(member)
    if published:
        model, inputs = next(a for a in architectures() if a.name == name).build()
    else:
        mend_torchvision()
        model, inputs = (PAPER | OWN)[name]()
    return Case(name, wake(model), inputs)

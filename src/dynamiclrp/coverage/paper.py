"""The fifteen architectures of the DynamicLRP paper, at their published sizes, with the paper's numbers beside ours.

Random weights, real input shapes; text is short, since its length does not change the graph (except Mamba's, whose scan
is written out step by step). Numbers: Lee and Arias 2025, "A Model-Agnostic Solution to LRP", tables 4 and 5.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

import dynamiclrp as dlrp

from .case import Case, mend_torchvision, wake
from .check import say, under_dynamic

TOKENS = 16
AGGREGATE = (31_440, 31_465)  # covered and all nodes, as the paper sums them up


@dataclass(frozen=True)
class Published:
    """The paper's numbers: its table 5 for all, its table 4 for four of them."""

    covered: int
    nodes: int
    ops_covered: int
    ops: int
    promises: int | None = None
    internal_nodes: int | None = None
    depth: int | None = None
    density: float | None = None


@dataclass(frozen=True)
class Architecture:
    """One row of the table."""

    name: str
    published: Published
    build: Callable[[], tuple[nn.Module, dict[str, Any]]]


@dataclass
class Measured:
    """Our numbers for one architecture."""

    name: str
    parameters: int = 0
    nodes: int = 0  # of the whole autograd graph, with every parameter followed, as the paper counts
    covered: int = 0
    ops: int = 0
    ops_covered: int = 0
    explained_nodes: int = 0  # of the graph that `explain` makes, which follows no weights
    live: int = 0
    promises: int = 0
    internal_nodes: int = 0
    depth: int = 0
    density: float = 0.0
    finite: bool = False
    dynamic: str = ""  # "ok", "float64: …" where float32 overflows, or the error
    residual: float | None = None  # of the ledger under `default`, relative
    kept: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0  # one explanation under `default`
    total_seconds: float = 0.0
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(architecture: Architecture) -> Measured:
    """Build it, look at it, explain it, and let it go."""
    start = time.perf_counter()
    found = Measured(architecture.name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            model, inputs = architecture.build()
            _measure(Case(architecture.name, wake(model), inputs), found)
            del model, inputs
    except Exception as error:
        found.error = say(error)
    gc.collect()
    found.total_seconds = round(time.perf_counter() - start, 1)
    return found


def _measure(case: Case, found: Measured) -> None:
    found.parameters = sum(p.numel() for p in case.model.parameters())
    found.nodes, found.covered, found.ops, found.ops_covered = _whole(case)
    report = dlrp.inspect(case.model, **case.inputs, preset="dynamic")
    found.explained_nodes, found.live = report.nodes, report.live
    if report.plan is not None:
        s = report.plan.statistics
        found.promises, found.internal_nodes, found.depth, found.density = (
            s.promises,
            s.internal_nodes,
            s.depth,
            s.density,
        )
    del report
    start = time.perf_counter()
    explained = dlrp.explain(case.model, **case.inputs)
    found.seconds = round(time.perf_counter() - start, 2)
    found.finite = all(bool(torch.isfinite(r).all()) for r in explained.relevances.values())
    del explained
    found.dynamic = under_dynamic(case)
    gc.collect()
    book = dlrp.explain(case.model, **case.inputs, ledger=True).ledger
    assert isinstance(book, dlrp.Ledger)
    scale = max([abs(book.total), *(entry.scale for entry in book.entries)])
    found.residual = abs(book.residual) / scale
    found.kept = {reason: amount / (abs(book.total) or 1.0) for reason, amount in book.kept.items()}


def _whole(case: Case) -> tuple[int, int, int, int]:
    """Nodes, nodes with a row, and the same of node types, when autograd follows the input and every parameter."""
    from dynamiclrp.capture import capture
    from dynamiclrp.ops import OPS
    from dynamiclrp.outputs import unwrap

    inputs = {
        name: value.detach().requires_grad_()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in case.inputs.items()
    }
    graph = capture([unwrap(case.model(**inputs))], [], {})
    types = [kind.__name__ for kind in graph.types]
    known = {kind for kind in types if kind in OPS}
    return len(types), sum(kind in known for kind in types), len(set(types)), len(known)


def architectures() -> Iterator[Architecture]:
    """All fifteen, in the paper's order."""
    yield Architecture("VGG16", Published(90, 90, 9, 9, 32, 0, 32, 0.356), lambda: _vision("vgg16", 224))
    yield Architecture("ResNet-50", Published(339, 339, 10, 10), lambda: _vision("resnet50", 224))
    yield Architecture("ViT-b-16", Published(779, 779, 16, 16, 224, 27, 227, 0.288), lambda: _vision("vit_b_16", 224))
    yield Architecture("EfficientNetV2-m", Published(1526, 1526, 12, 12), lambda: _vision("efficientnet_v2_m", 480))
    yield Architecture("SigLIP2-So400m-14-384", Published(2178, 2178, 19, 19), _siglip2)
    yield Architecture("Wav2Vec2-XLS-R-300m", Published(2021, 2022, 18, 19), _xls_r)
    yield Architecture("Whisper-small", Published(2729, 2729, 22, 22), _whisper)
    yield Architecture("GPT-2", Published(885, 885, 19, 19), _gpt2)
    yield Architecture("RoBERTa-large", Published(1461, 1461, 14, 14, 243, 48, 438, 0.166), _roberta)
    yield Architecture("Llama-3.2-1B", Published(1787, 1787, 24, 24), _llama)
    yield Architecture("Gemma-3-270m", Published(2482, 2482, 24, 24), _gemma)
    yield Architecture("Qwen3-0.6B", Published(2590, 2590, 18, 18), _qwen)
    yield Architecture("Flan-T5-large", Published(5713, 5713, 24, 24, 798, 348, 980, 0.140), _flan_t5)
    yield Architecture("DePlot", Published(2863, 2863, 23, 23), _deplot)
    yield Architecture("Mamba-130m", Published(3397, 3421, 25, 26), _mamba)


def _vision(name: str, side: int) -> tuple[nn.Module, dict[str, Any]]:
    mend_torchvision()
    from torchvision.models import get_model

    return get_model(name, weights=None), {"x": torch.randn(1, 3, side, side)}


def _transformers() -> Any:
    mend_torchvision()
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def _ids(vocabulary: int, length: int = TOKENS) -> torch.Tensor:
    return torch.randint(10, vocabulary, (1, length))


def _siglip2() -> tuple[nn.Module, dict[str, Any]]:
    t = _transformers()
    config = t.SiglipVisionConfig(
        hidden_size=1152,
        intermediate_size=4304,
        num_hidden_layers=27,
        num_attention_heads=16,
        image_size=384,
        patch_size=14,
    )
    return t.SiglipVisionModel(config), {"pixel_values": torch.randn(1, 3, 384, 384)}


def _xls_r() -> tuple[nn.Module, dict[str, Any]]:
    t = _transformers()
    config = t.Wav2Vec2Config(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, feat_extract_norm="layer",
        conv_bias=True, do_stable_layer_norm=True,
    )  # fmt: skip
    return t.Wav2Vec2ForSequenceClassification(config), {"input_values": torch.randn(1, 16_000)}


def _whisper() -> tuple[nn.Module, dict[str, Any]]:
    t = _transformers()
    config = t.WhisperConfig(
        vocab_size=51_865, d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12,
        decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072, num_mel_bins=80,
    )  # fmt: skip
    inputs = {"input_features": torch.randn(1, 80, 3000), "decoder_input_ids": _ids(50_000, 8)}
    return t.WhisperForConditionalGeneration(config), inputs


def _gpt2() -> tuple[nn.Module, dict[str, Any]]:
    t = _transformers()
    return t.GPT2LMHeadModel(t.GPT2Config()), {"input_ids": _ids(50_257)}


def _roberta() -> tuple[nn.Module, dict[str, Any]]:
    t = _transformers()
    config = t.RobertaConfig(
        vocab_size=50_265, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5,
    )  # fmt: skip
    return t.RobertaForQuestionAnswering(config), {"input_ids": _ids(50_265)}


def _llama() -> tuple[nn.Module, dict[str, Any]]:
    t = _transformers()
    config = t.LlamaConfig(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=131_072, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    )  # fmt: skip
    return t.LlamaForCausalLM(config), {"input_ids": _ids(128_000)}


def _gemma() -> tuple[nn.Module, dict[str, Any]]:
    t = _transformers()
    config = t.Gemma3TextConfig(
        vocab_size=262_144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, sliding_window=512, query_pre_attn_scalar=256, max_position_embeddings=32_768,
    )  # fmt: skip
    return t.Gemma3ForCausalLM(config), {"input_ids": _ids(262_144)}


def _qwen() -> tuple[nn.Module, dict[str, Any]]:
    t = _transformers()
    config = t.Qwen3Config(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=True,
    )  # fmt: skip
    return t.Qwen3ForCausalLM(config), {"input_ids": _ids(151_643)}


def _flan_t5() -> tuple[nn.Module, dict[str, Any]]:
    t = _transformers()
    config = t.T5Config(
        vocab_size=32_128, d_model=1024, d_kv=64, d_ff=2816, num_layers=24, num_decoder_layers=24, num_heads=16,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    )  # fmt: skip
    return t.T5ForConditionalGeneration(config), {"input_ids": _ids(32_000), "decoder_input_ids": _ids(32_000, 8)}


def _deplot() -> tuple[nn.Module, dict[str, Any]]:
    t = _transformers()
    config = t.Pix2StructConfig(
        text_config=t.Pix2StructTextConfig(
            vocab_size=50_244, hidden_size=768, d_kv=64, d_ff=2048, num_layers=12, num_heads=12, is_decoder=True
        ),
        vision_config=t.Pix2StructVisionConfig(
            hidden_size=768,
            patch_embed_hidden_size=768,
            d_ff=2048,
            d_kv=64,
            num_hidden_layers=12,
            num_attention_heads=12,
        ),
    )
    patches = torch.randn(1, 256, 770)
    patches[..., 0] = torch.arange(256) // 16 + 1  # row and column of each patch come first
    patches[..., 1] = torch.arange(256) % 16 + 1
    return t.Pix2StructForConditionalGeneration(config), {
        "flattened_patches": patches,
        "decoder_input_ids": _ids(50_000, 8),
    }


def _mamba() -> tuple[nn.Module, dict[str, Any]]:
    t = _transformers()
    config = t.MambaConfig(vocab_size=50_280, hidden_size=768, state_size=16, num_hidden_layers=24)
    return t.MambaForCausalLM(config), {"input_ids": _ids(50_000, 8)}

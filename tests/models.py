"""Small models that several test files share, and the check that a call left nothing behind.

Everything is tiny, random and in eval mode: no parameter is 0 or 1 by chance, so nothing cancels by accident.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import oracles  # noqa: F401  before transformers: makes its import of torchvision work

# isort: split
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

IDS = torch.tensor([[3, 14, 15, 9, 26], [2, 7, 18, 28, 1]])


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def randomise(model: nn.Module, seed: int = 0, std: float = 0.3) -> nn.Module:
    """Every parameter and every statistic random; norm scales near 1; eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = std * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + noise if parameter.dim() == 1 and name.endswith("weight") else noise)
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator, dtype=torch.float64))
    return model.eval()


# ---------------------------------------------------------------- models


class Mlp(nn.Module):
    shape = (6,)

    def __init__(self, bias: bool = True, inplace: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 9, bias), nn.Linear(9, 8, bias), nn.Linear(8, 4, bias)
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x), self.inplace)
        x = F.relu(self.second(x), self.inplace)
        return self.third(x)


class Block(nn.Module):
    def __init__(self, inplace: bool = True) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        return self.relu(inner + x)


class ResNet(nn.Module):
    """Residual blocks, batch norms, in-place ReLUs, both pools."""

    shape = (3, 8, 8)

    def __init__(self, inplace: bool = True) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace))
        self.blocks = nn.Sequential(Block(inplace), Block(inplace))
        self.pool, self.mean = nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mean(self.blocks(self.pool(self.stem(x)))).flatten(1))


class Twice(nn.Module):
    """Two inputs, two branches, a sum and a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.top = nn.Linear(6, 7), nn.Linear(5, 7), nn.Linear(14, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        left, right = F.relu(self.left(a)), F.relu(self.right(b))
        return self.top(torch.cat([left + right, left], -1))


class Gated(nn.Module):
    """Squeeze and excitation: a product of two live factors, half of it exactly zero, under an average."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        gate = torch.sigmoid(self.gate(x.mean((2, 3))))
        return self.head(F.avg_pool2d(x * gate[:, :, None, None], 6).flatten(1))


def mlp(**options) -> Mlp:
    return randomise(Mlp(**options), std=0.5)


def resnet(**options) -> ResNet:
    return randomise(ResNet(**options), std=0.4)


def gpt2(**options) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=1, **options
    )  # fmt: skip
    return randomise(GPT2LMHeadModel(config))


def llama(**options) -> LlamaForCausalLM:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_key_value_heads": 1} | options
    return randomise(LlamaForCausalLM(LlamaConfig(vocab_size=40, num_attention_heads=2, **shape)))


def _bert(labels: int) -> BertConfig:
    return BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, num_labels=labels,
    )  # fmt: skip


def bert() -> BertForSequenceClassification:
    return randomise(BertForSequenceClassification(_bert(3)))


def bert_qa() -> BertForQuestionAnswering:
    return randomise(BertForQuestionAnswering(_bert(2)))


def t5() -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
    )  # fmt: skip
    return randomise(T5ForConditionalGeneration(config))


# ---------------------------------------------------------------- how a model is asked


def example(model: nn.Module, rows: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    """A batch for a vision-like model, or embeddings for a language model: a leaf that requires gradients."""
    if isinstance(model, (Mlp, ResNet)):
        return gaussian(rows, *model.shape, seed=5, dtype=dtype).requires_grad_()
    return model.get_input_embeddings()(IDS[:rows]).detach().to(dtype).requires_grad_()


def logits(model: nn.Module, x: Tensor) -> Tensor:
    """One row of scores for each row of the batch; of a language model, those after the last token."""
    if isinstance(model, (Mlp, ResNet)):
        return model(x)
    options = {"use_cache": False} if isinstance(model, (GPT2LMHeadModel, LlamaForCausalLM)) else {}
    scores = model(inputs_embeds=x, **options).logits
    return scores if scores.dim() == 2 else scores[:, -1]


# ---------------------------------------------------------------- nothing left behind


def _footprint(model: nn.Module | None, tensors: tuple[Tensor, ...]) -> dict[str, object]:
    modules = dict(model.named_modules()) if model is not None else {}
    every = [*tensors, *(model.parameters() if model is not None else ())]
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "module hooks": {
            (name, kind): len(getattr(module, kind)) for name, module in modules.items() for kind in kinds
        },
        "global hooks": [len(getattr(nn.modules.module, "_global" + kind)) for kind in kinds],
        "training": {name: module.training for name, module in modules.items()},
        "requires_grad": [t.requires_grad for t in every],
        "grad": [t.grad for t in every if t.is_leaf],
        "tensor hooks": [len(t._backward_hooks or ()) for t in every],
        "values": [t.detach().clone() for t in every if t.layout == torch.strided],
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), len(_get_current_dispatch_mode_stack())),
    }


@contextmanager
def leaves_nothing_behind(model: nn.Module | None = None, *tensors: Tensor) -> Iterator[None]:
    """No hook, flag, `.grad`, value or mode differs afterwards, whether or not the block raised."""
    before = _footprint(model, tensors)
    try:
        yield
    finally:
        after = _footprint(model, tensors)
        values, now = before.pop("values"), after.pop("values")
        assert after == before
        assert all(grad is None for grad in after["grad"])
        assert all(torch.equal(a, b) for a, b in zip(values, now, strict=True))

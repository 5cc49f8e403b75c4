"""Answers to SQuAD v2 questions: is the most relevant token part of the answer? The paper's Table 1.

    python experiments/squad.py --model roberta-large --out docs/results/roberta_squad.json     (or bert, flan-t5-large)
    python experiments/squad.py --local --data DIR --model minilm --out docs/results/minilm_squad.json
    python experiments/squad.py --local --data DIR --model smollm2 --out docs/results/smollm2_squad.json

Answerable questions only; tokens of the question (and of the prompt) are masked out of the ranking. Span models are
explained for their start and end logits (`--curves`: perturbation curves of those), generating models for the first token
of their answer. Locally the questions come from four articles that the span model never saw. TGS, TPS: is the top token in a
gold span, in the predicted span?
"""

from __future__ import annotations

import argparse
import importlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from options import about, chosen, earlier, half_when_scoring, parser, write_comparison, write_json
from spans import Encoded, context_mask, encode, gold_spans, padded, predicted_spans
from texts import HELD_OUT, Question, minilm_for, smollm2, squad
from torch import Tensor, nn

import methods as m
from dynamiclrp import evaluate as ev

SPAN = {"bert": "deepset/bert-large-uncased-whole-word-masking-squad2", "roberta-large": "deepset/roberta-large-squad2"}
T5 = {"flan-t5-large": "sjrhuschlee/flan-t5-large-squad2"}
LOCAL = ("minilm", "smollm2")
PROMPT = (
    "<|im_start|>user\nAnswer with a few words copied from the text.\nText: {context}\nQuestion: {question}<|im_end|>\n"
    '<|im_start|>assistant\nAnswer: "'
)


@dataclass(frozen=True)
class Asked:
    """Questions with what the model answered. `targets` is what is explained, `predicted` where the answer lies."""

    inputs: dict[str, Tensor]
    targets: Tensor
    gold: Tensor
    predicted: Tensor
    allowed: Tensor
    texts: list[str]
    answers: list[list[str]]


def ask_span_model(model: nn.Module, tokenizer: Any, rows: list[Encoded], device: str) -> Asked:
    inputs = padded(rows, tokenizer.pad_token_id, device)
    if getattr(model.config, "type_vocab_size", 0) < 2:
        del inputs["token_type_ids"]
    with torch.no_grad():
        out = model(**inputs)
    spans = predicted_spans(out.start_logits, out.end_logits, rows)
    return Asked(
        inputs,
        torch.tensor(spans),
        gold_spans(rows),
        torch.tensor(spans),
        context_mask(rows),
        [row.text(span) for row, span in zip(rows, spans)],
        [[text for text, _ in row.question.answers] for row in rows],
    )


def _places(offsets: list[tuple[int, int]], start: int, end: int) -> tuple[int, int] | None:
    """The tokens that cover some characters."""
    inside = [i for i, (a, b) in enumerate(offsets) if a < end and b > start and b > a]
    return (inside[0], inside[-1]) if inside else None


def ask_decoder(model: nn.Module, tokenizer: Any, question: Question, device: str) -> Asked | None:
    """A causal model's answer; None if it says nothing that stands in the text."""
    before = PROMPT.split("{context}")[0]
    text = PROMPT.format(context=question.context, question=question.question)
    out = tokenizer(text, return_offsets_mapping=True)
    offsets = [tuple(o) for o in out["offset_mapping"]]
    ids = torch.tensor([out["input_ids"]], device=device)
    with torch.no_grad():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
    answer = (
        tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True).split("\n")[0].split('"')[0].strip(' ."')
    )
    place = question.context.lower().find(answer.lower()) if answer else -1
    if place < 0:
        return None
    shift = len(before)
    predicted = _places(offsets, shift + place, shift + place + len(answer))
    gold = [
        _places(offsets, shift + start, shift + start + len(text)) for text, start in dict.fromkeys(question.answers)
    ]
    context = torch.tensor([[shift <= a and b <= shift + len(question.context) and b > a for a, b in offsets]])
    spans = [span for span in gold if span]
    if predicted is None or not spans:
        return None
    return Asked(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        made[:, ids.shape[1]].cpu(),
        torch.tensor([spans]),
        torch.tensor([predicted]),
        context,
        [answer],
        [[text for text, _ in question.answers]],
    )


def ask_t5(model: nn.Module, tokenizer: Any, question: Question, device: str) -> Asked | None:
    """An encoder-decoder's answer to "question: … context: …", explained at its encoder's tokens."""
    before = f"question: {question.question} context: "
    out = tokenizer(before + question.context, return_offsets_mapping=True)
    offsets = [tuple(o) for o in out["offset_mapping"]]
    ids = torch.tensor([out["input_ids"]], device=device)
    with torch.no_grad():
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
    answer = tokenizer.decode(made[0], skip_special_tokens=True).strip()
    place = question.context.lower().find(answer.lower()) if answer else -1
    if place < 0:
        return None
    shift = len(before)
    predicted = _places(offsets, shift + place, shift + place + len(answer))
    gold = [
        _places(offsets, shift + start, shift + start + len(text)) for text, start in dict.fromkeys(question.answers)
    ]
    spans = [span for span in gold if span]
    if predicted is None or not spans:
        return None
    return Asked(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": made[:, :1]},
        torch.stack([torch.zeros(1, dtype=torch.long), made[:, 1].cpu()], 1),  # the first token of the answer
        torch.tensor([spans]),
        torch.tensor([predicted]),
        torch.tensor([[a >= shift and b > a for a, b in offsets]]),
        [answer],
        [[text for text, _ in question.answers]],
    )


def asked(options: argparse.Namespace) -> tuple[str, nn.Module, Iterator[Asked]]:
    """The model's name, the model, and its answers in batches."""
    questions = [q for q in squad(options) if q.answers and (not options.local or q.article in HELD_OUT)]
    random.Random(options.seed).shuffle(questions)
    questions = questions[options.skip :]
    transformers = importlib.import_module("transformers") if not options.local else None
    if options.model in SPAN or options.model == "minilm":
        if transformers is None:
            model, tokenizer = minilm_for("squad", options)
            name = "MiniLM"
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(SPAN[options.model])
            model = transformers.AutoModelForQuestionAnswering.from_pretrained(SPAN[options.model])
            name = {"bert": "BERT-large", "roberta-large": "RoBERTa-large"}[options.model]
        model = model.eval().requires_grad_(False).to(options.device)
        rows = [r for q in questions for r in encode(tokenizer, q, options.length)[:1]][: options.limit]
        rows.sort(key=lambda row: len(row.ids))
        size = options.explain_batch_size or 16
        parts = (rows[i : i + size] for i in range(0, len(rows), size))
        return name, model, (ask_span_model(model, tokenizer, part, options.device) for part in parts)
    if transformers is None:
        model, tokenizer = smollm2(options)
        name, ask = "SmolLM2-135M-Instruct", ask_decoder
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(T5[options.model])
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(T5[options.model])
        name, ask = "Flan-T5-large", ask_t5
    model = model.eval().requires_grad_(False).to(options.device)

    def answers() -> Iterator[Asked]:
        count = 0
        for question in questions:
            if count == options.limit:
                return
            found = ask(model, tokenizer, question, options.device)
            if found is not None and found.inputs["input_ids"].shape[1] <= options.length:
                count += 1
                yield found

    return name, model, answers()


def curves(
    name: str, model: nn.Module, answers: Iterator[Asked], methods: m.Methods, options: argparse.Namespace
) -> None:
    """The sum of the answer's start and end logits while tokens of the context lose their embeddings."""
    parts = [({**part.inputs, "context": part.allowed.to(options.device)}, part.targets) for part in answers]
    found = ev.compare(
        half_when_scoring(model) if options.half else model,
        parts,
        methods,
        unit=ev.Tokens(only="context"),
        fill="zero",
        measure="logit",
        step=options.step,
        batch_size=options.batch_size or 64,
        explain_batch_size=options.explain_batch_size or 16,
        seed=options.seed,
    )
    count = sum(len(targets) for _, targets in parts)
    facts = {"model": name, "data": "SQuAD v2", "note": f"{count} questions", "scored_in_half": options.half}
    write_comparison(found, options, f"{name}, answer spans on SQuAD v2", **facts)


def main() -> None:
    command = parser(__doc__, ("roberta-large", "bert", *T5, *LOCAL))
    command.add_argument("--length", type=int, default=512, help="leave longer inputs out")
    command.add_argument(
        "--curves", action="store_true", help="perturbation curves over the context's tokens (span models)"
    )
    command.add_argument("--step", type=int, default=10, help="with --curves, tokens removed at once")
    options = command.parse_args()
    if options.local != (options.model in LOCAL):
        raise SystemExit(f"--local goes with --model {' or '.join(LOCAL)}")
    methods: m.Methods = {} if options.only_candidates else m.text_presets() | m.text_peers()
    if options.candidates or options.only_candidates:
        methods |= m.text_candidates()
    methods = {name: ev.find_method(method, name) for name, method in chosen(methods, options).items()}
    name, model, answers = asked(options)
    if options.curves:
        curves(name, model, answers, methods, options)
        return
    values: dict[str, dict[str, list[float]]] = {method: {} for method in methods}
    errors: dict[str, str] = {}
    exact: list[float] = []
    overlap: list[float] = []
    for part in answers:
        exact += [ev.exact_match(text, gold) for text, gold in zip(part.texts, part.answers)]
        overlap += [ev.f1(text, gold) for text, gold in zip(part.texts, part.answers)]
        for label, method in methods.items():
            if label in errors:
                continue
            try:
                relevance = ev.relevance_of(method, model, part.inputs, part.targets)
            except Exception as error:  # a peer that cannot serve this model is reported in its row
                errors[label] = f"{type(error).__name__}: {error}"
                continue
            scores = ev.span_agreement(relevance, part.gold, part.predicted, allowed=part.allowed)
            for key, value in scores.items():
                values[label].setdefault(key, []).extend(value.tolist())
        if len(exact) % 50 < len(part.texts):
            print(f"{len(exact)} questions", flush=True)
    if not exact:
        raise SystemExit(f"{name} gave no answer that stands in its text, out of all questions: nothing to explain")
    table: dict[str, Any] = {}
    for label, scores in values.items():
        if label in errors:
            table[label] = {"n": 0, "error": errors[label]}
            continue
        intervals = {key: ev.bootstrap(torch.tensor(value)) for key, value in scores.items()}
        table[label] = {
            "n": len(exact),
            "metrics": {key: [round(v, 4) for v in (i.mean, i.low, i.high)] for key, i in intervals.items()},
        }
    articles = "four held-out articles" if options.local else "the validation split"
    content = {
        "title": f"{name} on SQuAD v2",
        **about(options),
        "model": name,
        "data": f"SQuAD v2, answerable questions of {articles}",
        "note": f"{len(exact)} questions, exact match {sum(exact) / len(exact):.1%}, F1 {sum(overlap) / len(exact):.1%}",
        "kind": "spans",
        "methods": earlier(options, {}, len(exact)) | table,
    }
    write_json(options.out, content)
    print(content["title"], content["note"])
    for label, row in sorted(table.items(), key=lambda item: -(item[1].get("metrics") or {"tps": [0]})["tps"][0]):
        print(f"{label:40}", row.get("error") or {k: v[0] for k, v in row["metrics"].items()})
    print(options.out, flush=True)


if __name__ == "__main__":
    main()

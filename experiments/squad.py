"""Answers to SQuAD v2 questions: is the most relevant token part of the answer? The paper's Table 1.

    python experiments/squad.py --model roberta-large --out docs/results/roberta_squad.json     (or bert, flan-t5-large)
    python experiments/squad.py --local --data DIR --model minilm --out docs/results/minilm_squad.json
    python experiments/squad.py --local --data DIR --model flan-t5-small --out docs/results/t5_squad.json     (or smollm2)

Answerable questions only; tokens of the question (and of the prompt) are masked out of the ranking. Span models are
explained for their start and end logits, generating models for the first token of their answer (`--curves`: perturbation
curves of those logits); a generated answer that does not stand in the text has no place there and is not explained. Locally
the questions come from four articles that the span model never saw. TGS, TPS: is the top token in a gold span, in the
predicted span?
"""

from __future__ import annotations

import argparse
import importlib
import random
from dataclasses import dataclass
from typing import Any

import torch
from generated import PROMPTS, Answer, Asked, answer, explained
from options import about, chosen, earlier, half_when_scoring, merged, parser, write_comparison, write_json
from spans import Encoded, context_mask, encode, gold_spans, padded, predicted_spans
from texts import HELD_OUT, Question, flan_t5_small, minilm_for, smollm2, squad
from torch import nn

import methods as m
from dynamiclrp import evaluate as ev

SPAN = {"bert": "deepset/bert-large-uncased-whole-word-masking-squad2", "roberta-large": "deepset/roberta-large-squad2"}
T5 = {"flan-t5-large": "sjrhuschlee/flan-t5-large-squad2"}
LOCAL = ("minilm", "smollm2", "flan-t5-small")


def ask_span_model(model: nn.Module, tokenizer: Any, rows: list[Encoded], device: str) -> Asked:
    """Start and end of the answers, which are what is explained."""
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
    )


@dataclass(frozen=True)
class Exam:
    """A model's answers: batches to explain, and how good they are."""

    name: str
    model: nn.Module
    parts: list[Asked]
    note: str


def graded(said: list[str], right: list[list[str]]) -> str:
    exact, overlap = (sum(map(score, said, right)) / len(said) for score in (ev.exact_match, ev.f1))
    return f"exact match {exact:.1%}, F1 {overlap:.1%}"


def examine(options: argparse.Namespace) -> Exam:
    """Ask a model, in batches of questions of about one length."""
    questions = [q for q in squad(options) if q.answers and (not options.local or q.article in HELD_OUT)]
    random.Random(options.seed).shuffle(questions)
    name, model, tokenizer = load(options)
    model = model.eval().requires_grad_(False).to(options.device)
    spanned = options.model in SPAN or options.model == "minilm"
    take = span_answers if spanned else generated_answers
    parts, note = take(name, model, tokenizer, questions[options.skip :], options)
    if not parts:
        raise SystemExit(f"{name} gave no answer that stands in its text, out of all questions: nothing to explain")
    return Exam(name, model, parts, note)


def load(options: argparse.Namespace) -> tuple[str, nn.Module, Any]:
    """A model's name, the model and its tokenizer."""
    if options.model == "minilm":
        return "MiniLM", *minilm_for("squad", options)
    if options.model == "smollm2":
        return "SmolLM2-135M-Instruct", *smollm2(options)
    if options.model == "flan-t5-small":
        return "Flan-T5-small", *flan_t5_small(options)
    transformers = importlib.import_module("transformers")
    where = (SPAN | T5)[options.model]
    kind = transformers.AutoModelForSeq2SeqLM if options.model in T5 else transformers.AutoModelForQuestionAnswering
    names = {"bert": "BERT-large", "roberta-large": "RoBERTa-large", "flan-t5-large": "Flan-T5-large"}
    return names[options.model], kind.from_pretrained(where), transformers.AutoTokenizer.from_pretrained(where)


def span_answers(
    name: str, model: nn.Module, tokenizer: Any, questions: list[Question], options: argparse.Namespace
) -> tuple[list[Asked], str]:
    rows = [r for q in questions for r in encode(tokenizer, q, options.length)[:1]][: options.limit]
    rows.sort(key=lambda row: len(row.ids))
    size = options.explain_batch_size or 16
    pieces = [rows[i : i + size] for i in range(0, len(rows), size)]
    parts = [ask_span_model(model, tokenizer, piece, options.device) for piece in pieces]
    said = [
        row.text((start, end))
        for piece, part in zip(pieces, parts)
        for row, (start, end) in zip(piece, part.predicted.tolist())
    ]
    right = [[text for text, _ in row.question.answers] for row in rows]
    return parts, f"{len(rows)} questions, {graded(said, right)}" if rows else ""


def generated_answers(
    name: str, model: nn.Module, tokenizer: Any, questions: list[Question], options: argparse.Namespace
) -> tuple[list[Asked], str]:
    """Answers that stand in the text are explained; all that were given are graded."""
    said: list[Answer] = []
    size = options.explain_batch_size or 16
    usable: list[Answer] = []
    for i in range(0, len(questions), 2 * size):
        piece = questions[i : i + 2 * size]
        said += answer(model, tokenizer, PROMPTS[name], piece, options.device, options.length)
        usable = [a for a in said if a.predicted and a.gold]
        if options.limit and len(usable) >= options.limit:
            usable = usable[: options.limit]
            said = said[: said.index(usable[-1]) + 1]
            break
    if not usable:
        return [], ""
    right = [[text for text, _ in a.question.answers] for a in said]
    note = (
        f"{len(usable)} questions whose answer stands in the text, of {len(said)} that were asked "
        f"({graded([a.text for a in said], right)})"
    )
    usable.sort(key=lambda a: len(a.ids))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    pieces = [usable[i : i + size] for i in range(0, len(usable), size)]
    return [explained(model, piece, pad, options.device) for piece in pieces], note


def curves(exam: Exam, methods: m.Methods, options: argparse.Namespace) -> None:
    """The explained logits (of start and end, or of the first token) while tokens of the context lose their embeddings."""
    found = ev.compare(
        half_when_scoring(exam.model) if options.half else exam.model,
        [({**part.inputs, "context": part.allowed.to(options.device)}, part.targets) for part in exam.parts],
        methods,
        unit=ev.Tokens(only="context"),
        fill="zero",
        measure="logit",
        step=options.step,
        batch_size=options.batch_size or 64,
        explain_batch_size=options.explain_batch_size or 16,
        seed=options.seed,
    )
    what = "answer spans" if exam.parts[0].targets is exam.parts[0].predicted else "answers"
    facts = {"model": exam.name, "data": "SQuAD v2", "note": exam.note, "scored_in_half": options.half}
    write_comparison(found, options, f"{exam.name}, {what} on SQuAD v2", **facts)


def main() -> None:
    command = parser(__doc__, ("roberta-large", "bert", *T5, *LOCAL))
    command.add_argument("--length", type=int, default=512, help="leave longer inputs out")
    command.add_argument("--curves", action="store_true", help="perturbation curves over the context's tokens")
    command.add_argument("--step", type=int, default=10, help="with --curves, tokens removed at once")
    options = command.parse_args()
    if options.local != (options.model in LOCAL):
        raise SystemExit(f"--local goes with --model {' or '.join(LOCAL)}")
    methods: m.Methods = {} if options.only_candidates else m.text_presets() | m.text_peers()
    if options.candidates or options.only_candidates:
        methods |= m.text_candidates()
    methods = {name: ev.find_method(method, name) for name, method in chosen(methods, options).items()}
    exam = examine(options)
    print(f"{exam.name}: {exam.note}", flush=True)
    if options.curves:
        curves(exam, methods, options)
        return
    values: dict[str, dict[str, list[float]]] = {method: {} for method in methods}
    errors: dict[str, str] = {}
    for part in exam.parts:
        for label, method in methods.items():
            if label in errors:
                continue
            try:
                relevance = ev.relevance_of(method, exam.model, part.inputs, part.targets)
            except Exception as error:  # a peer that cannot serve this model is reported in its row
                errors[label] = f"{type(error).__name__}: {error}"
                continue
            scores = ev.span_agreement(relevance, part.gold, part.predicted, allowed=part.allowed)
            for key, value in scores.items():
                values[label].setdefault(key, []).extend(value.tolist())
    count = sum(len(part.targets) for part in exam.parts)
    table: dict[str, Any] = {}
    for label, scores in values.items():
        if label in errors:
            table[label] = {"n": 0, "error": errors[label]}
            continue
        intervals = {key: ev.bootstrap(torch.tensor(value)) for key, value in scores.items()}
        table[label] = {
            "n": count,
            "metrics": {key: [round(v, 4) for v in (i.mean, i.low, i.high)] for key, i in intervals.items()},
        }
    articles = "four held-out articles" if options.local else "the validation split"
    content = {
        "title": f"{exam.name} on SQuAD v2",
        **about(options),
        "model": exam.name,
        "data": f"SQuAD v2, answerable questions of {articles}",
        "note": exam.note,
        "kind": "spans",
        "methods": table,
    }
    write_json(options.out, merged(earlier(options, {}, count), content))
    for label, row in sorted(table.items(), key=lambda item: -(item[1].get("metrics") or {"tps": [0]})["tps"][0]):
        print(f"{label:40}", row.get("error") or {k: v[0] for k, v in row["metrics"].items()})
    print(options.out, flush=True)


if __name__ == "__main__":
    main()

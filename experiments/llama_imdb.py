"""Sentiment of IMDb reviews: Llama-3.2-1B, 512 tokens, embeddings zeroed one token a step.

    python experiments/llama_imdb.py --limit 200 --out docs/results/llama_imdb.json
    python experiments/llama_imdb.py --local --data DIR --model smollm2 --length 256 --step 8 --out docs/results/smollm2_imdb.json

From the hub the model is asked for the word behind "Sentiment:"; locally SmolLM2 and MiniLM have a head that
experiments/train/imdb.py trained. Reviews that do not fit whole are left out. The score is the logit of the answer.
"""

from __future__ import annotations

import importlib
import random
from typing import Any

import torch
from options import parser
from text_rows import run
from texts import imdb, minilm_for, smollm2_classifier

PROMPT = "Review: {}\nSentiment (positive or negative):"


def batches(rows: list[list[int]], pad: int, size: int, device: str) -> list[dict[str, torch.Tensor]]:
    """Reviews of like length together, padded on the right."""
    rows = sorted(rows, key=len)
    found = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        ids = torch.full((len(part), len(part[-1])), pad)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(part):
            ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
        found.append({"input_ids": ids.to(device), "attention_mask": mask.to(device)})
    return found


def main() -> None:
    command = parser(__doc__, ("llama", "smollm2", "minilm"), limit=200)
    command.add_argument("--length", type=int, default=512, help="the longest review, in tokens")
    command.add_argument("--shortest", type=int, default=64, help="the shortest review, in tokens")
    command.add_argument("--step", type=int, default=1, help="tokens removed at once")
    options = command.parse_args()
    if options.local == (options.model == "llama"):
        raise SystemExit("--local goes with --model smollm2 or minilm; without it, llama")
    model: Any
    if options.local:
        model, tokenizer = (smollm2_classifier if options.model == "smollm2" else lambda o: minilm_for("imdb", o))(
            options
        )
        name = {"smollm2": "SmolLM2-135M", "minilm": "MiniLM"}[options.model]
        template = "{}"
    else:
        transformers = importlib.import_module("transformers")
        name, template = "Llama-3.2-1B", PROMPT
        tokenizer = transformers.AutoTokenizer.from_pretrained(f"meta-llama/{name}")
        model = transformers.AutoModelForCausalLM.from_pretrained(f"meta-llama/{name}", dtype=torch.float32).eval()
        tokenizer.pad_token_id = tokenizer.eos_token_id
    model.requires_grad_(False).to(options.device)
    reviews = imdb("test", options)
    random.Random(options.seed).shuffle(reviews)
    encoded = tokenizer([template.format(text) for text, _ in reviews], verbose=False)["input_ids"]
    fitting = [
        (row, label) for row, (_, label) in zip(encoded, reviews) if options.shortest <= len(row) <= options.length
    ]
    fitting = fitting[options.skip :][: options.limit]
    data = batches([row for row, _ in fitting], tokenizer.pad_token_id, options.explain_batch_size or 8, options.device)
    note = f"{len(fitting)} reviews of {options.shortest} to {options.length} tokens"
    if options.local:
        right = 0
        with torch.no_grad():
            labels = iter(label for _, label in sorted(fitting, key=lambda pair: len(pair[0])))
            for batch in data:
                answers = model(**batch).logits.argmax(-1).tolist()
                right += sum(answer == next(labels) for answer in answers)
        note += f", accuracy {right / len(fitting):.1%}"
    special = (tokenizer.cls_token_id, tokenizer.sep_token_id) if options.model == "minilm" else ()
    facts = {"model": name, "data": "IMDb test reviews", "note": note, "skip": special}
    run(model, data, options, f"{name}, sentiment of IMDb reviews", measure="logit", step=options.step, **facts)


if __name__ == "__main__":
    main()

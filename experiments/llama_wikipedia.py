"""Llama-3.2-1B's next token on Wikipedia: 512 tokens, embeddings zeroed one token a step.

    python experiments/llama_wikipedia.py --limit 200 --out docs/results/llama_wikipedia.json
    python experiments/llama_wikipedia.py --local --data DIR --length 256 --step 8 --out docs/results/smollm2_wikitext.json

Locally SmolLM2-135M (Llama's architecture) on WikiText-2. The score is the logit of the token that the model predicts.
"""

from __future__ import annotations

import importlib
import random

import torch
from options import parser
from text_rows import run
from texts import smollm2, wikitext


def windows(ids: list[int], length: int, seed: int) -> torch.Tensor:
    """The text cut into stretches of `length` tokens, in random order."""
    found = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    order = list(range(len(found)))
    random.Random(seed).shuffle(order)
    return found[order]


def main() -> None:
    command = parser(__doc__, limit=200)
    command.add_argument("--length", type=int, default=512, help="tokens of each text")
    command.add_argument("--step", type=int, default=1, help="tokens removed at once")
    options = command.parse_args()
    if options.local:
        model, tokenizer = smollm2(options)
        name, source = "SmolLM2-135M", "WikiText-2"
        paragraphs = [p for p in wikitext("test", options).split("\n") if len(p.split()) > 20]
    else:
        transformers = importlib.import_module("transformers")
        name, source = "Llama-3.2-1B", "Wikipedia"
        tokenizer = transformers.AutoTokenizer.from_pretrained(f"meta-llama/{name}")
        model = transformers.AutoModelForCausalLM.from_pretrained(f"meta-llama/{name}", dtype=torch.float32).eval()
        rows = importlib.import_module("datasets").load_dataset(
            "wikimedia/wikipedia", "20231101.en", split="train", streaming=True
        )
        paragraphs = [row["text"] for _, row in zip(range(4 * options.limit), rows)]
    model.requires_grad_(False).to(options.device)
    ids = tokenizer("\n".join(p.strip() for p in paragraphs), add_special_tokens=False, verbose=False)["input_ids"]
    chosen = windows(ids, options.length, options.seed)[options.skip :][: options.limit].to(options.device)
    data = {"input_ids": chosen, "attention_mask": torch.ones_like(chosen)}
    facts = {"model": name, "data": f"{source}, {options.length} tokens", "note": f"{len(chosen)} texts"}
    run(model, data, options, f"{name}, next token on {source}", measure="logit", step=options.step, **facts)


if __name__ == "__main__":
    main()

"""Fine-tune MiniLM to find answer spans on part of SQuAD: `python experiments/train/squad.py --local --out minilm_squad.safetensors`.

The four held-out articles (`texts.HELD_OUT`) are never trained on. Answerable questions only: the explained spans are answers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from spans import encode, padded, predicted_spans
from texts import HELD_OUT, minilm_for, squad
from weights import save_half

from dynamiclrp import evaluate as ev

BATCH, RATE = 32, 3e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=float, default=14)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--length", type=int, default=384)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device(options.device)
    model, tokenizer = minilm_for("squad", options, trained=False)
    model.to(device).requires_grad_(True).train()
    model.bert.embeddings.requires_grad_(False)

    answerable = [q for q in squad(options) if q.answers]
    train = [r for q in answerable if q.article not in HELD_OUT for r in encode(tokenizer, q, options.length)]
    test = [encode(tokenizer, q, options.length)[:1] for q in answerable if q.article in HELD_OUT]
    held_out = [row for rows in test for row in rows]
    random.shuffle(train)
    train, held_out = train[: options.limit], held_out[: options.limit]
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, RATE, weight_decay=0.01)
    steps, step, begin, progress, report = (
        max(1, int(options.epochs * len(train) / BATCH)),
        0,
        time.perf_counter(),
        0.0,
        0.0,
    )
    average = torch.zeros((), device=device)
    while progress < 1:
        random.shuffle(train)
        for start in range(0, len(train), BATCH):
            rows = train[start : start + BATCH]
            progress = max(step / steps, (time.perf_counter() - begin) / (60 * options.minutes))
            for group in optimiser.param_groups:
                group["lr"] = RATE * min(progress / 0.1, (1 - min(progress, 1)) / 0.9)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                out = model(**padded(rows, tokenizer.pad_token_id, device))
            first, last = (torch.tensor([row.gold[0][i] for row in rows], device=device) for i in (0, 1))
            loss = F.cross_entropy(out.start_logits.float(), first) + F.cross_entropy(out.end_logits.float(), last)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            average = average.lerp(loss.detach(), 0.05)
            step += 1
            if progress >= report:
                spent = time.perf_counter() - begin
                print(f"minilm squad {100 * progress:5.1f} %  loss {average.item():.3f}  {spent:.0f} s", flush=True)
                report += 0.1
            if progress >= 1:
                break
    model.eval()
    exact, f1 = 0.0, 0.0
    for start in range(0, len(held_out), 64):
        rows = held_out[start : start + 64]
        with torch.no_grad():
            out = model(**padded(rows, tokenizer.pad_token_id, device))
        for row, span in zip(rows, predicted_spans(out.start_logits, out.end_logits, rows)):
            answers = [text for text, _ in row.question.answers]
            exact, f1 = exact + ev.exact_match(row.text(span), answers), f1 + ev.f1(row.text(span), answers)
    facts = {
        "network": "minilm",
        "exact_match": exact / len(held_out),
        "f1": f1 / len(held_out),
        "train_spans": len(train),
        "held_out_questions": len(held_out),
        "seconds": round(time.perf_counter() - begin),
        "seed": options.seed,
    }
    save_half({k: v for k, v in model.state_dict().items() if not k.startswith("bert.embeddings.")}, options.out, facts)
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()

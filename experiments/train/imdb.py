"""Fine-tune a sentiment classifier on IMDb: `python experiments/train/imdb.py minilm --local --out minilm_imdb.safetensors`.

MiniLM is trained whole but for its embeddings; SmolLM2 by low-rank updates. Only what changed is written.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
from low_rank import add_low_rank, low_rank_state  # noqa: E402
from texts import imdb, minilm_for, smollm2_classifier  # noqa: E402
from weights import save_half  # noqa: E402

SETTINGS = {"minilm": {"epochs": 4, "batch": 32, "rate": 2e-4}, "smollm2": {"epochs": 2, "batch": 16, "rate": 4e-4}}


def batches(rows: list[tuple[list[int], int]], size: int, pad: int, shuffle: bool) -> Any:
    """Rows of like length together, so that little is padding; batches in random order."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]) + (random.random() * 40 if shuffle else 0))
    groups = [order[i : i + size] for i in range(0, len(order), size)]
    if shuffle:
        random.shuffle(groups)
    for group in groups:
        length = max(len(rows[i][0]) for i in group)
        ids = torch.full((len(group), length), pad)
        for row, i in enumerate(group):
            ids[row, : len(rows[i][0])] = torch.tensor(rows[i][0])
        mask = torch.zeros_like(ids)
        for row, i in enumerate(group):
            mask[row, : len(rows[i][0])] = 1
        yield ids, mask, torch.tensor([rows[i][1] for i in group])


@torch.no_grad()
def accuracy(model: nn.Module, rows: list[tuple[list[int], int]], pad: int, device: torch.device) -> float:
    model.eval()
    right = 0
    for ids, mask, labels in batches(rows, 64, pad, shuffle=False):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits: Tensor = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        right += int((logits.argmax(1).cpu() == labels).sum())
    model.train()
    return right / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=sorted(SETTINGS))
    parser.add_argument("--local", action="store_true", help="reviews from the files in --data, not from the hub")
    parser.add_argument("--data", type=Path, help="folder of local data (or the environment variable DYNAMICLRP_DATA)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device(options.device)
    settings = SETTINGS[options.network]

    if options.network == "minilm":
        model, tokenizer = minilm_for("imdb", options, trained=False)
        model.to(device).requires_grad_(True)
        model.bert.embeddings.requires_grad_(False)
    else:
        model, tokenizer = smollm2_classifier(options, trained=False)
        nn.init.normal_(model.score.weight, std=0.02)
        model.to(device)
        add_low_rank(model.model, options.rank)
        model.score.requires_grad_(True)
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]

    def tokens(split: str) -> list[tuple[list[int], int]]:
        found = imdb(split, options)
        random.Random(0).shuffle(found)
        found = found[: options.limit]
        ids = tokenizer([text for text, _ in found], truncation=True, max_length=options.length)["input_ids"]
        return [(row, label) for row, (_, label) in zip(ids, found)]

    train, test = tokens("train"), tokens("test")
    pad = tokenizer.pad_token_id
    optimiser = torch.optim.AdamW(parameters, settings["rate"], weight_decay=0.01)
    epochs = options.epochs or settings["epochs"]
    steps, step, begin, progress, report = (
        max(1, int(epochs * len(train) / settings["batch"])),
        0,
        time.perf_counter(),
        0.0,
        0.0,
    )
    average = torch.zeros((), device=device)
    while progress < 1:
        for ids, mask, labels in batches(train, int(settings["batch"]), pad, shuffle=True):
            progress = max(step / steps, (time.perf_counter() - begin) / (60 * options.minutes))
            for group in optimiser.param_groups:
                group["lr"] = settings["rate"] * min(progress / 0.06, (1 - min(progress, 1)) / 0.94)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
            loss = F.cross_entropy(logits.float(), labels.to(device))
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            average = average.lerp(loss.detach(), 0.05)
            step += 1
            if progress >= report:
                spent = time.perf_counter() - begin
                print(
                    f"{options.network} imdb {100 * progress:5.1f} %  loss {average.item():.3f}  {spent:.0f} s",
                    flush=True,
                )
                report += 0.1
            if progress >= 1:
                break
    facts = {
        "network": options.network,
        "test_accuracy": accuracy(model, test, pad, device),
        "train_reviews": len(train),
        "test_reviews": len(test),
        "seconds": round(time.perf_counter() - begin),
        "seed": options.seed,
    }
    if options.network == "minilm":
        state = {k: v for k, v in model.state_dict().items() if not k.startswith("bert.embeddings.")}
    else:
        state = low_rank_state(model.model, "model.") | {"score.weight": model.score.weight.detach()}
    save_half(state, options.out, facts)
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()

"""Sanity check: do explanations change when the model's weights are randomised, layer by layer from the output?

    python experiments/randomisation.py --out docs/results/randomisation_vgg16.json
    python experiments/randomisation.py --local --data DIR --model mobilenetv2 --depth 2 --limit 64 --out docs/results/randomisation_mobilenetv2.json
    python experiments/randomisation.py --local --data DIR --model minilm-imdb --depth 4 --out docs/results/randomisation_minilm_imdb.json

Spearman's rank correlation with the explanation of the trained model, cascading from the output down (Adebayo et al. 2018):
of pixels, or of the tokens of IMDb reviews.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from typing import Any

from image_rows import batch_sizes
from images import LOCAL, hub_vgg16, mended, task
from llama_imdb import batches
from options import about, chosen, earlier, merged, parser, write_json
from texts import imdb, minilm_for, smollm2_classifier
from torch import nn

import methods as m
from dynamiclrp import evaluate as ev

TEXTS = {"minilm-imdb": "MiniLM", "smollm2-imdb": "SmolLM2-135M"}
SHORTEST, LONGEST = 64, 256  # reviews, in tokens


@dataclass(frozen=True)
class Checked:
    """A model, what it is explained on, and by which methods."""

    name: str
    source: str
    note: str
    model: nn.Module
    data: Any
    methods: m.Methods
    unit: ev.Unit
    batch: int


def images(options: argparse.Namespace) -> Checked:
    mended("torchvision")  # which Zennit imports
    found = task(options.model, options) if options.local else hub_vgg16(options)
    methods = m.image_presets(found.mean, found.std) | m.image_peers(found.mean, found.std, "vit" not in options.model)
    batch = batch_sizes(found, options)[1]
    return Checked(found.name, found.source, found.note, found.model, found.inputs, methods, ev.Pixels(), batch)


def reviews(options: argparse.Namespace) -> Checked:
    model, tokenizer = minilm_for("imdb", options) if "minilm" in options.model else smollm2_classifier(options)
    texts = [text for text, _ in imdb("test", options)]
    random.Random(options.seed).shuffle(texts)
    rows = [ids for ids in tokenizer(texts, verbose=False)["input_ids"] if SHORTEST <= len(ids) <= LONGEST]
    rows = rows[options.skip :][: options.limit]
    batch = options.explain_batch_size or 16
    data = batches(rows, tokenizer.pad_token_id, batch, options.device)
    special = (tokenizer.cls_token_id, tokenizer.sep_token_id) if "minilm" in options.model else ()
    note = f"{len(rows)} reviews of {SHORTEST} to {LONGEST} tokens"
    name, methods = TEXTS[options.model], m.text_presets() | m.text_peers()
    model = model.to(options.device)
    return Checked(name, "IMDb test reviews", note, model, data, methods, ev.Tokens(skip=special), batch)


def main() -> None:
    local = (*LOCAL, *TEXTS)
    command = parser(__doc__, ("vgg16", *local), limit=64)
    command.add_argument("--depth", type=int, help="put layers together that share so many parts of their name")
    command.add_argument("--mode", choices=("cascading", "independent"), default="cascading")
    options = command.parse_args()
    if options.local != (options.model in local):
        raise SystemExit(f"--model {options.model}: with --local choose from {', '.join(local)}; without it, vgg16")
    checked = reviews(options) if options.model in TEXTS else images(options)
    checked.methods.pop("random")
    result = ev.randomisation(
        checked.model,
        checked.data,
        chosen(checked.methods, options),
        depth=options.depth,
        mode=options.mode,
        unit=checked.unit,
        limit=options.limit,
        explain_batch_size=checked.batch,
        seed=options.seed,
    )
    table: dict[str, dict[str, list[float]]] = {}
    for row in result.rows:
        if "signed" in row:
            values = [round(row[f"{w}{end}"], 4) for w in ("signed", "absolute") for end in ("", "_low", "_high")]
            table.setdefault(row["method"], {})[row["layer"]] = values
    content = {
        "title": f"Randomised layers of {checked.name}",
        **about(options),
        "model": checked.name,
        "data": checked.source,
        "note": checked.note,
        "kind": "randomisation",
        "mode": options.mode,
        "layers": list(result.layers),
        "methods": table,
        "errors": result.errors(),
    }
    there = earlier(options, {}, 0)
    if there and (there["layers"] != content["layers"] or there["note"] != content["note"]):
        raise SystemExit(f"--update: {options.out} is of other layers or inputs; write to another file")
    write_json(options.out, merged(there, content))
    print(f"{content['title']}\n{result}\n{options.out}", flush=True)


if __name__ == "__main__":
    main()

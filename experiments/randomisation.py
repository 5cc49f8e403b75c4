"""Sanity check: do explanations change when the model's weights are randomised, layer by layer from the output?

    python experiments/randomisation.py --local --data DIR --model mobilenetv2 --limit 32 --out docs/results/randomisation.json

Spearman's rank correlation with the explanation of the trained model, cascading from the output down (Adebayo et al. 2018).
"""

from __future__ import annotations

from image_rows import batch_sizes
from images import LOCAL, hub_vgg16, mended, task
from options import about, chosen, parser, write_json

import methods as m
from dynamiclrp import evaluate as ev


def main() -> None:
    command = parser(__doc__, ("vgg16", *LOCAL), limit=32)
    command.add_argument("--depth", type=int, help="put layers together that share so many parts of their name")
    command.add_argument("--mode", choices=("cascading", "independent"), default="cascading")
    options = command.parse_args()
    if options.local != (options.model in LOCAL):
        raise SystemExit(f"--model {options.model}: with --local choose from {', '.join(LOCAL)}; without it, vgg16")
    mended("torchvision")
    found = task(options.model, options) if options.local else hub_vgg16(options)
    methods = m.image_presets(found.mean, found.std) | m.image_peers(found.mean, found.std, "vit" not in options.model)
    del methods["random"]
    result = ev.randomisation(
        found.model,
        found.inputs,
        chosen(methods, options),
        depth=options.depth,
        mode=options.mode,
        limit=options.limit,
        explain_batch_size=batch_sizes(found, options)[1],
        seed=options.seed,
    )
    table: dict[str, dict[str, list[float]]] = {}
    for row in result.rows:
        if "signed" in row:
            values = [round(row[k], 4) for k in ("signed", "signed_low", "signed_high", "absolute")]
            table.setdefault(row["method"], {})[row["layer"]] = values
    content = {
        "title": f"Randomised layers of {found.name}",
        **about(options),
        "model": found.name,
        "data": found.source,
        "note": found.note,
        "kind": "randomisation",
        "mode": options.mode,
        "layers": list(result.layers),
        "methods": table,
        "errors": result.errors(),
    }
    write_json(options.out, content)
    print(f"{content['title']}\n{result}\n{options.out}", flush=True)


if __name__ == "__main__":
    main()

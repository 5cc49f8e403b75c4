"""Which inputs of the image rows the model gets right, and how sure it is: areas depend on it more than on most rules.

    python experiments/certainty.py --local --data DIR --out docs/results/certainty.json

The same inputs in the same order as the rows of docs/results.md, so that `report.py` can take means over some of them.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from images import task
from options import about, parser, write_json

# row → model, and what its command skipped and took
ROWS = {
    "mobilenetv2": ("mobilenetv2", 200, 250),
    "efficientnet_lite0": ("efficientnet-lite0", 200, 250),
    "vgg16_cifar10": ("vgg16-cifar10", 300, 1000),
    "resnet20": ("resnet20", 300, 1000),
    "vit_cifar10": ("vit-cifar10", 300, 1000),
}


@torch.no_grad()
def certainty(name: str, skip: int, limit: int, options: argparse.Namespace) -> dict[str, Any]:
    found = task(name, argparse.Namespace(**{**vars(options), "skip": skip, "limit": limit}))
    logits = torch.cat([found.model(x) for x in found.inputs.split(10)])
    probability, answer = logits.softmax(1).max(1)
    return {
        "right": (answer == found.labels).int().tolist(),
        "probability": [round(p, 4) for p in probability.tolist()],
    }


def main() -> None:
    options = parser(__doc__).parse_args()
    if not options.local:
        raise SystemExit("the rows of docs/results.md are local ones: --local --data DIR")
    rows = {row: certainty(*what, options) for row, what in ROWS.items()}
    write_json(options.out, {"kind": "certainty", **about(options), "rows": rows})
    print(options.out)


if __name__ == "__main__":
    main()

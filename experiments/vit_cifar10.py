"""ViT-b-16 on CIFAR-10, 16 x 16 patches replaced by blur, four a step, relevance max-pooled: the paper's Table 2.

    python experiments/vit_cifar10.py --limit 1000 --out docs/results/vit_b16.json
    python experiments/vit_cifar10.py --local --data DIR --model vit-cifar10 --out docs/results/vit.json

Locally the small ViT that experiments/train/cifar10.py trains: 4 x 4 patches of 32 x 32 pixels, two of its 64 a step.
"""

from __future__ import annotations

from image_rows import run
from images import hub_vit, task
from options import parser

from dynamiclrp import evaluate as ev


def main() -> None:
    command = parser(__doc__, ("vit-b-16", "vit-cifar10"), limit=1000)
    command.add_argument("--pool", choices=("max", "sum"), default="max", help="of the relevance in a patch")
    options = command.parse_args()
    if options.local != (options.model == "vit-cifar10"):
        raise SystemExit("--model vit-cifar10 goes with --local, --model vit-b-16 without it")
    found = task(options.model, options) if options.local else hub_vit(options)
    size, step = (4, 2) if options.local else (16, 4)
    fill = ev.Blur(7, 20 * 32 / 224) if options.local else ev.Blur(51, 20)
    title = f"{found.name} on {found.source}"
    run(found, options, title, unit=ev.Patches(size, options.pool), fill=fill, step=step, vit=True)


if __name__ == "__main__":
    main()

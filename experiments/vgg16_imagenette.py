"""VGG16 on ImageNette-320, pixels replaced by blur (kernel 51, sigma 20), 1,024 a step: the paper's Table 3.

    python experiments/vgg16_imagenette.py --out docs/results/vgg16.json
    python experiments/vgg16_imagenette.py --local --data DIR --model mobilenetv2 --out docs/results/mobilenetv2.json

Locally there is no VGG16 with ImageNet weights. MobileNetV2 and EfficientNet-Lite0 on ImageNet photos stand in for the
scale, VGG16 and ResNet-20 on CIFAR-10 for the architecture. Units there: 14 x 14 pixels (2 x 2 of CIFAR-10's 32), a
16 x 16 grid, 16 regions a step, and the blur shrinks with the picture. `--unit pixel` is the paper's own.
"""

from __future__ import annotations

from image_rows import run
from images import hub_vgg16, task
from options import parser

from dynamiclrp import evaluate as ev

LOCAL = ("mobilenetv2", "efficientnet-lite0", "vgg16-cifar10", "resnet20")


def main() -> None:
    command = parser(__doc__, ("vgg16", *LOCAL), limit=None)
    command.add_argument("--unit", choices=("region", "pixel"), help="default: pixel from the hub, region locally")
    options = command.parse_args()
    if options.local != (options.model in LOCAL):
        raise SystemExit(f"--model {options.model}: with --local choose from {', '.join(LOCAL)}; without it, vgg16")
    found = task(options.model, options) if options.local else hub_vgg16(options)
    side = found.inputs.shape[-1]
    pixel = (options.unit or ("region" if options.local else "pixel")) == "pixel"
    unit, step = (ev.Pixels(), 1024 * side**2 // 224**2) if pixel else (ev.Regions(side // 16), 16)
    fill = ev.Blur(51, 20) if side == 224 else ev.Blur(7, 20 * side / 224)
    run(found, options, f"{found.name} on {found.source}", unit=unit, fill=fill, step=step)


if __name__ == "__main__":
    main()

"""Example heat maps: one photo and one sentence, by several methods: `python experiments/heatmaps.py --out docs/results`.

EfficientNet-Lite0 on the photo that ships with the package (CC0), SmolLM2-135M on a sentence. Writes heatmaps.png and
sentence.png. Red speaks for the answer, blue against it; each map is scaled by its own largest value.
"""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path

import torch
from images import LITE_MEAN, LITE_STD, LOCAL, _square, mended, normalise
from texts import smollm2

import dynamiclrp as dlrp
import methods as m
from dynamiclrp import evaluate as ev

SENTENCE = "Alice put the cake in the oven and Bob put the letter in the drawer. To read the letter, Bob opened the"
PHOTO = (
    "default", "gamma", "epsilon-plus", "dynamic", "attnlrp", "Zennit EpsilonPlus", "Zennit EpsilonGammaBox", "SmoothGrad",
    "IntegratedGradients", "Saliency", "random",
)  # fmt: skip
TEXT = ("default", "cp-lrp", "dynamic", "IntegratedGradients", "SmoothGrad", "InputXGradient")


def photo(path: Path, device: str) -> None:
    from matplotlib import pyplot as plt
    from PIL import Image

    mended("torchvision")
    model = LOCAL["efficientnet-lite0"][2](None).eval().requires_grad_(False).to(device)
    with resources.files("dynamiclrp").joinpath("assets/photographer.jpg").open("rb") as stream:
        pixels = _square(Image.open(stream).convert("RGB"), 224)
    x = normalise(torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].to(device), LITE_MEAN, LITE_STD)
    classes = resources.files("dynamiclrp").joinpath("assets/imagenet_classes.txt").read_text("utf-8").splitlines()
    with torch.no_grad():
        answer = int(model(x).argmax(1))
    every = m.image_presets(LITE_MEAN, LITE_STD) | m.image_peers(LITE_MEAN, LITE_STD, convolutional=True)
    figure, axes = plt.subplots(2, 6, figsize=(11, 4.2), layout="constrained")
    axes.flat[0].imshow(pixels)
    axes.flat[0].set_title(f"EfficientNet-Lite0: {classes[answer]}", fontsize=8)
    for axis, name in zip(axes.flat[1:], PHOTO):
        found = ev.relevance_of(ev.find_method(every[name], name), model, x, torch.tensor([answer]))[0].sum(0).cpu()
        top = float(found.abs().flatten().kthvalue(int(0.998 * found.numel())).values)
        axis.imshow(found, cmap="seismic", vmin=-top, vmax=top)
        axis.set_title(name, fontsize=8, fontweight="bold" if name == "default" else "normal")
    for axis in axes.flat:
        axis.axis("off")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def sentence(path: Path, device: str) -> None:
    from matplotlib import colormaps
    from matplotlib import pyplot as plt

    model, tokenizer = smollm2(None)
    model = model.to(device)
    ids = tokenizer(SENTENCE, return_tensors="pt")["input_ids"].to(device)
    words = [tokenizer.decode([i]) for i in ids[0].tolist()]
    with torch.no_grad():
        answer = int(model(input_ids=ids).logits[0, -1].argmax())
    every = m.text_presets() | m.text_peers()
    figure, axis = plt.subplots(figsize=(11, 0.42 * len(TEXT) + 0.5), layout="constrained")
    lengths = [max(1, len(word)) + 0.3 for word in words]
    left = [sum(lengths[:i]) for i in range(len(words) + 1)]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for row, name in enumerate(TEXT):
        found = ev.relevance_of(ev.find_method(every[name], name), model, inputs, torch.tensor([answer]))[0].cpu()
        shown = found / found[1:].abs().max()  # the first token is the sink that language models rest attention on
        for i, word in enumerate(words):
            colour = colormaps["seismic"](0.5 + 0.42 * float(shown[i].clamp(-1, 1)))
            axis.add_patch(plt.Rectangle((left[i], -row - 0.42), lengths[i], 0.84, color=colour, lw=0))
            dark = abs(float(shown[i])) > 0.55
            axis.text(
                left[i] + lengths[i] / 2,
                -row,
                word.strip(),
                ha="center",
                va="center",
                fontsize=6.2,
                color="w" if dark else "k",
            )
        axis.text(
            -0.6, -row, name, ha="right", va="center", fontsize=7, fontweight="bold" if name == "default" else "normal"
        )
    axis.set(xlim=(-14, left[-1]), ylim=(-len(TEXT) + 0.4, 0.6))
    axis.set_title(f"SmolLM2-135M, next token “{tokenizer.decode([answer]).strip()}”", fontsize=8)
    axis.axis("off")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--out", type=Path, default=Path("docs/results"))
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    command.add_argument("--only", choices=("photo", "sentence"))
    options = command.parse_args()
    if options.only != "sentence":
        photo(options.out / "heatmaps.png", options.device)
    if options.only != "photo":
        sentence(options.out / "sentence.png", options.device)
    print(f"{options.out}: heat maps by dynamiclrp {dlrp.__version__}")


if __name__ == "__main__":
    main()

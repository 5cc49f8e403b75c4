"""Make the pictures of `gallery.md`: `python docs/scripts/gallery.py [folder]` (extras demo, view, evaluate; a few minutes).

Every picture is what `.plot()` of a result draws, on a light and on a dark page; two results are also written as the pages
that `.html()` makes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import nn

import dynamiclrp as dlrp
from dynamiclrp import evaluate
from dynamiclrp.demo import image_model, imagenet_classes, language_model, photo
from dynamiclrp.demo.story import QUESTION, SENTENCE

PAGES = {"light": ("default", "#ffffff"), "dark": ("dark_background", "#1e2129")}
INTERACTIVE = ("answers", "generation")


def pictures() -> dict[str, Any]:
    """An image model: two answers, and one answer under four presets."""
    model, processor = image_model()
    asked = {"processor": processor, "classes": imagenet_classes()}
    return {
        "answers": dlrp.explain_image(model, photo(), targets=["tripod", "binoculars"], **asked),
        "presets": dlrp.explain_image(
            model, photo(), target="tripod", presets=["gradient", "epsilon", "default", "epsilon-plus-flat"], **asked
        ),
    }


def words() -> dict[str, Any]:
    """A language model: the next word, why not another, and every word of an answer."""
    model, tokenizer = language_model()
    return {
        "next-word": dlrp.explain_text(model, tokenizer, SENTENCE),
        "rather-than": dlrp.explain_text(model, tokenizer, SENTENCE, contrast=" oven"),
        "generation": dlrp.explain_generation(
            model, tokenizer, messages=[{"role": "user", "content": QUESTION}], max_new_tokens=20, progress=False
        ),
    }


def table() -> dict[str, Any]:
    """A small network that learnt y = 3·age - 2·debt, and so has no use for the rest."""
    torch.manual_seed(0)
    columns = ["age", "debt", "height", "shoe size"]
    net = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 1))
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(400):
        x = torch.randn(256, 4)
        loss = (net(x)[:, 0] - 3 * x[:, 0] + 2 * x[:, 1]).pow(2).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    row = torch.tensor([[1.2, -0.8, 0.9, -1.1]])
    return {"table": dlrp.explain_table(net.eval(), row, columns=columns)}


def curves() -> dict[str, Any]:
    """Perturbation curves of four methods on the photo."""
    model, processor = image_model()
    from PIL import Image

    with Image.open(photo()) as opened:
        x = processor(opened)[None]
    integrated = evaluate.Captum("IntegratedGradients", n_steps=16)
    methods = {
        "default": "default",
        "integrated gradients": integrated,
        "gradient x input": "gradient",
        "random": "random",
    }
    return {"curves": evaluate.compare(model, x, methods=methods, unit=evaluate.Regions(14), fill="blur", step=8)}


def draw(result: Any, folder: Path, name: str) -> None:
    for page, (style, paper) in PAGES.items():
        colours = dict.fromkeys(("figure.facecolor", "axes.facecolor"), paper)
        if page == "dark":
            colours["grid.color"] = "#3a3f4b"
        with plt.style.context(style), plt.rc_context(colours):
            result.plot().savefig(
                folder / f"gallery-{name}-{page}.webp",
                dpi=120,
                bbox_inches="tight",
                facecolor=paper,
                pil_kwargs={"quality": 88},
            )
            plt.close("all")
    if name in INTERACTIVE:
        result.html(folder / f"gallery-{name}.html")


def main(folder: Path, only: str = "") -> None:
    makers: list[Callable[[], dict[str, Any]]] = [pictures, words, table, curves]
    for make in makers:
        if only in ("", make.__name__):
            for name, result in make().items():
                draw(result, folder, name)
                print(f"gallery-{name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "img", *sys.argv[2:3])

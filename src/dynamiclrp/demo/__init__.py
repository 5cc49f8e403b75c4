"""Two real models explained on this machine's CPU, in one page to look at: `make demo`, `python -m dynamiclrp.demo`.

EfficientNet-Lite0 on a photo, for its first two answers; SmolLM2-135M on a sentence, for its next word, and on a question,
for every word of its answer; perturbation curves beside gradient x input and integrated gradients; accounts, plans and
cost. The weights come from pip packages: no model hub, no network, no GPU. `story` computes, `page` draws.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .models import MissingPackage, image_model, imagenet_classes, language_model, photo

__all__ = ["MissingPackage", "image_model", "imagenet_classes", "language_model", "main", "photo"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute the story, write the page, say which file to open."""
    from . import story as stories

    parser = argparse.ArgumentParser(
        prog="python -m dynamiclrp.demo", description="Explain two models, write one page."
    )
    parser.add_argument("--out", type=Path, default=Path("demo.html"), help="the page to write (default: demo.html)")
    parser.add_argument("--photo", type=Path, help="a photo of your own")
    parser.add_argument("--text", default=stories.SENTENCE, help="a sentence of your own, to be continued by one word")
    parser.add_argument("--question", default=stories.QUESTION, help="a question of your own, to be answered")
    options = parser.parse_args(arguments)
    if options.photo is not None and not options.photo.is_file():
        print(f"--photo {options.photo}: no such file. Give the path of a picture.", file=sys.stderr)
        return 4
    if not options.out.parent.is_dir():
        print(f"--out {options.out}: there is no folder {options.out.parent}. Make it first.", file=sys.stderr)
        return 4
    print("dynamiclrp: two models, explained on the CPU", flush=True)
    try:
        told = stories.tell(options.photo, options.text, options.question)
    except MissingPackage as error:
        print(f"\n{error}", file=sys.stderr)
        return 6
    from .page import page

    part = options.out.with_name(f".{options.out.name}.part")
    try:
        part.write_text(page(told), "utf-8")
        part.replace(options.out)
    finally:
        part.unlink(missing_ok=True)
    print(stories.summary(told))
    print(f"\nOpen {options.out.resolve()} in a browser.")
    return 0

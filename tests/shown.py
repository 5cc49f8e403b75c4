"""Results for the tests of what is shown: one of every kind, made in milliseconds, and the page's data read back."""

import functools
import json
import re

import torch
from torch import nn

import dynamiclrp as dlrp
from dynamiclrp.generation import Generation
from dynamiclrp.media import FIRST, SPECIAL, Picture, Sound, Tokens

TEXT = ("[CLS]", "Bob", " opened", " the", " draw", "er", "<script>&", "[SEP]")


def text(rows=1, answer="drawer", contrast=None):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(30, 8), nn.Flatten(), nn.Linear(64, 2))
    a = dlrp.explain(model, torch.randint(0, 30, (rows, 8)), target=0)
    kinds = (SPECIAL, *("",) * 6, SPECIAL)
    made = a.seen_as(**{next(iter(a.relevances)): (Tokens(TEXT, kinds),) * rows})
    answers = tuple(dlrp.Answer(answer, 0.5, contrast) for _ in range(rows))
    return dlrp.Attribution(**{**vars(made), "answers": answers, "about": {"model": "Bag", "task": "test"}})


def long_text(length=300):
    torch.manual_seed(11)
    model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(4 * length, 2))
    a = dlrp.explain(model, torch.randint(0, 50, (1, length)), target=0)
    return a.seen_as(input=Tokens.of([f" word{i}" for i in range(length)]))


def picture(seen=(10.0, 5.0, 90.0, 55.0), file=None):
    import io

    from PIL import Image

    torch.manual_seed(6)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    a = dlrp.explain(model, torch.randn(1, 3, 24, 32), target=0)
    out = io.BytesIO()
    Image.new("RGB", (100, 60), (200, 120, 40)).save(out, "PNG")
    made = a.seen_as(input=Picture(out.getvalue(), "image/png", 100, 60, seen))
    return dlrp.Attribution(**{**vars(made), "answers": (dlrp.Answer("orange", 0.9),)})


def pictures():
    a = picture()
    return dlrp.compare({"mine": a, "other": -2 * a.relevance})


def sound(features=False):
    torch.manual_seed(7)
    samples = torch.sin(torch.arange(4000) / 20) * torch.hann_window(4000)
    if features:
        model, x = nn.Sequential(nn.Flatten(), nn.Linear(16 * 40, 2)), torch.randn(1, 16, 40)
        medium = Sound(samples, 8000, x[0], 1, (0.0, 0.6))
    else:
        model, x = nn.Linear(4000, 2), samples[None]
        medium = Sound(samples, 8000)
    a = dlrp.explain(model, x, target=0)
    return a.seen_as(**{next(iter(a.relevances)): medium})


def table(columns=30):
    torch.manual_seed(8)
    names = [f"column {i}" for i in range(columns)]
    names[0] = "the distance from the middle of the town"
    return dlrp.explain_table(nn.Linear(columns, 3), torch.randn(columns), columns=names, classes=["a", "b", "c"])


def both():
    """Two modalities in one answer."""
    one, other = text(), picture()
    relevances = {"words": one.relevance, "pixels": other.relevance}
    media = {"words": one.media["input"], "pixels": other.media["input"]}
    return dlrp.Attribution(**{**vars(one), "relevances": relevances, "media": media})


def generation(rows=12, start=20, seed=9):
    generator = torch.Generator().manual_seed(seed)
    columns = start + rows - 1
    matrix = torch.randn(rows, columns, generator=generator) ** 3
    for i in range(rows):
        matrix[i, start + i :] = 0
    matrix[:, 0] = 200  # a sink
    pieces = tuple(["Q"] + [f" w{i}" if i % 3 else f"x{i}" for i in range(1, columns + 1)])
    kinds = (FIRST, *("",) * (columns - 1))
    return Generation(
        matrix=matrix,
        context=Tokens(pieces[:columns], kinds),
        said=Tokens.of(pieces[start:]),
        start=start,
        scores=torch.arange(rows).float() + 1,
        probabilities=torch.linspace(0.1, 0.9, rows),
        alternatives=tuple(((pieces[start + i], 0.5), (" other", 0.25)) for i in range(rows)),
        contrasts=(),
        preset=dlrp.preset("attnlrp"),
        about={"model": "Talker"},
    )


def data(page):
    """The data inside a page."""
    (found,) = re.findall(r'<script type="application/json" id="dlrp-data">(.*?)</script>', page, re.S)
    return json.loads(found)


@functools.cache
def everything():
    return {
        "text": text(rows=2), "picture": picture(), "pictures": pictures(), "sound": sound(), "features": sound(True),
        "table": table(), "both": both(), "generation": generation(),
        "bare": dlrp.explain(nn.Linear(3, 2), torch.randn(1, 3)),
        "tensor": dlrp.explain(nn.Sequential(nn.Flatten(), nn.Linear(140, 2)), torch.randn(1, 7, 4, 5)),
    }  # fmt: skip

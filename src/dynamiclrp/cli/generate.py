"""`dynamiclrp generate`: what does each generated word stand on?"""

from typing import Annotated, Any

import typer

from .exits import asking
from .options import Debug, Device, Dtype, Json, Model, Out, Preset, chosen
from .output import RESULTS, check_out, finish, quiet_stdout
from .text import load_text, read

EXAMPLES = """[bold]Examples[/]

dynamiclrp generate gpt2 "The capital of France is" --max-new-tokens 12 --out map.html

dynamiclrp generate HuggingFaceTB/SmolLM2-135M-Instruct "Name a fruit." --chat

dynamiclrp generate gpt2 "2 + 2 =" --continuation " 5" --contrast runner-up --json"""


def run(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="What to continue; - reads it from stdin.", show_default=False)],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="How much to generate.")] = 40,
    continuation: Annotated[str | None, typer.Option(help="Explain this text in place of what it would say.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message to a chat model.")] = False,
    contrast: Annotated[
        str | None, typer.Option(help="runner-up: why each word rather than the next most likely?")
    ] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Draw words by chance in place of the likeliest.")] = False,
    temperature: Annotated[float | None, typer.Option(min=0.01, help="Of the draw; takes --sample.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Words explained at once: more memory, less time.")] = 8,
    preset: Preset = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """What does each generated word stand on? One forward pass, one row of relevance a word."""
    import torch

    from .. import explain_generation

    check_out(out, RESULTS)
    rules = chosen(preset)
    words = read(prompt)
    loaded = load_text(model, device, dtype)
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}
    if sample:
        asked |= {"do_sample": True} | ({} if temperature is None else {"temperature": temperature})
    torch.manual_seed(seed)
    with quiet_stdout(), asking():
        result = explain_generation(
            loaded.model,
            loaded.tokenizer,
            continuation=continuation,
            max_new_tokens=max_new_tokens,
            contrast=contrast,
            batch_size=batch_size,
            progress=True,
            **asked,
            **rules,
        )
    finish(result, json, out)

"""Options that several commands share, with their help."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .exits import Code, UserError

if TYPE_CHECKING:
    import dynamiclrp as dlrp

Model = Annotated[
    str,
    typer.Argument(
        help="Hub id, folder, .gguf file, torchvision:NAME, timm:NAME, or module.path:callable.", show_default=False
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset",
        "-p",
        help="Which rules: default, attnlrp, gamma, epsilon-plus, dynamic, …; with parameters: gamma,gamma=0.1",
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps; auto takes a GPU where there is one.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Random = Annotated[
    bool, typer.Option("--random", help="Random weights in place of trained ones: nothing is downloaded.")
]
Ledger = Annotated[
    bool, typer.Option("--ledger/--no-ledger", help="Account for all relevance: who kept what did not arrive?")
]
Contrast = Annotated[str | None, typer.Option(help="Why the target rather than this?")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Also write a file; its ending says which kind.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def preset_of(text: str) -> "dlrp.Preset":
    """`gamma` or `gamma,gamma=0.1` → the preset."""
    from ..presets import preset

    name, *settings = (part.strip() for part in text.split(","))
    parameters: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        try:
            parameters[key.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise UserError(
                Code.USAGE, f"--preset {text}: {setting!r} is not name=number", "For example: gamma,gamma=0.1"
            )
    return preset(name, **parameters)


def chosen(preset: str | None) -> dict[str, Any]:
    """The argument `preset` of a verb; nothing, where the user leaves the choice to it."""
    return {} if preset is None else {"preset": preset_of(preset)}


def target_of(text: str | None) -> Any:
    """A number is a class or token id, anything else a name."""
    if text is None:
        return None
    return int(text) if text.lstrip("-").isdigit() else text

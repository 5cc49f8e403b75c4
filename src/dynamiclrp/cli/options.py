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
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        "-t",
        help="What to explain, by name or number; several in a row. By default the model's own answer.",
    ),
]
Top = Annotated[int | None, typer.Option(min=1, help="Explain the first so many answers.")]
Presets = Annotated[
    list[str] | None,
    typer.Option("--preset", "-p", help="Which rules: default, attnlrp, gamma, …; several are shown side by side."),
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


def wanted(targets: list[str] | None, top: int | None, presets: list[str] | None) -> dict[str, Any]:
    """The arguments `target` or `targets`, `preset` or `presets` of a verb; one of the two may be many."""
    if top is not None and targets:
        raise UserError(Code.USAGE, "--top and --target exclude each other")
    rules = [preset_of(text) for text in presets or ()]
    asked = [target_of(text) for text in targets or ()]
    many = asked if len(asked) > 1 else top
    if len(rules) > 1 and many:
        raise UserError(Code.USAGE, "several presets and several targets", "Vary one of them at a time")
    chosen = {"targets": many} if many else {"target": asked[0] if asked else None}
    return chosen | ({"presets": rules} if len(rules) > 1 else {"preset": rules[0]} if rules else {})


def target_of(text: str | None) -> Any:
    """A number is a class or token id, anything else a name."""
    if text is None:
        return None
    return int(text) if text.lstrip("-").isdigit() else text

"""`dynamiclrp demo`: two real models explained on this machine's CPU, in one page."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Debug

EXAMPLES = """[bold]Examples[/]

dynamiclrp demo --out demo.html

dynamiclrp demo --photo mine.jpg --text "The opposite of hot is" """


def run(
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("demo.html"),
    photo: Annotated[Path | None, typer.Option(help="A photo of your own.")] = None,
    text: Annotated[str | None, typer.Option(help="A sentence of your own, to be continued.")] = None,
    question: Annotated[str | None, typer.Option(help="A question of your own, to be answered.")] = None,
    debug: Debug = False,
) -> None:
    """Two real models explained on the CPU, in one page to look at. Needs the extra `demo`, no network."""
    from .. import demo

    arguments = ["--out", str(out)]
    arguments += [] if photo is None else ["--photo", str(photo)]
    arguments += [] if text is None else ["--text", text]
    arguments += [] if question is None else ["--question", question]
    raise typer.Exit(demo.main(arguments))

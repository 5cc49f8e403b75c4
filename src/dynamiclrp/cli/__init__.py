"""The command line, `dynamiclrp`: one file a command. It knows the user's verbs and the tables they fill, never the engine."""

from __future__ import annotations

import sys
from typing import Any

from .exits import Code

_NEEDS = "The command line needs typer and rich: pip install 'dynamiclrp[cli]'"


def main() -> None:
    """Entry point of the `dynamiclrp` command."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        message = f"{_NEEDS} (missing: {error.name})"
        print(message, file=sys.stderr)
        end = SystemExit(message)
        end.code = Code.PACKAGE
        raise end from None
    application()()


def application() -> Any:
    """The typer application, made when asked for, so that importing this package needs nothing."""
    import typer

    from .. import __version__
    from . import bench, compare, coverage, demo, generate, image, inspect, text
    from .exits import LEGEND, guarded

    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,  # `guarded` says what went wrong, in one line
        rich_markup_mode="rich",
    )

    def version(wanted: bool) -> None:
        if wanted:
            typer.echo(__version__)
            raise typer.Exit

    @app.callback(epilog=LEGEND)
    def root(
        version: bool = typer.Option(False, "--version", callback=version, is_eager=True, help="Print the version."),
    ) -> None:
        """Layer-wise Relevance Propagation for any PyTorch model: what does a prediction stand on?

        MODEL is a hub id ([cyan]gpt2[/]), a folder or .gguf file, [cyan]torchvision:NAME[/], [cyan]timm:NAME[/], or
        [cyan]module.path:callable[/] that returns a model (or a model and its tokenizer).
        """

    for command in (text, generate, image, compare, inspect, bench, coverage, demo):
        name = command.__name__.rpartition(".")[2]
        app.command(name, epilog=command.EXAMPLES)(guarded(command.run))
    return app

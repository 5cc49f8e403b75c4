"""`dynamiclrp coverage`: prove that every operation of a model has a rule, on the paper's models and on the zoos."""

# no `from __future__ import annotations` here: typer reads the annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .exits import Code, UserError
from .options import Debug
from .output import columns, show

if TYPE_CHECKING:
    from ..coverage.check import Finding

EXAMPLES = """[bold]Examples[/]

dynamiclrp coverage --paper --match 'vgg*'

dynamiclrp coverage --zoo --only timm --limit 5 --out /tmp/coverage"""

_NEEDS_ZOO = "The coverage runs need the model libraries: pip install 'dynamiclrp[cli,zoo]'"


def run(
    paper: Annotated[
        bool, typer.Option("--paper", help="The paper's fifteen architectures at their published sizes.")
    ] = False,
    zoo: Annotated[bool, typer.Option("--zoo", help="Small models of transformers, timm and torchvision.")] = False,
    only: Annotated[str | None, typer.Option(help="One zoo: transformers, timm or torchvision.")] = None,
    match: Annotated[str, typer.Option(help="Names to take, as a shell pattern.")] = "*",
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many models of each zoo.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget earlier results (of the models that are run).")
    ] = False,
    failed: Annotated[
        bool, typer.Option("--failed", help="Run again what was built and could not be explained.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one model of a zoo.")] = 120,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the tables.")] = Path("docs/coverage"),
    debug: Debug = False,
) -> None:
    """Prove that every operation of a model has a rule: on the paper's models, and on the zoos."""
    if paper == zoo:
        raise UserError(Code.USAGE, "give one of --paper and --zoo")
    if only is not None and only not in ("transformers", "timm", "torchvision"):
        raise UserError(Code.USAGE, f"--only {only}: expected transformers, timm or torchvision")
    try:
        good = _paper(out, match, threads) if paper else _zoo(out, only, match, limit, fresh, failed, timeout, threads)
    except ImportError as error:
        raise UserError(Code.PACKAGE, f"{_NEEDS_ZOO} (missing: {error.name})") from None
    raise typer.Exit(Code.OK if good else Code.FAULTS)


def _paper(out: Any, match: str, threads: int) -> bool:
    from fnmatch import fnmatchcase

    import torch
    from rich.console import Console
    from rich.progress import Progress

    from ..coverage.paper import architectures, measure
    from ..coverage.report import paper_rows, promise_rows, read_paper, write_paper

    torch.set_num_threads(threads)
    console = Console()
    chosen = [a for a in architectures() if fnmatchcase(a.name.lower(), match.lower())]
    found = read_paper(out)
    try:
        with Progress(*columns(), console=console) as progress:
            task = progress.add_task("paper", total=len(chosen))
            for architecture in chosen:
                progress.update(task, description=architecture.name)
                measured = measure(architecture)
                found[architecture.name] = measured
                state = measured.error or f"{measured.covered:,} of {measured.nodes:,} nodes"
                progress.console.print(f"{architecture.name}: {state}, {measured.total_seconds:.0f} s", highlight=False)
                progress.advance(task)
    except KeyboardInterrupt:
        console.print("stopped; nothing was written")
        raise SystemExit(130) from None
    pairs = [(a, found[a.name]) for a in architectures() if a.name in found]
    for title, (head, rows) in (("Coverage", paper_rows(pairs)), ("Promises under `dynamic`", promise_rows(pairs))):
        show(console, title, head, rows)
    write_paper(out, pairs)
    console.print(f"written: {out / 'paper.md'}, {out / 'paper.json'}")
    return all(not m.error and m.finite and m.dynamic[:2] in ("ok", "fl") and m.covered == m.nodes for _, m in pairs)


def _zoo(
    out: Any,
    only: str | None,
    match: str,
    limit: int | None,
    fresh: bool,
    failed: bool,
    timeout: float,
    threads: int,
) -> bool:
    from fnmatch import fnmatchcase

    from rich.console import Console
    from rich.progress import Progress

    from ..coverage.report import summary_rows, write_zoo
    from ..coverage.sweep import Store, by_zoo, sweep

    console = Console()
    store = Store(out / "zoo.json")
    models = by_zoo(only, lambda name: fnmatchcase(name, match), limit)
    if failed:
        models = [m for m in models if m in store.findings and store.findings[m].faults]
    elif not fresh:
        models = [m for m in models if m not in store.findings]
    stopped = False
    try:
        with Progress(*columns(), console=console) as progress:
            task = progress.add_task("zoo", total=len(models))
            for finding in sweep(models, timeout, threads=threads):
                store.add(finding)
                store.save()
                progress.update(task, description=f"{finding.zoo} {finding.name}", advance=1)
                if line := _line(finding):
                    progress.console.print(line, highlight=False, markup=False)
    except KeyboardInterrupt:
        stopped = True
    findings = list(store.findings.values())
    write_zoo(out, findings)
    show(console, "Zoos", *summary_rows(findings))
    console.print(f"written: {out / 'zoo.md'}, {out / 'zoo.json'}")
    if stopped:
        console.print("stopped; the same command goes on from here")
        raise SystemExit(130)
    return all(finding.good or not finding.built for finding in findings)


def _line(finding: "Finding") -> str:
    """What to say about a model while the sweep runs: nothing when all is well."""
    if not finding.built:
        return f"{finding.zoo} {finding.name}: not built: {finding.why_not_built[:160]}"
    return f"{finding.zoo} {finding.name}: FAULT {'; '.join(finding.faults)[:300]}" if finding.faults else ""

"""The result tables, as Markdown and JSON: the paper's fifteen architectures, and the zoos."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from .check import TOLERANCE, Finding
from .paper import AGGREGATE, Architecture, Measured
from .sweep import ZOOS, write


def _versions() -> dict[str, str]:
    """What the numbers depend on."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("transformers", "timm", "torchvision"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _stamp() -> str:
    made = f"{date.today().isoformat()}, {os.cpu_count()} CPU cores"
    return f"{made}. Versions: " + ", ".join(f"{name} {version}" for name, version in _versions().items()) + "."


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; columns of numbers stand to the right."""
    numeric = [all(_is_number(row[i]) for row in rows) for i in range(len(head))]
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join("---:" if n else "---" for n in numeric) + "|"]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or str(value) in ("", "–") or str(value)[:1].isdigit()


def _cell(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


# The paper ------------------------------------------------------------------------------------------------------------


def paper_rows(pairs: Sequence[tuple[Architecture, Measured]]) -> tuple[list[str], list[list[Any]]]:
    """Coverage, side by side with the paper's."""
    head = [
        "model",
        "nodes covered",
        "paper",
        "node types",
        "paper",
        "live",
        "finite",
        "`dynamic`",
        "ledger residual",
        "seconds",
    ]
    rows = [
        [
            a.name, f"{m.covered:,} / {m.nodes:,}", f"{a.published.covered:,} / {a.published.nodes:,}",
            f"{m.ops_covered} / {m.ops}", f"{a.published.ops_covered} / {a.published.ops}", m.live,
            "yes" if m.finite else m.error or "no", m.dynamic.split(":")[0] if m.dynamic[:2] in ("ok", "fl") else m.dynamic or "no",
            "–" if m.residual is None else f"{m.residual:.0e}", f"{m.seconds:.2f}",
        ]
        for a, m in pairs
    ]  # fmt: skip
    covered, nodes = sum(m.covered for _, m in pairs), sum(m.nodes for _, m in pairs)
    published = f"{AGGREGATE[0]:,} / {AGGREGATE[1]:,}" if len(pairs) == 15 else ""
    live = sum(m.live for _, m in pairs)
    rows.append(["all", f"{covered:,} / {nodes:,}", published, "", "", live, "", "", "", ""])
    return head, rows


def promise_rows(pairs: Sequence[tuple[Architecture, Measured]]) -> tuple[list[str], list[list[Any]]]:
    """The Promise System, side by side with the paper's."""
    head = ["model", "promises", "paper", "internal nodes", "paper", "depth δ", "paper", "density ρ", "paper"]

    def theirs(value: Any) -> str:
        return "–" if value is None else f"{value:,}"

    rows = [
        [
            a.name, m.promises, theirs(a.published.promises), m.internal_nodes, theirs(a.published.internal_nodes),
            m.depth, theirs(a.published.depth), f"{m.density:.3f}", theirs(a.published.density),
        ]
        for a, m in pairs
    ]  # fmt: skip
    return head, rows


def read_paper(folder: Path) -> dict[str, Measured]:
    """Earlier numbers, by architecture."""
    path = folder / "paper.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {row["measured"]["name"]: Measured(**row["measured"]) for row in rows}


def write_paper(folder: Path, pairs: Sequence[tuple[Architecture, Measured]]) -> None:
    """`paper.json` and `paper.md`."""
    data = {
        "versions": _versions(),
        "rows": [{"published": vars(a.published), "measured": m.to_dict()} for a, m in pairs],
    }
    write(folder / "paper.json", json.dumps(data, indent=1) + "\n")
    kept = Counter(reason for _, m in pairs for reason, share in m.kept.items() if abs(share) > 1e-6)
    text = f"""# The paper's fifteen architectures

Written by `dynamiclrp coverage --paper`. Published sizes, random weights, float32. {_stamp()}

## Coverage (the paper's table 5)

{table(*paper_rows(pairs))}

*nodes covered*: nodes of the whole autograd graph, every parameter followed, that have a rule. The paper's counts come from
older versions of the libraries (attention written out in several operations, dropout kept in the graph), so the totals
differ; what must agree is that none is left over. *live*: nodes that relevance passes through. *finite*: under
`default`; *`dynamic`*: the same under the preset `dynamic`, the paper's rules but for batch norm and functions with
f(0) ≠ 0 (see its docstring; `float64`: float32 overflows). *ledger residual*: what the accounts under `default` cannot explain, relative to the largest
amount of relevance that moved; reasons that kept something: {", ".join(sorted(kept))}. *seconds*: one explanation on one
thread of a machine that had other work to do.
Mamba's scan is written out token by token, so its graph grows with the text (here 8 tokens). The paper's sum is quoted as
printed there; its rows add up to {sum(a.published.nodes for a, _ in pairs):,}.

## The Promise System under the preset `dynamic` (the paper's table 4)

{table(*promise_rows(pairs))}

The paper prints these for four models. A promise is counted at every node whose rule needs a value that the node itself did
not save; its branches are short where a neighbour saved the value (the paper recomputes it) and long where versions of the
libraries write out what used to be one operation. *density*: promises per node of the graph that `explain` makes, which does
not follow the weights and is smaller than the paper's.
"""
    write(folder / "paper.md", text)


# The zoos -------------------------------------------------------------------------------------------------------------


def summary_rows(findings: Sequence[Finding]) -> tuple[list[str], list[list[Any]]]:
    """One line a zoo."""
    head = [
        "zoo",
        "models",
        "built",
        "explained",
        "all nodes have rules",
        "finite",
        "repeats",
        "= node by node",
        "batch = rows",
        "refused",
        "faults",
    ]
    rows = []
    for zoo in (*ZOOS, "all"):
        some = [f for f in findings if zoo in (f.zoo, "all")]
        built = [f for f in some if f.built]
        if not some:
            continue
        tried = [f for f in built if f.batch_error is not None]
        alike = sum(1 for f in tried if not any(fault.startswith("batch") for fault in f.faults))
        rows.append(
            [
                zoo, len(some), len(built), sum(f.explained for f in built),
                sum(f.coverage == 1.0 for f in built), sum(bool(f.finite) for f in built),
                sum(bool(f.repeats) for f in built), sum(f.way_error is not None and f.way_error <= TOLERANCE for f in built),
                f"{alike} of {len(tried)}", sum(bool(f.refusal) for f in built),
                sum(bool(f.faults) for f in built),
            ]
        )  # fmt: skip
    return head, rows


def write_zoo(folder: Path, findings: Sequence[Finding]) -> None:
    """`zoo.md`, from the findings that the sweep keeps in `zoo.json`."""
    findings = sorted(findings, key=lambda f: (ZOOS.index(f.zoo), f.name))
    built = [f for f in findings if f.built]
    ops = Counter(op for f in built for op in f.ops)
    parts = [
        "# The model zoos",
        f"Written by `dynamiclrp coverage --zoo`. Small configurations, random weights, float32. {_stamp()}",
        table(*summary_rows(findings)),
        f"{len(ops)} distinct operations carry relevance in them, {sum(f.live for f in built):,} live nodes in all. "
        "Each model is explained under `default` twice (the results must be equal), as a batch and row by row, with the "
        "ledger, which looks at every node (the same result again), and once under `dynamic`. "
        f"Under `dynamic` {sum(f.dynamic == 'ok' for f in built)} are finite in float32"
        + (f", {more} more in float64." if (more := sum(f.dynamic.startswith("float64") for f in built)) else "."),
        "## Explained with a fault",
    ]
    faulty = [f for f in built if f.faults]
    parts.append(
        table(["zoo", "model", "class", "fault"], [[f.zoo, f.name, f.model, "; ".join(f.faults)[:300]] for f in faulty])
        if faulty
        else "None."
    )
    refused = [f for f in built if f.refusal]
    parts += [
        "## Built, and nothing to explain",
        "No relevance can be followed through these: `explain` refuses them with an error that says why.",
        table(["zoo", "model", "class", "reason"], [[f.zoo, f.name, f.model, f.refusal] for f in refused])
        if refused
        else "None.",
    ]
    missing = [f for f in findings if not f.built]
    parts += [
        "## Not built, and why",
        "The library could not build or run these small and offline; nothing was left to explain.",
        table(["zoo", "model", "reason"], [[f.zoo, f.name, f.why_not_built[:300]] for f in missing])
        if missing
        else "None.",
        "## Every model",
        "*kept*: the share of the explained score that did not reach the inputs under `default`, by reason.",
        table(
            [
                "zoo",
                "model",
                "class and inputs",
                "nodes",
                "live",
                "covered",
                "finite",
                "repeats",
                "batch = rows",
                "kept",
                "s",
            ],
            [_row(f) for f in built],
        ),
    ]
    write(folder / "zoo.md", "\n\n".join(parts) + "\n")


def _row(f: Finding) -> list[Any]:
    def mark(value: bool | None) -> str:
        return "–" if value is None else "yes" if value else "NO"

    batch = "–" if f.batch_error is None else mark(not any(x.startswith("batch") for x in f.faults))
    kept = ", ".join(f"{reason} {share:.0%}" for reason, share in f.kept.items() if abs(share) >= 0.005)
    coverage = "–" if f.coverage is None else f"{f.coverage:.0%}" if f.coverage == 1 else f"{f.coverage:.2%}"
    return [
        f.zoo,
        f.name,
        f.model,
        f.nodes,
        f.live,
        coverage,
        mark(f.finite),
        mark(f.repeats),
        batch,
        kept,
        f"{f.seconds:.1f}",
    ]

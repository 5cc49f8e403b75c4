"""What every experiment shares: its command line, half precision for scoring, and the result file it writes.

A result file holds, per method, the metrics with intervals, the mean curves and every input's ABPC; and the setup, date,
machine and versions. `report.py` makes docs/results.md from such files alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dynamiclrp as dlrp
from dynamiclrp import evaluate as ev

POINTS = 33  # of the mean curves that are kept


def parser(description: str | None, models: Sequence[str] = (), limit: int | None = None) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if models:
        found.add_argument("--model", choices=models, default=models[0], help=f"default: {models[0]}")
    found.add_argument("--local", action="store_true", help="models from pip packages, data from --data; no hub")
    found.add_argument("--data", type=Path, help="folder of local data (or the environment variable DYNAMICLRP_DATA)")
    found.add_argument("--limit", type=int, default=limit, help="so many inputs")
    found.add_argument("--skip", type=int, default=0, help="leave the first inputs out (a search was made on them)")
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument("--out", type=Path, required=True, help="the result file to write, .json")
    found.add_argument("--batch-size", type=int, default=None, help="perturbed inputs that run together")
    found.add_argument("--explain-batch-size", type=int, default=None, help="inputs that are explained together")
    found.add_argument("--methods", nargs="+", help="only these of the methods, by name")
    found.add_argument("--update", action="store_true", help="keep the other methods of an earlier run in --out")
    found.add_argument("--candidates", action="store_true", help="the candidates for `default` too")
    found.add_argument("--only-candidates", action="store_true", help="the candidates for `default` alone")
    found.add_argument("--half", action="store_true", help="score perturbed inputs in bfloat16; explain in float32")
    found.add_argument("--seed", type=int, default=0)
    return found


def half_when_scoring(model: nn.Module) -> nn.Module:
    """Forward passes without gradients run under bfloat16 autocast; those that are explained stay in full precision."""
    entered: list[Any] = []
    kind = next(model.parameters()).device.type

    def enter(module: nn.Module, args: Any) -> Any:
        scoring = not torch.is_grad_enabled()
        context = torch.autocast(kind, torch.bfloat16, enabled=scoring)
        context.__enter__()
        entered.append(context)
        if scoring and args and isinstance(args[0], torch.Tensor) and args[0].dim() == 4:
            return (args[0].contiguous(memory_format=torch.channels_last), *args[1:])  # faster in half precision
        return None

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        entered.pop().__exit__(None, None, None)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)
    return model


def chosen(methods: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The methods that `--methods` names; all by default."""
    if not options.methods:
        return dict(methods)
    unknown = sorted(set(options.methods) - set(methods))
    if unknown:
        raise SystemExit(f"--methods {' '.join(unknown)}: not among {', '.join(methods)}")
    return {name: methods[name] for name in options.methods}


def machine(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} of {os.cpu_count()} cores"


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Date, machine, versions: what a reader needs to judge or repeat a result."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(options.device),
        "versions": {"dynamiclrp": dlrp.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "seed": options.seed,
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    text = json.dumps(content, indent=1)
    text = re.sub(
        r"\[\s+([^\[\]{}]+?)\s+\]", lambda found: "[" + " ".join(found[1].split()) + "]", text
    )  # lists in one line
    part.write_text(text + "\n", encoding="utf-8")
    os.replace(part, path)


def earlier(options: argparse.Namespace, setup: Mapping[str, Any], count: int) -> dict[str, Any]:
    """With `--update`, the result file that is there, which must be of the same inputs and setup."""
    if not options.update or not options.out.exists():
        return {}
    there = json.loads(options.out.read_text("utf-8"))
    if there.get("setup", setup) != setup or any(
        m.get("n", count) not in (0, count) for m in there["methods"].values()
    ):
        raise SystemExit(f"--update: {options.out} is of another setup or of other inputs; write to another file")
    return there


def merged(there: Mapping[str, Any], new: Mapping[str, Any]) -> Mapping[str, Any]:
    """An earlier result file with new methods. It keeps its date and machine; the methods that came later are told under "later"."""
    if not there:
        return new
    later = {name: {key: new[key] for key in ("date", "machine", "versions")} for name in new["methods"]}
    return {**there, "methods": there["methods"] | new["methods"], "later": there.get("later", {}) | later}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def write_comparison(found: ev.Comparison, options: argparse.Namespace, title: str, **facts: Any) -> None:
    """`found` without its records: small enough to be kept in the repository."""
    methods: dict[str, Any] = {}
    for row in found.rows:
        name = row["method"]
        if not row["n"]:
            methods[name] = {"n": 0, "error": found.errors(name)[0]}
            continue
        _fractions, morf, lerf = found.curves(name).mean(POINTS)
        methods[name] = {
            "n": row["n"],
            "metrics": {
                key: [_short(row[key]), _short(row[f"{key}_low"]), _short(row[f"{key}_high"])] for key in ev.METRICS
            },
            "conservation": _short(row["conservation"]),
            "time_ratio": _short(row["time_ratio"]),
            "memory_ratio": _short(row["memory_ratio"]),
            "morf": [_short(v) for v in morf.tolist()],
            "lerf": [_short(v) for v in lerf.tolist()],
            "abpc": [_short(v) for v in found.metric(name, "abpc").tolist()],
        }
    setup = {k: v if isinstance(v, (str, int, float, type(None))) else str(v) for k, v in found.setup.items()}
    count = max((m["n"] for m in methods.values()), default=0)
    there = earlier(options, setup, count)
    if there and there.get("scored_in_half") != facts.get("scored_in_half"):
        raise SystemExit(
            f"--update: {options.out} was scored in another precision; pass --half for both or for neither"
        )
    content = {"title": title, **about(options), "setup": setup, **facts, "methods": methods}
    write_json(options.out, merged(there, content))
    print(f"\n{title}\n{found}\n{options.out}", flush=True)

"""Two commits side by side: do they give the same relevance, scores and ledgers? No numbers are stored.

    make same                                  # the working tree against the commit before issue "less"; minutes
    make same SINCE=HEAD SAME=--quick          # against the last commit, a minute
    python bench/same.py --device cuda         # the paper's fifteen at their published sizes, on a GPU
    python bench/same.py --since HEAD~3 --only 'GPT-2,timm: xcit' --presets dynamic

Each model of `cases.py` is explained by both under every preset: in float64, with a ledger in float64, and in float32; each commit in a
process of its own with one thread, at the same time. Differences are relative to the largest relevance. In float64 at most 1e-10; the
distance of float32 from float64 at most 1.5 times what it was, plus 1e-6. Some explanations are so ill-conditioned that a change of weights
and inputs by 1e-15 of themselves moves them by more: there ten times as much is allowed, and they are named and counted. `--since` takes a
commit, or a folder that holds one's `src`.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sides import ROOT, SINCE, Lost, Side, answer, tree_of

EXACT, WORSE, MORE = 1e-10, 1.5, 1e-6
NUDGE, ILL = 1e-15, 10  # of an input and a weight, to see what rounding does; how much more than that is allowed
PATIENCE = 900  # seconds for one model
WAYS = ("float64", "ledger", "float32")


# ---------------------------------------------------------------- one commit explains


def presets() -> dict[str, Any]:
    """All of them, by name."""
    import dynamiclrp as dlrp
    from dynamiclrp.presets import PRESETS

    bounds = {"epsilon-gamma-box": {"low": -3.0, "high": 3.0}}
    return {name: dlrp.preset(name, **bounds.get(name, {})) for name in PRESETS}


def explained(model: Any, inputs: dict[str, Any], preset: Any, ledger: bool = False) -> dict[str, Any]:
    """Relevance by input, the score, the accounts; or the error."""
    import dynamiclrp as dlrp
    from dynamiclrp.coverage.check import all_of_it

    torch.manual_seed(0)
    try:
        try:
            made = dlrp.explain(model, **inputs, preset=preset, ledger=ledger)
        except dlrp.TargetError:
            made = dlrp.explain(model, **inputs, preset=preset, ledger=ledger, target=all_of_it)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    found: dict[str, Any] = {"relevance": {name: r.detach().cpu().double() for name, r in made.relevances.items()}}
    found["score"] = made.seed.detach().cpu().double()
    if made.ledger is not None:
        book = made.ledger
        scale = max([abs(book.total), *(entry.scale for entry in book.entries), 1e-300])
        amounts = {"total": book.total, "delivered": book.delivered, **book.kept}
        found["accounts"] = {reason: amount / scale for reason, amount in amounts.items()}
    return found


class Wide(TorchFunctionMode):
    """Leaves out the casts to float32 that models write down, so that what is said to be float64 is."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = dict(kwargs or {})
        if function is Tensor.float and args[0].dtype is torch.float64:
            return args[0]
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if keywords.get("dtype") is torch.float32:
                keywords["dtype"] = torch.float64
        return function(*args, **keywords)


def in_float64(model: Any) -> Any:
    """The model with all of its forward pass in float64; compiled parts decide for themselves."""
    model = model.double()
    if not any(hasattr(module, "_orig_mod") for module in model.modules()):
        forward = model.forward

        @wraps(forward)
        def wide(*args: Any, **kwargs: Any) -> Any:
            with Wide():
                return forward(*args, **kwargs)

        model.forward = wide
    return model


def explain_all(name: str, wanted: list[str], device: str) -> dict[Any, Any]:
    """Everything about one model: by preset and way; or why it could not be built."""
    from cases import build

    try:
        case = build(name, published=device == "cuda")
        model = case.model.to(device)
        inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in case.inputs.items()}
        with torch.no_grad():  # what some models keep of their last run can only be copied if it has no graph
            model(**inputs)
        exact, nudged = (in_float64(copy.deepcopy(model)) for _ in range(2))
    except Exception as error:
        return {"not built": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in nudged.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + NUDGE * torch.randn_like(parameter))

    def in_double(value: Any, nudge: float = 0.0) -> Any:
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        return value.double() * (1 + nudge * torch.randn_like(value, dtype=torch.float64))

    wide = {k: in_double(v) for k, v in inputs.items()}
    moved = {k: in_double(v, NUDGE) for k, v in inputs.items()}
    tensors = [*model.parameters(), *(v for v in inputs.values() if isinstance(v, Tensor))]
    made: dict[Any, Any] = {"built": sum(float(t.double().abs().sum()) for t in tensors)}
    for preset, rule in presets().items():
        if preset in wanted:
            made[preset, "float64"] = explained(exact, wide, rule)
            made[preset, "ledger"] = explained(exact, wide, rule, ledger=True)
            made[preset, "float32"] = explained(model, inputs, rule)
            made[preset, "nudged"] = explained(nudged, moved, rule)
    return made


# ---------------------------------------------------------------- both are compared


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference, relative to the largest relevance, the largest score, the accounts' scale."""
    if one["relevance"].keys() != other["relevance"].keys():
        return math.inf
    worst = _relative(list(one["relevance"].values()), list(other["relevance"].values()))
    worst = max(worst, _relative([one["score"]], [other["score"]]))
    a, b = one.get("accounts", {}), other.get("accounts", {})
    worst = max([worst, *(abs(a.get(reason, 0.0) - b.get(reason, 0.0)) for reason in {*a, *b})])
    return math.inf if math.isnan(worst) else worst


def _relative(found: list[Tensor], truth: list[Tensor]) -> float:
    if any(a.shape != b.shape for a, b in zip(found, truth)):
        return math.inf
    pairs = [(a, b) for a, b in zip(found, truth) if b.numel()]
    scale = max((float(b.abs().max()) for _, b in pairs), default=0.0) or 1e-300
    return max((float((a - b).abs().max()) for a, b in pairs), default=0.0) / scale


def differences(new: dict[Any, Any], old: dict[Any, Any]) -> Iterator[tuple[str, str, bool]]:
    """(what, how it differs, is that more than is allowed?), for each explanation that is not as it was."""
    for side, made in (("new", new), ("old", old)):
        if "not built" in made:
            yield "model", f"not built by the {side} code: {made['not built']}", True
            return
    if new["built"] != old["built"]:
        yield "model", "its weights or inputs are others", True
        return
    for preset in dict.fromkeys(key[0] for key in old if isinstance(key, tuple)):
        truth, nudged = old[preset, "float64"], old[preset, "nudged"]
        known = "error" not in truth
        drift = distance(nudged, truth) if known and "error" not in nudged else 0.0
        for way in WAYS:
            one, other, what = new[preset, way], old[preset, way], f"{preset}, {way}"
            if "error" in one or "error" in other:
                if one.get("error") != other.get("error"):
                    yield what, f"{other.get('error', 'an answer')} → {one.get('error', 'an answer')}", True
            elif way == "float32" and known:
                now, before = distance(one, truth), distance(other, truth)
                if now > WORSE * before + MORE:
                    yield what, f"{now:.1e} from float64, was {before:.1e}", True
            else:
                difference = distance(one, other)
                if difference > (MORE if way == "float32" else EXACT):
                    ill = difference <= ILL * drift
                    yield (
                        what,
                        f"differs by {difference:.1e}" + (f", rounding alone {drift:.0e}" if ill else ""),
                        not ill,
                    )


def compare(since: str, chosen: list[str], wanted: list[str], device: str) -> int:
    """Prints what differs; how many explanations do by more than is allowed."""
    start, explanations, tally, errors = time.perf_counter(), 0, Counter[bool](), Counter[str]()
    words = [__file__, "--device", device, "--presets", ",".join(wanted)]
    with tree_of(since) as old_source:
        sides = {name: Side(source, words, 1) for name, source in (("new", ROOT / "src"), ("old", old_source))}
        try:
            for number, name in enumerate(chosen, 1):
                made = _both(sides, name)
                found = list(differences(made["new"], made["old"]))
                answers = {key: made["old"][key] for key in made["old"] if isinstance(key, tuple) and key[1] in WAYS}
                explanations += len(answers)
                errors.update(f"{key[0]}: {value['error']}" for key, value in answers.items() if "error" in value)
                bad = sum(fault for *_, fault in found)
                tally.update(fault for *_, fault in found)
                told = "same" if not found else f"{bad} differ" if bad else "same up to rounding"
                print(f"{number:3}/{len(chosen)} {name:30} {told}", flush=True)
                for what, how, fault in found:
                    print(f"      {'DIFFERS' if fault else 'rounding'} {what}: {how}", flush=True)
        finally:
            for side in sides.values():
                side.close()
    for error, count in errors.most_common():
        print(f"an error in both, {count} times: {error}")
    print(
        f"{len(chosen)} models, {explanations} explanations by each code ({errors.total()} of them an error), "
        f"{tally[False]} differ by rounding alone, {tally[True]} differ; {time.perf_counter() - start:.0f} s"
    )
    return tally[True]


def _both(sides: dict[str, Side], name: str) -> dict[str, dict[Any, Any]]:
    """What both say, asked at the same time."""
    made: dict[str, dict[Any, Any]] = {}

    def ask(which: str, side: Side) -> None:
        try:
            made[which] = side.ask(name, PATIENCE)
        except Lost as lost:
            made[which] = {"not built": f"its process {lost}"}

    threads = [threading.Thread(target=ask, args=pair) for pair in sides.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", default=SINCE, help="a commit, or a folder that holds src/dynamiclrp")
    parser.add_argument("--quick", action="store_true", help="a few models, a minute")
    parser.add_argument("--only", default="*", help="models, separated by commas; * and ? match")
    parser.add_argument("--presets", default="", help="presets, separated by commas; all of them, if none is named")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    known = list(presets())
    wanted = options.presets.split(",") if options.presets else known
    if options.answer:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        answer(options.answer, lambda name: explain_all(name, wanted, options.device))
        return
    from cases import QUICK, names

    if unknown := [preset for preset in wanted if preset not in known]:
        raise SystemExit(f"--presets {', '.join(unknown)}: known are {', '.join(known)}")
    every = names(published=options.device == "cuda")
    patterns = options.only.split(",")
    chosen = [name for name in every if any(fnmatchcase(name, pattern) for pattern in patterns)]
    chosen = [name for name in chosen if name in QUICK] if options.quick else chosen
    if not chosen:
        raise SystemExit(f"--only {options.only}: no model is called so; there are {', '.join(every)}")
    sys.exit(min(compare(options.since, chosen, wanted, options.device), 1))


if __name__ == "__main__":
    main()

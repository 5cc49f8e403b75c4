"""The zoos on a GPU: the same relevance as on the CPU, also in bf16, and replayed as a CUDA graph on other values.

    python bench/zoo.py --workers 12 --json bench/results/zoo_h200.json
    python bench/zoo.py --device cpu --match 'gpt2*'                     # the harness alone, without graphs

Small models with random weights, as `dynamiclrp coverage --zoo` builds them, each in a worker process that may crash. Errors are
relative to the largest relevance; what differs by more than float32's rounding is compared in float64 before it is called a fault.
"""

from __future__ import annotations

import argparse
import json
import queue
import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dynamiclrp as dlrp
from dynamiclrp.coverage.case import Case
from dynamiclrp.coverage.check import TOLERANCE, all_of_it, difference, in_double, say
from dynamiclrp.coverage.sweep import Worker, WorkerLost, by_zoo, zoo

PRESETS = ("default", "dynamic")
REFUSALS = (
    dlrp.OpaqueGraphError,
    dlrp.NoInputError,
    dlrp.NoGraphError,
    dlrp.TargetError,  # a detector that finds nothing
)
FAULT = "fault: "


def on(case: Case, device: str, dtype: torch.dtype | None = None) -> Case:
    """The case on a device; its model is moved, not copied."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if dtype and value.is_floating_point() else value.dtype)

    inputs = {name: moved(value) for name, value in case.inputs.items()}
    return replace(case, model=case.model.to(device=device, dtype=dtype), inputs=inputs)


def other_values(case: Case) -> Case:
    """The same shapes with other values: rows in another order, or what has no rows a little smaller."""

    def changed(value: Any) -> Any:
        if isinstance(value, Tensor) and case.batched and value.dim():
            return value.flip(0)
        return value * 0.9 if isinstance(value, Tensor) and value.is_floating_point() else value

    return replace(case, inputs={name: changed(value) for name, value in case.inputs.items()})


def explained(explainer: dlrp.Explainer, case: Case, target: Any = None) -> dlrp.Attribution:
    torch.manual_seed(0)
    try:
        return explainer(**case.inputs, target=target)
    except dlrp.TargetError:
        if target is not None:
            raise
        return explainer(**case.inputs, target=all_of_it)


def back(attribution: dlrp.Attribution) -> dlrp.Attribution:
    """In the CPU's memory, in float32 at least."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.cpu().float() if tensor.dtype.itemsize < 4 else tensor.cpu()

    relevances = {name: moved(relevance) for name, relevance in attribution.relevances.items()}
    return replace(attribution, relevances=relevances, prediction=moved(attribution.prediction))


def drift(one: dlrp.Attribution, other: dlrp.Attribution) -> float:
    """Of two predictions, relative."""
    if one.prediction.shape != other.prediction.shape:
        return float("inf")
    largest = float(other.prediction.nan_to_num(0, 0, 0).abs().max())
    return float((one.prediction - other.prediction).nan_to_num(0, 0, 0).abs().max()) / max(largest, 1e-9)


def ranks(one: dlrp.Attribution, other: dlrp.Attribution) -> float:
    """Spearman's correlation, over all inputs."""
    both = [
        torch.cat([r.flatten().double() for r in a.relevances.values()]).argsort().argsort().double()
        for a in (one, other)
    ]
    return float(torch.corrcoef(torch.stack(both))[0, 1]) if len(both[0]) > 1 else 1.0


def eager(case: Case, preset: str, truth: dlrp.Attribution, device: str) -> str:
    """`same`, or what else is to be said."""
    found = back(explained(dlrp.Explainer(case.model, preset), case, truth.seed.to(device)))
    if drift(found, truth) > TOLERANCE:
        return f"the model itself predicts otherwise there (by {drift(found, truth):.0e})"
    error = difference(found, truth)
    if error < TOLERANCE:
        return "same"
    try:  # rounding goes away in float64, a mistake does not
        here = in_double(on(case, "cpu"))
        exact = explained(dlrp.Explainer(here.model, preset), here, truth.seed.double())
        there = on(here, device)
        wide = difference(
            back(explained(dlrp.Explainer(there.model, preset), there, truth.seed.double().to(device))), exact
        )
    except Exception as problem:
        noise = rounding(on(case, "cpu"), preset, truth)
        if error < 10 * noise:
            return f"same but for rounding: by {error:.0e}, and by {noise:.0e} where inputs change in their last digit (float64 does not run)"
        return (
            f"{FAULT}differs by {error:.0e}, by {noise:.0e} in rounding, and float64 does not run: {say(problem)[:120]}"
        )
    finally:
        on(case, device)
    return (
        f"same in float64; float32 rounds by {error:.0e}" if wide < 1e-5 else f"{FAULT}differs by {wide:.0e} in float64"
    )


def rounding(case: Case, preset: str, truth: dlrp.Attribution) -> float:
    """How far relevance moves where float inputs change in their last digit."""

    def nudged(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        return value * (1 + torch.finfo(value.dtype).eps * torch.randn_like(value))

    torch.manual_seed(1)
    nearby = replace(case, inputs={name: nudged(value) for name, value in case.inputs.items()})
    return difference(explained(dlrp.Explainer(case.model, preset), nearby, truth.seed), truth)


def captured(case: Case, preset: str, seed: Tensor) -> str:
    """Replayed on the values of the capture and on others: `same` as eager, or what else is to be said."""
    plain, graph = dlrp.Explainer(case.model, preset), dlrp.Explainer(case.model, preset, cuda_graph=True)
    try:
        explained(graph, case, seed)
    except dlrp.CaptureError as refusal:
        return f"refused: {say(refusal)[:200]}"
    for what, values, target in (("", case, seed), (" on other values", other_values(case), None)):
        expected = explained(plain, values, target)
        found = explained(graph, values, expected.seed)
        if drift(found, expected) > TOLERANCE:
            again = explained(plain, values, expected.seed)
            if drift(again, expected) > TOLERANCE:
                return "the model itself predicts otherwise each time"
            return f"{FAULT}predicts otherwise{what} (by {drift(found, expected):.0e})"
        if difference(found, expected) > 10 * TOLERANCE:
            again = difference(explained(plain, values, expected.seed), expected)
            return f"{FAULT}differs{what} by {difference(found, expected):.0e} (eager from itself by {again:.0e})"
    return "same"


def in_half(case: Case, truth: dlrp.Attribution, gradient: dlrp.Attribution, device: str) -> str:
    """Ranks against those of float32, of `default` and of gradient x input, which shows what the model itself loses."""
    half = on(case, device, torch.bfloat16)
    try:
        with torch.no_grad():
            half.model(**half.inputs)
    except Exception as problem:
        return f"the model itself does not run: {say(problem)[:120]}"
    seed = truth.seed.to(device)
    try:
        found = back(explained(dlrp.Explainer(half.model), half, seed))
        plain = back(explained(dlrp.Explainer(half.model, "gradient"), half, seed))
    except dlrp.NonFiniteError as error:
        return f"not finite: {say(error)[:120]}"
    except (dlrp.TargetError, dlrp.ZeroOutputError) as error:
        return f"not to be compared: {say(error)[:120]}"
    return f"ranks {ranks(found, truth):.3f} (gradient x input {ranks(plain, gradient):.3f})"


def examine(zoo_name: str, name: str, built: Callable[[], None], device: str = "cuda") -> dict[str, str]:
    """What is to be said about one model, by what was tried."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tried(zoo_name, name, built, device)


def tried(zoo_name: str, name: str, built: Callable[[], None], device: str) -> dict[str, str]:
    try:
        case = zoo(zoo_name).build(name)
    except Exception as error:
        return {"not built": say(error)[:200]}
    built()
    try:
        truths = {preset: explained(dlrp.Explainer(case.model, preset), case) for preset in PRESETS}
        gradient = explained(dlrp.Explainer(case.model, "gradient"), case, truths["default"].seed)
    except REFUSALS as error:
        return {"refused": say(error)[:200]}
    except Exception as error:
        return {"on the CPU": f"{FAULT}{say(error)}"}
    case = on(case, device)
    try:
        with torch.no_grad():
            case.model(**case.inputs)
    except Exception as error:
        return {"does not run there": say(error)[:200]}
    found = {}
    for preset, truth in truths.items():
        found[preset] = said(partial(eager, case, preset, truth, device))
        if device == "cuda":
            found[f"{preset}, CUDA graph"] = said(partial(captured, case, preset, truth.seed.to(device)))
    found["default, bf16"] = said(partial(in_half, case, truths["default"], gradient, device))
    return found


def said(what: Callable[[], str]) -> str:
    try:
        return what()
    except Exception as error:
        return f"{FAULT}{say(error)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--zoos", default="transformers,torchvision")
    parser.add_argument("--match", default="*", help="names to take, as a shell pattern")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=60, help="seconds for one model")
    parser.add_argument("--again", action="store_true", help="only those that the file lacks, or that had a fault")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kept = json.loads(options.json.read_text())["models"] if options.again else {}
    done = {key for key, row in kept.items() if not any(text.startswith(FAULT) for text in row.values())}
    names = [
        (zoo_name, name)
        for asked in options.zoos.split(",")
        for zoo_name, name in by_zoo(asked, lambda name: fnmatchcase(name, options.match), None)
        if f"{zoo_name} {name}" not in done
    ]
    waiting: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    for pair in names:
        waiting.put(pair)
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "models": kept,
    }
    rows, lock = results["models"], threading.Lock()

    def note(key: str, row: dict[str, str]) -> None:
        with lock:
            rows[key] = row
            for what, text in row.items():
                if text.startswith(FAULT):
                    print(f"{len(names) - waiting.qsize()} of {len(names)}: {key}, {what}: {text}", flush=True)
            if options.json:  # as far as it came
                options.json.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")

    def work() -> None:
        worker = Worker(partial(examine, device=options.device), threads=1)
        try:
            while True:
                zoo_name, name = waiting.get_nowait()
                try:
                    row = worker.ask(zoo_name, name, options.timeout)
                except WorkerLost as lost:
                    row = {"worker": f"{FAULT}{lost}"} if lost.built else {"not built": str(lost)}
                note(f"{zoo_name} {name}", row)
        except queue.Empty:
            pass
        finally:
            worker.stop()

    workers = [threading.Thread(target=work) for _ in range(options.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    counts = Counter((what, re.split("[:;(0-9]", text)[0]) for row in rows.values() for what, text in row.items())
    for (what, text), count in sorted(counts.items()):
        print(f"{count:5}  {what}: {text}")
    sys.exit(any(text.startswith(FAULT) for row in rows.values() for text in row.values()))


if __name__ == "__main__":
    main()

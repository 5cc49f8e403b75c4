"""The paper's fifteen architectures on the GPU against the CPU: the same relevance within precision.

    python bench/architectures.py [--json results.json] [--only Mamba-130m]
    python bench/architectures.py --device cpu [--json results.json]          # bf16 alone

For each: float32 on the CPU, and float32 and bf16 on the GPU, in torch's own choice of attention and with each backend forced.
Prints the largest error relative to the largest relevance, and Spearman's rank correlation per input; beside it the same
for gradient x input and the prediction, which show what the model itself loses. `--only` (several, comma-separated) renews rows of the file.
"""

from __future__ import annotations

import argparse
import json
import platform
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import dynamiclrp as dlrp
from dynamiclrp.coverage.paper import architectures

BACKENDS = {
    "": None,  # torch's own choice
    "math": SDPBackend.MATH,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}


def moved(inputs: dict[str, Any], device: str, dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: value.to(device, dtype if value.is_floating_point() else value.dtype)
        if isinstance(value, Tensor)
        else value
        for name, value in inputs.items()
    }


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.cpu().double() - truth.double()).abs().max() / truth.double().abs().max())


def rank_correlation(found: Tensor, truth: Tensor) -> float:
    ranks = [x.cpu().double().flatten().argsort().argsort().double() for x in (found, truth)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def some_scores(output: Tensor) -> Tensor:
    """A target that does not change with rounding: random weights have no clear favourite."""
    scores = output.flatten(1)
    return scores[:, scores.shape[1] // 2 :][:, :50].sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    there = options.device
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    results: dict[str, Any] = json.loads(options.json.read_text()) if options.only and options.json.exists() else {}
    results |= {
        "date": date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if there == "cuda" else f"{torch.get_num_threads()} CPU cores",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    wanted = options.only.split(",") if options.only else [a.name for a in architectures()]
    for architecture in architectures():
        if architecture.name not in wanted:
            continue
        try:
            torch.manual_seed(0)  # random weights, the same in each run
            model, inputs = architecture.build()
            model = model.eval()
            with torch.no_grad():  # a head that is zero at first has nothing to explain
                for parameter in model.parameters():
                    if not parameter.any() and parameter.dim() > 1:
                        parameter.normal_(std=0.02)

            def relevance(
                preset: str, device: str, dtype: torch.dtype, model: Any = model, inputs: Any = inputs
            ) -> Any:
                return dlrp.explain(model, **moved(inputs, device, dtype), target=some_scores, preset=preset)

            exact = relevance("attnlrp", "cpu", torch.float32)
            truth = exact.relevance
            gradient = relevance("gradient", "cpu", torch.float32).relevance
            row: dict[str, Any] = {}
            for dtype in (torch.float32, torch.bfloat16) if there == "cuda" else (torch.bfloat16,):
                model = model.to(there, dtype)
                for label, backend in BACKENDS.items() if there == "cuda" else [("", None)]:
                    key = str(dtype).removeprefix("torch.") + (f", {label}" if label else "")
                    try:
                        with sdpa_kernel(backend) if backend is not None else nullcontext():
                            a = relevance("attnlrp", there, dtype)
                    except RuntimeError as failure:  # a backend serves only some shapes and dtypes
                        if "No available kernel" not in str(failure):
                            raise
                        row[key] = {"not available": str(failure).splitlines()[0]}
                        continue
                    row[key] = {
                        "error": error(a.relevance, truth),
                        "rank correlation": round(rank_correlation(a.relevance, truth), 4),
                        "prediction's error": error(a.prediction, exact.prediction),
                        "attention": sorted({s.name for s in a.plan.steps if str(s.kind) in ("attention", "weights")}),
                    }
                plain = relevance("gradient", there, dtype).relevance
                row[str(dtype).removeprefix("torch.")] |= {
                    "gradient's error": error(plain, gradient),
                    "gradient's rank correlation": round(rank_correlation(plain, gradient), 4),
                }
            del model, relevance
            if there == "cuda":
                torch.cuda.empty_cache()
        except Exception as failure:  # one architecture must not hide the others
            row = {"failed": f"{type(failure).__name__}: {failure}"[:300]}
        results[architecture.name] = row
        print(architecture.name, json.dumps(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

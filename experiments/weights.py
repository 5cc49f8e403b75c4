"""Weights on disk: half precision, safetensors, in parts of at most 15 MiB, each written under another name and renamed.

`python experiments/weights.py DIR/trained --out docs/results/trained.json` collects what the headers say of the training.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PART = 15 << 20


def save_half(state: Mapping[str, Tensor], path: Path, facts: Mapping[str, Any]) -> list[Path]:
    """Write `NAME.safetensors`, or `NAME-1-of-2.safetensors` and so on where it is large. `facts` go into each header."""
    from safetensors.torch import save_file

    tensors = {k: (v.half() if v.is_floating_point() else v).cpu().contiguous() for k, v in state.items()}
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > PART:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for i, part in enumerate(parts, 1):
        final = path if len(parts) == 1 else path.with_name(f"{path.stem}-{i}-of-{len(parts)}{path.suffix}")
        draft = final.with_name(final.name + ".part")
        save_file(part, draft, metadata={"facts": json.dumps(dict(facts))})
        os.replace(draft, final)
        written.append(final)
    return written


def load_half(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors in single precision and the facts of what `save_half` wrote to `path`."""
    from safetensors import safe_open

    files = [path] if path.exists() else sorted(path.parent.glob(f"{path.stem}-*-of-*{path.suffix}"))
    whole = files == [path] or (files and len(files) == int(files[0].stem.rsplit("-", 1)[1]))
    if not whole:
        raise FileNotFoundError(
            f"{path}: no such weights, whole or in parts. Train them with the scripts in experiments/train, "
            "or say where they are with --data DIR (they lie in DIR/trained)."
        )
    state: dict[str, Tensor] = {}
    facts: dict[str, Any] = {}
    for file in files:
        with safe_open(file, "pt") as stream:
            facts = json.loads((stream.metadata() or {}).get("facts", "{}"))
            for name in stream.keys():  # noqa: SIM118 (not a mapping)
                tensor = stream.get_tensor(name)
                state[name] = tensor.float() if tensor.dtype == torch.float16 else tensor
    return state, facts


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("folder", type=Path, help="where experiments/train wrote its weights")
    command.add_argument("--out", type=Path, required=True, help="the .json to write")
    options = command.parse_args()
    names = sorted({re.sub(r"-\d+-of-\d+$", "", file.stem) for file in options.folder.glob("*.safetensors")})
    facts = {name: load_half(options.folder / f"{name}.safetensors")[1] for name in names}
    options.out.write_text(json.dumps({"kind": "trained", "models": facts}, indent=1) + "\n", encoding="utf-8")
    print(f"{options.out}: {', '.join(names)}")


if __name__ == "__main__":
    main()

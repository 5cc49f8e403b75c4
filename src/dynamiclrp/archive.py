"""Results in files: one safetensors file, with everything that is not a tensor as JSON in its header. Never pickle.

In: an Attribution, Generation or Comparison. Out: a file, and the same values back, bit for bit. Only the classes named
here can be made by reading a file, so a file from elsewhere runs no code. The plan and the ledger's single entries are
not kept: the first belongs to a live graph, of the second the account stays.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import media, rules
from .attribution import Account, Answer, Attribution, Viewable
from .presets import Preset

_KEY, _VERSION = "dynamiclrp", 1
_DENSE = 1024  # elements, below which every tensor is kept as it is


def write_whole(path: str | PathLike[str], data: bytes) -> None:
    """Write a file that is either there in full or not at all."""
    target = Path(path)
    folder = target.parent
    if not folder.is_dir():
        raise FileNotFoundError(f"cannot write {target}: there is no folder {folder}")
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=folder)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _classes() -> dict[str, type]:
    from .comparison import Comparison
    from .generation import Generation

    values = (Attribution, Generation, Comparison, Account, Answer, Preset)
    things = (media.Tokens, media.Picture, media.Sound, media.Table)
    kinds = [kind for kind in vars(rules).values() if isinstance(kind, type) and issubclass(kind, rules.Rule)]
    return {kind.__name__: kind for kind in (*values, *things, *kinds)}


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("saving and loading need safetensors: pip install safetensors") from error
    return safetensors


def save(result: Viewable, path: str | PathLike[str]) -> None:
    """Write a result to one file."""
    for dense in (
        _DENSE,
        sys.maxsize,
    ):  # the second time, where what is mostly zeros would outgrow the file by too much
        tensors: dict[str, Tensor] = {}
        meta = {"version": _VERSION, "result": _pack(result, tensors, "", _classes(), dense)}
        tensors.setdefault("_", torch.zeros(0))  # safetensors wants at least one
        data = _safetensors().torch.save(tensors, {_KEY: json.dumps(meta, ensure_ascii=False)})
        if _spread(meta) <= _room(len(data)):
            break
    write_whole(path, data)


def _room(size: int) -> int:
    """Bytes that the zeros of a file of this size may take in memory: a small file must not ask for all of it."""
    return 2**26 + 16 * size


def _spread(packed: Any) -> int:
    """Bytes that tensors of mostly zeros take when they are unpacked."""
    if isinstance(packed, dict) and "sparse" in packed:
        return 8 * math.prod(map(abs, packed["sparse"][1]))
    inner = packed.values() if isinstance(packed, dict) else packed if isinstance(packed, list) else ()
    return sum(map(_spread, inner))


def load(path: str | PathLike[str]) -> Any:
    """Bring back what `.save(path)` kept.

    a.save("why.safetensors")
    dlrp.load("why.safetensors").html("why.html")
    """
    safetensors, file = _safetensors(), Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}")
    try:
        with safetensors.safe_open(file, "pt") as stream:
            text = (stream.metadata() or {}).get(_KEY)
            tensors = {name: stream.get_tensor(name) for name in stream.keys()} if text else {}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file} is not a safetensors file ({error}): expected one that .save() wrote") from None
    if text is None:
        raise ValueError(f"{file} is a safetensors file of something else: expected one that .save() wrote")
    try:
        return _read(text, tensors, _room(file.stat().st_size))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file} cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:160]}): expected a file as .save() "
            "wrote it; a damaged one cannot be mended"
        ) from error


def _read(text: str, tensors: Mapping[str, Tensor], room: int) -> Viewable:
    meta = json.loads(text)
    if meta["version"] > _VERSION:
        raise ValueError(f"written by a newer dynamiclrp (format {meta['version']}, known: {_VERSION}): upgrade")
    if _spread(meta["result"]) > room:
        raise ValueError("so small a file does not hold tensors so large")
    result = _unpack(meta["result"], tensors, _classes())
    if not isinstance(result, Viewable):
        raise TypeError(f"it holds {type(result).__name__}, no result")
    return result


def _whole(places: Tensor, values: Tensor, sizes: list[int]) -> Tensor:
    """A tensor of zeros with these values."""
    if len(places) != len(values) or (places < 0).any():
        raise ValueError("places and values do not fit each other")
    whole = torch.zeros(sizes, dtype=values.dtype)
    whole.view(-1)[places] = values
    return whole


def _pack(value: Any, tensors: dict[str, Tensor], name: str, classes: Mapping[str, type], dense: int) -> Any:
    """JSON of a value; its tensors go to `tensors` under the path where they stand."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return {"float": value.hex()} if value != value or value in (float("inf"), float("-inf")) else value
    if isinstance(value, Tensor):
        flat = value.detach().cpu().flatten()
        places = flat.nonzero()[:, 0]
        if flat.numel() > dense and 20 * len(places) < flat.numel():  # a seed is zero nearly everywhere
            tensors[f"{name}.places"], tensors[f"{name}.values"] = places, flat[places].clone()
            return {"sparse": [name, list(value.shape)]}
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, bytes):
        tensors[name] = (
            torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.zeros(0, dtype=torch.uint8)
        )
        return {"bytes": name}
    if isinstance(value, (list, tuple)):
        packed = [_pack(item, tensors, f"{name}.{i}", classes, dense) for i, item in enumerate(value)]
        return packed if isinstance(value, list) else {"tuple": packed}
    if isinstance(value, Mapping):
        return {"dict": [[k, _pack(v, tensors, f"{name}.{k}", classes, dense)] for k, v in value.items()]}
    if is_dataclass(value) and classes.get(type(value).__name__) is type(value):
        inner = {
            field.name: _pack(_kept(value, field.name), tensors, f"{name}.{field.name}".lstrip("."), classes, dense)
            for field in fields(value)
            if field.init
        }
        return {"class": type(value).__name__, "fields": inner}
    if callable(value):  # a target that was code: its name is all that can be kept
        return {"described": getattr(value, "__qualname__", repr(value))}
    raise TypeError(f"cannot save {name or 'this result'}: {type(value).__name__} is neither a tensor nor plain data")


def _kept(result: Any, name: str) -> Any:
    value = getattr(result, name)
    if name == "plan":
        return None
    if name == "ledger" and value is not None:
        return Account(value.total, value.delivered, dict(value.kept))
    return value


def _unpack(value: Any, tensors: Mapping[str, Tensor], classes: Mapping[str, type]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors, classes) for item in value]
    if not isinstance(value, dict):
        return value
    if "class" in value:
        kind = classes.get(value["class"])
        if kind is None:
            raise ValueError(f"it holds {value['class']!r}, which this dynamiclrp does not know: upgrade it")
        return kind(**{name: _unpack(item, tensors, classes) for name, item in value["fields"].items()})
    ((tag, inner),) = value.items()
    match tag:
        case "tensor":
            return tensors[inner]
        case "sparse":
            return _whole(tensors[f"{inner[0]}.places"], tensors[f"{inner[0]}.values"], inner[1])
        case "bytes":
            return bytes(tensors[inner].tolist())
        case "tuple":
            return tuple(_unpack(item, tensors, classes) for item in inner)
        case "dict":
            return {key: _unpack(item, tensors, classes) for key, item in inner}
        case "float":
            return float.fromhex(inner)
        case "described":
            return inner
    raise ValueError(f"it holds {tag!r}, which this dynamiclrp does not know: upgrade it")

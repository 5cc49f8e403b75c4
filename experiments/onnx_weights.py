"""Weights out of a quantised ONNX file, under the names of the modules that they came from. Needs no ONNX package.

In: the path of a file that `onnx.quantize` wrote. Out: float tensors. Only what such files hold is read: initialisers, and
the matrix products that use them (their nodes' names are module paths, while their weights have lost theirs).
Field numbers are those of onnx.proto3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_TYPES = {1: np.float32, 2: np.uint8, 3: np.int8, 6: np.int32, 7: np.int64}
_MODEL_GRAPH, _GRAPH_NODE, _GRAPH_INITIALISER = 7, 1, 5
_NODE_INPUT, _NODE_NAME, _NODE_TYPE = 1, 3, 4
_DIMS, _DATA_TYPE, _FLOATS, _INTS, _NAME, _RAW = 1, 2, 4, 5, 8, 9


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a protobuf message: numbers, or the bytes of what has a length."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"protobuf wire type {wire} at byte {at}: not an ONNX file?")
        yield key >> 3, data[at : at + size]
        at += size


def _messages(data: memoryview, number: int) -> Iterator[memoryview]:
    return (value for field, value in _fields(data) if field == number and isinstance(value, memoryview))


def _texts(data: memoryview, number: int) -> list[str]:
    return [str(value, "utf-8") for value in _messages(data, number)]


def _numbers(data: memoryview, number: int) -> list[int]:
    """A repeated integer, packed or one field each."""
    found: list[int] = []
    for field, value in _fields(data):
        if field != number:
            continue
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = _varint(value, at)
            found.append(one)
    return found


def _tensor(data: memoryview) -> Tensor:
    kind = _TYPES[_numbers(data, _DATA_TYPE)[0]]
    raw = b"".join(_messages(data, _RAW)) or b"".join(_messages(data, _FLOATS))
    values = np.frombuffer(raw, kind) if raw else np.array(_numbers(data, _INTS)).astype(kind)
    return torch.from_numpy(values.reshape(_numbers(data, _DIMS)).copy())


@dataclass(frozen=True)
class _Graph:
    tensors: dict[str, Tensor]
    products: dict[str, str]  # module path: what its weight is called


def _read(path: Path) -> _Graph:
    graph = next(_messages(memoryview(path.read_bytes()), _MODEL_GRAPH))
    tensors = {_texts(data, _NAME)[0]: _tensor(data) for data in _messages(graph, _GRAPH_INITIALISER)}
    products = {}
    for node in _messages(graph, _GRAPH_NODE):
        if _texts(node, _NODE_TYPE) == ["MatMulInteger"]:
            module = _texts(node, _NODE_NAME)[0].removesuffix("/MatMul_quant").strip("/").replace("/", ".")
            products[module] = _texts(node, _NODE_INPUT)[1].removesuffix("_quantized")
    return _Graph(tensors, products)


def onnx_weights(path: Path) -> dict[str, Tensor]:
    """All float weights: those with names of their own, and the matrices of products as `MODULE.weight`, [out, in]."""
    graph = _read(path)

    def dequantised(name: str) -> Tensor:
        scale, zero = (graph.tensors[f"{name}_{part}"].float() for part in ("scale", "zero_point"))
        return (graph.tensors[f"{name}_quantized"].float() - zero) * scale

    found = {name: value for name, value in graph.tensors.items() if name.endswith(".weight")}
    for name in graph.tensors:
        if name.endswith(".weight_quantized"):
            found[name.removesuffix("_quantized")] = dequantised(name.removesuffix("_quantized"))
    for module, name in graph.products.items():
        found[f"{module}.weight"] = dequantised(name).T.contiguous()
    return found

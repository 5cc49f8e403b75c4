"""Result files that somebody else made, or that were damaged, given to `dynamiclrp.load`.

Reading takes memory in proportion to the file, and what is wrong with it is a ValueError that names the file.
"""

import json
import os
import struct
import subprocess
import sys

import pytest

import dynamiclrp as dlrp

pytest.importorskip("safetensors")


def write(path, meta, tensors=()):
    """A safetensors file by hand: its header, then its data."""
    header, data = {"__metadata__": {"dynamiclrp": meta if isinstance(meta, str) else json.dumps(meta)}}, b""
    for name, kind, shape, content in (("_", "F32", [0], b""), *tensors):
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def sparse(path, sizes):
    result = {"version": 1, "result": {"sparse": ["x", sizes]}}
    return write(path, result, [("x.places", "I64", [0], b""), ("x.values", "F32", [0], b"")])


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads the peak of memory from /proc")
@pytest.mark.parametrize("sizes", [[2**28], [2**14, 2**14], [1, 2**28, 1]])
def test_a_small_file_takes_little_memory(tmp_path, sizes):
    """A limit on the address space, well above what the libraries take, stands for the machine's memory."""
    file = sparse(tmp_path / "small.safetensors", sizes)
    assert file.stat().st_size < 500
    script = (
        "import resource, sys, torch, safetensors.torch, dynamiclrp as dlrp\n"
        "def now(): return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmSize'))\n"
        "dlrp.preset('default')\n"
        "limit = now() * 1024 + 512 * 2**20\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "try: dlrp.load(sys.argv[1])\n"
        "except ValueError as error: print('refused', error)\n"
        "else: print('loaded')\n"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(file)], capture_output=True, text=True, timeout=120, env=env
    )
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1]


DAMAGED = {
    "no result": {"version": 1},
    "no version": {"result": 1},
    "a list": [],
    "a number": 7,
    "a version in words": {"version": "one", "result": 1},
    "no JSON": "{",
    "a tensor that is not there": {"version": 1, "result": {"tensor": "nowhere"}},
    "bytes that are not there": {"version": 1, "result": {"bytes": "nowhere"}},
    "two tags": {"version": 1, "result": {"tensor": "_", "bytes": "_"}},
    "no tag": {"version": 1, "result": {}},
    "a class without its fields": {"version": 1, "result": {"class": "Attribution", "fields": {}}},
    "a class with other fields": {"version": 1, "result": {"class": "Answer", "fields": {"nothing": 1}}},
    "a class with no fields at all": {"version": 1, "result": {"class": "Answer"}},
    "a dict that is none": {"version": 1, "result": {"dict": [[1]]}},
    "deep": '{"version": 1, "result": ' + "[" * 100_000 + "]" * 100_000 + "}",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named(tmp_path, name):
    file = write(tmp_path / "damaged.safetensors", DAMAGED[name])
    with pytest.raises(ValueError, match=r"damaged\.safetensors"):
        dlrp.load(file)


@pytest.mark.parametrize("sizes, place", [([-1], 0), ([2], 5), ([2], -3), (["x"], 0)])
def test_damaged_sparse_tensors_are_named(tmp_path, sizes, place):
    result = {"version": 1, "result": {"sparse": ["x", sizes]}}
    tensors = [("x.places", "I64", [1], struct.pack("<q", place)), ("x.values", "F32", [1], struct.pack("<f", 1.0))]
    file = write(tmp_path / "damaged.safetensors", result, tensors)
    with pytest.raises(ValueError, match=r"damaged\.safetensors"):
        dlrp.load(file)


def test_control_a_file_of_ours(tmp_path):
    """Right today: must stay so."""
    import torch

    a = dlrp.explain(torch.nn.Linear(3000, 2), torch.randn(1, 3000), target=1)
    a.save(tmp_path / "ours.safetensors")
    assert torch.equal(dlrp.load(tmp_path / "ours.safetensors").relevance, a.relevance)


def test_many_zeros_together_take_little_memory(tmp_path):
    """Each of them is small; the sum is what counts."""
    result = {"version": 1, "result": [{"sparse": ["x", [2**20]]}] * 1000}
    file = write(tmp_path / "many.safetensors", result, [("x.places", "I64", [0], b""), ("x.values", "F32", [0], b"")])
    with pytest.raises(ValueError, match=r"many\.safetensors.*so large"):
        dlrp.load(file)


@pytest.mark.parametrize(
    "value", [1, [], None, {"tensor": "_"}, {"class": "Answer", "fields": {"label": "x"}}], ids=repr
)
def test_something_that_is_no_result(tmp_path, value):
    file = write(tmp_path / "other.safetensors", {"version": 1, "result": value})
    with pytest.raises(ValueError, match=r"other\.safetensors.*no result"):
        dlrp.load(file)


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_a_file_that_is_cut_short(tmp_path, cut):
    import torch

    dlrp.explain(torch.nn.Linear(3, 2), torch.randn(1, 3)).save(tmp_path / "short.safetensors")
    data = (tmp_path / "short.safetensors").read_bytes()
    (tmp_path / "short.safetensors").write_bytes(data[:cut])
    with pytest.raises(ValueError, match=r"short\.safetensors"):
        dlrp.load(tmp_path / "short.safetensors")


def test_control_large_and_nearly_empty(tmp_path):
    """What `save` writes `load` reads, however many zeros it has."""
    from dataclasses import replace

    import torch

    a = dlrp.explain(torch.nn.Linear(3, 2), torch.randn(1, 3), target=1)
    large = torch.zeros(1, 2**23 + 2**20)
    large[0, 5] = 1.5
    replace(a, layers={"x": large}).save(tmp_path / "large.safetensors")
    assert torch.equal(dlrp.load(tmp_path / "large.safetensors").layers["x"], large)

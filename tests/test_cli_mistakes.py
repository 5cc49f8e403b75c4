"""The command line with a model of the user's own (`module:callable`) that raises while it is imported or run.

The exit codes are those that the help lists, 3, the model could not be loaded, and 5, the model could not be explained; the line
names the module, or the place in it.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("typer")

IMPORTS = {
    "value": "raise ValueError('my own mistake')",
    "attribute": "import torch\ntorch.there_is_no_such_thing",
    "syntax": "def f(:\n",
    "zero": "1 / 0",
    "assertion": "assert False, 'never'",
    "name": "x = undefined",
    "import from": "from torch import there_is_no_such_thing",
    "exit": "raise SystemExit(0)",
}
MODEL = "import torch\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.map = torch.nn.Linear(3, 2)\n    def forward(self, x):\n        return self.map({})\ndef model():\n    return Model()\n"  # fmt: skip
RUNS = {
    "wrong shape": MODEL.format("x[:, :2]"),
    "index": MODEL.format("x[0, 99]"),
    "key": MODEL.format("{}['key']"),
    "attribute": MODEL.format("x.there_is_no_such_thing()"),
    "value": MODEL.format("int('x')"),
}


def command(folder, code):
    (folder / "mymodels.py").write_text(code)
    line = [sys.executable, "-m", "dynamiclrp.cli", "inspect", "mymodels:model", "--shape", "1,3", "--device", "cpu"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=120, cwd=folder, env=env, stdin=subprocess.DEVNULL
    )
    return done.returncode, done.stderr.strip()


@pytest.mark.parametrize("name", IMPORTS)
def test_a_module_that_raises_when_it_is_imported(tmp_path, name):
    code, told = command(tmp_path, IMPORTS[name])
    assert code == 3, f"exit code {code}: {told}"
    assert "mymodels" in told, told


@pytest.mark.parametrize("name", RUNS)
def test_a_model_that_raises_when_it_runs(tmp_path, name):
    code, told = command(tmp_path, RUNS[name])
    assert code == 5, f"exit code {code}: {told}"
    assert "the model itself failed at mymodels.py:7" in told, told


def test_a_package_that_is_missing_is_another_thing(tmp_path):
    code, told = command(tmp_path, "import a_package_that_nobody_has")
    assert code == 6, f"exit code {code}: {told}"

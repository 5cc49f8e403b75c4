"""A model folder that brings its own Python code (`auto_map` in its config.json), given to the command line.

No code from the folder runs and nobody is asked whether it may: exit code 3, the model could not be loaded, and one line why.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("transformers")
pytest.importorskip("typer")

CODE = """import os
open(os.environ["MARK"], "w").write("ran")
from transformers import PretrainedConfig, PreTrainedModel
class StrangeConfig(PretrainedConfig):
    model_type = "strange"
class Strange(PreTrainedModel):
    config_class = StrangeConfig
"""


def command(tmp_path, config, typed):
    folder, mark = tmp_path / "strange", tmp_path / "mark"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "strange.py").write_text(CODE)
    line = [
        sys.executable,
        "-m",
        "dynamiclrp.cli",
        "inspect",
        str(folder),
        "--random",
        "--device",
        "cpu",
        "--shape",
        "1,3",
    ]
    env = {
        **os.environ,
        "MARK": str(mark),
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(line, input=typed, capture_output=True, text=True, timeout=180, env=env)
    return done, mark


STRANGE = {"model_type": "strange", "architectures": ["Strange"]}
CONFIGS = {
    "config and model": {
        **STRANGE,
        "auto_map": {"AutoConfig": "strange.StrangeConfig", "AutoModel": "strange.Strange"},
    },
    "config": {**STRANGE, "auto_map": {"AutoConfig": "strange.StrangeConfig"}},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_no_question_and_no_code(tmp_path, name):
    done, mark = command(tmp_path, CONFIGS[name], "y\n" * 9)
    assert not mark.exists(), "the folder's code ran"
    assert "[y/N]" not in done.stdout + done.stderr, "the user was asked"
    assert done.returncode == 3, f"exit code {done.returncode}: {done.stderr[-500:]}"


def test_nobody_at_the_terminal(tmp_path):
    done, mark = command(tmp_path, CONFIGS["config and model"], "")
    assert not mark.exists()
    assert "[y/N]" not in done.stdout + done.stderr, "the user was asked"
    assert done.returncode == 3, f"exit code {done.returncode}: {done.stderr[-500:]}"

"""The command line: what it prints, what it writes, and how it ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

testing = pytest.importorskip("typer.testing")

from dynamiclrp.cli import application, main  # noqa: E402
from dynamiclrp.cli.exits import Code, UserError, code_of, line_of  # noqa: E402
from dynamiclrp.errors import PresetError, UnknownOpError  # noqa: E402

SOURCE = str(Path(__file__).parent.parent / "src")
COMMANDS = ["text", "generate", "image", "compare", "inspect", "bench", "coverage", "demo"]
MODELS = """
import torch

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 5))

class Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2

class Custom(torch.nn.Module):
    def forward(self, x):
        return Opaque.apply(x)

def custom():
    return Custom()

def text():
    return "not a model"

def broken():
    raise ValueError("no such checkpoint")

class Pixels:
    classes = ["zero", "one", "two", "three", "four"]

    def __call__(self, picture):
        data = bytearray(picture.resize((8, 8)).tobytes())
        return torch.frombuffer(data, dtype=torch.uint8).view(8, 8, 3).permute(2, 0, 1).float() / 255

def eyes():
    return net(), Pixels()

made = net()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Commands run in a folder of their own, with a module of models in it."""
    (tmp_path / "my_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("my_models", None)


def call(*arguments: str):
    return testing.CliRunner().invoke(application(), list(arguments))


def process(*arguments: str, **environment: str):
    """A real process, as users start it."""
    return subprocess.run(
        [sys.executable, "-m", "dynamiclrp.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": SOURCE} | environment,
    )


# ------------------------------------------------------------------------------------------------------------- the whole


def test_help_names_every_command_and_every_exit_code():
    shown = " ".join(call("--help").output.split())
    for command in COMMANDS:
        assert command in shown
    for code in Code:
        assert str(int(code)) in shown.split("Exit codes:")[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command):
    done = call(command, "--help")
    assert done.exit_code == 0
    assert f"dynamiclrp {command} " in done.output and "Examples" in done.output and "--debug" in done.output


def test_version():
    import dynamiclrp

    assert call("--version").output.strip() == dynamiclrp.__version__


def test_without_its_packages_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(SystemExit, match=r"pip install 'dynamiclrp\[cli\]'") as ended:
        main()
    assert ended.value.code == Code.PACKAGE


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError(Code.MODEL, "x"), Code.MODEL),
        (PresetError("x"), Code.USAGE),
        (UnknownOpError("x"), Code.EXPLAIN),
        (ModuleNotFoundError("x"), Code.PACKAGE),
        (FileNotFoundError("x"), Code.INPUT),
        (KeyboardInterrupt(), Code.STOPPED),
        (ZeroDivisionError("x"), Code.BUG),
    ],
)
def test_errors_have_codes(error, code):
    assert code_of(error) is code
    assert "\n" not in line_of(error)


# ----------------------------------------------------------------------------------------------------------------- inspect


def test_inspect_counts_nodes_and_promises():
    done = call("inspect", "my_models:net", "--shape", "1,3,8,8", "--json", "-p", "gamma", "--promises")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["coverage"] == 1.0 and found["preset"] == "gamma"
    assert found["inputs"] == {"input": [1, 3, 8, 8]}
    assert {op["op"] for op in found["operations"]} == {"Convolution", "Relu", "View", "Addmm"}
    assert sum(op["nodes"] for op in found["operations"]) == found["live"]
    assert found["promises"]["promises"] == len(found["promises"]["trees"]) > 0


def test_inspect_for_people_and_to_a_file():
    done = call("inspect", "my_models:made", "--shape", "1x3x8x8", "--out", "plan.json")
    assert done.exit_code == 0
    assert "Convolution" in done.stdout and "coverage 100.00%" in done.stdout and "written: plan.json" in done.stdout
    assert json.loads(Path("plan.json").read_text())["model"] == "my_models:made"
    assert [f.name for f in Path().iterdir() if ".part" in f.name] == []


def test_inspect_reports_an_operation_without_a_rule():
    done = call("inspect", "my_models:custom", "--shape", "1,3", "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["without_a_rule"] == {"OpaqueBackward": 1} and found["coverage"] < 1 and found["promises"] is None


def test_preset_parameters():
    done = call("inspect", "my_models:net", "--shape", "1,3,8,8", "--json", "-p", "gamma,gamma=0.1")
    assert json.loads(done.stdout)["preset"] == "gamma(gamma=0.1)"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("my_models:net",), 2, "Give --shape"),
        (("my_models:net", "--shape", "1,a"), 2, "expected positive numbers"),
        (("my_models:net", "--shape", "1,3,8,8", "-p", "gama"), 2, "Did you mean 'gamma'?"),
        (("my_models:net", "--shape", "1,3,8,8", "-p", "gamma,gamma=x"), 2, "name=number"),
        (("my_models:net", "--shape", "1,3,8,8", "--dtype", "int8"), 2, "expected one of float32"),
        (("my_models:net", "--shape", "1,3,8,8", "--device", "gpu"), 2, "--device cpu"),
        (("my_models:net", "--text", "hello"), 2, "has no tokenizer"),
        (("my_models:nett", "--shape", "1,3,8,8"), 3, "Did you mean net?"),
        (("my_models:text", "--shape", "1,3,8,8"), 3, "Expected a torch.nn.Module"),
        (("my_models:broken", "--shape", "1,3,8,8"), 3, "no such checkpoint"),
        (("no_such_module:net", "--shape", "1"), 3, "no module 'no_such_module'"),
        (("missing.gguf",), 3, "no such file"),
        ((".",), 3, "config.json"),
        (("my_models:net", "--shape", "1,3,8,8", "--out", "plan.txt"), 2, "ends in .json"),
        (("my_models:net", "--shape", "1,3,8,8", "--out", "no/plan.json"), 4, "mkdir -p no"),
    ],
)
def test_mistakes_end_in_one_line_with_a_remedy(arguments, code, words):
    done = call("inspect", *arguments)
    assert done.exit_code == code, done.output
    assert words in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.startswith("dynamiclrp inspect: ") and done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_zoo_models_by_name():
    pytest.importorskip("timm")
    done = call("inspect", "timm:test_vit", "--random", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["inputs"] == {"x": [1, 3, 160, 160]}
    done = call("inspect", "torchvision:squeezenet1_1", "--random", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["inputs"] == {"x": [1, 3, 224, 224]}
    done = call("inspect", "torchvision:resnet5", "--random")
    assert done.exit_code == 3 and "Did you mean resnet50" in done.stderr


def test_a_folder_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, architectures=["GPT2LMHeadModel"])
    config.save_pretrained(tmp_path / "tiny")
    done = call("inspect", "tiny", "--random", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["inputs"] == {"input_ids": [1, 32]}
    done = call("inspect", "tiny")
    assert done.exit_code == 3 and "--random" in done.stderr


# ------------------------------------------------------------------------------------------------------------------- bench


def test_bench_measures_in_one_run():
    done = call(
        "bench", "my_models:net", "--shape", "2,3,8,8", "--repeats", "3", "--json", "-p", "attnlrp", "-p", "gamma"
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    rows = {row["what"]: row for row in found["rows"]}
    assert list(rows) == ["forward", "gradient x input", "attnlrp", "gamma"]
    assert rows["gradient x input"]["ratio"] == rows["gradient x input"]["memory_ratio"] == 1
    assert all(row["ms"] > 0 and row["peak_mb"] >= 0 for row in found["rows"])
    assert rows["gamma"]["memory_ratio"] > rows["forward"]["memory_ratio"]
    assert {"machine", "versions", "inputs"} <= found.keys()


def test_bench_on_tokens(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, architectures=["GPT2LMHeadModel"])
    config.save_pretrained(tmp_path / "tiny")
    done = call("bench", "tiny", "--random", "--tokens", "8", "--batch", "2", "--repeats", "3")
    assert done.exit_code == 0, done.output
    assert "input_ids 2×8" in done.stdout and "gradient x input" in done.stdout


# ------------------------------------------------------------------------------------------------------ text and generation


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A folder with a tiny language model, and one with a tiny classifier, with their tokenizer."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<unk>", "<pad>", "the", "cat", "sat", "on", "a", "mat", "dog", "good", "bad", "film"]
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", pad_token="<pad>")
    base = tmp_path_factory.mktemp("models")
    import torch

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": len(words), "n_positions": 64, "pad_token_id": 1}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    labels = {"id2label": {0: "NEGATIVE", 1: "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}}
    for name, kind, extra in (
        ("talker", transformers.GPT2LMHeadModel, {}),
        ("judge", transformers.GPT2ForSequenceClassification, labels),
    ):
        kind(transformers.GPT2Config(**sizes, **extra)).save_pretrained(base / name)
        tokenizer.save_pretrained(base / name)
    return base


def test_text_explains_the_next_word(talker):
    done = call("text", str(talker / "talker"), "the cat sat on a", "--json", "--out", "why.html")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["task"] == "causal-lm"
    assert len(found["rows"]) == 1 and len(found["rows"][0]["parts"]) == 5
    assert "<!doctype html>" in Path("why.html").read_text()


def test_text_explains_a_label_and_shows_a_table(talker):
    done = call(
        "text", str(talker / "judge"), "a good film", "--target", "POSITIVE", "--contrast", "NEGATIVE", "--ledger"
    )
    assert done.exit_code == 0, done.output
    assert "POSITIVE" in done.stdout and "film" in done.stdout


def test_text_explains_several_words_or_by_several_presets(talker):
    done = call("text", str(talker / "talker"), "the cat", "--top", "3", "--json")
    assert done.exit_code == 0 and len(json.loads(done.stdout)) == 3, done.output
    done = call("text", str(talker / "judge"), "a bad film", "-p", "attnlrp", "-p", "gamma", "--json")
    assert done.exit_code == 0 and len(json.loads(done.stdout)) == 2, done.output


def test_text_from_stdin(talker):
    done = testing.CliRunner().invoke(application(), ["text", str(talker / "talker"), "-", "--json"], input="the dog\n")
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["rows"][0]["parts"]) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("judge", "a good film", "--target", "GOOD"), 2, "POSITIVE"),
        (("judge", "a good film", "--task", "guessing"), 2, "expected one of"),
        (("judge", " "), 2, "empty"),
        (("judge", "a film", "--out", "why.doc"), 2, "ends in .html"),
    ],
)
def test_mistakes_about_texts(talker, arguments, code, words):
    done = call("text", str(talker / arguments[0]), *arguments[1:])
    assert done.exit_code == code, done.output
    assert words in done.stderr and done.stderr.count("\n") == 1


def test_a_model_without_a_tokenizer_is_no_text_model():
    done = call("text", "my_models:net", "hello")
    assert done.exit_code == 3 and "(model, tokenizer)" in done.stderr


def test_generate_explains_every_word(talker):
    done = call("generate", str(talker / "talker"), "the cat", "-n", "3", "--json", "--out", "map.safetensors")
    assert done.exit_code == 0, done.output
    json.loads(done.stdout)
    import dynamiclrp as dlrp

    made = dlrp.load("map.safetensors")
    assert made.matrix.shape[0] == len(made.generated) <= 3
    done = call("generate", str(talker / "talker"), "the cat", "--continuation", "sat on", "--json")
    assert done.exit_code == 0, done.output


# ------------------------------------------------------------------------------------------------------------------ pictures


@pytest.fixture
def picture(folder):
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (12, 8), (200, 30, 30)).save(folder / "red.png")
    return "red.png"


def test_image_explains_several_answers(picture):
    done = call("image", "my_models:eyes", picture, "--top", "2", "--json", "--out", "why.png")
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)) == 2
    assert Path("why.png").read_bytes()[:4] == b"\x89PNG"


def test_image_by_name_and_by_preset(picture):
    done = call("image", "my_models:eyes", picture, "-t", "two", "-p", "attnlrp", "-p", "gamma", "--json")
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)) == 2
    done = call("image", "my_models:eyes", picture, "-t", "two", "--contrast", "one", "--out", "why.html")
    assert done.exit_code == 0 and "two" in done.stdout, done.output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("none.png",), 4, "no such file"),
        (("my_models.py",), 4, "not a picture"),
        (("red.png", "-t", "seven"), 2, "seven"),
        (("red.png", "--top", "2", "-t", "one"), 2, "exclude each other"),
        (("red.png", "-t", "one", "-t", "two", "-p", "gamma", "-p", "epsilon"), 2, "one of them at a time"),
        (("red.png", "--classes", "none.txt"), 4, "one name a line"),
    ],
)
def test_mistakes_about_pictures(picture, arguments, code, words):
    done = call("image", "my_models:eyes", *arguments)
    assert done.exit_code == code, done.output
    assert words in done.stderr and done.stderr.count("\n") == 1


# ------------------------------------------------------------------------------------------------------------------- compare


def test_compare_measures_methods_on_pictures(picture):
    done = call(
        "compare", "my_models:eyes", picture, "-m", "gamma,gamma=0.1", "-m", "gradient", "-m", "random",
        "--unit", "pixel", "--fill", "zero", "--step", "16", "--json", "--out", "curves.png",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {row["method"] for row in found["rows"]} == {"gamma,gamma=0.1", "gradient", "random"}
    assert all(row["n"] == 1 for row in found["rows"])
    assert Path("curves.png").read_bytes()[:4] == b"\x89PNG"


def test_compare_measures_methods_on_texts(talker):
    Path("lines.txt").write_text("the cat sat\na good film\n")
    done = call(
        "compare", str(talker / "talker"), "--texts", "lines.txt", "--text", "the dog", "-m", "attnlrp", "-m", "random"
    )
    assert done.exit_code == 0, done.output
    assert "attnlrp" in done.stdout and "random" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "give pictures, or texts"),
        (("none.jpg",), 4, "no such file"),
        (("red.png", "-m", "gama"), 2, "gama"),
        (("red.png", "--unit", "word"), 2, "word"),
        (("--text", "hello"), 3, "no tokenizer"),
    ],
)
def test_mistakes_about_comparisons(picture, arguments, code, words):
    done = call("compare", "my_models:eyes", *arguments)
    assert done.exit_code == code, done.output
    assert words in done.stderr and "Traceback" not in done.stderr


# -------------------------------------------------------------------------------------------------------- real processes


def test_a_process_prints_pure_json_and_ends_with_0():
    done = process("inspect", "my_models:net", "--shape", "1,3,8,8", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["nodes"] > 0


def test_a_process_ends_without_traceback_and_debug_shows_it():
    done = process("inspect", "no/such-model")
    assert done.returncode == 3 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "Check the name" in done.stderr
    done = process("inspect", "no/such-model", "--debug")
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_an_unknown_option_is_a_usage_error():
    done = process("inspect", "--no-such-option")
    assert done.returncode == 2 and "No such option" in done.stderr and "Traceback" not in done.stderr

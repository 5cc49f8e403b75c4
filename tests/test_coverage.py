"""A stratified sample of the model zoos (`dynamiclrp coverage --zoo` sweeps them all), and the tables' own code."""

import json

import pytest
import torch

from dynamiclrp.coverage.case import Case, NotBuilt
from dynamiclrp.coverage.check import TOLERANCE, Finding, check
from dynamiclrp.coverage.paper import architectures
from dynamiclrp.coverage.report import write_zoo
from dynamiclrp.coverage.sweep import Store, examine, sweep

torch.set_num_threads(1)

SAMPLE = {
    "encoder": ["bert", "deberta-v2", "modernbert", "layoutlm"],
    "decoder": ["gpt2", "llama", "gemma3_text", "bloom"],
    "encoder-decoder": ["t5", "bart"],
    "mixture of experts": ["mixtral", "deepseek_v3", "switch_transformers"],
    "state space": ["mamba", "mamba2", "jamba"],
    "vision transformer": ["vit", "swin", "dinov2"],
    "convolutional": ["resnet", "convnext", "mobilenet_v2"],
    "audio": ["wav2vec2", "whisper", "audio-spectrogram-transformer"],
    "multimodal": ["clip", "gemma3", "qwen2_vl", "llava"],
    "segmentation and detection": ["segformer", "detr"],
}
TIMM = ["resnet", "convnext", "vision_transformer", "efficientnet", "mobilenetv3"]
TORCHVISION = ["resnet18", "mobilenet_v3_small", "squeezenet1_1", "lraspp_mobilenet_v3_large"]

MODELS = [("transformers", name) for names in SAMPLE.values() for name in names]
MODELS += [("timm", name) for name in TIMM] + [("torchvision", name) for name in TORCHVISION]


def test_the_sample_has_forty_models() -> None:
    assert len(set(MODELS)) == len(MODELS) == 40


@pytest.mark.parametrize("zoo, name", MODELS, ids=lambda value: value)
def test_model_of_the_zoo(zoo: str, name: str) -> None:
    finding = examine(zoo, name)
    assert finding.built, finding.why_not_built
    assert not finding.error, f"{finding.error}\n{finding.where}"
    assert finding.coverage == 1.0, finding.unknown
    assert finding.finite
    assert finding.repeats, "a second run gave another result"
    assert finding.way_error is not None and finding.way_error <= TOLERANCE, "the ledger changes it"
    assert finding.batch_error is None or finding.batch_error <= TOLERANCE, "a batch differs from its rows"
    assert finding.faults == []


class Detached(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(x.argmax(1)).to(x.dtype)


class Reentrant(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=True)


class Decomposed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(x)


@pytest.mark.parametrize("model, word", [(Detached, "not differentiable"), (Reentrant, "use_reentrant=False")])
def test_a_model_without_a_path_is_refused_and_is_no_fault(model, word) -> None:
    found = check(Case("m", model().eval(), {"x": torch.randn(2, 3)}), Finding("here", "m"))
    assert found.built and not found.explained and word in found.refusal and found.faults == []


def test_a_model_that_cannot_be_explained_is_a_fault() -> None:
    found = check(Case("m", Decomposed().eval(), {"x": torch.randn(2, 3)}, batched=False), Finding("here", "m"))
    assert found.built and not found.explained and not found.good and not found.refusal
    assert found.faults[0].startswith("UnknownOpError") and found.coverage < 1


def test_a_batch_that_differs_from_its_rows_is_found() -> None:
    class Plain(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Leaks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            other = x.flip(0)  # the same values as Plain, and gradients from one row to the other
            return x * 2 + (other - other.detach())

    for model, fair in ((Plain(), True), (Leaks(), False)):
        rows = torch.tensor([[3.0, 1.0, 2.0], [1.0, 3.0, 2.0]])
        found = check(Case("m", model.eval(), {"x": rows}), Finding("here", "m"))
        assert found.batch_error is not None and (found.batch_error <= TOLERANCE) == fair


def test_what_cannot_be_built_says_why(tmp_path, monkeypatch) -> None:
    from dynamiclrp.coverage import zoo_timm

    def refuse(name: str) -> Case:
        raise NotBuilt("no such thing")

    monkeypatch.setattr(zoo_timm, "build", refuse)
    finding = examine("timm", "resnet")
    assert not finding.built and finding.why_not_built == "no such thing"
    write_zoo(tmp_path, [finding])
    assert "| timm | resnet | no such thing |" in (tmp_path / "zoo.md").read_text()


def test_results_are_kept_and_read_again(tmp_path) -> None:
    store = Store(tmp_path / "zoo.json")
    store.add(Finding("timm", "resnet", built=True, explained=True, coverage=1.0, kept={"bias": 0.5}))
    store.save()
    assert json.loads((tmp_path / "zoo.json").read_text())["findings"][0]["good"] is True
    again = Store(tmp_path / "zoo.json").findings["timm", "resnet"]
    assert again.kept == {"bias": 0.5} and again.good
    assert list(tmp_path.iterdir()) == [tmp_path / "zoo.json"], "nothing half-written is left"


def test_a_hanging_model_costs_its_worker_only() -> None:
    first, second = sweep([("timm", "resnet"), ("timm", "no-such-module")], timeout=0.01)
    assert "longer than" in first.why_not_built + first.error
    assert "longer than" in second.why_not_built + second.error


def test_the_paper_has_fifteen_architectures() -> None:
    every = list(architectures())
    assert len(every) == 15
    uncovered = {a.name: a.published.nodes - a.published.covered for a in every}
    assert {name: n for name, n in uncovered.items() if n} == {"Wav2Vec2-XLS-R-300m": 1, "Mamba-130m": 24}


def test_command_line() -> None:
    typer_testing = pytest.importorskip("typer.testing")
    from dynamiclrp import cli

    runner = typer_testing.CliRunner()
    assert "coverage" in runner.invoke(cli.application(), ["--help"]).output
    assert runner.invoke(cli.application(), ["coverage"]).exit_code == 2
    assert runner.invoke(cli.application(), ["coverage", "--zoo", "--only", "other"]).exit_code == 2


def test_command_line_without_its_packages_says_what_to_install(monkeypatch) -> None:
    import sys

    from dynamiclrp import cli

    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"pip install 'dynamiclrp\[cli\]'"):
        cli.main()

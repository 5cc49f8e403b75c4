"""Models whose maps were quantised (`torch.ao.quantization`), as for a CPU: integers have no derivative.

The error says quantised and names the remedy: explain the float model.
"""

import warnings

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp

torch.set_num_threads(1)
ENGINES = [engine for engine in torch.backends.quantized.supported_engines if engine != "none"]
pytestmark = pytest.mark.skipif(not ENGINES, reason="no quantised kernels here")


def quantised(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8).eval()


@pytest.mark.parametrize("preset", ["default", "attnlrp"])
def test_the_true_reason_is_named(preset):
    torch.manual_seed(0)
    model = quantised(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    with pytest.raises(dlrp.LRPError) as raised:
        dlrp.explain(model, torch.randn(2, 4), preset=preset)
    assert "quanti" in str(raised.value).lower(), str(raised.value)
    assert "torch.jit" not in str(raised.value)


def test_behind_an_embedding():
    torch.manual_seed(0)
    model = quantised(nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 3)))
    with pytest.raises(dlrp.LRPError) as raised:
        dlrp.explain(model, torch.randint(0, 20, (2, 5)))
    assert "quanti" in str(raised.value).lower(), str(raised.value)


def test_a_statically_quantised_model():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tools = torch.ao.quantization
        model = nn.Sequential(tools.QuantStub(), nn.Linear(4, 3), tools.DeQuantStub()).eval()
        model.qconfig = tools.get_default_qconfig(ENGINES[0])
        tools.prepare(model, inplace=True)(torch.randn(5, 4))
        tools.convert(model, inplace=True)
        with pytest.raises(dlrp.NoGraphError, match=r"quantised model.*float model"):
            dlrp.explain(model, torch.randn(2, 4))

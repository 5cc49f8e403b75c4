"""A linear map whose output is broadcast in the sum that follows, as a context vector that is added to every position."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dynamiclrp as dlrp


class Context(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.context, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, c):
        return self.out(F.layer_norm(self.own(x).relu() + self.context(c), (4,))).mean(1)


@pytest.mark.parametrize("preset", ["dynamic", "default", "gamma", "epsilon", "attnlrp"])
@pytest.mark.parametrize("rows", [1, 2])
def test_it_is_explained_as_node_by_node(preset, rows):
    torch.manual_seed(0)
    model = Context().eval()
    x, c = torch.randn(rows, 8, 4), torch.randn(rows, 1, 4)
    whole = dlrp.explain(model, x, c, target=1, preset=preset)
    slow = dlrp.explain(model, x, c, target=1, preset=preset, ledger=True)
    for name in ("x", "c"):
        torch.testing.assert_close(whole.relevances[name], slow.relevances[name], atol=1e-5, rtol=1e-4)

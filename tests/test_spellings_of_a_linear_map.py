"""One linear layer, written with other functions of torch: one function has one explanation."""

import pytest
import torch
from torch import nn

import dynamiclrp as dlrp

# x of shape [rows, time, in], w of shape [out, in], b of shape [out]: all give [rows, time, out]
SPELLINGS = {
    "einsum": lambda x, w, b: torch.einsum("bti,oi->bto", x, w) + b,
    "einsum, weight first": lambda x, w, b: torch.einsum("oi,bti->bto", w, x) + b,
    "weight on the left": lambda x, w, b: (w @ x.transpose(1, 2)).transpose(1, 2) + b,
    "weight on the left, bias there": lambda x, w, b: (w @ x.transpose(1, 2) + b[:, None]).transpose(1, 2),
    "bias subtracted": lambda x, w, b: x @ w.t() - (-b),
    "bias first": lambda x, w, b: b + x @ w.t(),
    "tensordot": lambda x, w, b: torch.tensordot(x, w, ([2], [1])) + b,
    "addmm": lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w.t()).unflatten(0, x.shape[:2]),
    "baddbmm": lambda x, w, b: torch.baddbmm(b, x, w.t().expand(len(x), -1, -1)),
    "in place": lambda x, w, b: (x @ w.t()).add_(b),
    "subtracted from the bias": lambda x, w, b: b - x @ -w.t(),
    "twice the bias' half": lambda x, w, b: torch.add(x @ w.t(), b / 2, alpha=2),
    "bias expanded": lambda x, w, b: x @ w.t() + b.expand(*x.shape[:2], -1),
}


class Layer(nn.Module):
    def __init__(self, spell):
        super().__init__()
        torch.manual_seed(0)
        self.map, self.head = nn.Linear(6, 5), nn.Linear(5, 2)
        self.spell = spell

    def forward(self, x):
        return self.head(self.spell(x, self.map.weight, self.map.bias).relu().mean(1))


def off(name, preset):
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1)).double()
    plain, other = Layer(nn.functional.linear).double().eval(), Layer(SPELLINGS[name]).double().eval()
    torch.testing.assert_close(plain(x), other(x))  # the same function
    a, b = (dlrp.explain(model, x, target=0, preset=preset).relevance for model in (other, plain))
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize(
    "preset", ["default", "gamma", "epsilon-plus-flat", "epsilon-alpha2-beta1", "attnlrp", "epsilon"]
)
@pytest.mark.parametrize("name", SPELLINGS)
def test_another_spelling_has_the_same_explanation(name, preset):
    wrong = off(name, preset)
    assert wrong < 1e-6, f"{wrong:.1%} off"

"""State-space models: the scans of Mamba and Mamba-2 as the libraries run them without custom kernels."""

# isort: off
import oracles  # noqa: F401  mends torchvision before transformers imports it

# isort: on

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

import dynamiclrp as dlrp
from contract import holds
from models import IDS, gaussian, randomise
from oracles import error

DOUBLE = torch.float64


def mamba() -> nn.Module:
    config = MambaConfig(
        vocab_size=40, hidden_size=8, state_size=4, num_hidden_layers=2, time_step_rank=2, use_mambapy=False
    )
    return tame(MambaForCausalLM(config))


def mamba2() -> nn.Module:
    config = Mamba2Config(
        vocab_size=40, hidden_size=16, state_size=4, num_hidden_layers=2, num_heads=4, head_dim=8, expand=2, n_groups=1,
        chunk_size=2,
    )  # fmt: skip
    return tame(Mamba2ForCausalLM(config))


def tame(model: nn.Module) -> nn.Module:
    """Random, but with decays as at the start of training: random ones would forget everything."""
    decays = {name: p.detach().clone() for name, p in model.named_parameters() if name.endswith(("A_log", "dt_bias"))}
    randomise(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in decays:
                p.copy_(decays[name])
    return model.double()


MODELS = {"mamba": mamba, "mamba 2": mamba2}


@pytest.mark.parametrize("name", MODELS)
def test_state_space_models(name):
    model = MODELS[name]()
    found = holds(model, {"input_ids": IDS, "use_cache": False}, ("attnlrp", "cp-lrp", "gamma", "dynamic"))
    assert all((r["input_ids"] != 0).any(1).all() for r in found.values())


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_preset_is_gradient_times_input(name):
    model = MODELS[name]()
    found = dlrp.explain(model, input_ids=IDS, use_cache=False, preset="gradient", target=(-1, 7)).relevance
    embedded = model.get_input_embeddings()(IDS).detach().requires_grad_()
    score = model(inputs_embeds=embedded, use_cache=False).logits[:, -1, 7].sum()
    (gradient,) = torch.autograd.grad(score, embedded)
    assert error(found, (embedded * gradient).sum(-1).detach()) < 1e-9


@pytest.mark.parametrize("preset", ["attnlrp", "cp-lrp", "dynamic"])
@pytest.mark.parametrize("name", MODELS)
def test_what_comes_later_takes_nothing(name, preset):
    """The score after the third token stands on three tokens, and is explained as if the others were not there."""
    model = MODELS[name]()
    r = dlrp.explain(model, input_ids=IDS, use_cache=False, preset=preset, target=(2, 7)).relevance
    alone = dlrp.explain(model, input_ids=IDS[:, :3], use_cache=False, preset=preset, target=(2, 7)).relevance
    assert not r[:, 3:].any()
    if name == "mamba":  # Mamba-2 cuts the text into chunks, whose products depend on where the text ends
        assert error(r[:, :3], alone) < 1e-6


# ---------------------------------------------------------------- the scan itself, by hand


class Scan(nn.Module):
    """A selective scan: h_t = exp(Δ_t A) h_{t-1} + Δ_t B_t x_t, y_t = C_t h_t + D x_t; Δ, B and C made from x."""

    def __init__(self) -> None:
        super().__init__()
        self.delta, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
        self.a, self.d = nn.Parameter(-gaussian(3, 2, seed=1).abs()), nn.Parameter(gaussian(3, seed=2))

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return F.softplus(self.delta(x)), self.b(x), self.c(x)

    def forward(self, x: Tensor) -> Tensor:
        delta, b, c = self.parts(x)
        h = x.new_zeros(len(x), 3, 2)
        for t in range(x.shape[1]):
            decay = torch.exp(delta[:, t, :, None] * self.a)
            h = decay * h + (delta[:, t] * x[:, t])[..., None] * b[:, t, None]
        return (h * c[:, -1, None]).sum(-1) + self.d * x[:, -1]


def signals_only(model: Scan, x: Tensor, seed: Tensor) -> Tensor:
    """CP-LRP of the scan by hand: exp and softplus are gates; Δ·x goes to x; (Δx)·B and h·C have no gate, and are halved.

    Relevance of x by each way that it takes: as the signal of every step, through B and through C.
    """
    delta, b, c = (t.detach() for t in model.parts(x))
    a, d = model.a.detach(), model.d.detach()
    steps = x.shape[1]
    decays = [torch.exp(delta[:, t, :, None] * a) for t in range(steps)]
    terms = []  # what each step's input is worth in the last state
    for t in range(steps):
        term = (delta[:, t] * x[:, t])[..., None] * b[:, t, None]
        for later in range(t + 1, steps):
            term = term * decays[later]
        terms.append(term)
    h = sum(terms)
    y = (h * c[:, -1, None]).sum(-1) + d * x[:, -1]
    s = seed / y
    r = torch.zeros_like(x)
    r[:, -1] += s * d * x[:, -1]
    through_c = (s[..., None] * h * c[:, -1, None] / 2).sum(1)  # half of each product, by state
    r[:, -1] += linear(through_c, c[:, -1], x[:, -1], model.c.weight)
    for t, term in enumerate(terms):
        part = s[..., None] * term * c[:, -1, None] / 2
        r[:, t] += part.sum(-1) / 2
        r[:, t] += linear(part.sum(1) / 2, b[:, t], x[:, t], model.b.weight)
    return r


def linear(r: Tensor, z: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """From z = x Wᵀ to x, by LRP-0."""
    return x * ((r / z) @ weight.detach())


def test_a_selective_scan_by_hand():
    model, x = randomise(Scan(), std=0.6).double(), gaussian(2, 4, 3, seed=5, dtype=DOUBLE)
    with torch.no_grad():
        model.a.copy_(-gaussian(3, 2, seed=1, dtype=DOUBLE).abs())
    holds(model, {"x": x})
    found = dlrp.explain(model, x, preset="cp-lrp", target=1)
    assert error(found.relevance, signals_only(model, x, found.seed)) < 1e-9

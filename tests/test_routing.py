"""Sparse paths: mixtures of experts, and messages along the edges of a graph. Written densely they give the same."""

# isort: off
import oracles  # noqa: F401  mends torchvision before transformers imports it

# isort: on
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM

import dynamiclrp as dlrp
from contract import PRESETS, holds
from models import IDS, gaussian, randomise
from oracles import error

DOUBLE = torch.float64
EXPERTS, TOP = 4, 2
X = gaussian(2, 5, 6, seed=1, dtype=DOUBLE)


class Mixture(nn.Module):
    """Each token goes to its two best experts; the rows are gathered, worked on and added back."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.router, self.head = nn.Linear(6, EXPERTS, bias=False), nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 6)) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(TOP, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        return self.head(getattr(self, self.way)(tokens, weights, chosen).unflatten(0, x.shape[:2]).mean(1))

    def index_add(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            result = result.index_add(0, rows, expert(tokens[rows]) * weights[rows, place, None])
        return result

    def index_add_in_place(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            result.index_add_(0, rows, expert(tokens[rows]) * weights[rows, place, None])
        return result

    def index_put(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            made = expert(tokens[rows]) * weights[rows, place, None]
            result = result.index_put((rows,), made, accumulate=True)
        return result

    def scatter_add(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            made = expert(tokens[rows]) * weights[rows, place, None]
            result = result.scatter_add(0, rows[:, None].expand_as(made), made)
        return result

    def sorted(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Rows sorted by expert, worked on in runs, put back into order."""
        order = chosen.flatten().argsort(stable=True)
        runs = tokens.repeat_interleave(TOP, 0)[order].split(chosen.flatten().bincount(minlength=EXPERTS).tolist())
        made = torch.cat([expert(run) for expert, run in zip(self.experts, runs, strict=True)])
        made = made[order.argsort()].unflatten(0, (-1, TOP))
        return (made * weights[..., None]).sum(1)

    def dense(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """All experts work on all tokens; those not chosen have weight 0."""
        full = torch.zeros(len(tokens), EXPERTS, dtype=tokens.dtype).scatter(1, chosen, weights)
        made = torch.stack([expert(tokens) for expert in self.experts], 1)
        return (made * full[..., None]).sum(1)


WAYS = ["index_add", "index_add_in_place", "index_put", "scatter_add", "sorted"]


@pytest.mark.parametrize("way", WAYS)
def test_routing_equals_all_experts_with_weights_of_zero(way):
    model = randomise(Mixture("dense"), std=0.6).double()
    presets = ("attnlrp", "cp-lrp", "gamma", "epsilon-plus")
    expected = {preset: dlrp.explain(model, X, preset=preset).relevance for preset in presets}
    model.way = way
    found = holds(model, {"x": X}, (*presets, "dynamic"))
    for preset in presets:
        assert error(found[preset]["x"], expected[preset]) < 1e-6, preset


def test_a_mixture_of_the_library():
    config = MixtralConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = randomise(MixtralForCausalLM(config)).double()
    given = {"input_ids": IDS, "use_cache": False}
    model.set_experts_implementation("eager")
    found = holds(model, given)
    for way in ("batched_mm", "grouped_mm"):  # other kernels, the last of them not for float64
        model.float().set_experts_implementation(way)
        for preset in ("attnlrp", "cp-lrp"):
            r = dlrp.explain(model, **given, preset=preset).relevance
            assert error(r.double(), found[preset]["input_ids"]) < 1e-3, (way, preset)


def test_the_weights_of_a_mixture_are_gates():
    """cp-lrp: as if the router's weights were numbers, though they are divided by their sum."""
    model = randomise(Mixture("index_add"), std=0.6).double()

    class Fixed(Mixture):
        def index_add(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
            return super().index_add(tokens, weights.detach(), chosen)

    fixed = Fixed("index_add").double().eval()
    fixed.load_state_dict(model.state_dict())
    expected = dlrp.explain(fixed, X, preset="cp-lrp").relevance
    assert error(dlrp.explain(model, X, preset="cp-lrp").relevance, expected) < 1e-9


# ---------------------------------------------------------------- graphs

SOURCE = torch.tensor([0, 1, 2, 2, 3, 4, 5, 0])
TARGET = torch.tensor([1, 1, 0, 3, 4, 4, 2, 2])
NODES = gaussian(6, 4, seed=2, dtype=DOUBLE)
ADJACENCY = torch.zeros(6, 6, dtype=DOUBLE).index_put((TARGET, SOURCE), torch.ones(8, dtype=DOUBLE), accumulate=True)
DEGREE = ADJACENCY.sum(1, keepdim=True)


def along(messages: Tensor) -> Tensor:
    return TARGET[:, None].expand_as(messages)


SUMS = {
    "index_add": lambda m: torch.zeros(6, m.shape[1], dtype=m.dtype).index_add(0, TARGET, m),
    "scatter_add": lambda m: torch.zeros(6, m.shape[1], dtype=m.dtype).scatter_add(0, along(m), m),
    "scatter_reduce": lambda m: torch.zeros(6, m.shape[1], dtype=m.dtype).scatter_reduce(0, along(m), m, "sum"),
    "index_put": lambda m: torch.zeros(6, m.shape[1], dtype=m.dtype).index_put((TARGET,), m, accumulate=True),
    "segment_reduce": lambda m: torch.segment_reduce(
        m[TARGET.argsort(stable=True)], "sum", lengths=TARGET.bincount(minlength=6), unsafe=True, initial=0
    ),
}
MEANS = {
    "scatter_reduce": lambda m: torch.zeros(6, m.shape[1], dtype=m.dtype).scatter_reduce(
        0, along(m), m, "mean", include_self=False
    ),
    "index_add": lambda m: torch.zeros(6, m.shape[1], dtype=m.dtype).index_add(0, TARGET, m) / DEGREE.clamp(min=1),
}


class GraphNet(nn.Module):
    """Two rounds of messages along edges; the last node is read."""

    def __init__(self, gather) -> None:
        super().__init__()
        self.gather = gather
        self.first, self.second, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            h = layer(x)
            x = F.relu(h + self.gather(h[SOURCE]))
        return self.head(x).mean(0, keepdim=True)


class Dense(GraphNet):
    """The same by a matrix of neighbours."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            h = layer(x)
            x = F.relu(h + self.gather @ h)
        return self.head(x).mean(0, keepdim=True)


@pytest.mark.parametrize("reduction, name", [*(("sum", n) for n in SUMS), *(("mean", n) for n in MEANS)])
def test_messages_along_edges_equal_a_product_with_the_neighbours(reduction, name):
    dense = randomise(Dense(ADJACENCY if reduction == "sum" else ADJACENCY / DEGREE.clamp(min=1)), std=0.6).double()
    model = GraphNet((SUMS if reduction == "sum" else MEANS)[name]).double().eval()
    model.load_state_dict(dense.state_dict())
    expected = {preset: dlrp.explain(dense, NODES, preset=preset).relevance for preset in ("attnlrp", "cp-lrp")}
    found = holds(model, {"x": NODES}, PRESETS, rows=False)
    for preset, r in expected.items():
        assert error(found[preset]["x"], r) < 1e-9


def test_the_largest_message_takes_all():
    class Largest(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            empty = torch.full((6, x.shape[1]), -torch.inf, dtype=x.dtype)
            return empty.scatter_reduce(0, along(x[SOURCE]), x[SOURCE], "amax")[:5].sum(0, keepdim=True)

    r = dlrp.explain(Largest(), NODES, target=1).relevance
    expected = torch.zeros_like(NODES)
    for node in range(5):
        senders = SOURCE[node == TARGET]
        winner = senders[NODES[senders, 1].argmax()]
        expected[winner, 1] += NODES[winner, 1]
    assert error(r, expected) < 1e-12


def test_accumulated_writes_pass_relevance_as_sums_do():
    """Below an average pool tensors carry R: a write that adds divides it, one that overwrites moves it."""
    x, v = gaussian(1, 1, 4, 4, seed=1, dtype=DOUBLE), gaussian(4, seed=2, dtype=DOUBLE)
    place = (torch.zeros(4, dtype=torch.long),) * 2 + (torch.arange(4), torch.tensor([0, 2, 1, 3]))

    def pooled(written) -> tuple[Tensor, ...]:
        a, b = x.clone().requires_grad_(), v.clone().requires_grad_()
        y = F.adaptive_avg_pool2d(written(a, b), 2)
        return dlrp.relevance(y, (a, b), seed=y.detach(), preset=dlrp.preset("attnlrp") | {"pool": dlrp.UniformPool()})

    added = pooled(lambda a, b: a.index_put(place, b, accumulate=True))
    by_hand = pooled(lambda a, b: a + torch.zeros_like(a).index_put(place, b))
    for found, expected in zip(added, by_hand, strict=True):
        assert error(found, expected) < 1e-9

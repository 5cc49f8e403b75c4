"""What an explanation does not do: touch the garbage collector, follow parameters that no plan reads, describe the same graph twice."""

from __future__ import annotations

import gc

import torch
from torch import nn

import dynamiclrp as dlrp
from dynamiclrp import capture
from dynamiclrp.forward import graph_of


class Watched(nn.Module):
    """Notes on the way whether the collector runs, and which parameters are followed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.collecting: list[bool] = []
        self.followed: list[set[str]] = []

    def forward(self, x):
        self.collecting.append(gc.isenabled())
        self.followed.append({name for name, parameter in self.named_parameters() if parameter.requires_grad})
        return self.second(self.activation(self.first(x)))

    def activation(self, x):
        return torch.relu(x)


class Tanh(Watched):
    """Autograd keeps the result of a tanh, and its input must be rebuilt with the first bias."""

    def activation(self, x):
        return torch.tanh(x)


def test_the_users_forward_runs_with_the_collector_as_it_was():
    model = Watched()
    dlrp.explain(model, torch.randn(1, 4))
    assert model.collecting == [True]


def test_parameters_that_no_plan_reads_are_not_followed():
    model = Watched()
    explainer = dlrp.Explainer(model, "attnlrp")
    x = torch.randn(2, 4)
    first, *more = (explainer(x).relevance for _ in range(3))
    assert model.followed[0] and model.followed[1:] == [set(), set()]
    assert all(torch.equal(first, other) for other in more)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_only_the_bias_that_is_read_is_followed():
    model = Tanh()
    explainer = dlrp.Explainer(model, "attnlrp")
    x = torch.randn(2, 4)
    first, *more = (explainer(x).relevance for _ in range(3))
    assert model.followed[1:] == [{"first.bias"}, {"first.bias"}]
    assert all(torch.equal(first, other) for other in more)


def test_rules_that_share_with_parameters_see_all_of_them():
    model = Watched()
    explainer = dlrp.Explainer(model, "dynamic")
    x = torch.randn(2, 4)
    first, *more = (explainer(x).relevance for _ in range(3))
    assert all(names >= {"first.bias", "second.bias"} for names in model.followed)
    assert all(torch.equal(first, other) for other in more)


def test_a_model_that_changes_its_mind():
    """Another graph may read what the first did not: it is followed again, without a wrong number."""
    model = Watched()
    explainer = dlrp.Explainer(model, "attnlrp")
    x = torch.randn(2, 4)
    explainer(x)
    explainer(x)
    model.activation = torch.tanh
    assert torch.equal(explainer(x).relevance, dlrp.explain(model, x, preset="attnlrp").relevance)
    model.activation = torch.relu
    assert torch.equal(explainer(x).relevance, dlrp.explain(model, x, preset="attnlrp").relevance)


class Words(Tanh):
    """The same on token ids, with a second table whose lookup must not be taken for theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, 4), nn.Embedding(5, 4)

    def forward(self, ids):
        return super().forward(self.words(ids) + self.places(torch.arange(ids.shape[1])))[:, -1]


def test_token_ids_are_found_again_in_another_graph():
    model = Words()
    explainer = dlrp.Explainer(model, "attnlrp")
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    model.activation = torch.relu
    explainer(ids)
    explainer(ids)
    model.activation = torch.tanh  # the first bias is needed, and following it shifts the numbers of all nodes
    assert torch.equal(explainer(ids).relevance, dlrp.explain(model, ids, preset="attnlrp").relevance)


def test_graphs_that_look_alike_share_one_structure():
    model = Watched()
    one, two = (graph_of([model(torch.randn(n, 4, requires_grad=True))], []) for n in (1, 5))
    assert one.structure is two.structure and one.handles != two.handles
    model.activation = torch.tanh
    assert graph_of([model(torch.randn(1, 4, requires_grad=True))], []).structure is not one.structure


def test_structures_are_forgotten_when_they_are_many(monkeypatch):
    monkeypatch.setattr(capture, "_structures", {})
    monkeypatch.setattr(capture, "_KEPT", 40)
    for depth in range(1, 30):
        x = y = torch.randn(2, requires_grad=True)
        for _ in range(depth):
            y = y * 2
        assert len(graph_of([y], [x])) == depth + 1
        held = sum(len(structure.order) for structure in capture._structures.values())
        assert held <= 40 and capture._structures


def test_a_structure_stands_in_an_order_in_which_operands_come_first():
    x = torch.randn(2, 3, requires_grad=True)
    a, b = (x * 2).unbind(0)
    graph = graph_of([(a + b) * x.sum(), (a * 3).exp()], [x])
    for node, edges in enumerate(graph.edges):
        assert all(ref is None or ref[0] < node for ref in edges)
        assert graph.find(graph.handles[node]) == node
        found = [
            None if operand is None else (graph.find(operand), i) for operand, i in graph.handles[node].next_functions
        ]
        assert list(edges) == found

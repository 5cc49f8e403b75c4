"""Each element of an integer tensor is known by the element of an argument that it is, or was made of.

The truth is found without this library: a model that is linear in what it looks up is asked what each element adds.
"""

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dynamiclrp as dlrp
from dynamiclrp.origins import Origins

ROWS, TIME, SIZE, WORDS = 2, 6, 4, 40


def tokens(seed=1):
    """No number stands twice, so that a place can be told by its number."""
    order = torch.randperm(WORDS - 2, generator=torch.Generator().manual_seed(seed)) + 2
    return order[: ROWS * TIME].reshape(ROWS, TIME)


def behind_a_begin_token(ids):
    made = ids.new_zeros(ids.shape)
    made[:, 1:] = ids[:, :-1].clone()
    made[:, 0] = 1
    return made


def put(ids):
    made = torch.full_like(ids, 1)
    made.index_put_((torch.tensor([[0], [1]]), torch.tensor([[5, 4, 3, 2, 1, 0]])), ids)
    return made


def scattered(ids):
    return torch.zeros(ROWS, 9, dtype=torch.int64).scatter(1, torch.tensor([[8, 1, 2, 3, 4, 5]] * ROWS), ids)


def packed(ids):
    return torch.zeros(3 * TIME, dtype=torch.int64).masked_scatter_(torch.arange(3 * TIME) % 3 != 0, ids.flatten())


def in_place(ids):
    return ids.clone().t().contiguous().t().flip(1).roll(1, 0)


# what a model does to its ids before it looks them up; each number that was an id is that id afterwards, or 0 or 1
MOVES = {
    "behind a begin token": behind_a_begin_token,
    "index_put": put,
    "scatter": scattered,
    "masked_scatter": packed,
    "several": in_place,
    "masked_select": lambda ids: ids[ids > 9],
    "index of rows": lambda ids: ids[torch.tensor([1, 0, 1])],
    "take": lambda ids: ids.take(torch.tensor([[3, 2], [11, 0]])),
    "sort": lambda ids: ids.sort(1).values,
    "topk": lambda ids: ids.topk(2, 1).values,
    "max": lambda ids: ids.max(1).values,
    "tril": lambda ids: ids.tril(),
    "split and stacked": lambda ids: torch.stack(ids.split(3, 1), 1),
    "unfolded": lambda ids: ids.unfold(1, 2, 1).contiguous(),
    "repeat_interleave": lambda ids: ids.repeat_interleave(torch.tensor([2, 0, 1, 1, 1, 3]), 1),
    "seen as bytes between": lambda ids: (ids.view(torch.int32).sum() * 0 + ids.aminmax().min * 0 + ids).clone(),
    "chunks of a cast": lambda ids: torch.cat([part.int() for part in ids.chunk(2, 1)][::-1], 1),
    "expanded": lambda ids: ids[:, None].expand(-1, 3, -1),
}


class Places(nn.Module):
    """Looks up what `change` makes of its ids, and weighs each place in its own way."""

    def __init__(self, change):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.change = nn.Embedding(WORDS, SIZE), nn.Linear(SIZE, 2, bias=False), change

    def embedded(self, ids):
        looked = self.table(self.change(ids))
        return looked * torch.linspace(1, 2, looked[..., 0].numel()).reshape(looked.shape[:-1])[..., None]

    def forward(self, ids):
        return self.head(self.embedded(ids).reshape(-1, SIZE).sum(0, keepdim=True))


@pytest.mark.parametrize("name", MOVES)
def test_moved_ids_keep_their_relevance(name):
    model, ids = Places(MOVES[name]).eval(), tokens()
    given = ids.clone()
    with torch.no_grad():
        each = model.head(model.embedded(ids))[..., 1].flatten()
    looked = MOVES[name](ids).flatten()
    expected = torch.stack([each[looked == number].sum() for number in ids.flatten()]).reshape(ids.shape)
    explainer = dlrp.Explainer(model, "attnlrp")
    for _ in range(4):  # the last calls know from the first whether they must follow
        torch.testing.assert_close(explainer(ids, target=1).relevance, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(ids, given)


class Two(nn.Module):
    """One lookup of what is made of two arguments or two elements."""

    def __init__(self, made):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.made = nn.Embedding(WORDS, SIZE), nn.Linear(SIZE, 2, bias=False), made

    def forward(self, one, other):
        return self.head(self.table(self.made(one, other) % WORDS).sum(1))

    def each(self, one, other):
        with torch.no_grad():
            return self.head(self.table(self.made(one, other) % WORDS))[..., 1]


def test_a_hash_of_two_arguments_belongs_to_both():
    model, one, other = Two(lambda a, b: a * 7 + b).eval(), tokens(1), tokens(2)
    a = dlrp.explain(model, one, other, target=1, preset="attnlrp", ledger=True)
    assert list(a.relevances) == ["one", "other"]
    for relevance in a.relevances.values():
        torch.testing.assert_close(relevance, model.each(one, other) / 2, rtol=1e-4, atol=1e-5)
    assert a.ledger.delivered == pytest.approx(float(a.score.sum()), rel=1e-4)


def test_a_hash_of_two_neighbours_belongs_to_both():
    model, ids = Two(lambda a, b: a[:, 1:] * 7 + a[:, :-1]).eval(), tokens()
    each = model.each(ids, ids) / 2
    expected = F.pad(each, (1, 0)) + F.pad(each, (0, 1))
    found = dlrp.explain(model, ids, ids, target=1, preset="attnlrp").relevances
    assert list(found) == ["one"]
    torch.testing.assert_close(found["one"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("choose", [torch.where, lambda mask, a, b: torch.where(~mask, b, a).clone()])
def test_of_two_arguments_the_chosen_one_takes_it(choose):
    mask = torch.arange(TIME) % 2 == 0
    model, one, other = Two(lambda a, b: choose(mask, a, b)).eval(), tokens(1), tokens(2)
    found = dlrp.explain(model, one, other, target=1, preset="attnlrp").relevances
    torch.testing.assert_close(found["one"], model.each(one, other) * mask, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["other"], model.each(one, other) * ~mask, rtol=1e-4, atol=1e-5)


COUNTED = {
    "times a mask": lambda ids, mask: ids * mask,
    "a mask times": lambda ids, mask: mask * ids,
    "beside positions of the mask": lambda ids, mask: (ids + mask.cumsum(1)) * mask,
    "remapped": lambda ids, mask: torch.arange(WORDS).flip(0)[ids],
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_mask_takes_nothing_of_what_it_masks(name):
    mask = torch.tensor([[1] * TIME, [1] * (TIME - 2) + [0, 0]])
    model, ids = Two(COUNTED[name]).eval(), tokens()
    ids[:, 1] = torch.tensor([0, 1])  # ids may be small
    found = dlrp.explain(model, ids, mask, target=1, preset="attnlrp").relevances
    assert list(found) == ["one"]
    torch.testing.assert_close(found["one"], model.each(ids, mask), rtol=1e-4, atol=1e-5)


class Positions(nn.Module):
    """Words beside positions that are counted from a mask, as OPT does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, SIZE), nn.Embedding(WORDS, SIZE)
        self.head = nn.Linear(SIZE, 2, bias=False)

    def forward(self, ids, mask, position_ids=None):
        if position_ids is None:
            position_ids = mask.cumsum(1) * mask - 1 + 2
        return self.head((self.words(ids) + self.places(position_ids)).sum(1))


def test_positions_counted_from_a_mask_belong_to_nobody():
    model, ids, mask = Positions().eval(), tokens(), torch.ones(ROWS, TIME, dtype=torch.int64)
    explainer = dlrp.Explainer(model, "attnlrp")
    for _ in range(4):
        assert list(explainer(ids, mask, target=1).relevances) == ["ids"]


def test_positions_counted_from_a_number_belong_to_nobody():
    class From(Positions):
        def forward(self, ids, start):
            return super().forward(ids, None, (torch.arange(TIME) + start)[None].expand(len(ids), -1))

    assert list(dlrp.explain(From().eval(), tokens(), torch.tensor(3), target=1).relevances) == ["ids"]


def test_what_was_from_nowhere_is_found_once_it_is_given():
    """Two calls with graphs of one structure: what was learnt of one is not taken for the other."""
    model, ids, mask = Positions().eval(), tokens(), torch.ones(ROWS, TIME, dtype=torch.int64)
    explainer, positions = dlrp.Explainer(model, "attnlrp"), torch.arange(TIME)[None].expand(ROWS, -1)
    for _ in range(4):
        explainer(ids, mask, target=1)
    found = explainer(ids, mask, positions, target=1).relevances
    with torch.no_grad():
        expected = model.head(model.places(positions))[..., 1]
    torch.testing.assert_close(found["position_ids"], expected, rtol=1e-4, atol=1e-5)


def test_calls_that_settled_follow_nothing(monkeypatch):
    model, ids, mask = Positions().eval(), tokens(), torch.ones(ROWS, TIME, dtype=torch.int64)
    explainer, passes, followed = dlrp.Explainer(model, "attnlrp"), [], []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    enter = Origins.__enter__
    monkeypatch.setattr(Origins, "__enter__", lambda self: (followed.append(1), enter(self))[1])
    for _ in range(4):
        explainer(ids, mask, target=1)
    passes.clear(), followed.clear()
    explainer(ids, mask, target=1)
    assert len(passes) == 1 and not followed


@pytest.mark.parametrize("copied", [False, True])
def test_a_model_that_changes_its_ids_in_place_sees_the_users_each_time(copied):
    class Shifts(Places):
        def embedded(self, ids):
            ids[:, 1:] = ids[:, :-1].clone()
            return self.table(ids + 0 if copied else ids)

    model, ids = Shifts(None).eval(), tokens()
    with torch.no_grad():
        row = model.head(model.table(ids))[..., 1]
    weights = torch.tensor([2.0, 1, 1, 1, 1, 0])
    explainer, given = dlrp.Explainer(model, "attnlrp"), ids.clone()
    for _ in range(4):
        torch.testing.assert_close(explainer(ids, target=1).relevance, row * weights, rtol=1e-4, atol=1e-5)
    assert torch.equal(ids, given)


# ---------------------------------------------------------------- tables


class Tied(nn.Module):
    """A table that is a linear layer's weight, or is computed, or is more than a matrix, beside numbers."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.out, self.head = how, nn.Linear(SIZE, WORDS), nn.Linear(SIZE, 2, bias=False)
        self.low, self.high = nn.Parameter(torch.randn(WORDS, 2)), nn.Parameter(torch.randn(2, SIZE))
        self.wide = nn.Parameter(torch.randn(WORDS, 2, SIZE))
        self.register_buffer("fixed", torch.randn(WORDS, SIZE))
        self.line = nn.Parameter(torch.randn(WORDS))

    def rows(self, ids):
        if self.how == "tied":
            return F.embedding(ids, self.out.weight)
        if self.how == "low rank":
            return F.embedding(ids, self.wide[:, 0] + self.low @ self.high)
        if self.how == "columns":
            return self.wide[:, 0].t()[:, ids].permute(1, 2, 0)
        if self.how == "index_select":
            return self.wide[:, 0].t().index_select(-1, ids.flatten()).t().reshape(*ids.shape, SIZE)
        if self.how == "buffer":
            return self.fixed[ids]
        if self.how == "vector":
            return self.line[ids][..., None].expand(-1, -1, SIZE)
        if self.how == "gathered":
            return self.line.gather(0, ids.flatten()).reshape(*ids.shape, 1).expand(-1, -1, SIZE)
        return self.wide[ids].sum(2)

    def forward(self, x, ids):
        return self.head(x + self.rows(ids).sum(1))


@pytest.mark.parametrize(
    "how",
    [
        "tied",
        "low rank",
        "columns",
        "index_select",
        "wide",
        "buffer",
        "vector",
        "gathered",
    ],
)
def test_tables_of_all_kinds_beside_numbers(how):
    model, x, ids = Tied(how).eval(), torch.randn(ROWS, SIZE), tokens()
    with torch.no_grad():
        expected = model.head(model.rows(ids))[..., 1]
    explainer = dlrp.Explainer(model, "attnlrp")
    for _ in range(4):
        found = explainer(x, ids, target=1).relevances
        assert list(found) == ["x", "ids"]
        torch.testing.assert_close(found["ids"], expected, rtol=1e-4, atol=1e-5)
    assert all(parameter.requires_grad for parameter in model.parameters()) and not model.fixed.requires_grad


class Picks(nn.Module):
    """Chooses among values that carry relevance already."""

    def forward(self, x, ids):
        return x[ids].sum(1)


def test_what_is_picked_by_ids_is_no_table():
    x, ids = torch.randn(9, 2), torch.tensor([[1, 2], [3, 1]])
    explainer = dlrp.Explainer(Picks(), "attnlrp")
    for _ in range(4):
        found = explainer(x, ids, target=1).relevances
        assert list(found) == ["x"]
        torch.testing.assert_close(found["x"].sum(), x[ids, 1].sum())


# ---------------------------------------------------------------- bags


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_ragged_bags_with_padding(mode, last):
    """A bag of none, a bag with padding, ids that stand twice."""
    torch.manual_seed(0)
    table, head = nn.Embedding(9, SIZE), nn.Linear(SIZE, 2, bias=False)

    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = table, head

        def forward(self, ids, offsets):
            made = F.embedding_bag(ids, self.table.weight, offsets, mode=mode, padding_idx=0, include_last_offset=last)
            return self.head(made)

    ids, offsets = torch.tensor([3, 0, 3, 5, 1, 2]), torch.tensor([0, 3, 3, 6][: 3 + last])
    a = dlrp.explain(Bags().eval(), ids + 0, offsets, target=1, preset="attnlrp")
    assert list(a.relevances) == ["ids"]
    assert a.relevance[1] == 0 and torch.isfinite(a.relevance).all()
    starts = (0, 3, 3, 6)
    for bag in range(3):
        torch.testing.assert_close(a.relevance[starts[bag] : starts[bag + 1]].sum(), a.score[bag], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(a.relevance[0], a.relevance[2])


def test_weighted_bags():
    torch.manual_seed(0)

    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(9, SIZE, mode="sum"), nn.Linear(SIZE, 2, bias=False)

        def forward(self, ids):
            return self.head(self.bag(ids, per_sample_weights=torch.linspace(1, 2, ids.numel()).reshape(ids.shape)))

    model, ids = Bags().eval(), torch.tensor([[1, 2, 3], [3, 4, 3]])
    with torch.no_grad():
        expected = model.head(model.bag.weight[ids])[..., 1] * torch.linspace(1, 2, 6).reshape(2, 3)
    found = dlrp.explain(model, ids, target=1, preset="attnlrp").relevance
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- containers


@dataclass
class Batch:
    z: object
    more: dict = field(default_factory=dict)


class Given(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.table = nn.Linear(3, 2), nn.Linear(3, 2), nn.Embedding(9, 2)

    def forward(self, x, more):
        z, ids = more if isinstance(more, (list, tuple)) else (more.z, more.more["ids"]) if isinstance(more, Batch) else (
            more["z"], more["ids"]
        )  # fmt: skip
        return self.first(x) + self.second(z) + self.table(ids).sum(1)


HELD = {
    "list": (lambda z, ids: [z, ids], "more[0]", "more[1]"),
    "tuple": (lambda z, ids: (z, ids), "more[0]", "more[1]"),
    "dict": (lambda z, ids: {"z": z, "ids": ids}, "more.z", "more.ids"),
    "ordered": (lambda z, ids: OrderedDict(z=z, ids=ids), "more.z", "more.ids"),
    "user's": (lambda z, ids: UserDict(z=z, ids=ids), "more.z", "more.ids"),
    "object": (lambda z, ids: Batch(z, {"ids": ids}), "more.z", "more.more.ids"),
}


@pytest.mark.parametrize("name", HELD)
def test_tensors_in_containers_have_names(name):
    make, z_name, ids_name = HELD[name]
    model, x, z, ids = Given().eval(), torch.randn(2, 3), torch.randn(2, 3), torch.tensor([[1, 2], [3, 4]])
    held = make(z, ids)
    a = dlrp.explain(model, x, held, target=1, preset="attnlrp")
    assert list(a.relevances) == ["x", z_name, ids_name]
    torch.testing.assert_close(a.relevances[z_name], z * model.second.weight[1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(a.relevances[ids_name], model.table(ids)[..., 1], atol=1e-5, rtol=1e-4)
    if not isinstance(held, (UserDict, Batch)):
        kept = list(held.values()) if isinstance(held, dict) else list(held)
        assert kept[0] is z and kept[1] is ids, "the user's container holds what it held"
    assert not z.requires_grad


class Fills(nn.Module):
    """Writes into a buffer of a cache, and grows a list in an object of it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(WORDS, SIZE), nn.Linear(SIZE, 2, bias=False)

    def forward(self, ids, cache):
        cache.z[:, : ids.shape[1]] = self.table(ids.flip(1)) + 0.5
        cache.more.setdefault("seen", []).append(ids.shape[1])
        return self.head(cache.z.tanh().sum(1))


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic"])
def test_a_cache_is_left_as_one_pass_leaves_it(preset):
    model, ids = Fills().eval(), tokens()
    cache, expected = Batch(torch.zeros(ROWS, 8, SIZE)), Batch(torch.zeros(ROWS, 8, SIZE))
    with torch.no_grad():
        right = model(ids, expected)[:, 1]
    a = dlrp.explain(model, ids, cache, target=1, preset=preset)
    torch.testing.assert_close(a.score, right)
    assert cache.more == expected.more == {"seen": [TIME]}
    torch.testing.assert_close(cache.z, expected.z)
    assert not cache.z.requires_grad


def test_a_failing_model_leaves_the_cache_alone():
    class Fails(Fills):
        def forward(self, ids, cache):
            super().forward(ids, cache)
            raise KeyError("its own")

    cache = Batch(torch.zeros(ROWS, 8, SIZE))
    with pytest.raises(KeyError, match="its own"):
        dlrp.explain(Fails().eval(), tokens(), cache, target=1)
    assert cache.more == {} and not cache.z.any()

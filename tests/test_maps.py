"""A linear map counts its batch norm, or its bias, as part of it, whatever moves of the very values lie between."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

import dynamiclrp as dlrp
from dynamiclrp.graph import op_name
from dynamiclrp.ops import OPS

# Each hands on the very values that it got, in their place: by one move, or by one there and one back.
SAME = {
    "Clone": lambda y: y.clone(),
    "Alias": lambda y: torch.ops.aten.alias(y),
    "ToCopy": lambda y: y.to(y.dtype, copy=True),
    "ReshapeAlias": lambda y: torch.ops.aten._reshape_alias(y, y.shape, y.stride()),
    "View": lambda y: y.flatten(1).view(y.shape),
    "UnsafeView": lambda y: torch.ops.aten._unsafe_view(y.contiguous(), y.shape),
    "Slice": lambda y: y[:],
    "NarrowCopy": lambda y: torch.narrow_copy(y, 0, 0, len(y)),
    "Expand": lambda y: y.expand(y.shape),
    "Repeat": lambda y: y.repeat(*[1] * y.dim()),
    "Unsqueeze, Squeeze": lambda y: y.unsqueeze(0).squeeze(0),
    "Squeeze": lambda y: y[None].squeeze(),
    "Transpose": lambda y: y.transpose(1, -1).transpose(1, -1),
    "Permute": lambda y: y.movedim(0, -1).movedim(-1, 0),
    "T": lambda y: y.flatten(1).t().t().view(y.shape),
    "Flip": lambda y: y.flip(-1).flip(-1),
    "Roll": lambda y: y.roll(1, -1).roll(-1, -1),
    "Rot90": lambda y: y.rot90(1, (0, 1)).rot90(-1, (0, 1)),
    "PixelShuffle, PixelUnshuffle": lambda y: (
        nn.functional.pixel_unshuffle(nn.functional.pixel_shuffle(y, 2), 2) if y.dim() == 4 else y
    ),
}
# Rows that no call on a CPU makes, or that only functionalisation does.
ELSEWHERE = {"ChannelShuffle", "LazyClone", "PinMemory", "Lift", "LiftFresh", "MkldnnReshape", "ReshapeCopy"}
SIGNED = ["default", "gamma", "epsilon-plus-flat", "epsilon-alpha2-beta1"]


class Norm(nn.Module):
    """A map, what lies between, its batch norm."""

    def __init__(self, between, layer: nn.Module, norm: nn.Module, inner: int):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.head, self.between = layer, norm, nn.Linear(inner, 2), between
        for tensor in (norm.running_mean, norm.weight, norm.bias, layer.weight):
            nn.init.uniform_(tensor, -1, 1)
        nn.init.uniform_(norm.running_var, 0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.between(self.layer(x))).relu().flatten(2 if x.dim() > 2 else 1).mean(-1) if x.dim() > 2
                         else self.norm(self.between(self.layer(x))).relu())  # fmt: skip


class Bias(nn.Module):
    """A product, what lies between, a bias."""

    def __init__(self, between):
        super().__init__()
        torch.manual_seed(0)
        self.map, self.head, self.between = nn.Linear(6, 4), nn.Linear(4, 2), between

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.between(x @ self.map.weight.t()) + self.map.bias).relu())


BUILD = {
    "convolution": lambda between: Norm(between, nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), 4),
    "linear": lambda between: Norm(between, nn.Linear(6, 4), nn.BatchNorm1d(4), 4),
    "bias": Bias,
}
SHAPES = {"convolution": (4, 3, 6, 6), "linear": (4, 6), "bias": (4, 6)}


def off(kind: str, between, preset: str) -> float:
    x = torch.randn(SHAPES[kind], generator=torch.Generator().manual_seed(1)).double()
    plain, other = (BUILD[kind](made).double().eval() for made in (lambda y: y, between))
    other.load_state_dict(plain.state_dict())
    torch.testing.assert_close(plain(x), other(x), rtol=1e-14, atol=0)
    a, b = (dlrp.explain(model, x, target=0, preset=preset).relevance for model in (other, plain))
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.parametrize("preset", SIGNED)
@pytest.mark.parametrize("name", SAME)
def test_a_move_between(name, preset, kind):
    assert off(kind, SAME[name], preset) < 1e-6


@pytest.mark.parametrize("kind", BUILD)
def test_pairs_of_moves_between(kind):
    wrong = {}
    for one, other in product(SAME, repeat=2):
        found = off(kind, lambda y, one=one, other=other: SAME[other](SAME[one](y)), "gamma")
        if found > 1e-6:
            wrong[one, other] = found
    assert not wrong


def test_every_such_row_is_tried():
    rows = {op_name(name.removesuffix("_copy")) for name, op in OPS.items() if op.hands_on}
    tried = {part for name in SAME for part in name.split(", ")}
    assert rows - tried - ELSEWHERE == set()


def plan_of(model: nn.Module, *shape: int, preset="gamma") -> dlrp.Plan:
    plan = dlrp.inspect(model.eval(), torch.randn(shape), preset=preset).plan
    assert plan is not None
    return plan


def test_a_norm_over_another_dimension_is_no_part():
    """As many positions as channels: only where the norm's channels are the map's do they count as one."""

    class Positions(nn.Module):
        def __init__(self, turn: bool):
            super().__init__()
            self.map, self.norm, self.turn = nn.Linear(5, 4), nn.BatchNorm1d(4), turn

        def forward(self, x: Tensor) -> Tensor:
            y = self.map(x)
            return self.norm(y.transpose(1, 2) if self.turn else y).relu().mean(-1)

    assert plan_of(Positions(turn=True), 3, 4, 5).parts
    assert not plan_of(Positions(turn=False), 3, 4, 5).parts


def test_a_cut_between_keeps_them_apart():
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.layer(x)[:, :, 1:5]).relu().mean(-1)

    model = Cut()
    for length, parts in ((7, 0), (10, 0)):
        assert len(plan_of(model, 2, 2, length).parts) == parts
    model.forward = lambda x: model.norm(model.layer(x)[:, :, :99]).relu().mean(-1)  # takes all there is
    assert len(plan_of(model, 2, 2, 7).parts) == 1


def test_a_bias_for_each_position_of_a_broadcast_map_is_no_part():
    class Broadcast(nn.Module):
        def __init__(self):
            super().__init__()
            self.map, self.places, self.head = (
                nn.Linear(5, 4, bias=False),
                nn.Parameter(torch.randn(6, 4)),
                nn.Linear(4, 2),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.head((self.map(x)[:, None] + self.places).relu().mean(1))

    model, x = Broadcast().double().eval(), torch.randn(3, 5, dtype=torch.float64)
    for preset in SIGNED:
        whole = dlrp.explain(model, x, preset=preset)
        rows = torch.cat([dlrp.explain(model, row[None], target=[int(t)], preset=preset).relevance
                          for row, t in zip(x, whole.prediction.argmax(1))])  # fmt: skip
        torch.testing.assert_close(whole.relevance, rows, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("override", [{"NativeBatchNorm": dlrp.Identity()}, {"norm": dlrp.Identity()}])
def test_a_norm_that_is_given_a_rule_of_its_own_is_no_part(override):
    model = BUILD["linear"](lambda y: y)
    assert plan_of(model, 4, 6).parts
    report = dlrp.Explainer(model.eval(), dlrp.preset("gamma") | override)(torch.randn(4, 6))
    assert not report.plan.parts


def test_a_map_that_something_else_reads_keeps_to_itself():
    class Twice(Norm):
        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return self.head(self.norm(y).relu() + y)

    assert not plan_of(Twice(lambda y: y, nn.Linear(6, 4), nn.BatchNorm1d(4), 4), 4, 6).parts


@pytest.mark.parametrize("preset", [*SIGNED, "epsilon"])
@pytest.mark.parametrize("kind", ["convolution", "linear"])
def test_one_map_is_one_convolution_with_the_norm_worked_in(kind, preset):
    """The oracle: the weights that fusing gives, and no norm."""
    model = BUILD[kind](lambda y: y).double().eval()
    x = torch.randn(SHAPES[kind], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = dlrp.explain(model, x, target=0, preset=preset)
    fuse = nn.utils.fusion.fuse_conv_bn_eval if kind == "convolution" else nn.utils.fusion.fuse_linear_bn_eval
    fused = BUILD[kind](lambda y: y).double().eval()
    fused.load_state_dict(model.state_dict())
    fused.layer, fused.norm = fuse(model.layer, model.norm), nn.Identity()
    torch.testing.assert_close(
        found.relevance, dlrp.explain(fused, x, target=0, preset=preset).relevance, rtol=1e-9, atol=1e-12
    )
    book = dlrp.explain(model, x, target=0, preset=preset, ledger=True).ledger
    assert abs(book.residual) < 1e-9 * abs(book.total)


@pytest.mark.parametrize("preset", ["gamma", "epsilon-plus", "epsilon", "default"])
def test_under_autocast_a_map_and_its_norm_are_of_two_types(preset):
    model, x = BUILD["convolution"](lambda y: y).eval(), torch.randn(SHAPES["convolution"])
    exact = dlrp.explain(model, x, target=0, preset=preset).relevance
    with torch.autocast("cpu", torch.bfloat16):
        found = dlrp.explain(model, x, target=0, preset=preset).relevance
    assert torch.corrcoef(torch.stack([found.flatten(), exact.flatten()]))[0, 1] > 0.99

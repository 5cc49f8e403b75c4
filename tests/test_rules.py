"""Every rule against its textbook formula in relevance form, in float64.

A linear map is seen as the matrix that it is: `c[j, i]` is what input i contributes to output j, `b[j]` what the bias
adds there. The formulas below are written with these alone; nothing is factored, nothing is fast.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dynamiclrp as dlrp
from dynamiclrp import AlphaBeta, Box, Epsilon, Flat, Gamma, Rule, WSquare, ZPlus
from oracles import error

TOLERANCE = 1e-9


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sign(t: Tensor) -> Tensor:
    """0 counts as positive."""
    return torch.where(t < 0, -1.0, 1.0).to(t.dtype)


def stabilise(t: Tensor, eps: float) -> Tensor:
    return t + eps * sign(t)


def anything(y: Tensor, seed: int = 99) -> Tensor:
    """Relevance of both signs, bearing no relation to the values; none where there is no value."""
    return torch.where(y == 0, 0.0, gaussian(*y.shape, seed=seed)).detach()


def close(actual: Tensor, expected: Tensor) -> None:
    if expected.any():
        assert error(actual, expected) < TOLERANCE
    else:
        assert not actual.any()


# ---------------------------------------------------------------- linear maps as matrices


@dataclass(frozen=True)
class Map:
    """A linear map of one live operand; the other one, and the bias, are parameters."""

    function: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (live, other, bias) → output
    live: tuple[int, ...]
    other: tuple[int, ...]
    bias: tuple[int, ...] | None = None

    def operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        x = gaussian(*self.live, seed=1)
        x.flatten()[::5] = 0  # some inputs are exactly 0
        return x, gaussian(*self.other, seed=2), None if self.bias is None else gaussian(*self.bias, seed=3)


def swap(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The live operand second."""
    return lambda x, w, b: function(w, x, b)


def conv(function: Callable[..., Tensor], **how: Any) -> Callable[..., Tensor]:
    return lambda x, w, b: function(x, w, b, **how)


def mm(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return torch.mm(x, w)


def addmm(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return torch.addmm(b, x, w)


MAPS = {
    "mm": Map(mm, (3, 4), (4, 5)),
    "mm, live second": Map(swap(mm), (4, 5), (3, 4)),
    "addmm": Map(addmm, (3, 4), (4, 5), (5,)),
    "addmm, live second": Map(swap(addmm), (4, 5), (3, 4), (5,)),
    "addmm, alpha and beta": Map(lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=2), (3, 4), (4, 5), (3, 5)),
    "addmm, negative alpha": Map(lambda x, w, b: torch.addmm(b, x, w, alpha=-1), (3, 4), (4, 5), (5,)),
    "linear": Map(F.linear, (2, 3, 4), (5, 4), (5,)),
    "bmm": Map(lambda x, w, b: torch.bmm(x, w), (2, 3, 4), (2, 4, 5)),
    "bmm, live second": Map(lambda x, w, b: torch.bmm(w, x), (2, 4, 5), (2, 3, 4)),
    "baddbmm": Map(lambda x, w, b: torch.baddbmm(b, x, w, beta=2), (2, 3, 4), (2, 4, 5), (2, 3, 5)),
    "mv": Map(lambda x, w, b: torch.mv(w, x), (4,), (3, 4)),
    "mv, live first": Map(lambda x, w, b: torch.mv(x, w), (3, 4), (4,)),
    "dot": Map(lambda x, w, b: torch.dot(x, w), (4,), (4,)),
    "conv 1d": Map(conv(F.conv1d, stride=2, padding=1), (2, 3, 6), (4, 3, 3), (4,)),
    "conv 2d": Map(conv(F.conv2d, padding=(1, 0)), (2, 2, 4, 4), (3, 2, 3, 2), (3,)),
    "conv 2d, no bias, dilated": Map(conv(F.conv2d, dilation=2), (1, 2, 5, 5), (3, 2, 2, 2)),
    "conv 2d, grouped": Map(conv(F.conv2d, groups=2), (1, 4, 4, 3), (6, 2, 2, 2), (6,)),
    "conv 2d, depthwise": Map(conv(F.conv2d, groups=3, padding=1), (1, 3, 3, 3), (3, 1, 3, 3), (3,)),
    "conv 3d": Map(conv(F.conv3d), (1, 2, 3, 3, 2), (2, 2, 2, 2, 2), (2,)),
    "conv 1d, live weight": Map(swap(conv(F.conv1d, padding=1)), (4, 3, 3), (2, 3, 5), (4,)),
    "conv transposed 1d": Map(conv(F.conv_transpose1d, stride=2, output_padding=1), (2, 3, 3), (3, 2, 3), (2,)),
    "conv transposed 2d, grouped": Map(conv(F.conv_transpose2d, groups=2, padding=1), (1, 4, 3, 3), (4, 1, 3, 3)),
    "conv transposed 3d": Map(conv(F.conv_transpose3d), (1, 2, 2, 2, 2), (2, 2, 2, 1, 2), (2,)),
}
WITH_BIAS = {name: each for name, each in MAPS.items() if each.bias is not None}


@dataclass(frozen=True)
class Matrix:
    """One call of a map: J[j, i], the inputs and the bias as it stands in the output, all flat."""

    j: Tensor
    x: Tensor
    b: Tensor
    z: Tensor
    has_bias: bool = True

    @property
    def c(self) -> Tensor:
        return self.j * self.x


def matrix(each: Map, x: Tensor, w: Tensor, b: Tensor | None) -> Matrix:
    nothing = None if b is None else torch.zeros_like(b)
    j = torch.autograd.functional.jacobian(lambda x: each.function(x, w, nothing), x)
    z = each.function(x, w, b)
    added = torch.zeros_like(z) if b is None else z - each.function(x, w, nothing)
    return Matrix(j.reshape(z.numel(), x.numel()), x.flatten(), added.flatten(), z.flatten(), b is not None)


# ---------------------------------------------------------------- the textbook


Delivered = tuple[Tensor, Tensor]  # relevance of the inputs, and of the bias as it stands in the output


def share(parts: Tensor, own: Tensor, total: Tensor, r: Tensor) -> Delivered:
    """Each output j divides R[j] among its inputs and its bias by their part of the total."""
    return (parts * (r / total)[:, None]).sum(0), own * r / total


def lrp_0(m: Matrix, r: Tensor, eps: float) -> Delivered:
    return share(m.c, m.b, torch.where(m.z == 0, 1, m.z), r)


def epsilon(m: Matrix, r: Tensor, eps: float) -> Delivered:
    return share(m.c, m.b, stabilise(m.z, eps), r)


def z_plus(m: Matrix, r: Tensor, eps: float) -> Delivered:
    c, b = m.c.clamp(min=0), m.b.clamp(min=0)
    return share(c, b, c.sum(1) + b + eps, r)


def z_minus(m: Matrix, r: Tensor, eps: float) -> Delivered:
    c, b = m.c.clamp(max=0), m.b.clamp(max=0)
    return share(c, b, c.sum(1) + b - eps, r)


def gamma(m: Matrix, r: Tensor, eps: float, gamma: float) -> Delivered:
    """Contributions of z's own sign count 1 + gamma times."""
    up = (m.z > 0)[:, None]
    c = m.c + gamma * torch.where(up, m.c.clamp(min=0), m.c.clamp(max=0))
    b = m.b + gamma * torch.where(up[:, 0], m.b.clamp(min=0), m.b.clamp(max=0))
    return share(c, b, stabilise(c.sum(1) + b, eps), torch.where(m.z == 0, 0, r))


def alpha_beta(m: Matrix, r: Tensor, eps: float, alpha: float, beta: float) -> Delivered:
    (x_up, b_up), (x_down, b_down) = z_plus(m, r, eps), z_minus(m, r, eps)
    return alpha * x_up - beta * x_down, alpha * b_up - beta * b_down


def flat(m: Matrix, r: Tensor, eps: float) -> Delivered:
    """Every input that reaches an output takes the same; the bias takes nothing."""
    connected = (m.j != 0).to(m.j.dtype)
    return share(connected, torch.zeros_like(m.b), connected.sum(1) + eps, r)


def w_square(m: Matrix, r: Tensor, eps: float) -> Delivered:
    return share(m.j**2, m.b**2, (m.j**2).sum(1) + m.b**2 + eps, r)


def box(m: Matrix, r: Tensor, eps: float, low: float, high: float) -> Delivered:
    c = m.c - low * m.j.clamp(min=0) - high * m.j.clamp(max=0)
    return share(c, torch.zeros_like(m.b), stabilise(c.sum(1), eps), r)


def absolute(rule: Callable[..., Delivered], m: Matrix, r: Tensor, eps: float, **how: float) -> Delivered:
    """The bias first takes |b| / (|x·W| + |b|) (the paper); the rule divides the rest as if there were none."""
    if not m.has_bias:
        return rule(m, r, eps, **how)
    z = m.z - m.b
    total = z.abs() + m.b.abs() + eps
    without = Matrix(m.j, m.x, torch.zeros_like(m.b), z)
    return rule(without, r * z.abs() / total, eps, **how)[0], r * m.b.abs() / total


Formula = Callable[[Matrix, Tensor], Delivered]
EPS = 1e-2  # large enough to be seen

RULES: dict[str, tuple[Rule, Formula]] = {
    "0": (dlrp.Gradient(), lambda m, r: lrp_0(m, r, 0)),
    "epsilon": (Epsilon(EPS), lambda m, r: epsilon(m, r, EPS)),
    "epsilon, small": (Epsilon(1e-11), lambda m, r: epsilon(m, r, 1e-11)),
    "gamma": (Gamma(0.25, EPS), lambda m, r: gamma(m, r, EPS, 0.25)),
    "gamma, large": (Gamma(100.0, EPS), lambda m, r: gamma(m, r, EPS, 100.0)),
    "z+": (ZPlus(EPS), lambda m, r: z_plus(m, r, EPS)),
    "alpha 2, beta 1": (AlphaBeta(2, 1, EPS), lambda m, r: alpha_beta(m, r, EPS, 2, 1)),
    "alpha 1, beta 0": (AlphaBeta(1, 0, EPS), lambda m, r: alpha_beta(m, r, EPS, 1, 0)),
    "flat": (Flat(1e-10), lambda m, r: flat(m, r, 1e-10)),
    "w-square": (WSquare(EPS), lambda m, r: w_square(m, r, EPS)),
    "box": (Box(-2.0, 3.0, EPS), lambda m, r: box(m, r, EPS, -2.0, 3.0)),
    "epsilon, absolute bias": (Epsilon(EPS, "absolute"), lambda m, r: absolute(epsilon, m, r, EPS)),
    "gamma, absolute bias": (Gamma(0.25, EPS, "absolute"), lambda m, r: absolute(gamma, m, r, EPS, gamma=0.25)),
    "z+, absolute bias": (ZPlus(EPS, "absolute"), lambda m, r: absolute(z_plus, m, r, EPS)),
}


def everywhere(rule: Rule) -> dlrp.Preset:
    return dlrp.preset("attnlrp") | {"linear": rule, "conv": rule}


def call(each: Map, rule: Rule, above: Callable[[Tensor], Tensor] = lambda y: y) -> tuple[Matrix, Tensor, list[Tensor]]:
    """The matrix, the relevance that arrived at the map, and what it handed to its input and its bias."""
    x, w, b = each.operands()
    live = [t.requires_grad_() for t in (x, b) if t is not None]
    y = above(each.function(x, w.requires_grad_(), b))
    r = anything(y)
    found = dlrp.relevance(y, live, seed=r, preset=everywhere(rule))
    return matrix(each, *(None if t is None else t.detach() for t in (x, w, b))), r.flatten(), list(found)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MAPS)
def test_a_linear_map_divides_relevance_as_the_textbook_says(name, rule):
    x, w, b = MAPS[name].operands()
    x.requires_grad_()
    y = MAPS[name].function(x, w.requires_grad_(), None if b is None else b.requires_grad_())
    r = anything(y)
    (found,) = dlrp.relevance(y, x, seed=r, preset=everywhere(RULES[rule][0]))
    m = matrix(MAPS[name], *(None if t is None else t.detach() for t in (x, w, b)))
    close(found, RULES[rule][1](m, r.flatten())[0].reshape(x.shape))


def capped(x: Tensor) -> Tensor:
    """As ReLU6, but lower."""
    return F.hardtanh(x, 0.0, 0.3)


@pytest.mark.parametrize("above", [torch.relu, torch.tanh, F.gelu, torch.relu_, capped], ids=lambda f: f.__name__)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["mm", "addmm", "linear", "conv 2d", "conv transposed 1d"])
def test_a_linear_map_below_an_activation(name, rule, above):
    """Its output must be found; below a rectifier it is taken from there, and no relevance arrives where that is shut."""
    m, r, (found, *_) = call(MAPS[name], RULES[rule][0], above)
    close(found, RULES[rule][1](m, r)[0].reshape(found.shape))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", WITH_BIAS)
def test_a_bias_that_is_asked_for_gets_its_part(name, rule):
    each = WITH_BIAS[name]
    m, r, (of_input, of_bias) = call(each, RULES[rule][0])
    expected_input, expected_bias = RULES[rule][1](m, r)
    close(of_input, expected_input.reshape(of_input.shape))
    if len(each.bias) == 1:  # one number a channel
        output = each.function(*each.operands())
        channel = 1 if name.startswith("conv") else output.dim() - 1
        dims = [dim for dim in range(output.dim()) if dim != channel]
        expected_bias = expected_bias.reshape(output.shape).sum(dims)
    close(of_bias, expected_bias.reshape(of_bias.shape))


@pytest.mark.parametrize("name", MAPS)
def test_gamma_of_0_is_epsilon(name):
    (_, _, first), (_, _, second) = (call(MAPS[name], rule) for rule in (Gamma(0.0, EPS), Epsilon(EPS)))
    close(first[0], second[0])


@pytest.mark.parametrize("name", MAPS)
def test_gamma_of_much_is_z_plus_where_the_output_is_positive(name):
    """And its mirror image where it is negative."""
    (m, r, first), (_, _, second) = (call(MAPS[name], rule) for rule in (Gamma(1e9, 1e-9), ZPlus(1e-9)))
    mirrored = Matrix(-m.j, m.x, -m.b, -m.z)
    expected = torch.where(m.z > 0, r, 0), torch.where(m.z < 0, r, 0)
    both = z_plus(m, expected[0], 1e-9)[0] + z_plus(mirrored, expected[1], 1e-9)[0]
    assert error(first[0].flatten(), both) < 1e-6
    if (m.z > 0).all():
        assert error(first[0], second[0]) < 1e-6


@pytest.mark.parametrize("name", MAPS)
def test_alpha_1_beta_0_is_z_plus(name):
    (_, _, first), (_, _, second) = (call(MAPS[name], rule) for rule in (AlphaBeta(1, 0, EPS), ZPlus(EPS)))
    close(first[0], second[0])


CONSERVING = {
    "0": dlrp.Gradient(), "epsilon": Epsilon(1e-12), "epsilon, absolute bias": Epsilon(1e-12, "absolute"),
    "gamma": Gamma(0.25, 1e-12), "gamma, absolute bias": Gamma(0.25, 1e-12, "absolute"),
    "flat": Flat(1e-12), "w-square": WSquare(1e-12),
}  # fmt: skip


@pytest.mark.parametrize("rule", CONSERVING)
@pytest.mark.parametrize("name", ["addmm", "conv 2d"])
def test_what_the_input_and_the_bias_get_adds_up_to_what_arrived(name, rule):
    _, r, found = call(MAPS[name], CONSERVING[rule])
    assert float(sum(part.sum() for part in found)) == pytest.approx(float(r.sum()), rel=1e-6)


def test_box_bounds_may_be_tensors():
    each = MAPS["conv 2d"]
    x, w, b = each.operands()
    low, high = -gaussian(1, 2, 1, 1, seed=5).abs() - 1, gaussian(1, 2, 1, 1, seed=6).abs() + 1
    m = matrix(each, x, w, b)
    y = each.function(x.requires_grad_(), w, b.requires_grad_())
    r = anything(y)
    (found,) = dlrp.relevance(y, x, seed=r, preset=everywhere(Box(low, high, EPS)))
    lows, highs = (bound.expand(x.shape).flatten() for bound in (low, high))
    c = m.c - lows * m.j.clamp(min=0) - highs * m.j.clamp(max=0)
    expected = share(c, torch.zeros_like(m.b), stabilise(c.sum(1), EPS), r.flatten())[0]
    close(found, expected.reshape(x.shape))


def test_a_box_without_bounds_takes_the_extremes_of_each_channel_of_each_row():
    each = MAPS["conv 2d"]
    x, w, b = each.operands()
    y = each.function(x.requires_grad_(), w, b)
    r = anything(y)
    (found,) = dlrp.relevance(y, x, seed=r, preset=everywhere(Box(eps=1e-12)), retain_graph=True)
    low, high = (end(x.detach(), (2, 3), keepdim=True) for end in (torch.amin, torch.amax))
    slack = 1e-3 * x.detach().abs().amax((1, 2, 3), keepdim=True)
    (expected,) = dlrp.relevance(y, x, seed=r, preset=everywhere(Box(low - slack, high + slack, eps=1e-12)))
    close(found, expected)
    rows = []
    for i in range(len(x)):
        row = x.detach()[i : i + 1].requires_grad_()
        y = each.function(row, w, b)
        rows += dlrp.relevance(y, row, seed=r[i : i + 1], preset=everywhere(Box(eps=1e-12)))
    close(found, torch.cat(rows))


@pytest.mark.parametrize("value", [0.0, 0.7, -300.0])
@pytest.mark.parametrize("shape", [(2, 3, 6, 6), (2, 6)], ids=str)
def test_equal_inputs_take_from_a_box_in_proportion_to_their_weights(value, shape):
    layer = nn.Conv2d(3, 4, 3) if len(shape) == 4 else nn.Linear(6, 4)
    x = torch.full(shape, value, requires_grad=True)
    y = layer(x)
    (found,) = dlrp.relevance(y, x, seed=(r := torch.rand_like(y)), preset=everywhere(Box(eps=1e-9)))
    assert float(found.detach().sum()) == pytest.approx(float(r.sum()), rel=0.05) and float(found.min()) >= 0


def test_a_box_has_two_bounds_or_none():
    with pytest.raises(ValueError, match="both bounds or neither"):
        Box(-1.0)


def test_inputs_that_are_0_get_relevance_from_flat_w_square_and_box():
    for rule in ("flat", "w-square", "box"):
        m, _, (found, *_) = call(MAPS["conv 2d"], RULES[rule][0])
        assert found.flatten()[m.x == 0].abs().min() > 0


@pytest.mark.parametrize("share_", [0.3, 0.01])
@pytest.mark.parametrize("rule", [Epsilon, Gamma, ZPlus])
@pytest.mark.parametrize("name", ["addmm", "conv 1d"])
def test_the_relevance_filter_keeps_the_largest_of_each_row(name, rule, share_):
    each = MAPS[name]
    x, w, b = each.operands()
    m = matrix(each, x, w, b)
    y = each.function(x.requires_grad_(), w, b.requires_grad_())
    r = anything(y)
    rows = r.flatten(1).clone()
    for row in rows:
        keep = row.argsort(descending=True)[: max(1, int(share_ * row.numel()))]
        row[[i for i in range(row.numel()) if i not in keep.tolist()]] = 0
    formula = {Epsilon: epsilon, ZPlus: z_plus, Gamma: lambda m, r, eps: gamma(m, r, eps, 0.25)}[rule]
    (found,) = dlrp.relevance(y, x, seed=r, preset=everywhere(rule(eps=EPS, top=share_)))
    close(found, formula(m, rows.flatten(), EPS)[0].reshape(x.shape))


@pytest.mark.parametrize("rule", RULES)
def test_two_live_factors_are_a_product_whatever_the_rule(rule):
    a, b = gaussian(3, 4, seed=1).requires_grad_(), gaussian(4, 5, seed=2).requires_grad_()
    y = a @ b
    r = anything(y)
    s = r / y.detach()
    found = dlrp.relevance(y, (a, b), seed=r, preset=everywhere(RULES[rule][0]))
    close(found[0], a.detach() * (s @ b.detach().T) / 2)
    close(found[1], b.detach() * (a.detach().T @ s) / 2)


# ---------------------------------------------------------------- sums


DYNAMIC = dlrp.preset("dynamic")
SUM_EPS = 1e-11


def sum_to(t: Tensor, shape: torch.Size) -> Tensor:
    return t.sum_to_size(shape)


SUMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple, tuple, float, float]] = {
    "add": (torch.add, (3, 4), (3, 4), 1, 1),
    "add, alpha": (lambda a, b: torch.add(a, b, alpha=-0.5), (3, 4), (3, 4), 1, -0.5),
    "add, broadcast": (torch.add, (3, 1), (4,), 1, 1),
    "add, broadcast, alpha": (lambda a, b: torch.add(a, b, alpha=3), (2, 1, 4), (3, 1), 1, 3),
    "add, number": (torch.add, (), (3, 4), 1, 1),
    "sub": (torch.sub, (3, 4), (3, 4), 1, -1),
    "sub, alpha, broadcast": (lambda a, b: torch.sub(a, b, alpha=2), (4,), (3, 1), 1, -2),
    "rsub": (torch.rsub, (3, 4), (3, 4), -1, 1),
    "rsub, alpha": (lambda a, b: torch.rsub(a, b, alpha=0.5), (3, 4), (3, 4), -0.5, 1),
    "in place": (lambda a, b: a.clone().add_(b, alpha=2), (3, 4), (3, 4), 1, 2),
}


@pytest.mark.parametrize("name", SUMS)
def test_the_operands_of_a_sum_share_by_magnitude(name):
    function, first, second, fa, fb = SUMS[name]
    a, b = gaussian(*first, seed=1).requires_grad_(), gaussian(*second, seed=2).requires_grad_()
    y = function(a, b)
    r = anything(y)
    found = dlrp.relevance(y, (a, b), seed=r, preset=DYNAMIC)
    ma, mb = (fa * a.detach()).abs(), (fb * b.detach()).abs()
    total = ma + mb + SUM_EPS
    close(found[0], sum_to(r * ma / total, a.shape))
    close(found[1], sum_to(r * mb / total, b.shape))


REDUCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "sum": (torch.sum, (0, 1, 2)),
    "sum, dim": (lambda x: x.sum(-1), (2,)),
    "sum, dims": (lambda x: x.sum((0, -1)), (0, 2)),
    "sum, keepdim": (lambda x: x.sum((0, 2), keepdim=True), (0, 2)),
    "mean": (torch.mean, (0, 1, 2)),
    "mean, dim": (lambda x: x.mean(1), (1,)),
    "mean, dims, keepdim": (lambda x: x.mean((-2, -1), keepdim=True), (1, 2)),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_the_elements_of_a_reduction_share_by_magnitude(name):
    function, dims = REDUCTIONS[name]
    x = gaussian(2, 3, 4, seed=1).requires_grad_()
    y = function(x)
    r = anything(y)
    (found,) = dlrp.relevance(y, x, seed=r, preset=DYNAMIC)
    magnitude = x.detach().abs()
    total = magnitude.sum(dims, keepdim=True)
    close(found, r.reshape(total.shape) * magnitude / total)


@pytest.mark.parametrize("preset", ["dynamic", "attnlrp"])
@pytest.mark.parametrize("function", [
    lambda x: x.cumsum(-1), lambda x: F.interpolate(x, size=7, mode="linear", align_corners=True),
], ids=["running sum", "interpolation"])  # fmt: skip
def test_running_sums_and_interpolations_are_native(function, preset):
    x = gaussian(1, 2, 4, seed=1).requires_grad_()
    y = function(x)
    r = anything(y)
    (gradient,) = torch.autograd.grad(y, x, r / y.detach(), retain_graph=True)
    close(dlrp.relevance(y, x, seed=r, preset=preset)[0], x.detach() * gradient)


def test_sums_are_proportional_under_attnlrp():
    a, b = gaussian(3, 1, seed=1).requires_grad_(), gaussian(4, seed=2).requires_grad_()
    y = torch.sub(a, b, alpha=2)
    r = anything(y)
    found = dlrp.relevance(y, (a, b), seed=r, preset="attnlrp")
    close(found[0], sum_to(r * a.detach() / y.detach(), a.shape))
    close(found[1], sum_to(-2 * r * b.detach() / y.detach(), b.shape))


def test_the_norm_rule_of_zennit_stabilises_sums():
    a, b = gaussian(3, 4, seed=1).requires_grad_(), gaussian(3, 4, seed=2).requires_grad_()
    y = a + b
    r = anything(y)
    found = dlrp.relevance(y, (a, b), seed=r, preset=dlrp.preset("attnlrp") | {"sum": Epsilon(EPS)})
    for t, part in zip((a, b), found, strict=True):
        close(part, t.detach() * r / stabilise(y.detach(), EPS))


# ---------------------------------------------------------------- products


PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple, tuple]] = {
    "mul": (torch.mul, (3, 4), (3, 4)),
    "mul, broadcast": (torch.mul, (3, 1), (4,)),
    "mul, in place": (lambda a, b: a.clone().mul_(b), (3, 4), (4,)),
    "div": (torch.div, (3, 4), (3, 4)),
    "div, broadcast": (torch.div, (4,), (3, 1)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_factors_share_by_magnitude_under_dynamic(name):
    function, first, second = PRODUCTS[name]
    a, b = gaussian(*first, seed=1).requires_grad_(), gaussian(*second, seed=2).requires_grad_()
    y = function(a, b)
    r = anything(y)
    found = dlrp.relevance(y, (a, b), seed=r, preset=DYNAMIC)
    ma, mb = a.detach().abs(), b.detach().abs()
    mb = 1 / mb if name.startswith("div") else mb
    close(found[0], sum_to(r * ma / (ma + mb), a.shape))
    close(found[1], sum_to(r * mb / (ma + mb), b.shape))


@pytest.mark.parametrize("preset", ["dynamic", "attnlrp"])
def test_factors_of_a_matrix_product_take_half_each(preset):
    a, b = gaussian(2, 3, 4, seed=1).requires_grad_(), gaussian(2, 4, 5, seed=2).requires_grad_()
    y = torch.bmm(a, b)
    r = anything(y)
    s = r / y.detach()
    found = dlrp.relevance(y, (a, b), seed=r, preset=preset)
    close(found[0], a.detach() * (s @ b.detach().mT) / 2)
    close(found[1], b.detach() * (a.detach().mT @ s) / 2)


@pytest.mark.parametrize("name", ["mul", "mul, broadcast", "mul, in place"])
def test_factors_take_half_each_under_attnlrp(name):
    function, first, second = PRODUCTS[name]
    a, b = gaussian(*first, seed=1).requires_grad_(), gaussian(*second, seed=2).requires_grad_()
    y = function(a, b)
    r = anything(y)
    found = dlrp.relevance(y, (a, b), seed=r, preset="attnlrp")
    close(found[0], sum_to(r / 2, a.shape))
    close(found[1], sum_to(r / 2, b.shape))


@pytest.mark.parametrize("preset", ["dynamic", "attnlrp", "cp-lrp"])
def test_a_factor_that_is_no_input_takes_nothing(preset):
    x, w = gaussian(3, 4, seed=1).requires_grad_(), gaussian(4, seed=2).requires_grad_()
    for y in (x * w, x / w, w * x):
        r = anything(y)
        close(dlrp.relevance(y, x, seed=r, preset=preset)[0], r)


def test_addcmul_is_a_sum_and_a_product():
    a, b, c = (gaussian(3, 4, seed=i).requires_grad_() for i in (1, 2, 3))
    y = torch.addcmul(a, b, c, value=-2)
    r = anything(y)
    found = dlrp.relevance(y, (a, b, c), seed=r, preset="attnlrp")
    product = -2 * (b * c).detach()
    close(found[0], r * a.detach() / y.detach())
    close(found[1], r * product / y.detach() / 2)
    close(found[2], r * product / y.detach() / 2)


# ---------------------------------------------------------------- average pools


def windows(length: int, size: int, stride: int, padding: int = 0) -> list[range]:
    starts = range(-padding, length + padding - size + 1, stride)
    return [range(max(start, 0), min(start + size, length)) for start in starts]


def spread(x: Tensor, r: Tensor, rows: list[range], columns: list[range]) -> Tensor:
    """Each output's relevance, in equal parts, to the pixels of its window."""
    out = torch.zeros_like(x)
    for i, window in enumerate(rows):
        for k, across in enumerate(columns):
            part = r[:, :, i, k] / (len(window) * len(across))
            for h in window:
                for w in across:
                    out[:, :, h, w] += part
    return out


POOLS = {
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), windows(6, 2, 2), windows(6, 2, 2)),
    "overlapping": (lambda x: F.avg_pool2d(x, 3, 1), windows(6, 3, 1), windows(6, 3, 1)),
    "padded, not counted": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), windows(6, 3, 2, 1), windows(6, 3, 2, 1),
    ),
    "adaptive": (
        lambda x: F.adaptive_avg_pool2d(x, (4, 3)),
        [range(i * 6 // 4, -(-(i + 1) * 6 // 4)) for i in range(4)], [range(2 * i, 2 * i + 2) for i in range(3)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", POOLS)
def test_the_pixels_of_a_window_share_equally_under_dynamic(name):
    function, rows, columns = POOLS[name]
    x = gaussian(2, 3, 6, 6, seed=1)
    x[:, :, ::2, ::3] = 0  # zeros get relevance too
    x.requires_grad_()
    y = function(x)
    r = anything(y)
    close(dlrp.relevance(y, x, seed=r, preset=DYNAMIC)[0], spread(x.detach(), r, rows, columns))


@pytest.mark.parametrize("name", POOLS)
def test_the_pixels_of_a_window_share_proportionally_under_attnlrp(name):
    function = POOLS[name][0]
    x = gaussian(2, 3, 6, 6, seed=1).requires_grad_()
    y = function(x)
    r = anything(y)
    (gradient,) = torch.autograd.grad(y, x, r / y.detach(), retain_graph=True)
    close(dlrp.relevance(y, x, seed=r, preset="attnlrp")[0], x.detach() * gradient)


# ---------------------------------------------------------------- R instead of s: below rules that feed zeros


UNIFORM = dlrp.preset("attnlrp") | {"pool": dlrp.UniformPool()}
PIXELS = windows(6, 2, 2)


def pooled(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A uniform pool on top: its output, the relevance there, and what it gives to each pixel of h."""
    y = F.avg_pool2d(h, 2)
    r = anything(y)
    return y, r, spread(h.detach(), r, PIXELS, PIXELS)


def image(seed: int = 1) -> Tensor:
    return gaussian(2, 3, 6, 6, seed=seed).requires_grad_()


def through_conv(x: Tensor, z: Tensor, w: Tensor, r: Tensor) -> Tensor:
    """LRP-0 of a convolution with padding 1 and no bias."""
    return x.detach() * torch.nn.grad.conv2d_input(x.shape, w, r / z.detach(), padding=1)


KERNEL = gaussian(3, 3, 3, 3, seed=7)


@pytest.mark.parametrize("activation", [torch.relu, F.gelu, torch.tanh, F.silu, F.leaky_relu], ids=lambda f: f.__name__)
def test_R_passes_an_activation_unchanged(activation):
    """Also where it is shut: those pixels got relevance from the pool."""
    x = image()
    z = F.conv2d(x, KERNEL, padding=1)
    y, r, below = pooled(activation(z))
    close(dlrp.relevance(y, x, seed=r, preset=UNIFORM)[0], through_conv(x, z, KERNEL, below))


def test_R_passes_an_activation_on_an_input_unchanged():
    x = image()
    y, r, below = pooled(torch.relu(x))
    close(dlrp.relevance(y, x, seed=r, preset=UNIFORM)[0], below)


def test_R_passes_an_in_place_rectifier_unchanged():
    x = image()
    before = F.conv2d(x, KERNEL, padding=1)
    y, r, below = pooled(F.relu(F.conv2d(x, KERNEL, padding=1), inplace=True))
    close(dlrp.relevance(y, x, seed=r, preset=UNIFORM)[0], through_conv(x, before, KERNEL, below))


def test_R_passes_a_max_pool_to_the_winners():
    x = image()
    h = F.max_pool2d(x, 3, 1, 1)
    y, r, below = pooled(h)
    _, winners = F.max_pool2d(x.detach(), 3, 1, 1, return_indices=True)
    expected = torch.zeros(6, 36, dtype=torch.float64).scatter_add(1, winners.reshape(6, 36), below.reshape(6, 36))
    close(dlrp.relevance(y, x, seed=r, preset=UNIFORM)[0], expected.reshape(x.shape))


def test_R_passes_views_slices_and_concatenation():
    x = image()
    flat = x.reshape(6, 36).t().contiguous().t().reshape(2, 3, 6, 6)
    y, r, below = pooled(torch.cat([flat[:, 1:], flat[:, :1]], 1))
    close(dlrp.relevance(y, x, seed=r, preset=UNIFORM)[0], torch.cat([below[:, 2:], below[:, :2]], 1))


def test_R_is_summed_over_the_copies_of_an_expanded_tensor():
    x = gaussian(2, 3, 1, 6, seed=1).requires_grad_()
    y, r, below = pooled(x.expand(2, 3, 6, 6))
    close(dlrp.relevance(y, x, seed=r, preset=UNIFORM)[0], below.sum(2, keepdim=True))


@pytest.mark.parametrize("factor", ["number", "parameter", "broadcast", "divisor", "negation"])
def test_R_passes_a_scaling_unchanged(factor):
    x, w = image(), gaussian(3, 1, 1, seed=5).requires_grad_()
    h = {
        "number": lambda: x * -0.3, "parameter": lambda: w * x, "divisor": lambda: x / w, "negation": lambda: -x,
        "broadcast": lambda: x[:, :, :1] * gaussian(6, 1, seed=6),
    }[factor]()  # fmt: skip
    y, r, below = pooled(h)
    expected = below if factor != "broadcast" else torch.cat([below.sum(2, keepdim=True), torch.zeros(2, 3, 5, 6)], 2)
    close(dlrp.relevance(y, x, seed=r, preset=UNIFORM)[0], expected)


@pytest.mark.parametrize("preset", ["proportional", "absolute"])
def test_R_is_divided_by_a_sum(preset):
    a, b = image(1), image(2)
    y, r, below = pooled(a - 2 * b)
    rules = UNIFORM if preset == "proportional" else DYNAMIC
    found = dlrp.relevance(y, (a, b), seed=r, preset=rules)
    parts = [a.detach(), -2 * b.detach()]
    if preset == "absolute":
        parts = [part.abs() for part in parts]
    for part, actual in zip(parts, found, strict=True):
        close(actual, below * part / sum(parts))


def test_R_is_divided_by_a_product():
    a, b = image(1), image(2)
    y, r, below = pooled(a * b)
    for found in dlrp.relevance(y, (a, b), seed=r, preset=UNIFORM):
        close(found, below / 2)


def test_R_and_s_meet_at_a_residual():
    """One consumer delivers R, the other s, which counts with the value; above and below a rectifier."""
    x = image()
    z = F.conv2d(x, KERNEL, padding=1)
    h = torch.relu(z)
    weight = gaussian(3 * 36, 27, seed=8)
    linear = (h.flatten(1) @ weight).reshape(2, 3, 3, 3)
    pool = F.avg_pool2d(h, 2)
    y = pool + linear
    r = anything(y)
    to_pool, to_linear = (r * part.detach() / y.detach() for part in (pool, linear))
    at_h = spread(h.detach(), to_pool, PIXELS, PIXELS)
    at_h = at_h + h.detach() * ((to_linear / linear.detach()).flatten(1) @ weight.T).reshape(h.shape)
    close(dlrp.relevance(y, x, seed=r, preset=UNIFORM)[0], through_conv(x, z, KERNEL, at_h))


def test_R_and_s_meet_at_an_input():
    x = image()
    pool, top = F.avg_pool2d(x, 2), F.max_pool2d(x, 2)
    y = pool + top
    r = anything(y)
    to_pool, to_top = (r * part.detach() / y.detach() for part in (pool, top))
    (gradient,) = torch.autograd.grad(top, x, to_top / top.detach(), retain_graph=True)
    expected = spread(x.detach(), to_pool, PIXELS, PIXELS) + x.detach() * gradient
    close(dlrp.relevance(y, x, seed=r, preset=UNIFORM)[0], expected)


@pytest.mark.parametrize("rule", RULES)
def test_R_arrives_at_a_linear_map(rule):
    """A uniform pool on a convolution with bias: the rule's own denominator returns to s."""
    each = Map(conv(F.conv2d, padding=1), (2, 3, 6, 6), (3, 3, 3, 3), (3,))
    x, w, b = each.operands()
    m = matrix(each, x, w, b)
    y, r, below = pooled(torch.relu(each.function(x.requires_grad_(), w.requires_grad_(), b.requires_grad_())))
    preset = UNIFORM | {"conv": RULES[rule][0]}
    (found,) = dlrp.relevance(y, x, seed=r, preset=preset)
    close(found, RULES[rule][1](m, below.flatten())[0].reshape(x.shape))


@pytest.mark.parametrize("upper", ["flat", "w-square", "box"])
@pytest.mark.parametrize("lower", ["flat", "epsilon", "gamma", "z+"])
def test_one_rule_below_another_that_delivers_R(upper, lower):
    first, second = Map(addmm, (3, 4), (4, 6), (6,)), Map(mm, (3, 6), (6, 5))
    x, w, b = first.operands()
    v = gaussian(6, 5, seed=9)
    z = first.function(x.requires_grad_(), w.requires_grad_(), b.requires_grad_())
    h = torch.relu(z)
    y = h @ v.requires_grad_()
    r = anything(y)
    above = RULES[upper][1](matrix(second, h.detach(), v.detach(), None), r.flatten())[0]
    expected = RULES[lower][1](matrix(first, x.detach(), w.detach(), b.detach()), above)[0]
    preset = dlrp.preset("attnlrp") | {"Addmm": RULES[lower][0], "Mm": RULES[upper][0]}
    close(dlrp.relevance(y, x, seed=r, preset=preset)[0], expected.reshape(x.shape))


# ---------------------------------------------------------------- the rest


@pytest.mark.parametrize("name, slope", [
    ("tanh", 1.0), ("gelu", 0.5), ("silu", 0.5), ("sin", 1.0), ("expm1", 1.0), ("erf", 2 / torch.pi**0.5), ("mish", 0.6),
])  # fmt: skip
def test_identity_has_the_slope_as_its_limit_at_0(name, slope):
    """a - b is exactly 0, and still hands down a coefficient."""
    function = getattr(F, name, None) or getattr(torch, name)
    a, b = (gaussian(4, seed=1).requires_grad_() for _ in range(2))
    y = function(a - b) + a
    r = anything(y)
    of_a, of_b = dlrp.relevance(y, (a, b), seed=r, preset="attnlrp")
    close(of_a, r * (1 + slope))
    close(of_b, -r * slope)


def test_nothing_lets_nothing_pass():
    x = gaussian(3, 4).requires_grad_()
    y = torch.tanh(x) + x
    r = anything(y)
    (found,) = dlrp.relevance(y, x, seed=r, preset=dlrp.preset("attnlrp") | {"Tanh": dlrp.Nothing()})
    close(found, r * x.detach() / y.detach())


@pytest.mark.parametrize("bad", [
    lambda: AlphaBeta(2, 2), lambda: AlphaBeta(-1, -2), lambda: Epsilon(top=0.0), lambda: Epsilon(top=1.5),
    lambda: Gamma(bias="sometimes"),
])  # fmt: skip
def test_rules_refuse_parameters_without_meaning(bad):
    with pytest.raises(ValueError, match="expected"):
        bad()


@pytest.mark.parametrize("squeezed", [False, True], ids=["as it is", "squeezed"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_a_batch_norm_of_one_row_whatever_its_strides(squeezed, last):
    """Squeezed, what arrives has strides that torch's CPU kernel takes for another memory format."""
    norm = nn.BatchNorm2d(5).double().eval()
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        nn.init.normal_(tensor)
    x = torch.randn(1, 5, 4, 3, dtype=torch.float64)
    x = (x.to(memory_format=torch.channels_last) if last else x).requires_grad_()
    y = norm(x)
    weights = torch.randn(1, 5, 4, 3, dtype=torch.float64)
    output, seen = (t.squeeze(0).permute(1, 2, 0) if squeezed else t.permute(0, 2, 3, 1) for t in (y, weights))
    seed = (output.detach() * seen).contiguous()
    (found,) = dlrp.relevance(output, x, preset="attnlrp", seed=seed)
    scale = (norm.weight / (norm.running_var + norm.eps).sqrt())[:, None, None]
    torch.testing.assert_close(found, (x * scale * weights).detach())

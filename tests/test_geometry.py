"""Maps that move, mix and spread values: each equals the plain matrix, convolution or permutation that it is."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dynamiclrp as dlrp
from contract import PRESETS, holds
from models import gaussian, randomise
from oracles import error

DOUBLE = torch.float64
NATIVE = ("attnlrp", "cp-lrp", "gradient")


def weight(*shape: int, seed: int = 9) -> nn.Parameter:
    return nn.Parameter(gaussian(*shape, seed=seed, dtype=DOUBLE), requires_grad=False)


class Between(nn.Module):
    """A map between two layers, so that what arrives has any sign and what leaves is not the input."""

    def __init__(self, function, channels: int, out: int | None = None, bias: bool = True) -> None:
        super().__init__()
        self.function = function
        self.below = nn.Conv2d(2, channels, 3, padding=1, bias=bias)
        self.head = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.function(torch.tanh(self.below(x)))).flatten(1))


X = gaussian(2, 2, 4, 4, seed=1, dtype=DOUBLE)


def assert_same(a, b, channels: int, presets=NATIVE, tolerance: float = 1e-9, kept=PRESETS) -> None:
    """Two forms of one map give the same, and the first keeps what every explanation keeps."""
    first = Between(a, channels).double()
    first(X)  # the head learns its size
    randomise(first, std=0.5).double()
    second = Between(b, channels).double()
    second(X)
    second.load_state_dict(first.state_dict())
    second.eval()
    found = holds(first, {"x": X}, tuple(dict.fromkeys((*presets, *kept))))
    for preset in presets:
        expected = dlrp.explain(second, X, preset=preset).relevance
        assert error(found[preset]["x"], expected) < tolerance, preset


# ---------------------------------------------------------------- products by name


EINSUMS = {
    "linear": ("nchw,oc->nohw", (5, 3), lambda x, w: (w @ x.flatten(2)).unflatten(2, x.shape[2:])),
    "rows": ("nchw,hk->nckw", (4, 6), lambda x, w: (x.mT @ w).mT),
    "one number a channel": ("nchw,c->nchw", (3,), lambda x, w: x * w[:, None, None]),
    "sum over all": ("nchw,kchw->nk", (2, 3, 4, 4), lambda x, w: x.flatten(1) @ w.flatten(1).T),
    "own matrix a channel": ("nchw,chk->nckw", (3, 4, 5), lambda x, w: (x.mT @ w).mT),
}


@pytest.mark.parametrize("name", EINSUMS)
def test_einsum_equals_the_product_it_names(name):
    formula, shape, written = EINSUMS[name]
    w = weight(*shape)
    presets = (*NATIVE, "gamma", "epsilon") if name in ("linear", "rows") else NATIVE
    assert_same(lambda x: torch.einsum(formula, x, w), lambda x: written(x, w), 3, presets)


def test_einsum_of_two_activations_is_a_matrix_product():
    assert_same(
        lambda x: torch.einsum("ncij,ncjk->ncik", x[:, :2], x[:, 2:]), lambda x: x[:, :2] @ x[:, 2:], 4,
        (*NATIVE, "dynamic"),
    )  # fmt: skip


# ---------------------------------------------------------------- Fourier transforms and complex numbers


def test_a_product_of_spectra_is_a_circular_convolution():
    kernel = weight(3, 4, 4)

    def by_spectrum(x: Tensor) -> Tensor:
        return torch.fft.irfft2(torch.fft.rfft2(x) * torch.fft.rfft2(kernel), s=x.shape[-2:])

    def by_shifts(x: Tensor) -> Tensor:
        return sum(
            torch.roll(x, (i, j), (-2, -1)) * kernel[:, i, j, None, None] for i in range(4) for j in range(4)
        )  # fmt: skip

    assert_same(by_spectrum, by_shifts, 3)


def test_a_fourier_layer_is_a_matrix():
    """FNet: the real part of a two-dimensional transform, which mixes tokens in place of attention."""
    angles = 2 * torch.pi * torch.outer(torch.arange(4), torch.arange(4)).to(DOUBLE) / 4
    matrix = torch.complex(angles.cos(), -angles.sin())
    assert_same(
        lambda x: torch.fft.fft2(x).real,
        lambda x: matrix.real @ x @ matrix.real - matrix.imag @ x @ matrix.imag,
        3,
    )


def test_a_complex_layer_is_two_real_ones():
    w = torch.complex(weight(4, 5, seed=1), weight(4, 5, seed=2))

    def complex_layer(x: Tensor) -> Tensor:
        z = torch.complex(x[:, :2], x[:, 2:]) @ w
        return torch.cat([z.real, z.imag], 1)

    def real_layers(x: Tensor) -> Tensor:
        a, b = x[:, :2], x[:, 2:]
        return torch.cat([a @ w.real - b @ w.imag, a @ w.imag + b @ w.real], 1)

    def viewed(x: Tensor) -> Tensor:
        z = torch.view_as_complex(torch.stack([x[:, :2], x[:, 2:]], -1)) @ w
        return torch.view_as_real(z).movedim(-1, 1).flatten(1, 2)

    assert_same(complex_layer, real_layers, 4, kept=())
    assert_same(viewed, real_layers, 4, kept=())
    model = Between(complex_layer, 4).double()
    model(X)
    with pytest.raises(dlrp.UnsupportedTensorError, match=r"\(\w+\) multiplies complex numbers.*Gradient\(\)"):
        dlrp.explain(model, X, preset="gamma")
    own = dlrp.preset("gamma") | {"Bmm": dlrp.Gradient(), "Mm": dlrp.Gradient()}
    assert dlrp.explain(model, X, preset=own).relevance.any()


# ---------------------------------------------------------------- convolutions


def spaced(x: Tensor, stride: int) -> Tensor:
    """Zeros between the pixels."""
    h, w = x.shape[2:]
    wide = torch.zeros(*x.shape[:2], (h - 1) * stride + 1, (w - 1) * stride + 1, dtype=x.dtype)
    rows, columns = torch.meshgrid(torch.arange(h) * stride, torch.arange(w) * stride, indexing="ij")
    return wide.index_put((slice_(x, 0), slice_(x, 1), rows, columns), x)


def slice_(x: Tensor, dim: int) -> Tensor:
    shape = [1, 1, 1, 1]
    shape[dim] = -1
    return torch.arange(x.shape[dim]).reshape(shape)


@pytest.mark.parametrize("stride, padding", [(1, 0), (2, 0), (2, 1)])
def test_a_transposed_convolution_is_a_convolution_of_spaced_pixels(stride, padding):
    kernel, bias = weight(3, 5, 3, 3), weight(5)
    assert_same(
        lambda x: F.conv_transpose2d(x, kernel, bias, stride, padding),
        lambda x: F.conv2d(spaced(x, stride), kernel.flip(2, 3).transpose(0, 1), bias, padding=2 - padding),
        3,
        (*NATIVE, "gamma", "epsilon", "epsilon-plus", "dynamic"),
        1e-6,
    )


@pytest.mark.parametrize("groups, dilation", [(1, 1), (3, 1), (1, 2)])
def test_a_convolution_is_a_product_with_unfolded_patches(groups, dilation):
    kernel = weight(6, 3 // groups, 3, 3)

    def unfolded(x: Tensor) -> Tensor:
        patches = F.unfold(x, 3, dilation, padding=dilation).unflatten(1, (groups, -1))
        return torch.einsum("goi,ngil->ngol", kernel.flatten(1).unflatten(0, (groups, -1)), patches).reshape(
            -1, 6, 4, 4
        )

    presets = NATIVE if groups > 1 else (*NATIVE, "gamma", "epsilon")
    assert_same(lambda x: F.conv2d(x, kernel, None, 1, dilation, dilation, groups), unfolded, 3, presets, 1e-6)


# ---------------------------------------------------------------- upsampling


def as_matrix(function, shape: tuple[int, ...]) -> Tensor:
    """A linear map of pictures as the matrix that it is: one row for each pixel."""
    units = torch.eye(shape[0] * shape[1], dtype=DOUBLE).reshape(-1, 1, *shape)
    return function(units).flatten(1)


UPSAMPLINGS = {
    "bilinear": {"mode": "bilinear", "align_corners": False},
    "bilinear, corners aligned": {"mode": "bilinear", "align_corners": True},
    "bicubic": {"mode": "bicubic", "align_corners": False},
    "nearest": {"mode": "nearest"},
    "area": {"mode": "area"},
    "antialiased": {"mode": "bilinear", "align_corners": False, "antialias": True},
}


@pytest.mark.parametrize("size", [(7, 9), (3, 2)], ids=["up", "down"])
@pytest.mark.parametrize("name", UPSAMPLINGS)
def test_interpolation_is_a_matrix(name, size):
    def resize(x: Tensor) -> Tensor:
        return F.interpolate(x, size, **UPSAMPLINGS[name])

    matrix = as_matrix(resize, (4, 4))
    assert_same(resize, lambda x: (x.flatten(2) @ matrix).unflatten(2, size), 3)


def test_pixel_shuffle_is_a_permutation():
    def permuted(x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        return x.reshape(n, 1, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, 1, 2 * h, 2 * w)

    assert_same(lambda x: F.pixel_shuffle(x, 2), permuted, 4, PRESETS)
    assert_same(lambda x: F.pixel_unshuffle(x, 2), lambda x: F.unfold(x, 2, stride=2).reshape(-1, 12, 2, 2), 3, PRESETS)


def test_a_sampling_grid_takes_nothing():
    """A spatial transformer: where it looks is steered by the picture, what it sees carries the relevance."""

    def sampled(x: Tensor, steer: bool) -> Tensor:
        theta = torch.stack([1 + 0.1 * x.mean((1, 2, 3)), x[:, 0, 0, 0] * 0.1, x[:, 0, 0, 1] * 0.1], 1)
        theta = torch.stack([theta, theta.flip(1)], 1)
        grid = F.affine_grid(theta if steer else theta.detach(), (len(x), 3, 4, 4), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)

    assert_same(lambda x: sampled(x, True), lambda x: sampled(x, False), 3, ("attnlrp", "cp-lrp"))


# ---------------------------------------------------------------- powers, by their exponent


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "exponent, function",
    [(0.5, torch.sqrt), (-0.5, torch.rsqrt), (-1, torch.reciprocal), (2, torch.square), (3, lambda x: x.square() * x)],
    ids=["root", "inverse root", "inverse", "square", "cube"],
)
def test_a_power_is_the_function_that_it_is(exponent, function, preset):
    """Below 1 it is no activation: f(x)/x, or the slope, is infinite at 0."""
    x, head = gaussian(3, 4, seed=2, dtype=DOUBLE).abs() + 0.2, weight(4, 2)

    def relevance(f) -> Tensor:
        leaf = x.clone().requires_grad_()
        return dlrp.relevance(f(leaf) @ head, leaf, preset=preset)[0]

    if exponent == 3:  # which is a product when written out
        assert error(relevance(lambda t: t**3).sum(1), (x**3 @ head).amax(1)) < 1e-5 or preset == "epsilon-plus"
    else:
        assert error(relevance(lambda t: t**exponent), relevance(function)) < 1e-9


# ---------------------------------------------------------------- nested tensors

A, B = gaussian(2, 4, seed=3, dtype=DOUBLE), gaussian(3, 4, seed=4, dtype=DOUBLE)


@pytest.mark.filterwarnings("ignore:.*nested.*:UserWarning")
def test_nested_tensors_inside_a_model_are_rows_of_their_own():
    head = weight(4, 2)
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    jagged = torch.nested.as_nested_tensor([a, b], layout=torch.jagged) @ head
    padded = torch.nested.to_padded_tensor(jagged, 0.0)
    seed = padded.detach() * gaussian(*padded.shape, seed=5, dtype=DOUBLE)
    found = dlrp.relevance(padded, (a, b), seed=seed)
    for row, (x, r) in enumerate(zip((A, B), found, strict=True)):
        leaf = x.clone().requires_grad_()
        (alone,) = dlrp.relevance(leaf @ head, leaf, seed=seed[row, : len(x)])
        assert error(r, alone) < 1e-9


@pytest.mark.filterwarnings("ignore:.*nested.*:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_at_the_ends_are_refused_by_name(layout):
    given = torch.nested.nested_tensor([A, B], layout=layout)
    with pytest.raises(dlrp.UnsupportedTensorError, match=r"'input' is a nested tensor .*to_padded_tensor"):
        dlrp.explain(nn.Linear(4, 2).double(), given)
    leaf = torch.nested.nested_tensor([A, B], layout=layout, requires_grad=True)
    with pytest.raises(dlrp.UnsupportedTensorError, match=r"output 0 is a nested tensor"):
        dlrp.relevance(F.linear(leaf, weight(2, 4)), leaf)


@pytest.mark.filterwarnings("ignore:.*nested.*:UserWarning")
def test_nested_tensors_of_the_strided_layout_are_refused_with_the_reason():
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    padded = torch.nested.as_nested_tensor([a, b], layout=torch.strided).to_padded_tensor(0.0)
    with pytest.raises(dlrp.UnknownOpError, match=r"NestedTensorFromTensorList.*layout=torch\.jagged, or pad"):
        dlrp.relevance(padded, (a, b))

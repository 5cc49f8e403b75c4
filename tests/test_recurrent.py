"""Recurrent layers: torch's fused kernels are explained through their primitives, as a textbook would do it by hand."""

import pytest
import torch
from torch import Tensor, nn

import dynamiclrp as dlrp
from contract import holds
from dynamiclrp.recurrence import Unfused
from models import gaussian, randomise
from oracles import error

STEPS, WIDTH, HIDDEN = 5, 4, 3
X = gaussian(2, STEPS, WIDTH, seed=7, dtype=torch.float64)


class Tagger(nn.Module):
    """A recurrent layer and a head on its last state."""

    def __init__(self, kind: type[nn.RNNBase], **options) -> None:
        super().__init__()
        self.layer = kind(WIDTH, HIDDEN, batch_first=True, **options)
        self.head = nn.Linear(HIDDEN * (2 if options.get("bidirectional") else 1), 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


LAYERS = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "rnn, tanh": (nn.RNN, {}),
    "rnn, relu": (nn.RNN, {"nonlinearity": "relu"}),
    "lstm, two layers, both directions": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "gru, two layers, both directions": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "rnn, two layers, both directions": (nn.RNN, {"num_layers": 2, "bidirectional": True}),
    "lstm, projected": (nn.LSTM, {"proj_size": 2}),
    "lstm, without biases": (nn.LSTM, {"bias": False}),
}


def tagger(name: str) -> Tagger:
    kind, options = LAYERS[name]
    model = Tagger(kind, **options)
    if "proj_size" in options:
        model.head = nn.Linear(2, 2, bias=False)
    return randomise(model, std=0.6).double()


@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers(name):
    holds(tagger(name), {"x": X})


def test_a_sequence_of_unequal_lengths():
    """Packed sequences: what lies beyond a row's end takes nothing, and the row equals itself without padding."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.GRU(WIDTH, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 2)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths.tolist(), batch_first=True, enforce_sorted=False)
            return self.head(self.layer(packed)[1][0])

    model = randomise(Packed(), std=0.6).double()
    r = dlrp.explain(model, X, lengths=torch.tensor([3, 5], dtype=torch.int16), target=0).relevances["x"]
    short = dlrp.explain(model, X[:1, :3], lengths=torch.tensor([3], dtype=torch.int16), target=0).relevances["x"]
    assert not r[0, 3:].any() and r[1, 3:].any()
    assert error(r[:1, :3], short) < 1e-9


# ---------------------------------------------------------------- the textbook, gates taking nothing (Arras et al. 2017)


def shares(r: Tensor, parts: list[Tensor], z: Tensor) -> list[Tensor]:
    """Relevance of the parts of a sum, in proportion."""
    return [r * part / z for part in parts]


def through(r: Tensor, z: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """From z = x Wᵀ + … to x, by LRP-0."""
    return x * ((r / z) @ weight)


def by_hand(model: Tagger, x: Tensor, seed: Tensor) -> Tensor:
    """Relevance of one layer in one direction, step by step backwards, in relevance form."""
    cell = {name.removesuffix("_l0"): p.detach() for name, p in model.layer.named_parameters()}
    w, u, b, c = cell["weight_ih"], cell["weight_hh"], cell["bias_ih"], cell["bias_hh"]
    step, back = {nn.LSTM: (lstm_step, lstm_back), nn.GRU: (gru_step, gru_back)}[type(model.layer)]
    states = [(torch.zeros(len(x), HIDDEN, dtype=x.dtype),) * 2]
    for t in range(STEPS):
        states.append(step(x[:, t], *states[-1], w, u, b, c))
    h = states[-1][0]
    score = h @ model.head.weight.detach().T
    r = through(seed, score, h, model.head.weight.detach()), torch.zeros_like(h)
    relevance = torch.zeros_like(x)
    for t in reversed(range(STEPS)):
        relevance[:, t], *r = back(*r, x[:, t], *states[t], *states[t + 1], w, u, b, c)
    return relevance


def lstm_gates(x, h, w, u, b, c):
    i, f, g, o = (x @ w.T + b + h @ u.T + c).chunk(4, 1)
    return i.sigmoid(), f.sigmoid(), g, o.sigmoid()


def lstm_step(x, h, memory, w, u, b, c):
    i, f, g, o = lstm_gates(x, h, w, u, b, c)
    memory = f * memory + i * g.tanh()
    return o * memory.tanh(), memory


def lstm_back(r_h, r_memory, x, h, memory, h_after, memory_after, w, u, b, c):
    i, f, g, _ = lstm_gates(x, h, w, u, b, c)
    r = r_memory + r_h  # the output gate and tanh hand all to the memory
    r_old, r_new = shares(r, [f * memory, i * g.tanh()], memory_after)
    w, u = (m.chunk(4)[2] for m in (w, u))
    return through(r_new, g, x, w), through(r_new, g, h, u), r_old


def gru_gates(x, h, w, u, b, c):
    (wr, wz, wn), (br, bz, bn) = w.chunk(3), b.chunk(3)
    (ur, uz, un), (cr, cz, cn) = u.chunk(3), c.chunk(3)
    r = (x @ wr.T + br + h @ ur.T + cr).sigmoid()
    z = (x @ wz.T + bz + h @ uz.T + cz).sigmoid()
    inner = h @ un.T + cn
    return r, z, inner, x @ wn.T + bn + r * inner


def gru_step(x, h, _, w, u, b, c):
    _, z, _, n = gru_gates(x, h, w, u, b, c)
    h = (1 - z) * n.tanh() + z * h
    return h, h


def gru_back(r_h, _, x, h, _h, h_after, _after, w, u, b, c):
    r, z, inner, n = gru_gates(x, h, w, u, b, c)
    r_new, r_old = shares(r_h, [(1 - z) * n.tanh(), z * h], h_after)
    wn, un = w.chunk(3)[2], u.chunk(3)[2]
    (r_inner,) = shares(r_new, [r * inner], n)  # the reset gate hands all to what it gates
    return through(r_new, n, x, wn), r_old + through(r_inner, inner, h, un), torch.zeros_like(h)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_gates_take_nothing_as_in_the_textbook(name):
    model = tagger(name)
    if (
        name == "gru"
    ):  # in the first step the reset gate scales this bias and nothing else: then it is no gate, but the signal
        with torch.no_grad():
            model.layer.bias_hh_l0[2 * HIDDEN :] = 0
    found = dlrp.explain(model, X, preset="cp-lrp", target=1)
    assert error(found.relevance, by_hand(model, X, found.seed)) < 1e-8


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_layer_gives_the_same(frozen):
    model = tagger("lstm, two layers, both directions")
    expected = dlrp.explain(model, X, preset="dynamic").relevance
    model.requires_grad_(not frozen)
    assert error(dlrp.explain(model, X, preset="dynamic").relevance, expected) < 1e-9


def test_cells_equal_their_layer():
    model = tagger("gru")
    cell = nn.GRUCell(WIDTH, HIDDEN).double()
    cell.load_state_dict({name.removesuffix("_l0"): p for name, p in model.layer.state_dict().items()})

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = cell, model.head

        def forward(self, x: Tensor) -> Tensor:
            h = x.new_zeros(len(x), HIDDEN)
            for t in range(STEPS):
                h = self.cell(x[:, t], h)
            return self.head(h)

    for preset in ("attnlrp", "cp-lrp", "gamma"):
        expected = dlrp.explain(model, X, preset=preset).relevance
        assert error(dlrp.explain(Loop(), X, preset=preset).relevance, expected) < 1e-9


# ---------------------------------------------------------------- other devices, where even single cells are one kernel


@pytest.mark.parametrize("name", [name for name in LAYERS if not name.startswith("rnn")])
def test_the_decomposed_layer_equals_the_layer(name):
    """On a GPU torch's own decomposition stands in for the fused cell; here it is put in on the CPU."""
    model = tagger(name)
    with torch.backends.mkldnn.flags(enabled=False):
        whole = model(X)
        with Unfused(("cpu",)):
            parts = model(X)
    torch.testing.assert_close(parts, whole)
    for preset in ("attnlrp", "cp-lrp", "gamma"):
        expected = dlrp.explain(model, X, preset=preset).relevance
        with Unfused(("cpu",)):
            assert error(dlrp.explain(model, X, preset=preset).relevance, expected) < 1e-9


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("bias", [True, False])
def test_the_decomposed_cell_equals_the_cell(kind, bias):
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = kind(WIDTH, HIDDEN, bias=bias)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            made = self.cell(x, (h, h.tanh()) if kind is nn.LSTMCell else h)
            return made[0] if kind is nn.LSTMCell else made

    model = randomise(Once(), std=0.6).double()
    x, h = X[:, 0], gaussian(2, HIDDEN, seed=8, dtype=torch.float64)
    for preset in ("attnlrp", "cp-lrp", "gamma"):
        expected = dlrp.explain(model, x, h, preset=preset).relevances
        with Unfused(("cpu",)):
            found = dlrp.explain(model, x, h, preset=preset).relevances
        for argument, r in expected.items():
            assert error(found[argument], r) < 1e-9


def test_packed_sequences_are_decomposed_too():
    layer = randomise(nn.LSTM(WIDTH, HIDDEN, bidirectional=True), std=0.6).double()
    packed = nn.utils.rnn.pack_padded_sequence(X.transpose(0, 1), [5, 3])
    with torch.backends.mkldnn.flags(enabled=False):
        whole = layer(packed)[0].data
        with Unfused(("cpu",)):
            parts = layer(packed)[0].data
    torch.testing.assert_close(parts, whole)


def test_plain_gradients_stay_fused():
    """The layer is taken apart for explanations only."""
    layer = nn.LSTM(WIDTH, HIDDEN, batch_first=True)
    dlrp.explain(Tagger(nn.LSTM).eval(), X.float())
    assert type(layer(X.float())[0].grad_fn).__name__ in ("MkldnnRnnLayerBackward0", "TransposeBackward0")

"""Every error and warning: its class, that it says what, where, what was expected and what to do, and that it leaves
nothing behind.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dynamiclrp as dlrp
from dynamiclrp.ops import OPS
from models import IDS, Mlp, ResNet, example, gaussian, gpt2, leaves_nothing_behind, mlp, randomise, resnet


@contextmanager
def refuses(error: type[Exception], *words: str, model: nn.Module | None = None, tensors: tuple = ()) -> Iterator[None]:
    """The block raises this error, with these words in its message, and leaves nothing behind."""
    with leaves_nothing_behind(model, *tensors), pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


@pytest.fixture
def net() -> Mlp:
    return mlp()


@pytest.fixture
def x() -> Tensor:
    return gaussian(2, 6).requires_grad_()


# ---------------------------------------------------------------- outputs without a graph


def test_an_output_made_under_no_grad(net, x):
    with torch.no_grad():
        y = net(x)
    with refuses(
        dlrp.NoGraphError, "output 0", "(2, 4)", "no_grad", "requires_grad_()", "explain", model=net, tensors=(x,)
    ):
        dlrp.relevance(y, x)


def test_a_detached_output(net, x):
    with refuses(dlrp.NoGraphError, "output 0", "(2, 4)", "detached", "requires_grad_()", model=net, tensors=(x,)):
        dlrp.relevance(net(x).detach(), x)


def test_an_output_made_in_inference_mode(net, x):
    with torch.inference_mode():
        y = net(x)
    with refuses(
        dlrp.NoGraphError, "output 0", "(2, 4)", "inference mode", "requires_grad_()", model=net, tensors=(x,)
    ):
        dlrp.relevance(y, x)


def test_an_output_that_is_a_leaf(x):
    with refuses(dlrp.NoGraphError, "output 0", "(2, 6)", "a leaf", tensors=(x,)):
        dlrp.relevance(x, x)


def test_the_second_of_two_outputs_has_no_graph(net, x):
    with refuses(dlrp.NoGraphError, "output 1", model=net, tensors=(x,)):
        dlrp.relevance([net(x), net(x).detach()], x)


@pytest.mark.parametrize("mode, cause", [(torch.no_grad, "no_grad"), (torch.inference_mode, "inference mode")])
def test_a_model_that_switches_gradients_off(mode, cause):
    class Off(Mlp):
        def forward(self, x):
            with mode():
                return super().forward(x)

    model = randomise(Off())
    with refuses(dlrp.NoGraphError, "(2, 4)", cause, model=model):
        dlrp.explain(model, gaussian(2, 6))


def test_a_tensor_made_in_inference_mode_can_still_be_explained(net):
    """Data loaders and tokenizers run under inference mode; the values are as good as any."""
    with torch.inference_mode():
        x = gaussian(2, 6)
    with leaves_nothing_behind(net):
        a = dlrp.explain(net, x)
    assert torch.equal(a.relevance, dlrp.explain(net, gaussian(2, 6)).relevance)


# ---------------------------------------------------------------- freed graphs


@pytest.mark.parametrize("preset", ["attnlrp", "gradient", "dynamic", "gamma", "epsilon"])
@pytest.mark.parametrize("build", [mlp, resnet, gpt2])
def test_a_graph_that_an_earlier_call_freed(build, preset):
    model = build()
    x = example(model)
    y = model(x) if not hasattr(model, "transformer") else model(inputs_embeds=x, use_cache=False).logits
    dlrp.relevance(y, x, preset=preset)
    with refuses(dlrp.FreedGraphError, "freed", "forward pass again", "retain_graph=True", model=model, tensors=(x,)):
        dlrp.relevance(y, x, preset=preset)


def test_a_saved_value_that_was_overwritten(x):
    """Autograd kept a tensor and somebody changed it: relevance from the new value would be wrong."""
    w = gaussian(6, 4, seed=1).requires_grad_()
    h = x * 2
    y = h @ w
    with torch.no_grad():
        h.mul_(3)
    with refuses(dlrp.FreedGraphError, "Mm", "in-place", tensors=(x, w)):
        dlrp.relevance(y, x, preset="gamma")


# ---------------------------------------------------------------- inputs


def test_an_input_that_the_output_does_not_depend_on(net, x):
    other = gaussian(3, 5).requires_grad_()
    with refuses(
        dlrp.UnusedInputError, "input 1", "(3, 5)", "do not depend", "very tensor", model=net, tensors=(x, other)
    ):
        dlrp.relevance(net(x), [x, other])


def test_a_view_made_after_the_forward_pass(net, x):
    y = net(x)
    with refuses(dlrp.UnusedInputError, "input 0", "(12,)", "very tensor", model=net, tensors=(x,)):
        dlrp.relevance(y, x.view(-1))


def test_an_input_that_does_not_require_gradients(net):
    x = gaussian(2, 6)
    with refuses(dlrp.UnusedInputError, "input 0", "(2, 6)", "requires_grad_()", model=net, tensors=(x,)):
        dlrp.relevance(net(x), x)


@pytest.mark.parametrize("what", ["outputs", "inputs"])
def test_something_that_is_no_tensor(net, x, what):
    y = net(x)
    given = {"outputs": y, "inputs": x} | {what: "x"}
    with refuses(TypeError, what, "expected a tensor", model=net, tensors=(x,)):
        dlrp.relevance(**given)


class Counts(nn.Module):
    """Uses integers as numbers, not as token ids."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, counts):
        return self.head(counts.float())


def test_integers_that_reach_no_embedding():
    model = Counts()
    counts = torch.arange(12).reshape(2, 6)
    with refuses(dlrp.NoInputError, "counts", "embedding", "float", model=model):
        dlrp.explain(model, counts)


def test_a_float_argument_that_is_not_used(net):
    class Ignores(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, 3))

        def forward(self, x):
            return self.weight * 2

    model = Ignores()
    with refuses(dlrp.NoInputError, "x", "reaches the output", model=model):
        dlrp.explain(model, gaussian(2, 6))


def test_no_tensor_arguments_at_all(net):
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, 3))

        def forward(self, n):
            return self.weight * n

    model = Constant()
    with refuses(dlrp.NoInputError, "none", "float tensors", model=model):
        dlrp.explain(model, 3)


def test_a_model_that_is_no_module():
    with refuses(TypeError, "torch.nn.Module", "function", "relevance"):
        dlrp.explain(lambda x: x, gaussian(2, 6))


# ---------------------------------------------------------------- targets and seeds


@pytest.mark.parametrize("target", [4, -5, [0, 4], torch.tensor([0, 9]), (7,)])
def test_a_target_out_of_range(net, target):
    with refuses(dlrp.TargetError, "out of range", "(2, 4)", "4", model=net):
        dlrp.explain(net, gaussian(2, 6), target=target)


@pytest.mark.parametrize("target", [[0], [0, 1, 2], torch.tensor([1]), []])
def test_not_one_target_for_each_row(net, target):
    with refuses(dlrp.TargetError, f"{len(target)} targets", "2 rows", "one per row", model=net):
        dlrp.explain(net, gaussian(2, 6), target=target)


@pytest.mark.parametrize("target", ["cat", True, 1.0, {"a": 1}])
def test_a_target_of_the_wrong_type(net, target):
    with refuses(dlrp.TargetError, repr(target), "int", "callable", "seed tensor", model=net):
        dlrp.explain(net, gaussian(2, 6), target=target)


@pytest.mark.parametrize("target", [[0, "1"], [0, True], torch.tensor([[0, 1], [1, 2]]), torch.tensor([True, False])])
def test_targets_that_are_no_integers(net, target):
    with refuses(dlrp.TargetError, "expected integers", model=net):
        dlrp.explain(net, gaussian(2, 6), target=target)


@pytest.mark.parametrize("target, wanted", [((1, 2), 1), ((), 1)])
def test_a_tuple_of_the_wrong_length(net, target, wanted):
    with refuses(dlrp.TargetError, str(target), f"{len(target)} indices", f"expected {wanted}", "(4,)", model=net):
        dlrp.explain(net, gaussian(2, 6), target=target)


def test_a_tuple_of_the_wrong_length_for_tokens():
    model = gpt2()
    with refuses(dlrp.TargetError, "(3,)", "1 indices", "expected 2", "(5, 40)", model=model):
        dlrp.explain(model, IDS, target=(3,))


def test_a_target_for_a_single_score(net):
    class Score(Mlp):
        def forward(self, x):
            return super().forward(x).sum()

    model = randomise(Score())
    with refuses(dlrp.TargetError, "2", "single score", "expected None", model=model):
        dlrp.explain(model, gaussian(2, 6), target=2)


@pytest.mark.parametrize("target", [None, 0, lambda y: y.sum(1)])
def test_an_empty_output(net, target):
    class FindsNothing(Mlp):
        def forward(self, x):
            return super().forward(x)[:, :0]

    model = randomise(FindsNothing())
    with refuses(dlrp.TargetError, "(2, 0)", "empty", "found nothing", model=model):
        dlrp.explain(model, gaussian(2, 6), target=target)


def test_a_callable_that_returns_a_number(net):
    with refuses(dlrp.TargetError, "float", "does not depend on the output", "lambda", model=net):
        dlrp.explain(net, gaussian(2, 6), target=lambda out: out[0, 1].item())


def test_a_callable_that_returns_a_detached_tensor(net):
    with refuses(dlrp.TargetError, "Tensor", "does not depend on the output", "lambda", model=net):
        dlrp.explain(net, gaussian(2, 6), target=lambda out: out.detach()[:, 1])


def test_a_callable_that_raises_is_heard(net):
    with refuses(IndexError, model=net):
        dlrp.explain(net, gaussian(2, 6), target=lambda out: out[:, 99])


def test_a_seed_of_the_wrong_shape(net, x):
    with refuses(dlrp.TargetError, "(2,)", "(2, 4)", model=net, tensors=(x,)):
        dlrp.relevance(net(x), x, seed=torch.ones(2))
    with refuses(dlrp.TargetError, "(4,)", "(2, 4)", model=net):
        dlrp.explain(net, x.detach(), target=torch.ones(4))


@pytest.mark.parametrize("seed", [[None], [None] * 3])
def test_not_one_seed_for_each_output(net, x, seed):
    with refuses((ValueError, dlrp.TargetError), f"{len(seed)} seeds", "2 outputs", model=net, tensors=(x,)):
        dlrp.relevance([net(x), net(x)], x, seed=seed)


class Dead(Mlp):
    """The last scores are exactly zero."""

    def forward(self, x):
        return super().forward(x) * torch.tensor([1.0, 1.0, 0.0, 0.0])


def test_a_seed_where_the_output_is_zero(x):
    model = randomise(Dead())
    seed = torch.tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    with refuses(dlrp.ZeroOutputError, "1 of 3", "exactly zero", "Seed only where", model=model, tensors=(x,)):
        dlrp.relevance(model(x), x, seed=seed)
    with refuses(dlrp.ZeroOutputError, "1 of 3", "exactly zero", model=model):
        dlrp.explain(model, x.detach(), target=seed)


@pytest.mark.parametrize(
    "target, words",
    [(3, "target 3"), ([2, 3], "target [2, 3]"), ((2,), "target (2,)"), (lambda o: o[:, 3], "callable")],
)
def test_a_target_whose_score_is_zero(target, words):
    model = randomise(Dead())
    with refuses(dlrp.ZeroOutputError, words, "exactly zero", model=model):
        dlrp.explain(model, gaussian(2, 6), target=target)


def test_an_output_that_is_all_zero(x):
    y = x * 0
    with refuses(dlrp.ZeroOutputError, "largest logit", "(2, 6)", "another target", tensors=(x,)):
        dlrp.relevance(y, x)


class Returns(Mlp):
    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(super().forward(x))


@pytest.mark.parametrize("wrap", [lambda y: "text", lambda y: {"n": 3}, lambda y: (y.argmax(-1),), lambda y: None])
def test_a_model_that_returns_no_scores(wrap):
    model = randomise(Returns(wrap))
    kind = type(wrap(torch.ones(1))).__name__
    with refuses(dlrp.TargetError, kind, "logits", "wrap the model", model=model):
        dlrp.explain(model, gaussian(2, 6))


# ---------------------------------------------------------------- presets and rules


@pytest.mark.parametrize(
    "name, meant", [("atnlrp", "attnlrp"), ("dynamc", "dynamic"), ("epsilon-plus-flt", "epsilon-plus-flat")]
)
def test_an_unknown_preset(net, x, name, meant):
    words = (f"unknown preset {name!r}", f"Did you mean {meant!r}", "cp-lrp", "gradient")
    with refuses(dlrp.PresetError, *words, model=net, tensors=(x,)):
        dlrp.relevance(net(x), x, preset=name)
    with refuses(dlrp.PresetError, *words, model=net):
        dlrp.explain(net, gaussian(2, 6), preset=name)


@pytest.mark.parametrize("what", ["zzz", None, 3, dlrp.Gamma(0.25), {"conv": dlrp.Gamma(0.25)}])
def test_a_preset_like_no_other(what):
    with refuses(dlrp.PresetError, "unknown preset", "Known:", "attnlrp"):
        dlrp.preset(what)


@pytest.mark.parametrize("name", list(dlrp.PRESETS))
def test_a_parameter_that_a_preset_does_not_take(name):
    with refuses(dlrp.PresetError, name, "does not take", "'colour'"):
        dlrp.preset(name, colour=3)


def test_parameters_for_a_preset_object():
    with refuses(dlrp.PresetError, "['gamma']", "name", "|"):
        dlrp.preset(dlrp.preset("gamma"), gamma=0.1)


@pytest.mark.parametrize("bounds", [{}, {"low": 0.0}, {"high": 1.0}])
def test_a_box_without_bounds(bounds):
    with refuses(dlrp.PresetError, "epsilon-gamma-box", "low=", "high="):
        dlrp.preset("epsilon-gamma-box", **bounds)


@pytest.mark.parametrize("rule", [0.25, "gamma", dlrp.Gamma, None])
def test_an_override_that_is_no_rule(rule):
    with refuses(dlrp.PresetError, "'conv'", "expected a rule", "Gamma(0.25)", repr(rule)):
        dlrp.preset("attnlrp") | {"conv": rule}


def test_an_override_that_matches_no_module(net):
    preset = dlrp.preset("attnlrp") | {"frist": dlrp.Epsilon(0.1)}
    with refuses(dlrp.PresetError, "'frist'", "no module", "first", "second", "linear", model=net):
        dlrp.explain(net, gaussian(2, 6), preset=preset)


def test_an_override_by_module_where_no_model_is_known(net, x):
    preset = dlrp.preset("attnlrp") | {"head": dlrp.Epsilon(0.1)}
    with refuses(dlrp.PresetError, "head", "explain", "relevance()", model=net, tensors=(x,)):
        dlrp.relevance(net(x), x, preset=preset)


def test_a_layer_that_does_not_exist(net):
    with refuses(dlrp.LRPError, "'thrid'", "no such module", "first", "third", model=net):
        dlrp.explain(net, gaussian(2, 6), layers=["first", "thrid"])


def test_a_layer_that_did_not_run(net):
    net.spare = nn.Linear(2, 2)
    with refuses(dlrp.LRPError, "'spare'", "did not contribute", model=net):
        dlrp.explain(net, gaussian(2, 6), layers=["spare"])


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: dlrp.AlphaBeta(2, 2), ("AlphaBeta", "alpha - beta = 1")),
        (lambda: dlrp.AlphaBeta(0.5, -0.5), ("AlphaBeta", "negative")),
        (lambda: dlrp.Epsilon(1e-6, top=0), ("Epsilon", "top=0", "0 < top <= 1")),
        (lambda: dlrp.Gamma(0.25, top=1.5), ("Gamma", "top=1.5", "0 < top <= 1")),
        (lambda: dlrp.Epsilon(1e-6, bias="no"), ("Epsilon", "'no'", "proportional", "absolute")),
        (lambda: dlrp.preset("dynamic", top=2.0), ("top=2.0", "0 < top <= 1")),
    ],
)
def test_rules_with_impossible_parameters(make, words):
    with refuses(ValueError, *words):
        make()


# ---------------------------------------------------------------- unknown operations


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grad * (gate + x * gate * (1 - gate))


class Custom(nn.Module):
    def __init__(self, double=Double.apply, swish=Swish.apply):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 9), nn.Linear(9, 8), nn.Linear(8, 4)
        self.double, self.swish = double, swish

    def forward(self, x):
        x = self.swish(self.first(self.double(x)))
        return self.third(self.swish(self.second(x)))


@pytest.fixture
def registry() -> Iterator[None]:
    """Rows registered by a test are gone after it."""
    rows = dict(OPS)
    yield
    OPS.clear()
    OPS.update(rows)


def test_unknown_operations_are_listed_all_at_once(x):
    model = randomise(Custom())
    words = ("2 operation(s)", "SwishBackward x2", "(2, 9)", "DoubleBackward x1", "(2, 6)", "register(", "activation")
    with refuses(dlrp.UnknownOpError, *words, model=model, tensors=(x,)):
        dlrp.relevance(model(x), x)
    with refuses(dlrp.UnknownOpError, *words, model=model):
        dlrp.explain(model, gaussian(2, 6))


def test_unknown_operations_may_keep_their_gradient(x):
    """On request, and then for each of them: the plain functions under the same rule give the same."""
    model, plain = randomise(Custom()), randomise(Custom(lambda x: 2 * x, nn.functional.silu))
    a = dlrp.explain(model, x.detach(), target=1, on_missing="gradient")
    preset = dlrp.preset("default") | {"Silu": dlrp.Gradient()}
    torch.testing.assert_close(a.relevance, dlrp.explain(plain, x.detach(), target=1, preset=preset).relevance)
    assert "Swish" in str(a.plan) and "Double" in str(a.plan)
    with refuses(dlrp.UnknownOpError, "SwishBackward", model=model):  # the next call is strict again
        dlrp.explain(model, x.detach(), target=1)


def test_a_choice_for_unknown_operations_that_is_none(net, x):
    words = ("'ignore'", "'error'", "'gradient'")
    with refuses(ValueError, *words, model=net, tensors=(x,)):
        dlrp.relevance(net(x), x, on_missing="ignore")
    with refuses(ValueError, *words, model=net):
        dlrp.explain(net, gaussian(2, 6), on_missing="ignore")


def test_an_unknown_operation_off_the_way_does_not_matter(x):
    class Weights(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(gaussian(4, 6, seed=3))

        def forward(self, x):
            return x @ Double.apply(self.weight).t()

    model = Weights()
    (r,) = dlrp.relevance(model(x), x)
    y = model(x).detach()
    top = y.argmax(-1)
    torch.testing.assert_close(r, x.detach() * 2 * model.weight.detach()[top])


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic", "epsilon"])
def test_registered_operations_work(registry, preset):
    model = randomise(Custom())
    plain = randomise(Custom(lambda x: 2 * x, nn.functional.silu))
    dlrp.register("DoubleBackward", "scale", forward=lambda n, x: 2 * x)
    dlrp.register(
        "SwishBackward", "activation", forward=lambda n, x: nn.functional.silu(x),
        ratio=lambda n: torch.sigmoid(n.tensors[0]),
    )  # fmt: skip
    x = gaussian(2, 6)
    a, b = dlrp.explain(model, x, preset=preset), dlrp.explain(plain, x, preset=preset)
    torch.testing.assert_close(a.relevance, b.relevance)
    assert a.plan.statistics.live == b.plan.statistics.live


def test_a_row_that_is_there_already(registry):
    with refuses(dlrp.PresetError, "AddmmBackward0", "already", "replace=True"):
        dlrp.register("AddmmBackward0", "linear")


def test_a_row_of_an_unknown_kind(registry):
    with refuses(dlrp.PresetError, "'gizmo'", "activation", "movement"):
        dlrp.register("GizmoBackward", "gizmo")
    assert "GizmoBackward" not in OPS


# ---------------------------------------------------------------- lost activations


class Shifted(nn.Module):
    """A mean over `x + k`: the paper's rule needs x + k, and k leaves no trace on the graph."""

    def __init__(self):
        super().__init__()
        self.register_buffer("k", gaussian(6, seed=9))

    def forward(self, x):
        return (x + self.k).sum(-1, keepdim=True)


def test_a_lost_activation(x):
    model = Shifted()
    words = ("Add", "Sum", "(2, 6)", "(2, 1)", "operand 0", "AbsoluteShare", "explain", "override")
    with refuses(dlrp.LostActivationError, *words, model=model, tensors=(x,)):
        dlrp.relevance(model(x), x, preset="dynamic")


def test_explain_records_what_would_be_lost():
    model, x = Shifted(), gaussian(2, 6)
    with leaves_nothing_behind(model):
        a = dlrp.explain(model, x, preset="dynamic")
    h = (x + model.k).double()
    # by hand: the sum shares out |h| / Σ|h|, and the literal k takes nothing of it
    expected = h.sum(-1, keepdim=True) * h.abs() / h.abs().sum(-1, keepdim=True)
    torch.testing.assert_close(a.relevance.double(), expected, rtol=1e-5, atol=1e-6)


def test_an_explainer_that_learnt_to_record_stays_right():
    model = Shifted()
    explainer = dlrp.Explainer(model, "dynamic")
    for seed in (1, 2):
        x = gaussian(3, 6, seed=seed)
        h = (x + model.k).double()
        expected = h.sum(-1, keepdim=True) * h.abs() / h.abs().sum(-1, keepdim=True)
        torch.testing.assert_close(explainer(x).relevance.double(), expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- code that hides its operations


def test_the_output_of_a_compiled_module(net, x):
    y = torch.compile(net, backend="aot_eager")(x)
    with refuses(dlrp.OpaqueGraphError, "CompiledFunction", "force_eager", "_orig_mod", model=net, tensors=(x,)):
        dlrp.relevance(y, x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_scripted_module(net):
    scripted = torch.jit.script(net)
    with refuses(dlrp.OpaqueGraphError, "scripted", "plain module", model=net):
        dlrp.Explainer(scripted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_scripted_function_inside(x):
    """Primitive at the first call, one opaque node later."""

    @torch.jit.script
    def gate(x):
        return x * torch.sigmoid(x) * torch.tanh(x) + x.exp()

    for _ in range(3):
        y = gate(x)
    assert "DifferentiableGraph" in y.grad_fn.name()
    with refuses(dlrp.OpaqueGraphError, "scripted", "plain", tensors=(x,)):
        dlrp.relevance(y, x)


def test_a_reentrant_checkpoint(net, x):
    y = checkpoint(net, x, use_reentrant=True)
    with refuses(dlrp.OpaqueGraphError, "Checkpoint", "use_reentrant=False", model=net, tensors=(x,)):
        dlrp.relevance(y, x)


# ---------------------------------------------------------------- training mode


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.inner(x))


def warned(call) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [w for w in caught if issubclass(w.category, dlrp.TrainingModeWarning)]


@pytest.mark.parametrize("build", [lambda model: lambda x: dlrp.explain(model, x), lambda model: dlrp.Explainer(model)])
def test_a_model_in_training_mode(build):
    model = randomise(Noisy()).train()
    call = build(model)
    (warning,) = warned(lambda: call(gaussian(4, 6)))
    text = str(warning.message)
    assert "inner.1" in text and "inner.3" in text and "dropout" in text and "batch norm" in text
    assert "model.eval()" in text
    assert all(module.training for module in model.modules())


def test_the_warning_points_at_the_call():
    model = randomise(Noisy()).train()
    x = gaussian(4, 6)
    explainer = dlrp.Explainer(model)
    for call in (lambda: dlrp.explain(model, x), lambda: explainer(x)):
        (warning,) = warned(call)
        assert (warning.filename, warning.lineno) == (__file__, call.__code__.co_firstlineno)


def test_one_part_in_training_mode():
    model = randomise(Noisy())
    model.inner[3].train()
    (warning,) = warned(lambda: dlrp.explain(model, gaussian(4, 6)))
    assert "inner.3" in str(warning.message) and "inner.1" not in str(warning.message)


@pytest.mark.parametrize(
    "model", [randomise(Noisy()), mlp().train(), nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.0)).train()]
)
def test_no_warning_where_nothing_is_random(model):
    assert not warned(lambda: dlrp.explain(model, gaussian(4, 6)))


# ---------------------------------------------------------------- relevance that is not finite


class Roots(nn.Module):
    """sqrt has an infinite slope at 0: under the gradient the first row's relevance is 0 * inf."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.first(x * x).sqrt().abs())


@pytest.fixture
def rooted() -> tuple[Roots, Tensor]:
    model = randomise(Roots())
    with torch.no_grad():
        model.first.weight.abs_()
    x = gaussian(2, 4, seed=3)
    x[0] = 0
    return model, x


def test_explain_names_the_node_where_relevance_stopped_being_finite(rooted):
    model, x = rooted
    with refuses(dlrp.NonFiniteError, "not finite", "default", "Sqrt", "(2, 4)", model=model):
        dlrp.explain(model, x, target=0)


def test_relevance_names_the_node_if_it_may_run_again(rooted):
    model, x = rooted
    x = x.requires_grad_()
    y = model(x)
    with refuses(dlrp.NonFiniteError, "not finite", "Sqrt", "(2, 4)", model=model, tensors=(x,)):
        dlrp.relevance(y, x, retain_graph=True)
    (now,) = torch.autograd.grad(y.sum(), model.head.weight, retain_graph=True)
    (true,) = torch.autograd.grad(model(x).sum(), model.head.weight)
    assert torch.equal(now, true)


def test_relevance_says_how_to_have_the_node_named(rooted):
    model, x = rooted
    x = x.requires_grad_()
    with refuses(
        dlrp.NonFiniteError, "not finite", "default", "retain_graph=True", "explain", model=model, tensors=(x,)
    ):
        dlrp.relevance(model(x), x)


def test_the_first_of_several_bad_nodes_is_named(rooted):
    """Sqrt, the product below it and the power at the bottom all hand down inf; relevance meets Sqrt first."""

    class Two(Roots):
        def forward(self, x):
            return self.head(self.first(x.abs().pow(0.5)).sqrt())

    roots, x = rooted
    model = Two().eval()
    model.load_state_dict(roots.state_dict())
    with refuses(dlrp.NonFiniteError, "(Sqrt)", "(2, 4)", model=model):
        dlrp.explain(model, x, target=0)


def test_a_model_whose_output_is_not_finite():
    """Nothing to explain in a nan: said so, not handed on."""

    class Nan(Mlp):
        def forward(self, x):
            return super().forward(x) * float("nan")

    model = randomise(Nan())
    with refuses(dlrp.LRPError, "not finite", model=model):
        dlrp.explain(model, gaussian(2, 6), target=1)


# ---------------------------------------------------------------- complex and sparse tensors


def test_complex_tensors():
    x = torch.complex(gaussian(2, 3), gaussian(2, 3, seed=1)).requires_grad_()
    y = x * 2
    with refuses(dlrp.UnsupportedTensorError, "output 0", "complex", "complex64", "view_as_real", tensors=(x,)):
        dlrp.relevance(y, x)
    with refuses(dlrp.UnsupportedTensorError, "input 0", "complex", "complex64", "view_as_real", tensors=(x,)):
        dlrp.relevance(y.real * 1.0, x)


def test_sparse_tensors():
    x = gaussian(3, 3).to_sparse().requires_grad_()
    y = torch.sparse.mm(x, gaussian(3, 2, seed=1))
    with refuses(dlrp.UnsupportedTensorError, "input 0", "sparse", "to_dense()", tensors=(x,)):
        dlrp.relevance(y, x)
    dense = gaussian(3, 3).requires_grad_()
    with refuses(dlrp.UnsupportedTensorError, "output 0", "sparse", "to_dense()", tensors=(dense,)):
        dlrp.relevance(dense.to_sparse(), dense, seed=torch.ones(3, 3))


class Spectrum(nn.Module):
    def forward(self, x):
        return x.real.sum(-1, keepdim=True)


class Adjacency(nn.Module):
    def forward(self, x):
        return torch.sparse.mm(x, torch.ones(3, 2))


@pytest.mark.parametrize(
    "model, x, words",
    [
        (Spectrum(), torch.complex(gaussian(2, 3), gaussian(2, 3, seed=1)), ("complex", "view_as_real")),
        (Adjacency(), gaussian(3, 3).to_sparse(), ("sparse", "to_dense()")),
    ],
)
def test_explain_refuses_complex_and_sparse_arguments(model, x, words):
    with refuses(dlrp.UnsupportedTensorError, "x", *words, model=model):
        dlrp.explain(model, x)


# ---------------------------------------------------------------- the tree itself


def test_every_error_is_one_of_ours():
    for name in dlrp.errors.__all__:
        error = getattr(dlrp, name)
        assert issubclass(error, Warning if name.endswith("Warning") else dlrp.LRPError)
        assert error.__doc__
        assert name in dlrp.errors.__doc__


def test_models_that_do_not_run_are_heard(net):
    """The model's own errors are not ours to hide."""
    with refuses(RuntimeError, "shapes cannot be multiplied", model=net):
        dlrp.explain(net, gaussian(2, 5))
    model = randomise(ResNet())
    with refuses(TypeError, model=model):
        dlrp.explain(model, gaussian(2, 3, 8, 8), colour=3)

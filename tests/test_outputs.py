"""Models that return several things: which of them is explained is said, never guessed.

One tensor, `logits`, or the only float tensor is taken, and the result names it. Of several an error lists all. `output=` says
which, `target=("sex", 1)` too, and a callable target gets what the model returned, whole.
"""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import dynamiclrp as dlrp

Pair = namedtuple("Pair", ["age", "sex"])


@dataclass(frozen=True)
class Record:
    age: Tensor
    sex: Tensor


FORMS = {
    "dict": lambda age, sex: {"age": age, "sex": sex},
    "tuple": lambda age, sex: (age, sex),
    "list": lambda age, sex: [age, sex],
    "named tuple": Pair,
    "dataclass": Record,
    "dict with more": lambda age, sex: {"n": 3, "age": age, "sex": sex, "none": None, "ids": age.argmax(-1)},
}


class Heads(nn.Module):
    """Two heads on one body."""

    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.age, self.sex = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2)
        self.form, self.passes = form, 0

    def forward(self, x):
        self.passes += 1
        y = self.body(x).relu()
        return self.form(self.age(y), self.sex(y))


def case(form="dict"):
    return Heads(FORMS[form]).eval(), torch.randn(2, 4, generator=torch.Generator().manual_seed(1))


def alone(which):
    """The same explanation of a model that returns one head only."""
    model, x = Heads(lambda age, sex: (age, sex)[which]).eval(), case()[1]
    return lambda target: dlrp.explain(model, x, target=target)


@pytest.mark.parametrize("target", [None, 1, [0, 1], torch.ones(2, 2)], ids=["none", "int", "each", "seed"])
@pytest.mark.parametrize("form", FORMS)
def test_several_tensors_are_listed(form, target):
    model, x = case(form)
    with pytest.raises(dlrp.TargetError) as raised:
        dlrp.explain(model, x, target=target)
    names = ["'0' (2, 3)", "'1' (2, 2)"] if form in ("tuple", "list") else ["'age' (2, 3)", "'sex' (2, 2)"]
    for word in (*names, "output=", "target=(name, 1)", "callable"):
        assert word in str(raised.value)


@pytest.mark.parametrize("form", FORMS)
def test_one_is_named(form):
    model, x = case(form)
    plain = form in ("tuple", "list")
    wanted = alone(1)(1)
    for a in (
        dlrp.explain(model, x, output="1" if plain else "sex", target=1),
        dlrp.explain(model, x, target=("1" if plain else "sex", 1)),
        dlrp.explain(model, x, output=lambda out: out[1] if plain else getattr(out, "sex", None) if form in ("named tuple", "dataclass") else out["sex"], target=1),
    ):  # fmt: skip
        torch.testing.assert_close(a.relevance, wanted.relevance)
        assert torch.equal(a.prediction, wanted.prediction)
    named = dlrp.explain(model, x, target=("1" if plain else "sex", 1))
    assert named.output == ("1" if plain else "sex") and f"output={named.output}" in repr(named)


@pytest.mark.parametrize("form", ["tuple", "list", "dict", "named tuple"])
@pytest.mark.parametrize("index", [1, -1])
def test_one_is_counted(form, index):
    model, x = case(form)
    torch.testing.assert_close(dlrp.explain(model, x, output=index, target=1).relevance, alone(1)(1).relevance)


HEAD_TARGETS = [("sex",), ("sex", [1, 0]), ("sex", lambda y: y[:, 1] - y[:, 0]), ("sex", torch.ones(2, 2))]


@pytest.mark.parametrize("target", HEAD_TARGETS, ids=["largest", "each", "callable", "seed"])
def test_a_head_takes_all_targets(target):
    model, x = case()
    wanted = alone(1)(target[1] if len(target) > 1 else None)
    torch.testing.assert_close(dlrp.explain(model, x, target=target).relevance, wanted.relevance)


def test_a_callable_of_a_named_output_gets_its_tensor():
    model, x = case()
    a = dlrp.explain(model, x, output="sex", target=lambda y: y[:, 1] - y[:, 0])
    torch.testing.assert_close(a.relevance, alone(1)(lambda y: y[:, 1] - y[:, 0]).relevance)


@pytest.mark.parametrize("wrong", ["sx", 2, -3, True, "n", "none"])
def test_an_output_that_is_not_there(wrong):
    model, x = case("dict with more" if isinstance(wrong, str) else "dict")
    with pytest.raises(dlrp.TargetError, match="Known: 'age'"):
        dlrp.explain(model, x, output=wrong)


def test_two_names_are_one_too_many():
    model, x = case()
    with pytest.raises(dlrp.TargetError, match="give one of them"):
        dlrp.explain(model, x, output="age", target=("sex", 1))


@pytest.mark.parametrize("asked", [{"output": "sex"}, {"target": ("sex", 1)}, {"output": 0}])
def test_one_tensor_has_no_name(asked):
    with pytest.raises(dlrp.TargetError, match="returned one tensor"):
        dlrp.explain(nn.Linear(4, 3), torch.randn(2, 4), **asked)


def test_an_output_that_is_a_function_must_give_a_tensor():
    model, x = case()
    with pytest.raises(dlrp.TargetError, match="expected a tensor"):
        dlrp.explain(model, x, output=lambda out: out)


# ---------------------------------------------------------------- callables on all of it


@pytest.mark.parametrize("preset", ["attnlrp", "dynamic", "gamma"])
def test_a_callable_gets_all_of_it(preset):
    """Also where its score uses several of the outputs: relevance is the sum of what each hands back."""
    model, x = case()
    a = dlrp.explain(model, x, target=lambda out: out["age"][:, 0] - 2 * out["sex"][:, 1], preset=preset)
    one, other = (dlrp.explain(model, x, target=t, preset=preset).relevance for t in (("age", 0), ("sex", 1)))
    torch.testing.assert_close(a.relevance, one - 2 * other, rtol=1e-4, atol=1e-5)
    out = model(x)
    torch.testing.assert_close(a.score, (out["age"][:, 0] - 2 * out["sex"][:, 1]).detach())
    assert a.output == "age + sex" and len(a) == 2 and torch.equal(a[1].relevance, a.relevance[1:])


@pytest.mark.parametrize("form", FORMS)
def test_a_callable_on_one_of_them(form):
    model, x = case(form)

    def target(out):
        assert type(out) is type(model.form(torch.ones(1, 3), torch.ones(1, 2)))
        sex = out["sex"] if isinstance(out, dict) else out[1] if isinstance(out, (tuple, list)) else out.sex
        return sex[:, 1]

    a = dlrp.explain(model, x, target=target)
    torch.testing.assert_close(a.relevance, alone(1)(1).relevance)
    assert torch.equal(a.prediction, alone(1)(1).prediction) and a.output in ("sex", "1")


def test_one_output_made_of_another():
    """Each is its own: what probabilities say of logits is not counted twice."""
    model = Heads(lambda age, sex: {"logits": age, "more": age * 3}).eval()
    x = case()[1]
    a = dlrp.explain(model, x, target=lambda out: out["logits"][:, 0] + out["more"][:, 0])
    torch.testing.assert_close(a.relevance, 4 * alone(0)(0).relevance, rtol=1e-4, atol=1e-5)


def test_outputs_inside_outputs():
    model = Heads(lambda age, sex: {"heads": {"age": age, "sex": [sex]}}).eval()
    x = case()[1]
    with pytest.raises(dlrp.TargetError, match=r"'heads.age' \(2, 3\), 'heads.sex.0'"):
        dlrp.explain(model, x)
    for asked in ({"output": "heads.sex.0", "target": 1}, {"target": lambda out: out["heads"]["sex"][0][:, 1]}):
        torch.testing.assert_close(dlrp.explain(model, x, **asked).relevance, alone(1)(1).relevance)


def test_outputs_without_rows_in_common():
    model = Heads(lambda age, sex: (age.sum(), sex)).eval()
    x = case()[1]
    a = dlrp.explain(model, x, target=lambda out: out[0] + out[1][:, 1].sum())
    out = model(x)
    assert float(a.score) == pytest.approx(float((out[0] + out[1][:, 1].sum()).detach()), rel=1e-5)


WRONG = {
    "tensor's index": lambda y: y[:, 1],
    "key": lambda out: out["six"][:, 1],
    "attribute": lambda out: out.sex[:, 1],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_callable_that_takes_it_for_something_else(name):
    model, x = case()
    with pytest.raises(dlrp.TargetError, match=r"dict with 'age' \(2, 3\), 'sex' \(2, 2\).*output="):
        dlrp.explain(model, x, target=WRONG[name])


@pytest.mark.parametrize("wrong", [lambda out: 1.0, lambda out: out["sex"].detach(), lambda out: out])
def test_a_callable_that_depends_on_nothing(wrong):
    model, x = case()
    with pytest.raises(dlrp.TargetError, match=r"does not depend on the outputs.*'sex'"):
        dlrp.explain(model, x, target=wrong)


# ---------------------------------------------------------------- several targets, explainers, words that models own


@pytest.mark.parametrize("at_once", [1, 8])
def test_targets_of_several_heads(at_once):
    """One forward pass for each run of targets of one head."""
    model, x = case()
    explainer = dlrp.Explainer(model)
    explainer(x, target=("sex", 1))
    model.passes = 0
    targets = [("sex", 0), ("sex", 1), ("age", 2), lambda out: out["age"][:, 0]]
    found = list(explainer.each(x, targets=targets, at_once=at_once))
    assert model.passes == 2 and [a.output for a in found] == ["sex", "sex", "age", "age"]
    for target, a in zip(targets, found):
        torch.testing.assert_close(a.relevance, dlrp.explain(model, x, target=target).relevance)


def test_output_for_several_targets_and_inspect():
    model, x = case()
    found = dlrp.explain(model, x, targets=[0, 1], output="sex")
    torch.testing.assert_close(found[1].relevance, alone(1)(1).relevance)
    with pytest.raises(dlrp.TargetError, match="none is plainly"):
        dlrp.inspect(model, x)
    assert dlrp.inspect(model, x, output="age").coverage == 1.0


class Owner(nn.Module):
    """Has an argument of its own that is called output."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)})

    def forward(self, x, output="a"):
        return self.maps[output](x)


def test_a_models_own_word_comes_first():
    model, x = Owner(), torch.randn(2, 4)
    torch.testing.assert_close(
        dlrp.explain(model, x, output="b", target=1).relevance, dlrp.explain(model.maps["b"], x, target=1).relevance
    )
    pytest.importorskip("pandas")
    assert torch.equal(dlrp.explain_table(model, x, target=1).prediction, model(x).detach())


# ---------------------------------------------------------------- what is plainly the prediction


PLAIN = {
    "logits": ("logits", lambda y: {"features": y * 2, "logits": y}),
    "the only one": ("scores", lambda y: {"scores": y, "ids": y.argmax(-1)}),
    "beside a state": ("0", lambda y: (y, (y * 2, y * 3))),
    "one under two names": ("out", lambda y: {"out": y, "again": y}),
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_plain_is_taken_and_named(name):
    called, form = PLAIN[name]
    model, x = nn.Sequential(nn.Linear(4, 3), Forms(form)), torch.randn(2, 4)
    a = dlrp.explain(model, x, target=1)
    assert a.output == called and f"output={called}" in repr(a) and a.to_dict()["output"] == called
    torch.testing.assert_close(a.relevance, dlrp.explain(model[0], x, target=1).relevance)


class Forms(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, y):
        return self.form(y)


def test_a_layer_that_hands_on_more():
    """On the way the first tensor is the layer's output, as of transformers' blocks."""

    class First(nn.Module):
        def forward(self, y):
            return y[0]

    model = nn.Sequential(nn.Linear(4, 3), Forms(lambda y: (y, y * 2)), First())
    a = dlrp.explain(model, torch.randn(2, 4), target=1, layers=["1"])
    torch.testing.assert_close(a.layers["1"], a.seed)


def test_outputs_of_transformers():
    pytest.importorskip("transformers")
    from models import IDS, gpt2

    model = gpt2().double()
    wanted = dlrp.explain(model, IDS, target=4)
    assert wanted.output == "logits"
    for asked in (
        {"target": lambda out: out.logits[:, -1, 4]},
        {"target": lambda out: out["logits"][:, -1, 4]},
        {"target": lambda y: y[:, -1, 4], "output": "logits"},
        {"target": 4, "output": lambda out: out.logits},
    ):
        torch.testing.assert_close(dlrp.explain(model, IDS, **asked).relevance, wanted.relevance)
    hidden = dlrp.explain(model, IDS, output_hidden_states=True, target=lambda out: out.hidden_states[1][:, -1, 0])
    assert hidden.output == "hidden_states.1"

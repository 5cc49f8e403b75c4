"""Baselines give what their own packages give; batches equal rows; models are left as they were."""

from oracles import error  # before Zennit: makes its import of torchvision work

# isort: split
import captum.attr
import pytest
import torch
import zennit.composites
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM
from zennit.attribution import Gradient
from zennit.canonizers import SequentialMergeBatchNorm

import dynamiclrp as dlrp
from dynamiclrp import evaluate as ev
from dynamiclrp.errors import EvaluationError
from dynamiclrp.evaluate.baselines import untouched


def cnn() -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(6)
    for values in (norm.weight, norm.bias, norm.running_mean, norm.running_var):  # a trained one: merging it matters
        values.data.uniform_(0.2, 2.0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(96, 5)
    ).eval()  # fmt: skip


def plain() -> nn.Module:
    """What Captum's LRP takes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)).eval()


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 60}


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, pad_token_id=0)).eval()


def bert() -> nn.Module:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**SMALL, num_labels=3)).eval()


X = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
Y = [0, 4, 2]
IDS = torch.randint(1, 60, (3, 9), generator=torch.Generator().manual_seed(2))


def state(model: nn.Module) -> list:
    """Everything that a foreign package might leave on a model."""
    hooks = [(n, len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), sorted(vars(m))) for n, m in model.named_modules()]  # fmt: skip
    return [
        hooks,
        [
            (n, p.requires_grad, p.detach().numpy().tobytes())
            for n, p in (*model.named_parameters(), *model.named_buffers())
        ],
    ]


@pytest.mark.parametrize("name", ["Saliency", "InputXGradient", "IntegratedGradients", "DeepLift"])
def test_captum_on_images_is_captum(name):
    model = cnn()
    expected = getattr(captum.attr, name)(model).attribute(X.clone().requires_grad_(), target=torch.tensor(Y))
    assert error(ev.relevance_of(f"captum:{name}", model, X, Y), expected.detach()) < 1e-5


def test_captum_lrp_is_captum():
    model, x = plain(), torch.randn(3, 8)
    expected = captum.attr.LRP(model).attribute(x.clone().requires_grad_(), target=torch.tensor(Y))
    assert error(ev.relevance_of("captum:LRP", model, x, Y), expected.detach()) < 1e-6


def test_smoothgrad_is_a_mean_of_gradients_around_the_input():
    """Without noise it is saliency; with noise it differs, is the same at every call and leaves the generators alone."""
    model = cnn()
    saliency = ev.relevance_of("captum:Saliency", model, X, Y)
    assert error(ev.relevance_of(ev.Captum("SmoothGrad", stdevs=0.0), model, X, Y), saliency) < 1e-6
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first = ev.relevance_of("captum:SmoothGrad", model, X, Y)
    assert torch.equal(torch.rand(1), expected)
    assert error(first, saliency) > 1e-2
    for noisy in ("captum:SmoothGrad", "captum:GradientShap"):
        assert torch.equal(ev.relevance_of(noisy, model, X, Y), ev.relevance_of(noisy, model, X, Y))


@pytest.mark.parametrize("name", ["EpsilonPlusFlat", "EpsilonPlus", "EpsilonAlpha2Beta1", "EpsilonGammaBox"])
def test_zennit_is_zennit(name):
    model = cnn()
    bounds = {"low": -4.0, "high": 4.0} if name == "EpsilonGammaBox" else {}
    tensors = {k: torch.full_like(X[:1], v) for k, v in bounds.items()}
    composite = getattr(zennit.composites, name)(canonizers=[SequentialMergeBatchNorm()], **tensors)
    rows = torch.arange(3)
    with Gradient(model, composite) as attributor:
        _, expected = attributor(X, lambda out: torch.zeros_like(out).index_put((rows, torch.tensor(Y)), out[rows, Y]))
    assert error(ev.relevance_of(ev.Zennit(name, **bounds), model, X, Y), expected) < 1e-5


def test_zennit_merges_batch_norms_and_leaves_the_model_alone():
    """Zennit merges by canonizer, we on the graph: the same relevance, to the stabilisers."""
    model = cnn()
    before = state(model)
    theirs = ev.relevance_of("zennit:EpsilonPlus", model, X, Y)
    assert error(theirs, ev.relevance_of("epsilon-plus", model, X, Y)) < 1e-3
    assert state(model) == before


@pytest.mark.parametrize(
    "method", ["captum:LRP", "captum:DeepLift", "zennit:EpsilonPlus", "attnlrp", "captum:IntegratedGradients"]
)
def test_nothing_is_left_on_the_model(method):
    model = cnn()  # Captum's LRP fails half-way on it
    before = state(model)
    try:
        ev.relevance_of(method, model, X, Y)
    except (TypeError, AttributeError, AssertionError):
        assert method == "captum:LRP"
    assert state(model) == before


def test_whatever_a_foreign_package_does_is_undone():
    model = cnn()
    before, weight = state(model), model[0].weight
    with pytest.raises(RuntimeError, match="half-way"), untouched(model):
        model[0].weight.data = torch.zeros_like(weight)
        model[1].running_mean.data = torch.zeros(6)
        model[0].rule = "foreign"
        model[2].register_forward_hook(lambda *_: None)
        model[6].register_forward_pre_hook(lambda *_: None)
        model[6].weight.requires_grad_(False)
        raise RuntimeError("half-way")
    assert state(model) == before and model[0].weight is weight


def test_handles_of_the_users_hooks_still_work():
    model = plain()
    calls = []
    handle = model[0].register_forward_hook(lambda *_: calls.append(1))
    ev.relevance_of("captum:LRP", model, torch.randn(3, 8), Y)
    seen = len(calls)
    model(torch.randn(1, 8))
    assert len(calls) == seen + 1
    handle.remove()
    model(torch.randn(1, 8))
    assert len(calls) == seen + 1


@pytest.mark.parametrize("make", [llama, bert])
def test_baselines_on_tokens_are_those_of_the_embeddings(make):
    """Against autograd on inputs_embeds, unpadded, where that is the same thing."""
    model = make()
    table = model.get_input_embeddings()
    embeddings = table(IDS).detach().requires_grad_()
    output = model(inputs_embeds=embeddings).logits
    scores = output[:, -1] if output.dim() == 3 else output
    (gradient,) = torch.autograd.grad(scores[torch.arange(3), [1, 0, 2]].sum(), embeddings)
    expected = (gradient * embeddings).sum(-1).detach()
    for method in ("captum:InputXGradient", "gradient"):
        assert error(ev.relevance_of(method, model, {"input_ids": IDS}, [1, 0, 2]), expected) < 1e-4
    saliency = ev.relevance_of("captum:Saliency", model, {"input_ids": IDS}, [1, 0, 2])
    assert error(saliency, gradient.abs().sum(-1)) < 1e-4


@pytest.mark.parametrize(
    "method", ["attnlrp", "dynamic", "gradient", "captum:InputXGradient", "captum:IntegratedGradients"]
)
def test_a_padded_batch_equals_its_rows(method):
    """Each row's own target at its own last token; padding gets nothing."""
    model = llama()
    mask = torch.ones_like(IDS)
    mask[1, 6:] = 0
    whole = ev.relevance_of(method, model, {"input_ids": IDS * mask, "attention_mask": mask}, [3, 1, 2])
    for row, (target, length) in enumerate(((3, 9), (1, 6), (2, 9))):
        one = {"input_ids": IDS[row : row + 1, :length], "attention_mask": mask[row : row + 1, :length]}
        alone = ev.relevance_of(method, model, one, [target])
        assert error(whole[row : row + 1, :length], alone) < 2e-3
        assert not whole[row, length:].abs().max().item() > 1e-6 if length < 9 else True


def test_presets_and_functions_go_in_as_they_are():
    model = cnn()
    preset = dlrp.preset("gamma", gamma=0.1) | {"first": dlrp.Flat()}
    expected = torch.cat([dlrp.explain(model, X[i : i + 1], target=Y[i], preset=preset).relevance for i in range(3)])
    assert error(ev.relevance_of(preset, model, X, Y), expected) < 1e-5
    seen = {}

    def mine(model, inputs, targets):
        seen.update(inputs=inputs, targets=targets)
        return inputs * 2

    assert torch.equal(ev.relevance_of(mine, model, X, Y), X * 2)
    assert torch.equal(seen["inputs"], X) and seen["targets"].tolist() == Y


def test_random_does_not_depend_on_the_batch():
    method, model = ev.find_method("random"), cnn()
    from dynamiclrp.evaluate.subject import Subject

    subject = Subject(model)
    whole = method.relevance(subject, subject.read(X), torch.tensor(Y), [4, 5, 6])
    one = method.relevance(subject, subject.read(X[1:2]), torch.tensor(Y[1:2]), [5])
    assert torch.equal(whole[1:2], one)
    assert not torch.equal(whole[0], whole[1])


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("gama", "unknown method 'gama'"),
        ("captum:Salience", "captum has no method 'Salience'"),
        ("zennit:Epsilon", "zennit has no composite 'Epsilon'"),
        ("zennit:EpsilonGammaBox", "lowest and highest input"),
        (7, "expected a name, a Preset, or a function"),
        (lambda m, x, t: x[:1], "expected a tensor with 3 rows"),
    ],
)
def test_bad_methods_are_refused(method, message):
    with pytest.raises(EvaluationError, match=message):
        ev.relevance_of(method, cnn(), X, Y)


def test_targets_must_fit():
    for targets, message in (
        ([0, 1], "2 targets for 3 inputs"),
        ([0, 1, 5], "5 choices"),
        ([0.5] * 3, "integers"),
        ([[0, 1]] * 3, "one number per row"),
        ([[0]] * 3, "or a pair"),
    ):
        with pytest.raises(EvaluationError, match=message):
            ev.relevance_of("attnlrp", cnn(), X, targets)


def test_the_quantus_adapter_has_its_calling_convention():
    explain, model = ev.quantus_explain("gamma"), cnn()
    found = explain(model=model, inputs=X.numpy(), targets=torch.tensor(Y).numpy(), device="cpu")
    assert found.shape == X.shape
    assert error(torch.from_numpy(found), ev.relevance_of("gamma", model, X, Y)) == 0


def test_quantus_runs_our_methods():
    quantus = pytest.importorskip("quantus")
    model = cnn()
    metric = quantus.PixelFlipping(features_in_step=64, perturb_baseline="black", disable_warnings=True)
    found = metric(
        model=model,
        x_batch=X.numpy(),
        y_batch=torch.tensor(Y).numpy(),
        explain_func=ev.quantus_explain("gamma"),
        device="cpu",
    )
    assert len(found) == 3


def test_conservation_and_where_the_rest_went():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    lrp, theirs = ev.conservation(model, x, ["attnlrp", "captum:InputXGradient"], [1] * 5)
    scores = model(x)[:, 1]
    assert torch.allclose(lrp.ratios, dlrp.explain(model, x, target=1, preset="attnlrp").relevance.sum(1) / scores)
    # what is missing from 1, weighted by the scores, is what the biases kept
    missing = float(((1 - lrp.ratios) * scores.detach()).sum() / scores.detach().sum())
    assert sum(lrp.kept.values()) == pytest.approx(missing) and abs(lrp.residual) < 1e-9
    assert theirs.kept is None and torch.allclose(theirs.ratios, lrp.ratios)  # piecewise linear: the same thing
    assert "sum of relevance / score" in str(lrp)


def test_cost_is_measured_against_the_gradient():
    floor, lrp, slow = ev.cost(bert(), {"input_ids": IDS}, ["attnlrp", "captum:IntegratedGradients"], repeats=3)
    assert floor.time_ratio == floor.memory_ratio == 1
    assert slow.time_ratio > lrp.time_ratio > 0.3 and slow.time_ratio > 3
    assert lrp.peak_bytes > 0 and slow.memory_ratio > lrp.memory_ratio


def test_baselines_that_remove_features_take_whole_tokens():
    """Feature ablation by hand: the logit's loss without each token's embedding."""
    model = bert()
    found = ev.relevance_of("captum:FeatureAblation", model, {"input_ids": IDS}, [1, 0, 2])
    table = model.get_input_embeddings()
    with torch.no_grad():
        for token in range(IDS.shape[1]):
            embeddings = table(IDS).clone()
            embeddings[:, token] = 0
            loss = (model(input_ids=IDS).logits - model(inputs_embeds=embeddings).logits)[torch.arange(3), [1, 0, 2]]
            assert error(found[:, token], loss) < 1e-3


def test_memory_bounds_do_not_change_baselines(monkeypatch):
    """Baselines that run rows and steps in smaller parts give the same."""
    model = cnn()
    whole = ev.relevance_of("captum:IntegratedGradients", model, X, Y)
    monkeypatch.setattr("dynamiclrp.evaluate.baselines._ELEMENTS", X[0].numel())
    assert error(ev.relevance_of("captum:IntegratedGradients", model, X, Y), whole) < 1e-5
    for noisy in ("captum:SmoothGrad", "captum:GradientShap"):
        assert ev.relevance_of(noisy, model, X, Y).shape == X.shape


def test_weights_are_frozen_while_baselines_run_and_thawed_after():
    model, seen = cnn(), []
    model[0].weight.requires_grad_(False)
    model[0].register_forward_hook(lambda *_: seen.append([p.requires_grad for p in model.parameters()]))
    before = [p.requires_grad for p in model.parameters()]
    for method in ("captum:Saliency", "captum:DeepLift", "zennit:EpsilonPlus"):
        ev.relevance_of(method, model, X, Y)
        assert not any(seen[-1])
        assert [p.requires_grad for p in model.parameters()] == before


def test_one_method_object_under_two_labels():
    method = ev.Captum("Saliency")
    found = ev.compare(cnn(), X, {"a": method, "b": method}, fill="zero", step=128, unit="pixel")
    assert found.methods == ("a", "b") and method.name == "captum:Saliency"

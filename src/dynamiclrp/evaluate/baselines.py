"""Other packages' methods as baselines: Captum and Zennit. Both are imported where used, never by the core."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import EvaluationError
from .methods import Method, Scores, frozen
from .packages import need
from .subject import PLAIN, Inputs, Subject

_ELEMENTS = 4_000_000  # numbers in what a baseline runs together: bounds its memory to a few gradients'
_REMOVING = ("FeatureAblation", "FeaturePermutation", "ShapleyValueSampling", "ShapleyValues", "KernelShap", "Lime")


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Within: a foreign package may hang hooks, attributes and weights on the model. After: none are left, even if it
    failed half-way."""
    modules = [(module, dict(vars(module))) for module in model.modules()]
    # the dicts of hooks themselves stay: handles of the user's own hooks point at them
    hooks = [
        (v, dict(v)) for _, state in modules for k, v in state.items() if k.endswith("_hooks") and isinstance(v, dict)
    ]
    tensors = [(t, t.data, t.requires_grad) for t in (*model.parameters(), *model.buffers())]
    try:
        yield
    finally:
        for module, state in modules:
            vars(module).clear()
            vars(module).update(state)
        for found, before in hooks:
            found.clear()
            found.update(before)
        for tensor, data, flag in tensors:
            tensor.data = data
            tensor.requires_grad_(flag)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Within: methods with noise, from torch or numpy, give the same again. After: the user's generators go on as if
    nothing had been drawn."""
    random = need("numpy.random", "numpy")
    before = random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            random.seed(seed)
            yield
    finally:
        random.set_state(before)


class Captum(Method):
    """A method of `captum.attr` by its class name; keyword arguments go to its `attribute`.

    SmoothGrad is NoiseTunnel over Saliency (10 samples, noise of 0.15 of the inputs' mean range, as Smilkov et al. use).
    Reference inputs are zeros: of normalised images the data's mean, of tokens the zero embedding. Methods that remove
    features take whole tokens. Weights are frozen meanwhile, as for our own presets.
    """

    def __init__(self, method: str, *, name: str | None = None, **arguments: Any) -> None:
        self.method, self.arguments = method, arguments
        shown = f"({', '.join(f'{k}={v}' for k, v in arguments.items())})" if arguments else ""
        self.name = name or f"captum:{method}{shown}"
        attr = need("captum.attr", "captum")
        if method != "SmoothGrad" and not hasattr(attr, method):
            known = "Saliency, InputXGradient, IntegratedGradients, GradientShap, SmoothGrad, DeepLift, LRP, FeatureAblation"
            raise EvaluationError(f"captum has no method {method!r}; for example: {known}")

    def describe(self) -> str:
        return f"captum:{self.method} {sorted(self.arguments.items())!r}"

    def relevance(self, subject: Subject, inputs: Inputs, targets: Tensor, indices: Sequence[int]) -> Tensor:
        attr = need("captum.attr", "captum")
        if self.method in ("LRP", "DeepLift", "DeepLiftShap"):
            return self._by_layers(attr, subject, inputs, targets)
        scores = Scores(subject, inputs, targets)
        x = scores.start()
        rows = torch.arange(len(inputs), device=x.device)
        arguments: dict[str, Any] = dict(self.arguments)
        at_once = max(1, _ELEMENTS // x[0].numel())  # rows that a method may run together
        size = len(inputs)  # rows that it gets at once
        if self.method == "SmoothGrad":
            method = attr.NoiseTunnel(attr.Saliency(scores))
            spread = (x.flatten(1).amax(1) - x.flatten(1).amin(1)).mean().item()
            samples = int(arguments.setdefault("nt_samples", 10))
            arguments = {"nt_type": "smoothgrad", "stdevs": 0.15 * spread} | arguments
            arguments.setdefault("nt_samples_batch_size", max(1, min(samples, at_once // size)))
        else:
            method = getattr(attr, self.method)(scores)
        if self.method == "GradientShap":
            arguments.setdefault("baselines", torch.zeros_like(x[:1]))
            size = max(1, min(size, at_once // arguments.get("n_samples", 5)))
        elif self.method == "IntegratedGradients":
            arguments.setdefault("internal_batch_size", max(at_once, size))
        grouped = self.method in _REMOVING and inputs.is_tokens and "feature_mask" not in arguments
        if grouped:
            arguments["feature_mask"] = torch.arange(x.shape[1], device=x.device)[None, :, None].expand_as(x[:1])
        found = []
        with seeded(indices[0], x.device), frozen(subject.model):
            for part, place in zip(x.split(size), rows.split(size)):
                part = part.detach().requires_grad_()
                found.append(method.attribute(part, additional_forward_args=(place,), **arguments).detach())
        relevance = torch.cat(found)
        if grouped:  # every number of an embedding got its token's whole effect
            relevance = relevance / x.shape[-1]
        return scores.finish(relevance)

    def _by_layers(self, attr: Any, subject: Subject, inputs: Inputs, targets: Tensor) -> Tensor:
        """Methods that hook every layer call the model itself."""
        if not isinstance(subject.model, nn.Module) or inputs.name != PLAIN or targets.dim() != 1:
            raise EvaluationError(
                f"{self.name}: captum hooks the layers of a torch.nn.Module called with one float tensor"
            )
        x = inputs.explained.detach().clone().requires_grad_()
        with untouched(subject.model), frozen(subject.model), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Setting forward, backward hooks")  # `untouched` takes them off again
            method = getattr(attr, self.method)(subject.model)
            return method.attribute(x, target=targets.to(x.device), **self.arguments).detach()


class Zennit(Method):
    """A composite of `zennit.composites` by its class name; keyword arguments go to it.

    Batch norms are merged by Zennit's canonizer: the torchvision one for its VGG and ResNet models, else the sequential.
    """

    def __init__(self, composite: str, *, name: str | None = None, **arguments: Any) -> None:
        self.composite, self.arguments = composite, arguments
        shown = f"({', '.join(f'{k}={v}' for k, v in arguments.items())})" if arguments else ""
        self.name = name or f"zennit:{composite}{shown}"
        base = need("zennit.core", "zennit").Composite
        kinds = vars(need("zennit.composites", "zennit"))
        known = [n for n, c in kinds.items() if isinstance(c, type) and issubclass(c, base) and "Composite" not in n]
        if composite not in known:
            raise EvaluationError(f"zennit has no composite {composite!r}. Known: {', '.join(known)}")
        if composite == "EpsilonGammaBox" and not {"low", "high"} <= set(arguments):
            raise EvaluationError(
                "zennit:EpsilonGammaBox needs the lowest and highest input: Zennit('EpsilonGammaBox', low=…, high=…)"
            )

    def describe(self) -> str:
        return f"zennit:{self.composite} {sorted(self.arguments.items())!r}"

    def relevance(self, subject: Subject, inputs: Inputs, targets: Tensor, indices: Sequence[int]) -> Tensor:
        if not isinstance(subject.model, nn.Module):
            raise EvaluationError(f"{self.name}: zennit hooks the layers of a torch.nn.Module")
        scores = Scores(subject, inputs, targets)
        x = scores.start().requires_grad_()
        rows = torch.arange(len(inputs), device=x.device)
        composites = need("zennit.composites", "zennit")
        arguments = dict(self.arguments)
        for bound in ("low", "high"):
            if bound in arguments:
                arguments[bound] = torch.as_tensor(arguments[bound], dtype=x.dtype, device=x.device).expand_as(x[:1])
        composite = getattr(composites, self.composite)(canonizers=[_canonizer(subject.model)], **arguments)
        with torch.enable_grad(), frozen(subject.model), composite.context(subject.model):
            score = scores(x, rows)
            (found,) = torch.autograd.grad(score, x, score.detach())
        return scores.finish(found.detach())


def _canonizer(model: nn.Module) -> Any:
    kind = type(model)
    if kind.__module__.startswith("torchvision.models") and kind.__name__ in ("VGG", "ResNet"):
        return getattr(need("zennit.torchvision", "zennit"), f"{kind.__name__}Canonizer")()
    return need("zennit.canonizers", "zennit").SequentialMergeBatchNorm()

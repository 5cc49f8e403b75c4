"""What is compared: each a call without arguments that explains one batch, forward pass included."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import dynamiclrp as dlrp

Call = Callable[[], object]


def logits_of(output: Any) -> Tensor:
    """Of one of our models. It knows nothing of the library, so that other commits can be measured with it."""
    return output if isinstance(output, Tensor) else output.logits


def scores(output: Any) -> Tensor:
    """The largest logit of each row; of outputs token by token, at the last one."""
    logits = logits_of(output)
    return (logits[:, -1] if logits.dim() == 3 else logits).amax(-1).sum()


def forward(model: nn.Module, inputs: dict[str, Any]) -> Call:
    def call() -> Any:
        with torch.no_grad():
            return model(**inputs)

    return call


def gradient(model: nn.Module, inputs: dict[str, Any]) -> Call:
    """Gradient x input, the floor: one forward, one backward."""
    floats = {k: v.detach().requires_grad_() for k, v in inputs.items() if isinstance(v, Tensor)}

    def call() -> list[Tensor]:
        grads = torch.autograd.grad(scores(model(**{**inputs, **floats})), list(floats.values()))
        return [x.detach() * g for x, g in zip(floats.values(), grads)]

    return call


def ours(model: nn.Module, inputs: dict[str, Any], preset: str, cuda_graph: bool = False) -> Call:
    explainer = dlrp.Explainer(model, preset, cuda_graph=cuda_graph)
    return lambda: explainer(**inputs)


def captured_gradient(model: nn.Module, inputs: dict[str, Any]) -> Call:
    """Gradient x input as a CUDA graph, as a user would capture it by hand: values are copied in, the result is where it was.

    Ours also checks that relevance is finite, and hands out copies.
    """
    static = {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    call = gradient(model, static)
    pairs = [(static[k], v) for k, v in inputs.items() if isinstance(v, Tensor)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> object:
        for kept_input, value in pairs:
            kept_input.copy_(value, non_blocking=True)
        graph.replay()
        return kept

    return replay


def zennit(model: nn.Module, inputs: dict[str, Any], composite: str) -> Call:
    from zennit.attribution import Gradient
    from zennit.composites import COMPOSITES
    from zennit.torchvision import ResNetCanonizer, VGGCanonizer

    x = inputs["x"]
    canonizer = ResNetCanonizer() if type(model).__name__ == "ResNet" else VGGCanonizer()
    made = COMPOSITES[composite](canonizers=[canonizer])

    def call() -> Tensor:
        with Gradient(model, made) as attributor:
            return attributor(x.detach().requires_grad_(), lambda out: (out == out.amax(-1, keepdim=True)) * out)[1]

    return call


def captum_lrp(model: nn.Module, inputs: dict[str, Any]) -> Call:
    from captum.attr import LRP

    method, x = LRP(model), inputs["x"]
    target = model(x).argmax(-1)
    return lambda: method.attribute(x.detach().requires_grad_(), target=target)


def paper(path: str, model: nn.Module, inputs: dict[str, Any]) -> Call:
    """The paper authors' own code; from the second call on it reuses what the first found out about the graph.

    Its parameters require gradients meanwhile: of frozen biases autograd keeps nothing.
    """
    sys.path.insert(0, path)
    try:
        engine_type = import_module("lrp_engine").LRPEngine
    finally:
        sys.path.remove(path)
    engine: Any = None

    def call() -> list[Tensor]:
        nonlocal engine
        floats = {k: v.detach().requires_grad_() for k, v in inputs.items() if isinstance(v, Tensor)}
        engine = engine or engine_type(params_to_interpret=list(floats.values()))
        model.requires_grad_(True)
        try:
            logits = logits_of(model(**{**inputs, **floats}))
            with redirect_stdout(StringIO()):
                found = engine.run(logits[:, -1] if logits.dim() == 3 else logits)
        finally:
            model.requires_grad_(False)
        if len(found) != 2:  # it returns its errors
            raise RuntimeError(f"it stopped at {type(found[0]).__name__}: {found[-1]!r}")
        if not all(isinstance(relevance, Tensor) for relevance in found[1]):
            raise RuntimeError("a promise was not kept: no relevance arrived at the input")
        return found[1]

    return call


def lxt(path: str, model: nn.Module, inputs: dict[str, Any]) -> Call:
    """The AttnLRP authors' own patched model. Their patches are put on for each call and taken off again."""
    from transformers.models.llama import modeling_llama as module

    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and "forward" in vars(kind)]

    def state() -> tuple[dict[str, Any], dict[type, Any]]:
        return dict(vars(module)), {kind: kind.forward for kind in (*kinds, nn.Dropout)}

    def put(names: dict[str, Any], forwards: dict[type, Any]) -> None:
        vars(module).update(names)
        for kind, method in forwards.items():
            kind.forward = method

    before = state()
    for name in ("lxt", "lxt.efficient"):  # its own __init__ imports models that newer transformers no longer has
        package = ModuleType(name)
        package.__path__ = [str(Path(path, *name.split(".")))]
        sys.modules[name] = package
    try:
        patches = import_module("lxt.efficient.patches")
        module.ALL_ATTENTION_FUNCTIONS = type(
            module.ALL_ATTENTION_FUNCTIONS
        )()  # they write into it, and all models share it
        patches.patch_method(patches.gated_mlp_forward, module.LlamaMLP)
        patches.patch_method(patches.rms_norm_forward, module.LlamaRMSNorm)
        patches.patch_method(patches.dropout_forward, nn.Dropout)
        patches.patch_attention(module)
        after = state()
    finally:
        put(*before)
        for name in [name for name in sys.modules if name.split(".")[0] == "lxt"]:
            del sys.modules[name]
    explain = gradient(model, inputs)

    def call() -> object:
        put(*after)
        try:
            return explain()
        finally:
            put(*before)

    return call

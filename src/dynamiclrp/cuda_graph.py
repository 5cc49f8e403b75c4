"""Explanations as CUDA graphs: forward pass and relevance captured once per shape, replayed without Python.

In: an explainer with the arguments of one call. Out: `Captured`, which explains other values of the same shapes.
Two graphs in one memory pool, so that a target may depend on the prediction: the forward pass, then (outside) the seed,
then the relevance.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .arguments import holds_tensors
from .attribution import Attribution
from .errors import CaptureError, LRPError
from .forward import Call, Forward
from .parameters import Inventory
from .targets import Seed, Target, given_seed, seed_for
from .uploads import Uploads
from .verdict import judge, largest, noted

if TYPE_CHECKING:
    from .explainer import Explainer

_WARM_UPS = 3  # lazy initialisation, autotuning and the plan are done in the first; `Uploads` compares the others
_DRIFT = 0.05  # of the largest score: beyond what rounding does in half types


def key_of(args: Sequence[Any], kwargs: Mapping[str, Any], layers: Sequence[str], many: bool) -> tuple[Any, ...]:
    """What a capture is good for: shapes and plain values of the arguments."""
    autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
    given = [_plain(name, value) for name, value in (*enumerate(args), *kwargs.items())]
    return (many, autocast, tuple(layers), tuple(kwargs), *given)


def copies_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments to capture with: memory of their own, that later values are written to."""
    copies = [value.detach().clone() if isinstance(value, Tensor) else value for value in (*args, *kwargs.values())]
    return copies[: len(args)], dict(zip(kwargs, copies[len(args) :]))


def _weights(inventory: Inventory) -> list[Tensor]:
    held = [(*module._parameters.values(), *module._buffers.values()) for module in inventory.modules]
    return [tensor for tensors in held for tensor in tensors if tensor is not None]


def _plain(name: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        if not value.is_cuda:
            raise CaptureError(
                f"argument {name!r} is on {value.device}: cuda_graph=True explains tensors on a GPU. Move model and inputs "
                "there, or leave out cuda_graph."
            )
        return value.shape, value.dtype, value.get_device()
    try:
        if holds_tensors(value):
            raise TypeError
        hash(value)
    except TypeError:
        raise CaptureError(
            f"argument {name!r} is a {type(value).__name__}: cuda_graph=True takes tensors and plain values. Pass its tensors "
            "as arguments of their own, or leave out cuda_graph."
        ) from None
    return value


class Captured:
    """One captured explanation: `launch` a target of some values, then `finish` it.

    Nothing is looked at before `finish`, so that the GPU works while Python does.
    """

    def __init__(self, explainer: Explainer, call: Call, many: bool) -> None:
        self.preset = explainer.preset
        self._owner: object = None  # whose values the last prediction was of
        self._inputs = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor)]
        self._values = [value.detach() for value in self._inputs]  # the same memory, to be written to
        if not self._inputs:
            raise CaptureError("no tensor among the arguments: there is nothing to capture")
        stream = torch.cuda.Stream(self._inputs[0].device)
        stream.wait_stream(torch.cuda.current_stream())
        name, predictions, self._uploads = type(explainer.model).__name__, [], Uploads()
        with call, torch.cuda.stream(stream):
            for warm_up in range(_WARM_UPS):
                with self._uploads if warm_up else nullcontext():
                    forward, plan = explainer.forward(call)
                    forward.relevance(plan, _seed(forward))
                predictions.append(forward.output.detach().clone())
        del forward
        self._uploads.reserve(name)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved()
        try:
            with call:
                self._capture(explainer, call, stream, many)
        except LRPError:
            raise
        except Exception as error:  # some models go another way, and wrong, where they see that they are captured
            _end_capture(stream)
            raise CaptureError(
                f"{name} cannot be captured as a CUDA graph: {_cause(error)} "
                "(the model moves numbers from the GPU to the CPU, or does other work that a graph cannot hold, while it runs). "
                "Remedy: leave out cuda_graph."
            ) from error
        self.memory = torch.cuda.memory_reserved() - reserved  # bytes
        self._compare(name, *predictions[-2:])

    def _capture(self, explainer: Explainer, call: Call, stream: torch.cuda.Stream, many: bool) -> None:
        self._forward, self._relevance = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(self._forward, pool=pool, stream=stream), self._uploads:
            forward, self.plan = explainer.forward(call)
            self._seed = _seed(forward)  # that of the default target; others are copied into it
        # where the GPU says how large the relevance of each input is: read without one more copy
        self._largest = torch.empty(1 + len(forward.graph.inputs), pin_memory=True)
        with torch.cuda.graph(self._relevance, pool=pool, stream=stream), self._uploads:
            # several targets share one forward pass: its values must stay
            found = forward.relevance(self.plan, self._seed, retain_graph=many)
            self._shown = forward.shown(found)
            self._largest.copy_(largest([self._seed.relevance, *found]), non_blocking=True)
        self._scores, self._batch_dim = forward.scores.held(), forward.batch_dim
        self._output = self._scores.tensor
        # held, so that a replay never reads memory that was given back
        self._weights = _weights(call.inventory)
        self._addresses = [tensor.data_ptr() for tensor in self._weights]

    def _compare(self, name: str, first: Tensor, second: Tensor) -> None:
        """Refuse a model that predicts otherwise where it sees that it is captured. Where its own calls differ nothing can be said."""
        self._forward.replay()
        if _drift(first, second) < _DRIFT and not _drift(self._output, second) < _DRIFT:
            raise CaptureError(
                f"{name} predicts otherwise as a CUDA graph (by {_drift(self._output, second):.0e} of its largest score): it goes "
                "another way where it sees that it is captured. Remedy: leave out cuda_graph."
            )

    def fits(self, inventory: Inventory) -> bool:
        """Are the model's weights where they were captured?"""
        return [tensor.data_ptr() for tensor in _weights(inventory)] == self._addresses

    def speaks_of(self, target: Target) -> bool:
        """Does a target mean the output that was captured?"""
        return self._scores.ask(target) is not None

    def launch(
        self, target: Target, owner: object, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bool, Seed | None]:
        """Predict, unless the last prediction was this owner's, and hand relevance back for a target of it.

        Was it predicted, and the seed; None: of the default target, which is part of the forward graph.
        """
        fresh = owner is not self._owner
        if fresh:
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            for static, value in zip(self._values, given):
                static.copy_(value.detach() if value.requires_grad else value, non_blocking=True)
            self._forward.replay()
            self._owner = owner
        seed = None
        if target is not None or not fresh or self._output.dim() > 3:
            asked = self._scores.ask(target)
            assert asked is not None  # who launches has asked whether it speaks of this output
            seed = seed_for(self._output, asked.target, self._batch_dim)
            self._seed.coefficient.copy_(seed.coefficient)
            self._seed.relevance.copy_(seed.relevance)
        self._relevance.replay()
        return fresh, seed

    def finish(self, target: Target, seed: Seed | None) -> Attribution | None:
        """What was found; None, if it is not finite."""
        # copied before anything is waited for, in one launch; the next replay overwrites them
        inputs, layers = self._shown
        output, handed, *found = torch._foreach_mul(
            [self._output, self._seed.relevance, *inputs.values(), *layers.values()], 1
        )
        relevances = dict(zip(inputs, found))
        layers = dict(zip(layers, found[len(inputs) :]))
        made = Attribution(
            relevances, layers, output, target, handed, self.plan, self.preset,
            output=self._scores.name, batch_dim=self._batch_dim,
        )  # fmt: skip
        torch.cuda.current_stream().synchronize()
        seed = seed or self._seed
        if seed.good is not None and not seed.good.any():
            raise seed.error()
        explained, *told = self._largest.tolist()
        good = judge(seed, told) and math.isfinite(explained)
        return replace(made, notes=noted(self.plan, seed)) if good else None

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(value.shape)) for value in self._inputs)
        return f"Captured({shapes}; {self.memory / 2**20:.0f} MiB)"


def _seed(forward: Forward) -> Seed:
    """Of the default target; a map of scores has none, and any stands for those that will be asked."""
    if forward.output.dim() > 3:
        return given_seed(forward.output.detach(), forward.output)
    return seed_for(forward.output, None, forward.batch_dim)


def _drift(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two predictions, relative; what is infinite in both (a mask) counts as equal."""
    if found.shape != expected.shape:
        return torch.inf
    differs = torch.where(found == expected, 0, found - expected)
    return float(differs.abs().max() / expected.nan_to_num(0, 0, 0).abs().max().clamp_min(1e-30))


def _cause(error: BaseException) -> str:
    """What went wrong first, and where in the model: what ends a failed capture complains once more."""
    while isinstance(error.__context__, RuntimeError) or (error.__context__ is not None and _ends_a_capture(error)):
        error = error.__context__
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    text = (str(error).splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {text}{where}"


def _ends_a_capture(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename) == Path(torch.cuda.graphs.__file__)


def _end_capture(stream: torch.cuda.Stream) -> None:
    """A capture that failed leaves torch's random generator in capture; one that succeeds ends that."""
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        torch.zeros(1, device=stream.device)

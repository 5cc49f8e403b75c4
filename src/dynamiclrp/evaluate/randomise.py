"""Sanity check by parameter randomisation (Adebayo et al. 2018): an explanation must change when the model does.

In: a model, data, methods. Layer by layer, beginning at the output, weights are replaced by noise of their own mean and
standard deviation; relevance is compared with that of the trained model by Spearman's rank correlation. Cascading keeps
earlier layers randomised, independent puts each back first. Out: a `Randomisation`. The model is put back bit for bit,
also after an error.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import EvaluationError
from .data import Batch, batches
from .methods import Method, find_methods
from .metrics import Interval, bootstrap
from .packages import need
from .progress import Progress
from .subject import Subject
from .units import Layout, Unit, find_unit

FORMAT = 1
MODES = ("cascading", "independent")


@dataclass(frozen=True, eq=False)
class Randomisation:
    """`records`: one dict per layer, method and input with `signed` and `absolute` rank correlations, or an `error`."""

    methods: tuple[str, ...]
    layers: tuple[str, ...]  # from the output to the input
    mode: str
    records: Sequence[Mapping[str, Any]] = field(repr=False)

    def values(self, method: str, layer: str, which: str = "signed") -> Tensor:
        """One correlation per input."""
        if method not in self.methods or layer not in self.layers or which not in ("signed", "absolute"):
            raise EvaluationError(f"no {which!r} correlations of {method!r} after {layer!r} here")
        found = [r[which] for r in self.records if (r["method"], r["layer"]) == (method, layer) and "error" not in r]
        return torch.tensor(found, dtype=torch.float64)

    def interval(self, method: str, layer: str, which: str = "signed") -> Interval | None:
        """Mean and bootstrap interval over inputs; None where the method failed."""
        values = self.values(method, layer, which)
        return bootstrap(values, resamples=2_000) if len(values) else None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dict per layer and method."""
        found = []
        for layer in self.layers:
            for method in self.methods:
                row: dict[str, Any] = {"layer": layer, "method": method, "n": len(self.values(method, layer))}
                for which in ("signed", "absolute"):
                    interval = self.interval(method, layer, which)
                    if interval is not None:
                        row |= {which: interval.mean, f"{which}_low": interval.low, f"{which}_high": interval.high}
                found.append(row)
        return found

    def errors(self) -> list[str]:
        """Methods that failed, where and why."""
        return list(
            dict.fromkeys(f"{r['method']} after {r['layer']}: {r['error']}" for r in self.records if "error" in r)
        )

    def __str__(self) -> str:
        head = ["randomised" if self.mode == "independent" else "randomised down to", *self.methods]
        body = []
        for layer in self.layers:
            line = [layer]
            for method in self.methods:
                signed, absolute = self.values(method, layer), self.values(method, layer, "absolute")
                line.append(f"{signed.mean():.3f} / {absolute.mean():.3f}" if len(signed) else "failed")
            body.append(line)
        widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in [head, *body]]
        title = f"Spearman correlation with the trained model's relevance, signed / absolute ({self.mode})"
        return "\n".join([title, lines[0], "-" * len(lines[0]), *lines[1:], *self.errors()])

    def to_pandas(self) -> Any:
        """The rows as a DataFrame."""
        return need("pandas", "pandas").DataFrame(self.rows)

    def plot(self, path: str | os.PathLike[str] | None = None, *, which: str = "signed") -> Any:
        """Correlation against the layers randomised, one line per method; the matplotlib figure."""
        from .plot import plot_randomisation  # here: matplotlib is an extra

        return plot_randomisation(self, path, which)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Everything as one JSON file."""
        file = Path(path)
        whole = {
            "dynamiclrp randomisation": FORMAT,
            "methods": list(self.methods),
            "layers": list(self.layers),
            "mode": self.mode,
            "records": [dict(r) for r in self.records],
        }
        part = file.with_name(f".{file.name}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(whole), encoding="utf-8")
            os.replace(part, file)
        finally:
            part.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Randomisation:
        """What `save` wrote."""
        try:
            whole = json.loads(Path(path).read_text("utf-8"))
            if whole["dynamiclrp randomisation"] != FORMAT:
                raise EvaluationError(f"{path} has another format: this version reads {FORMAT}")
            return Randomisation(
                tuple(whole["methods"]), tuple(whole["layers"]), whole["mode"], tuple(whole["records"])
            )
        except (ValueError, KeyError, TypeError) as error:
            raise EvaluationError(f"{path} is not a saved Randomisation ({type(error).__name__}: {error})") from None


def randomisation(
    model: nn.Module,
    data: Any,
    methods: Any = ("default", "gradient"),
    targets: Any = None,
    *,
    layers: Sequence[str] | None = None,
    depth: int | None = None,
    mode: str = "cascading",
    unit: str | Unit | None = None,
    explain_batch_size: int = 8,
    limit: int | None = 32,
    seed: int = 0,
    input: str | None = None,
    embedding: str | None = None,
    on_error: str = "record",
    progress: bool | None = None,
) -> Randomisation:
    """Randomise the model from its output down and see whether explanations notice.

    `layers`: names of modules, output first, each with all that is below it; by default every module with parameters of its
    own, the last to run first. `depth=3` puts those together that share three parts of their name (a whole block).
    The explained class stays what the trained model answered (or `targets`). `unit` pools relevance before ranking.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    >>> randomisation(model, torch.randn(4, 8), ["epsilon"]).layers
    ('2', '0')
    """
    if mode not in MODES or on_error not in ("record", "raise"):
        raise EvaluationError(f"mode={mode!r}, on_error={on_error!r}: expected {' or '.join(MODES)}, record or raise")
    if not isinstance(model, nn.Module):
        raise EvaluationError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    chosen = find_methods(methods)
    subject = Subject(model, measure="logit", embedding=embedding)
    parts = list(batches(subject, data, targets, explain_batch_size, name=input, limit=limit))
    kind = find_unit(
        unit if unit is not None or parts[0].inputs.explained.dim() != 4 else "pixel", parts[0].inputs.explained
    )
    subject = Subject(model, measure="logit", embedding=embedding, hidden=kind.hidden)
    stages = _stages(model, subject, parts[0], layers, depth)
    runs = [_Explained(subject, part, kind, chosen, on_error) for part in parts]
    records: list[dict[str, Any]] = []
    with Progress("randomising", len(stages) * len(runs), progress) as bar, restored(model) as put_back:
        for name, parameters in stages.items():
            if mode == "independent":
                put_back()
            for label, parameter in parameters.items():
                randomise(parameter, zlib.crc32(f"{seed}/{label}".encode()))
            for run in runs:
                records += [{"layer": name, **record} for record in run.correlations()]
                bar.advance(1, f"randomising: {name}")
    return Randomisation(tuple(m.name for m in chosen), tuple(stages), mode, tuple(records))


class _Explained:
    """A batch with the ranks of the trained model's relevance, signed and of magnitudes."""

    def __init__(self, subject: Subject, batch: Batch, unit: Unit, methods: list[Method], on_error: str) -> None:
        self.subject, self.batch, self.methods, self.on_error = subject, batch, methods, on_error
        self.targets = subject.predict(batch.inputs) if batch.targets is None else batch.targets
        self.layout: Layout = unit.layout(batch.inputs.explained)
        self.allowed = unit.allowed(batch.inputs.explained, batch.inputs.values, self.layout)
        self.before = {method.name: self._ranks(method) for method in methods}

    def _ranks(self, method: Method) -> list[Tensor] | str:
        """Of pooled relevance and of its magnitude, rows with as many units together: [2, rows, units]; or why there are none."""
        try:
            found = method.relevance(self.subject, self.batch.inputs, self.targets, self.batch.indices)
            scores = self.layout.scores(found)
            if self.allowed is not None:
                rows = [row[allowed] for row, allowed in zip(scores, self.allowed)]
                return [ranks(torch.stack([row, row.abs()])[:, None]) for row in rows]
            if found.device.type == "cuda":  # ranking is most of the time for large images
                scores = scores.to(found.device)
            return [ranks(torch.stack([scores, scores.abs()]))]
        except Exception as error:  # other packages raise anything; it is reported, beside the table or at once
            if self.on_error == "raise":
                raise
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

    def correlations(self) -> Iterator[dict[str, Any]]:
        for method in self.methods:
            before, after = self.before[method.name], self._ranks(method)
            records = [{"method": method.name, "input": index} for index in self.batch.indices]
            if isinstance(before, str) or isinstance(after, str):
                yield from (record | {"error": before if isinstance(before, str) else after} for record in records)
                continue
            signed, absolute = torch.cat([correlation(a, b).cpu() for a, b in zip(before, after)], 1).tolist()
            for record, one, other in zip(records, signed, absolute):
                yield record | {"signed": one, "absolute": other}


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation, equal values sharing their mean rank; 0 where one side is constant.

    >>> import torch
    >>> round(spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 4.0, 9.0])), 6)
    1.0
    """
    return float(correlation(ranks(a.flatten()), ranks(b.flatten())))


def ranks(values: Tensor) -> Tensor:
    """Ranks along the last dimension, from 1; equal values share their mean rank."""
    ordered = values.sort(dim=-1).values
    below, to = (torch.searchsorted(ordered, values.contiguous(), right=right) for right in (False, True))
    return (below + to + 1).double() / 2


def correlation(x: Tensor, y: Tensor) -> Tensor:
    """Pearson's, along the last dimension; 0 where one side is constant."""
    x, y = (v - v.mean(-1, keepdim=True) for v in (x, y))
    scale = x.norm(dim=-1) * y.norm(dim=-1)
    return torch.where(scale > 0, (x * y).sum(-1) / scale, 0.0)


# -------------------------------------------------------------------------------------------------------------- weights


@contextmanager
def restored(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Within: parameters may be overwritten; the function given puts them back. After: they are as before, bit for bit."""
    before = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]

    def put_back() -> None:
        for parameter, value in before:
            parameter.data.copy_(value)

    try:
        yield put_back
    finally:
        put_back()


def randomise(parameter: Tensor, seed: int) -> None:
    """Overwrite with normal noise of the same mean and standard deviation; the same noise on every device."""
    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    values = parameter.detach().float()
    spread = values.std() if values.numel() > 1 else torch.zeros_like(values.mean())
    parameter.data.copy_(noise.to(parameter.device) * spread + values.mean())


def _stages(
    model: nn.Module, subject: Subject, batch: Batch, layers: Sequence[str] | None, depth: int | None
) -> dict[str, dict[str, nn.Parameter]]:
    """What is randomised at each stage: layer → its parameters by name. A tied parameter goes with its first layer."""
    modules = dict(model.named_modules())
    if layers is not None:
        unknown = [name for name in layers if name not in modules]
        if unknown:
            raise EvaluationError(f"layers {unknown}: no such module. Known: {', '.join(list(modules)[1:9])}, …")
        groups = {name: [n for n in modules if n == name or n.startswith(f"{name}.")] for name in layers}
    else:
        groups = {}
        for name in _order(model, subject, batch):
            label = (name if depth is None else ".".join(name.split(".")[:depth])) or type(model).__name__
            groups.setdefault(label, []).append(name)
    seen: set[int] = set()
    stages: dict[str, dict[str, nn.Parameter]] = {}
    for label, names in groups.items():
        found = {}
        for name in names:
            for key, parameter in modules[name].named_parameters(recurse=False):
                if id(parameter) not in seen and parameter.is_floating_point():
                    seen.add(id(parameter))
                    found[f"{name}.{key}"] = parameter
        if found:
            stages[label] = found
    if not stages:
        raise EvaluationError("there is no parameter to randomise in these layers")
    return stages


def _order(model: nn.Module, subject: Subject, batch: Batch) -> list[str]:
    """Modules with parameters of their own, the last to run first; those that never run come last.

    A module counts from its end, one with modules inside from its beginning: what it owns itself, a class token or
    positions, is mostly added before they run.
    """
    owners = {name: m for name, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None}
    ran: dict[str, int] = {}
    handles = []

    def note(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            ran[name] = len(ran) if name not in ran else max(ran.values()) + 1

        return hook

    try:
        for name, module in owners.items():
            inside = next(module.children(), None) is not None
            register = module.register_forward_pre_hook if inside else module.register_forward_hook
            handles.append(register(note(name)))
        with torch.no_grad():
            subject.call(batch.inputs.pick(slice(0, 1)))
    finally:
        for handle in handles:
            handle.remove()
    places = {name: place for place, name in enumerate(owners)}
    return sorted(owners, key=lambda name: (ran.get(name, -1), places[name]), reverse=True)

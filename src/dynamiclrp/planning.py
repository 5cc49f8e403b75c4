"""Graph + preset → `Plan`: a rule for every live node and a source for every value a rule needs.

Pure: the same signature and preset give the same plan (another one in half types), so plans are cached.
"""

from __future__ import annotations

from collections import Counter

from .choose import choose, settle_forms
from .errors import LostActivationError, UnknownOpError
from .graph import Graph
from .ops import OPS, Kind
from .ops.refused import refusal
from .plan import Plan
from .presets import Preset
from .promise import (
    Key,
    Leaf,
    Replay,
    Source,
    Sources,
    describe,
    operand_key,
    value_key,
)
from .rules import OUT, LinearRule
from .saved import output_shape, saved_tensor_names
from .step import ADDED, Place, Step


def make_plan(
    graph: Graph,
    preset: Preset,
    *,
    everything: bool = False,
    on_missing: str = "error",
    coarse: bool = False,
    apart: frozenset[int] = frozenset(),
) -> Plan:
    """Choose a rule for every live node and promise every value that the rules need.

    `everything` also promises the values of all live tensors (for the ledger). `on_missing="gradient"` lets operations
    without a row keep their own backward. `coarse`: values are of half types. `apart`: linear maps whose batch norm or bias is none of theirs in the shapes at hand.
    """
    if on_missing == "error":
        _refuse_unknown(graph)
    steps, output_forms, input_forms = settle_forms(graph, choose(graph, preset, apart))
    return _promise(graph, preset, steps, output_forms, input_forms, everything, coarse)


def missing_ops(graph: Graph) -> Counter[str]:
    """Live node types without a row."""
    return Counter(kind.__name__ for kind, runs in zip(graph.types, graph.runs) if runs and kind.__name__ not in OPS)


def _reason(name: str) -> str:
    reason = refusal(name)
    return f" (refused: {reason})" if reason else ""


def _refuse_unknown(graph: Graph) -> None:
    unknown = missing_ops(graph)
    if not unknown:
        return
    shapes: dict[str, tuple[int, ...]] = {}
    for kind, handle in zip(graph.types, graph.handles):
        if kind.__name__ in unknown:
            shapes.setdefault(kind.__name__, tuple(output_shape(handle, 0)))
    listing = "\n".join(
        f"  {name} x{count}, first output {shapes[name]}{_reason(name)}" for name, count in unknown.most_common()
    )
    example = next(iter(unknown))
    raise UnknownOpError(
        f"{len(unknown)} operation(s) have no rule:\n{listing}\n"
        f'Give each a row, for example: dynamiclrp.register("{example}", "activation"). '
        f'Kinds: {", ".join(map(str, Kind))}. Or let them keep their gradient: on_missing="gradient".'
    )


def _promise(
    graph: Graph,
    preset: Preset,
    steps: list[Step],
    output_forms: tuple[str, ...],
    input_forms: tuple[str, ...],
    everything: bool,
    coarse: bool,
) -> Plan:
    forms = {step.node: step.form for step in steps}
    wanted = [_wanted(graph, step, forms) for step in steps]
    keys = {place for places in wanted for place in places.values() if isinstance(place, tuple)}
    sources: Sources | None = Sources(graph, coarse) if keys or everything else None
    lost = [
        (step, position)
        for step, places in zip(steps, wanted)
        for position, place in places.items()
        if isinstance(place, tuple) and sources is not None and sources.get(place) is None
    ]
    if lost:
        raise _lost(graph, lost)
    uses: Counter[Key] = Counter(place for places in wanted for place in places.values() if isinstance(place, tuple))
    needed = _closure(sources, keys, uses) if sources else {}
    if everything and sources:
        needed = dict(sources.table) | needed
    origins = {
        step.node: tuple(dict.fromkeys(place for place in places.values() if isinstance(place, tuple)))
        for step, places in zip(steps, wanted)
    }
    origins = {node: keys_ for node, keys_ in origins.items() if keys_}
    steps = [
        step.changed(
            places=places, rectified=_is_rectified(graph, step, forms), positive=_is_positive(graph, step, forms)
        )
        for step, places in zip(steps, wanted)
    ]
    return Plan(
        preset=preset,
        steps=tuple(steps),
        output_forms=output_forms,
        input_forms=input_forms,
        forms=forms | {ref[0]: form for ref, form in zip(graph.inputs, input_forms)},
        sources=needed,
        uses=uses,
        promises=describe(graph, sources, origins) if sources else (),
        nodes=len(graph),
        ops=len(set(graph.types)),
        extras=_read_late(graph, steps, needed),
        leaves=tuple(sorted(_leaves(needed) - {node for node, _ in graph.inputs})),
        touched=_touched(graph, steps, needed),
        missing=dict(missing_ops(graph)),
    )


def _touched(graph: Graph, steps: list[Step], sources: dict[Key, Source]) -> tuple[int, ...]:
    hooked = [step for step in steps if any(step.hooks)]
    nodes = {node for step in hooked for node in (step.node, step.top)}
    nodes |= {getattr(source, "holder", getattr(source, "node", steps[0].node)) for source in sources.values()}
    return tuple(node for node in sorted(nodes) if saved_tensor_names(graph.types[node]))


def _leaves(sources: dict[Key, Source]) -> set[int]:
    return {source.node for source in sources.values() if isinstance(source, Leaf)}


_STATISTICS = frozenset({"running_mean", "running_var", "weight"})


def _read_late(graph: Graph, steps: list[Step], sources: dict[Key, Source]) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """What is read after the node's own turn, when it is freed: by replays, and of batch norms that are part of a map below."""
    found = {}
    for source in sources.values():
        if isinstance(source, Replay) and not source.recorded:
            op = OPS[graph.types[source.node].__name__]
            known = {attribute for attribute, _ in op.saved.values()} | {op.result}
            names = saved_tensor_names(graph.types[source.node])
            found[source.node] = tuple(name for name in names if name not in known)
    for step in steps:
        if step.normed:
            names = saved_tensor_names(graph.types[step.top])
            found[step.top] = tuple(name for name in names if name in _STATISTICS or name in found.get(step.top, ()))
    return tuple((node, names) for node, names in found.items() if names)


def _wanted(graph: Graph, step: Step, forms: dict[int, str]) -> dict[int, Place]:
    """Where each value that a step needs is to be had."""
    positions = dict.fromkeys(step.rule.needs(step))
    if step.convert:
        positions[OUT] = None
    positions.update(dict.fromkeys(step.multiply))
    places: dict[int, Place] = {}
    for position in positions:
        if position == OUT:
            places[OUT] = _output(graph, step, forms)
        elif step.part is not None and position in (ADDED, step.bias):
            places[ADDED] = operand_key(graph, step.part.top, step.part.position)
            if step.bias != ADDED:
                places[step.bias] = operand_key(graph, step.node, step.bias)
        else:
            own = step.op.keeps(position, graph.edges[step.node])
            places[position] = own or operand_key(graph, step.node, position)
    if (
        step.part is not None
        and step.part.norm
        and (graph.watched or (OUT in places and not _is_rectified(graph, step, forms)))
    ):
        places[ADDED] = operand_key(
            graph, step.part.top, step.part.position
        )  # to make the output with, or tell its part
    return places


def _output(graph: Graph, step: Step, forms: dict[int, str]) -> Place:
    node = step.node if step.normed else step.top
    if _is_rectified(graph, step, forms):
        return value_key((graph.consumers[(step.top, 0)][0][0], 0))
    if node == step.node and step.op.result is not None:
        return step.op.result
    return value_key((node, 0))


def _is_rectified(graph: Graph, step: Step, forms: dict[int, str]) -> bool:
    """Is a rectifier the only consumer? No relevance arrives where it is shut, and where it is open the values agree."""
    above = _only_user(graph, step, forms) if isinstance(step.rule, LinearRule) else None
    return above is not None and graph.op(above).rectifies


def _is_positive(graph: Graph, step: Step, forms: dict[int, str]) -> bool:
    """Is the only consumer one that hands nothing down where its operand is not positive?"""
    above = _only_user(graph, step, forms) if isinstance(step.rule, LinearRule) else None
    return above is not None and graph.op(above).shuts(graph.attributes_of(above))


def _only_user(graph: Graph, step: Step, forms: dict[int, str]) -> int | None:
    """The only consumer of a step's output, if coefficients arrive there and from nowhere else."""
    node = step.top
    users = graph.consumers.get((node, 0), [])
    if len(users) != 1 or (node, 0) in graph.outputs or forms[node] != "s":
        return None
    above, _ = users[0]
    return above if graph.types[above].__name__ in OPS else None


def _closure(sources: Sources, keys: set[Key], uses: Counter[Key]) -> dict[Key, Source]:
    """All sources behind the keys, counting how often each value is used."""
    needed: dict[Key, Source] = {}
    stack = list(keys)
    while stack:
        key = stack.pop()
        if key in needed:
            continue
        source = needed[key] = sources.short(key)
        for operand in source.operands:
            uses[operand] += 1
            stack.append(operand)
    return needed


def _lost(graph: Graph, lost: list[tuple[Step, int]]) -> LostActivationError:
    lines = []
    for step, position in lost[:8]:
        what = "its output" if position == OUT else f"operand {position}"
        shape = tuple(output_shape(graph.handles[step.node], 0))
        lines.append(f"  {graph.where(step.node)}, output shape {shape}: {step.rule} needs {what}")
    more = f"\n  … and {len(lost) - 8} more" if len(lost) > 8 else ""
    return LostActivationError(
        "values that autograd did not keep and nothing can rebuild (a constant or frozen operand leaves no trace):\n"
        + "\n".join(lines)
        + more
        + "\nRemedy: call dynamiclrp.explain, which records them during the forward pass; or let the parameters that are "
        "added (biases, embeddings) require gradients; or override the rule of these operations."
    )

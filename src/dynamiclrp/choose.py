"""Graph + preset → a rule for every live node, and for every tensor whether it carries s or R.

It knows kinds, patterns and presets, never values.
"""

from __future__ import annotations

from dataclasses import replace

from . import maps, patterns
from .errors import PresetError, UnsupportedTensorError
from .graph import Graph
from .maps import Part
from .ops import OPS, Kind, Op
from .presets import Preset
from .rules import (
    Folded,
    Gamma,
    Gradient,
    Identity,
    LinearRule,
    PassScale,
    Rule,
    ScaleFixed,
    SignalTakesAll,
    Split,
    Uniform,
)
from .step import Step


def choose(graph: Graph, preset: Preset, apart: frozenset[int] = frozenset()) -> dict[int, Step]:
    """`apart`: linear maps that have no part in the shapes at hand."""
    first = patterns.first_layers(graph)
    parts = maps.parts(graph, apart)
    nonnegative = patterns.nonnegative(graph)
    _refuse_unmatched_modules(graph, preset)
    steps: dict[int, Step] = {}
    for node in range(len(graph)):
        if not graph.runs[node]:
            continue
        op = OPS.get(graph.types[node].__name__, _MISSING)
        name = graph.name(node)
        live = patterns.live_operands(graph, node)
        edges = graph.edges[node]
        kind, signal = (op.kind if op.kind_for is None else op.kind_for(graph.attributes_of(node))), None
        rule: Rule | None = Gradient() if op is _MISSING else None
        if op.linear is not None and len([i for i in live if i in op.linear.factors]) != 1:
            kind = Kind.PRODUCT if any(i in op.linear.factors for i in live) else Kind.SUM
        elif kind is Kind.PRODUCT:
            kind, signal, rule = _product(graph, node, live, preset)
        if kind is Kind.SOFTMAX and patterns.weighs_values(graph, node):
            kind = Kind.WEIGHTS
        if kind is Kind.BATCHNORM and graph.attributes_of(node)[0]:
            kind = Kind.NORMALISE  # batch statistics
        absent = op.absent(graph.attributes_of(node))
        has_bias = op.linear is not None and op.linear.bias is not None and op.linear.bias not in absent
        part = _part(graph, preset, parts.get(node))
        adds = has_bias or (part is not None and not part.norm)
        rule = rule or _rule(graph, node, kind, preset, node in first, adds)
        if kind in (Kind.ACTIVATION, Kind.FUNCTION) and 0 not in live:
            rule = Gradient()  # only a parameter of the function is live
        if kind is Kind.PRODUCT and isinstance(rule, (Uniform, Split, SignalTakesAll)) and name in ("Div", "Addcdiv"):
            # a divisor's own backward would take back what the dividend gets
            rule, signal = SignalTakesAll(), op.factors[0]
        if isinstance(rule, (SignalTakesAll, Split)) and signal is None:
            signal = patterns.signal(graph, node)
            rule = rule if signal is not None else Uniform()
            if isinstance(rule, Split) and patterns.gate_is_softmax(graph, node, signal):
                rule = replace(rule, gate=rule.weights)
            if isinstance(rule, Split) and rule.gate == 0.5:
                rule, signal = Uniform(), None  # the same, with one multiplication for both
        part = part if isinstance(rule, LinearRule) and rule.folds else None
        steps[node] = Step(
            node=node,
            name=name,
            op=op,
            kind=kind,
            rule=rule,
            live=live,
            sharers=tuple(i for i, ref in enumerate(edges) if ref is not None),
            homogeneous=_is_homogeneous(graph, node, kind, op, live, absent),
            signal=signal,
            part=part,
            has_bias=has_bias or part is not None,
            nonnegative=any(edges[i] in nonnegative for i in live if op.linear is None or i in op.linear.factors),
        )
    for step in list(steps.values()):
        if (
            step.part is not None
        ):  # it belongs to the map, whose rule knows of it; a sum's own backward multiplies by a factor at most
            top = step.part.top
            steps[top] = steps[top].changed(rule=Folded() if step.part.norm else Gradient())
    _grade(graph, steps)
    return steps


def _part(graph: Graph, preset: Preset, part: Part | None) -> Part | None:
    """The part of a map, unless somebody gave that operation, or its module, a rule of its own."""
    if part is None:
        return None
    module = graph.modules[part.top] if graph.modules else None
    own = preset.override(graph.name(part.top), module)
    return None if own is not None and own.fits(graph.op(part.top).kind) else part


def _grade(graph: Graph, steps: dict[int, Step]) -> None:
    """A gamma that changes with depth: every map gets its own, by how many maps of the rule lie below it on the longest way."""
    for rule in {step.rule for step in steps.values() if isinstance(step.rule, Gamma) and step.rule.last is not None}:
        below: dict[int, int] = {}
        for node, step in steps.items():  # operands stand before their consumers
            under = max((below.get(ref[0], 0) for ref in graph.edges[node] if ref is not None), default=0)
            below[node] = under + (step.rule == rule)
        deepest = max(below.values())
        for node, step in list(steps.items()):
            if step.rule == rule:
                steps[node] = step.changed(rule=rule.at((below[node] - 1) / max(1, deepest - 1)))


_MISSING = Op(Kind.FUNCTION)  # stands for an operation without a row


def _product(graph: Graph, node: int, live: tuple[int, ...], preset: Preset) -> tuple[Kind, int | None, Rule | None]:
    """An elementwise product: a scaling, one written-out function, or two live factors."""
    op = OPS[graph.types[node].__name__]
    if sum(i in live for i in op.factors) < 2:
        added = any(i not in op.factors for i in live)
        if graph.name(node) in ("Div", "Addcdiv") and op.factors[0] not in live:
            return Kind.FUNCTION, None, Gradient()  # a reciprocal
        scales = op.elementwise and not added and len(graph.edges[node]) == len(op.factors)
        return (Kind.SCALE if scales else Kind.TRANSFORM), None, None
    found = patterns.composite(graph, node)
    if found is not None:
        signal, kind = found
        if kind is Kind.SOFTMAX and patterns.weighs_values(graph, node):
            kind = Kind.WEIGHTS
        rule = _rule(graph, node, kind, preset, False)
        if isinstance(rule, Gradient):  # this kind keeps its gradient, and so do both factors
            return kind, None, rule
        if not isinstance(rule, (Identity, ScaleFixed)):
            return kind, signal, rule
        if rule.composites:
            return kind, signal, SignalTakesAll()
    return Kind.PRODUCT, None, None


def _rule(graph: Graph, node: int, kind: Kind, preset: Preset, first: bool, biased: bool = False) -> Rule:
    """The preset's rule; a module's rule serves the operations it fits and leaves the module's others alone."""
    module = graph.modules[node] if graph.modules else None
    rule = preset.rule(kind, graph.name(node), module, first, biased)
    if not rule.fits(kind) and module is not None:
        rule = preset.rule(kind, graph.name(node), None, first, biased)
    if not rule.fits(kind):
        served = ", ".join(sorted(rule.kinds or ()))
        raise PresetError(f"{graph.where(node)} is of kind {kind}, and {rule} serves only {served}")
    return rule


def _is_homogeneous(
    graph: Graph, node: int, kind: Kind, op: Op, live: tuple[int, ...], absent: tuple[int, ...]
) -> bool:
    edges = graph.edges[node]
    if kind in (Kind.LINEAR, Kind.CONV):
        assert op.linear is not None
        return op.linear.bias is None or op.linear.bias in absent or op.linear.bias in live
    if kind is Kind.SCALE:
        return True
    if op.kind is Kind.PRODUCT:
        return False  # something is added to it, or it holds both factors
    if kind in (Kind.MOVEMENT, Kind.SUM, Kind.POOL, Kind.TRANSFORM):
        carriers = op.carriers if op.carriers is not None else tuple(range(len(edges)))
        return all(i in live for i in carriers) and not op.fills
    return False


def _refuse_unmatched_modules(graph: Graph, preset: Preset) -> None:
    if not preset.modules:
        return
    if graph.modules is None:
        raise PresetError(
            f"{preset!r} names modules ({', '.join(p for p, _ in preset.modules)}), which only explain() and Explainer can "
            "see; relevance() sees operations."
        )
    for pattern, _ in preset.modules:
        probe = Preset("probe", (), (), ((pattern, Gradient()),))
        if not any(_matches(probe, module) for module in set(graph.modules)):
            seen = ", ".join(sorted(m for m in set(graph.modules) if m)[:8])
            raise PresetError(
                f"override {pattern!r} is no kind, no op and matches no module that ran. Kinds: "
                f"{', '.join(map(str, Kind))}, first. Modules: {seen}, …"
            )


def _matches(probe: Preset, module: str) -> bool:
    try:
        probe.rule(Kind.LEAF, "", module, False)
    except KeyError:
        return False
    return True


def settle_forms(graph: Graph, steps: dict[int, Step]) -> tuple[list[Step], tuple[str, ...], tuple[str, ...]]:
    """Walk from the outputs down and decide for every tensor whether it carries s or R.

    A node's outputs carry R when any consumer delivers R to it; consumers that deliver s then multiply by the value.
    """
    delivers: dict[int, str] = {}  # by node: what it hands down
    form: dict[int, str] = {}
    done: dict[int, Step] = {}

    positions: dict[int, list[tuple[int, int]]] = {}  # by node: the live uses of its outputs
    for ref, users in graph.consumers.items():
        live = [(user, position) for user, position in users if user in steps and position in steps[user].live]
        positions.setdefault(ref[0], []).extend(live)
    consumers = {node: [user for user, _ in users] for node, users in positions.items()}
    roots = {ref[0] for ref in graph.outputs}
    unreached: set[int] = set()
    blocked: dict[int, frozenset[int]] = {}
    captured = {ref[0] for ref in graph.inputs}
    for node in reversed(range(len(graph))):
        if node not in steps and node not in captured:
            continue
        form[node] = "R" if any(delivers[user] == "R" for user in consumers.get(node, ())) else "s"
        step = steps.get(node)
        if step is None:
            continue
        if node not in roots and not any(
            user not in unreached and i not in blocked[user] for user, i in positions.get(node, ())
        ):
            unreached.add(node)  # nothing arrives, so nothing has to be known
            step = step.changed(rule=Gradient(), part=None, reached=False)
        blocked[node] = frozenset(step.rule.blocks(step))
        rule = step.rule
        if form[node] == "R" and step.kind is Kind.SCALE and isinstance(rule, Gradient):
            rule = PassScale()
        convert = False
        if form[node] == "R" and rule.passes_relevance(step):
            delivers[node] = "R"
        elif form[node] == "R" and not rule.takes_relevance(step):
            convert = True
            delivers[node] = "R" if rule.delivers_relevance else "s"
        else:
            delivers[node] = "R" if rule.delivers_relevance else "s"
        done[node] = step.changed(rule=rule, form=form[node], convert=convert)
        if convert and any(ref[0] == node and ref[1] for ref in graph.consumers):
            raise UnsupportedTensorError(
                f"{graph.where(node)} has several outputs, and relevance (not a coefficient) arrives at it, which {rule} cannot take: "
                f'only what arrives at the first could be turned. Remedy: preset(…) | {{"{step.name}": Nothing()}}, or another rule for '
                "the operation above that hands relevance to zeros (flat, box, uniform average pool)."
            )
    for node, step in done.items():
        if delivers[node] == "s":
            refs = graph.edges[node]
            multiply = tuple(i for i in step.live if form.get(refs[i][0], "s") == "R")  # type: ignore[index]
            if multiply:
                done[node] = step.changed(multiply=multiply)
    ordered = [done[node] for node in sorted(done, reverse=True)]
    outputs = tuple(form.get(ref[0], "s") for ref in graph.outputs)
    inputs = tuple(form[ref[0]] for ref in graph.inputs)
    return ordered, outputs, inputs

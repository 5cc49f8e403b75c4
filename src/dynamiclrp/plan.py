"""Graph + preset → `Plan`: a rule for every live node and a source for every value a rule needs.

Pure: the same signature and preset give the same plan, so plans are cached. A plan holds no tensors, no shapes and no
autograd nodes; `run` applies it to any graph of the same signature, node by node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from . import patterns
from .errors import LostActivationError, PresetError, UnknownOpError
from .graph import Graph
from .ops import OPS, Kind, Op
from .presets import Preset, base_rules
from .promise import Key, Promise, Source, Sources, describe, operand_key, value_key
from .rules import (
    OUT,
    Epsilon,
    Gradient,
    Identity,
    PassScale,
    Relay,
    Rule,
    ScaleFixed,
    SignalTakesAll,
    Uniform,
    _LinearRule,
)

# Where a step finds a value: the name of an attribute of its own node, or a promised value.
Place = str | Key
FOLD_BIAS = -2  # the shift of a batch norm that is folded into the linear map below it


@dataclass(frozen=True)
class Step:
    """One live node: its rule and all that was decided about it."""

    node: int
    name: str
    op: Op
    kind: Kind
    rule: Rule
    live: tuple[int, ...]  # operands whose relevance reaches an input
    sharers: tuple[int, ...]  # operands that take a share: live ones and parameters
    homogeneous: bool  # its own backward hands down all that arrives
    signal: int | None = None  # the operand that takes all, where others are gates or statistics
    fold: int | None = None  # the batch norm that counts as part of this linear map
    has_bias: bool = False
    nonnegative: bool = False  # the live factor of a linear map cannot be negative
    rectified: bool = False  # the output is taken from the rectifier above: it equals it where relevance arrives
    form: str = "s"  # what arrives
    convert: bool = False  # what arrives is R, and the rule wants s
    multiply: tuple[int, ...] = ()  # operands to which R must be delivered where the rule delivers s
    places: Mapping[int, Place] = field(default_factory=dict)

    def needs(self, position: int) -> bool:
        return position in self.places

    @property
    def bias(self) -> int:
        """The position of the operand that a linear map adds."""
        return self.op.linear.bias if self.op.linear and self.op.linear.bias is not None else FOLD_BIAS

    @property
    def factors(self) -> tuple[int, ...]:
        return self.op.linear.factors if self.op.linear else (1, 2) if self.name == "Addcmul" else (0, 1)

    @property
    def live_factors(self) -> tuple[int, ...]:
        return tuple(i for i in self.live if i in self.factors) if self.op.linear or self.kind is Kind.PRODUCT else self.live

    @property
    def elementwise(self) -> bool:
        return self.op.linear is None

    @property
    def hooks(self) -> tuple[bool, bool]:
        """Does the step hook in before, after the native backward?"""
        before, after = self.rule.edits(self)
        return before or self.convert, after or bool(self.multiply)


@dataclass(frozen=True)
class Statistics:
    """The paper's quantities (its definitions 4 and 5, table 4)."""

    nodes: int
    live: int
    ops: int
    promises: int
    internal_nodes: int  # nodes inside forward chains
    depth: int  # δ: steps to the Arg nodes, summed over promises
    density: float  # ρ: promises per node


@dataclass(frozen=True, eq=False)
class Plan:
    """What `run` will do. `print(plan)` shows each rule and each promise with its chain and Arg node."""

    preset: Preset
    steps: tuple[Step, ...]  # all live nodes, in the order in which relevance meets them
    output_forms: tuple[str, ...]
    input_forms: tuple[str, ...]
    forms: dict[int, str]  # by node: what its outputs carry
    sources: dict[Key, Source]  # every value that will be fetched or rebuilt
    uses: Counter[Key]
    promises: tuple[Promise, ...]
    nodes: int
    ops: int

    @cached_property
    def hooked(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if any(step.hooks))

    @cached_property
    def statistics(self) -> Statistics:
        internal = sum(len(branch.chain) for promise in self.promises for branch in _branches(promise))
        depth = sum(promise.depth for promise in self.promises)
        count = len(self.promises)
        return Statistics(self.nodes, len(self.steps), self.ops, count, internal, depth, count / max(self.nodes, 1))

    def __str__(self) -> str:
        counts = Counter((step.name, str(step.kind), repr(step.rule) if any(step.hooks) else "native") for step in self.steps)
        width = max((len(name) for name, _, _ in counts), default=0)
        s = self.statistics
        lines = [
            f"Plan: {self.preset!r}, {s.live} live of {s.nodes} nodes, {len(self.hooked)} hooked, "
            f"{s.promises} promises, {s.internal_nodes} internal nodes, depth {s.depth}, density {s.density:.3f}",
        ]
        lines += [f"  {n:5} x {name:{width}}  {kind:10}  {rule}" for (name, kind, rule), n in sorted(counts.items())]
        if self.promises:
            lines.append("Promises:")
            lines += [f"  {line}" for promise in self.promises for line in promise.lines()]
        return "\n".join(lines)


def _branches(promise: Promise):
    for branch in promise.branches:
        yield branch
        for child in branch.children:
            yield from _branches(child)


def make_plan(graph: Graph, preset: Preset, *, everything: bool = False) -> Plan:
    """Choose a rule for every live node and promise every value that the rules need.

    `everything` also promises the values of all live tensors (for the ledger).
    """
    _refuse_unknown(graph)
    steps = _choose(graph, preset)
    steps, output_forms, input_forms = _settle_forms(graph, steps)
    return _promise(graph, preset, steps, output_forms, input_forms, everything)


def _refuse_unknown(graph: Graph) -> None:
    unknown = Counter(kind.__name__ for kind, runs in zip(graph.types, graph.runs) if runs and kind.__name__ not in OPS)
    if not unknown:
        return
    from .capture import output_shape

    shapes = {}
    for kind, handle in zip(graph.types, graph.handles):
        if kind.__name__ in unknown:
            shapes.setdefault(kind.__name__, tuple(output_shape(handle, 0)))
    listing = "\n".join(f"  {name} x{count}, first output {shapes[name]}" for name, count in unknown.most_common())
    example = next(iter(unknown))
    raise UnknownOpError(
        f"{len(unknown)} operation(s) have no rule:\n{listing}\n"
        f'Give each a row, for example: dynamiclrp.register("{example}", "activation"). '
        f"Kinds: {', '.join(map(str, Kind))}."
    )


# ------------------------------------------------------------------------------------------------------ choosing rules


def _choose(graph: Graph, preset: Preset) -> dict[int, Step]:
    first = patterns.first_layers(graph)
    foldable = patterns.folded_batch_norms(graph)
    nonnegative = patterns.nonnegative(graph)
    attributes = dict(graph.attributes)
    _refuse_unmatched_modules(graph, preset)
    steps: dict[int, Step] = {}
    relays: dict[int, int] = {}
    for node in range(len(graph)):
        if not graph.runs[node]:
            continue
        op = OPS[graph.types[node].__name__]
        name = graph.name(node)
        module = graph.modules[node] if graph.modules else None
        live = patterns.live_operands(graph, node)
        edges = graph.edges[node]
        kind, signal = op.kind, None
        rule: Rule | None = None
        if op.linear is not None and len([i for i in live if i in op.linear.factors]) != 1:
            kind = Kind.PRODUCT if any(i in op.linear.factors for i in live) else Kind.SUM
        elif kind is Kind.PRODUCT:
            kind, signal, rule = _product(graph, node, live, preset, module)
        if kind is Kind.BATCHNORM and attributes[node][0]:
            kind = Kind.NORMALISE  # batch statistics
        rule = rule or preset.rule(kind, name, module, node in first)
        if isinstance(rule, SignalTakesAll) and signal is None:
            signal = patterns.signal(graph, node)
            rule = rule if signal is not None else Uniform()
        absent = op.absent(attributes.get(node, ()))
        has_bias = op.linear is not None and op.linear.bias is not None and op.linear.bias not in absent
        fold = foldable.get(node) if isinstance(rule, _LinearRule) and rule.folds else None
        if fold is not None:
            relays[fold] = node
        steps[node] = Step(
            node=node,
            name=name,
            op=op,
            kind=kind,
            rule=_fitting(rule, kind, op),
            live=live,
            sharers=tuple(i for i, ref in enumerate(edges) if ref is not None),
            homogeneous=_is_homogeneous(graph, node, kind, op, live, absent),
            signal=signal,
            fold=fold,
            has_bias=has_bias or fold is not None,
            nonnegative=op.linear is not None and any(edges[i] in nonnegative for i in live if i in op.linear.factors),
        )
    for batch_norm in relays:
        steps[batch_norm] = replace(steps[batch_norm], rule=Relay())
    return steps


def _product(graph: Graph, node: int, live: tuple[int, ...], preset: Preset, module: str | None):
    """An elementwise product: a scaling, one written-out function, or two live factors."""
    factors = (1, 2) if graph.name(node) == "Addcmul" else (0, 1)
    if sum(i in factors for i in live) < 2:
        return (Kind.SUM if 0 in live and 0 not in factors else Kind.SCALE), None, None
    found = patterns.composite(graph, node)
    if found is not None:
        signal, kind = found
        rule = preset.rule(kind, graph.name(node), module, False)
        if isinstance(rule, (Identity, ScaleFixed)) and rule.composites:
            return kind, signal, SignalTakesAll()
        if isinstance(rule, Gradient):  # the preset treats this kind natively, so both factors keep their gradient
            return kind, None, rule
    return Kind.PRODUCT, None, None


def _fitting(rule: Rule, kind: Kind, op: Op) -> Rule:
    """Rules for maps with weights, asked for elsewhere by a module override, leave other operations alone."""
    linear = kind in (Kind.LINEAR, Kind.CONV)
    if isinstance(rule, _LinearRule) and not linear and not (isinstance(rule, Epsilon) and kind in (Kind.SUM, Kind.POOL)):
        return _DEFAULTS[kind]
    return rule


_DEFAULTS = {Kind(name): rule for name, rule in base_rules().items()}


def _is_homogeneous(graph: Graph, node: int, kind: Kind, op: Op, live: tuple[int, ...], absent: tuple[int, ...]) -> bool:
    edges = graph.edges[node]
    if kind in (Kind.LINEAR, Kind.CONV):
        assert op.linear is not None
        return op.linear.bias is None or op.linear.bias in absent or op.linear.bias in live
    if kind is Kind.SCALE:
        return True
    if kind in (Kind.MOVEMENT, Kind.SUM, Kind.POOL):
        return len(live) == len(edges) and graph.name(node) not in _WITH_CONSTANTS
    return False


# These add or fill in constants that leave no edge.
_WITH_CONSTANTS = frozenset({"MaskedFill", "ConstantPadNd", "Rsub", "CopySlices", "IndexPut", "Scatter"})


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


# ---------------------------------------------------------------------------------------------------------- s or R


def _settle_forms(graph: Graph, steps: dict[int, Step]) -> tuple[list[Step], tuple[str, ...], tuple[str, ...]]:
    """Walk from the outputs down and decide for every tensor whether it carries s or R.

    A node's outputs carry R when any consumer delivers R to it; consumers that deliver s then multiply by the value.
    """
    delivers: dict[int, str] = {}  # by node: what it hands down
    form: dict[int, str] = {}
    done: dict[int, Step] = {}

    consumers: dict[int, list[int]] = {}
    for ref, users in graph.consumers.items():
        live = [user for user, position in users if user in steps and position in steps[user].live]
        consumers.setdefault(ref[0], []).extend(live)
    captured = {ref[0] for ref in graph.inputs}
    for node in reversed(range(len(graph))):
        if node not in steps and node not in captured:
            continue
        form[node] = "R" if any(delivers[user] == "R" for user in consumers.get(node, ())) else "s"
        step = steps.get(node)
        if step is None:
            continue
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
        done[node] = replace(step, rule=rule, form=form[node], convert=convert)
    for node, step in done.items():
        if delivers[node] == "s":
            refs = graph.edges[node]
            multiply = tuple(i for i in step.live if form.get(refs[i][0], "s") == "R")  # type: ignore[index]
            if multiply:
                done[node] = replace(step, multiply=multiply)
    ordered = [done[node] for node in sorted(done, reverse=True)]
    outputs = tuple(form.get(ref[0], "s") for ref in graph.outputs)
    inputs = tuple(form[ref[0]] for ref in graph.inputs)
    return ordered, outputs, inputs


# ---------------------------------------------------------------------------------------------------------- promises


def _promise(
    graph: Graph,
    preset: Preset,
    steps: list[Step],
    output_forms: tuple[str, ...],
    input_forms: tuple[str, ...],
    everything: bool,
) -> Plan:
    forms = {step.node: step.form for step in steps}
    wanted = [_wanted(graph, step, forms) for step in steps]
    keys = {place for places in wanted for place in places.values() if isinstance(place, tuple)}
    sources: Sources | None = Sources(graph) if keys or everything else None
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
    return Plan(
        preset=preset,
        steps=tuple(
            replace(step, places=places, rectified=_is_rectified(graph, step, forms)) for step, places in zip(steps, wanted)
        ),
        output_forms=output_forms,
        input_forms=input_forms,
        forms=forms | {ref[0]: form for ref, form in zip(graph.inputs, input_forms)},
        sources=needed,
        uses=uses,
        promises=describe(graph, sources, origins) if sources else (),
        nodes=len(graph),
        ops=len(set(graph.types)),
    )


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
        elif position == FOLD_BIAS or (step.fold is not None and position == step.bias):
            assert step.fold is not None
            places[FOLD_BIAS] = operand_key(graph, step.fold, 2)
            if step.op.linear and step.op.linear.bias is not None:
                places[step.op.linear.bias] = operand_key(graph, step.node, step.op.linear.bias)
        else:
            own = step.op.keeps(position, graph.edges[step.node])
            places[position] = own or operand_key(graph, step.node, position)
    return places


def _output(graph: Graph, step: Step, forms: dict[int, str]) -> Place:
    node = step.fold if step.fold is not None else step.node
    if _is_rectified(graph, step, forms):
        return value_key((graph.consumers[(node, 0)][0][0], 0))
    if step.fold is None and step.op.result is not None:
        return step.op.result
    return value_key((node, 0))


def _is_rectified(graph: Graph, step: Step, forms: dict[int, str]) -> bool:
    """Is a rectifier the only consumer? No relevance arrives where it is shut, and where it is open the values agree."""
    if not isinstance(step.rule, (_LinearRule, Relay)):
        return False
    node = step.fold if step.fold is not None else step.node
    users = graph.consumers.get((node, 0), [])
    if len(users) != 1 or (node, 0) in graph.outputs or forms[node] != "s":
        return False
    above = OPS.get(graph.types[users[0][0]].__name__)
    return above is not None and above.rectifies


def _closure(sources: Sources, keys: set[Key], uses: Counter[Key]) -> dict[Key, Source]:
    """All sources behind the keys, counting how often each value is used."""
    needed: dict[Key, Source] = {}
    stack = list(keys)
    while stack:
        key = stack.pop()
        if key in needed:
            continue
        source = sources.get(key)
        assert source is not None
        needed[key] = source
        for operand in source.operands:
            uses[operand] += 1
            stack.append(operand)
    return needed


def _lost(graph: Graph, lost: list[tuple[Step, int]]) -> LostActivationError:
    from .capture import output_shape

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

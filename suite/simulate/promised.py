"""Compare a simulated rank with the closed formulas of its strategy, tolerance 0.

The last step is compared: bytes of each judged class at each mark; limits of communication,
activations and temporaries there; peaks within their bounds; activations at their peak, by the
published formulas of a Transformer; bytes and calls along each axis; integers by which ranks agree;
and the process groups that the system makes in addition to those of its mesh.

*Cannot see* values.  Traffic of a rank is compared if the formula has a figure for each rank, or
the same one for all; messages, by the place that sends them.  :func:`not_judged` names the others:
ranks differ if there are stages, or if ranks of another axis share a tensor unevenly.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from shardproof import axes, registry
from shardproof.checks.traffic import CONTROL_BYTES, CONTROL_BYTES_A_NAME, axis_of
from shardproof.costs import CostModel, Flow, NoCostModel, cost_model_of, schedules, shapes, stages
from shardproof.costs.model import JUDGED
from shardproof.costs.shapes import activations
from shardproof.ledgers.memory.log import FILE
from shardproof.ledgers.memory.summary import PHASES, summary
from shardproof.simulate.rank import SimulatedRank
from shardproof.simulate.sources import ShapeSource

#: Fewest and most calls, and their bytes: the share of one rank in the total of all ranks.
Share = tuple[Fraction, Fraction, Fraction]
_NOTHING: Share = (Fraction(), Fraction(), Fraction())
#: Axis and operation -> share.
Promised = Mapping[tuple[str, str], Share]
#: Operations in which each rank of a group does the same.
_ALIKE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
#: Process groups that a system may make for each group of its mesh, such as a copy of it.
_MOST_GROUPS_AN_AXIS = 2
#: Formulas leave out numbers for each row: of norms, of flash attention, of the loss.
_MOST_ACTIVATIONS = Fraction(11, 10)


def cost_model(source: ShapeSource, accounting: str) -> CostModel | None:
    """The promises of the strategy of ``source``; ``None``: there are none."""
    strategy = registry.load(source.implementation).strategy
    facts = shapes.facts_of(source.shape, source.axes, source.options, accounting, source.work)
    facts = replace(facts, routed=_routed(source, len(facts.micro_batches)))
    try:
        return cost_model_of(strategy, facts)
    except NoCostModel:
        return None


def _routed(
    source: ShapeSource, coordinates: int
) -> tuple[tuple[Mapping[str, tuple[int, ...]], ...], ...]:
    """The rows of each expert in a step, by data coordinate: tokens choose experts in turn."""
    if (of := source.shape.mixture) is None:
        return ()
    work = source.work
    rows, rest = divmod(work.samples * (work.positions or source.shape.seq) * of.top_k, of.experts)
    counts = tuple((rows + (number < rest)) * work.micro_batches for number in range(of.experts))
    layers = range(of.dense, source.shape.layers)
    return (({f"blocks.{index}.mlp": counts for index in layers},) * coordinates,)


def broken(
    source: ShapeSource, made: Sequence[SimulatedRank], accounting: str = "A32"
) -> list[str]:
    """A sentence for each promise that ranks ``made`` of ``source`` break.

    :raises NoCostModel: nothing is promised.
    """
    model = _required(source, accounting)
    found = list[str]()
    for one in made:
        memory = *_held(model, one), *_working(source, model, one)
        wrong = (*memory, *_sent(model, one), *_around(model, one))
        found += [f"rank {one.rank:,}: {text}" for text in wrong]
    return found


def not_judged(
    source: ShapeSource, made: Sequence[SimulatedRank], accounting: str = "A32"
) -> list[str]:
    """The parts of memory and traffic of ``made`` that :func:`broken` cannot compare.

    :raises NoCostModel: nothing is promised.
    """
    model, found = _required(source, accounting), dict[str, None]()
    if model.why_not_measured():
        found["memory"] = None
    try:
        unknown = {key for one in made for key in _promised(model, one.rank)[1]}
    except NoCostModel:
        return [*found, "traffic"]
    return [*found, *(_along(*key) for key in sorted(unknown))]


def _required(source: ShapeSource, accounting: str) -> CostModel:
    if (model := cost_model(source, accounting)) is None:
        raise NoCostModel(f"nothing is promised of {source.implementation}")
    return model


def _along(axis: str, operation: str) -> str:
    return f"{operation.replace('_', '-')} along {axis}"


#: Memory space (``device`` or ``host``) -> class -> bytes.
Spaces = Mapping[str, Mapping[str, int]]


def _spaces(made: SimulatedRank, step: int) -> dict[tuple[str, str], Spaces]:
    """Moment (``mark`` or ``peak``) and its place -> bytes of the last step."""
    found = defaultdict[tuple[str, str], dict[str, Counter[str]]](lambda: defaultdict(Counter))
    for row in summary(made.log):
        if row.step == step:
            space = "host" if row.device == FILE else "device"
            found[row.moment, row.where][space][row.kind] += row.bytes
    return {key: {space: dict(of) for space, of in each.items()} for key, each in found.items()}


def _held(model: CostModel, made: SimulatedRank) -> Iterator[str]:
    """Wrong bytes at the marks of the last step, where nothing is in flight, and wrong peaks."""
    step, rank, unjudged = len(made.calls) - 1, made.rank, model.unjudged()
    if model.why_not_measured():
        return
    spaces = _spaces(made, step)
    for point in [name for name, of, _ in made.log.marks if of == step]:
        updated = step if point == "after_update" else step - 1
        device = model.resident(rank, step, updated) | model.at_point(rank, point, updated)
        promised = {"device": device, "host": model.host(rank, step, updated)}
        at = spaces.get(("mark", point), {})
        for space, wanted in promised.items():
            held, where = at.get(space, {}), "" if space == "device" else " in host memory"
            for kind in JUDGED:
                size, own = wanted.get(kind, 0), held.get(kind, 0)
                if kind not in unjudged and own != size:
                    what = f"{size:,} bytes{where} promised, {own:,} held"
                    yield f"{point}: {_named(kind)}: {what}"
        near = at.get("device", {})
        if (limit := model.communication_at_rest(rank, step)) is not None:
            yield from _above(f"{point}: communication", near.get("communication", 0), limit)
        if (limit := model.unclassified_limit(rank, step)) is not None:
            rest, most = (near.get(k, 0) for k in ("activations", "temporary")), limit
            most += model.facts.noted
            yield from _above(f"{point}: activations and temporaries", sum(rest), most)
    for phase in PHASES:
        near = spaces.get(("peak", phase), {}).get("device", {})
        for name, bound in model.peaks(rank, phase, step).items():
            if not bound.low <= (most_held := near.get(name, 0)) <= bound.high:
                limits = f"{bound.low:,} to {bound.high:,} bytes promised"
                yield f"peak in {phase}: {_named(name)}: {limits}, {most_held:,} held"


def _working(source: ShapeSource, model: CostModel, made: SimulatedRank) -> Iterator[str]:
    """Activations at their highest moment, of shapes that formulas know."""
    shape, facts, step = source.shape, model.facts, len(made.calls) - 1
    if shape.mixture or shape.latent or shape.image:
        return
    how = activations.LayerSetting(
        item=shapes.itemsize(facts),
        tensor=facts.parts("widths"),
        sequence_parallel=bool(facts.option("sequence_parallel", False)),
        recompute=int(facts.option("recompute_every", 0)) or activations.NONE,
        cut=facts.parts("positions"),
    )
    if (wanted := _needed(source, model, how, made.rank)) is None:
        return
    limit = int(wanted * _MOST_ACTIVATIONS)
    for phase in PHASES:
        peak = made.log.peaks("activations").get((step, phase))
        yield from _above(f"peak in {phase}: activations", peak.bytes if peak else 0, limit)


def _needed(
    source: ShapeSource, model: CostModel, how: activations.LayerSetting, rank: int
) -> Fraction | None:
    """Bytes that backward needs for all that ``rank`` has begun; ``None``: no formula."""
    shape, work, facts = source.shape, source.work, model.facts
    entering = Fraction(how.tokens(shape, work) * shape.hidden * how.item)
    if how.sequence_parallel:
        entering /= how.tensor
    # torch composes an RMS norm of operators.  These keep the input times the inverse root as well
    # as the input, and an fp32 copy of an input of fewer bits.
    wide = 1 + Fraction(4, how.item) * (how.item < 4)
    normed = entering * wide * (shape.norm == "rms")
    layer = activations.of_layer(shape, work, how) + 2 * float(normed)
    unit = activations.UnitBytes(layer, float(entering))
    first, last = activations.of_ends(shape, work, how)
    last += float(normed)
    if (ranks := facts.parts("layers")) == 1:
        whole = activations.of_units(first, [unit] * shape.layers, last, how.recompute)
        return Fraction(whole.peak)
    place, lie = facts.place(rank, axes.cutting("layers")), stages.stages_of(facts)
    own = lie.of(place)
    form = schedules.FORMS.get(stages.schedule_name(facts.options) or "")
    if form is None:
        return None
    flying = form.held(schedules.Setting(ranks, work.micro_batches, len(own)), place)
    if flying is None:
        return None
    most = max(len(lie.units[stage]) for stage in own)
    kept = activations.of_units(first, [unit] * most, 0, how.recompute)
    # All forwards may come first; ranks with several stages run the last one's backward at once.
    ends = last * (len(lie.units) - 1 in own) * (flying if len(own) == 1 else 1)
    # Each micro-batch keeps the stage's output as well, from which its backward begins.
    begun = flying * (kept.by_forward + float(entering))
    return Fraction(begun + kept.peak - kept.by_forward + ends)


def _above(what: str, held: int, limit: int) -> Iterator[str]:
    if held > limit:
        yield f"{what}: at most {limit:,} bytes promised, {held:,} held"


def _named(kind: str) -> str:
    return kind.replace("_", " ")


def _sent(model: CostModel, made: SimulatedRank) -> Iterator[str]:
    """Wrong calls of floating-point tensors, and wrong logical bytes of them."""
    mesh = model.facts.axes
    sent: dict[tuple[str, str], tuple[int, Fraction]] = {}
    for call in made.calls[-1]:
        if call.floating and call.phase != "observe" and len(call.group) > 1:
            key = axis_of(call.group, mesh), call.operation
            calls, size = sent.get(key, (0, Fraction()))
            sent[key] = calls + 1, size + call.logical_bytes
    try:
        promised, unknown = _promised(model, made.rank)
    except NoCostModel:
        return  # not_judged says so
    for axis, operation in sorted({*sent, *promised} - unknown):
        calls, size = sent.get((axis, operation), (0, Fraction()))
        low, high, wanted = promised.get((axis, operation), _NOTHING)
        what = _along(axis, operation)
        if size != wanted:
            yield f"{what}: {float(wanted):,.0f} bytes promised, {float(size):,.0f} sent"
        elif not low <= calls <= high:
            most = f"{int(low):,}" if low == high else f"{int(low):,} to {int(high):,}"
            yield f"{what}: {most} calls promised, {calls:,} made"


def _promised(model: CostModel, rank: int) -> tuple[Promised, set[tuple[str, str]]]:
    """The traffic of ``rank``, and the keys of flows that are not promised rank by rank."""
    found: dict[tuple[str, str], Share] = {}
    unknown = set[tuple[str, str]]()
    for flow in (one for one in model.sent() if not one.integers):
        key = flow.axis, flow.operation
        share = _share(model, flow, rank)
        if share is None:
            unknown.add(key)
            continue
        low, high, size = found.get(key, _NOTHING)
        least, most, own = share
        found[key] = low + least, high + most, size + own
    return found, unknown


def _share(model: CostModel, flow: Flow, rank: int) -> Share | None:
    facts = model.facts
    if flow.by_rank is not None:
        calls, size = flow.by_rank[rank]
        return Fraction(calls), Fraction(calls), size
    others = [size for axis, size in facts.axes.items() if axis not in flow.axis.split("+")]
    # The formula is the sum over ranks, whose shares may be uneven along another axis.
    uneven = any(t.shape and t.shape[0] % size for t in facts.parameters for size in others)
    if flow.operation in ("send", "recv") and not uneven:
        return Fraction(), Fraction(sys.maxsize), _messages(model, flow, rank)
    # In a call with a root, that rank alone sends or receives everything.
    if facts.parts("layers") > 1 or uneven or flow.operation not in _ALIKE:
        return None
    least, most = flow.range
    # Fractions: several flows can add up to the calls, each with those of some ranks only.
    world = facts.world
    return Fraction(least, world), Fraction(most, world), flow.bytes / world


def _messages(model: CostModel, flow: Flow, rank: int) -> Fraction:
    """Bytes that ``rank`` sends from its place on the axis."""
    size, inner = model.facts.size(flow.axis), 1
    for axis, of in reversed([*model.facts.axes.items()]):
        if axis == flow.axis:
            break
        inner *= of
    place, lines = rank // inner % size, model.facts.world // size
    sent = (n for (source, _), n in flow.between.items() if source == place)
    return sum(sent, Fraction()) / lines


def _around(model: CostModel, made: SimulatedRank) -> Iterator[str]:
    """Too many bytes of integers by which ranks agree, and too many process groups."""
    facts, names = model.facts, len(model.facts.parameters)
    spent = sum(c.payload_bytes for c in made.calls[-1] if not c.floating and c.phase != "observe")
    own = model.control_limit()
    most = CONTROL_BYTES + CONTROL_BYTES_A_NAME * names if own is None else own // facts.world
    try:
        values = sum(flow.bytes for flow in model.flows() if flow.integers)
    except NoCostModel:
        return
    most += (model.metadata_bytes() + int(values)) // facts.world + 1
    if spent > most:
        yield f"integers: at most {most:,} bytes promised, {spent:,} sent"
    limit = _MOST_GROUPS_AN_AXIS * sum(
        facts.world // size for size in facts.axes.values() if size > 1
    )
    if made.groups > limit:
        yield f"process groups: at most {limit:,} expected, {made.groups:,} made"

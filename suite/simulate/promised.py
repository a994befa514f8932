"""A simulated rank against the closed formulas of its strategy, tolerance 0.

Compared in the last step: bytes of each judged class at each mark, what may remain of
communication, activations and temporaries there, and peaks within their bounds; what backward
needs, against the published formulas of a transformer; bytes and calls along each axis; integers by
which ranks agree; and the process groups that the system makes beside those of its mesh.

*Cannot see* values.  Bytes and calls of a rank are compared where formulas promise each rank its
own, or every rank the same: along the axis of stages, and beside it, ranks differ, and only
messages are told by their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from shardproof import axes, registry
from shardproof.checks.traffic import CONTROL_BYTES, CONTROL_BYTES_A_NAME, axis_of
from shardproof.costs import CostModel, Flow, NoCostModel, cost_model_of, schedules, shapes, stages
from shardproof.costs.model import JUDGED
from shardproof.costs.shapes import activations
from shardproof.ledgers.memory.summary import PHASES
from shardproof.simulate.rank import SimulatedRank
from shardproof.simulate.sources import ShapeSource

#: Axis and operation -> fewest and most calls, and their bytes; shares of what all ranks send.
Promised = Mapping[tuple[str, str], tuple[Fraction, Fraction, Fraction]]
#: Process groups that a system may make for itself: in twos, or a copy of each axis's.
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
    """The rows of each expert in a step, by data coordinate: choices go through experts in turn."""
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
    """The promises that ranks ``made`` of ``source`` break, each in a sentence.

    :raises NoCostModel: nothing is promised.
    """
    if (model := cost_model(source, accounting)) is None:
        raise NoCostModel(f"nothing is promised of {source.implementation}")
    found = list[str]()
    for one in made:
        at_rest, at_work = _held(model, one), (*_peaks(model, one), *_working(source, model, one))
        wrong = (*at_rest, *at_work, *_sent(model, one), *_around(model, one))
        found += [f"rank {one.rank:,}: {text}" for text in wrong]
    return found


def _held(model: CostModel, made: SimulatedRank) -> Iterator[str]:
    """At each mark of the last step, where nothing is in flight."""
    step, rank, unjudged = len(made.calls) - 1, made.rank, model.unjudged()
    if model.why_not_measured():
        return
    for point in [name for name, of, _ in made.log.marks if of == step]:
        updated = step if point == "after_update" else step - 1
        wanted = model.resident(rank, step, updated) | model.at_point(rank, point, updated)
        host, held = model.host(rank, step, updated), made.log.bytes(point, step)
        for kind in JUDGED:
            size = wanted.get(kind, 0) + host.get(kind, 0)
            if kind not in unjudged and held[kind] != size:
                yield f"{point}: {_named(kind)}: {held[kind]:,} bytes held, {size:,} promised"
        if (limit := model.communication_at_rest(rank, step)) is not None:
            yield from _above(f"{point}: communication", held["communication"], limit)
        if (limit := model.unclassified_limit(rank, step)) is not None:
            rest = held["activations"] + held["temporary"]
            yield from _above(
                f"{point}: activations and temporaries", rest, limit + model.facts.noted
            )


def _above(what: str, held: int, limit: int) -> Iterator[str]:
    if held > limit:
        yield f"{what}: {held:,} bytes held, at most {limit:,} promised"


def _named(kind: str) -> str:
    return kind.replace("_", " ")


def _peaks(model: CostModel, made: SimulatedRank) -> Iterator[str]:
    step = len(made.calls) - 1
    for phase in PHASES:
        for kind, bound in model.peaks(made.rank, phase, step).items():
            peak = made.log.peaks(kind).get((step, phase))
            held = peak.bytes if peak else 0
            if not bound.low <= held <= bound.high:
                wanted = f"{bound.low:,} to {bound.high:,} promised"
                yield f"peak in {phase}: {_named(kind)}: {held:,} bytes held, {wanted}"


def _working(source: ShapeSource, model: CostModel, made: SimulatedRank) -> Iterator[str]:
    """Activations at their highest moment, of shapes that formulas know."""
    shape, facts, step = source.shape, model.facts, len(made.calls) - 1
    if shape.mixture or shape.latent or shape.image:
        return
    how = activations.Setting(
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
    source: ShapeSource, model: CostModel, how: activations.Setting, rank: int
) -> Fraction | None:
    """Bytes that backward needs of all that ``rank`` has begun; ``None``: no formula."""
    shape, work, facts = source.shape, source.work, model.facts
    entering = Fraction(how.tokens(shape, work) * shape.hidden * how.item)
    if how.sequence_parallel:
        entering /= how.tensor
    # torch composes RMS norms of operators, which keep the product with the root beside the input,
    # and of narrow inputs a copy in fp32.
    wide = 1 + Fraction(4, how.item) * (how.item < 4)
    normed = entering * wide * (shape.norm == "rms")
    layer = activations.of_layer(shape, work, how) + 2 * float(normed)
    unit = activations.Unit(layer, float(entering))
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
    ends = last * (len(lie.units) - 1 in own)
    # Each micro-batch keeps the stage's output as well, from which its backward begins.
    begun = flying * (kept.by_forward + float(entering))
    return Fraction(begun + kept.peak - kept.by_forward + ends)


def _sent(model: CostModel, made: SimulatedRank) -> Iterator[str]:
    """Calls of floating-point tensors, and their logical bytes."""
    mesh = model.facts.axes
    sent: dict[tuple[str, str], tuple[int, Fraction]] = {}
    for call in made.calls[-1]:
        if call.floating and call.phase != "observe" and len(call.group) > 1:
            key = axis_of(call.group, mesh), call.operation
            calls, size = sent.get(key, (0, Fraction()))
            sent[key] = calls + 1, size + call.logical_bytes
    promised, unknown = _promised(model, made.rank)
    for axis, operation in sorted({*sent, *promised} - unknown):
        calls, size = sent.get((axis, operation), (0, Fraction()))
        low, high, wanted = promised.get((axis, operation), (Fraction(),) * 3)
        what = f"{operation.replace('_', '-')} along {axis}"
        if size != wanted:
            yield f"{what}: {float(size):,.0f} bytes sent, {float(wanted):,.0f} promised"
        elif not low <= calls <= high:
            most = f"{int(low):,}" if low == high else f"{int(low):,} to {int(high):,}"
            yield f"{what}: {calls:,} calls made, {most} promised"


def _promised(model: CostModel, rank: int) -> tuple[Promised, set[tuple[str, str]]]:
    """The traffic of ``rank``, and the keys of flows that are not promised rank by rank."""
    found: dict[tuple[str, str], tuple[Fraction, Fraction, Fraction]] = {}
    unknown = set[tuple[str, str]]()
    for flow in (one for one in model.sent() if not one.integers):
        key = flow.axis, flow.operation
        share = _share(model, flow, rank)
        if share is None:
            unknown.add(key)
            continue
        low, high, size = found.get(key, (Fraction(),) * 3)
        least, most, own = share
        found[key] = low + least, high + most, size + own
    return found, unknown


def _share(model: CostModel, flow: Flow, rank: int) -> tuple[Fraction, Fraction, Fraction] | None:
    facts = model.facts
    if flow.by_rank is not None:
        calls, size = flow.by_rank[rank]
        return Fraction(calls), Fraction(calls), size
    others = [size for axis, size in facts.axes.items() if axis not in flow.axis.split("+")]
    # Ranks of another axis may have uneven shares, of which the formula is the sum.
    uneven = any(t.shape and t.shape[0] % size for t in facts.parameters for size in others)
    if facts.parts("layers") > 1 or uneven:
        return None
    least, most = flow.range
    # A fraction: where formulas of several ranks add up, each tells the calls of some of them.
    world = facts.world
    return Fraction(least, world), Fraction(most, world), flow.bytes / world


def _around(model: CostModel, made: SimulatedRank) -> Iterator[str]:
    """Integers by which ranks agree, and groups."""
    facts, names = model.facts, len(model.facts.parameters)
    spent = sum(c.payload_bytes for c in made.calls[-1] if not c.floating and c.phase != "observe")
    own = model.control_limit()
    most = CONTROL_BYTES + CONTROL_BYTES_A_NAME * names if own is None else own // facts.world
    values = sum(flow.bytes for flow in model.flows() if flow.integers)
    most += (model.metadata_bytes() + int(values)) // facts.world + 1
    if spent > most:
        yield f"integers: {spent:,} bytes sent, at most {most:,} promised"
    limit = _MOST_GROUPS_AN_AXIS * sum(facts.world // size for size in facts.axes.values())
    if made.groups > limit:
        yield f"process groups: {made.groups:,} made, at most {limit:,} expected"

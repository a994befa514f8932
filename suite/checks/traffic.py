"""Calls and bytes equal the closed formula on each axis, with tolerance 0, in every step.

Counted is the floating-point payload of calls issued inside ``step`` (forward, backward, update;
not at observation points), by the collective model of ground truth (logical bytes, not bytes on the
wire), summed over ranks in exact rationals; and the calls, where their number is promised, in
groups of more than one rank.  Integers count alike where they are promised: indices and signs of
compressed gradients.  A scenario's own ``expect.traffic`` is compared with the sum over
all axes instead.  Set-up and control traffic (integers, objects, barriers) stand in rows of their
own; a step's control traffic is bounded, for gradients can travel disguised as integers.  For an
upstream system, which is held to its own formula, the textbook's bytes stand beside.

On a cluster of several nodes each promised flow is also split into bytes inside nodes and bytes
between them (``ledgers/places.py``), and the latter compared alike: HYBRID_SHARD gathers inside.

*Cannot see* wire bytes, latency, or traffic that bypasses process groups.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from shardproof import strategies
from shardproof.checks import Needs, Outcome, Worst
from shardproof.checks.numbers import Tally
from shardproof.costs import CostModel, Flow, NoCostModel, compression, cost_model_of
from shardproof.costs.expression import evaluate
from shardproof.costs.families import Family
from shardproof.costs.own import in_step
from shardproof.evidence.assembled import Figures
from shardproof.evidence.records import RankRecord
from shardproof.files import SparselyStored
from shardproof.ledgers import places
from shardproof.ledgers.places import Lie
from shardproof.ledgers.traffic import LoggedCall

NEEDS: Needs = ("calls",)

#: Control traffic of a step of data parallelism, per rank: at most this, and this for every name.
CONTROL_BYTES = 4096
CONTROL_BYTES_A_NAME = 64
#: Phases of no step, whose calls are not training's.
_AROUND = ("setup", "save", "load")
#: Of right sums without a call in the ledger, and of wrong ones.
_ELSEWHERE = "no call was logged: traffic goes through a group outside the mesh"
_SILENT = "the numbers are wrong, and no call used a group of the mesh"


def decide(evidence: Figures) -> Outcome:
    """Compare each step's floating-point payload with the cost model or the scenario's formula."""
    case, strategy = evidence.case, evidence.declaration.strategy
    own = case.expect.get("traffic")
    promise = f"family {evidence.family.name}" if evidence.family else f"{strategy}.payload_bytes"
    promises = [promise_of(evidence, step) for step in evidence.steps]
    sent = [_payload(evidence, step) for step in evidence.steps]
    figures = _counted(evidence, own or promise, sent[-1])
    # Of a family it is not known which integers are a compressed gradient: all are bounded as one.
    compressed = evidence.depth == "family" and is_compressed(evidence)
    for step, value, cost_model in zip(evidence.steps, sent, promises, strict=True):
        if own:
            expected = evaluate(own, evidence.facts)
            sent_of = f"step {step} sends {_text(value)} bytes of floating-point payload"
            asked = f"{own} promises {_text(expected)}"
            message = f"{sent_of} over all ranks, {asked}" if value != expected else ""
        elif cost_model is not None:
            try:
                expected = cost_model.payload()
            except NoCostModel as error:
                return Outcome("traffic", "skip", str(error), None, figures.to_dict())
            value, message = _against(evidence, step, value, cost_model, figures)
        elif evidence.family is not None:
            low, high = figures.within = _family_bounds(evidence, evidence.family, step)
            if compressed:
                value += _payload(evidence, step, floating=False)
            if low and not value:
                if Tally.of(evidence.compared.get("equivalence", [])).wrong:
                    return Outcome("traffic", "fail", _SILENT, None, figures.to_dict())
                return Outcome("traffic", "undecidable", _ELSEWHERE, None, figures.to_dict())
            if low <= value <= high:
                continue
            message = _out_of_family(evidence, step, value, low, high)
            # The bound that is broken, so that the distance shows by how much.
            expected = Fraction(low if value < low else high)
        else:
            what = f"nothing is promised of what strategy {strategy!r} sends"
            return Outcome("traffic", "skip", what, None, figures.to_dict())
        figures.bytes_expected, figures.bytes_sent = str(expected), str(value)
        if message:
            distance = float(abs(value - expected))
            worst = Worst("payload bytes", step, "step", "all ranks", distance, 0.0)
            return Outcome("traffic", "fail", message, worst, figures.to_dict())
    problem = "" if compressed and not own else _too_much_control(evidence, promises)
    problem = problem or _too_many_agreements(evidence)
    return Outcome("traffic", "fail" if problem else "pass", problem, None, figures.to_dict())


@dataclass(frozen=True)
class SentAlongAxis:
    """Calls of one operation along one axis in a step over all ranks, and their logical bytes."""

    axis: str
    operation: str
    calls: int | tuple[int, int] | None
    bytes: str


@dataclass(frozen=True)
class Between:
    """Of the bytes of one operation along one axis in a step those that went ``across`` nodes.

    ``lies``: how the axis lies over nodes.  ``promised``: bytes across by the formula; ``None``: it
    does not split them, because groups lie in different ways, or receivers differ.
    """

    axis: str
    lies: Lie
    operation: str
    bytes: str
    across: str
    promised: str | None


@dataclass
class TrafficFigures(SparselyStored):
    """The calls that ranks ``sent`` in the last step, with the ``flows`` of the cost model.

    Bytes are exact fractions, as text.  ``within``: least and most of the family,
    at that depth.  ``textbook``: the strategy that an upstream system carries
    out, by whose formula it would send ``textbook_bytes``.  ``between_nodes``: where ranks were on
    several nodes, what of it crossed them.
    """

    formula: str
    bytes_sent: str
    sent: Sequence[SentAlongAxis]
    calls_per_step: int
    setup_bytes: str
    control_bytes: str
    source: str | None = None
    flows: Sequence[SentAlongAxis] | None = None
    textbook: str | None = None
    textbook_bytes: str | None = None
    bytes_expected: str | None = None
    within: tuple[int, int] | None = None
    between_nodes: Sequence[Between] | None = None


def _counted(evidence: Figures, formula: str, last_sent: Fraction) -> TrafficFigures:
    """The traffic of the ranks as figures: the last step's flows, set-up and control."""
    last = evidence.steps[-1]
    return TrafficFigures(
        formula=formula,
        bytes_sent=str(last_sent),
        sent=_rows(flows_of(evidence, last)),
        calls_per_step=len(step_calls(evidence.records[0], last)),
        setup_bytes=str(_bytes(evidence, lambda r: (c for c in r.traffic if c.phase == "setup"))),
        control_bytes=str(_bytes(evidence, _control_calls)),
    )


def _against(
    evidence: Figures, step: int, value: Fraction, cost_model: CostModel, figures: TrafficFigures
) -> tuple[Fraction, str]:
    """``value`` with the integers that are promised, and how ``step`` differs from its cost model
    (``""``: it does not); ``figures`` get what the model says.
    """
    strategy = evidence.declaration.strategy
    flows = cost_model.sent()
    figures.source = cost_model.source
    figures.flows = [SentAlongAxis(f.axis, f.operation, f.calls, str(f.bytes)) for f in flows]
    _set_textbook(figures, cost_model)
    floats, integers = ([f for f in flows if f.integers is kind] for kind in (False, True))
    # Integers that were sent by operations of which some are promised; the rest is control.
    kinds = {(flow.axis, flow.operation) for flow in integers}
    others = flows_of(evidence, step, floating=False) if kinds else {}
    counted: Flows = {key: flow for key, flow in others.items() if key in kinds}
    value += sum((size for _, size in counted.values()), Fraction(0))
    if step == evidence.steps[-1]:
        figures.sent = [*figures.sent, *_rows(counted)]
    # From coarse to fine, and the first sentence counts: all ranks, each rank, between nodes.
    others_of = partial(_are_of_other_dtype, evidence, step)
    message = _flow_differs(step, strategy, flows_of(evidence, step), floats, others_of)
    message = message or _flow_differs(step, strategy, counted, integers, others_of, " of integers")
    message = message or _rank_differs(evidence, step, strategy, floats)
    homes = {record.node for record in evidence.records}
    # Where members change groups are not those of the mesh.
    if not message and None not in homes and len(homes) > 1 and not evidence.case.changes_members:
        figures.between_nodes = _between_nodes(evidence, step, flows)
        message = _between_differs(figures.between_nodes, step, strategy)
    return value, message


#: (axis, operation) -> calls and logical bytes, summed over ranks.
Flows = dict[tuple[str, str], tuple[int, Fraction]]


def flows_of(
    evidence: Figures, step: int, one: RankRecord | None = None, floating: bool = True
) -> Flows:
    """The calls that the ranks (or ``one`` of them) sent in ``step``; groups of one rank send
    nothing and do not count.
    """
    flows: Flows = {}
    for record in evidence.records if one is None else [one]:
        # A record may stand for several ranks that run alike.
        times = len(record.ranks) if one is None else 1
        for call in step_calls(record, step, floating):
            if len(call.group) > 1:
                key = axis_of(call.group, evidence.case.mesh), call.operation
                calls, total = flows.get(key, (0, Fraction(0)))
                flows[key] = calls + times, total + times * call.logical_bytes
    return flows


def _rows(flows: Flows) -> list[SentAlongAxis]:
    return [SentAlongAxis(*key, calls, str(size)) for key, (calls, size) in sorted(flows.items())]


def _between_nodes(evidence: Figures, step: int, promised: Sequence[Flow]) -> list[Between]:
    """The part of each promised flow that crossed nodes, and the part that had to."""
    mesh, nodes = evidence.case.mesh, [record.node or 0 for record in evidence.ranks.values()]
    wanted: dict[tuple[str, str, bool], list[Fraction | None]] = {}
    for flow in promised:
        groups = places.groups_along(mesh, flow.axis, flow.ranks)
        share = places.promised_across(flow.operation, groups, nodes, whole=flow.ranks > 0)
        across = wanted.setdefault((flow.axis, flow.operation, flow.integers), [])
        messages = places.promised_messages(flow.between, groups, nodes)
        across.append(messages if share is None else flow.bytes * share)
    rows = []
    for (axis, operation, integers), across in sorted(wanted.items()):
        calls = [
            (rank, call)
            for rank, record in evidence.ranks.items()
            for call in step_calls(record, step, floating=not integers)
            if call.operation == operation and axis_of(call.group, mesh) == axis
        ]
        total = sum((call.logical_bytes for _, call in calls), Fraction(0))
        parts = [places.sent_across(call, rank, nodes) for rank, call in calls]
        split = [part for part in parts if part is not None]
        if total and len(split) == len(parts):
            sent = sum(split, Fraction(0))
            known = [one for one in across if one is not None]
            told = str(sum(known, Fraction(0))) if len(known) == len(across) else None
            lies = places.lie(places.groups_along(mesh, axis), nodes)
            rows.append(Between(axis, lies, operation, str(total), str(sent), told))
    return rows


def _between_differs(rows: Sequence[Between], step: int, strategy: str) -> str:
    """The first flow of which other bytes cross nodes than the formula says."""
    for row in rows:
        if row.promised not in (None, row.across):
            across, promised = (_text(Fraction(n or 0)) for n in (row.across, row.promised))
            found = f"{across} bytes go between nodes over all ranks"
            promise = f"{strategy} promises {promised} (placement of the axis: {row.lies})"
            return f"step {step}, axis {row.axis}, {row.operation}: {found}, {promise}"
    return ""


def axis_of(group: Sequence[int], mesh: Mapping[str, int]) -> str:
    """The axes of ``mesh`` (last innermost) on which the global ranks of ``group`` differ.

    A part of an axis counts as that axis; several are joined by ``+``.
    """
    #     ranks of a 2 x 4 mesh     0 1 2 3     {0, 2}: other columns, the inner axis
    #                               4 5 6 7     {1, 5}: other rows, the outer axis
    #                                           {0, 5}: both, joined
    axes, stride = [], 1
    for axis, size in reversed(list(mesh.items())):
        if len({rank // stride % size for rank in group}) > 1:
            axes.append(axis)
        stride *= size
    return "+".join(reversed(axes))


def promise_of(evidence: Figures, step: int) -> CostModel | None:
    """The cost model for ``step`` and its members; a skipped update clips nothing."""
    if (facts := evidence.model_facts) is not None:
        facts = in_step(facts, step, _was_skipped(evidence, step))
        made = {done.step for record in evidence.records for done in record.evaluations}
        facts = replace(facts, evaluated=step in made)
        if evidence.case.changes_members:
            count = len(evidence.members[step].members)
            facts = replace(facts, axes=dict.fromkeys(facts.axes, count))
    return evidence.cost_model(facts)


def _was_skipped(evidence: Figures, step: int) -> bool:
    return any(record.steps[step].skipped for record in evidence.records)


def _family_bounds(evidence: Figures, family: Family, step: int) -> tuple[int, int]:
    """Fewest and most bytes that a system of ``family`` sends in ``step``."""
    assert evidence.model_facts is not None
    facts = in_step(evidence.model_facts, step, _was_skipped(evidence, step))
    declared = evidence.declaration
    is_exact = declared.oracle == "plain" and declared.exactness in ("bitwise", "reordered-sum")
    bound = family.sent(facts, declared.overhead, is_exact)
    return bound.low, bound.high


def _out_of_family(evidence: Figures, step: int, value: Fraction, low: int, high: int) -> str:
    name = evidence.family.name if evidence.family else ""
    if value < low:
        why = f"{name} needs at least {low:,}"
    else:
        overhead = evidence.declaration.overhead
        why = f"at most {high:,} for {name} with overhead {overhead:g} (Capabilities.overhead)"
    kind = "" if is_compressed(evidence) else "floating-point "
    return f"step {step} sends {_text(value)} {kind}bytes, {why}"


def is_compressed(evidence: Figures) -> bool:
    """Whether gradients are compressed, so that other calls than sums may reduce them: such a
    system is compared with one that imitates its loss.
    """
    facts = evidence.model_facts
    lossy = evidence.declaration.oracle == "emulated"
    return lossy and facts is not None and bool(compression.chosen(facts))


def _set_textbook(figures: TrafficFigures, cost_model: CostModel) -> None:
    textbook = cost_model_of(cost_model.textbook, cost_model.facts)
    try:
        total = 0 if textbook is None else textbook.payload()
    except NoCostModel:  # the textbook's formula ends before this one's: there is no ratio
        total = 0
    if textbook is not None and total:
        figures.textbook, figures.textbook_bytes = textbook.strategy, str(total)


#: Above it a ratio says nothing any more.
_LARGEST_RATIO = 64


def _are_of_other_dtype(evidence: Figures, step: int, axis: str, operation: str) -> bool:
    """Whether calls of ``operation`` have a dtype in which the case holds nothing.

    Under mixed precision, where it has several, any may be the wrong one.
    """
    case = evidence.case
    usual = {case.dtype, *case.precision.values()}
    dtypes = {
        call.dtype
        for record in evidence.records
        for call in record.calls_of(step)
        if call.operation == operation and axis_of(call.group, case.mesh) == axis
    }
    return len(usual) > 1 or not dtypes <= usual


def _flow_differs(
    step: int,
    strategy: str,
    sent: Flows,
    promised: Sequence[Flow],
    others_of: Callable[[str, str], bool],
    of: str = "",
) -> str:
    """The first axis and operation whose bytes, or else calls, are not those promised."""
    wanted: dict[tuple[str, str], tuple[int, int, Fraction]] = {}
    for flow in promised:
        low, high, total = wanted.get((flow.axis, flow.operation), (0, 0, Fraction(0)))
        least, most = flow.range
        wanted[flow.axis, flow.operation] = low + least, high + most, total + flow.bytes
    for key in sorted({*wanted, *sent}):
        low, high, expected = wanted.get(key, (0, 0, Fraction(0)))
        calls, total = sent.get(key, (0, Fraction(0)))
        axis, operation = key
        where = f"step {step}, axis {axis}, {operation}{of}"
        if total != expected:
            by = _by_how_much(total, expected, calls, low <= calls <= high and others_of(*key))
            found = f"{_text(total)} bytes in {calls} calls over all ranks"
            return f"{where}: {found}, {strategy} promises {_text(expected)}{by}"
        if not low <= calls <= high:
            wish = f"{low:,}" if low == high else f"{low:,} to {high:,}"
            return f"{where}: {calls:,} calls over all ranks, {strategy} promises {wish}"
    return ""


def _rank_differs(evidence: Figures, step: int, strategy: str, promised: Sequence[Flow]) -> str:
    """The first rank whose calls or bytes are not its own, where each is promised its own."""
    wanted = defaultdict[tuple[str, str], list[Flow]](list)
    for flow in promised:
        wanted[flow.axis, flow.operation].append(flow)
    for record in evidence.records:
        sent = flows_of(evidence, step, record)
        for (axis, operation), flows in wanted.items():
            own = [flow.by_rank[record.rank] for flow in flows if flow.by_rank is not None]
            # One flow that any rank may send leaves the whole sum unpromised by rank.
            if len(own) < len(flows):
                continue
            calls, size = sent.get((axis, operation), (0, Fraction(0)))
            most, total = sum(n for n, _ in own), sum((size for _, size in own), Fraction(0))
            if (calls, size) != (most, total):
                found = f"rank {record.rank} sends {_text(size)} bytes in {calls} calls"
                promise = f"{strategy} promises {_text(total)} in {most}"
                return f"step {step}, axis {axis}, {operation}: {found}, {promise}"
    return ""


def _by_how_much(total: Fraction, expected: Fraction, calls: int, as_often: bool) -> str:
    """How the bytes of as many calls (or of more or fewer) relate to those promised."""
    if not calls:
        return ": no such call is made"
    if not expected:
        return ": no such call is promised"
    if not total:
        return ""
    ratio, way = max(total / expected, expected / total), "as many" if total > expected else "fewer"
    if ratio.denominator != 1 or ratio > _LARGEST_RATIO:
        return ""
    # Item sizes of 8, 4, 2 and 1 bytes differ by these factors.
    if as_often and ratio in (2, 4, 8):
        wider = "wider" if total > expected else "narrower"
        return f": as many calls, {ratio} times {wider}, as another dtype would be"
    return f": {ratio} times {way}"


def step_calls(record: RankRecord, step: int, floating: bool = True) -> list[LoggedCall]:
    """Calls of a rank in ``step`` that move floats (or that do not), observation left out."""
    return [
        call
        for call in record.calls_of(step)
        if call.floating is floating and call.phase in ("forward", "backward", "update")
    ]


def _control_calls(record: RankRecord) -> Iterator[LoggedCall]:
    return (c for c in record.traffic if not (c.floating or c.phase in _AROUND))


def _payload(evidence: Figures, step: int, floating: bool = True) -> Fraction:
    return _bytes(evidence, lambda record: step_calls(record, step, floating))


def _too_much_control(evidence: Figures, promises: Sequence[CostModel | None]) -> str:
    """The problem if ranks exchange more integers than shapes of messages, and a few per parameter,
    buffer and rank.
    """
    if not strategies.of(evidence.declaration.strategy).is_known:
        return ""
    names = {row.name for row in evidence.tensors if row.kind in ("parameters", "buffers")}
    limit = evidence.case.world * (CONTROL_BYTES + CONTROL_BYTES_A_NAME * len(names))
    ranks = evidence.ranks.values()
    for step, cost_model in zip(evidence.steps, promises, strict=True):
        spent = _payload(evidence, step, floating=False)
        sends = (call.operation == "send" for r in ranks for call in step_calls(r, step))
        # Of a family it is not known who tells shapes: a KiB a message is allowed.
        shapes = cost_model.metadata_bytes() if cost_model else 1024 * sum(sends)
        values = sum(f.bytes for f in cost_model.flows() if f.integers) if cost_model else 0
        own = cost_model.control_limit() if cost_model else None
        most = (limit if own is None else own) + shapes + values
        if spent > most:
            data = f"{_text(spent)} bytes of other data than floats"
            return f"step {step} sends {data}, at most {most:,}"
    return ""


def _too_many_agreements(evidence: Figures) -> str:
    """The problem if a rank broadcasts integers after more updates than necessary."""
    if (cost_model := evidence.cost_model()) is None:
        return ""
    for record in evidence.records:
        limits, made = cost_model.agreements(record.rank), Counter[int]()
        for step in evidence.steps:
            calls = step_calls(record, step, floating=False)
            made[step] += sum((c.operation, c.phase) == ("broadcast", "update") for c in calls)
        step, often = made.most_common(1)[0]
        if limits is not None and (often > limits[0] or made.total() > limits[1]):
            count = f"{made.total()} times after updates, {often} times after that of step {step}"
            most = f"ranks agree on new values at most {limits[1]} times, {limits[0]} per step"
            return f"rank {record.rank} broadcasts integers {count}: {most}"
    return ""


def _bytes(evidence: Figures, calls: Callable[[RankRecord], Iterable[LoggedCall]]) -> Fraction:
    """Logical bytes of the ``calls`` of all ranks together."""
    sizes = (
        len(record.ranks) * sum((call.logical_bytes for call in calls(record)), Fraction(0))
        for record in evidence.records
    )
    return sum(sizes, Fraction(0))


def _text(value: Fraction) -> str:
    return f"{value.numerator:,}" if value.denominator == 1 else f"{float(value):,.3f} ({value})"

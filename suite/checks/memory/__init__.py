"""Bytes held by every rank equal the formula, by class, with tolerance 0, at every point.

Judged classes: parameters, masters, gradients, optimizer state (padding and step counters
included), on the device and, where state is offloaded, on the host; a class that a promise
excepts stands as ``not_judged`` beside the verdict, with its reason.  Nothing is in flight there:
where it is promised, buffers of communication must have gone, activations and temporaries as well
(a copy that nobody shows is one of those).  Between the points the largest bytes of a class must
lie within two bounds that follow from the largest unit, from prefetch and from buckets: too much is
state that was not let go, too little is work that was not done.  Bytes copied between device and
host in a step are no network traffic, and compared, too; so are parameters that are split and those
that stand on every rank, where a cost model tells them apart.  The accounting (A32, A16, ...) is
named.

Temporaries, which nobody shows, may at their largest exceed those of one process by the model's
largest unit and its largest parameter (:mod:`~shardproof.checks.memory.unattributed`).

What a scenario itself expects (``expect.memory``) is compared in addition
(:mod:`~shardproof.checks.memory.asked`).

What is no state must not grow from step to step either (:mod:`~shardproof.checks.memory.growth`).
Where gradients are gone when a step ends, the next forward of a step of one micro-batch holds none.

*Cannot see* how large activations and buffers grow (measured, not judged), what an
allocator rounds up, or a backend whose threads free late: on gloo memory is measured for systems
that need processes only.  A buffer that a rank owns no part of counts as communication, not as
gradients.  Nor what lives within one backward, as long as the largest sum is below its bound: a
gradient that is copied into its bucket and kept until the bucket is reduced.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from shardproof import axes
from shardproof.checks import Needs, Outcome, Worst
from shardproof.checks.memory import asked, growth, unattributed
from shardproof.costs import CostModel, whole_bytes
from shardproof.costs.accounting import Accounting, accounting_of
from shardproof.costs.model import JUDGED, Bound
from shardproof.costs.model_facts import ITEMSIZE, ModelFacts, slots
from shardproof.evidence.assembled import Figures
from shardproof.evidence.records import RankRecord
from shardproof.files import SparselyStored
from shardproof.ledgers.memory.summary import PHASES

NEEDS: Needs = ("memory",)

#: Bytes that any system may keep beside its state: numbers, votes, an empty bucket.
_SMALL = 16 << 10
#: (step, place) -> memory space -> class -> bytes.
BytesAt = Mapping[tuple[int, str], Mapping[str, Mapping[str, int]]]


def decide(evidence: Figures) -> Outcome:
    """Compare every rank's bytes with the cost model of the claimed strategy."""
    case = evidence.case
    if case.changes_members:
        return Outcome("memory", "skip", "members change: no strategy promises memory")
    outcome = _held(evidence)
    # Of a family what grows says more than a bound that it breaks some day.
    if outcome.status != "fail" or evidence.family is not None:
        for record in evidence.records:
            if problem := growth.problem(evidence, record):
                return Outcome("memory", "fail", problem, None, outcome.figures)
    if outcome.status != "fail" and "memory" in case.expect:
        message, worst = asked.differs(evidence) or ("", None)
        return Outcome("memory", "fail" if worst else "pass", message, worst, outcome.figures)
    return outcome


def _held(evidence: Figures) -> Outcome:
    """The bytes that ranks hold at each point, by class."""
    strategy = evidence.declaration.strategy
    if evidence.family is not None:
        return _at_family(evidence)
    if (cost_model := evidence.cost_model()) is None:
        return Outcome("memory", "skip", f"no memory is promised for strategy {strategy!r}")
    if cost_model.why_not_measured():
        return Outcome("memory", "skip", cost_model.why_not_measured())
    accounting = accounting_of(cost_model.facts)
    figures = _figures(evidence, cost_model, accounting)
    for record in evidence.records:
        #     forward  backward | gradients_final | after_clip | update | after_update
        #     marks at the points, where nothing is in flight: equal
        #     peaks in the phases between them: within two bounds
        for what, step, place, kind, held, low, high in (
            *_resident(evidence, cost_model, record),
            *_peaks(evidence, cost_model, record),
            *_moved(evidence, cost_model, record),
            *_by_layout(cost_model, record, figures),
        ):
            if low <= held <= high:
                continue
            wanted = f"{low:,}" if low == high else f"{low:,} to {high:,}"
            distance, owner = float(max(low - held, held - high)), f"rank {record.rank}"
            promise = f"{wanted} promised ({strategy}, {accounting.id})"
            message = f"{owner}, step {step}, {place}: {kind}: {held:,} bytes {what}, {promise}"
            if record.unmatched:
                message += f"; computed for the observation: {', '.join(record.unmatched[:3])}"
            worst = Worst(f"{kind} bytes", step, place, owner, distance, 0.0)
            return Outcome("memory", "fail", message, worst, figures.to_dict())
        # After the classes that have formulas: those name what is wrong more exactly.
        if found := unattributed.exceeds(evidence, record):
            step, phase, held, high = found
            owner, most = f"rank {record.rank}", f"at most {high:,}"
            of = "those of one process, the model's largest unit and its largest parameter"
            peak = f"{held:,} bytes of temporaries at the peak"
            message = f"{owner}, step {step}, {phase}: {peak}, {most}: {of}"
            worst = Worst("temporary bytes", step, phase, owner, held - high, 0.0)
            return Outcome("memory", "fail", message, worst, figures.to_dict())
    return Outcome("memory", "pass", "", None, figures.to_dict())


#: What one process takes.
measure = unattributed.measure


def _at_family(evidence: Figures) -> Outcome:
    """A rank holds the state that it shows: bytes of state and of hidden memory exceed it by the
    declared overhead at most. Buffers of communication are each system's own.
    """
    overhead, held_most, shown_most = evidence.declaration.overhead, 0, 0
    # A pipeline may keep the outputs of its last window.
    keeps = evidence.family is not None and evidence.family.keeps_activations(evidence.case.mesh)
    kinds = JUDGED if keeps else (*JUDGED, "activations", "temporary")
    assert evidence.model_facts is not None
    for record in evidence.records:
        marks = _bytes_at(record, "mark")
        shown = _shown_bytes(evidence.model_facts, record.steps[-1].shown())
        limit, shown_most = int(overhead * shown) + _SMALL, max(shown, shown_most)
        for step in evidence.steps:
            spaces = marks.get((step, "after_update"), {})
            held = sum(classes.get(kind, 0) for classes in spaces.values() for kind in kinds)
            held_most = max(held, held_most)
            if held > limit:
                owner, found = f"rank {record.rank}", f"{held:,} bytes held in addition to buffers"
                of = f"{overhead:g} times those of the pieces that it shows (Capabilities.overhead)"
                message = f"{owner}, step {step}, after_update: {found}, at most {limit:,}: {of}"
                worst = Worst("bytes", step, "after_update", owner, held - limit, 0)
                return Outcome("memory", "fail", message, worst)
    return Outcome("memory", "pass", "", None, {"bytes_held": held_most, "bytes_shown": shown_most})


def _shown_bytes(facts: ModelFacts, shown: Mapping[str, Mapping[str, int]]) -> int:
    """Bytes of the elements that a rank showed, by kind and name, with masters of what it updates
    where it computes in another dtype.
    """
    total = 0
    for tensor in facts.parameters:
        own = {kind: elements.get(tensor.name, 0) for kind, elements in shown.items()}
        built, computed = ITEMSIZE[tensor.dtype], ITEMSIZE[facts.compute(tensor.dtype)]
        updated = slots(facts) * built + (built if computed != built else 0)
        total += own["parameters"] * computed + own["optimizer"] * updated
        total += own["gradients"] * ITEMSIZE[facts.reduction(tensor.dtype)]
    return total


#: Rank, as text -> memory space -> class -> bytes.
BytesOfRanks = Mapping[str, Mapping[str, Mapping[str, int]]]


@dataclass
class MemoryFigures(SparselyStored):
    """Bytes after the last update, and peaks of the last step by rank, phase and class.

    ``bytes_held`` and ``bytes_promised`` are those of the judged classes on the fullest rank,
    ``bytes_whole`` those of the unsharded model.  Ratios are ``bytes_whole`` over them as
    fractions: ``ratio_theory`` for the shards that there are, ``ratio_limit`` for any number.
    ``not_judged``: class -> why.  ``allocator``: what a GPU's allocator held at most in the last
    step, beside the ledger's peak; nothing is judged by it, for it rounds up and counts the suite's
    tensors.  ``split_bytes``, ``replicated_bytes``: parameters by rank, where layouts differ.
    """

    strategy: str
    source: str
    accounting: str
    bytes_held: int
    bytes_promised: int | None
    bytes_whole: int
    not_judged: Mapping[str, str]
    ratio_measured: str
    ratio_promised: str | None
    ratio_theory: str | None
    ratio_limit: str | None
    promised: BytesOfRanks
    resident: BytesOfRanks
    peaks: BytesOfRanks
    allocator: dict[str, dict[str, int]] | None = None
    split_bytes: dict[str, int] | None = None
    replicated_bytes: dict[str, int] | None = None


Comparison = tuple[str, int, str, str, int, int, int]


def _resident(evidence: Figures, cost_model: CostModel, record: RankRecord) -> Iterator[Comparison]:
    """(what, step, place, class, held, least, most) at every observation point."""
    rank, updated, unjudged = record.rank, evidence.updated_before, cost_model.unjudged()
    marks = _bytes_at(record, "mark")
    for step in evidence.steps:
        for point in record.steps[step].observed:
            # State exists from the first update that is really made.
            if point == "after_update" and not record.steps[step].skipped:
                updated = step
            spaces = marks.get((step, point), {})
            in_use = spaces.get("device", {})
            promised = _promised(cost_model, rank, step, point, updated)
            for space, classes in promised.items():
                what = "held" if space == "device" else "held in host memory"
                for kind, size in classes.items():
                    if kind in unjudged:
                        continue
                    held = spaces.get(space, {}).get(kind, 0)
                    offloaded = promised["host"].get(kind)
                    if (space, kind) == ("device", "optimizer_state") and not offloaded:
                        held += _counters(cost_model, record, spaces)
                    yield what, step, point, kind, held, size, size
            if (limit := cost_model.communication_at_rest(rank, step)) is not None:
                held = in_use.get("communication", 0)
                yield "held", step, point, "communication", held, 0, limit
            if (limit := cost_model.unclassified_limit(rank, step)) is not None:
                held = sum(in_use.get(kind, 0) for kind in ("activations", "temporary"))
                most = limit + cost_model.facts.noted
                yield "held", step, point, "activations and temporaries", held, 0, most


def _promised(
    cost_model: CostModel, rank: int, step: int, point: str, updated: int
) -> dict[str, Mapping[str, int]]:
    """Memory space -> class -> bytes that ``rank`` should hold at ``point``."""
    at_point = cost_model.at_point(rank, point, updated)
    device = cost_model.resident(rank, step, updated) | at_point
    return {"device": device, "host": cost_model.host(rank, step, updated)}


def _counters(
    cost_model: CostModel, record: RankRecord, held: Mapping[str, Mapping[str, int]]
) -> int:
    """Bytes of the step counters that torch's optimizers keep on the host while they use a GPU.

    A scalar of at most 8 bytes a parameter; what is more is state, and belongs on the device.
    """
    # torch keeps ``step`` on the CPU unless an optimizer is capturable or fused, because reading it
    # from a GPU in every step would wait for the device.
    size = held.get("host", {}).get("optimizer_state", 0)
    return size if _on_gpu(record) and size <= 8 * len(cost_model.facts.parameters) else 0


def _on_gpu(record: RankRecord) -> bool:
    return any(row.device.startswith("cuda") for row in record.memory)


def _moved(evidence: Figures, cost_model: CostModel, record: RankRecord) -> Iterator[Comparison]:
    """Bytes copied between device and host in every step; they are no network traffic."""
    updated, moved = evidence.updated_before, Counter[tuple[int, str]]()
    for row in record.memory:
        if row.moment == "moved" and row.where in PHASES:
            moved[row.step, row.kind] += row.bytes
    for step in evidence.steps:
        updated = updated if record.steps[step].skipped else step
        at = (record.rank, step, updated)
        besides = cost_model.gpu_traffic(*at) if _on_gpu(record) else {}
        for way, promised in cost_model.host_traffic(*at).items():
            size = promised + besides.get(way, 0)
            kind = f"{way} between device and host"
            yield "moved", step, "step", kind, moved[step, way], size, size


def _by_layout(
    cost_model: CostModel, record: RankRecord, figures: MemoryFigures
) -> Iterator[Comparison]:
    """Bytes of parameters after the last update, by how they lie on the ranks."""
    last = len(record.steps) - 1
    held = record.steps[-1].held.get("after_update", {}).get("parameters", {})
    facts = cost_model.facts
    sizes = {t.name: ITEMSIZE[facts.compute(t.dtype)] for t in facts.parameters}
    for layout, wanted in cost_model.by_layout(record.rank).items():
        size = sum(n * sizes[name] for name, n in wanted.items())
        own = sum(held.get(name, 0) * sizes[name] for name in wanted)
        name = f"{layout}_bytes"
        setattr(figures, name, (getattr(figures, name) or {}) | {str(record.rank): own})
        yield "held", last, "after_update", f"{layout} parameters", own, size, size


def _peaks(evidence: Figures, cost_model: CostModel, record: RankRecord) -> Iterator[Comparison]:
    for (step, phase), spaces in _bytes_at(record, "peak").items():
        if step not in evidence.steps:
            continue  # made before a load
        bounds = cost_model.peaks(record.rank, phase, step)
        # A second micro-batch goes forward beside the gradients of the first; where a rank has none
        # at all, all of the step counts as forward.
        facts, is_first = cost_model.facts, phase == "forward" and cost_model.facts.rounds == 1
        computes = facts.micro_batches_of(facts.data_coordinate(record.rank), step)
        if is_first and computes and cost_model.frees_gradients:
            bounds = {"gradients": Bound(0, 0)} | bounds
        for kind, bound in bounds.items():
            held = spaces.get("device", {}).get(kind, 0)
            yield "at the peak", step, phase, kind, held, bound.low, bound.high


def _bytes_at(record: RankRecord, moment: str) -> BytesAt:
    sizes = defaultdict[tuple[int, str], dict[str, Counter[str]]](lambda: defaultdict(Counter))
    on_gpu = _on_gpu(record)
    for row in record.memory:
        if row.moment == moment:
            # Beside a GPU the host's memory is host memory; without one it is a file's pages.
            host = row.device == "file" or (on_gpu and row.device == "cpu")
            sizes[row.step, row.where]["host" if host else "device"][row.kind] += row.bytes
    return sizes


def _allocator(
    record: RankRecord, step: int, peaks: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """Bytes that a GPU's allocator held at most, and the ledger's largest of ``peaks``, by rank."""
    return {
        str(record.rank): {
            "allocated": row.bytes,
            "ledger": max(classes.get("all", 0) for classes in peaks.values()),
        }
        for row in record.memory
        if (row.moment, row.step) == ("allocator", step)
    }


def _figures(evidence: Figures, cost_model: CostModel, accounting: Accounting) -> MemoryFigures:
    last, unjudged = evidence.steps[-1], cost_model.unjudged()
    promised_bytes, resident, peaks, totals = {}, {}, {}, []
    allocator: dict[str, dict[str, int]] = {}
    for record in evidence.records:
        rank = str(record.rank)
        spaces = _bytes_at(record, "mark").get((last, "after_update"), {})
        resident[rank] = dict(spaces)
        totals.append(sum(spaces.get("device", {}).get(kind, 0) for kind in JUDGED))
        peaks[rank] = {
            phase: spaces.get("device", {})
            for (step, phase), spaces in _bytes_at(record, "peak").items()
            if step == last
        }
        allocator |= _allocator(record, last, peaks[rank])
        trained = (s for s in evidence.steps if not record.steps[s].skipped)
        updated = max(trained, default=evidence.updated_before)
        spaces = _promised(cost_model, record.rank, last, "after_update", updated)
        promised_bytes[rank] = {
            space: {kind: n for kind, n in classes.items() if n and kind not in unjudged}
            for space, classes in spaces.items()
            if any(classes.values())
        }
    whole = whole_bytes(cost_model)
    promised = None if unjudged else cost_model.total()
    mesh = cost_model.facts.axes
    shards = axes.size(mesh, axes.sharded(mesh))
    limit = accounting.ratio(cost_model, None) if shards > 1 else Fraction(1)
    # Stages and split layers are no equal shares of the model.
    whole_layers = axes.size(mesh, axes.dividing(mesh)) == 1
    theory = accounting.ratio(cost_model, shards) if whole_layers else None
    return MemoryFigures(
        strategy=cost_model.strategy,
        source=cost_model.source,
        accounting=accounting.id,
        bytes_held=max(totals),
        bytes_promised=promised,
        bytes_whole=whole,
        not_judged=unjudged,
        ratio_measured=str(Fraction(whole, max(totals) or 1)),
        ratio_promised=None if promised is None else str(Fraction(whole, promised or 1)),
        ratio_theory=None if theory is None else str(theory),
        ratio_limit=None if limit is None else str(limit),
        promised=promised_bytes,
        resident=resident,
        peaks=peaks,
        allocator=allocator or None,
    )

"""Simulated equals real, to the byte: the ranks of a stored case against the same ranks simulated.

Compared at every step of a rank: bytes of each class at each mark, peaks of each phase, and the
calls in their order with their bytes.  Tolerance 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.evidence.records import RankRecord
from shardproof.ledgers.memory.summary import PHASES, MemoryRow, summary
from shardproof.ledgers.traffic import LoggedCall
from shardproof.simulate.rank import SimulatedRank, simulate
from shardproof.simulate.sources import CaseSource

#: What a value decides, a fake tensor cannot.
_STEERED = (DataDependentOutputException, DynamicOutputShapeException)


@dataclass(frozen=True)
class Compared:
    """One case: ``figures`` compared, those that differ, or why it cannot be simulated."""

    case: str
    figures: int
    wrong: Sequence[str]
    skip: str = ""


def unlike(case: Case) -> str:
    """Why ranks of ``case`` do more than train (empty: they do not)."""
    if case.changes_members or case.deaths:
        return "its members change"
    if case.checkpoint is not None or case.loads_from or case.reload_at is not None:
        return "it saves or loads"
    if case.thaws:
        return "it freezes its parameters for evaluations"
    if case.options.get("offload_to") == "disk":
        return "it keeps state in a file"
    return ""


def compare(case: Case, records: Sequence[RankRecord]) -> Compared:
    """Simulate every rank of ``case`` and compare."""
    if reason := unlike(case):
        return Compared(case.id, 0, (), reason)
    source, wrong, count = CaseSource(case), list[str](), 0
    exact = BACKENDS[case.backend].exact_memory
    try:
        simulated = simulate(source, [record.rank for record in records])
    except _STEERED as error:
        return Compared(case.id, 0, (), f"a value steers it ({error.func})")
    for record, made in zip(records, simulated, strict=True):
        for number, what in _pairs(made, record, exact):
            count += number
            wrong += [f"rank {record.rank}: {what}"] if what else []
    return Compared(case.id, count, wrong)


def _pairs(made: SimulatedRank, record: RankRecord, exact: bool) -> Iterator[tuple[int, str]]:
    ours, theirs = _rows(summary(made.log)), _rows(record.memory)
    for key in sorted({*ours, *theirs}) if record.memory and exact else ():
        a, b = ours.get(key, 0), theirs.get(key, 0)
        yield 1, "" if a == b else f"{' '.join(map(str, key))}: {a} bytes simulated, {b} real"
    for step, calls in enumerate(made.calls):
        real = [_call(call) for call in record.calls_of(step) if call.phase != "observe"]
        mine = [_call(call) for call in calls if call.phase != "observe"]
        if real == mine:
            yield len(real), ""
            continue
        at = next((n for n, (a, b) in enumerate(zip(mine, real, strict=False)) if a != b), -1)
        pair = (mine[at], real[at]) if at >= 0 else (len(mine), len(real))
        yield 1, f"step {step}, call {at}: {pair[0]} simulated, {pair[1]} real"


def _rows(rows: Sequence[MemoryRow]) -> dict[tuple[int, str, str, str], int]:
    return {
        (row.step, row.moment, row.where, row.kind): row.bytes
        for row in rows
        if row.step >= 0 and (row.moment == "mark" or (row.moment, row.where) in _PEAKS)
    }


_PEAKS = [("peak", phase) for phase in PHASES]


def _call(call: LoggedCall) -> tuple[object, ...]:
    return call.operation, call.axis, call.dtype, call.payload_bytes, call.phase

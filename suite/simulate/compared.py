"""Compare the ranks of a stored case with the same ranks simulated, to the byte.

Compared at every step of a rank: bytes of each class at each mark, peaks of each phase, and the
calls in their order with their bytes.  Tolerance 0.  Bytes are compared where the run has them
(check ``memory``), on backends whose memory is exact: threads of gloo free tensors late.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.checks.results import CaseResult
from shardproof.commands.console import ProgressBar, is_json, make_console, print_line
from shardproof.errors import Problem, SelectionError, is_exhausted, shorten
from shardproof.evidence.account import Account
from shardproof.evidence.records import RankRecord
from shardproof.files import DAMAGE
from shardproof.ledgers.memory.summary import PHASES, MemoryRow, summary
from shardproof.ledgers.traffic import LoggedCall
from shardproof.runs import records, run_folder
from shardproof.simulate.rank import SimulatedRank, simulate
from shardproof.simulate.sources import CaseSource
from shardproof.table import Table, grouped, number
from shardproof.verdicts import BROKEN, GREEN, HELD, NOT_DECIDED, kind

#: Errors of torch where a program needs the values of a fake tensor.
_STEERED = (DataDependentOutputException, DynamicOutputShapeException)
_SUITE = Path(__file__).parents[1]
#: Most differences of a case that are printed.
_SHOWN = 3


@dataclass(frozen=True)
class Compared:
    """One case: how many ``figures`` were compared, and a sentence for each that differs.

    ``skip``: why the case was not compared; ``error``: what ended its simulation.
    """

    case: str
    figures: int
    wrong: Sequence[str]
    skip: str = ""
    error: str = ""


def unlike(case: Case) -> str:
    """Why ranks of ``case`` cannot be simulated (empty: they can)."""
    if not case.steps:
        return "it trains nothing"
    if (backend := BACKENDS.get(case.backend)) is None or backend.device != "cpu":
        return "its backend is not installed, or its ranks have GPUs, which are not simulated"
    if case.changes_members or case.deaths:
        return "ranks join or leave during the run"
    if case.loads_from or case.reload_at is not None:
        return "it loads a checkpoint"
    if case.thaws:
        return "it evaluates a frozen model before each step"
    return ""


def unready(result: CaseResult) -> str:
    """Why ``result`` has no ranks to compare (empty: it has)."""
    if reason := unlike(result.case):
        return reason
    if kind(result.verdict) not in GREEN or result.record is None:
        return "it did not pass"
    return ""


def compare_result(path: Path, result: CaseResult) -> Compared:
    """Simulate every rank of ``result``, a case of the run in ``path``, and compare."""
    if reason := unready(result):
        return Compared(result.id, 0, (), reason)
    assert result.record is not None
    try:
        account = Account.from_dict(records.read(path / result.record))
    except DAMAGE as error:
        what, remedy = "this record is damaged", "run `shardproof verify RUN`, which names each"
        raise SelectionError(Problem(what, remedy, str(path / result.record))) from error
    ranks = account.figures.records if account.figures is not None else ()
    if not ranks:
        return Compared(result.id, 0, (), "its ranks left no record")
    return compared(result.case, ranks)


def compared(case: Case, records: Sequence[RankRecord]) -> Compared:
    """Like :func:`compare`, but an error of the simulation becomes a finding."""
    try:
        return compare(case, records)
    except Exception as error:
        if is_exhausted(error):
            raise
        return Compared(case.id, 0, (), error=f"its simulation failed: {_told(error)}")


def compare(case: Case, records: Sequence[RankRecord]) -> Compared:
    """Simulate every rank of ``case`` and compare."""
    if reason := unlike(case):
        return Compared(case.id, 0, (), reason)
    source, wrong, count = CaseSource(case, records), list[str](), 0
    exact = BACKENDS[case.backend].exact_memory
    try:
        simulated = simulate(source, [record.rank for record in records])
    except _STEERED as error:
        return Compared(case.id, 0, (), _steering(error))
    except RuntimeError as error:
        # Module.to swaps fake parameters, which torch refuses while a graph uses them.
        if "Couldn't swap" not in str(error):
            raise
        return Compared(case.id, 0, (), "it moves modules (Module.to), which fake tensors forbid")
    for record, made in zip(records, simulated, strict=True):
        for compared, what in _pairs(made, record, exact):
            count += compared
            wrong += [f"rank {record.rank}: {what}"] if what else []
    if not count:
        return Compared(case.id, 0, (), "it makes no calls, and its bytes were not measured")
    return Compared(case.id, count, wrong)


def _told(error: Exception) -> str:
    """``error`` in one line."""
    return shorten(f"{type(error).__name__}: {error}", 200)


def _steering(error: Any) -> str:
    """The operator that reads values, and the innermost file of suite or user that calls it."""
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    around = (Path(torch.__file__).parent, _SUITE / "ledgers", _SUITE / "simulate")
    own = (f for f in reversed(frames) if not any(map(f.is_relative_to, around)))
    asks = next(own, frames[-1])
    what = str(error.func).removeprefix("aten.").removesuffix(".default")
    return f"its code depends on tensor values ({what} in {asks.name})"


def _pairs(made: SimulatedRank, record: RankRecord, exact: bool) -> Iterator[tuple[int, str]]:
    ours, theirs = _rows(summary(made.log)), _rows(record.memory)
    for key in sorted({*ours, *theirs}) if record.memory and exact else ():
        a, b = ours.get(key, 0), theirs.get(key, 0)
        yield 1, "" if a == b else f"{' '.join(map(str, key))}: {b} bytes real, {a} simulated"
    for step, calls in enumerate(made.calls):
        real = [_call(call) for call in record.calls_of(step) if call.phase != "observe"]
        mine = [_call(call) for call in calls if call.phase != "observe"]
        if real == mine:
            yield len(real), ""
            continue
        at = next((n for n, (a, b) in enumerate(zip(mine, real, strict=False)) if a != b), -1)
        pair = (mine[at], real[at]) if at >= 0 else (len(mine), len(real))
        what = f"call {at}" if at >= 0 else "number of calls"
        yield 1, f"step {step}, {what}: {pair[1]} real, {pair[0]} simulated"


def _rows(rows: Sequence[MemoryRow]) -> dict[tuple[int, str, str, str, str], int]:
    return {
        (row.step, row.moment, row.where, row.device, row.kind): row.bytes
        for row in rows
        if row.step >= 0 and (row.moment == "mark" or (row.moment, row.where) in _PEAKS)
    }


_PEAKS = [("peak", phase) for phase in PHASES]


def _call(call: LoggedCall) -> tuple[object, ...]:
    size = call.payload_bytes, call.logical_bytes
    return call.operation, call.axis, call.group, call.peer, call.dtype, *size, call.phase


# ------------------------------------------------------------------------------------- whole runs


class _Cases(ProgressBar):
    """Progress over the cases of a run."""

    def _columns(self, progress: Any) -> list[Any]:
        return [progress.MofNCompleteColumn(), progress.TimeElapsedColumn()]

    def update(self, done: int, differ: int) -> None:
        """Show that ``done`` cases are compared, and ``differ`` of them differ."""
        self._move(done, " cases", f"{differ} differ")


def compare_run(path: Path) -> int:
    """Compare every trained case of the run in ``path``, print tables, and return the exit code.

    0: all figures are equal; 1: one differs, or a simulation ended with an error; 3: no case could
    be compared.

    :raises SelectionError: there is no run in ``path``.
    """
    run, console = run_folder.read(path), make_console()
    found = list[tuple[CaseResult, Compared]]()
    failing = 0
    progress = _Cases(console, "simulating", len(run.cases), "cases", visible=not is_json())
    with progress as bar:
        for done, result in enumerate(run.cases, 1):
            found.append((result, compared := compare_result(path, result)))
            failing += bool(compared.wrong or compared.error)
            bar.update(done, failing)
    for table in (_by_implementation(found), _reasons(found), _differences(found)):
        if table.rows:
            console.print(table)
    count = sum(bool(one.figures) for _, one in found)
    figures = sum(one.figures for _, one in found)
    print_line(
        console,
        f"{number(count, 'case')} compared, {figures:,} figures; "
        f"{failing} differ, {sum(bool(one.skip) for _, one in found)} skipped",
    )
    return BROKEN if failing else HELD if count else NOT_DECIDED


def _by_implementation(found: Sequence[tuple[CaseResult, Compared]]) -> Table:
    rows = []
    for name, of in sorted(grouped((r.case.implementation, one) for r, one in found).items()):
        differ = sum(bool(one.wrong or one.error) for one in of)
        skipped = sum(bool(one.skip) for one in of)
        figures = f"{sum(one.figures for one in of):,}"
        equal = len(of) - differ - skipped
        rows.append((name, *map(str, (len(of), equal, differ, skipped)), figures))
    columns = ("implementation", "cases", "equal", "differ", "skipped", "figures")
    return Table("Simulated ranks and real ones", columns, rows, align="lrrrrr")


def _reasons(found: Sequence[tuple[CaseResult, Compared]]) -> Table:
    counts = Counter(one.skip for _, one in found if one.skip)
    rows = [(reason, str(count)) for reason, count in counts.most_common()]
    return Table("Skipped", ("reason", "cases"), rows, align="lr")


def _differences(found: Sequence[tuple[CaseResult, Compared]]) -> Table:
    rows = []
    for _, one in found:
        said = [one.error] if one.error else [*one.wrong[:_SHOWN]]
        hidden = len(one.wrong) - len(said)
        said += [f"and {number(hidden, 'more difference')}"] if hidden > 0 else []
        rows += [(one.case, text) for text in said]
    return Table("Differences", ("case", "difference"), rows)

"""Results of this wing as ``compare`` and ``gate`` see them: ratios, exact bytes, and scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

from shardproof.bench import lines
from shardproof.bench.lines import CellLine, Memory, PairLine
from shardproof.bench.model.step_time import Scorecard
from shardproof.bench.ratios import Estimate
from shardproof.bench.subjects import LETTERS
from shardproof.compare.exact_figures import Scalar
from shardproof.compare.snapshot import TIMED, Entry, Sample, Version, cell_of, strategy_of
from shardproof.runs.run_folder import Run

#: Keys of a pair or cell that say what is run; the rest of it is in its id.
_CELL = ("workload", "base", "optimizer", "dtype", "size", "mode")
#: Verdicts of a line without a ratio that means anything.
_NO_RATIO = frozenset({"fail", "crash", "hang", "precondition", "refused"})


def entries(run: Run, version: Callable[[str], Version]) -> Iterator[Entry]:
    """An entry for each comparison and scaling cell of ``run``.

    :raises SelectionError: a line that cannot be read.
    """
    for pair in lines.pairs(run):
        yield _of_pair(pair, version(pair.id))
    for cell in lines.cells(run):
        yield _of_cell(cell, version(cell.id))


def _of_pair(line: PairLine, version: Version) -> Entry:
    pair, figures = line.pair, line.figures
    known = figures is not None and _means_something(line)
    twin = None if figures is None else figures.aa
    beside: dict[str, float] = {}
    exact: dict[str, Scalar] = {}
    if isinstance(line.memory, Memory):
        peaks = {"a": line.memory.a, "b": line.memory.b}
        if line.memory.kind == "ledger":
            exact = {f"memory.ledger_bytes_{letter}": peak for letter, peak in peaks.items()}
        else:
            beside = {f"resident_bytes_{letter}": float(peak) for letter, peak in peaks.items()}
    for letter, card in (line.scorecard or {}).items():
        if isinstance(card, Scorecard):
            scores = _numbers(asdict(card))
            beside |= {f"{name}, {letter.upper()}": value for name, value in scores.items()}
    cell = cell_of(pair.to_dict(), _CELL)
    cell["sides"] = {letter: {"options": pair.side(letter).options} for letter in LETTERS}
    cell["meshes"] = {letter: line.meshes.get(letter, {}) for letter in LETTERS}
    return Entry(
        id=line.id,
        implementation=pair.versus,
        strategy=strategy_of(pair.a.implementation),
        backend=pair.backend,
        world=pair.world,
        verdict=TIMED if known else line.verdict,
        version=version,
        figures=exact,
        cell=cell_of(cell, tuple(cell)),
        reason=line.reason,
        samples={"time": _sample(figures.log)} if known and figures is not None else {},
        same=None if twin is None else Sample(math.log(twin.ratio), twin.sd, twin.blocks),
        beside=beside,
    )


def _of_cell(line: CellLine, version: Version) -> Entry:
    known = (line.efficiency or {}) if _means_something(line) else {}
    samples = {f"efficiency ({base})": _sample(one.log) for base, one in known.items()}
    # A cell that was refused repeats what its source measured.
    if samples and line.wrapping is not None:
        samples["time (wrapped / plain)"] = _sample(line.wrapping.log)
    beside: dict[str, object] = {"modelled efficiency": line.modelled_efficiency}
    if line.scorecard is not None:
        beside |= asdict(line.scorecard)
    return Entry(
        id=line.id,
        implementation=line.title,
        strategy=strategy_of(line.implementation),
        backend=line.backend,
        world=line.world,
        verdict=line.verdict,
        version=version,
        figures={},
        cell=cell_of(line.cell.to_dict(), (*_CELL, "system")),
        reason=line.reason,
        samples=samples,
        beside=_numbers(beside),
    )


def _numbers(figures: Mapping[str, object]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in figures.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _means_something(line: PairLine | CellLine) -> bool:
    """Whether the ratios of a timed line are those of sides that train the same."""
    return line.verdict not in _NO_RATIO and bool(line.trained_alike)


def _sample(log: Estimate) -> Sample:
    return Sample(log.mean, log.sd, log.blocks)

"""The scorecard of a step from what was probed beside it, and that of both sides of a pair.

A pair is scored in a launch of its own after it was timed (``shardproof bench --score``), so that
nothing is probed while sides take turns: ``bench.model.measurement`` measures, :func:`digest` keeps
what figures follow from, :func:`cards` makes them, again in `verify`.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

from shardproof.bench.launches import side_run
from shardproof.bench.lines import (
    MeasuredPair,
    Memory,
    NoFigures,
    PairProbes,
    ProbedStep,
    Probes,
    SideProbes,
)
from shardproof.bench.model import alpha_beta, step_time
from shardproof.bench.model.records import Rounds
from shardproof.bench.model.step_time import Scorecard
from shardproof.bench.subjects import LETTERS, Subject


def card(
    probes: Probes,
    step: ProbedStep,
    seconds: float,
    subject: Subject,
    peak_bytes: float | None,
    formula_bytes: float | None,
) -> Scorecard:
    """The scorecard of a step that took ``seconds``.

    :raises Unmodelled: there is no prediction for its calls.
    """
    machine = probes.machine
    prediction = step_time.predict(
        *(step.calls, step.alone, machine.fits, subject.backend),
        cores_per_rank=probes.cores_per_rank,
        threads=probes.threads,
    )
    best = None
    if machine.flop_rate:
        best = step_time.probed_compute(
            *(step.flops, step.elements, subject.optimizer.name),
            *(machine.flop_rate, machine.byte_rate),
        )
    return step_time.scorecard(
        seconds,
        prediction,
        peak_bytes=peak_bytes,
        formula_bytes=formula_bytes,
        probed_seconds=best,
    )


# --------------------------------------------------------------------------------------- of a pair


def unscored(backend: str, mesh: Mapping[str, int]) -> str:
    """Why there is no prediction for a side on ``mesh``; empty: there is one."""
    if backend not in alpha_beta.ALGORITHMS:
        return f"there are no cost formulas for backend {backend}"
    split = [axis for axis in ("tensor", "pipe") if mesh.get(axis, 1) > 1]
    if split:  # a rank alone cannot compute its part of a model
        return f"compute is measured of whole models, and {' and '.join(split)} cuts this one"
    return ""


def digest(
    backend: str, letters: Sequence[str], rounds: Rounds, others: Mapping[str, NoFigures]
) -> PairProbes:
    """What ranks measured of the sides ``letters``: medians over steps of the slowest rank; and
    why ``others`` cannot be scored.
    """
    records = rounds.measured
    sides: dict[str, SideProbes | NoFigures] = {}
    for number, letter in enumerate(letters):
        watched = rounds.watched[number]
        alone = step_time.slowest([record.alone[number].steps for record in records])
        together = step_time.slowest([record.together[number] for record in records])
        sides[letter] = SideProbes(
            alone=statistics.median(itertools.chain(*alone)),
            together=statistics.median(itertools.chain(*together)),
            calls=step_time.seen(watched.calls),
            flops=watched.flops,
            elements=watched.elements,
        )
    return PairProbes(
        machine=alpha_beta.machine(backend, [record.probes for record in records]),
        cores_per_rank=min(len(record.cores) for record in records) or None,
        threads=records[0].threads,
        sides={**sides, **others},
    )


def cards(line: MeasuredPair) -> dict[str, Scorecard | NoFigures] | None:
    """The scorecard of each side of a comparison, or why it has none; ``None``: nobody asked."""
    probed, pair = line.probed, line.pair
    if probed is None:
        return None
    if isinstance(probed, NoFigures):
        return dict.fromkeys(LETTERS, probed)
    scores: dict[str, Scorecard | NoFigures] = {}
    exact = (
        line.memory if isinstance(line.memory, Memory) and line.memory.kind == "ledger" else None
    )
    for letter, side in probed.sides.items():
        if isinstance(side, NoFigures):
            scores[letter] = side
            continue
        peak = formula = None
        if exact is not None:
            run = side_run(pair, letter, line.meshes[letter])
            peak = exact.a if letter == "a" else exact.b
            formula = run.formula_bytes(line.strategies[letter])
        try:
            scores[letter] = card(probed.probes, side, side.together, pair, peak, formula)
        except step_time.Unmodelled as error:
            scores[letter] = NoFigures(problem=str(error))
    return scores

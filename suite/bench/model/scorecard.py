"""The scorecard of a step from probes of the same launch, and that of both sides of a pair."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from typing import Any

from shardproof import axes
from shardproof.bench.lines import MeasuredPair, Memory, NoFigures, ProbedStep, Probes, SideProbes
from shardproof.bench.model import alpha_beta, step_time
from shardproof.bench.model.step_time import Prediction, Scorecard
from shardproof.bench.subjects import LETTERS, Rounds, SideRun, side_run


def predicted(probes: Probes, step: ProbedStep) -> Prediction:
    """The predicted time of ``step`` on the probed machine.

    :raises Unmodelled: there is no prediction for its calls.
    """
    machine = probes.machine
    return step_time.predict(
        *(step.calls, step.alone, machine.links, machine.backend),
        cores_per_rank=probes.cores_per_rank,
        threads=probes.threads,
    )


def card(
    probes: Probes,
    step: ProbedStep,
    seconds: float,
    run: SideRun,
    peak_bytes: float | None = None,
    formula_bytes: float | None = None,
) -> Scorecard:
    """The scorecard of a step of ``run`` that took ``seconds``.

    :raises Unmodelled: there is no prediction for its calls.
    """
    machine, made, best = probes.machine, predicted(probes, step), None
    if machine.flop_rate:
        # Layers are split over ranks; every rank updates everything.
        split = axes.size(run.axes, axes.splitting(run.axes))
        compute = step_time.probed_compute(
            *(step.flops / split, step.elements / split, run.optimizer.name),
            *(machine.flop_rate, machine.byte_rate),
        )
        best = (compute + made.communication_seconds) / seconds
    return Scorecard(
        achieved_over_predicted=made.step_seconds / seconds,
        exposed_share=max(0.0, 1 - made.compute_seconds / seconds),
        memory_over_formula=(
            peak_bytes / formula_bytes if peak_bytes is not None and formula_bytes else None
        ),
        achieved_over_probed=best,
    )


def unscored(backend: str, mesh: Mapping[str, int]) -> str:
    """Why there is no prediction for a side on ``mesh``; empty: there is one."""
    if not alpha_beta.algorithms_of(backend):
        return f"there are no cost formulas for backend {backend}"
    split = [axis for axis in axes.splitting(mesh) if mesh[axis] > 1]
    if split:  # a rank alone cannot compute its part of a model
        return f"compute is measured for whole models, but {' and '.join(split)} splits this one"
    return ""


def digest(backend: str, rounds: Rounds) -> tuple[Probes, list[SideProbes]]:
    """The measurements of ranks: the machine, and each run by medians over steps of the slowest
    rank.
    """
    records = rounds.measured
    steps = []
    for number, watched in enumerate(rounds.watched):
        alone = step_time.slowest([record.alone[number].steps for record in records])
        together = step_time.slowest([record.together[number] for record in records])
        seconds: dict[str, Any] = {
            "alone": statistics.median(itertools.chain(*alone)),
            "together": statistics.median(itertools.chain(*together)),
        }
        work = {key: getattr(watched, key) for key in ("calls", "flops", "elements")}
        steps.append(SideProbes(**seconds, **work))
    probes = Probes(
        machine=alpha_beta.machine(backend, [record.probes for record in records]),
        cores_per_rank=min(len(record.cores) for record in records) or None,
        threads=records[0].threads,
    )
    return probes, steps


def cards(line: MeasuredPair) -> dict[str, Scorecard | NoFigures] | None:
    """The scorecard of each side of a comparison, or why it has none; ``None``: not asked for."""
    probed, pair = line.probed, line.pair
    if probed is None:
        return None
    if isinstance(probed, NoFigures):
        return dict.fromkeys(LETTERS, probed)
    scores: dict[str, Scorecard | NoFigures] = {}
    memory = line.memory
    for letter, side in probed.sides.items():
        if isinstance(side, NoFigures):
            scores[letter] = side
            continue
        peak = formula = None
        run = side_run(pair, letter, line.meshes[letter])
        if isinstance(memory, Memory) and memory.kind == "ledger":
            peak = memory.a if letter == "a" else memory.b
            formula = run.formula_bytes(line.strategies[letter])
        try:
            scores[letter] = card(probed.probes, side, side.together, run, peak, formula)
        except step_time.Unmodelled as error:
            scores[letter] = NoFigures(problem=str(error))
    return scores

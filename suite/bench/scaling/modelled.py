"""Figures next to the measured ones: modelled efficiencies, and the scorecard. Pure functions of
the probes of the first launch of a cell, so that `verify` makes them again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from shardproof.axes import sharing
from shardproof.bench.lines import CellProbes, MeasuredCell, Modelled
from shardproof.bench.model import alpha_beta, curve, step_time
from shardproof.bench.model.scorecard import card, unscored
from shardproof.bench.model.step_time import Scorecard
from shardproof.bench.subjects import Cell, Launch, RankTimes, WatchedStep, grown, side_run
from shardproof.launch.nodes import Nodes
from shardproof.ledgers.places import Lie, groups_along, lie
from shardproof.schedules import Schedule


def lies(mesh: Mapping[str, int], ranks_per_node: int) -> dict[str, Lie]:
    """How the groups along each axis of ``mesh`` that is cut lie on nodes of ``ranks_per_node``
    consecutive ranks (0: there are no nodes).
    """
    world = math.prod(mesh.values())
    homes = [rank // (ranks_per_node or world) for rank in range(world)]
    return {axis: lie(groups_along(mesh, axis), homes) for axis, n in mesh.items() if n > 1}


# Ranks of one node share a memory, those of two a network: alpha and beta of the groups along an
# axis are those of a launch in which they lie as in the cell.
def not_probed(mesh: Mapping[str, int], probed: Mapping[str, int], ranks_per_node: int) -> str:
    """Why a launch on ``probed`` does not tell what the calls of ``mesh`` cost on such nodes;
    empty: it does.
    """
    there = lies(probed, ranks_per_node)
    for axis, here in lies(mesh, ranks_per_node).items():
        if there.get(axis) != here:
            ranks = math.prod(probed.values())
            beside = f", where they lie {there[axis]}" if axis in there else ""
            return (
                f"groups along {axis} lie {here}, and alpha and beta were probed on {ranks} "
                f"ranks{beside or ', which it does not cut'}"
            )
    return ""


def digest(
    cell: Cell,
    launch: Launch,
    watched: WatchedStep,
    records: Sequence[RankTimes],
    nodes: Nodes | None,
) -> CellProbes:
    """The probes of the ranks of a ``launch`` of ``cell`` on ``nodes``: the slowest rank's."""
    each = 0 if nodes is None else nodes.ranks_per_node
    probes = [record.probes for record in records if record.probes is not None]
    gradients = {
        samples: _median([record.alone[number].gradients for record in records])
        for number, samples in enumerate(launch.probed)
    }
    alone = _median([record.alone[0].steps for record in records])  # with its share of the batch
    return CellProbes(
        nodes=math.ceil(launch.first.world / each) if each else 1,
        ranks_per_node=each,
        schedule=watched.schedule,
        world=launch.first.world,
        machine=alpha_beta.machine(cell.backend, probes),
        gradients=gradients,
        update=alone - gradients[cell.samples(launch.first.world)],
        alone=alone,
        calls=watched.calls,
        flops=watched.flops,
        elements=watched.elements,
        cores_per_rank=min(len(record.cores) for record in records) or None,
        threads=records[0].threads,
    )


def _median(ranks: Sequence[Sequence[Sequence[float]]]) -> float:
    return statistics.median(s for segment in step_time.slowest(ranks) for s in segment)


def modelled(line: MeasuredCell, alone: float | None) -> Modelled | None:
    """The modelled figure of a cell; ``None`` where nothing was probed or timed.

    ``alone`` are the seconds of a step of the plain program: ``efficiency`` is against them, as the
    measured one that decides is.  It is ``None`` where ``problem`` says why there is no figure.
    """
    probed, cell = line.probed, line.cell
    if probed is None or alone is None:
        return None
    axis, *_ = line.mesh
    there = side_run(cell.at(probed.world), "ranks", grown(line.mesh, probed.world))
    figures: dict[str, object] = {"world": cell.world, "efficiency": None, "from": probed.world}
    shares_batch = cell.mode == "strong" and sharing([axis]) != ()
    samples = cell.base.global_batch if shares_batch else cell.samples(cell.world)
    try:
        if problem := _crosses(line, probed):
            raise step_time.Unmodelled(problem)
        compute = curve.Compute.through(probed.gradients, probed.update)
        of_rank = probed.calls, probed.cores_per_rank, probed.threads
        ground = curve.Ground(
            *(line.strategy, there.facts(), compute, probed.machine.links, cell.backend, *of_rank),
            None if probed.schedule is None else Schedule.from_dict(probed.schedule),
        )
        prediction = ground.step_at(cell.world, axis, cell.mode, samples)
    except step_time.Unmodelled as error:
        return Modelled.model_validate({**figures, "problem": str(error)})
    share = cell.world if cell.mode == "strong" else 1
    figures["efficiency"] = alone / (share * prediction.step_seconds)
    return Modelled.model_validate({**figures, **prediction.to_dict()})


def _crosses(line: MeasuredCell, probed: CellProbes) -> str:
    """Why what was probed is not what the calls of a cell cost; empty: it is."""
    if probed.ranks_per_node:
        return not_probed(line.mesh, grown(line.mesh, probed.world), probed.ranks_per_node)
    axes = [axis for axis, size in line.mesh.items() if size > 1]
    if probed.nodes == 1 or len(axes) < 2:
        return ""
    return (
        f"calls along {' and '.join(axes)} lie inside nodes or between them, and alpha and beta "
        "are those of one group of all ranks"
    )


def scorecard(line: MeasuredCell, seconds: float) -> Scorecard | None:
    """The scorecard of a cell whose step took ``seconds``; ``None``: no probes or no prediction."""
    if line.probed is None or unscored(line.cell.backend, line.mesh):
        return None
    if _crosses(line, line.probed):
        return None
    run = side_run(line.cell, "ranks", line.mesh)
    try:
        formula = run.formula_bytes(line.strategy)
        return card(line.probed, line.probed, seconds, run, line.peak_bytes, formula)
    except step_time.Unmodelled:
        return None

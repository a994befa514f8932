"""Figures beside what is measured: modelled efficiencies, and the scorecard.  Pure.

What ranks probed in the first launch of a cell becomes ``line["probed"]`` (:func:`digest`), and all
figures follow from that and the cell, so that `verify` makes them again.  A world that is not here
is modelled from the probes of the largest one that is.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from shardproof.bench.launches import RankTimes, cell_run
from shardproof.bench.model import alpha_beta, curve, step_time
from shardproof.bench.model.records import WatchedStep
from shardproof.bench.model.scorecard import calls_of, card, fits_of
from shardproof.bench.scaling.matrix import Cell, on_ranks

Line = Mapping[str, Any]


def digest(
    cell: Cell, world: int, watched: WatchedStep, records: Sequence[RankTimes]
) -> dict[str, Any]:
    """What the ``world`` ranks of a launch of ``cell`` probed, as plain data.

    ``alone`` is the step of a rank that sends nothing, with its share of the batch; ``gradients``
    are seconds to the gradients by samples of a rank, ``update`` those after.  All of it is that of
    the slowest rank, all ranks at once.
    """
    probes = [record.probes for record in records if record.probes is not None]
    gradients = {
        samples: _median([record.alone[samples].gradients for record in records])
        for samples in records[0].alone
    }
    own = cell.samples(world)
    alone = _median([record.alone[own].steps for record in records])
    return {
        "world": world,
        "machine": alpha_beta.machine(cell.backend, probes).to_dict(),
        "gradients": {str(samples): seconds for samples, seconds in gradients.items()},
        "update": alone - gradients[own],
        "alone": alone,
        "calls": [dataclasses.asdict(call) for call in step_time.seen(watched.calls)],
        "flops": watched.flops,
        "elements": watched.elements,
        "cores_per_rank": min(len(record.cores) for record in records) or None,
        "threads": records[0].threads,
    }


def _median(ranks: Sequence[Sequence[Sequence[float]]]) -> float:
    """Median over steps of the slowest rank's seconds."""
    return statistics.median(s for segment in step_time.slowest(ranks) for s in segment)


def modelled(line: Line, alone: float | None) -> dict[str, Any] | None:
    """The modelled figure of a cell; ``None`` where nothing was probed or timed.

    ``alone`` are the seconds of a step of the plain program: ``efficiency`` is against them, as the
    measured one that decides is.  It is ``None`` where ``problem`` says why there is no figure.
    """
    probed = line["probed"]
    if probed is None or alone is None:
        return None
    cell = Cell.from_dict(line["cell"])
    (axis,) = line["mesh"]
    compute = curve.Compute.through(
        {int(samples): seconds for samples, seconds in probed["gradients"].items()},
        probed["update"],
    )
    (found,) = curve.modelled(
        line["strategy"],
        cell_run(on_ranks(cell, probed["world"]), axis).facts(),
        axis,
        cell.mode,
        cell.base.global_batch,
        compute,
        fits_of(probed),
        cell.backend,
        known=calls_of(probed),
        worlds=[cell.world],
        cores_per_rank=probed["cores_per_rank"],
        threads=probed["threads"],
    )
    told = found.to_dict() | {"from": probed["world"]}
    if found.prediction is not None:
        share = cell.world if cell.mode == "strong" else 1
        told["efficiency"] = alone / (share * found.prediction.step_seconds)
    return told


def scorecard(line: Line, seconds: float) -> dict[str, Any] | None:
    """The scorecard of a measured cell whose step took ``seconds``; ``None``: nothing was probed,
    or there is no prediction.
    """
    probed = line["probed"]
    if probed is None:
        return None
    cell = Cell.from_dict(line["cell"])
    (axis,) = line["mesh"]
    try:
        return card(
            *(probed, seconds, cell.backend, cell.optimizer.name, line["peak_bytes"]),
            cell_run(cell, axis).formula_bytes(line["strategy"]),
        )
    except step_time.Unmodelled:
        return None

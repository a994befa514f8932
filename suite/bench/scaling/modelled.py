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

from shardproof import workloads
from shardproof.bench.model import alpha_beta, curve, step_time
from shardproof.bench.model.scorecard import calls_of, card, fits_of
from shardproof.bench.scaling.matrix import Cell, on_ranks
from shardproof.case import Case
from shardproof.costs import ModelFacts, NoCostModel, cost_model_of
from shardproof.costs.model_facts import model_facts_of

Line = Mapping[str, Any]


def digest(cell: Cell, watched: Line, records: Sequence[Line]) -> dict[str, Any]:
    """What the ranks of a launch of ``cell`` probed, as plain data.

    ``alone`` is the step of a rank that sends nothing, with its share of the batch; ``gradients``
    are seconds to the gradients by samples of a rank, ``update`` those after.  All of it is that of
    the slowest rank, all ranks at once.
    """
    found = alpha_beta.machine(cell.backend, [record["probes"] for record in records])
    gradients, update = {}, 0.0
    for samples in records[0]["alone"]:
        steps = _median([record["alone"][samples]["steps"] for record in records])
        first = _median([record["alone"][samples]["gradients"] for record in records])
        gradients[samples] = first
        if int(samples) == cell.samples(cell.world):
            alone, update = steps, steps - first
    return {
        "world": cell.world,
        "machine": found.to_dict(),
        "gradients": gradients,
        "update": update,
        "alone": alone,
        "calls": [dataclasses.asdict(call) for call in step_time.seen(watched["calls"])],
        "flops": watched["flops"],
        "elements": watched["elements"],
        "cores_per_rank": min(len(record["cores"]) for record in records) or None,
        "threads": records[0]["threads"],
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
        plan_for(on_ranks(cell, probed["world"]), {axis: probed["world"]}),
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
    try:
        return card(
            *(probed, seconds, cell.backend, cell.optimizer.name, line["peak_bytes"]),
            formula_bytes(line["strategy"], cell, line["mesh"]),
        )
    except step_time.Unmodelled:
        return None


def formula_bytes(strategy: str, cell: Cell, mesh: Mapping[str, int]) -> int | None:
    """Bytes of model states on the rank that holds most; ``None``: no formula."""
    try:
        cost_model = cost_model_of(strategy, plan_for(cell, mesh))
        return None if cost_model is None or cost_model.why_not_measured() else cost_model.total()
    except NoCostModel:
        return None


def plan_for(cell: Cell, mesh: Mapping[str, int]) -> ModelFacts:
    """What the promises of ``cell`` on ``mesh`` are made from."""
    case = Case(
        id=cell.id,
        scenario=cell.name,
        implementation=cell.system.implementation,
        backend=cell.backend,
        mesh=mesh,
        workload=cell.workload,
        optimizer=cell.optimizer,
        lane="working_precision",
        checks=(),
        options=cell.system.options,
        dtype=cell.dtype,
    )
    workload = workloads.make(cell.workload, cell.dtype, "working_precision")
    return model_facts_of(case, workload, workload.model("meta"))

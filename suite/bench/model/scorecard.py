"""The scorecard of a step from what was probed beside it, and that of both sides of a pair.

A pair is scored in a launch of its own after it was timed (``shardproof bench --score``), so that
nothing is probed while sides take turns: ``bench.model.measurement`` measures, :func:`digest` keeps
what figures follow from, :func:`cards` makes them, again in `verify`.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from shardproof.bench.launches import side_run
from shardproof.bench.model import alpha_beta, step_time
from shardproof.bench.model.records import Rounds
from shardproof.bench.sides import Pair

Line = Mapping[str, Any]


def card(
    probed: Line,
    seconds: float,
    backend: str,
    optimizer: str,
    peak_bytes: float | None,
    formula_bytes: float | None,
) -> dict[str, Any]:
    """The scorecard of a step that took ``seconds``, as plain data.

    ``probed``: its ``calls``, ``flops`` and trained ``elements``, the same step ``alone`` in
    seconds, the ``machine`` (``bench.model.alpha_beta.Machine``), ``cores_per_rank``, ``threads``.

    :raises Unmodelled: there is no prediction for its calls.
    """
    machine = probed["machine"]
    prediction = step_time.predict(
        calls_of(probed),
        probed["alone"],
        fits_of(probed),
        backend,
        cores_per_rank=probed["cores_per_rank"],
        threads=probed["threads"],
    )
    best = None
    if machine["flop_rate"]:
        best = step_time.probed_compute(
            *(probed["flops"], probed["elements"], optimizer),
            *(machine["flop_rate"], machine["byte_rate"]),
        )
    return step_time.scorecard(
        seconds,
        prediction,
        peak_bytes=peak_bytes,
        formula_bytes=formula_bytes,
        probed_seconds=best,
    ).to_dict()


def fits_of(probed: Line) -> dict[str, alpha_beta.Fit]:
    """Alpha and beta by operation."""
    told = probed["machine"]["fits"].items()
    return {op: alpha_beta.Fit(**{**each, "sizes": tuple(each["sizes"])}) for op, each in told}


def calls_of(probed: Line) -> list[step_time.Call]:
    """The calls of a step that the ledger saw."""
    return [step_time.Call(**each) for each in probed["calls"]]


# --------------------------------------------------------------------------------------- of a pair


def unscored(backend: str, mesh: Mapping[str, int]) -> str:
    """Why there is no prediction for a side on ``mesh``; empty: there is one."""
    if backend not in alpha_beta.ALGORITHMS:
        return f"there are no cost formulas for backend {backend}"
    split = [axis for axis in ("tensor", "pipe") if mesh.get(axis, 1) > 1]
    if split:  # a rank alone cannot compute its part of a model
        return f"compute is measured of whole models, and {' and '.join(split)} cuts this one"
    return ""


def digest(backend: str, letters: Sequence[str], found: Rounds) -> dict[str, Any]:
    """What ranks measured of the sides ``letters``, as plain data.

    ``alone`` and ``together`` are seconds of a step of the slowest rank, medians over steps.
    """
    records = found.measured
    machine = alpha_beta.machine(backend, [record.probes for record in records])
    sides = {}
    for number, letter in enumerate(letters):
        watched = found.watched[number]
        alone = step_time.slowest([record.alone[number].steps for record in records])
        together = step_time.slowest([record.together[number] for record in records])
        sides[letter] = {
            "alone": statistics.median(itertools.chain(*alone)),
            "together": statistics.median(itertools.chain(*together)),
            "calls": [dataclasses.asdict(call) for call in step_time.seen(watched.calls)],
            "flops": watched.flops,
            "elements": watched.elements,
        }
    return {
        "machine": machine.to_dict(),
        "cores_per_rank": min(len(record.cores) for record in records) or None,
        "threads": records[0].threads,
        "sides": sides,
    }


def cards(line: Line) -> dict[str, Any] | None:
    """The scorecard of each side of a comparison, or its ``problem``; ``None``: nobody asked."""
    probed = line.get("probed")
    if probed is None:
        return None
    if "problem" in probed:
        return {letter: {"problem": probed["problem"]} for letter in ("a", "b")}
    pair, found = Pair.from_dict(line["pair"]), {}
    memory = line["memory"] or {}
    for letter, side in probed["sides"].items():
        if "problem" in side:
            found[letter] = side
            continue
        exact = memory.get("kind") == "ledger"
        try:
            found[letter] = card(
                {**probed, **side},
                side["together"],
                pair.backend,
                pair.optimizer.name,
                memory[letter] if exact else None,
                side_run(pair, letter, line["meshes"][letter]).formula_bytes(
                    line["strategies"][letter]
                )
                if exact
                else None,
            )
        except step_time.Unmodelled as error:
            found[letter] = {"problem": str(error)}
    return found

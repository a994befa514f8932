"""The workload ``votes``: no model, but scripts of metrics that ranks vote on, until training ends.

A script says, vote by vote, what each rank measures, on how much data, and whether it asks to stop.
Metrics are multiples of 1/4 from a small range, and the weights of a vote sum to a power of two, so
that sums and means are exact in any order; some votes repeat the one before, a tie.  ``target`` and
``min_delta`` count in quarters.

``without_data``: the last rank never has data, and its metric is NaN.  ``not_finite``: in some
votes one rank measures NaN or infinity, and what that means; ``asks``: in some, a rank asks to
stop.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardproof.case import WorkloadSpec
from shardproof.contract import StopRule
from shardproof.workloads.knobs import Knob, Params, WorkloadError, untrained_values

NAME = "votes"
#: Knob -> what it may be.
KNOBS: Mapping[str, Knob] = {
    "scripts": Knob(12),
    "votes": Knob(8),
    "patience": Knob(2, 0),
    "min_delta": Knob(0, 0),
    "target": Knob(0, 0),
    "budget": Knob(0, 0),
    "best": Knob("lowest", choices=("lowest", "highest")),
    "not_finite": Knob("none", choices=("none", "count", "stop")),
    "without_data": Knob(False, choices=(False, True)),
    "asks": Knob(False, choices=(False, True)),
}
#: What the weights of a vote sum to, and how many metrics there are.
WEIGHT, VALUES = 64, 24
#: Metrics are multiples of this.
UNIT = 0.25
#: Metrics that are none.
ODD = (math.nan, math.inf, -math.inf)
#: How often a vote has the numbers of the one before it, some rank's is none, and some rank asks.
TIES, ODD_ONES, WISHES = 0.2, 0.2, 0.1


@dataclass(frozen=True)
class Cast:
    """The vote of one rank."""

    metric: float
    weight: float
    asks: bool = False


#: A script: vote by vote, what each rank tells.
Script = Sequence[Sequence[Cast]]


def resolve(spec: WorkloadSpec) -> Params:
    """All knobs.

    :raises WorkloadError: an unknown knob, or a value that does not fit.
    """
    params = untrained_values(spec, KNOBS)
    if not (params["patience"] or params["budget"] or params["target"]):
        what = f"{NAME}: patience, budget and target are all 0"
        message = f"{what}: nothing ends training; set one of these keys, e.g. patience: 2"
        raise WorkloadError(message)
    return params


def rule(params: Params) -> StopRule:
    """The rule that ranks are to apply."""
    return StopRule(
        best=params["best"],
        patience=params["patience"],
        min_delta=params["min_delta"] * UNIT,
        target=params["target"] * UNIT if params["target"] else None,
        budget=params["budget"],
        not_finite="stop" if params["not_finite"] == "stop" else "count",
    )


def scripts(spec: WorkloadSpec, world: int) -> list[Script]:
    """The scripts of ``world`` ranks; they depend on nothing else but the seed and the knobs."""
    params = resolve(spec)
    source = random.Random(f"{NAME}/{spec.seed}/{world}")
    return [_script(params, world, source) for _ in range(params["scripts"])]


def _script(params: Params, world: int, source: random.Random) -> Script:
    idle = params["without_data"] and world > 1
    script: list[list[Cast]] = []
    for _ in range(params["votes"]):
        weights = _weights(world - idle, source)
        casts = [Cast(source.randrange(VALUES) * UNIT, float(weight)) for weight in weights]
        if script and source.random() < TIES:
            casts = [replace(cast, asks=False) for cast in script[-1][: len(casts)]]
        if params["not_finite"] != "none" and source.random() < ODD_ONES:
            odd = source.randrange(len(casts))
            casts[odd] = Cast(source.choice(ODD), casts[odd].weight)
        casts += [Cast(math.nan, 0.0)] * idle
        if params["asks"] and source.random() < WISHES:
            one = source.randrange(world)
            casts[one] = replace(casts[one], asks=True)
        script.append(casts)
    return script


def _weights(ranks: int, source: random.Random) -> list[int]:
    """Weights above 0 that sum to :data:`WEIGHT`."""
    cuts = sorted(source.sample(range(1, WEIGHT), ranks - 1))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, WEIGHT], strict=True)]

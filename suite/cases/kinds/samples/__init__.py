"""Workload ``epochs``: a sampler shares a data set out, epoch by epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from shardproof.case import Case
from shardproof.cases.kinds.kind import Leg, UntrainedKind
from shardproof.cases.kinds.samples import workload
from shardproof.contract import Sampling
from shardproof.registry.declaration import Declaration


def _declines(declaration: Declaration, case: Case) -> str:
    for word in workload.asked(case.workload, case.data_coordinates):
        if word in declaration.declines:
            return f"declines {word}: {declaration.declines[word]}"
    return ""


def _legs(case: Case, system: Any) -> Sequence[Leg]:
    from shardproof.cases.kinds.samples.rank_program import after

    meshes = enumerate(workload.meshes(case))
    return [(math.prod(mesh.values()), partial(after, case, leg)) for leg, mesh in meshes]


SAMPLES = UntrainedKind(
    *(workload.NAME, Sampling, "data", "is not a sampler"),
    resolve=workload.resolve,
    legs=_legs,
    declines=_declines,
)

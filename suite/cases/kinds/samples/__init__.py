"""Workload ``epochs``: a sampler shares a data set out, epoch by epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from shardproof.case import Case, WorkloadSpec
from shardproof.cases.kinds.kind import Untrained
from shardproof.cases.kinds.samples import workload
from shardproof.cases.kinds.work import Leg
from shardproof.contract import Sampling
from shardproof.registry.declaration import Declaration
from shardproof.workloads.knobs import Params


class Samples(Untrained):
    """Epochs of a sampler; a run that resumes has several legs."""

    name = workload.NAME
    system = Sampling
    only_check = "data"
    lacks = "is no sampler"

    def resolve(self, spec: WorkloadSpec) -> Params:
        """All knobs."""
        return workload.resolve(spec)

    def declines(self, declaration: Declaration, case: Case) -> str:
        """What is asked of the sampler that it says it does not do."""
        for word in workload.asked(case.workload, case.data_coordinates):
            if word in declaration.declines:
                return f"declines {word}: {declaration.declines[word]}"
        return ""

    def legs(self, case: Case, system: Any) -> Sequence[Leg]:
        """The ranks of each leg get the state that those of the leg before told."""
        from shardproof.cases.kinds.samples.rank_program import after

        meshes = enumerate(workload.meshes(case))
        return [(math.prod(mesh.values()), partial(after, case, leg)) for leg, mesh in meshes]

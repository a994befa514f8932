"""Kinds of workload: one that trains a model, and those that train none, each with a folder.

    calls     calls of one collective operation, judged one by one     check ``collectives``
    samples   workload ``epochs``: a sampler shares a data set out     check ``data``
    votes     ranks vote on when training ends                         check ``stopping``

Each folder holds the row of the table below (``__init__.py``), the workload (``workload.py``), the
program of a rank (``rank_program.py``) and the check (``check.py``).  Scenarios, commands and the
verdict ask a ``kind.py``; a leader asks it for the work of a case (``cases/launcher.py``).
"""

from __future__ import annotations

from typing import Any

from shardproof.cases.kinds.calls import CALLS
from shardproof.cases.kinds.kind import Kind
from shardproof.cases.kinds.samples import SAMPLES
from shardproof.cases.kinds.trained import Trained
from shardproof.cases.kinds.votes import VOTES

#: By the name of the workload, those that train no model.
UNTRAINED = {kind.name: kind for kind in (CALLS, SAMPLES, VOTES)}
_TRAINED = Trained()


def of(spec: Any) -> Kind:
    """The kind of the workload that ``spec`` (anything with a ``name``) is about."""
    return UNTRAINED.get(spec.name, _TRAINED)

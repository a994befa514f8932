"""The workload ``epochs``: no model, but a sampler that shares a data set out, epoch by epoch.

Ranks ask for ``epochs`` epochs and take ``batch`` samples each in a step.  With ``resume_at`` the
run stops after so many steps of epoch ``resume_epoch``, and fresh ranks go on; ``resumes`` says how
often, each time ``resume_at`` steps later.  They are as many as before, or ``into``, then as many
as at first again, and so on: these are the *legs* of a run.  ``read_ahead``: batches that a loader
has taken from the sampler, and nobody has trained on, when a leg ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import get_args

from shardproof.axes import replicas, sharing
from shardproof.case import Case, WorkloadSpec, data_shares
from shardproof.contract import Tail
from shardproof.workloads.knobs import Knob, Params, WorkloadError, untrained_values

NAME = "epochs"
#: Knob -> what it may be.
KNOBS = {
    "samples": Knob(47),
    "batch": Knob(2),
    "epochs": Knob(3),
    "shuffle": Knob(True, choices=(True, False)),
    "tail": Knob("pad", choices=get_args(Tail)),
    "resume_at": Knob(0, 0),
    "resume_epoch": Knob(1, 0),
    "resumes": Knob(1),
    "into": Knob(0, 0),
    "read_ahead": Knob(0, 0),
}
#: As of an axis of a mesh.
MOST_RANKS = 1024
_OF_RESUMES = ("into", "read_ahead", "resume_epoch", "resumes")
#: What a sampler is asked unless one asks for something else: label -> knobs.
USUAL: Mapping[str, Params] = {
    "pad": {},
    "drop": {"tail": "drop"},
    "few": {"samples": 3},
    "in-order": {"shuffle": False},
    "resumed": {"resume_at": 2},
    "more-ranks": {"resume_at": 1, "into": 4},
    "fewer-ranks": {"resume_at": 3, "into": 1},
}


def resolve(spec: WorkloadSpec) -> Params:
    """All knobs.

    :raises WorkloadError: an unknown knob, or a value that does not fit.
    """
    params = untrained_values(spec, KNOBS)
    if not params["resume_at"] and (idle := {*spec.params} & {*_OF_RESUMES}):
        what = f"{NAME}: {min(idle)} = {params[min(idle)]!r}"
        raise WorkloadError(f"{what} also needs resume_at, e.g. resume_at: 2")
    if params["into"] > MOST_RANKS:
        raise WorkloadError(f"{NAME}: into = {params['into']}; valid: up to {MOST_RANKS}")
    if params["resume_at"] and params["resume_epoch"] >= params["epochs"]:
        what = f"{NAME}: resume_epoch = {params['resume_epoch']}"
        raise WorkloadError(f"{what} does not exist; valid: 0 to {params['epochs'] - 1}")
    return params


def asked(spec: WorkloadSpec, world: int) -> list[str]:
    """The requests of a case of ``world`` data coordinates to a sampler (``Sampling.asked``)."""
    params = resolve(spec)
    needed = {
        "shuffle": params["shuffle"],
        "in_order": not params["shuffle"],
        params["tail"]: True,
        "resume": params["resume_at"] > 0,
        "other_world": params["into"] not in (0, world),
        "read_ahead": params["read_ahead"] > 0,
    }
    return [word for word, is_needed in needed.items() if is_needed]


def meshes(case: Case) -> list[dict[str, int]]:
    """The mesh of each leg: where the world changes, its data axes become one."""
    params, own = resolve(case.workload), dict(case.mesh)
    if not params["resume_at"]:
        return [own]
    other = own
    if params["into"] not in (0, case.data_coordinates):
        axes = sharing(own) or [*replicas(1)]
        other = own | dict.fromkeys(axes, 1) | {axes[0]: params["into"]}
    return [other if leg % 2 else own for leg in range(params["resumes"] + 1)]


def coordinates(mesh: Mapping[str, int]) -> dict[int, int]:
    """Rank -> data coordinate."""
    ranks = range(math.prod(mesh.values()))
    return data_shares(mesh, ranks, ranks)


def shares(left: int, world: int, tail: Tail) -> list[int]:
    """How many of ``left`` samples each coordinate takes, the larger shares first."""
    least, rest = divmod(left, world)
    extra = {"pad": world if rest else 0, "drop": 0, "uneven": rest}[tail]
    return [least + (coordinate < extra) for coordinate in range(world)]

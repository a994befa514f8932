"""Triggers of a case: the conditions under which faults show (docs/trigger-conditions.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardproof import axes
from shardproof.axes import Cut
from shardproof.case import Case


def _sizes(case: Case) -> list[list[list[int]]]:
    """Samples by data coordinate, window and micro-batch."""
    return case.workload.cut(case.data_coordinates)


def _axes(case: Case) -> list[int]:
    return [size for size in case.mesh.values() if size > 1]


def _windows(case: Case) -> list[list[int]]:
    return [window for share in _sizes(case) for window in share]


def _is(workload: str) -> Callable[[Case], bool]:
    return lambda case: case.workload.name == workload


def _has(knob: str, value: str) -> Callable[[Case], bool]:
    return lambda case: case.workload.params.get(knob) == value


#: What meshes of replicas of shards cut.
COPIES_OF_SHARDS: tuple[Cut, ...] = ("samples", "state")
#: What a case's batch, mesh and model are like, beside its traits; by the name in tables.
FORMS: Mapping[str, tuple[str, Callable[[Case], bool]]] = {
    "batch one-micro-batch": (
        "one micro-batch a step",
        lambda case: all(len(share) == 1 and len(share[0]) == 1 for share in _sizes(case)),
    ),
    "batch several-micro-batches": (
        "several micro-batches in a window",
        lambda case: max(map(len, _windows(case))) > 1,
    ),
    "batch several-windows": (
        "several windows in a step",
        lambda case: any(len(share) > 1 for share in _sizes(case)),
    ),
    "batch unequal-samples": (
        "micro-batches of several sizes",
        lambda case: len(set().union(*_windows(case))) > 1,
    ),
    "batch fewer-than-stages": (
        "a window with fewer micro-batches than stages",
        lambda case: min(map(len, _windows(case))) < axes.parts(case.mesh, "layers"),
    ),
    "batch fewer-samples": (
        "data coordinates that run fewer micro-batches because they have no more samples",
        lambda case: any(
            sum(map(len, share)) < sum(case.workload.window_sizes(index))
            for index, share in enumerate(_sizes(case))
        ),
    ),
    "mesh one-rank": ("one rank alone", lambda case: case.world == 1),
    "mesh two-ranks": ("two ranks", lambda case: case.world == 2),
    "mesh odd": ("an axis of 3, 5, ... ranks", lambda case: any(n % 2 for n in _axes(case))),
    "mesh four-or-more": ("an axis of 4 or more", lambda case: max(_axes(case), default=0) > 3),
    "mesh axis-of-one": (
        "an axis of one rank next to others",
        lambda case: 1 in case.mesh.values() and case.world > 1,
    ),
    "mesh two-data-axes": (
        "replicas of shards",
        lambda case: min(axes.parts(case.mesh, what) for what in COPIES_OF_SHARDS) > 1,
    ),
    "mesh several-axes": ("several axes of two ranks or more", lambda case: len(_axes(case)) > 1),
    "mesh unlike-axes": ("axes of different sizes above 1", lambda case: len({*_axes(case)}) > 1),
    "model batch-norm": ("running statistics, which every forward changes", _is("digits_cnn")),
    "model no-layer-norm": ("RMSNorm: a constant on the hidden state shows", _has("norm", "rms")),
    "model strided": (
        "hidden states that lie feature by feature",
        lambda case: case.workload.params.get("layout", "rows") != "rows",
    ),
    "model nested": ("units that pass tensors inside of containers", _has("passes", "nested")),
    "model recurrent": ("a cell that is called once a position", _is("charnames_rnn")),
    "model gradient-penalty": ("a loss that holds a gradient of forward", _is("digits_penalty")),
}


#: Those that a mesh of one axis cannot have, nor one without both data axes, nor one of one stage.
TWO_DATA_AXES, OF_STAGES = "mesh two-data-axes", "batch fewer-than-stages"
OF_SEVERAL_AXES = ("mesh axis-of-one", TWO_DATA_AXES, "mesh several-axes", "mesh unlike-axes")


#: Meshes in which features that need several ranks are set up, and do nothing.
OF_ONE_RANK = ("mesh one-rank", "mesh axis-of-one")
#: Traits that ask for several ranks, or for several data coordinates.
_OF_RANKS = ("late_results", "poisoned_buffers", "skewed_ranks")
OF_COORDINATES = ("rotating_shares", "unequal_micro_batches")


def of(case: Case) -> set[str]:
    """The names of its triggers: ``trait NAME`` and those of :data:`FORMS`.

    A trait that nothing of the mesh can show is none.
    """
    forms = {name for name, (_, holds) in FORMS.items() if holds(case)}
    idle = (*(_OF_RANKS * (case.world == 1)), *(OF_COORDINATES * (case.data_coordinates == 1)))
    return forms | {f"trait {name}" for name in case.workload.traits if name not in idle}


def names() -> list[str]:
    """All that there are; imports the workloads, and torch with them."""
    from shardproof.workloads import TRAITS

    return [*(f"trait {name}" for name in TRAITS), *FORMS]


def about(name: str) -> str:
    """The meaning of a form; empty of a trait, which ``shardproof list traits`` explains."""
    return FORMS[name][0] if name in FORMS else ""

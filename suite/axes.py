"""The axes of a mesh: one record each, and the lists of axes that follow from their properties.

A mesh maps names of axes to numbers of ranks.  No other module of the suite names an axis: it asks
what an axis does.  Every function returns the axes that the given mesh has, outermost first.

    axis       cuts       own samples  sums gradients of  activations
    pipe       layers     no           nothing            passed on
    replicate  samples    yes          all parameters     -
    shard      state      yes          all parameters     -
    context    positions  no           all parameters     combined
    expert     experts    yes          all but experts    combined
    tensor     widths     no           nothing            combined
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

#: What each rank along an axis has a part of.  ``samples`` alone: ranks hold copies of the model.
#: ``state``: parameters, gradients or optimizer state, as sharding strategies do.  ``widths``:
#: heads and hidden sizes of a layer.
Cut = Literal["layers", "samples", "state", "positions", "experts", "widths"]
#: The role of parameters that are not ``dense``: each expert lies on some ranks only.
EXPERT = "expert"


@dataclass(frozen=True)
class Axis:
    """An axis of a mesh.

    ``own_samples``: ranks along it get other samples of the batch; elsewhere they work on the same
    ones.  ``sums``: the parameters whose gradients are summed along it (``dense``: all but
    experts).  ``activations``: what happens to them along it, if anything.  ``sends``: it needs
    messages from one rank to one other.  ``grows``: it may take any number of ranks.  ``role``: in
    checkpoints axes of one role stand for each other.
    """

    name: str
    cuts: Cut
    role: str
    own_samples: bool = False
    sums: Literal["all", "dense", "none"] = "none"
    activations: Literal["", "passed on", "combined"] = ""
    sends: bool = False
    grows: bool = False


#: Outermost first: the last axis has neighbouring ranks.
AXES: tuple[Axis, ...] = (
    Axis("pipe", "layers", role="stages", activations="passed on", sends=True),
    Axis("replicate", "samples", role="data", own_samples=True, sums="all", grows=True),
    Axis("shard", "state", role="data", own_samples=True, sums="all", grows=True),
    Axis(
        *("context", "positions"), role="positions", sums="all", activations="combined", sends=True
    ),
    Axis(
        *("expert", "experts"),
        role="experts",
        own_samples=True,
        sums="dense",
        activations="combined",
    ),
    Axis("tensor", "widths", role="layers", activations="combined"),
)


def names() -> tuple[str, ...]:
    """All axes."""
    return tuple(axis.name for axis in AXES)


def cutting(what: Cut) -> str:
    """The axis that cuts ``what``."""
    return {axis.cuts: axis.name for axis in AXES}[what]


def parts(mesh: Mapping[str, int], what: Cut) -> int:
    """Number of ranks over which ``mesh`` cuts ``what`` (1: it has no such axis)."""
    return mesh.get(cutting(what), 1)


def size(mesh: Mapping[str, int], along: Iterable[str]) -> int:
    """Number of ranks along several axes together; absent ones count 1."""
    return math.prod(mesh.get(name, 1) for name in along)


def joined(mesh: Mapping[str, int], along: Iterable[str]) -> str:
    """The name of the group along several axes: those of more than one rank, joined by ``+``.

    Of axes that have one rank each it is the name of all; ``""``: the mesh has none of them.
    """
    present = [name for name in along if name in mesh]
    return "+".join([name for name in present if mesh[name] > 1] or present)


def replicas(ranks: int) -> dict[str, int]:
    """The mesh of so many copies of the whole model."""
    return {cutting("samples"): ranks}


def sharing(mesh: Iterable[str]) -> tuple[str, ...]:
    """Axes whose ranks share out the batch: each gets other samples."""
    return tuple(axis.name for axis in _of(mesh) if axis.own_samples)


def splitting(mesh: Iterable[str]) -> tuple[str, ...]:
    """Axes whose ranks split the computation of one sample."""
    return tuple(axis.name for axis in _of(mesh) if not axis.own_samples)


def exchanging(mesh: Iterable[str]) -> tuple[str, ...]:
    """Axes along which activations travel."""
    return tuple(axis.name for axis in _of(mesh) if axis.activations)


def combining(mesh: Iterable[str]) -> tuple[str, ...]:
    """Axes along which activations are put together, in another order than on one rank."""
    return tuple(axis.name for axis in _of(mesh) if axis.activations == "combined")


def dividing(mesh: Iterable[str]) -> tuple[str, ...]:
    """Axes along which each rank computes with a part of the model only."""
    return tuple(a.name for a in _of(mesh) if a.cuts in ("layers", "experts", "widths"))


def sending(mesh: Iterable[str]) -> tuple[str, ...]:
    """Axes that need messages from one rank to one other."""
    return tuple(axis.name for axis in _of(mesh) if axis.sends)


def growing(mesh: Iterable[str]) -> tuple[str, ...]:
    """Axes that may take any number of ranks, the first choice first."""
    return tuple(axis.name for axis in reversed(_of(mesh)) if axis.grows)


def summing(mesh: Iterable[str], role: str = "") -> tuple[str, ...]:
    """Axes over which gradients of a parameter of ``role`` are summed."""
    kinds = ("all",) if role == EXPERT else ("all", "dense")
    return tuple(axis.name for axis in _of(mesh) if axis.sums in kinds)


def sharded(mesh: Iterable[str], role: str = "") -> tuple[str, ...]:
    """Axes whose ranks together hold the state of such a parameter once; empty: all hold copies.

    Where there is an axis for state, every axis that sums gradients takes part in it, but the one
    that is there for copies.
    """
    along = summing(mesh, role)
    copies = cutting("samples")
    return tuple(n for n in along if n != copies) if cutting("state") in along else ()


def replicated(mesh: Iterable[str], role: str = "") -> tuple[str, ...]:
    """Axes that sum the gradients of such a parameter and hold copies of its state."""
    present = tuple(mesh)
    apart = sharded(present, role)
    return tuple(name for name in summing(present, role) if name not in apart)


def joint_groups(mesh: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Sets of several axes whose ranks together need one group."""
    present = tuple(mesh)
    sets = [sharing(present)]
    for role in ("", EXPERT):
        sets += [kind(present, role) for kind in (summing, sharded, replicated)]
    return tuple(dict.fromkeys(along for along in sets if len(along) > 1))


def role(name: str) -> str:
    """The thing that ranks along the axis ``name`` have parts of, as a word."""
    return next(axis.role for axis in AXES if axis.name == name)


def roles() -> tuple[tuple[str, ...], ...]:
    """Axes by role: along those of one role a rank may have another place after a load."""
    kinds = dict.fromkeys(axis.role for axis in AXES)
    return tuple(tuple(a.name for a in AXES if a.role == kind) for kind in kinds)


def _of(mesh: Iterable[str]) -> tuple[Axis, ...]:
    """The records of the axes in ``mesh``, outermost first."""
    present = frozenset(mesh)
    return tuple(axis for axis in AXES if axis.name in present)

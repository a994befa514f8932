"""Communication: :class:`Comm` wraps one process group, :class:`Mesh` names the axes.

Both are passed in explicitly, so that one strategy file runs on threads, gloo, NCCL and MPI, and in
sub-groups, without change.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

Op = Literal["sum", "avg", "min", "max", "product"]

_OPS = {op: getattr(dist.ReduceOp, op.upper()) for op in get_args(Op)}

#: Tags of messages that belong together: as many as may be under way in a group, and one more.
TAGS = 1 << 12
#: The peer of a receive from any rank.
ANY = -1
#: The description (``new_group(group_desc=)``) of a group that a thread behind the training's back
#: calls: nobody counts its calls, or tells them to the watchdog.
BACKGROUND = "background"
#: The name under which ranks that are threads register with torch.
THREADED = "threaded"


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """``values`` in the environment where nothing stands; afterwards all is as before."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in values.items() if name not in before})
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        changed = {name: value for name, value in before.items() if os.environ.get(name) != value}
        os.environ.update(changed)


@dataclass(frozen=True)
class _Half:
    """Half of a point-to-point exchange with group rank ``peer``; tags of both agree."""

    tensor: Tensor
    peer: int
    tag: int = 0


class Send(_Half):
    """``tensor`` goes to ``peer``."""


class Recv(_Half):
    """``tensor`` is filled from ``peer``, or from any sender if that is :data:`ANY`."""


@dataclass(frozen=True)
class Call:
    """One call of a collective operation, in plain form; the check ``collectives`` makes them.

    ``inputs`` and ``outputs``: one tensor, or one per rank of the group in the form ``list``, or
    several calls' in the form ``coalesced``; operations in place have ``outputs`` only.  ``root``
    is a group rank; lists that only the root has are empty elsewhere.  ``splits``: rows for each
    rank that go out and come in (``None``: equal).  ``transfers``: of messages between two ranks,
    in an order in which blocking calls cannot wait for each other.
    """

    operation: str
    form: str
    group: dist.ProcessGroup
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    reduce: str = "sum"
    root: int = 0
    splits: tuple[list[int], list[int]] | None = None
    transfers: Sequence[Send | Recv] = ()
    asynchronous: bool = False


#: Makes the tensor that carries integers; a simulation replaces it, to keep their values.
control: Callable[..., Tensor] = torch.tensor


class Agreement:
    """Integers on their way between ranks."""

    def __init__(self, tensor: Tensor, work: Any) -> None:
        self._tensor, self._work = tensor, work

    def wait(self) -> list[int]:
        """The integers that all ranks agree on."""
        if self._work is not None:
            self._work.wait()
        return self._tensor.tolist()


class Comm:
    """One process group.  Ranks are *group* ranks throughout.

    With ``async_op=True`` a call returns a handle at once; ``handle.wait()`` makes the result
    visible.  Otherwise the call returns when the result is there.  Tensors must be contiguous.
    """

    def __init__(self, group: dist.ProcessGroup, axis: str, device: str = "cpu") -> None:
        self.group = group
        self.axis = axis
        #: Where tensors that the group sends must lie, those of control messages too.
        self.device = device
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._tags = itertools.cycle(range(1, TAGS))

    def all_reduce(self, tensor: Tensor, op: Op = "sum", async_op: bool = False) -> Any:
        """Combine ``tensor`` over all ranks, in place."""
        return dist.all_reduce(tensor, _OPS[op], group=self.group, async_op=async_op)

    def broadcast(self, tensor: Tensor, root: int = 0, async_op: bool = False) -> Any:
        """Overwrite ``tensor`` on every rank with that of ``root``."""
        return dist.broadcast(tensor, group_src=root, group=self.group, async_op=async_op)

    def reduce(self, tensor: Tensor, root: int = 0, op: Op = "sum", async_op: bool = False) -> Any:
        """Combine over all ranks into ``root``'s tensor; the others' become undefined."""
        return dist.reduce(tensor, group_dst=root, op=_OPS[op], group=self.group, async_op=async_op)

    def all_gather(self, output: Tensor, shard: Tensor, async_op: bool = False) -> Any:
        """Concatenate every rank's ``shard`` in rank order; ``output`` holds ``size`` of them."""
        return dist.all_gather_into_tensor(output, shard, group=self.group, async_op=async_op)

    def reduce_scatter(
        self, shard: Tensor, full: Tensor, op: Op = "sum", async_op: bool = False
    ) -> Any:
        """Combine ``full`` over ranks; rank ``r`` gets the ``r``-th of ``size`` equal chunks."""
        return dist.reduce_scatter_tensor(
            shard, full, op=_OPS[op], group=self.group, async_op=async_op
        )

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send the ``r``-th chunk to rank ``r``; chunks are equal unless splits are given."""
        return dist.all_to_all_single(
            output, tensor, output_splits, input_splits, group=self.group, async_op=async_op
        )

    def gather(self, tensor: Tensor, outputs: list[Tensor] | None = None, root: int = 0) -> None:
        """Collect every rank's ``tensor`` in ``outputs`` (given on ``root`` only)."""
        dist.gather(tensor, outputs, group_dst=root, group=self.group)

    def scatter(self, tensor: Tensor, inputs: list[Tensor] | None = None, root: int = 0) -> None:
        """Receive the tensor that ``root`` holds for this rank in ``inputs``."""
        dist.scatter(tensor, inputs, group_src=root, group=self.group)

    def send(self, tensor: Tensor, peer: int, tag: int = 0, async_op: bool = False) -> Any:
        """Send ``tensor`` to ``peer``; matches a ``recv`` there with the same ``tag``."""
        call = dist.isend if async_op else dist.send
        return call(tensor, group_dst=peer, group=self.group, tag=tag)

    def recv(self, tensor: Tensor, peer: int, tag: int = 0, async_op: bool = False) -> Any:
        """Fill ``tensor`` from ``peer``."""
        call = dist.irecv if async_op else dist.recv
        return call(tensor, group_src=peer, group=self.group, tag=tag)

    def batch(self, operations: Sequence[Send | Recv]) -> list[Any]:
        """Start several point-to-point operations together; returns their handles."""
        ops = [
            dist.P2POp(
                dist.isend if isinstance(op, Send) else dist.irecv,
                op.tensor,
                group=self.group,
                tag=op.tag,
                group_peer=op.peer,
            )
            for op in operations
        ]
        return dist.batch_isend_irecv(ops) if ops else []

    def agree(
        self, integers: Sequence[int], op: Op | Literal["first"], dtype: torch.dtype = torch.int32
    ) -> list[int]:
        """Combine ``integers`` over all ranks, element by element; equal on every rank.

        This is the control plane: all that ranks decide together by numbers (who used what, how
        many rounds come, whether a step counts) passes here, and nothing else is read back from a
        tensor.  ``op`` of ``"first"`` takes the integers of group rank 0.  They travel as one
        message of ``dtype``, whose range they must not exceed: control traffic.
        """
        return self.begin_agreement(integers, op, dtype, async_op=False).wait()

    def begin_agreement(
        self,
        integers: Sequence[int],
        op: Op | Literal["first"],
        dtype: torch.dtype = torch.int32,
        async_op: bool = True,
    ) -> Agreement:
        """As :meth:`agree`, which waits for it: the integers on their way."""
        tensor = control(integers, dtype=dtype, device=self.device)
        if op == "first":
            return Agreement(tensor, self.broadcast(tensor, async_op=async_op))
        return Agreement(tensor, self.all_reduce(tensor, op, async_op=async_op))

    def new_tag(self) -> int:
        """A tag for messages that belong together: the same on all ranks that ask as often."""
        return next(self._tags)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's picklable ``value`` in rank order (control traffic)."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """The picklable ``value`` of ``root`` (control traffic)."""
        box = [value]
        dist.broadcast_object_list(box, group_src=root, group=self.group)
        return box[0]

    def barrier(self) -> None:
        """Return when every rank has called it."""
        dist.barrier(group=self.group)


class PeerGone(RuntimeError):
    """A call waits for a member of the group that is gone, and will never end."""


class OutsideSubgroup(ValueError):
    """A rank calls a communicator of which it is no member."""


class Subgroup(Comm):
    """The communicator of some ranks of a mesh (:meth:`Mesh.subgroup`).

    Every rank of the mesh has one; those outside have ``size`` too, but ``rank`` is -1, and a
    call there raises :class:`OutsideSubgroup`.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, ranks: tuple[int, ...], axis: str, device: str
    ) -> None:
        #: Global ranks of the members, ascending.
        self.ranks = ranks
        if group is not None:
            super().__init__(group, axis, device)
        else:
            self.axis, self.device, self.size, self.rank = axis, device, len(ranks), -1

    def contains(self, rank: int) -> bool:
        """Whether global ``rank`` is a member."""
        return rank in self.ranks

    def __getattr__(self, name: str) -> Any:
        if name in ("group", "_tags"):
            raise OutsideSubgroup(
                f"rank {dist.get_rank()} is not in the sub-group {list(self.ranks)}: "
                "check subgroup.contains(rank) before each call"
            )
        raise AttributeError(name)


def _no_meeting(ranks: Sequence[int], own: int, place: str, text: str) -> None:
    raise RuntimeError(f"{text}: call shardproof.backends.join on this rank first")


#: Waits until all global ``ranks`` say ``text`` at ``place``, or raises who will not; ``own`` is
#: the caller's number.  Set by :mod:`shardproof.backends`, which knows what ranks do meanwhile.
meet: Callable[[Sequence[int], int, str, str], None] = _no_meeting


#: The name of the group that the calling rank makes; "": torch's own choice.
_group_name: ContextVar[str] = ContextVar("group_name", default="")


def _named_groups() -> None:
    """Let :data:`_group_name` name groups.

    torch numbers them, which fits only where all ranks of the default group make all groups.
    """
    chosen = c10d._process_group_name
    if getattr(chosen, "by_shardproof", False):
        return

    def name(*given: Any, **named: Any) -> Any:
        return _group_name.get() or chosen(*given, **named)

    name.by_shardproof = True  # type: ignore[attr-defined]
    c10d._process_group_name = name


class Mesh:
    """Ranks on a grid of named axes, the last axis innermost (neighbouring ranks).

    ``Mesh({"replicate": 2, "shard": 3})`` is made by every rank of the default group, which must
    have as many ranks as the axes multiply to.  All groups are created here, by all ranks, in one
    order. ``joint`` names axes whose ranks together need one group, e.g. ``(("replicate",
    "shard"),)``. ``ranks`` (default: all) are those on the grid, in its order; the others make the
    mesh as well, because groups are made by all, but are not part of it (``coordinate`` is empty).
    """

    def __init__(
        self,
        axes: Mapping[str, int],
        joint: Sequence[tuple[str, ...]] = (),
        device: str = "cpu",
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.axes = dict(axes)
        world = math.prod(self.axes.values())
        #: The default group's numbers of the ranks on this mesh.
        self.ranks = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        if world != len(self.ranks):
            shape = " x ".join(f"{a}={n}" for a, n in self.axes.items())
            raise ValueError(f"mesh {shape} has {world} ranks, but the group has {len(self.ranks)}")
        self.device = device
        self.world = world
        self.rank = dist.get_rank()
        #: Global ranks, one grid dimension per axis; every group is an index expression into it.
        self.grid = numpy.array(self.ranks).reshape(tuple(self.axes.values()))
        own = numpy.argwhere(self.grid == self.rank).tolist()
        self.coordinate: dict[str, int] = dict(zip(self.axes, own[0], strict=True)) if own else {}
        names = tuple(self.axes)
        self.device_mesh = DeviceMesh(device, self.grid.tolist(), mesh_dim_names=names)
        self._comms: dict[tuple[str, ...], Comm] = {}
        self._subgroups: dict[tuple[tuple[int, ...], str], Subgroup] = {}
        if self.coordinate:
            for axis in self.axes:
                self._comms[(axis,)] = Comm(self.device_mesh.get_group(axis), axis, device)
        for names in dict.fromkeys(names for names in joint if len(names) > 1):
            group = self._joint_group(names)
            if group is not None:
                self._comms[names] = Comm(group, "+".join(names), device)

    def size(self, *axes: str) -> int:
        """Number of ranks along ``axes`` (absent axes count 1)."""
        return math.prod(self.axes.get(axis, 1) for axis in axes)

    def comm(self, *axes: str) -> Comm:
        """The communicator of this rank along ``axes``."""
        try:
            return self._comms[axes]
        except KeyError:
            known = ", ".join("+".join(names) for names in self._comms)
            what = f"no group along {'+'.join(axes)}; this mesh has: {known}"
            remedy = "Mesh.subgroup(ranks) makes a group of any ranks of the mesh"
            raise KeyError(f"{what}; {remedy}") from None

    def subgroup(self, ranks: Sequence[int], axis: str = "") -> Subgroup:
        """The communicator of some ranks of this mesh, by their global numbers, ascending.

        Every rank of the mesh calls it, members or not, and all in one order; it waits for them.
        Asked again for the same ranks it gives the same one, and waits for nobody.  Ledgers count
        its traffic along ``axis``; empty: along the axes on which its ranks differ.  It is freed
        with the mesh's groups.

        :raises ValueError: the ranks are empty, unsorted, given twice, or not all on the mesh.
        :raises RuntimeError: a rank of the mesh calls something else instead, or never comes.
        """
        members = self._members(ranks)
        axis = axis or self._differing(members)
        if (members, axis) not in self._subgroups:
            text, mine = f"Mesh.subgroup({list(members)})", None
            mesh = f"{json.dumps(self.axes)}/{list(self.ranks)}".replace(" ", "")
            # How often this rank was here: the same on all, who come in one order.
            nth = c10d._get_default_store().add(f"subgroups/{mesh}/{self.rank}", 1)
            place = f"subgroup/{mesh}/{nth}"
            meet(self.ranks, self.rank, place, text)
            if self.rank in members:
                _named_groups()
                before = _group_name.set(place)
                try:
                    mine = dist.new_group(list(members), group_desc=f"mesh_{axis}")
                finally:
                    _group_name.reset(before)
            self._subgroups[members, axis] = Subgroup(mine, members, axis, self.device)
        return self._subgroups[members, axis]

    def _members(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """``ranks``, which are those of a sub-group."""
        given = f"Mesh.subgroup({list(ranks)})"
        if not ranks:
            raise ValueError(f"{given}: a sub-group needs at least one rank")
        wrong = [rank for rank in ranks if type(rank) is not int or rank not in self.ranks]
        if wrong:
            there = ", ".join(map(str, self.ranks))
            raise ValueError(f"{given}: {wrong[0]!r} is not a rank of this mesh; valid: {there}")
        if twice := [rank for rank in set(ranks) if list(ranks).count(rank) > 1]:
            raise ValueError(f"{given}: rank {min(twice)} is given twice")
        if list(ranks) != sorted(ranks):
            raise ValueError(f"{given}: list ranks in ascending order: {sorted(ranks)}")
        if self.rank not in self.ranks:
            raise ValueError(f"{given}: the calling rank {self.rank} is not on this mesh")
        return tuple(ranks)

    def _differing(self, ranks: Sequence[int]) -> str:
        """The axes on which ``ranks`` differ, joined by ``+``."""
        places = numpy.argwhere(numpy.isin(self.grid, ranks))
        named = zip(self.axes, places.T, strict=True)
        return "+".join(axis for axis, along in named if len(set(along.tolist())) > 1)

    @contextmanager
    def environment(self, **more: str) -> Iterator[None]:
        """Set a launcher's variables, and ``more``, in the environment for the time of a ``with``.

        ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
        ``MASTER_PORT``, for systems that read them; what stands there already stays (torchrun's).
        The port was free a moment ago, and the same on all ranks: nobody listens there yet.  Called
        by all ranks of the default group, of which torch's groups exist already.

        :raises RuntimeError: ranks are threads, which share one environment.
        """
        if dist.get_backend() == THREADED:
            raise RuntimeError(
                "these ranks are threads and share one environment, so no rank can have its own "
                "RANK: declare Capabilities(needs=('processes',)) to run each rank as a process"
            )
        port: list[int | None] = [None]
        if self.rank == 0:
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", 0))
                port = [listener.getsockname()[1]]
        dist.broadcast_object_list(port)
        rank, world = str(self.rank), str(dist.get_world_size())
        with environment(
            RANK=rank,
            WORLD_SIZE=world,
            LOCAL_RANK=rank,
            LOCAL_WORLD_SIZE=world,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port[0]),
            **more,
        ):
            yield

    def _joint_group(self, names: tuple[str, ...]) -> dist.ProcessGroup | None:
        """Create the groups along ``names`` for every coordinate of the other axes; ours."""
        inner = [at for at, axis in enumerate(self.axes) if axis in names]
        groups = numpy.moveaxis(self.grid, inner, range(-len(inner), 0))
        mine = None
        for ranks in groups.reshape(-1, self.size(*names)).tolist():
            group = dist.new_group(ranks, group_desc=f"mesh_{'+'.join(names)}")
            if self.rank in ranks:
                mine = group
        return mine

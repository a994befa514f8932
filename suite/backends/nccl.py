"""NCCL, with a ledger where one is wanted: see :mod:`shardproof.backends.logged`.

One GPU a rank: rank ``r`` of a case computes on GPU ``r`` of its machine, because NCCL refuses two
ranks on one GPU.  Payloads are counted as for every backend, before NCCL picks its algorithm.
Times of calls are not: a call returns when it is queued on a stream.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardproof.backends import cuda, errors, logged
from shardproof.backends.disturbances import Disturbances

#: What to do where ranks outnumber GPUs.
REMEDY = "take the backend gloo_cuda, whose ranks share GPUs, or as few ranks as there are GPUs"


class LoggedNccl(logged.Logged):
    """Constructed by torch in place of ``ProcessGroupNCCL``."""

    # Not "nccl": torch's C++ looks for a native NCCL group behind that name.
    backend_name = "logged_nccl"
    torch_name = "nccl"
    kind = dist.ProcessGroup.BackendType.NCCL
    native_type: ClassVar[Any] = getattr(c10d, "ProcessGroupNCCL", None)
    # Attributes that torch looks up on the class.
    Options = getattr(native_type, "Options", None)
    NCCLConfig = getattr(native_type, "NCCLConfig", None)

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        native = self.native_type(store, rank, size, options)
        timeout = getattr(options, "_timeout", timedelta(minutes=10))
        super().__init__(store, rank, size, timeout, native)

    @classmethod
    def join(
        cls,
        rank: int,
        world: int,
        rendezvous: Path | dist.Store,
        timeout_s: float,
        ledgers: bool,
        disturbances: Disturbances | None = None,
    ) -> None:
        """As every backend.

        :raises RuntimeError: two ranks are on one GPU; NCCL would say so of a PCI number, later.
        """
        store = rendezvous
        if isinstance(store, Path):
            store = dist.FileStore(str(store), world)
        refuse_shared_gpus(dist.PrefixStore("gpus", store), rank, world)
        _batch_by(_batch if ledgers else _TORCH_BATCH)
        super().join(rank, world, store, timeout_s, ledgers, disturbances)

    @classmethod
    def leave(cls) -> None:
        super().leave()
        _batch_by(_TORCH_BATCH)


_TORCH_BATCH = c10d.batch_isend_irecv


def _batch_by(function: Any) -> None:
    for module in (dist, c10d):
        setattr(module, _TORCH_BATCH.__name__, function)


def _batch(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
    """torch's ``batch_isend_irecv``, which begins the calls of a batch together for its own groups
    alone.  Two ranks that send to each other one call after the other would both wait.
    """
    group = (p2p_op_list[0].group or dist.group.WORLD) if p2p_op_list else None
    if not isinstance(group, LoggedNccl):
        return _TORCH_BATCH(p2p_op_list)
    c10d._check_p2p_op_list(p2p_op_list)
    device = p2p_op_list[0].tensor.device
    with c10d._coalescing_manager(group, device, async_ops=True) as together:
        for one in p2p_op_list:
            peer = {"group_dst" if one.op is dist.isend else "group_src": one.group_peer}
            one.op(one.tensor, group=group, tag=one.tag, **peer)
    works: list[dist.Work] = together.works
    return works


def refuse_shared_gpus(store: dist.Store, rank: int, world: int) -> None:
    """Raise on every rank if two of the ``world`` ranks have taken one GPU.

    :raises RuntimeError: names the ranks, their GPU, and what to do.
    """
    store.set(str(rank), cuda.identity())
    ranks: dict[str, list[int]] = {}
    for other in range(world):
        ranks.setdefault(store.get(str(other)).decode(), []).append(other)
    for gpu, sharing in ranks.items():
        if len(sharing) > 1:
            raise RuntimeError(
                f"{errors.name_ranks(sharing)} compute on one GPU ({gpu}), which NCCL refuses: "
                f"{REMEDY}"
            )


def available(world: int = 1) -> str | None:
    """Why ``world`` ranks cannot use NCCL here, ``None`` if they can."""
    if LoggedNccl.native_type is None or not dist.is_nccl_available():
        return "this torch is built without NCCL"
    reason = cuda.available(world)
    if reason is None:
        return None
    shared = f": it refuses two ranks on one GPU; {REMEDY}" if cuda.available(1) is None else ""
    return f"NCCL {reason}{shared}"

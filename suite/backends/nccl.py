"""NCCL, logged where a ledger is wanted.

One GPU a rank: rank ``r`` of a case computes on GPU ``r`` of its machine, because NCCL refuses two
ranks on one GPU.  Payloads are counted as for every backend, before NCCL picks its algorithm.
Times of calls are not: a call returns when it is queued on a stream.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from shardproof.backends.backend import Algorithms, Joining, Takes
from shardproof.backends.gloo import WITHOUT_COMPLEX
from shardproof.backends.torch_backend import TorchBackend
from shardproof.table import grouped

if TYPE_CHECKING:
    from torch.distributed import Store

#: What to do where ranks outnumber GPUs.
REMEDY = "choose the backend gloo_cuda, whose ranks share GPUs, or at most one rank per GPU"

_ADDS = ("sum", "avg", "min", "max", "product")


class Nccl(TorchBackend):
    """Ranks are processes, each with a GPU of its own."""

    name = "nccl"
    torch_class = "ProcessGroupNCCL"
    title = "NCCL"
    device = "cuda"
    polls = True
    skips_if_missing = True
    exact_memory = True
    hides_latency = True
    hides_because = "copies and sums overlap with the kernels of the step, on streams of their own"
    # tuning.cc takes the faster one for each size; broadcast and reduce have a ring only.
    algorithms: ClassVar[Algorithms | None] = {
        "all_reduce": ("ring", "double tree"),
        "broadcast": ("pipelined ring",),
        "reduce": ("pipelined ring",),
    }
    has_own_calls = True
    takes: ClassVar[Takes] = {
        # It has no tags, and receives from a rank that is named.
        "send_recv": {"form": ("tensor",)},
        "batch": {"form": ("tensor",)},
        "all_gather": {"form": ("tensor", "list")},
        "gather": {"dtype": WITHOUT_COMPLEX},  # "Unconvertible NCCL type"
        **{name: {"reduce": _ADDS} for name in ("all_reduce", "reduce", "reduce_scatter")},
    }
    remedy = "run on a machine with a GPU for each rank, or on gloo_cuda, where ranks share GPUs"

    def available(self, world: int = 1) -> str | None:
        """Why ``world`` ranks cannot use NCCL here, and what to take where only GPUs are few."""
        reason = super().available(world)
        if reason is None or super().available(1) is not None:
            return reason
        return f"{reason}; NCCL refuses two ranks on one GPU: {REMEDY}"

    def join(self, joining: Joining) -> None:
        """As every backend of torch.

        :raises RuntimeError: two ranks are on one GPU; NCCL would say so of a PCI number, later.
        """
        from torch.distributed import PrefixStore

        store = joining.store
        self.take_device(joining.rank)
        refuse_shared_gpus(PrefixStore("gpus", store), joining.rank, joining.world)
        super().join(dataclasses.replace(joining, rendezvous=store))


def refuse_shared_gpus(store: Store, rank: int, world: int) -> None:
    """Raise on every rank if two of the ``world`` ranks have taken one GPU.

    :raises RuntimeError: names the ranks, their GPU, and what to do.
    """
    from shardproof.backends import cuda, errors

    store.set(str(rank), cuda.identity())
    ranks = grouped((store.get(str(other)).decode(), other) for other in range(world))
    for gpu, sharing in ranks.items():
        if len(sharing) > 1:
            raise RuntimeError(
                f"{errors.name_ranks(sharing)} use the same GPU ({gpu}), "
                f"but NCCL needs one GPU per rank: {REMEDY}"
            )

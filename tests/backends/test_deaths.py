"""A member that is gone from its groups: who waits for it is told, and new groups begin anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_ranks import threads

from shardproof.backends import faults
from shardproof.comm import Mesh, PeerGone

pytestmark = pytest.mark.usefixtures("one_thread")


def loses_one(rank: int, world: int) -> Any:
    """Rank 1 dies before its second call; the others make three, and then new groups."""
    comm = Mesh({"replicate": world}).comm("replicate")
    sums, told = [], ""

    def calls() -> None:
        for number in range(3):
            value = torch.tensor(float(number))
            comm.all_reduce(value)
            sums.append(value.item())

    if rank == 1:
        with pytest.raises(faults.Died), faults.dying(1):
            calls()
    else:
        with pytest.raises(PeerGone) as error:
            calls()
        told = str(error.value)
    faults.renew(rank, world, "step 7")
    left = Mesh({"replicate": world - 1}, ranks=[r for r in range(world) if r != 1])
    if rank != 1:
        value = torch.tensor(1.0)
        left.comm("replicate").all_reduce(value)
        sums.append(value.item())
    # All of them again, in the group that lost a member.
    value = torch.tensor(10.0)
    Mesh({"replicate": world}).comm("replicate").all_reduce(value)
    return sums, told, value.item()


def test_who_waits_for_the_dead_is_told_and_new_groups_begin_anew() -> None:
    found, raised = threads(loses_one, 3, ledgers=True)
    assert raised == [None, None, None]
    assert [sums for sums, _, _ in found] == [[0.0, 2.0], [0.0], [0.0, 2.0]]
    for told in (found[0][1], found[2][1]):
        assert told.startswith("rank 1 left without joining all_reduce")
    assert [last for _, _, last in found] == [30.0] * 3

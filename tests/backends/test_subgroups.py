"""Sub-groups of a mesh on every backend: who is in, who did not come, what is counted and freed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_ranks import processes, threads
from made_case import made_case
from torch.distributed import distributed_c10d as c10d

from shardproof.backends import errors, joined
from shardproof.backends.in_memory.hub import Hub
from shardproof.backends.mpi import found as mpi_found
from shardproof.case import WorkloadSpec
from shardproof.cases.runner import run_cases
from shardproof.checks import GENERAL
from shardproof.checks.results import CaseResult
from shardproof.comm import Mesh, OutsideSubgroup, Subgroup
from shardproof.contract import OptimizerSpec
from shardproof.ledgers import traffic

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.launches]
NO_MPI = mpi_found.problem()
MPI = pytest.param("mpi", marks=pytest.mark.skipif(NO_MPI is not None, reason=str(NO_MPI)))
ON_ALL = pytest.mark.parametrize("backend", ["in_memory", "gloo", MPI])


def run(backend: str, body: Callable[..., Any], world: int, folder: Path, *rest: Any) -> list[Any]:
    """What ``body`` returned on each rank, as it comes out of JSON; ledgers are on."""
    if backend != "in_memory":
        return processes(body, world, folder, True, *rest, backend=backend)
    found, raised = threads(lambda rank, size: body(rank, size, *rest), world, ledgers=True)
    for error in filter(None, raised):
        raise error
    return found


# ------------------------------------------------------------------------------- in the ranks


def uses_one(rank: int, world: int) -> list[Any]:
    """Who is in, what its calls give, and along which axis they are counted."""
    mesh = Mesh({"tensor": 2, "data": 2})
    diagonal = mesh.subgroup([0, 3])
    column, everybody = mesh.subgroup([1, 3]), mesh.subgroup([0, 1, 2, 3])
    assert mesh.subgroup((0, 3)) is diagonal and isinstance(diagonal, Subgroup)
    assert [diagonal.contains(r) for r in range(4)] == [True, False, False, True]
    assert (diagonal.size, diagonal.axis, column.axis) == (2, "tensor+data", "tensor")
    assert mesh.subgroup([2, 3]).axis == "data" and mesh.subgroup([2]).axis == ""
    assert everybody.size == 4 and everybody.rank == rank
    value = torch.full((3,), 10.0**rank, dtype=torch.float64)
    if diagonal.contains(rank):
        assert diagonal.rank == [0, 3].index(rank)
        diagonal.all_reduce(value)
        everyone = diagonal.all_gather_object(rank)
        assert everyone == [0, 3]
    else:
        assert diagonal.rank == -1
        for call in (diagonal.all_reduce, diagonal.broadcast):
            with pytest.raises(OutsideSubgroup, match=rf"rank {rank} is not in .* \[0, 3\]: check"):
                call(value)
        with pytest.raises(OutsideSubgroup):
            diagonal.new_tag()
    ledger = traffic.current()
    assert ledger is not None
    sums = [call for call in ledger.calls if call.operation == "all_reduce"]
    return [value[0].item(), [[list(c.group), c.axis, int(c.logical_bytes)] for c in sums]]


def overlapping(rank: int, world: int) -> list[float]:
    """Each pair of neighbours, on a mesh of some of the ranks, and again on a second mesh."""
    found = []
    for _ in range(2):
        mesh = Mesh({"replicate": 3}, ranks=[0, 1, 3])
        if rank == 2:
            with pytest.raises(ValueError, match=r"rank 2 is not on this mesh"):
                mesh.subgroup([0, 1])
            continue
        for pair in ([0, 1], [1, 3], [0, 3]):
            comm = mesh.subgroup(pair)
            if comm.contains(rank):
                value = torch.tensor([1.0 + rank])
                comm.all_reduce(value)
                found.append(value.item())
    dist.barrier()
    later = dist.new_group([1, 2])  # torch's own numbers of groups are as before
    if rank in (1, 2):
        value = torch.tensor([1.0])
        dist.all_reduce(value, group=later)
        found.append(value.item())
    return found


def late_but_sound(rank: int, world: int) -> bool:
    """One rank computes, another waits for a message of it: both are waited for."""
    mesh = Mesh({"replicate": 3})
    if rank == 2:
        until = time.process_time() + 1.0
        while time.process_time() < until:
            torch.ones(64, 64) @ torch.ones(64, 64)
        dist.send(torch.ones(1), 1)
    if rank == 1:
        dist.recv(torch.ones(1), 2)
    return mesh.subgroup([0, 2]).contains(rank)


def freed(rank: int, world: int) -> list[bool]:
    """Whether what a sub-group held is gone after the groups were destroyed, as `leave` does."""
    group = Mesh({"replicate": 2}).subgroup([0, 1]).group
    known = group in c10d._world.pg_map
    dist.destroy_process_group()
    gone = not c10d._world.pg_map
    return [known, gone, getattr(group, "_comm", None) is None]


def failing(rank: int, world: int, how: str) -> list[str]:
    """Each rank's error in words; "none" for a rank without.  The last one does not come."""
    mesh = Mesh({"replicate": world})
    try:
        if rank != world - 1:
            if how == "limit":
                c10d._get_default_store().set_timeout(timedelta(seconds=0.5))
            mesh.subgroup([0, 2])
        elif how == "others":
            mesh.subgroup([1, 2])
        elif how == "elsewhere":
            dist.all_reduce(torch.ones(4))
        elif how == "raises":
            raise LookupError("the reason")
        elif how == "limit":
            time.sleep(2.0)
    except (errors.CommError, LookupError) as error:
        if dist.get_backend() == "gloo" and how in ("elsewhere", "raises"):
            raise  # only the launcher can end gloo's ranks
        joined.tell_failure(error)
        return [type(error).__name__, str(error)]
    return ["none", ""]


# ------------------------------------------------------------------------------------- what holds


@ON_ALL
def test_members_talk_and_others_are_told(backend: str, tmp_path: Path) -> None:
    found = run(backend, uses_one, 4, tmp_path)
    pair = [[[0, 3], "tensor+data", 24]]
    assert found == [[1001.0, pair], [10.0, []], [100.0, []], [1001.0, pair]]


@ON_ALL
def test_a_mesh_of_some_ranks_has_sub_groups_that_overlap(backend: str, tmp_path: Path) -> None:
    first, second, outside, last = run(backend, overlapping, 4, tmp_path)
    assert first == [3.0, 5.0] * 2 and last == [6.0, 5.0] * 2
    assert second == [*[3.0, 6.0] * 2, 2.0] and outside == [2.0]


@ON_ALL
def test_a_rank_that_computes_is_waited_for(backend: str, tmp_path: Path) -> None:
    assert run(backend, late_but_sound, 3, tmp_path) == [True, False, True]


@ON_ALL
def test_it_is_freed_with_all_groups(backend: str, tmp_path: Path) -> None:
    assert run(backend, freed, 2, tmp_path) == [[True] * 3] * 2


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([], r"Mesh.subgroup\(\[\]\): a sub-group needs at least one rank"),
        ([2, 0], r"Mesh.subgroup\(\[2, 0\]\): list ranks in ascending order: \[0, 2\]"),
        ([0, 1, 1], r"rank 1 is given twice"),
        ([0, 3], r"3 is not a rank of this mesh; valid: 0, 1, 2"),
        ([-1], r"-1 is not a rank of this mesh"),
        ([0, True], r"True is not a rank"),
    ],
)
def test_ranks_that_are_no_sub_group_are_refused(ranks: list[int], says: str) -> None:
    def body(rank: int, world: int) -> None:
        with pytest.raises(ValueError, match=says):
            Mesh({"replicate": world}).subgroup(ranks)

    _, raised = threads(body, 3)
    assert raised == [None] * 3


# ------------------------------------------------------------------------------ who does not come

CALL = "Mesh.subgroup([0, 2])"


@ON_ALL
@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("others", "CollectiveMismatch", f"calls {CALL}, but rank 3 calls Mesh.subgroup([1, 2])"),
        ("elsewhere", "CollectiveMismatch", f"rank 3 did not call {CALL}: it waits in all_reduce("),
        ("limit", "PeerTimeout", f"rank 3 did not call {CALL} in 0.5 s"),
    ],
)
def test_who_does_not_come_is_named(
    backend: str, how: str, kind: str, says: str, tmp_path: Path
) -> None:
    if (backend, how) == ("gloo", "elsewhere"):
        with pytest.raises(AssertionError, match=re.escape(f"CollectiveMismatch: {says}")):
            processes(failing, 4, tmp_path, True, how)
        return
    told = run(backend, failing, 4, tmp_path, how)[:3]
    assert all(says in text for _, text in told), told
    assert kind in {name for name, _ in told} <= {kind, "RankFailed"}, told


@ON_ALL
@pytest.mark.parametrize("how", ["returns", "raises"])
def test_a_rank_that_ends_is_named(backend: str, how: str, tmp_path: Path) -> None:
    if backend == "in_memory":
        hub = Hub(4, 20.0)

        def body(rank: int, world: int) -> None:
            mesh = Mesh({"replicate": world})
            if rank < 3:
                mesh.subgroup([0, 2])
            elif how == "raises":
                raise LookupError("the reason")

        _, raised = threads(body, 4, hub)
        says = f"rank 3 did not call {CALL}: it has ended" if how == "returns" else "rank 3 raised"
        for error in raised[:3]:
            assert isinstance(error, errors.RankFailed) and says in str(error), raised
            assert error.rank == 3
        return
    if how == "raises":
        if backend == "mpi":
            told = processes(failing, 4, tmp_path, True, how, backend=backend)
            assert [text for _, text in told[:3]] == ["rank 3 raised LookupError: the reason"] * 3
            return
        with pytest.raises(AssertionError, match="rank 3 raised LookupError: the reason"):
            processes(failing, 4, tmp_path, True, how, backend=backend)
        return
    told = processes(failing, 4, tmp_path, True, how, backend=backend)
    assert told[3] == ["none", ""]
    for name, text in told[:3]:
        assert name == "RankEnded" and text.startswith(f"rank 3 did not call {CALL}: it has "), told


# --------------------------------------------------------------------------- a system that has one


@ON_ALL
def test_a_system_over_sub_groups_is_judged_to_the_byte(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own formulas hold in both ledgers; without a level, or a rank, it fails."""
    support = str(Path(__file__).parents[1] / "support")
    monkeypatch.syspath_prepend(support)
    monkeypatch.setenv("PYTHONPATH", support)
    names = ["TwoLevelDDP", "OneLevelDDP", "ComesLateDDP", "TwoLevelDDP"]
    cases = [
        made_case(
            f"two_levels:{name}",
            {"replicate": 4},
            id=f"{number}",
            backend=backend,
            workload=WorkloadSpec(
                "charnames_gpt",
                global_batch=4,
                micro_batches=1,
                params={"layers": 1, "width": 24, "heads": 2, "seq": 8},
            ),
            optimizer=OptimizerSpec("adamw", lr=0.003),
            checks=GENERAL,
        )
        for number, name in enumerate(names)
    ]
    found: dict[str, CaseResult] = {}
    run_cases(cases, 1, lambda result: found.setdefault(result.id, result))
    sound, one_level, late, again = (found[str(number)] for number in range(4))
    assert sound.verdict == again.verdict == "pass", (sound.reason, again.reason)
    judged = {c.check: c.status for c in sound.checks}
    assert judged["traffic"] == "pass"
    assert judged["memory"] == ("pass" if backend != "gloo" else "skip")
    traffic_seen = sound.check("traffic")
    assert traffic_seen is not None
    (sent,) = traffic_seen.figures["sent"]
    assert (sent["axis"], sent["operation"], sent["calls"]) == ("replicate", "all_reduce", 8)
    assert one_level.verdict == "fail", one_level.reason
    assert late.verdict == "crash", late.reason
    assert "Mesh.subgroup([0, 1])" in late.reason and "Mesh.subgroup([2, 3])" in late.reason

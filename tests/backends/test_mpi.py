"""The backend ``mpi`` under a real mpirun: every operation, equal bits, and how it fails.

How its ranks end is among the tests of all backends (``tests/launch``).
"""

from __future__ import annotations

import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_ranks import processes, threads
from made_case import made_case
from neutral_checks import NEUTRAL, STRICTER, data, same

from shardproof.backends import errors, joined
from shardproof.backends.mpi import found as mpi_found
from shardproof.backends.mpi import group
from shardproof.commands import run
from shardproof.errors import SelectionError
from shardproof.launch.mpi.mpirun import Mpirun, MpirunError
from shardproof.ledgers import traffic

installed = pytest.mark.skipif(mpi_found.problem() is not None, reason=str(mpi_found.problem()))
under_mpirun = [installed, pytest.mark.launches]


# ------------------------------------------------------------------------------- in the ranks


def every_check(rank: int, world: int) -> str:
    assert dist.get_backend() == group.NAME
    for name, check in {**NEUTRAL, **STRICTER}.items():
        try:
            check(rank, world)
        except BaseException:  # noqa: BLE001 - reported by name; the ranks are out of step now
            return f"{name}: {traceback.format_exc()}"
    return ""


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of sizes so different that another order of adding gives other bits."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(count, generator=generator) * 10.0 ** (3 - 2 * rank)).to(dtype)


def sums(rank: int, world: int) -> list[float]:
    """Small and large, in every dtype that is summed, as numbers that hold all bits."""
    found: list[float] = []
    for count in (7, 100_003):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                tensor = values(rank, count, dtype)
                dist.all_reduce(tensor, op=op)
                found += tensor[::997].tolist()
        shard = torch.empty(count)
        dist.reduce_scatter_tensor(shard, values(rank, count * world))
        found += shard[::997].tolist() if rank == 0 else []
    return found if rank == 0 else []


def many_groups(rank: int, world: int) -> None:
    """More communicators than an MPI has at a time."""
    for number in range(2500):
        pair = [number % world, (number + 1) % world]
        group = dist.new_group(sorted(pair))
        if rank in pair:
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 2
            dist.destroy_process_group(group)


def out_of_order(rank: int, world: int) -> None:
    """Large calls, which take two rounds, waited for in another order on every rank."""
    tensors = [data(rank, 60_000 + i) for i in range(5)]
    handles = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for i in range(5):
        handles[(i + rank) % 5].wait()
    for i, tensor in enumerate(tensors):
        same(tensor, sum(data(r, 60_000 + i) for r in range(world)))


def dropped_handles(rank: int, world: int) -> None:
    """A call goes on although nobody kept its handle or its tensor."""
    for _ in range(20):
        if rank == 0:
            for peer in range(1, world):
                dist.isend(torch.full((50_000,), 3.0), peer)
        else:
            received = torch.empty(50_000)
            dist.recv(received, 0)
            assert received.eq(3.0).all()


def counted(rank: int, world: int) -> list[tuple[str, int]]:
    dist.all_reduce(torch.ones(4))
    dist.broadcast(torch.ones(2), 0)
    ledger = traffic.current()
    assert ledger is not None
    return [(call.operation, int(call.logical_bytes * world)) for call in ledger.calls]


def fails(rank: int, world: int, how: str) -> list[str]:
    """Each rank's error in words; a rank that is not asked for any returns "none"."""
    try:
        _FAILURES[how](rank)
    except errors.CommError as error:
        joined.tell_failure(error)
        return [type(error).__name__, str(error)]
    except ValueError as error:
        joined.tell_failure(error)
        return ["own", str(error)]
    return ["none", ""]


def _another_call(rank: int) -> None:
    if rank == 1:
        dist.broadcast(torch.ones(4), 0)
    dist.all_reduce(torch.ones(4))


def _another_message(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(3), 1)
        dist.barrier()
    elif rank == 1:
        dist.recv(torch.ones(5), 0)
    else:
        dist.barrier()


def _uneven_parts(rank: int) -> None:
    size = 3 if rank == 1 else 2
    dist.all_gather_into_tensor(torch.empty(size * 3), torch.ones(size))


def _raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("the reason")
    dist.all_reduce(torch.ones(4))


def _late(rank: int) -> None:
    if rank:
        dist.all_reduce(torch.ones(4), async_op=True).wait(timedelta(seconds=0.3))
    else:
        time.sleep(2.0)


_FAILURES = {
    "another call": _another_call,
    "another message": _another_message,
    "uneven parts": _uneven_parts,
    "raises": _raises,
    "late": _late,
}


# ----------------------------------------------------------------------------------- operations


class TestOperations:
    pytestmark = under_mpirun

    @pytest.mark.parametrize("world", [1, 2, 3, 4])
    def test_every_operation_and_upstream_system(self, world: int, tmp_path: Path) -> None:
        failed = processes(every_check, world, tmp_path, world != 2, backend="mpi")
        assert not any(failed), "\n".join(failed)

    def test_sums_have_the_bits_of_in_memory(self, tmp_path: Path) -> None:
        found = processes(sums, 3, tmp_path, False, backend="mpi")
        expected, errors_ = threads(sums, 3)
        assert not any(errors_)
        assert found == expected

    @pytest.mark.parametrize("program", [many_groups, out_of_order, dropped_handles])
    def test_programs_that_strain_it(self, program: Any, tmp_path: Path) -> None:
        processes(program, 3, tmp_path, False, backend="mpi")

    def test_what_a_rank_sends_is_counted(self, tmp_path: Path) -> None:
        found = processes(counted, 3, tmp_path, True, backend="mpi")
        rows = [[["all_reduce", 64], ["broadcast", 48 if rank == 0 else 0]] for rank in range(3)]
        assert found == rows


class TestFailures:
    pytestmark = under_mpirun

    def fail(self, how: str, folder: Path) -> list[list[str]]:
        return processes(fails, 3, folder, False, how, backend="mpi")

    @pytest.mark.parametrize(
        ("how", "words"),
        [
            (
                "another call",
                ("rank 1 calls broadcast(root 0, float32[4])", "all_reduce(sum, float32[4])"),
            ),
            ("another message", ("rank 1 calls recv(from 0", "20 bytes", "rank 0 sends it 12")),
            (
                "uneven parts",
                ("ranks 0,2 call all_gather(float32[2])", "rank 1 calls all_gather(float32[3])"),
            ),
        ],
    )
    def test_calls_that_do_not_match_are_named(
        self, how: str, words: tuple[str, ...], tmp_path: Path
    ) -> None:
        found = self.fail(how, tmp_path)
        said = [text for kind, text in found if kind == "CollectiveMismatch"]
        assert any(all(word in text for word in words) for text in said), found

    def test_a_rank_that_raises_wakes_the_others(self, tmp_path: Path) -> None:
        found = self.fail("raises", tmp_path)
        assert found[1] == ["own", "the reason"]
        for rank in (0, 2):
            assert found[rank] == ["RankFailed", "rank 1 raised ValueError: the reason"]

    def test_a_rank_that_is_late_is_named(self, tmp_path: Path) -> None:
        found = self.fail("late", tmp_path)
        kinds = {kind for kind, _ in found[1:]}
        assert "PeerTimeout" in kinds <= {"PeerTimeout", "RankFailed"}, found
        assert any("no answer from rank 0 in 0.3 s" in text for _, text in found)


# ----------------------------------------------------------------------- finding and starting it


def test_without_mpi4py_or_an_mpirun_the_reason_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mpi_found.importlib.util, "find_spec", lambda name: None)
    assert "mpi4py, which is not installed: see docs/install-extras.md" in str(mpi_found.problem())
    monkeypatch.undo()
    monkeypatch.setattr(mpi_found.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(mpi_found, "find", lambda: None)
    assert "needs mpirun, which is missing" in str(mpi_found.problem())
    assert "shardproof[mpi]" in str(mpi_found.problem())


def _program(folder: Path, name: str, says: str) -> Path:
    folder.mkdir(exist_ok=True)
    script = folder / name
    script.write_text(f"#!/bin/sh\n{says}\n")
    script.chmod(0o755)
    return script


def test_an_mpirun_on_path_is_found_and_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi_found.sys, "prefix", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    families = {
        "mpirun (Open MPI) 4.1.4": ("Open MPI", "mpirun (Open MPI) 4.1.4"),
        "HYDRA build details:\n    Version:    4.0.2": ("MPICH", "Version: 4.0.2"),
    }
    for text, (family, version) in families.items():
        _program(tmp_path, "mpirun", f"cat <<'E'\n{text}\nE")
        mpi_found.find.cache_clear()
        found = mpi_found.find()
        assert found == mpi_found.MpiRuntime(str(tmp_path / "mpirun"), family, version)
        assert found.command(3)[-2:] == ["-n", "3"]
    _program(tmp_path, "mpirun", "echo something else")
    mpi_found.find.cache_clear()
    assert mpi_found.find() is None or mpi_found.find().mpirun != str(tmp_path / "mpirun")
    mpi_found.find.cache_clear()


def test_an_mpirun_that_ends_at_once_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "There are not enough slots available in the system"
    script = _program(tmp_path / "bin", "mpirun", f"echo '{text}'; exit 1")
    monkeypatch.setattr(
        mpi_found, "find", lambda: mpi_found.MpiRuntime(str(script), "MPICH", "made up")
    )
    with pytest.raises(MpirunError, match=f"exit code 1 before 2 ranks had started: {text}"):
        Mpirun(range(2), tmp_path).__enter__()


def test_asked_for_by_name_it_is_bad_input_where_it_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [made_case("reference/ddp", {"replicate": 4}, backend="mpi")]
    monkeypatch.setattr(mpi_found, "problem", lambda: "MPI needs mpirun, which is missing")
    with pytest.raises(
        SelectionError, match=r"which is missing \(--backend mpi\) - run `shardproof doc"
    ):
        run._require_backends(chosen, ["mpi"])
    run._require_backends(chosen, [])  # not asked for by name: skipped
    says = "There are not enough slots available in the system"
    script = _program(tmp_path / "bin", "mpirun", f"echo '{says}'; exit 1")
    monkeypatch.setattr(mpi_found, "problem", lambda: None)
    monkeypatch.setattr(
        mpi_found, "find", lambda: mpi_found.MpiRuntime(str(script), "MPICH", "made up")
    )
    with pytest.raises(SelectionError, match=f"{says}.* let mpirun start 4 ranks here"):
        run._require_backends(chosen, ["mpi"])

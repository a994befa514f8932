"""Where a rank stands: launchers' variables, what cannot be among them, and the store's port."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest

from shardproof.cluster.launchers import place
from shardproof.cluster.launchers.place import Place, interface_to
from shardproof.errors import LaunchError


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (
            {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "1234"},
            Place(3, 4, "head", 1234),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            Place(1, 2, "127.0.0.1", 29511, None, 2),
        ),
        (
            {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "MASTER_ADDR": "n1", "SLURM_STEP_ID": "0"},
            Place(5, 8, "n1", 29511),
        ),
    ],
)
def test_place_is_read_from_any_launcher(environment: dict[str, str], found: Place) -> None:
    assert Place.find(environment) == found


def test_place_says_what_is_missing() -> None:
    with pytest.raises(LaunchError, match="torchrun"):
        Place.find({})
    with pytest.raises(LaunchError, match="MASTER_ADDR"):
        Place.find({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"})


@pytest.mark.parametrize("started", ["2", "4"], ids=["as MPI says", "by another mpirun"])
def test_a_rank_of_mpi_that_ends_early_leaves_no_shared_memory(
    started: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPICH removes the names of its segments only when ranks leave it in order."""
    done: list[str] = []
    here = SimpleNamespace(Get_size=lambda: 2)
    comm = SimpleNamespace(
        Get_rank=lambda: 1,
        Get_size=lambda: 2,
        Split_type=lambda kind: done.append("all have begun") or here,
        bcast=lambda place, root: ("127.0.0.1", 4242),
    )
    world = SimpleNamespace(COMM_WORLD=comm, COMM_TYPE_SHARED=0)
    monkeypatch.setattr(place.group, "start", lambda: world)
    monkeypatch.setattr(place.Mpi, "available", lambda self: None)
    monkeypatch.setattr(place, "unlink_segments", lambda: done.append("unlinked"))
    monkeypatch.setenv("PMI_SIZE", started)
    if started == "4":
        with pytest.raises(LaunchError, match="MPI sees 2 ranks, but the launcher"):
            Place.by_mpi()
    else:
        assert Place.by_mpi() == Place(1, 2, "127.0.0.1", 4242)
    assert done == ["all have begun", "unlinked"]


def test_interface_leads_to_the_address() -> None:
    assert interface_to("127.0.0.1") in ("lo", "lo0")


HAND = {"RANK": "4", "WORLD_SIZE": "8", "MASTER_ADDR": "head"}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"RANK": "8"}, "RANK=8 with WORLD_SIZE=8: ranks are 0 to 7"),
        ({"RANK": "one"}, r"RANK is not a whole number from 0 \(one\) - correct RANK"),
        ({"RANK": "-1"}, "RANK is not a whole number from 0"),
        ({"RANK": "1.0"}, "RANK is not a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is not a whole number from 1"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is not a whole number from 1"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is not a whole number from 1 to 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is not a whole number from 1 to 65535"),
        ({"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_RANK=4 with LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_RANK": "8"}, "LOCAL_RANK=8 with WORLD_SIZE=8"),
        ({"LOCAL_WORLD_SIZE": "16"}, "LOCAL_WORLD_SIZE=16 on a node, but WORLD_SIZE=8 in all"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "4"}, "is a loopback address"),
        ({"MASTER_ADDR": "localhost", "GROUP_WORLD_SIZE": "2"}, "is a loopback address"),
    ],
)
def test_what_cannot_be_is_said_with_its_value(changed: dict[str, str], says: str) -> None:
    assert Place.find(HAND).rank == 4
    with pytest.raises(LaunchError, match=says) as error:
        Place.find(HAND | changed)
    assert " - " in str(error.value) and "\n" not in str(error.value)


def test_the_loopback_is_meant_where_gloo_is_told_so() -> None:
    several = HAND | {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "4"}
    assert Place.find(several | {"GLOO_SOCKET_IFNAME": "lo"}).address == "127.0.0.1"
    with pytest.raises(LaunchError):
        Place.find(several | {"GLOO_SOCKET_IFNAME": "eth0"})


def test_a_host_name_that_leads_to_the_loopback_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: answer)
    several = HAND | {"LOCAL_WORLD_SIZE": "4"}
    with pytest.raises(LaunchError, match=r"resolves to the loopback .*\(head\) - correct /etc"):
        Place.find(several)
    assert Place.find(several | {"GLOO_SOCKET_IFNAME": "eth0"}).address == "head"
    assert Place.find(HAND).address == "head", "all eight may be on this machine"


def test_a_batch_script_without_srun_is_said() -> None:
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
    with pytest.raises(LaunchError, match=r"itself started one process .* - put `srun` before"):
        Place.find(script)


def test_a_port_in_use_is_said_by_rank_0() -> None:
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match=f"rank 0 cannot listen at port {port}, which is in"):
            Place(0, 2, "127.0.0.1", port).store()


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "answers"])
def test_another_program_at_the_port_is_said_by_the_others(
    silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch itself waits for ever where something listens that never answers."""
    monkeypatch.setattr(place, "ANSWER_SECONDS", 1.0)
    kept = []

    def serve() -> None:
        while True:
            try:
                connection, _ = other.accept()
            except OSError:
                return
            kept.append(connection)
            if not silent:
                connection.recv(64)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(
            LaunchError, match=f"another program, not rank 0, listens at 127.0.0.1:{port}"
        ):
            Place(1, 2, "127.0.0.1", port).store()
        for connection in kept:
            connection.close()


def test_who_waits_says_for_whom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(place, "FIRST_WORD_SECONDS", 0.0)
    monkeypatch.setattr(place, "MEETING_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(
        LaunchError, match=f"rank 3 could not reach rank 0 at 127.0.0.1:{port} within 1 s"
    ):
        Place(3, 4, "127.0.0.1", port).store()
    said = capsys.readouterr().err
    assert f"rank 3 waits for rank 0 at 127.0.0.1:{port}, which is this machine itself" in said

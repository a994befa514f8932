"""Whatever a rank does: its outcome says so, in time, blames the right one, and nothing is left."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launch_programs
import psutil
import pytest
import torch
from commands import python
from kept_fork_server import KeptForkServer

from shardproof import tensor_bytes
from shardproof.backends import heartbeat
from shardproof.backends.errors import CollectiveMismatch, PeerTimeout, RankEnded, RankFailed
from shardproof.backends.mpi import found as mpi_found
from shardproof.launch import fork_server as fork_server_module
from shardproof.launch import fork_server_main, process_control
from shardproof.launch import pool as pool_module
from shardproof.launch.fork_server import REPRODUCIBLE, ForkServer, ForkServerError
from shardproof.launch.fork_server_main import LAZY_MODULES, MOST_TASKS, TASK_RAISED
from shardproof.launch.outcome import RankOutcome, mark_consequences, of_exception, root_cause
from shardproof.launch.pool import Pool
from shardproof.launch.rank_process import RankLaunch

HERE = str(Path(__file__).parents[1] / "support")
#: CPU seconds of a rank, and seconds that all may sleep.
BUDGET = 3.0
WITH_MPI = [
    pytest.mark.launches,
    pytest.mark.skipif(mpi_found.problem() is not None, reason=str(mpi_found.problem())),
]
BACKENDS = ("in_memory", "gloo", pytest.param("mpi", marks=WITH_MPI))


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """Leaders find what the parent can import: let that be this folder's programs."""
    sys.path.insert(0, HERE)
    yield
    sys.path.remove(HERE)


@pytest.fixture(scope="module", autouse=True)
def keeps_fork_servers() -> None:
    """Pools of this file start and end their own."""


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of a test that is not about a fork server's own start and end keep theirs, too."""
    monkeypatch.setattr(pool_module, "ForkServer", KeptForkServer)


@pytest.fixture(scope="module")
def fork_server(importable: None) -> Iterator[ForkServer]:
    with ForkServer(["launch_programs"]) as fork_server:
        fork_server.wait_ready()
        yield fork_server
        assert not psutil.Process(fork_server.pid).children(recursive=True)


def await_end(fork_server: ForkServer, ticket: int, within_s: float = 60.0) -> Any:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        for ended in fork_server.poll(1.0):
            assert ended.ticket == ticket
            return ended
    raise AssertionError(f"no end within {within_s} s")


def attempt(
    fork_server: ForkServer, workdir: Path, backend: str, fault: str, **more: Any
) -> dict[str, Any]:
    """Run a program of three ranks in a leader; what :func:`launch_programs.trial` found."""
    payload = {"backend": backend, "fault": fault, "world": 3, "budget": 30.0, **more}
    ticket = fork_server.submit(launch_programs.trial, {**payload, "workdir": str(workdir)})
    ended = await_end(fork_server, ticket)
    assert (ended.exit_code, ended.signal) == (0, None), ended.output
    found: dict[str, Any] = json.loads((workdir / "result.json").read_text())
    assert found["children"] == 0, "the leader is left with children"
    assert not psutil.Process(fork_server.pid).children(recursive=True), "the fork server is"
    return found


# ------------------------------------------------------------------------------------ one case


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [1, 2, 5])
def test_ranks_that_end_well_leave_records(
    fork_server: ForkServer, tmp_path: Path, backend: str, world: int
) -> None:
    found = attempt(fork_server, tmp_path, backend, "none", world=world)
    assert found["cause"] is None
    for rank, outcome in enumerate(found["outcomes"]):
        assert (outcome["rank"], outcome["status"]) == (rank, "ok")
        record = tensor_bytes.load(Path(outcome["record"]))
        # The second all-reduce sums what the first one gave to every rank.
        assert record["rank"] == rank
        assert record["total"].item() == world * world * (world + 1) / 2
        assert outcome["output"] == f"hello from rank {rank}\n"
        assert "all_reduce" in outcome["last_call"] and outcome["calls"] == 2


@pytest.mark.parametrize(
    ("chosen", "printed"),
    [
        ({"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}, "DEFAULT COMPATIBLE\n"),
        # Else MKL rounds by where in memory its arguments lie, and replicas differ.
        ({"ATEN_CPU_CAPABILITY": "default"}, "DEFAULT AUTO\n"),
    ],
)
def test_ranks_compute_with_the_kernels_that_the_environment_chooses(
    importable: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chosen: dict[str, str],
    printed: str,
) -> None:
    monkeypatch.delenv("MKL_CBWR", raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    with ForkServer(["launch_programs"]) as fork_server:
        for backend in ("in_memory", "gloo"):
            (tmp_path / backend).mkdir()
            found = attempt(fork_server, tmp_path / backend, backend, "kernels")
            assert [o["output"] for o in found["outcomes"]] == [printed] * 3


@pytest.mark.parametrize(
    ("backend", "one_core"), [("in_memory", True), ("in_memory", False), ("gloo", True)]
)
def test_ranks_that_are_threads_stay_on_one_core_where_that_is_asked(
    fork_server: ForkServer, tmp_path: Path, backend: str, one_core: bool
) -> None:
    every = {str(core) for core in os.sched_getaffinity(0)}
    found = attempt(fork_server, tmp_path, backend, "cores", one_core=one_core)
    own = [{*outcome["output"].split()} for outcome in found["outcomes"]]
    if one_core and backend == "in_memory":
        assert own == own[:1] * 3 and len(own[0]) == 1 and own[0] <= every
    else:
        assert own == [every] * 3


def test_who_starts_threads_on_one_core_may_use_all_again() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(RuntimeError, match="no more threads"), process_control.on_this_core():
        assert len(os.sched_getaffinity(0)) == 1
        raise RuntimeError("no more threads")
    assert os.sched_getaffinity(0) == before


def test_a_core_that_cannot_be_kept_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    with process_control.on_this_core():
        thread = threading.Thread(target=os.getpid)
        thread.start()
    thread.join()


PRODUCTS = """
import torch
torch.manual_seed(0)
odd = 0
for _ in range(40):
    rows, inner, out = (int(torch.randint(3, 70, (1,))) for _ in range(3))
    inputs = torch.randn(rows, inner, dtype=torch.float64)
    weight = torch.randn(out, inner, dtype=torch.float64)
    buffer = torch.zeros(weight.numel() + 8, dtype=torch.float64)
    for offset in (1, 3, 5):
        moved = buffer[offset : offset + weight.numel()].view_as(weight)
        moved.copy_(weight)
        odd += not torch.equal(inputs @ weight.T, inputs @ moved.T)
print(odd)
"""


def test_products_have_equal_bits_wherever_their_arguments_lie() -> None:
    """Without it 44 % of such products differ on an AMD EPYC."""
    assert python("-c", PRODUCTS, **REPRODUCIBLE).stdout.strip() == "0"


FAST = {
    "raise": ("raised", "ValueError", "the guilty rank's own error"),
    "unpackable": ("raised", "TypeError", "cannot store object at .value"),
    "sys_exit": ("exited", "SystemExit", "sys.exit(7)"),
    "os_exit": ("exited", "", "os._exit(3)"),
    "unsayable": ("raised", "Unsayable", "(its __str__ raised KeyError)"),
    "long": ("raised", "ValueError", " characters left out "),
    "daemon": ("exited", "", "os._exit(0)"),
    "kill_self": ("killed", "SIGKILL", "os.kill(SIGKILL)"),
    "abort": ("killed", "SIGABRT", "os.abort()"),
    "segfault": ("killed", "SIGSEGV", "in string_at"),
    "print": ("killed", "", "printed more than 64 MiB"),
    "early": ("early", "", "it returned while rank"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", FAST)
def test_a_failing_rank_is_blamed_and_wakes_the_others(
    fork_server: ForkServer, tmp_path: Path, backend: str, fault: str
) -> None:
    found = attempt(fork_server, tmp_path, backend, fault)
    status, error_type, message = FAST[fault]
    guilty = found["outcomes"][1]
    assert (guilty["status"], guilty["error_type"]) == (status, error_type), guilty
    assert message in guilty["message"]
    assert len(str(found)) < 1 << 20
    assert not guilty["consequence"] and not guilty["is_comm_error"]
    assert "all_reduce" in guilty["last_call"]
    assert "hello from rank 1" in guilty["output"] or fault == "print"
    assert found["cause"] == 1
    for rank in (0, 2):
        outcome = found["outcomes"][rank]
        assert outcome["consequence"] and outcome["status"] != "ok", outcome
        assert "all_reduce" in outcome["last_call"]
    assert (guilty["record"] is None) == (status != "early")
    assert (guilty["signal"] is None) == (status != "killed")
    if status == "exited":
        assert guilty["exit_code"] == {"sys_exit": 7, "os_exit": 3, "daemon": 0}[fault]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", ["loop", "sleep", "hold", "stop_self"])
def test_a_rank_that_does_not_end_is_ended_and_blamed(
    fork_server: ForkServer, tmp_path: Path, backend: str, fault: str
) -> None:
    found = attempt(fork_server, tmp_path, backend, fault, budget=BUDGET)
    guilty = found["outcomes"][1]
    status = "over budget" if fault == "loop" else "hung"
    assert guilty["status"] == status and not guilty["consequence"], guilty
    assert found["cause"] == 1, found["sentence"]
    assert "its last call" in guilty["message"] and "all_reduce" in guilty["last_call"]
    assert guilty["calls"] == 1
    if fault == "stop_self":
        assert "stopped by os.kill(SIGSTOP)" in guilty["message"]
    else:
        assert "launch_programs.py" in guilty["message"]
        assert "launch_programs.py" in guilty["traceback"]
        assert "suite/launch" not in guilty["traceback"]
    for rank in (0, 2):
        outcome = found["outcomes"][rank]
        assert outcome["consequence"], outcome


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_limit(fork_server: ForkServer, tmp_path: Path, backend: str) -> None:
    found = attempt(fork_server, tmp_path, backend, "eat", memory_bytes=700 << 20)
    guilty = found["outcomes"][1]
    assert guilty["status"] == "killed"
    assert "over its memory limit of 700 MiB" in guilty["message"]
    if backend == "gloo":
        assert found["cause"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_mismatched_calls_are_named(fork_server: ForkServer, tmp_path: Path, backend: str) -> None:
    found = attempt(fork_server, tmp_path, backend, "mismatch")
    cause = found["outcomes"][found["cause"]]
    assert cause["is_comm_error"] or cause["status"] == "killed"  # gloo may abort
    if cause["is_comm_error"]:
        assert "float32[4]" in cause["message"] and "float32[5]" in cause["message"]


def test_a_traceback_begins_in_the_implementation(fork_server: ForkServer, tmp_path: Path) -> None:
    found = attempt(fork_server, tmp_path, "in_memory", "raise")
    trace = found["outcomes"][1]["traceback"]
    assert trace.startswith("Traceback") and trace.endswith(
        "ValueError: the guilty rank's own error"
    )
    assert "_explode" in trace and "suite/launch" not in trace


def test_gloo_without_ledgers(fork_server: ForkServer, tmp_path: Path) -> None:
    assert attempt(fork_server, tmp_path, "gloo", "none", ledgers=False)["cause"] is None


def test_any_object_with_the_right_methods_is_a_backend(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    found = attempt(fork_server, tmp_path, "fake", "meeting")
    assert found["cause"] == 1
    assert [o["error_type"] for o in found["outcomes"]] == [
        "RankFailed",
        "ValueError",
        "RankFailed",
    ]
    assert {o["last_call"] for o in found["outcomes"]} == {"meet"}


def test_a_rank_on_a_full_disk_says_why(fork_server: ForkServer, tmp_path: Path) -> None:
    found = attempt(fork_server, tmp_path, "gloo", "full_disk", world=2)
    outcome = found["outcomes"][found["cause"]]
    assert (outcome["status"], outcome["exit_code"]) == ("exited", 1)
    assert "OSError: [Errno 28] No space left on device" in outcome["message"]


@pytest.mark.parametrize(("world", "budget"), [(0, 1.0), (2, 0.0)])
def test_impossible_runs_are_refused(tmp_path: Path, world: int, budget: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        RankLaunch("in_memory", world, lambda rank, world: {}, tmp_path, budget)


# ------------------------------------------------------------------------------ cause and effect


def raised(rank: int, error: BaseException, ended: float = 1.0, **more: Any) -> RankOutcome:
    return dataclasses.replace(of_exception(rank, error, ended), **more)


def blamed(*outcomes: RankOutcome) -> tuple[int, str] | None:
    cause = root_cause(mark_consequences(outcomes))
    return None if cause is None else (cause.rank, cause.status)


CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]")
LATE = RuntimeError("[gloo/transport] Timed out waiting 2400ms for recv operation to complete")


def test_all_well() -> None:
    assert blamed(RankOutcome(0, "ok"), RankOutcome(1, "ok")) is None


def test_own_errors_come_before_communication_errors_whatever_their_time() -> None:
    assert blamed(raised(0, CLOSED, 0.5), raised(1, ValueError("x"), 1.0)) == (
        1,
        "raised",
    )
    assert blamed(raised(0, RankFailed("x", 1), 0.5), RankOutcome(1, "killed", ended=2)) == (
        1,
        "killed",
    )


def test_the_earliest_own_error_is_the_cause_and_of_equal_ones_the_lowest_rank() -> None:
    assert blamed(raised(0, KeyError("k"), 2.0), raised(1, ValueError("x"), 1.0))[0] == 1  # type: ignore[index]
    assert blamed(raised(0, ValueError("x"), 2.0), raised(1, ValueError("x"), 1.0))[0] == 0  # type: ignore[index]


def test_an_error_raised_from_a_communication_error_is_a_consequence() -> None:
    try:
        try:
            raise CLOSED
        except RuntimeError as error:
            raise AssertionError("the trainer gives up") from error
    except AssertionError as error:
        wrapped = raised(0, error, 0.5)
    assert wrapped.consequence and wrapped.is_comm_error
    assert blamed(wrapped, raised(1, ValueError("x"))) == (1, "raised")


def test_mismatches_are_causes() -> None:
    outcomes = [raised(0, RankFailed("x", 1)), raised(1, CollectiveMismatch("four and five"))]
    assert blamed(*outcomes) == (1, "raised")


def test_the_hung_rank_is_the_cause_of_timeouts() -> None:
    hung = RankOutcome(2, "hung", calls=3, ended=9)
    assert blamed(raised(0, LATE), raised(1, PeerTimeout("x")), hung) == (2, "hung")


def test_of_hung_ranks_those_that_wait_are_consequences() -> None:
    waiting = RankOutcome(0, "hung", is_comm_error=True, calls=5)
    assert blamed(waiting, RankOutcome(1, "hung", calls=9)) == (1, "hung")
    assert blamed(waiting, RankOutcome(1, "hung", is_comm_error=True, calls=4)) == (
        1,
        "hung",
    )


def test_early_ranks() -> None:
    assert blamed(RankOutcome(0, "ok", ended=0.1), raised(1, CLOSED)) == (0, "early")
    gone = raised(1, RankEnded("x", 2))
    assert blamed(RankOutcome(0, "ok", ended=0.1), gone, RankOutcome(2, "ok")) == (
        2,
        "early",
    )
    # Two ranks that wait for each other: the one that ended well has nothing to do with it.
    well = RankOutcome(0, "ok", ended=0.1)
    assert blamed(well, raised(1, LATE), raised(2, LATE, 2.0)) == (1, "raised")


def test_differing_last_calls_are_named_where_gloo_only_sees_a_closed_connection() -> None:
    four = RankOutcome(0, "ok", ended=0.1, calls=3, last_call="all_reduce([4]) on ranks 0-1")
    five = raised(1, CLOSED, calls=3, last_call="all_reduce([5]) on ranks 0-1")
    cause = root_cause(mark_consequences([four, five]))
    assert cause is not None and cause.rank == 1
    assert "rank 0 calls all_reduce([4]); rank 1 calls all_reduce([5])" in cause.message


def test_where_gloo_aborts_on_differing_calls_they_come_first_and_its_own_line_last() -> None:
    four = RankOutcome(0, "hung", is_comm_error=True, calls=3, last_call="f([4]) on ranks 0-1")
    line = "SIGABRT in g (m.py:3): [enforce fail at gloo/pair.cc] Received data size doesn't match"
    five = RankOutcome(
        1, "killed", "SIGABRT", line, signal=6, calls=3, last_call="f([5]) on ranks 0-1"
    )
    cause = root_cause(mark_consequences([four, five]))
    assert cause is not None and (cause.rank, cause.error_type) == (1, "CollectiveMismatch")
    assert cause.message.startswith(
        "the calls on ranks 0-1 do not match: rank 0 calls f([4]); rank 1 calls f([5]); "
    )
    assert cause.message.endswith(line)


def test_an_error_names_the_contract_s_method_and_the_implementation_s_innermost_frame() -> None:
    class System:
        def step(self) -> None:
            self.helper()

        def helper(self) -> None:
            torch.cat([torch.zeros(2), torch.zeros(2, 2)])

    with pytest.raises(RuntimeError) as caught:
        System().step()
    outcome = of_exception(0, caught.value, 0.0)
    assert outcome.method == "step()"
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+ in helper", outcome.place)
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(2, 2)(torch.zeros(3))  # inside of torch: the line here is the one to see
    outcome = of_exception(0, caught.value, 0.0)
    assert outcome.method == "" and outcome.place.startswith(f"{__file__}:")


def test_long_tracebacks_are_cut() -> None:
    def deep(n: int) -> None:
        if n:
            (deep if n % 2 else lambda k: deep(k))(n - 1)
        else:
            raise ValueError("deep")

    try:
        deep(100)
    except ValueError as error:
        trace = of_exception(0, error, 0.0).traceback
    assert len(trace.splitlines()) < 60 and "more frames" in trace


def test_a_rank_that_never_comes_to_a_group_is_named(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    found = attempt(fork_server, tmp_path, "gloo", "absent", budget=3.0)
    (told,) = [outcome for outcome in found["outcomes"] if outcome["autopsy"]]
    assert (told["cause"], told["culprit"]) == ("rendezvous", 1)
    text = told["autopsy"]
    assert text.startswith("rendezvous: ranks 0,2 wait for a group to be made in absent (")
    assert "rank 1 never came: it stands in absent (" in text and "launch_programs.py:" in text


# ------------------------------------------------------------------------------------ heartbeat


def test_heartbeat(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    heartbeat.create(path, 3)
    writer = heartbeat.attach(path, 1, thread=True)
    for i in range(60):
        heartbeat.note(f"call {i}")
    writer.announce_exit("first")
    writer.announce_exit("second")
    zero, one, two = heartbeat.read(path)
    assert zero.state == heartbeat.NEW and not zero.noted and two.sequence == 0
    assert one.sequence == 60
    assert [call.text for call in one.noted] == [f"call {i}" for i in range(12, 60)]
    assert one.last_call == "call 59" and one.exit_notice == "first"
    assert one.thread == threading.get_ident() and one.state == heartbeat.RUNNING
    heartbeat.note("ä" * 500)
    assert heartbeat.read(path)[1].last_call == "ä" * 111
    seen: list[Any] = []
    other = threading.Thread(target=lambda: seen.append(heartbeat.current()))
    other.start()
    other.join()
    assert seen == [None]
    heartbeat._thread.writer = None


# ------------------------------------------------------------------------- fork server, pool


def test_leaders_are_single_threaded_and_have_the_lazy_modules(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    ticket = fork_server.submit(launch_programs.threads, {"file": str(tmp_path / "x")})
    assert await_end(fork_server, ticket).exit_code == 0
    found = json.loads((tmp_path / "x").read_text())
    assert found["threads"] == 1
    assert set(LAZY_MODULES) <= set(found["modules"])


def test_a_task_that_raises_or_crashes(fork_server: ForkServer) -> None:
    ended = await_end(fork_server, fork_server.submit(launch_programs.fail, {}))
    assert ended.exit_code == TASK_RAISED and "ValueError: the task's own error" in ended.output
    ended = await_end(fork_server, fork_server.submit(launch_programs.crash, {}))
    assert ended.signal == signal.SIGSEGV and "Segmentation fault" in ended.output
    assert not psutil.Process(fork_server.pid).children(recursive=True)


def test_a_task_whose_module_a_leader_cannot_import(
    fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("only_here")
    exec("def task(payload): ...", vars(module))
    monkeypatch.setitem(sys.modules, "only_here", module)
    ended = await_end(fork_server, fork_server.submit(module.task, {}))
    assert ended.exit_code == TASK_RAISED and "No module named 'only_here'" in ended.output


def test_a_task_is_a_function_of_a_module(fork_server: ForkServer) -> None:
    def local(payload: dict[str, Any]) -> None: ...

    for task in (local, lambda payload: None, Pool.run):
        with pytest.raises(ValueError, match="a task must be a function at the top level"):
            fork_server.submit(task, {})


def test_what_a_task_returns_comes_back(importable: None) -> None:
    with Pool(2, [launch_programs.double]) as pool:
        items = [(str(n), {"number": n}, 30.0) for n in range(3)]
        values = {end.key: end.value for end in pool.run(launch_programs.double, items)}
        assert values == {"0": [0], "1": [2], "2": [4]}
        assert list(pool.folder.glob("value*")) == []
        server = pool.fork_server.pid
    assert not pool.folder.exists() and not psutil.pid_exists(server)


@pytest.fixture(scope="module")
def leaders_of(importable: None) -> Iterator[Any]:
    """The ends of tasks, done one after the other by leaders that may be kept."""
    with Pool(1, [launch_programs.who]) as pool:

        def ends(payloads: list[dict[str, Any]], group: Any = lambda payload: "") -> list[Any]:
            list(pool.run(launch_programs.who, [("last", {"leave": "child"}, 60.0)], lambda p: ""))
            items = [(str(n), payload, 60.0) for n, payload in enumerate(payloads)]
            return list(pool.run(launch_programs.who, items, group))

        yield ends


def test_a_leader_does_several_tasks_but_not_without_end(leaders_of: Any) -> None:
    count = MOST_TASKS + 1
    ends = leaders_of([{"print": f"task {n}"} for n in range(count)])
    assert [end.exit_code for end in ends] == [0] * count
    assert [end.output for end in ends] == [f"task {n}" for n in range(count)], "each its own"
    assert len({end.value for end in ends[:-1]}) == 1 and ends[-1].value != ends[0].value


def test_a_task_that_asks_for_it_has_a_fresh_leader_to_itself(leaders_of: Any) -> None:
    groups = ["", None, None, ""]
    ends = leaders_of([{"group": group} for group in groups], lambda payload: payload["group"])
    first, *fresh, last = (end.value for end in ends)
    assert first == last and len({first, *fresh}) == 3


def test_each_group_of_tasks_has_leaders_of_its_own(leaders_of: Any) -> None:
    groups = ["", "four ranks", "", "four ranks", "two ranks"]
    ends = leaders_of([{"group": group} for group in groups], lambda payload: payload["group"])
    one, four, one_again, four_again, two = (end.value for end in ends)
    assert one == one_again and four == four_again and len({one, four, two}) == 3


@pytest.mark.parametrize("leave", ["thread", "child", "memory"])
def test_a_leader_that_is_not_as_it_was_does_no_more(leave: str, leaders_of: Any) -> None:
    one, two, three = leaders_of([{}, {"leave": leave}, {}])
    assert one.value == two.value != three.value, leave
    assert not psutil.pid_exists(two.value)


@pytest.mark.parametrize(("leave", "code"), [("error", TASK_RAISED), ("death", None)])
def test_a_kept_leader_that_fails_fails_one_task(
    leave: str, code: int | None, leaders_of: Any
) -> None:
    one, two, three = leaders_of([{}, {"leave": leave, "print": "its last words"}, {}])
    assert (two.exit_code, two.value) == (code, None)
    assert (two.signal == signal.SIGKILL) == (leave == "death")
    assert three.exit_code == 0 and three.value != one.value
    assert leave == "death" or "its last words" in two.output


def test_a_payload_may_be_larger_than_what_a_socket_takes_at_once(
    importable: None, kept: None
) -> None:
    payload = {"number": 21, "more": "x" * 1_000_000}
    with Pool(1) as pool:
        (end,) = pool.run(launch_programs.double, [("large", payload, 60.0)])
    assert end.value == [42], end.output


def test_kill_ends_a_leader_and_what_left_its_group(fork_server: ForkServer) -> None:
    ticket = fork_server.submit(launch_programs.endless, {})
    deadline = time.monotonic() + 20
    while len(psutil.Process(fork_server.pid).children(recursive=True)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    fork_server.kill(ticket)
    assert await_end(fork_server, ticket).signal == signal.SIGKILL
    deadline = time.monotonic() + 60
    while psutil.Process(fork_server.pid).children(recursive=True):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_pool_keeps_its_jobs_busy_and_ends_what_is_late(importable: None, kept: None) -> None:
    ends, running = [], []

    def items() -> Iterator[tuple[str, dict[str, Any], float]]:
        for i in range(6):
            running.append(i + 1 - len(ends))
            yield f"short{i}", {"seconds": 0.3}, 60.0
        yield "late", {"seconds": 1000}, 0.5

    with Pool(2, [launch_programs.sleep]) as pool:
        for end in pool.run(launch_programs.sleep, items()):
            ends.append(end)
        assert not psutil.Process(pool.fork_server.pid).children(recursive=True)
    assert {e.key for e in ends} == {"late", *(f"short{i}" for i in range(6))}
    for ended in ends:
        late = ended.key == "late"
        assert ended.timed_out == late and (ended.signal == signal.SIGKILL) == late
        assert ended.seconds > 0.29
    assert running[:2] == [1, 2] and max(running) == 2, "drawn only when a leader can start"


def test_a_caller_that_stops_early_leaves_nothing(importable: None, kept: None) -> None:
    def items() -> Iterator[tuple[str, dict[str, Any], float]]:
        yield "short", {"seconds": 0.0}, 30.0
        while True:
            yield "long", {"seconds": 1000}, 2000.0

    with Pool(3, [launch_programs.sleep]) as pool:
        ends = pool.run(launch_programs.sleep, items())
        assert next(ends).key == "short"
        ends.close()  # type: ignore[attr-defined]
        assert not psutil.Process(pool.fork_server.pid).children(recursive=True)


def test_a_killed_fork_server_is_replaced_and_its_cases_are_reported(importable: None) -> None:
    with Pool(1, [launch_programs.sleep]) as pool:
        lost = list(pool.run(launch_programs.kill_fork_server, [("a", {}, 30.0)]))
        assert [(e.key, e.exit_code, e.signal) for e in lost] == [("a", None, None)]
        assert "the fork server has ended" in lost[0].output
        well = list(pool.run(launch_programs.sleep, [("b", {"seconds": 0.0}, 30.0)]))
        assert [(e.key, e.exit_code) for e in well] == [("b", 0)]


def test_a_fork_server_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with ForkServer() as fork_server, pytest.raises(ForkServerError, match="exit code 1"):
        fork_server.wait_ready()


def test_a_fork_server_that_does_nothing_at_its_start_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps = tmp_path / "python"
    sleeps.write_text("#!/bin/sh\necho begun\nexec sleep 100\n")
    sleeps.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeps))
    monkeypatch.setattr(fork_server_module, "IDLE_LOOKS", 2)
    said = r"was idle for 2 s before it was ready: begun"
    with ForkServer() as server, pytest.raises(ForkServerError, match=said):
        server.wait_ready()


def test_a_stopped_fork_server_is_replaced(
    importable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_control, "STOPPED_LOOKS", 2)
    with Pool(1, [launch_programs.sleep]) as pool:
        list(pool.run(launch_programs.sleep, [("a", {"seconds": 0.0}, 30.0)]))
        os.kill(pool.fork_server.pid, signal.SIGSTOP)
        (lost,) = pool.run(launch_programs.sleep, [("b", {"seconds": 0.0}, 100.0)])
        assert lost.exit_code is None and "was stopped by a signal" in lost.output
        (well,) = pool.run(launch_programs.sleep, [("c", {"seconds": 0.0}, 30.0)])
        assert well.exit_code == 0


@pytest.mark.slow
def test_a_stopped_leader_is_ended_and_told(importable: None) -> None:
    with ForkServer() as server:
        server.wait_ready()
        ticket = server.submit(launch_programs.sleep, {"seconds": 1000.0})
        (leader,) = _leaders(server)
        leader.suspend()
        ended = await_end(server, ticket)
        assert ended.signal == signal.SIGKILL and "was stopped by a signal" in ended.output


def _leaders(server: ForkServer) -> list[psutil.Process]:
    deadline = time.monotonic() + 60
    while not (found := psutil.Process(server.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_looks_that_see_no_progress_are_counted_not_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, seen = [0.0], {"is": ("S", 0.0)}
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(process_control, "activity_of", lambda pid, thread=0: seen["is"])
    watched = process_control.Watched(1)
    for later, state, counts in [
        (100.0, ("S", 0.0), (0, 1)),  # one look, however late
        (100.5, ("S", 0.0), (0, 1)),  # too soon
        (101.5, ("T", 0.0), (1, 2)),
        (102.5, ("R", 0.0), (0, 0)),
        (103.5, ("S", 1.0), (0, 0)),  # it has computed since
        (104.5, ("T", 1.0), (1, 1)),
    ]:
        now[0], seen["is"] = later, state
        watched.look()
        assert (watched.stopped, watched.idle) == counts, later


def test_warnings_stay_warnings_where_torch_is_imported() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fork_server_main.import_lazy_modules()
        assert not [one for one in warnings.filters if one[0] == "error"]


def test_a_preloaded_module_must_not_start_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = "threading.Thread(target=time.sleep, args=[99], daemon=True)"
    code = f"import threading, time\n{thread}.start()"
    (tmp_path / "starts_a_thread.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    said = "2 threads run after importing starts_a_thread"
    with ForkServer(["starts_a_thread"]) as fork_server, pytest.raises(ForkServerError, match=said):
        await_end(fork_server, fork_server.submit(launch_programs.fail, {}))


def test_no_jobs() -> None:
    with pytest.raises(ValueError, match="at least 1 job"):
        Pool(0)


PARENT = """
    import signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    sys.path.insert(0, {here!r})
    import launch_programs
    from shardproof.launch.pool import Pool
    with Pool(2, [launch_programs.sleep]) as pool:
        print(pool.fork_server.pid, flush=True)
        items = [(str(i), {{}}, 1000.0) for i in range(2)]
        for ended in pool.run(launch_programs.endless, items):
            raise SystemExit("ended")
"""


@pytest.mark.parametrize(
    "signum", [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_nothing_outlives_the_parent(signum: int) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT.format(here=HERE))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert parent.stdout is not None
        fork_server = psutil.Process(int(parent.stdout.readline()))
        deadline = time.monotonic() + 60
        while len(fork_server.children(recursive=True)) < 4:  # two leaders, each with a child
            assert time.monotonic() < deadline
            time.sleep(0.02)
        everyone = [fork_server, *fork_server.children(recursive=True)]
        os.kill(parent.pid, signum)
        parent.wait(60)
        _, alive = psutil.wait_procs(everyone, timeout=10)
        assert not alive
        if signum == signal.SIGINT:
            assert "KeyboardInterrupt" in parent.communicate()[1]
    finally:
        if parent.poll() is None:
            parent.kill()
        parent.communicate()


def test_a_fork_server_survives_the_thread_that_started_it(importable: None) -> None:
    fork_server = ForkServer(["launch_programs"])
    starter = threading.Thread(target=fork_server.__enter__)
    starter.start()
    starter.join()
    try:
        fork_server.wait_ready()
        time.sleep(0.2)
        ticket = fork_server.submit(launch_programs.sleep, {"seconds": 0.0})
        assert await_end(fork_server, ticket).exit_code == 0
        pid = fork_server.pid
    finally:
        fork_server.close()
    assert not psutil.pid_exists(pid)

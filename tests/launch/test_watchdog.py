"""What ends ranks that do not end: a standstill or a spent budget, never the time that passes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shardproof.backends import BACKENDS, heartbeat
from shardproof.launch import process_control, watchdog
from shardproof.launch.diagnosis import RankProcess, diagnose
from shardproof.launch.outcome import mark_consequences, root_cause
from shardproof.launch.rank_process import PARTING_SECONDS, RankLaunch
from shardproof.launch.watchdog import TICK_SECONDS, WAITING_LOOKS, Watchdog

#: Looks after which ranks that sleep outside of calls stand still (a budget of 60 s).
ASLEEP = 1200


class World:
    """Ranks whose state and CPU are made up; ``shares`` is the share of a core that each gets."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, world: int, polls: bool) -> None:
        self.beats = folder / "heartbeat"
        heartbeat.create(self.beats, world)
        self.writers = [heartbeat.Writer(self.beats, rank) for rank in range(world)]
        backend = BACKENDS["mpi" if polls else "gloo"]
        self.watchdog = Watchdog(self.beats, world, backend)
        self.letters, self.shares = ["S"] * world, [0.0] * world
        self._cpu = [0.0] * world
        self._processes = [RankProcess(rank, (rank,)) for rank in range(world)]
        activity = lambda pid, _: (self.letters[pid], self._cpu[pid])  # noqa: E731
        patch.setattr(process_control, "activity_of", activity)
        self.below = 0.0  # CPU seconds of what rank 1 has started
        patch.setattr(process_control, "spent_below", lambda pid: self.below * pid)

    def look(self, times: int = 1, on_each: Callable[[int], None] = lambda _: None) -> int | None:
        """Look so often; at which look the ranks stand still, if they do."""
        for number in range(1, times + 1):
            on_each(number)
            for rank, share in enumerate(self.shares):
                self._cpu[rank] += share * TICK_SECONDS
            self.watchdog.look(self._processes)
            if self.watchdog.stand_still(ASLEEP):
                return number
        return None


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    return lambda size=2, polls=False: World(tmp_path, monkeypatch, size, polls)


def all_wait(made: World) -> None:
    for writer in made.writers:
        writer.note("all_reduce")
        writer.wait(True)


def test_looks_after_a_fault_count_where_no_rank_could_go_on(world: Callable[..., World]) -> None:
    made = world()
    all_wait(made)
    made.look(7)
    assert made.watchdog.idle_looks == 0  # no fault yet
    made.writers[1].inject()
    made.look(5)
    made.letters[0] = "R"  # it runs, or would if it were let
    made.look(50)
    made.letters = ["T", "S"]
    made.look(3)
    assert made.watchdog.idle_looks == 8
    assert watchdog.most_idle_looks(1.0) == WAITING_LOOKS + 40
    assert watchdog.most_idle_looks(60.0) == ASLEEP + 40


def test_ranks_that_poll_in_a_call_cannot_go_on(world: Callable[..., World]) -> None:
    made = world(polls=True)
    all_wait(made)
    made.writers[1].inject()
    made.letters = ["R", "R"]
    made.look(4)
    assert made.watchdog.idle_looks == 4


def test_ranks_that_all_wait_stand_still(world: Callable[..., World]) -> None:
    made = world()
    all_wait(made)
    assert made.look(WAITING_LOOKS - 1) is None
    assert made.look(1) == 1


@pytest.mark.parametrize(
    ("letter", "share"),
    [("R", 1.0), ("R", 0.03), ("R", 0.0), ("D", 0.0), ("S", 0.03)],
    ids=["computes", "starved", "never let run", "reads", "threads of its own compute"],
)
def test_a_rank_that_computes_is_not_hung(
    world: Callable[..., World], letter: str, share: float
) -> None:
    """Whatever the machine's load leaves it; the other rank waits for it all the time."""
    made = world()
    made.writers[0].wait(True)
    made.letters[1], made.shares[1] = letter, share
    assert made.look(10 * ASLEEP) is None


def test_a_wait_whose_transport_is_not_let_run_is_no_standstill(
    world: Callable[..., World],
) -> None:
    made = world()
    all_wait(made)
    made.shares = [0.05, 0.0]
    assert made.look(10 * ASLEEP) is None


def test_what_a_backend_burns_in_a_wait_is_no_progress(world: Callable[..., World]) -> None:
    made = world(polls=True)
    all_wait(made)
    made.letters, made.shares = ["R", "R"], [1.0, 1.0]
    made.look(1)
    spent = made.watchdog.spent
    assert made.look(WAITING_LOOKS) == WAITING_LOOKS - 1
    assert made.watchdog.spent == spent


@pytest.mark.parametrize("event", ["call", "leaves", "ends"])
def test_an_event_begins_a_new_window(world: Callable[..., World], event: str) -> None:
    made = world()
    all_wait(made)
    happen = {
        "call": lambda: made.writers[1].note("barrier"),
        "leaves": lambda: (made.writers[1].wait(False), made.writers[1].wait(True)),
        "ends": lambda: made.writers[1].state(heartbeat.RETURNED),
    }[event]
    middle = WAITING_LOOKS // 2
    at = made.look(ASLEEP, lambda number: happen() if number == middle else None)
    assert at == middle + WAITING_LOOKS - 1


def test_a_stopped_rank_stands_still(world: Callable[..., World]) -> None:
    made = world()
    made.writers[0].wait(True)
    made.letters[1] = "T"
    assert made.look(ASLEEP) == WAITING_LOOKS


def test_a_rank_that_sleeps_outside_of_calls_has_longer(world: Callable[..., World]) -> None:
    made = world()
    made.writers[0].wait(True)
    assert made.look(2 * ASLEEP) == ASLEEP


def test_a_rank_that_polls_outside_of_calls_sleeps(world: Callable[..., World]) -> None:
    made = world()
    made.shares = [0.01, 0.01]

    def sometimes(number: int) -> None:
        made.letters = ["R", "R"] if number % 10 == 0 else ["S", "S"]

    assert made.look(2 * ASLEEP, sometimes) == ASLEEP


def test_a_rank_that_waits_for_a_compiler_is_not_hung(world: Callable[..., World]) -> None:
    made = world()
    made.writers[0].wait(True)

    def compiles(number: int) -> None:
        made.below += 0.001 * (number < 3 * ASLEEP)

    assert made.look(6 * ASLEEP, compiles) == 4 * ASLEEP  # once more, from what it had spent


def test_what_was_computed_outside_of_calls_is_counted(world: Callable[..., World]) -> None:
    made = world()
    made.shares = [0.5, 1.0]
    made.look(20)
    assert made.watchdog.spent == pytest.approx([10 * TICK_SECONDS, 20 * TICK_SECONDS])


def test_a_rank_that_has_returned_has_time_to_wake_its_peers(world: Callable[..., World]) -> None:
    """It waits for them a second, as long as ranks in calls that differ are let wait."""
    made = world()
    made.look()
    assert not made.watchdog.parting
    made.writers[0].state(heartbeat.RETURNED)
    made.look()
    assert made.watchdog.parting
    made.writers[0].state(heartbeat.DONE)
    made.look()
    assert not made.watchdog.parting
    assert WAITING_LOOKS * TICK_SECONDS > 5 * PARTING_SECONDS


def test_what_a_kept_process_computed_before_is_not_a_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that are threads: until they have begun only their process can be looked at."""
    beats = tmp_path / "heartbeat"
    heartbeat.create(beats, 2)
    computed = {0: 500.0}  # of the process, and of its threads once they run
    activity = lambda _, thread=0: ("R", computed.get(thread, 0.0))  # noqa: E731
    monkeypatch.setattr(process_control, "activity_of", activity)
    watchdog = Watchdog(beats, 2, BACKENDS["in_memory"])
    process = [RankProcess(7, (0, 1))]
    watchdog.begin(process)
    watchdog.look(process)
    computed[0] += 0.25
    watchdog.look(process)
    assert watchdog.spent == pytest.approx([0.25, 0.25])
    for rank in range(2):
        heartbeat.Writer(beats, rank)
    computed[heartbeat.read(beats)[0].native] = 2.0
    watchdog.look(process)
    assert watchdog.spent == pytest.approx([2.25, 2.25])


def test_a_wait_of_a_helper_thread_is_not_the_ranks(world: Callable[..., World]) -> None:
    made = world()
    thread = threading.Thread(target=made.writers[0].wait, args=(True,))
    thread.start()
    thread.join()
    beat = heartbeat.read(made.beats)[0]
    assert beat.waits == 0


def test_the_thresholds_leave_room_for_a_busy_machine() -> None:
    """30 busy processes on 2 cores leave a rank a sixteenth of a core: three times the least."""
    assert 3 * watchdog._IDLE_SHARE < 1 / 16


@pytest.mark.parametrize("told", ["", "thread", "thread and threading.py"])
def test_a_rank_that_is_killed_before_it_tells_its_stack_waited_as_it_noted(
    world: Callable[..., World], tmp_path: Path, told: str
) -> None:
    made = world()
    all_wait(made)
    made.writers[1].wait(False)
    link = BACKENDS["gloo"]
    launch = RankLaunch(link, 2, lambda rank, size: {}, tmp_path, 1.0, began=0.0)
    for beat in heartbeat.read(made.beats):
        thread = f"Thread 0x{beat.thread:x} (most recent call first):\n"
        frame = f'  File "{threading.__file__}", line 1 in wait\n'
        text = thread * ("thread" in told) + frame * ("threading.py" in told)
        launch.stacks(beat.rank).write_text(text + '  File "')
    processes = [
        RankProcess(rank, (rank,), 3.0, reason="standstill", hung={rank: beat}, spent=(0.0, 0.0))
        for rank, beat in enumerate(heartbeat.read(made.beats))
    ]
    outcomes = mark_consequences(diagnose(launch, processes))
    assert [(o.status, o.consequence) for o in outcomes] == [("hung", True), ("hung", False)]


@pytest.mark.parametrize("mpirun", [True, False])
def test_an_exit_by_mpi_is_a_consequence_where_another_rank_was_killed(
    mpirun: bool, tmp_path: Path
) -> None:
    """MPI ends a rank that lost its peer, which may be seen before the peer's own end."""
    link = BACKENDS["mpi" if mpirun else "gloo"]
    launch = RankLaunch(link, 2, lambda rank, size: {}, tmp_path, 1.0, began=0.0)
    heartbeat.create(launch.heartbeat, 2)
    processes = [
        RankProcess(0, (0,), ended=3.0, exit_code=14),
        RankProcess(1, (1,), ended=3.1, signal=9),
    ]
    cause = root_cause(diagnose(launch, processes))
    assert cause is not None and cause.rank == (1 if mpirun else 0)
    alone = root_cause(diagnose(launch, [processes[0], RankProcess(1, (1,), 3.1, exit_code=14)]))
    assert alone is not None and alone.status == "exited"

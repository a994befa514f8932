"""The roll call: what is wrong with a job, from what its ranks say of themselves."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch.distributed as dist

from shardproof.cluster.launchers import meeting, place
from shardproof.cluster.launchers.meeting import Entry, mistake, spans
from shardproof.cluster.launchers.place import Place
from shardproof.errors import LaunchError


def entry(rank: int, host: str = "a", world: int = 8, **more: object) -> Entry:
    return Entry(rank, world, host, "head", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        (
            [entry(0), entry(1, "b", 4)],
            r"rank 0 \(a\) was started with 8 ranks, rank 1 \(b\) with 4 - ",
        ),
        ([entry(0), entry(4), entry(4, "b")], "rank 4, on a and on b - .*--node-rank"),
        ([entry(1), entry(1)], "rank 1, both on a - set RANK to node"),
    ],
)
def test_ranks_that_cannot_be_together(entries: list[Entry], says: str) -> None:
    assert mistake(entries[:1]) is None
    problem = mistake(entries)
    assert problem is not None
    with pytest.raises(LaunchError, match=says):
        raise LaunchError(problem)


def test_one_process_a_node_is_seen_once_nobody_comes_any_more() -> None:
    alone = [entry(4, "b"), entry(0, "a")]
    assert mistake(alone) is None
    found = mistake(alone, settled=True)
    assert found is not None
    assert found.what == "one process was started per node, as ranks 0, 4 of 8"
    assert "start 4 processes per node" in found.remedy


@pytest.mark.parametrize(
    "slow",
    [
        [entry(0)],
        [entry(0, "a"), entry(4, "a")],
        [entry(0, "a"), entry(3, "b")],
        [entry(0, "a"), entry(1, "b")],
        [entry(0, "a", local_world=4), entry(4, "b", local_world=4)],
        [entry(0, "a"), entry(4, "b"), entry(5, "b")],
    ],
    ids=["one", "one host", "no step", "neighbours", "launcher tells four", "more on one"],
)
def test_a_slow_start_is_waited_for(slow: list[Entry]) -> None:
    assert mistake(slow, settled=True) is None


def test_spans() -> None:
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert spans(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10, 12, 14, ..."


def call(places: Sequence[Place], seconds: float = 20.0) -> list[str]:
    """The roll call of ``places``, each in a thread, on one store; how it ended for each."""
    store, ends = dist.HashStore(), [""] * len(places)

    def one(number: int) -> None:
        try:
            meeting.answer(store, places[number], seconds)
            ends[number] = "complete"
        except LaunchError as error:
            ends[number] = str(error)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ends


def test_a_whole_job_goes_on() -> None:
    assert call([Place(rank, 3, "head", 1) for rank in (2, 0, 1)]) == ["complete"] * 3


@pytest.mark.parametrize("ranks", [(0, 1, 1), (0, 0, 2), (2, 2, 1)])
def test_all_ranks_say_that_two_have_one_number(ranks: tuple[int, ...]) -> None:
    (said,) = {*call([Place(rank, 3, "head", 1) for rank in ranks])}
    assert said.startswith("two processes have rank ")


def test_a_rank_too_many_says_so_though_the_others_run() -> None:
    store = dist.HashStore()
    threads = [
        threading.Thread(target=meeting.answer, args=(store, Place(n, 2, "head", 1), 20.0))
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with pytest.raises(LaunchError, match="two processes have rank 1"):
        meeting.answer(store, Place(1, 2, "head", 1), 20.0)


def test_who_is_missing_is_told_and_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(place, "FIRST_WORD_SECONDS", 0.0)
    (said,) = {*call([Place(rank, 6, "head", 1) for rank in (1, 5)], seconds=1.0)}
    assert said.startswith("ranks 0, 2-4 of 6 have not arrived (head:1) - ")
    assert "waits for 0, 2-4 of 6 ranks" in capsys.readouterr().err


def test_machines_that_met_over_a_loopback_name_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = threading.local()
    monkeypatch.setattr(meeting.socket, "gethostname", lambda: here.name)
    monkeypatch.setattr(meeting, "is_loopback", lambda address: here.name == "a")
    store, ends = dist.HashStore(), []

    def one(rank: int, given: str | None) -> None:
        here.name = "ab"[rank]
        try:
            meeting.answer(store, Place(rank, 2, "head", 1), 20.0, given)
            ends.append("complete")
        except LaunchError as error:
            ends.append(str(error))

    def both(given: str | None) -> list[str]:
        nonlocal store
        store = dist.HashStore()
        ends.clear()
        threads = [threading.Thread(target=one, args=(rank, given)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return ends

    assert both("eth0") == ["complete"] * 2
    (said,) = {*both(None)}
    assert said.startswith(
        "MASTER_ADDR is the loopback on a, but the job has several machines (head)"
    )


def test_which_rank_is_where() -> None:
    store = dist.HashStore()
    for number, (rank, host) in enumerate([(3, "b"), (0, "a"), (2, "b"), (1, "a")], 1):
        store.set(f"entry{number}", json.dumps(asdict(entry(rank, host, world=4))))
    found = [(host.name, host.ranks) for host in meeting.hosts(store, 4)]
    assert found == [("a", [0, 1]), ("b", [2, 3])]


def test_ranks_that_see_other_folders_all_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "SHARED_SECONDS", 1.0)
    store, ends = dist.HashStore(), []
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "plan.json").write_text("{}")
    store.set("plan", meeting.foreign_records.plan_digest(tmp_path / "a"))

    def one(rank: int) -> None:
        try:
            meeting.see_plan(store, Place(rank, 2, "head", 1), tmp_path / "ab"[rank])
        except LaunchError as error:
            ends.append(str(error))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (said,) = {*ends}
    assert len(ends) == 2
    assert said.startswith("rank 1 does not see in --records what rank 0 wrote there")


def test_rank_0_with_whom_the_store_ends_parts_last() -> None:
    store, gone = dist.HashStore(), threading.Event()

    def first() -> None:
        meeting.part(store, Place(0, 3, "head", 1), 20.0)
        gone.set()

    thread = threading.Thread(target=first)
    thread.start()
    meeting.part(store, Place(1, 3, "head", 1), 20.0)
    assert not gone.wait(0.3)
    meeting.part(store, Place(2, 3, "head", 1), 20.0)
    thread.join(20)
    assert gone.is_set()

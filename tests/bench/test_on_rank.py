"""A timed rank: its clock, its cores and the GPUs that its leader hides."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardproof import contract
from shardproof.backends import cuda
from shardproof.bench import collectives, leader_tasks, on_rank
from shardproof.bench.arm import Arm
from shardproof.bench.on_rank import Clock


class Gpu:
    """A GPU whose clock runs apart from the host's: it passes an event when it is told to work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms, self.queued, self.waits = 1000.0, list[Any](), 0
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.work)

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at=None)
        event.record = lambda: self.queued.append(event)
        event.synchronize = self.work
        event.elapsed_time = lambda later: later.at - event.at
        return event

    def kernel(self, ms: float) -> None:
        """Queue work, and return at once."""
        self.queued.append(ms)

    def work(self) -> None:
        """Do all that is queued."""
        self.waits += 1
        for item in self.queued:
            if isinstance(item, float):
                self.now_ms += item
            else:
                item.at = self.now_ms
        self.queued.clear()


def test_a_gpu_is_timed_by_its_own_clock_without_a_wait_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, now = Gpu(monkeypatch), Clock("cuda")
    for ms in (0.0, 3.0, 250.0):
        gpu.kernel(ms)
        now.mark()
    assert gpu.waits == 0
    assert now.seconds() == [0.003, 0.25]
    assert gpu.waits == 1 and Clock("cuda").seconds() == []


def test_a_collective_is_timed_from_a_common_start(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    comm: Any = SimpleNamespace(device="cuda", barrier=lambda: gpu.kernel(500.0))
    gpu.kernel(9000.0)  # what came before is over when the clock starts
    assert collectives._seconds(lambda: gpu.kernel(8.0), comm, 4) == pytest.approx(0.008)


def test_steps_are_timed_back_to_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, lengths = Gpu(monkeypatch), iter([2.0, 4.0, 8.0, 16.0])
    arm: Any = object.__new__(Arm)
    arm.device, arm.steps, arm.batches = "cuda", 0, [contract.Batch(0, ())] * 8

    def step(batch: contract.Batch, observe: contract.Observe) -> contract.StepResult:
        assert batch.step == arm.steps - 1
        gpu.kernel(next(lengths))
        return contract.StepResult(loss=torch.zeros(()))

    arm.implementation = SimpleNamespace(step=step)
    assert arm.seconds(3) == [0.002, 0.004, 0.008] and gpu.waits == 1
    arm.step()
    assert gpu.waits == 2 and arm.steps == 4


def test_on_a_cpu_the_host_s_clock_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 1.5, 3.0])
    monkeypatch.setattr(on_rank.time, "perf_counter", lambda: next(times))
    now = Clock("cpu")
    for _ in range(3):
        now.mark()
    assert now.seconds() == [0.5, 1.5]


def test_a_leader_of_a_bench_counts_the_gpus_that_it_hides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "_hidden", (4, None))
    task = leader_tasks.Examination({}, "nccl", "float32", 2)
    assert leader_tasks.examine(task) == {"sides": {}, "gpus": 4}


@pytest.mark.parametrize("world", range(1, 9))
def test_ranks_share_no_core(world: int) -> None:
    cores = [3, 4, 7, 9, 11]
    shares = [on_rank.share(cores, rank, world) for rank in range(world)]
    given = [core for own in shares for core in own]
    assert len(set(given)) == len(given)
    assert {len(own) for own in shares} == {len(cores) // world}


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        (2, [[0, 1], [2, 3]]),
        (3, [[0], [1], [2]]),
        (4, [[0], [1], [2], [3]]),
        (5, [[0], [1], [2], [3], [4]]),  # more ranks than cores: these share some
    ],
)
def test_ranks_share_no_core_whose_threads_are_numbered_apart(
    world: int, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four cores of two threads, as many machines number them: 4 is the second thread of core 0."""
    monkeypatch.setattr(on_rank, "by_core", lambda: [[0, 4], [1, 5], [2, 6], [3, 7]])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    assert [on_rank.pin(rank, world, threads=True) for rank in range(world)] == expected


def test_a_rank_of_threads_pins_itself_alone() -> None:
    before, seen = os.sched_getaffinity(0), []

    def rank() -> None:
        on_rank.pin(0, len(before), threads=True)
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=rank)
    thread.start()
    thread.join()
    assert seen == [{min(before)}]
    assert os.sched_getaffinity(0) == before


def test_a_rank_that_is_a_process_takes_its_threads_along() -> None:
    program = """
import os, threading
from shardproof.bench import on_rank
over = threading.Event()
thread = threading.Thread(target=over.wait)
thread.start()
own = on_rank.pin(0, os.cpu_count(), threads=False)
seen = {tuple(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}
over.set()
assert seen == {tuple(own)}, (seen, own)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr

"""Start torchrun's agents, kill workers by script, and clean up.

One agent a member, each in a process group of its own, as on machines of their own.  The store of
the rendezvous lives here: where an agent serves it, as by default, its death ends all others.  Of
torch's default environment one more thing is changed, without which workers that are started anew
meet by luck only (docs/findings.md, 57).

No event depends on time: a rank halts where an event is to find it, and a generation begins once
the members that the script expects have all met.  A wait ends after ``MOST_SECONDS``, or when an
agent gives up, with what the agents said.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import psutil
import torch.distributed as dist

from shardproof.launch import process_control
from shardproof.launch.fork_server import REPRODUCIBLE
from tools.studies.elastic import records
from tools.studies.elastic.history import SPLITS, History
from tools.studies.elastic.records import Generation
from tools.studies.elastic.worker import MEMBER

T = TypeVar("T")
#: Seconds without an answer after which a run is given up; an idle machine answers within 15.
MOST_SECONDS = 300.0
#: Seconds that an agent has to end its worker before it is killed.
_PARTING = 10.0
_PAUSE = 0.05
_SIGNALS = {"freezes": signal.SIGSTOP, "wakes": signal.SIGCONT}
_TAIL = 1500
#: Too short ones split the group on a busy machine: then its late half meets again, and waits.
_RENDEZVOUS = "is_host=false,keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=3"
_OPTIONS = (
    *("--nnodes=1:4", "--nproc-per-node=1", "--max-restarts=20", "--monitor-interval=0.2"),
    *("--local-addr=127.0.0.1", "--rdzv-backend=c10d", "--rdzv-id=elastic"),
    f"--rdzv-conf={_RENDEZVOUS}",
)
_ENVIRONMENT = {
    **REPRODUCIBLE,
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}


class Stuck(RuntimeError):
    """The agents did not do what the script waits for; the message holds their output."""


class Agents:
    """The agents of one run in ``folder``; a context manager that ends them and their workers."""

    def __init__(self, history: History, folder: Path) -> None:
        self.history, self.folder = history, folder
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        (self.folder / records.HALTS).mkdir(parents=True)
        driver = psutil.Process()
        plan = {"history": self.history.to_dict(), "driver": [driver.pid, driver.create_time()]}
        (self.folder / records.PLAN).write_text(json.dumps(plan))
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self

    def __exit__(self, *_: object) -> None:
        workers = list[psutil.Process]()
        for agent in self.running.values():
            with suppress(psutil.NoSuchProcess):
                workers += psutil.Process(agent.pid).children(recursive=True)
        for agent in self.running.values():
            agent.terminate()  # it ends its worker
        until = time.monotonic() + _PARTING
        for agent in self.running.values():
            try:
                agent.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.kill()  # not another process that has its number now
        for generation in records.generations(self.folder):
            for rank in generation.ranks.values():
                if rank.is_alive:
                    process_control.kill(rank.began["pid"])

    def start(self, member: int) -> None:
        """Start the agent of ``member``."""
        module = ["-m", "tools.studies.elastic.worker", str(self.folder)]
        given = [*_OPTIONS, f"--rdzv-endpoint=127.0.0.1:{self._store.port}"]
        with (self.folder / f"agent{member}.log").open("wb") as log:
            self.running[member] = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *given, *module],
                env=os.environ | _ENVIRONMENT | {MEMBER: str(member)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=partial(process_control.die_with_parent, os.getpid()),
            )

    def play(self) -> None:
        """Run all events of the history.

        :raises Stuck: something of it does not.
        """
        for member in range(self.history.members):
            self.start(member)
        now = self._met(0, self.history.after(0))
        (now.path / records.GO).touch()
        for number, event in enumerate(self.history.events):
            halt = self.folder / records.HALTS / str(number)
            self.wait(f"the halt for event {number}", halt.with_suffix(".reached").exists)
            if event.what in ("agent", "splits"):
                self._kill_agent(event.member)
            if event.what in ("worker", "agent"):
                self._kill_worker(now, event.member)
            if event.what in ("freezes", "wakes"):
                self.running[event.member].send_signal(_SIGNALS[event.what])
            if event.what in ("joins", *SPLITS):
                self.start(self.history.newcomer(event))
            before, now = now, self._met(now.number, self.history.after(number + 1))
            if event.what in SPLITS:
                # The old half has made the step as well, and saves it after the new one.
                (now.path / records.GO).touch()
                self.wait("a commit of the new half", partial(self._has_committed, event.step))
                halt.with_suffix(".go").touch()
                self._wait_for_end(before, event.member)
                halt.with_suffix(".over").touch()
            else:
                halt.with_suffix(".go").touch()
                (now.path / records.GO).touch()
        for member, agent in self.running.items():
            self.wait(f"the end of agent {member}", partial(_has_ended, agent))

    def wait(self, what: str, come: Callable[[], T | None]) -> T:
        """The result of ``come``, once it is true.

        :raises Stuck: that takes too long, or an agent gave up.
        """
        until = time.monotonic() + MOST_SECONDS
        while not (found := come()):
            failed = {m: code for m, agent in self.running.items() if (code := agent.poll())}
            if failed:
                raise Stuck(f"{what} did not come: agents ended, {failed}\n{self.said()}")
            if time.monotonic() > until:
                raise Stuck(f"{what} did not come in {MOST_SECONDS:g} s\n{self.said()}")
            time.sleep(_PAUSE)
        return found

    def said(self) -> str:
        """The last output of every agent and its workers."""
        logs = sorted(self.folder.glob("agent*.log"))
        return "\n".join(
            f"{log.name}: ...{log.read_text(errors='replace')[-_TAIL:]}" for log in logs
        )

    def _met(self, after: int, members: tuple[int, ...]) -> Generation:
        """The next generation of exactly ``members``; an incomplete one never starts."""

        def met() -> Generation | None:
            found = [one for one in records.generations(self.folder) if one.number > after]
            return found[-1] if found and found[-1].members == members else None

        return self.wait(f"a group of members {members}", met)

    def _kill_agent(self, member: int) -> None:
        agent = self.running.pop(member)
        agent.kill()
        agent.wait()

    def _kill_worker(self, generation: Generation, member: int) -> None:
        (rank,) = (rank for rank in generation.ranks.values() if rank.member == member)
        if rank.is_alive:
            process_control.kill(rank.began["pid"])
        self._wait_for_end(generation, member)

    def _wait_for_end(self, generation: Generation, member: int) -> None:
        (rank,) = (rank for rank in generation.ranks.values() if rank.member == member)
        self.wait(f"the end of member {member}'s worker", lambda: not rank.is_alive)

    def _has_committed(self, step: int) -> bool:
        return any(one.saw_committed(step) for one in records.generations(self.folder))


def _has_ended(agent: subprocess.Popen[bytes]) -> bool:
    return agent.poll() is not None

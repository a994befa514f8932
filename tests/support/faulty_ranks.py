"""A data-parallel system whose rank 1 misbehaves in step 1 (driven by test_faults)."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import psutil
import torch

from shardproof.checks import equivalence
from shardproof.contract import Batch, Capabilities, Observe, Options, StepResult
from shardproof.evidence.assembled import Evidence
from shardproof.evidence.records import ComparisonRow
from shardproof.impls.reference.naive_ddp import IMPLEMENTATION as Naive

RANK = STEP = 1


class Drifts(Naive):  # type: ignore[misc, valid-type]
    """Rank 1 goes on from other parameters."""

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        result = super().step(batch, observe)
        if self.mesh.rank == RANK:
            with torch.no_grad():
                next(self.module.parameters()).add_(1)
        return result


class HasGlobals(Naive):  # type: ignore[misc, valid-type]
    """Sound in a process that it has to itself."""

    made: ClassVar[list[int]] = []

    @classmethod
    def capabilities(cls, options: Options) -> Capabilities:
        return replace(super().capabilities(options), backends=("gloo", "mpi"))

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        if batch.step == 0:
            self.made.append(os.getpid())
        if len(self.made) > 1:
            raise RuntimeError(f"process {os.getpid()} has trained before")
        return super().step(batch, observe)


class _Faulty(Naive):  # type: ignore[misc, valid-type]
    def step(self, batch: Batch, observe: Observe) -> StepResult:
        if batch.step == STEP:
            comm = self.mesh.comm("replicate")
            if self.mesh.rank == RANK:
                self.misbehave()
            comm.all_reduce(torch.zeros(8))
        return super().step(batch, observe)

    def misbehave(self) -> None:
        raise NotImplementedError


class Raises(_Faulty):
    def misbehave(self) -> None:
        raise ValueError("the learning rate is a fish")


class Exits(_Faulty):
    def misbehave(self) -> None:
        sys.exit(3)


class ExitsAtOnce(_Faulty):
    def misbehave(self) -> None:
        os._exit(3)


class IsKilled(_Faulty):
    def misbehave(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class IsStopped(_Faulty):
    def misbehave(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class LoopsForEver(_Faulty):
    def misbehave(self) -> None:
        while True:
            pass


class NeverComes(_Faulty):
    def misbehave(self) -> None:
        time.sleep(1000)


class AllocatesWithoutEnd(_Faulty):
    def misbehave(self) -> None:
        hoard = []
        while True:
            hoard.append(torch.ones(1 << 22))
            time.sleep(0.01)


class CallsAnother(_Faulty):
    def misbehave(self) -> None:
        self.mesh.comm("replicate").broadcast(torch.zeros(8))


class OtherShape(_Faulty):
    def misbehave(self) -> None:
        self.mesh.comm("replicate").all_reduce(torch.zeros(5))


class OtherDtype(_Faulty):
    def misbehave(self) -> None:
        self.mesh.comm("replicate").all_reduce(torch.zeros(8, dtype=torch.int32))


class ReturnsEarly(Naive):  # type: ignore[misc, valid-type]
    def step(self, batch: Batch, observe: Observe) -> StepResult:
        if batch.step == STEP and self.mesh.rank == RANK:
            observe("gradients_final")
            observe("after_update")
            return StepResult(loss=torch.zeros(()))
        return super().step(batch, observe)


def _once() -> bool:
    """Whether this is the first time: the file tells that is named in the environment."""
    flag = Path(os.environ["FAULTY_RANKS_FLAG"])
    first = not flag.exists()
    flag.touch()
    return first


class KillsTheJudge(_Faulty):
    """As the kernel does that runs out of memory."""

    def misbehave(self) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)


class KillsTheJudgeOnce(KillsTheJudge):
    def misbehave(self) -> None:
        if _once():
            super().misbehave()


class KillsTheForkServerOnce(_Faulty):
    def misbehave(self) -> None:
        if _once():
            os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)
            time.sleep(1000)


class LeavesNoDescriptors(Naive):  # type: ignore[misc, valid-type]
    """In the judge, which asks it for its axes before there is any rank."""

    @classmethod
    def capabilities(cls, options: Options) -> Capabilities:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        return super().capabilities(options)


class _BreaksACheck(Naive):  # type: ignore[misc, valid-type]
    """The first measurement of gradients in the judge, which asks for the axes before."""

    @classmethod
    def capabilities(cls, options: Options) -> Capabilities:
        sound = equivalence.measure

        def measure(evidence: Evidence) -> list[ComparisonRow]:
            if _once():
                cls.exhaust()
            return sound(evidence)

        equivalence.measure = measure
        return super().capabilities(options)

    @staticmethod
    def exhaust() -> None:
        raise NotImplementedError


class CheckHasNoMemory(_BreaksACheck):
    @staticmethod
    def exhaust() -> None:
        raise MemoryError("3 GiB")


class CheckHasNoTensor(_BreaksACheck):
    @staticmethod
    def exhaust() -> None:
        torch.empty(1 << 55, dtype=torch.uint8)


class CheckHasNoDescriptor(_BreaksACheck):
    @staticmethod
    def exhaust() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class CheckIsWrong(_BreaksACheck):
    @staticmethod
    def exhaust() -> None:
        raise KeyError("a bug of the check")


class EndsItsNode(_Faulty):
    """The agent is killed (``cluster/nodes/agent.py``), and all its processes with it."""

    def misbehave(self) -> None:
        _agent().kill()
        time.sleep(60)


class PausesItsNode(_Faulty):
    """What a frozen container looks like from outside, of processes that are stopped."""

    def misbehave(self) -> None:
        agent = _agent()
        for process in (agent, *agent.children(recursive=True)):
            if process.pid != os.getpid():
                process.suspend()
        psutil.Process().suspend()


def _agent() -> psutil.Process:
    """That of the calling rank's node: above its keeper and the fork server."""
    return psutil.Process().parents()[2]

"""Oracles that train in a process of their own: for GPUs, and out of reach of a user's code.

A module that a leader imports may patch torch, and an oracle that is trained there would be wrong
in the same way.  :func:`clean` forks a trainer before anything is imported; whatever several cases
share comes from it (:func:`load_or_train`).

Autograd asks CUDA for the GPUs of the machine, and a process that has asked can fork none that uses
them.  A leader forks ranks before and after its oracle: it lets a child train it.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardproof import tensor_bytes
from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.contract import BatchRule, BufferRule
from shardproof.launch import process_control
from shardproof.launch.informant import Informant, NoAnswer, Raised
from shardproof.launch.watchdog import TICK_SECONDS
from shardproof.oracle import training
from shardproof.oracle.truth import Truth

#: What trains the shared oracles of this process; none: it trains them itself.
_trainers: list[Informant] = []


@contextmanager
def clean(needed: bool, workdir: Path) -> Iterator[None]:
    """Inside, shared oracles are trained by a process that is forked here, if ``needed``.

    Enter it before the first import of a user's module.
    """
    if not needed:
        yield
        return
    with Informant(workdir, math.inf) as trainer:
        _trainers.append(trainer)
        try:
            yield
        finally:
            _trainers.remove(trainer)


def load_or_train(
    case: Case,
    buffers_rule: BufferRule,
    cache: Path,
    batch_rule: BatchRule = "global",
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Truth:
    """As :func:`training.load_or_train`, by the trainer of :func:`clean` where there is one.

    :raises RuntimeError: the trainer ended, or its training raised.
    """
    if not _trainers:
        return training.load_or_train(case, buffers_rule, cache, batch_rule, settings)
    given = case.to_dict(), buffers_rule, str(cache), batch_rule, dict(settings)
    try:
        file = _trainers[-1].do(shared, *given)
    except (NoAnswer, Raised) as error:
        raise RuntimeError(f"the reference run failed: {error!r}") from None
    return Truth.from_dict(tensor_bytes.load(Path(file)))


def shared(
    case: Mapping[str, Any],
    buffers: BufferRule,
    cache: str,
    batch: BatchRule,
    settings: Mapping[str, str],
) -> str:
    """In the trainer: the file of the oracle, trained if it is not there."""
    given = Case.from_dict(case), buffers, Path(cache)
    training.load_or_train(*given, batch, settings)
    return str(training.cached(*given, batch, settings))


def trained(case: Case, train: Callable[[], Truth]) -> Truth:
    """The result of ``train``; its exceptions are raised here.

    :raises RuntimeError: the child ended before it could answer.
    """
    if BACKENDS[case.backend].device == "cpu":
        return train()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(theirs, train, os.getpid()), daemon=True)
    child.start()
    theirs.close()
    watched = process_control.Watched(child.pid or 0)
    while not ours.poll(TICK_SECONDS):
        watched.look()
        if watched.stopped >= process_control.STOPPED_LOOKS:
            child.kill()
    try:
        answer = pickle.loads(ours.recv_bytes())
    except (EOFError, OSError):
        child.join()
        raise RuntimeError(f"the reference run ended with exit code {child.exitcode}") from None
    child.join()
    if isinstance(answer, BaseException):
        raise answer
    assert isinstance(answer, Truth)
    return answer


def _answer(line: Connection, train: Callable[[], Truth], parent: int) -> None:
    process_control.die_with_parent(parent)
    try:
        # By value: torch would hand tensors over as descriptors of shared memory.
        answer = pickle.dumps(train())
    except Exception as error:  # noqa: BLE001 - raised again where the answer is awaited
        answer = _packed(error)
    line.send_bytes(answer)


def _packed(error: Exception) -> bytes:
    """``error``, or one that says the same where it cannot travel."""
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # noqa: BLE001 - whatever a class of a user's does
        return pickle.dumps(RuntimeError(repr(error)))
    return packed

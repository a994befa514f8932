"""Oracles that train in a process of their own: for GPUs, and out of reach of a user's code.

A module that a leader imports may patch torch, and an oracle that is trained there would be wrong
in the same way.  :func:`clean` forks a trainer before anything is imported; whatever several cases
share comes from it (:func:`load_or_train`).

Autograd asks CUDA for the GPUs of the machine, and a process that has asked can fork none that uses
them.  A leader forks ranks before and after its oracle: it lets a child train it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from shardproof import tensor_bytes
from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.contract import BatchRule, BufferRule
from shardproof.launch import process_control
from shardproof.oracle import training
from shardproof.oracle.truth import Truth

#: The line to the trainer of this process; none: it trains its oracles itself.
_trainers: list[Connection] = []


@contextmanager
def clean(needed: bool) -> Iterator[None]:
    """Inside, shared oracles are trained by a process that is forked here, if ``needed``.

    Enter it before the first import of a user's module.
    """
    if not needed:
        yield
        return
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_train_on_order, args=(theirs, ours, os.getpid()), daemon=True)
    child.start()
    theirs.close()
    assert child.pid is not None
    process_control.STAYING.add(child.pid)
    _trainers.append(ours)
    try:
        yield
    finally:
        _trainers.remove(ours)
        ours.close()
        child.join()
        process_control.STAYING.discard(child.pid)


def load_or_train(
    case: Case, buffers_rule: BufferRule, cache: Path, batch_rule: BatchRule = "global"
) -> Truth:
    """As :func:`training.load_or_train`, by the trainer of :func:`clean` where there is one.

    :raises RuntimeError: the trainer ended, or its training raised.
    """
    if not _trainers:
        return training.load_or_train(case, buffers_rule, cache, batch_rule)
    line = _trainers[-1]
    order = {"case": case.to_dict(), "rules": [buffers_rule, batch_rule], "cache": str(cache)}
    try:
        line.send_bytes(json.dumps(order).encode())
        answer = json.loads(line.recv_bytes())
    except (EOFError, OSError):
        raise RuntimeError("the process that trains the oracle has ended") from None
    if answer["error"]:
        raise RuntimeError(f"the oracle could not be trained: {answer['error']}")
    return Truth.from_dict(tensor_bytes.load(Path(answer["file"])))


def _train_on_order(line: Connection, other: Connection, parent: int) -> None:
    process_control.die_with_parent(parent)
    process_control.let_go()
    other.close()
    with suppress(EOFError):
        while True:
            order = json.loads(line.recv_bytes())
            answer = {"file": "", "error": ""}
            try:
                buffers_rule, batch_rule = order["rules"]
                given = Case.from_dict(order["case"]), buffers_rule, Path(order["cache"])
                training.load_or_train(*given, batch_rule)
                answer["file"] = str(training.cached(*given, batch_rule))
            except Exception as error:  # noqa: BLE001 - raised again where the answer is awaited
                answer["error"] = repr(error)
            line.send_bytes(json.dumps(answer).encode())


def trained(case: Case, train: Callable[[], Truth]) -> Truth:
    """What ``train`` returns; what it raises is raised here.

    :raises RuntimeError: the child ended before it could answer.
    """
    if BACKENDS[case.backend].device == "cpu":
        return train()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(theirs, train, os.getpid()), daemon=True)
    child.start()
    theirs.close()
    try:
        answer = pickle.loads(ours.recv_bytes())
    except (EOFError, OSError):
        child.join()
        raise RuntimeError(f"the oracle's process ended with {child.exitcode}") from None
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

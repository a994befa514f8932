"""An oracle that trains in a process of its own, where ranks compute on GPUs.

Autograd asks CUDA for the GPUs of the machine, and a process that has asked can fork none that uses
them.  A leader forks ranks before and after its oracle: it lets a child train it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection

from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.launch import process_control
from shardproof.oracle.truth import Truth


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

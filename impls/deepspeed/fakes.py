"""Patches with which DeepSpeed runs on tensors without values (``shardproof simulate``).

Its assertions that all ranks have equal integers make their calls, and do not read the answers.
Its test of the gradient norm is answered by the simulation, as ``Tensor.isfinite`` is.  It keeps
process groups in globals, and stage 3 replaces torch's linear; both are put back after each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.comm import comm
from deepspeed.runtime.zero import parameter_offload, partition_parameters, stage3, stage_1_and_2
from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
from deepspeed.utils import groups
from torch import Tensor


def _alike(integers: Sequence[int]) -> None:
    """Make the calls of the assertion; ranks that do not run are taken to be alike."""
    for sent in ([len(integers)], [*integers]):
        comm.broadcast(torch.tensor(sent, dtype=torch.int64), src=0)


def _is_invalid(norm: Tensor) -> bool:
    return not bool(norm.isfinite().all())


_ANSWERS = {"assert_ints_same_as_other_ranks": _alike, "is_invalid_grad_norm": _is_invalid}
_MODULES: Sequence[Any] = (
    coordinator,
    parameter_offload,
    partition_parameters,
    stage3,
    stage_1_and_2,
)


@contextmanager
def _put_back(module: Any) -> Iterator[None]:
    """Put the globals of ``module`` back after the block; dictionaries get their entries back."""
    before = {
        name: (value, dict(value) if type(value) is dict else None)
        for name, value in vars(module).items()
        if not name.startswith("__")
    }
    try:
        yield
    finally:
        for name, (value, entries) in before.items():
            setattr(module, name, value)
            if entries is not None:
                value.clear()
                value.update(entries)


@contextmanager
def without_values() -> Iterator[None]:
    """Apply the patches inside."""
    with ExitStack() as stack:
        for module in (groups, comm, torch.nn.functional):
            stack.enter_context(_put_back(module))
        for module in _MODULES:
            for name in _ANSWERS.keys() & vars(module).keys():
                stack.enter_context(patch.object(module, name, _ANSWERS[name]))
        yield

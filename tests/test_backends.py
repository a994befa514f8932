"""The backends: every collective and every native system on them; failures that name ranks, quickly."""

from __future__ import annotations

import json
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_ranks import processes, succeed, threads
from neutral_checks import NEUTRAL, STRICTER, data, same
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from suite import backends
from suite.backends import errors, in_memory
from suite.backends.hub import Hub
from suite.ledgers import phases, traffic


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [*NEUTRAL, *STRICTER])
def test_in_memory(name: str, world: int) -> None:
    succeed({**NEUTRAL, **STRICTER}[name], world)


@pytest.mark.parametrize("ledgers", [True, False], ids=["logged", "native"])
def test_gloo(ledgers: bool, tmp_path: Path) -> None:
    """All neutral checks in one launch of three processes, with and without the wrapper."""

    def body(rank: int, world: int) -> dict[str, str]:
        group = dist.group.WORLD
        assert (type(group) is dist.ProcessGroup) is not ledgers
        assert dist.get_backend() == "gloo"
        failed = {}
        for name, check in NEUTRAL.items():
            try:
                check(rank, world)
            except BaseException:  # noqa: BLE001 - reported by name
                failed[name] = traceback.format_exc()
                break  # ranks are out of step now
        return failed

    for failed in processes(body, 3, tmp_path, ledgers):
        assert not failed, json.dumps(failed).replace("\\n", "\n")

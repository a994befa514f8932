"""A case for tests that look at little of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardproof.case import Case, WorkloadSpec
from shardproof.contract import OptimizerSpec


def made_case(implementation: str, mesh: Mapping[str, int], **fields: Any) -> Case:
    """A case of the GPT in lane fp64 on ``in_memory`` with the check ``traffic``, or ``fields``."""
    usual: dict[str, Any] = {
        "id": "c",
        "scenario": "s",
        "backend": "in_memory",
        "workload": WorkloadSpec("charnames_gpt"),
        "optimizer": OptimizerSpec(),
        "lane": "fp64",
        "checks": ("traffic",),
    }
    return Case(implementation=implementation, mesh=mesh, **(usual | fields))

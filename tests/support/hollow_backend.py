"""A backend that simulates: torch's fake group, of which one rank of the world runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardproof.backends import BACKENDS, TorchBackend
from shardproof.case import Case
from shardproof.cases.leader import judge_case


class Hollow(TorchBackend):
    """Calls move nothing, so tensors hold whatever they held before; rank 0 stands for all."""

    name, torch_name = "hollow", "fake"
    has_values = False
    exact_memory = True

    def load(self) -> None:
        """torch's own tests register it."""
        from torch.testing._internal.distributed import fake_pg  # noqa: F401

    def ranks(self, world: int) -> dict[int, tuple[int, ...]]:
        """The first one, which stands for all."""
        return {0: tuple(range(world))}


def judged(task: tuple[Case, Path]) -> dict[str, Any]:
    """Task of a leader: the result of a case that runs there, and its records."""
    case, folder = task
    BACKENDS.own = {**BACKENDS.own, "hollow": Hollow()}
    account, result = judge_case(case, folder, folder)
    figures = account.figures
    assert figures is not None, result.reason
    return {"result": result.to_dict(), "records": figures.to_dict()["records"]}

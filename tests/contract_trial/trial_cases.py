"""Cases for the trial systems, judged by the real judge in real leaders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardproof.case import Case, WorkloadSpec
from shardproof.cases.leader import CaseTask, run_case
from shardproof.checks.results import CaseResult
from shardproof.contract import OptimizerSpec
from shardproof.launch.fork_server import Task
from shardproof.launch.pool import Pool

CHECKS = ("equivalence", "replicas", "norm")


def case(implementation: str, mesh: Mapping[str, int], **changes: Any) -> Case:
    """A case of two small steps; ``changes`` are fields of :class:`Case`."""
    fields: dict[str, Any] = {
        "backend": "in_memory",
        "workload": WorkloadSpec(
            "charnames_gpt",
            global_batch=8,
            params={"layers": 2, "width": 16, "heads": 2, "seq": 8, "vocab": 96},
        ),
        "optimizer": OptimizerSpec(),
        "lane": "fp64",
        "checks": CHECKS,
        "steps": 3,
        **changes,
    }
    text = json.dumps([implementation, dict(mesh), repr(sorted(fields.items()))])
    name = f"trial/{implementation}/{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return Case(id=name, scenario="trial", implementation=implementation, mesh=mesh, **fields)


def judged(cases: Sequence[Case]) -> list[CaseResult]:
    """Results in the order of ``cases``, each from a leader of its own."""
    return [CaseResult.from_dict(result) for result in results_of(run_case, cases)]


def results_of(task: Task[Any], cases: Sequence[Case]) -> list[dict[str, Any]]:
    """What ``task`` leaves under ``result`` of each of ``cases``, in a leader of its own."""
    results = {}
    with Pool(2) as pool:
        items = [
            (
                c.id,
                CaseTask(c, pool.folder / f"case{number}", pool.folder / "oracles"),
                c.deadline + 60,
            )
            for number, c in enumerate(cases)
        ]
        for end in pool.run(task, items):
            assert end.value is not None, end.output
            results[end.key] = end.value["result"]
    return [results[c.id] for c in cases]


def told(results: Sequence[CaseResult]) -> list[tuple[str, str, str]]:
    """What is to be read where a result is not as expected."""
    return [(r.id, r.verdict, r.reason) for r in results]


def compared(result: CaseResult) -> int:
    """How many tensors the equivalence check looked at."""
    return int(result.figures("equivalence").get("compared", 0))

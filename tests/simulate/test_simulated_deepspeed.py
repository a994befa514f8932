"""DeepSpeed's engine on tensors without values: simulated ranks make the calls of real ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_case import made_case

from shardproof.case import Case, WorkloadSpec
from shardproof.cases.runner import run_cases
from shardproof.contract import OptimizerSpec
from shardproof.costs import shapes
from shardproof.ledgers.memory.summary import summary
from shardproof.runs import run_folder
from shardproof.simulate import asked
from shardproof.simulate.compared import compare_result
from shardproof.simulate.rank import simulate
from shardproof.simulate.sources import ShapeSource

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

#: Stage 3 first: it leaves most behind in the process.
STAGES = (3, 2, 1, 0)
STATE_AFTER = ("after_update", "optimizer_state")


def case_of(stage: int) -> Case:
    """Small buckets, so that the order of gradients decides what a bucket holds."""
    options = {"zero_optimization": {"reduce_bucket_size": 5000}} if stage else {}
    return made_case(
        f"deepspeed/zero{stage}",
        {"shard" if stage else "replicate": 2},
        id=f"stage{stage}",
        backend="gloo",
        lane="working_precision",
        dtype="float32",
        workload=WorkloadSpec("charnames_gpt", global_batch=8, micro_batches=2),
        optimizer=OptimizerSpec("adamw", momentum=0.0, clip_norm=1.0),
        options=options,
        steps=2,
        checks=("equivalence",),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with run_folder.RunFolder.create(tmp_path_factory.mktemp("runs"), ["test"]) as folder:
        run_cases([case_of(stage) for stage in STAGES], 1, folder.add, on_account=folder.keep)
    yield folder.path


def test_calls_are_those_of_real_ranks_in_any_order_of_stages(run: Path) -> None:
    results = {result.id: result for result in run_folder.read(run).cases}
    for stage in STAGES:
        result = results[f"stage{stage}"]
        assert result.verdict.startswith("pass"), result.reason
        compared = compare_result(run, result)
        assert (compared.error, compared.skip, [*compared.wrong]) == ("", "", [])
        # The gradients and the norm on 2 ranks in 2 steps, at the least.
        assert compared.figures >= 8


def test_a_rank_of_64_holds_its_part_of_the_optimizer_state() -> None:
    shape = replace(asked.round_off(shapes.model("gpt2")), layers=2, parameters=0)
    made = asked.source(shape, "deepspeed/zero3", {"shard": 64}, "A32", {})
    assert isinstance(made, ShapeSource)
    before = torch.nn.functional.linear
    (rank,) = simulate(made, [63])
    assert torch.nn.functional.linear is before
    rows = [row for row in summary(rank.log) if (row.where, row.kind) == STATE_AFTER]
    held = max(row.bytes for row in rows)
    moments = 2 * 4 * shapes.elements(shape) / 64
    assert moments <= held <= 1.01 * moments

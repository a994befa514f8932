"""Simulated ranks equal real ones to the byte, and one buffer or call more is reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from made_case import made_case

from shardproof.case import WorkloadSpec
from shardproof.cases.runner import run_cases
from shardproof.checks.results import CaseResult
from shardproof.commands.console import is_json
from shardproof.contract import OptimizerSpec, Options
from shardproof.errors import SelectionError
from shardproof.runs import run_folder
from shardproof.simulate.compared import compare_result, compare_run, unready


class World(NamedTuple):
    """A system on a mesh."""

    implementation: str
    mesh: Mapping[str, int]
    options: Options = {}  # noqa: RUF012 - never changed
    steps: int = 1

    @property
    def id(self) -> str:
        """The id of its case."""
        axes = "x".join(f"{axis}{size}" for axis, size in self.mesh.items())
        return f"{self.implementation}-{axes}"


WORLDS = [
    World("reference/ddp", {"replicate": 3}),
    World("reference/zero1", {"shard": 2}),
    World("reference/zero2", {"shard": 2}),
    World("reference/zero3", {"shard": 3}, steps=2),
    World("reference/fsdp", {"shard": 2}, {"recompute_every": 1}, 2),
    World("reference/tensor", {"tensor": 2}),
    World("reference/pipeline", {"pipe": 2}),
    World("reference/context", {"context": 2}),
    World("reference/hybrid", {"shard": 2, "tensor": 2}),
    World("pytorch/ddp", {"replicate": 2}, steps=2),
    World("pytorch/zero_redundancy_optimizer", {"shard": 2}, steps=2),
    World("pytorch/fsdp2", {"shard": 2}, steps=2),
    World("pytorch/tensor_parallel", {"tensor": 2}),
]
#: Trains experts, whose rows depend on values.
EXPERT = World("reference/expert", {"expert": 2})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all :data:`WORLDS`.

    DDP reorders its buckets in the second step; systems that gather parameters also get two steps.
    """
    cases = []
    for world in (*WORLDS, EXPERT):
        more = {"layers": world.mesh.get("pipe", 1), "experts": 4 * (world is EXPERT)}
        params = {"width": 16, "seq": 8, **more}
        work = WorkloadSpec("charnames_gpt", global_batch=6, micro_batches=1, params=params)
        fields = {"id": world.id, "workload": work, "steps": world.steps, "options": world.options}
        adam = OptimizerSpec("adamw", momentum=0.0)
        checks = ("traffic", "memory")
        cases.append(
            made_case(world.implementation, world.mesh, optimizer=adam, checks=checks, **fields)
        )
    with run_folder.RunFolder.create(tmp_path_factory.mktemp("runs"), ["test"]) as folder:
        run_cases(cases, 1, folder.add, on_account=folder.keep)
    return folder.path


@pytest.fixture(scope="module")
def results(run: Path) -> dict[str, CaseResult]:
    return {result.id: result for result in run_folder.read(run).cases}


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.id)
def test_bytes_and_calls_are_equal(
    run: Path, results: Mapping[str, CaseResult], world: World
) -> None:
    result = results[world.id]
    assert unready(result) == "", result.reason
    compared = compare_result(run, result)
    assert (compared.error, compared.skip, [*compared.wrong]) == ("", "", [])
    # Each rank has bytes at four marks and three peaks of each step, and its calls.
    assert compared.figures > 25 * result.case.world * result.case.steps


def test_values_that_steer_are_a_skip_with_a_reason(
    run: Path, results: Mapping[str, CaseResult]
) -> None:
    compared = compare_result(run, results[EXPERT.id])
    assert compared.skip.startswith("its code depends on tensor values") and compared.figures == 0


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("zero1_all_reduces", "step 0, call "),
        ("zero1_gathers_beside", "peak update cpu communication: "),
    ],
)
def test_a_call_or_a_buffer_that_only_one_side_has_is_reported(
    run: Path, results: Mapping[str, CaseResult], fault: str, says: str
) -> None:
    result = results["reference/zero1-shard2"]
    faulty = replace(result, case=replace(result.case, implementation=f"mutants/{fault}"))
    wrong = compare_result(run, faulty).wrong
    assert {text.partition(":")[0] for text in wrong} == {"rank 0", "rank 1"}
    assert any(says in text for text in wrong), wrong


def test_a_whole_run_is_compared(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not is_json()
    kept = ["reference/ddp-replicate3", EXPERT.id]
    for number, (names, code) in enumerate(((kept, 0), (kept[1:], 3))):
        folder = part_of(run, tmp_path / str(number), names)
        assert compare_run(folder) == code
        said = capsys.readouterr().out
        assert "its code depends on tensor values" in said and "Differences" not in said
        assert f"{len(names) - 1} case" in said and "0 differ, 1 skipped" in said


def test_a_difference_ends_with_exit_code_1(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = part_of(run, tmp_path / "run", ["reference/zero1-shard2"])
    lines = folder / run_folder.LINES
    text = lines.read_text().replace('"reference/zero1"', '"mutants/zero1_all_reduces"')
    lines.write_text(text)
    assert compare_run(folder) == 1
    said = capsys.readouterr().out
    assert "Differences" in said and "all_reduce" in said and "1 differ, 0 skipped" in said


def test_a_folder_without_a_run_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match="not a run folder"):
        compare_run(tmp_path)


def part_of(run: Path, folder: Path, names: list[str]) -> Path:
    """A copy of ``run`` with only the results called ``names``."""
    read = run_folder.read(run)
    folder.mkdir()
    for file in ("run.json", *(r.record for r in read.cases if r.id in names)):
        assert file is not None
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes((run / file).read_bytes())
    lines = (run / run_folder.LINES).read_text().splitlines(keepends=True)
    chosen = [line for line in lines if any(f'"{name}"' in line for name in names)]
    (folder / run_folder.LINES).write_text("".join(chosen))
    return folder

"""Scaling on meshes of several axes and on pipelines: what grows, what stays, what is modelled."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import here

from shardproof.bench import session
from shardproof.bench.leader_tasks import Answer
from shardproof.bench.lines import CellProbes, MeasuredCell
from shardproof.bench.model.alpha_beta import Fit, Machine
from shardproof.bench.scaling import matrix, modelled
from shardproof.bench.session import cell_launch
from shardproof.bench.sides import files
from shardproof.bench.subjects import Cell
from shardproof.commands.verify import verify
from shardproof.errors import InputError
from shardproof.registry.declaration import Declaration
from shardproof.runs.run_folder import read

pytestmark = pytest.mark.usefixtures("brief_sessions")

TEXT = """\
name: meshes
about: replicas of shards, and a pipeline
mode: {mode}
workload: {{name: charnames_gpt, {batch}: 8}}
optimizer: sgd
backends: gloo
worlds: [2]
blocks: 2
implementations:
  - reference/ddp
  - implementation: reference/fsdp
    label: hsdp
    options: {{sharding_strategy: HYBRID_SHARD}}
    mesh: {{shard: 2}}
    worlds: [2, 4, 8]
  - {{implementation: reference/pipeline, label: two, grows: pipe, micro_batches: 2}}
"""


def scenario(folder: Path, mode: str = "strong") -> Path:
    path = folder / f"{mode}.yaml"
    batch = "global_batch" if mode == "strong" else "batch_per_rank"
    path.write_text(TEXT.format(mode=mode, batch=batch))
    return path


def cell(folder: Path, label: str, world: int, mode: str = "strong") -> Cell:
    cells = matrix.read([scenario(folder, mode)])
    (found,) = (one for one in cells if (one.label, one.world) == (label, world))
    return found


def declared(cell: Cell, *axes: str) -> session.Measured:
    measured = session.Measured(cell)
    session.declare(measured, {"ranks": Answer(Declaration(axes=axes))}, gpus=None)
    return measured


def test_a_system_names_its_axes_its_worlds_and_its_micro_batches(tmp_path: Path) -> None:
    found = matrix.read([scenario(tmp_path)])
    assert [(one.title, one.world) for one in found] == [
        ("reference/ddp", 2),
        *(("reference/fsdp+hsdp", world) for world in (2, 4, 8)),
        ("reference/pipeline+two", 2),
    ]
    assert [one.base.micro_batches for one in found] == [1, 1, 1, 1, 2]
    assert all(Cell.from_dict(one.to_dict()) == one for one in found)


def test_the_axis_that_grows_lies_outside_of_those_that_stay(tmp_path: Path) -> None:
    hybrid = declared(cell(tmp_path, "hsdp", 8), "replicate", "shard")
    assert list(hybrid.meshes["ranks"].items()) == [("replicate", 4), ("shard", 2)]
    piped = declared(cell(tmp_path, "two", 2), "pipe")
    assert piped.meshes["ranks"] == {"pipe": 2}


@pytest.mark.parametrize(
    ("label", "axes", "says"),
    [
        ("hsdp", ("shard",), "has no data axis besides shard, only shard"),
        ("hsdp", ("replicate", "pipe"), "has no axis shard"),
        ("two", ("shard",), "has no axis pipe"),
    ],
)
def test_a_system_without_such_axes_is_told_so(
    tmp_path: Path, label: str, axes: tuple[str, ...], says: str
) -> None:
    told = declared(cell(tmp_path, label, 2), *axes)
    assert told.problem is not None and told.problem[0] == "precondition"
    assert says in told.problem[1]


def test_samples_of_a_rank_by_hand(tmp_path: Path) -> None:
    hybrid, piped = cell(tmp_path, "hsdp", 8), cell(tmp_path, "two", 2)
    assert (hybrid.data_coordinates(8), hybrid.samples(8), hybrid.samples(4)) == (8, 1, 2)
    assert (piped.data_coordinates(2), piped.samples(2)) == (1, 8)
    weak = cell(tmp_path, "two", 2, "weak")
    assert (weak.workload.global_batch, weak.samples(2), weak.samples(4)) == (16, 16, 32)
    assert cell(tmp_path, "hsdp", 8, "weak").samples(8) == 8


def test_one_rank_alone_is_on_the_same_axes(tmp_path: Path) -> None:
    hybrid = cell(tmp_path, "hsdp", 8)
    mesh = {"replicate": 4, "shard": 2}
    together = cell_launch(hybrid, mesh, 0, [0], together=True)
    assert together.sides["ranks"].axes == mesh
    assert together.sides["wrapped"].axes == {"replicate": 1, "shard": 1}
    assert list(together.probed) == [1]
    alone = cell_launch(hybrid, mesh, 0, [0], together=False)
    assert "ranks" not in alone.sides and alone.first.world == 2
    assert {run.workload.global_batch for run in alone.probed.values()} == {8, 2}
    assert all(run.axes == {"replicate": 1, "shard": 2} for run in alone.probed.values())


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("worlds: [2, 4, 8]", "worlds: [2, 3]", 11, "3 ranks cannot be divided into groups"),
        ("worlds: [2, 4, 8]", "worlds: [4, 2]", 15, "list worlds in ascending order"),
        ("mesh: {shard: 2}", "mesh: {shards: 2}", 14, "shard"),
        ("grows: pipe", "grows: pipe, mesh: {pipe: 2}", 16, "remove pipe from `mesh`"),
        ("label: two, grows", "grows", 16, "a system with mesh or micro_batches needs a label"),
        ("micro_batches: 2", "micro_batches: 0", 16, "micro_batches"),
    ],
)
def test_faults_of_meshes_have_their_line(
    tmp_path: Path, old: str, new: str, line: int, says: str
) -> None:
    path = scenario(tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(InputError) as told:
        matrix.read([path])
    assert says in str(told.value) and f"strong.yaml:{line}:" in str(told.value)


def test_a_world_of_the_command_line_fits_the_mesh(tmp_path: Path) -> None:
    done = here("bench", str(scenario(tmp_path)), "--world", "3", "--dry-run")
    assert done.returncode == 2 and "divided into groups of shard 2" in done.stderr
    done = here("bench", str(scenario(tmp_path)), "--world", "4", "-k", "hsdp", "--dry-run")
    assert done.stdout.split() == ["scaling::meshes::reference/fsdp+hsdp::gloo::4::charnames_gpt"]


def probed(world: int, calls: dict[int, float], nodes: int = 1) -> CellProbes:
    """Probes of ``world`` ranks whose calls cost 10 us a message and 1 ns a byte; ``calls``:
    seconds to the gradients by samples.
    """
    operations = "all_gather", "reduce_scatter", "all_reduce", "send"
    fits = {name: Fit(name, 2, 10e-6, 1e-9) for name in operations}
    return CellProbes(
        machine=Machine("gloo", world, fits, {}, None, 1e9),
        cores_per_rank=1,
        threads=1,
        alone=0.05,
        calls=[],
        flops=0,
        elements=0,
        world=world,
        nodes=nodes,
        gradients=calls,
        update=0.01,
    )


def line_of(of: Cell, mesh: dict[str, int], strategy: str, given: CellProbes) -> MeasuredCell:
    return MeasuredCell(
        id=of.id,
        mode=of.mode,
        implementation=of.system.implementation,
        backend=of.backend,
        world=of.world,
        target=of.target,
        cell=of,
        mesh=mesh,
        strategy=strategy,
        probed=given,
    )


def figures(line: MeasuredCell) -> dict[str, Any]:
    found = modelled.modelled(line, alone=0.09)
    assert found is not None
    return found.to_dict()


def test_replicas_of_shards_are_modelled_where_all_calls_cost_the_same(tmp_path: Path) -> None:
    """From 4 ranks at 8: each replica shards as before, and halves go to more replicas."""
    hybrid = cell(tmp_path, "hsdp", 8)
    samples = {1: 0.01, 2: 0.02}
    made = figures(line_of(hybrid, {"replicate": 4, "shard": 2}, "fsdp", probed(4, samples)))
    assert made["compute_seconds"] == pytest.approx(0.01 + 0.01 / 2)
    assert made["efficiency"] == pytest.approx(0.09 / (8 * made["step_seconds"]))
    four = cell(tmp_path, "hsdp", 4)
    less = figures(line_of(four, {"replicate": 2, "shard": 2}, "fsdp", probed(4, samples)))
    fewer = made["communication_seconds"] - less["communication_seconds"]
    assert 0 < fewer < less["communication_seconds"], "only the axis that grows costs more"
    far = replace(hybrid, world=64, workload=hybrid.at(64).workload)
    late = figures(line_of(far, {"replicate": 32, "shard": 2}, "fsdp", probed(4, samples)))
    assert late["problem"] == "8 samples are too few for 64 ranks"


def test_calls_inside_nodes_and_between_them_have_no_one_alpha(tmp_path: Path) -> None:
    hybrid = cell(tmp_path, "hsdp", 4)
    line = line_of(hybrid, {"replicate": 2, "shard": 2}, "fsdp", probed(4, {2: 0.02}, nodes=2))
    told = figures(line)
    assert told["efficiency"] is None
    assert "calls along replicate and shard lie inside nodes or between them" in told["problem"]
    assert modelled.scorecard(line, 0.1) is None
    one_axis = line_of(
        cell(tmp_path, "hsdp", 2), {"replicate": 1, "shard": 2}, "fsdp", probed(2, {4: 0.02}, 2)
    )
    assert figures(one_axis)["efficiency"] is not None


def test_a_pipeline_is_modelled_with_its_bubble(tmp_path: Path) -> None:
    """Two micro-batches in two stages: 3/2 of half the work, and half of the update."""
    piped = cell(tmp_path, "two", 2)
    line = line_of(piped, {"pipe": 2}, "pipeline", probed(2, {8: 0.08}))
    made = figures(line)
    assert made["compute_seconds"] > 0.08 * 0.75
    assert made["compute_seconds"] - 0.08 * 0.75 < 0.01, "a part of the update of 0.01"
    assert math.isfinite(made["efficiency"]) and 0 < made["efficiency"] < 1
    assert modelled.scorecard(line, 0.1) is None, "compute is measured of whole models"


def test_shipped_cluster_scenarios_have_replicas_of_shards_and_a_pipeline() -> None:
    for cells in (matrix.read(files([name])) for name in ("cluster-strong", "cluster-weak")):
        told = {(one.label, one.world, one.grows, one.inner) for one in cells if one.label}
        assert told == {("hsdp", 4, "", 2), ("1f1b", 2, "pipe", 1)}


@pytest.mark.slow
def test_they_are_timed_and_train_what_one_process_trains(tmp_path: Path) -> None:
    path, run = scenario(tmp_path), tmp_path / "run"
    few = ("--world", "2", "--launches", "1", "-k", "hsdp or pipeline")
    done = here("bench", str(path), *few, "--results", str(run))
    assert done.returncode in (0, 3), done.stdout + done.stderr
    told = {line["cell"]["label"]: line for line in read(run).others["scaling"]}
    assert set(told) == {"hsdp", "two"} and not verify(run).problems
    for line in told.values():
        assert line["trained_alike"] is True, line["reason"]
        assert line["verdict"] in ("holds", "below", "inconclusive", "oversubscribed")
        assert line["modelled"]["efficiency"] is not None, line["modelled"]

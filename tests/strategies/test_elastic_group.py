"""Elastic groups: a member that is a step ahead brings the others up to date; what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from local_ranks import succeed, threads
from torch import nn

from shardproof.case import WorkloadSpec
from shardproof.comm import Mesh
from shardproof.contract import BatchRule, OptimizerSpec, Refused, ScalerSpec
from shardproof.impls.reference.checkpoint.checkpointing import Checkpointing
from shardproof.impls.reference.elastic import Progress, ReferenceElastic
from shardproof.impls.reference.engine.state import named_state
from shardproof.impls.reference.parts.compressors.owed import Owed
from shardproof.oracle.members import StepMembers
from shardproof.workloads import Workload, make
from tools.studies.elastic.history import History, of_worlds
from tools.studies.elastic.judge import truth_of

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = OptimizerSpec(lr=0.1)
SMALL = WorkloadSpec(
    "charnames_gpt", global_batch=6, params={"layers": 1, "width": 8, "heads": 1, "seq": 2}
)


def set_up(rank: int, mesh: Mesh, options: dict[str, Any]) -> ReferenceElastic:
    workload = make(SMALL, "float64", "fp64")
    system = ReferenceElastic()
    state = workload.state() if rank == 0 else None
    system.setup(workload.build_for(rank), state, SPEC, mesh, options)
    return system


def goes_on_from_the_newest(rank: int, world: int) -> Any:
    """As a backend may leave it whose calls end on some members and fail on others."""
    mesh = Mesh({"replicate": world})
    system = set_up(rank, mesh, {"batch": "local"})
    batches = make(SMALL, "float64", "fp64").batch(0, world)
    system.step(batches[rank], lambda point: None)
    if rank == 1:  # has committed what the others have not
        system.committed = replace(system.committed, steps=2, samples=12)
        with torch.no_grad():
            next(iter(system.module.parameters())).fill_(7.0)
    left = Mesh({"replicate": 2}, ranks=[1, 2])
    if rank == 0:
        return None
    system.reconfigure(left, (), (0,))
    first = next(iter(system.module.parameters()))
    return system.progress(), bool((first == 7.0).all()), system.spec.lr, system.handle.replica


def test_the_member_that_is_a_step_ahead_brings_the_others_up_to_date() -> None:
    found, raised = threads(goes_on_from_the_newest, 3)
    assert raised == [None, None, None]
    one, other = found[1:]
    assert one == (12, True, pytest.approx(0.1 * 2 / 3), 0)
    assert other == (12, True, pytest.approx(0.1 * 2 / 3), 1)


def comes_back(rank: int, world: int) -> float:
    mesh = Mesh({"replicate": world})
    system = set_up(rank, mesh, {"batch": "local"})
    system.step(make(SMALL, "float64", "fp64").batch(0, world)[rank], lambda point: None)
    system.reconfigure(mesh, (), ())
    return system.spec.lr


def test_among_as_many_as_began_the_rate_is_the_one_that_was_asked() -> None:
    """0.1 * 3 / 3 is another number than 0.1."""
    assert threads(comes_back, 3) == ([0.1] * 3, [None] * 3)


@pytest.mark.parametrize("batch", ["global", "local"])
@pytest.mark.filterwarnings(
    "ignore::shardproof.impls.reference.checkpoint.errors.CheckpointWarning"
)
def test_members_that_are_started_anew_go_on_from_a_checkpoint(
    batch: BatchRule, tmp_path: Path
) -> None:
    """More and fewer ranks than saved it: progress, the rule of the batch and generators go on."""
    assert furthest_from_the_oracle(ReferenceElastic, batch, tmp_path) < 1e-12


class ForgetsTheRule(ReferenceElastic):
    def follow(self) -> None:
        """Keep the learning rate."""


class ForgetsGenerators(ReferenceElastic):
    checkpointing_type = Checkpointing


@pytest.mark.parametrize("system", [ForgetsTheRule, ForgetsGenerators])
@pytest.mark.filterwarnings(
    "ignore::shardproof.impls.reference.checkpoint.errors.CheckpointWarning"
)
def test_what_a_checkpoint_does_not_bring_back_shows(
    system: type[ReferenceElastic], tmp_path: Path
) -> None:
    assert furthest_from_the_oracle(system, "local", tmp_path) > 1e-6


def furthest_from_the_oracle(system: type[ReferenceElastic], batch: BatchRule, root: Path) -> float:
    """The largest relative error of a parameter, over steps of fresh ranks, ever others."""
    spec = replace(SMALL, global_batch=12, traits=("dropout_stateful",))
    history, worlds = History("", "", spec, SPEC, batch, 2, 4, ()), [2, 3, 3, 1]
    workload, truth = make(spec), truth_of(history, worlds)
    errors = [0.0]
    for step, now in enumerate(of_worlds(history, worlds)):
        body = partial(a_step_anew, system, workload, batch, root, step, now)
        for held in succeed(body, len(now.members)):
            for name, tensor in truth.steps[step].parameters.items():
                errors.append(float((held[name] - tensor).norm() / tensor.norm()))
    return max(errors)


def a_step_anew(
    kind: type[ReferenceElastic],
    workload: Workload,
    batch: BatchRule,
    root: Path,
    step: int,
    now: StepMembers,
    rank: int,
    world: int,
) -> dict[str, torch.Tensor]:
    """One step of fresh ranks, which load what those before them saved."""
    system, state = kind(), workload.state() if rank == 0 else None
    build, mesh = workload.build_for(rank, rank), Mesh({"replicate": world})
    system.setup(build, state, SPEC, mesh, {"batch": batch})
    if step:
        assert system.load(root) == {"data": {"step": step}, "note": "mine"}
    assert system.progress() == now.first
    system.step(workload.at(now.first, now.size).batch(step, world)[rank], lambda point: None)
    system.save(root, {"data": {"step": step + 1}, "note": "mine"})
    return {piece.name: piece.tensor.detach().clone() for piece in system.local_state("parameters")}


def alone_with_dropout() -> ReferenceElastic:
    """As much of a system as a step that is given up and a joiner need; no group."""
    system = ReferenceElastic()
    system.module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    system.optimizer = torch.optim.SGD(system.module.parameters(), lr=0.1)
    system.mesh = SimpleNamespace(device="cpu")  # type: ignore[assignment]
    system.reducer = Owed()
    system.handle = SimpleNamespace(forget=lambda: None)  # type: ignore[assignment]
    system.committed = Progress(0, 0, 1)
    return system


def test_masks_of_torch_s_own_generator_are_drawn_again_and_inherited() -> None:
    """``nn.Dropout`` has no other."""
    system, given = alone_with_dropout(), torch.ones(64, 4)
    before, held = system.remember(), system.held()
    first = system.module(given)
    assert not torch.equal(system.module(given), first)
    system.put_back(before)
    assert torch.equal(system.module(given), first)
    joiner = alone_with_dropout()
    joiner.take(held)
    assert torch.equal(joiner.module(given), first)


def test_what_a_save_still_copies_is_not_overwritten_by_what_is_taken_over() -> None:
    system = alone_with_dropout()
    own = {name: tensor.clone() for name, tensor in named_state(system.module).items()}
    seen: list[bool] = []

    def copies() -> None:
        now = named_state(system.module)
        seen.append(all(torch.equal(now[name], own[name]) for name in own))

    system.saves().savers[Path("root")] = SimpleNamespace(before_update=copies)  # type: ignore[assignment]
    system.take(alone_with_dropout().held())
    assert seen == [True]


def test_the_generator_that_rank_threads_share_is_no_rank_s_to_put_back() -> None:
    assert "torch" in alone_with_dropout().generators()
    (found,), _ = threads(lambda rank, world: alone_with_dropout().generators(), 1)
    assert found == {}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch": "all"}, "option 'batch' = 'all' is not valid"),
        ({"bucket_bytes": 0}, "option 'bucket_bytes' must be at least 1, not 0"),
        ({"compress": {"method": "onebit"}}, "'onebit': the residuals depend"),
        ({"bucket_byte": 1}, "unknown option 'bucket_byte'"),
    ],
)
def test_what_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused) as error:
        ReferenceElastic.capabilities(options)
    assert says in str(error.value)


def test_a_loss_scaler_is_refused() -> None:
    with pytest.raises(Refused, match=r"optimizer\.scaler: after an overflow all ranks must skip"):
        ReferenceElastic().setup(None, None, replace(SPEC, scaler=ScalerSpec()), None, {})  # type: ignore[arg-type]

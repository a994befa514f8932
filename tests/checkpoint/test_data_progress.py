"""What a checkpoint keeps of the data suffices: other ranks repeat no sample and lose none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import pytest
from checkpoints import FORMATS, make, put_together, train, workload
from local_ranks import succeed
from pieces import Rows

from shardproof.contract import OptimizerSpec, SamplerSpec
from shardproof.impls.reference.sampler import Sampler

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLES, TAKEN, EPOCH = 23, 2, 1


def started(rank: int, world: int) -> Sampler:
    sampler = Sampler()
    sampler.start(SamplerSpec(SAMPLES, rank, world, tail="uneven"), {})
    return sampler


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_an_epoch_goes_on_from_what_a_checkpoint_keeps(
    form: str, world: int, tmp_path: Path
) -> None:
    def saves(rank: int, ranks: int) -> list[int]:
        system = make("zero1", workload(), {"shard": 3}, rank, checkpoint={"format": form})
        train(system, workload(), 0, 1)
        sampler = started(rank, ranks)
        taken = list(sampler.epoch(EPOCH))[:TAKEN]
        system.save(tmp_path, {"data": sampler.state(TAKEN)}).wait()
        system.close()
        return taken

    def loads(rank: int, ranks: int) -> list[int]:
        system = make("zero1", workload(), {"shard": ranks}, rank)
        sampler = started(rank, ranks)
        sampler.load_state(system.load(tmp_path)["data"])
        return list(sampler.epoch(EPOCH))

    before, after = succeed(saves, 3), succeed(loads, world)
    assert [len(share) for share in before] == [TAKEN] * 3
    assert sorted(s for share in before + after for s in share) == list(range(SAMPLES))


def test_training_in_the_middle_of_an_epoch_goes_on_with_the_batch_that_follows(
    tmp_path: Path,
) -> None:
    """The step to go on with comes from the data's progress alone; the world is another one.

    SGD: AdamW makes full-size updates of the noise of another world (docs/tolerances.md).
    """
    work, spec = workload("short_epochs"), OptimizerSpec("sgd", lr=0.1, momentum=0.9)

    def straight(rank: int, world: int) -> dict[str, Rows]:
        system = make("zero1", work, {"shard": world}, rank, spec)
        train(system, work, 0, 6)
        return checkpoints.held(system)

    def saves(rank: int, world: int) -> None:
        system = make("zero1", work, {"shard": world}, rank, spec)
        train(system, work, 0, 3)
        system.save(tmp_path, {"data": work.progress(3)}).wait()
        system.close()

    def resumed(rank: int, world: int) -> dict[str, Rows]:
        system = make("zero1", work, {"shard": world}, rank, spec)
        extra: Any = system.load(tmp_path)
        assert extra["data"] == {"epoch": 1, "taken": 12}
        train(system, work, work.step_at(extra["data"]), 6)
        return checkpoints.held(system)

    succeed(saves, 3)
    whole, after = put_together(succeed(straight, 2)), put_together(succeed(resumed, 2))
    for kind, tensors in whole.items():
        for name, tensor in tensors.items():
            assert (after[kind][name] - tensor).norm() <= 1e-12 * tensor.norm(), (kind, name)

"""What is loaded equals what was saved, and training goes on as if it had never stopped."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path

import checkpoints
import pytest
import torch
from checkpoints import ADAMW, AXES, FORMATS, make, put_together, saved, train, workload
from local_ranks import succeed
from pieces import Rows
from safetensors.torch import load_file
from torch import Tensor

from shardproof.comm import Mesh
from shardproof.contract import OptimizerSpec
from shardproof.impls.mutants.declare import family
from shardproof.impls.reference.checkpoint.asynchronous import AsynchronousSharded
from shardproof.impls.reference.checkpoint.contents import Contents
from shardproof.impls.reference.checkpoint.data_file import Held
from shardproof.impls.reference.checkpoint.errors import CheckpointError
from shardproof.impls.reference.checkpoint.files import FileLayer
from shardproof.impls.reference.checkpoint.reading.checkpoint import Checkpoint
from shardproof.impls.reference.checkpoint.root import folders, newest, seems_whole
from shardproof.impls.reference.ddp import ReferenceDDP

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_equal(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> None:
    for kind, tensors in one.items():
        assert tensors.keys() == other[kind].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, other[kind][name]), f"{kind} {name}"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("strategy", AXES)
def test_training_goes_on_as_if_it_had_never_stopped(
    strategy: str, form: str, tmp_path: Path
) -> None:
    work, mesh = workload(), {AXES[strategy]: 2}

    def straight(rank: int, world: int) -> dict[str, Rows]:
        system = make(strategy, work, mesh, rank)
        train(system, work, 0, 4)
        return checkpoints.held(system)

    def resumed(rank: int, world: int) -> dict[str, Rows]:
        system = make(strategy, work, mesh, rank)
        extra = system.load(tmp_path)
        assert extra == {"data": {"epoch": 1}, "note": ["x", None, 0.1]}
        assert system.steps_done == 2
        train(system, work, system.steps_done, 4)
        return checkpoints.held(system)

    saved(tmp_path, strategy, mesh, 2, form, work=work)
    assert_equal(put_together(succeed(straight, 2)), put_together(succeed(resumed, 2)))


@pytest.mark.parametrize("form", FORMATS)
def test_each_element_is_written_once(form: str, tmp_path: Path) -> None:
    """Parameters and moments of DDP, which every rank has, take no more room than one copy."""
    whole = saved(tmp_path, "ddp", {"replicate": 4}, format_=form)
    needed = sum(t.numel() * t.element_size() for kind in whole.values() for t in kind.values())
    with Checkpoint.open(tmp_path) as checkpoint:
        written = [
            e.end - e.begin for f in checkpoint.files.values() for e in f.entries if e.kind != "rng"
        ]
        assert sum(written) == needed
        sizes = [file.bytes for file in checkpoint.files.values()]
        assert checkpoint.manifest.about.mesh == {"replicate": 4}
        assert checkpoint.manifest.about.optimizer == json.loads(
            json.dumps(checkpoint.manifest.about.optimizer)
        )
    if form != "full":
        assert len(sizes) == 4 and max(sizes) < 2 * min(sizes)


def test_full_has_the_names_of_the_module_for_the_package_safetensors(tmp_path: Path) -> None:
    whole = saved(tmp_path, "zero3", {"shard": 3}, 2, "full")
    folder = newest(tmp_path)
    assert folder is not None
    model = load_file(folder / "model.safetensors")
    assert_equal({"parameters": model}, {"parameters": whole["parameters"] | whole["buffers"]})
    assert_equal(
        {"optimizer": load_file(folder / "optimizer.safetensors")},
        {"optimizer": whole["optimizer"]},
    )


def test_the_package_safetensors_reads_every_file_of_a_sharded_one(tmp_path: Path) -> None:
    whole = saved(tmp_path, "zero2", {"shard": 2})
    folder = newest(tmp_path)
    assert folder is not None
    seen = 0
    with Checkpoint.open(folder) as checkpoint:
        for file in checkpoint.files.values():
            tensors = load_file(folder / file.name)
            for entry in file.entries:
                if entry.kind not in whole:
                    continue
                full = whole[entry.kind][entry.name]
                if entry.place.flat_range is None:
                    part = full[tuple(slice(*bounds) for bounds in entry.place.slices or ())]
                else:
                    part = full.reshape(-1)[slice(*entry.place.flat_range)]
                assert torch.equal(tensors[entry.key], part), entry.key
                seen += 1
    assert seen > 20


def test_asynchronous_keeps_the_moment_of_the_save(tmp_path: Path) -> None:
    """Training goes on in place while a slow disk writes; the step, too, is that of the save."""
    work = workload()

    def body(rank: int, world: int) -> dict[str, Rows]:
        system = make("ddp", work, {"replicate": 2}, rank)
        train(system, work, 0, 2)
        found = checkpoints.held(system)
        extra = {"history": [1]}
        saver = system.saves().savers[tmp_path] = AsynchronousSharded(tmp_path, system.mesh)
        saver.save(Contents(system).state(extra))
        extra["history"].append(2)
        train(system, work, 2, 4)
        saver.wait()
        return found

    before = put_together(succeed(body, 2))

    def loaded(rank: int, world: int) -> dict[str, Rows]:
        system = make("ddp", work, {"replicate": 2}, rank)
        assert system.load(tmp_path) == {"history": [1]}
        assert system.steps_done == 2
        return checkpoints.held(system)

    assert_equal(before, put_together(succeed(loaded, 2)))


def test_one_snapshot_at_a_time_and_its_memory_is_kept(tmp_path: Path) -> None:
    work = workload()

    def body(rank: int, world: int) -> list[int]:
        system = make("zero1", work, {"shard": 2}, rank)
        saver = system.saves().savers[tmp_path] = AsynchronousSharded(tmp_path, system.mesh, keep=9)
        held = []
        for step in range(3):
            train(system, work, step, step + 1)
            saver.save(Contents(system).state({}))
            held.append({copy.data_ptr() for copy in saver._copies if copy.numel()})
        saver.wait()
        assert held[1] == held[2] and held[0] <= held[1]
        own = sum(
            p.tensor.numel() * p.tensor.element_size()
            for kind in checkpoints.COMPARED
            for p in system.local_state(kind)  # type: ignore[arg-type]
        )
        copied = sum(c.numel() * c.element_size() for c in saver._copies) - 5056
        assert copied <= own
        return [one.step for one in folders(tmp_path) if one.is_committed]

    assert succeed(body, 2)[0] == [3, 2, 1]


def test_a_copy_that_is_interrupted_commits_nothing_and_leaves_no_writer(tmp_path: Path) -> None:
    class Interrupted(AsynchronousSharded):
        def room(self, tensors: Sequence[Held]) -> list[Held]:
            raise KeyboardInterrupt

    def body(rank: int, world: int) -> None:
        system = make("zero1", workload(), {"shard": 1}, rank)
        saver = Interrupted(tmp_path, system.mesh)
        with pytest.raises(KeyboardInterrupt):
            saver.save(Contents(system).state({}))
        writer = saver.under_way
        assert writer is not None
        with pytest.raises(CheckpointError, match="the copy of the state was interrupted"):
            saver.wait()
        writer.join(60.0)
        assert not writer.is_alive()

    succeed(body, 1)
    assert newest(tmp_path) is None


@pytest.mark.parametrize("form", FORMATS)
def test_the_newest_stay_and_the_last_good_one_always(form: str, tmp_path: Path) -> None:
    work = workload()

    def body(rank: int, world: int) -> list[tuple[list[int], list[int]]]:
        system = make("zero1", work, {"shard": 2}, rank)
        saver = FORMATS[form](tmp_path, system.mesh, keep=2)
        seen = []
        for step in range(5):
            train(system, work, step, step + 1)
            saver.save(Contents(system).state({}))
            saver.wait()
            if rank == 0:
                if step == 2:  # of steps 2 and 3, the newer one breaks
                    last = newest(tmp_path)
                    assert last is not None
                    data = sorted(last.glob("*.safetensors"))[0]
                    data.write_bytes(data.read_bytes()[:-1])
                found = folders(tmp_path)
                seen.append(([one.step for one in found], [seems_whole(o.path) for o in found]))
            saver.together.everyone(None)
        return seen

    seen = succeed(body, 2)[0]
    assert [steps for steps, _ in seen[:3]] == [[1], [2, 1], [3, 2]]
    # The damaged one of step 3 does not count: step 2 stays until two newer ones are whole.
    assert [steps for steps, _ in seen[3:]] == [[4, 3, 2], [5, 4]]
    assert all(any(whole) for _, whole in seen)


def test_another_run_does_not_save_into_the_same_folder(tmp_path: Path) -> None:
    saved(tmp_path, "ddp", {"replicate": 2})
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match="this checkpoint belongs to run") as error:
        saved(tmp_path, "ddp", {"replicate": 2}, steps=3)
    assert "(rank 0)" in str(error.value)
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


def test_who_loads_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    work = workload()
    saved(tmp_path, "ddp", {"replicate": 2}, work=work)

    def body(rank: int, world: int) -> None:
        system = make("zero3", work, {"shard": 3}, rank)
        system.load(tmp_path)
        with pytest.raises(
            CheckpointError, match="this checkpoint already holds step 2 of this run"
        ):
            system.save(tmp_path, {})
        train(system, work, 2, 3)
        system.save(tmp_path, {}).wait()

    succeed(body, 3)
    assert [one.step for one in folders(tmp_path)] == [3, 2]


def test_another_optimizer_is_refused_before_anything_changes(tmp_path: Path) -> None:
    work = workload()
    saved(tmp_path, "ddp", {"replicate": 2}, work=work)

    def body(rank: int, world: int) -> None:
        system = make("ddp", work, {"replicate": 2}, rank, OptimizerSpec("sgd"))
        with pytest.raises(
            CheckpointError, match="saved with optimizer 'adamw', but this system trains with"
        ):
            system.load(tmp_path)

    succeed(body, 2)


@pytest.mark.parametrize("form", FORMATS)
def test_the_generator_of_each_rank_comes_back(form: str, tmp_path: Path) -> None:
    work = workload()

    def save(rank: int, world: int) -> None:
        system = make("naive_ddp", work, {"replicate": 1}, rank, ADAMW)
        torch.manual_seed(5)
        torch.rand(3)
        saver = FORMATS[form](tmp_path, system.mesh)
        saver.save(Contents(system).state({}))
        saver.wait()

    succeed(save, 1)
    drawn = torch.rand(4)

    def load(rank: int, world: int) -> Tensor:
        torch.manual_seed(6)
        system = make("naive_ddp", work, {"replicate": 1}, rank, ADAMW)
        system.load(tmp_path)
        return torch.rand(4)

    assert torch.equal(succeed(load, 1)[0], drawn)


def test_a_lost_piece_is_told_before_anything_is_written(tmp_path: Path) -> None:
    work = workload()

    def body(rank: int, world: int) -> str:
        system = make("zero3", work, {"shard": 2}, rank)
        train(system, work, 0, 1)
        state = Contents(system).state({})
        if rank:
            del state.pieces["optimizer"][2]  # type: ignore[attr-defined]
        saver = FORMATS["sharded"](tmp_path, Mesh({"shard": 2}))
        with pytest.raises(CheckpointError) as error:
            saver.save(state)
        return str(error.value)

    assert "lies in no part" in succeed(body, 2)[1]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"when": object()}, "cannot be written as JSON"),
        ({"long": "x" * 9_000_000}, "bytes of JSON"),
        ({"many": [0] * 600_000}, "values of JSON"),
    ],
    ids=["object", "long", "many"],
)
def test_what_could_not_be_read_is_not_written(
    form: str, extra: dict[str, object], words: str, tmp_path: Path
) -> None:
    work = workload(layers=1)

    def body(rank: int, world: int) -> None:
        system = make("ddp", work, {"replicate": 2}, rank)
        state = Contents(system).state(extra if rank == 0 else {})
        with pytest.raises(CheckpointError, match=words):
            FORMATS[form](tmp_path, system.mesh).save(state)

    succeed(body, 2)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("form", FORMATS)
def test_a_disk_that_fills_on_one_rank_fails_all_and_leaves_the_last_one(
    form: str, tmp_path: Path
) -> None:
    """The attempt is removed, so that its room is there again."""
    work = workload(layers=1)

    class Fills(FileLayer):
        left = 10_000

        def write(self, path: Path, file: int, data: memoryview) -> None:
            self.left -= len(data)
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            super().write(path, file, data)

    def body(rank: int, world: int) -> str:
        system = make("zero3", work, {"shard": 2}, rank)
        train(system, work, 0, 1)
        saver = FORMATS[form](tmp_path, system.mesh)
        saver.save(Contents(system).state({}))
        saver.wait()
        train(system, work, 1, 2)
        if rank == world - 1 or form == "full":
            saver.layer = Fills()
        with pytest.raises(CheckpointError) as error:
            saver.save(Contents(system).state({}))
            saver.wait()
        saver.together.everyone(None)
        return str(error.value)

    said = succeed(body, 2)
    assert said[0] == said[1] and "No space left on device" in said[0]
    assert "free space on the disk of this path, or name another folder; committed" in said[0]
    assert [one.step for one in folders(tmp_path)] == [1]
    with Checkpoint.open(tmp_path) as checkpoint:
        assert not list(checkpoint.verify())


@pytest.mark.parametrize("part", [FileLayer, AsynchronousSharded, Checkpoint])
def test_a_fault_in_a_part_is_planted_wherever_the_part_is_used(part: type) -> None:
    """What the formats share is a part of each of them."""

    class Fault(part):  # type: ignore[misc]
        """Does not what it should"""

    fault = family(ReferenceDDP)("made", killed_by=("equivalence",), says="x")(Fault)
    planted = fault.mutant.implementation
    made = [getattr(planted.checkpointing_type, f"{form}_type") for form in FORMATS]
    expected = {
        FileLayer: [one.layer_type is Fault for one in made],
        AsynchronousSharded: [made[-1] is Fault],
        Checkpoint: [planted.checkpointing_type.loading_type.reader_type is Fault],
    }
    assert all(expected[part]) and issubclass(planted, ReferenceDDP)

"""DeepSpeed's own checkpoints and its universal ones under the contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from local_ranks import processes
from upstream_checkpoints import EXTRA, workload

from shardproof import registry
from shardproof.comm import Mesh
from shardproof.contract import OptimizerSpec, Refused

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

SPEC = OptimizerSpec("adamw", lr=1e-2, weight_decay=0.1)


def state(system: Any) -> Any:
    """Name, place and elements of what this rank holds; Adam's counters once."""
    return {
        kind: sorted(
            [p.name, str(p.slices or p.flat_range), p.tensor.tolist()]
            for p in system.local_state(kind)
        )
        for kind in checkpoints.COMPARED
    }


def in_processes(rank: int, world: int, root: str, name: str, form: str, does: str) -> Any:
    """Train two steps and save, or load; then train two more."""
    torch.set_num_threads(1)
    work = workload(dtype="float32")
    kind = registry.load(f"deepspeed/{name}")
    system, axis = kind(), kind.capabilities({}).axes[0]
    gets = rank == 0 or kind.capabilities({}).initial_state == "everywhere"
    options: dict[str, Any] = {"checkpoint": {"format": form}}
    if name == "zero3":
        options["zero_optimization"] = {"stage3_param_persistence_threshold": 0}
    system.setup(
        work.build_for(rank), work.state() if gets else None, SPEC, Mesh({axis: world}), options
    )
    system.mesh = Mesh({axis: world})
    if does == "save":
        checkpoints.train(system, work, 0, 2)
        before = state(system)
        system.save(Path(root), EXTRA)
        assert state(system) == before
        checkpoints.train(system, work, 2, 4)
    else:
        assert system.load(Path(root)) == EXTRA
        before = state(system)
        checkpoints.train(system, work, 2, 4)
    after = state(system)
    system.close()
    return [before, after]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("zero0", "deepspeed"),
        ("zero1", "deepspeed"),
        ("zero2", "deepspeed"),
        ("zero3", "deepspeed"),
        ("pipeline", "deepspeed"),
        ("zero1", "universal"),
        ("zero2", "universal"),
        ("zero3", "universal"),
    ],
)
def test_training_goes_on_as_if_it_had_never_stopped(name: str, form: str, tmp_path: Path) -> None:
    saved = run(tmp_path, 2, name, form, "save")
    assert saved == run(tmp_path, 2, name, form, "load")


def run(place: Path, world: int, name: str, form: str, does: str) -> list[Any]:
    """What each rank held at the checkpoint, and two steps later."""
    (folder := place / does).mkdir()
    return processes(in_processes, world, folder, False, str(place / "root"), name, form, does)


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_universal_checkpoints_hold_what_was_saved_in_another_world(
    name: str, tmp_path: Path
) -> None:
    """Its own fail there: stage 3, for want of a file, without a word."""
    saved = whole(run(tmp_path, 2, name, "universal", "save"))
    assert saved == whole(run(tmp_path, 3, name, "universal", "load"))
    (tmp_path / "load").rename(tmp_path / "before")
    said = "raised AssertionError" if name == "zero3" else "Automatic adjustment of ZeRO's optim"
    with pytest.raises(AssertionError, match=said):
        run(tmp_path, 3, name, "deepspeed", "load")


def whole(ranks: list[Any]) -> dict[str, Any]:
    """By name, the elements at the checkpoint, in order of ranks: flat shards, or one copy."""
    found: dict[str, Any] = {}
    for before, _ in ranks:
        for pieces in before.values():
            for name, place, elements in pieces:
                parts = found.setdefault(name, {})
                assert parts.setdefault(place, elements) == elements, name
    return {name: flat(parts) for name, parts in found.items()}


def flat(parts: dict[str, Any]) -> list[float]:
    """Elements of all parts, one after the other."""
    tensors = [torch.tensor(parts[place]) for place in sorted(parts, key=first)]
    return torch.cat([tensor.flatten() for tensor in tensors]).tolist()


def first(place: str) -> int:
    """The first number in the text of a place."""
    digits = "".join(c if c.isdigit() else " " for c in place).split()
    return int(digits[0]) if digits else 0


def test_what_has_no_partitions_has_no_universal_form() -> None:
    for name in ("zero0", "pipeline"):
        kind = registry.load(f"deepspeed/{name}")
        with pytest.raises(Refused, match=r"converts only checkpoints of ZeRO .* valid: deepspeed"):
            kind.capabilities({"checkpoint": {"format": "universal"}})

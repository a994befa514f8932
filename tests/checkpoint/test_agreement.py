"""Who writes what is agreed once, and again as soon as any rank holds something else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FORMATS, make, train, workload
from local_ranks import succeed

from shardproof.comm import Mesh
from shardproof.contract import Piece
from shardproof.impls.reference.checkpoint.agreement import State, Told
from shardproof.impls.reference.checkpoint.contents import Contents
from shardproof.impls.reference.checkpoint.errors import CheckpointError
from shardproof.impls.reference.checkpoint.manifest import About
from shardproof.impls.reference.checkpoint.reading.checkpoint import Checkpoint
from shardproof.impls.reference.checkpoint.reading.regions import Place
from shardproof.impls.reference.checkpoint.saver import Saver
from shardproof.impls.reference.checkpoint.sharded import Sharded

pytestmark = pytest.mark.usefixtures("one_thread")


def half(name: str, rank: int, value: float) -> Piece:
    """Elements ``2 * rank`` and the next of four."""
    bounds = (2 * rank, 2 * rank + 2)
    return Piece(name, (4,), torch.full((2,), value), flat_range=bounds)


def save(saver: Saver, step: int, *pieces: Piece) -> list[Any]:
    """Save parameters; what this rank told the others while they agreed."""
    told: list[Any] = []
    everyone = saver.together.everyone

    def heard(value: Any) -> list[Any]:
        told.append(value[0] if isinstance(value, tuple) else value)
        return everyone(value)

    saver.together.everyone = heard  # type: ignore[method-assign]
    try:
        saver.save(State({"parameters": pieces}, About(step, "zero3", {"shard": 2})))
        saver.wait()
    finally:
        saver.together.everyone = everyone  # type: ignore[method-assign]
    return [one for one in told if isinstance(one, Told | list)]


def tables(told: Sequence[Any]) -> list[int | None]:
    """Pieces in each message; ``None``: those of the last save."""
    found = [one.table if isinstance(one, Told) else one for one in told]
    return [None if table is None else len(table) for table in found]


def names(root: Path) -> dict[str, float]:
    """Parameters of the newest checkpoint, and the sum of each."""
    with Checkpoint.open(root) as checkpoint:
        assert not list(checkpoint.verify())
        found = {}
        for name in checkpoint.names("parameters"):
            target = torch.empty(4)
            whole = Place((4,), ((0, 4),), None)
            checkpoint.fill(target, checkpoint.plan(whole, ("parameters", name)))
            found[name] = float(target.sum())
        return found


@pytest.mark.parametrize("form", FORMATS)
def test_pieces_are_told_once(form: str, tmp_path: Path) -> None:
    """Where nothing but values changes, the second save exchanges one short message."""

    def body(rank: int, world: int) -> list[list[int | None]]:
        saver = FORMATS[form](tmp_path, Mesh({"shard": 2}))
        told = [save(saver, step, half("w", rank, float(step))) for step in (1, 2, 3)]
        return [tables(one) for one in told]

    assert succeed(body, 2) == [[[1], [None], [None]]] * 2
    assert names(tmp_path) == {"w": 12.0}


def test_what_one_rank_holds_anew_is_told_by_all(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> list[list[int | None]]:
        saver, told = Sharded(tmp_path, Mesh({"shard": 2}), keep=9), []
        more = Piece.whole("v", torch.full((4,), 3.0))
        pieces = [half("w", rank, 1.0)]
        told.append(save(saver, 1, *pieces))
        told.append(save(saver, 2, *pieces, *([more] if rank else [])))
        saver.together.everyone(None)
        assert names(tmp_path) == {"w": 4.0, "v": 12.0}
        saver.together.everyone(None)
        # Rank 0 gives up all that it has, rank 1 takes it over.
        whole = [Piece.whole("w", torch.full((4,), 2.0))]
        told.append(save(saver, 3, *(whole if rank else [])))
        saver.together.everyone(None)
        assert names(tmp_path) == {"w": 8.0}
        return [tables(one) for one in told]

    first, second = succeed(body, 2)
    assert first == [[1], [None, 1], [0]]
    assert second == [[1], [2, 2], [1]]


def test_a_save_that_failed_leaves_no_choice_behind(tmp_path: Path) -> None:
    """Nor does a rank that forgot its last save write what the others do not expect."""

    def body(rank: int, world: int) -> list[list[int | None]]:
        saver, told = Sharded(tmp_path, Mesh({"shard": 2}), keep=9), []
        both = half("v", rank, 1.0), half("w", rank, 1.0)
        told.append(save(saver, 1, *both))
        with pytest.raises(CheckpointError, match="lies in no part"):
            save(saver, 2, *both[rank:])
        told.append(save(saver, 2, *both))
        if rank:
            saver.agreed = None
        told.append(save(saver, 3, *both))
        return [tables(one) for one in told]

    first, second = succeed(body, 2)
    assert first == [[2], [2], [None, 2]]
    assert second == [[2], [2], [2, 2]]
    assert names(tmp_path) == {"v": 4.0, "w": 4.0}


@pytest.mark.parametrize("form", FORMATS)
def test_state_that_comes_with_the_first_step_is_saved(form: str, tmp_path: Path) -> None:
    work = workload(layers=1)

    def body(rank: int, world: int) -> list[bool]:
        system = make("zero1", work, {"shard": 2}, rank)
        saver = FORMATS[form](tmp_path, system.mesh)
        found = []
        for step in range(2):
            saver.save(Contents(system).state({}))
            saver.wait()
            with Checkpoint.open(tmp_path) as checkpoint:
                found.append(bool(checkpoint.names("optimizer")))
            train(system, work, step, step + 1)
        return found

    assert succeed(body, 2) == [[False, True]] * 2

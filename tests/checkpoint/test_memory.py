"""Memory of saving and loading: less than one largest tensor beside the state."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make, train, workload
from local_ranks import succeed

from shardproof.impls.reference.checkpoint.agreement import Agreed
from shardproof.impls.reference.checkpoint.data_file import Held, blocks_of
from shardproof.impls.reference.checkpoint.files import FileLayer
from shardproof.impls.reference.checkpoint.manifest import About, Manifest
from shardproof.impls.reference.checkpoint.reading.checkpoint import Checkpoint
from shardproof.impls.reference.checkpoint.reading.regions import Place
from shardproof.impls.reference.checkpoint.root import Branch, Root
from shardproof.impls.reference.checkpoint.writing import write_pair
from shardproof.ledgers.memory.recorder import MemoryLedger

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"width": 512, "layers": 1}
#: Strategy -> mesh: whole tensors, ranges of them, and columns that are not contiguous.
MESHES = {"ddp": {"replicate": 1}, "zero3": {"shard": 2}, "tensor": {"tensor": 2}}


class Measured:
    """Bytes above those at the end: of storages of one rank, and of Python and NumPy of all."""

    def __init__(self) -> None:
        self.phase = "before"
        self.ledger = MemoryLedger(lambda: self.phase)

    def __enter__(self) -> Measured:
        self.ledger.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.ledger.__exit__(*error)

    def above(self, action: Any) -> int:
        """What the storages of this rank took above what they are when ``action`` has ended."""
        self.phase = "measured"
        action()
        self.ledger.mark("after")
        self.phase = "over"
        after = sum(self.ledger.log.bytes("after").values())
        return self.ledger.log.peak("measured", self.ledger.step).bytes - after


@pytest.mark.parametrize("strategy", MESHES)
def test_a_save_and_a_load_hold_less_than_one_tensor_more(strategy: str, tmp_path: Path) -> None:
    work, mesh = workload(**SIZES), MESHES[strategy]
    largest = max(tensor.nbytes for tensor in work.state().values())

    def save(rank: int, world: int) -> int:
        with Measured() as measured:
            system = make(strategy, work, mesh, rank)
            train(system, work, 0, 1)
            tracemalloc.reset_peak()
            return measured.above(lambda: system.save(tmp_path, {}))

    def load(rank: int, world: int) -> int:
        with Measured() as measured:
            system = make(strategy, work, mesh, rank)
            tracemalloc.reset_peak()
            return measured.above(lambda: system.load(tmp_path))

    world = math.prod(mesh.values())
    tracemalloc.start()
    try:
        for body in (save, load):
            storages = succeed(body, world)
            now, peak = tracemalloc.get_traced_memory()
            print(f"{strategy} {body.__name__}: storages {storages}, Python {peak - now}")
            # Of all ranks together, which share one Python.
            assert max(storages) + (peak - now) / world < largest
    finally:
        tracemalloc.stop()


def test_blocks_of_what_is_not_contiguous_follow_one_another() -> None:
    whole = torch.arange(3.0 * 700 * 2000).reshape(3, 700, 2000)
    for tensor in (whole[:, :, 1:1999], whole.transpose(0, 2), whole[1], whole[:, 0, 0]):
        blocks = [bytes(block) for block in blocks_of(tensor)]
        assert b"".join(blocks) == tensor.contiguous().numpy().tobytes()
        assert max(map(len, blocks)) <= 4 << 20


def test_64_ranks_with_800_shards_each(tmp_path: Path) -> None:
    """More tensors than one file may describe; an index of each rank has few."""
    ranks, names = 64, 800
    layer, root = FileLayer(), Root(FileLayer(), tmp_path, Branch())
    folder, listed = root.begin(1), []
    for rank in range(ranks):
        bounds = (rank, rank + 1)
        held = [
            Held(f"w{n}", "parameters", f"w{n}", Place((ranks,), None, bounds), 0, rank, one)
            for n, one in enumerate(torch.full((names, 1), float(rank)))
        ]
        listed.append(write_pair(layer, Agreed(folder, ()), f"rank-{rank:05}", held))
    about = About(1, "zero3", {"shard": ranks})
    files = tuple(one for one in listed if one is not None)
    root.commit(folder, Manifest("sharded", folder.name, root.branch.run, (), about, files), 1)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert len(checkpoint.copies) == names
        target = torch.empty(ranks)
        name = ("parameters", "w7")
        checkpoint.fill(target, checkpoint.plan(Place((ranks,), ((0, ranks),), None), name))
    assert target.tolist() == list(range(ranks))

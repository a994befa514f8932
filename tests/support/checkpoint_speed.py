"""Times of reference checkpoints beside those of torch.distributed.checkpoint, over 4 gloo ranks.

    python tests/support/checkpoint_speed.py FOLDER [--millions 200] [--tensors 50] [--rounds 7]

Both hold the same: ``--tensors`` fp32 tensors, of which each rank has a quarter; ours as flat
ranges (ZeRO-3's layout), torch's as DTensors cut along dim 0 (FSDP2's).  In each round they take
turns, in another order each time; a time is that of the slowest rank, from a barrier to a barrier.
On a machine that others use, CPU seconds tell more.

    save     sharded, with fsync on both sides
    load     into tensors that are there, from the system's cache on both sides; ours is verified
    stall    until an asynchronous save returns; the copies' memory was made by one before
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardproof.comm import Mesh
from shardproof.contract import OptimizerSpec, Piece
from shardproof.impls.reference.checkpoint.agreement import State
from shardproof.impls.reference.checkpoint.manifest import About
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.engine.options import Checkpoints
from shardproof.impls.reference.engine.precision import Precision
from shardproof.impls.reference.parts.reducers import Reducer

RANKS = 4


class Holder(Engine):
    """A system that trains nothing: it holds ``pieces``."""

    strategy = "zero3"
    scaler = None
    masters = None

    def __init__(self, pieces: list[Piece], mesh: Mesh) -> None:
        self.own, self.mesh, self.spec = pieces, mesh, OptimizerSpec()
        self.checkpoints, self.precision = Checkpoints(), Precision()
        self.aliases: dict[str, str] = {}
        self.built = {piece.name: piece.tensor.dtype for piece in pieces}
        self.module, self.host, self.reducer = nn.Module(), None, Reducer()
        self.optimizer = SimpleNamespace(param_groups=[], state={})  # type: ignore[assignment]
        self.savers = {}

    @classmethod
    def capabilities(cls, options: Any) -> Any:
        raise NotImplementedError

    def transform(self, module: nn.Module, mesh: Mesh, options: Any) -> Any:
        raise NotImplementedError

    def held_pieces(self, kind: Any) -> list[Piece]:
        return self.own if kind == "parameters" else []

    def settle(self, kind: Any) -> None:
        pass


def timed(action: Callable[[], Any]) -> tuple[tuple[float, float], Any]:
    """Seconds of the slowest rank and CPU seconds of all; what ``action`` returned."""
    dist.barrier()
    began, used = time.perf_counter(), time.process_time()
    result = action()
    wall, cpu = torch.tensor(time.perf_counter() - began), torch.tensor(time.process_time() - used)
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return (wall.item(), cpu.item()), result


def program(rank: int, port: int, options: argparse.Namespace, out: Path) -> None:
    """What each rank does."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=RANKS)
    mesh, device_mesh = Mesh({"shard": RANKS}), init_device_mesh("cpu", (RANKS,))
    numel = options.millions * 1_000_000 // options.tensors // RANKS * RANKS
    own = (rank * numel // RANKS, (rank + 1) * numel // RANKS)
    tensors = [torch.randn(own[1] - own[0]) for _ in range(options.tensors)]
    pieces = [Piece(f"w{n}", (numel,), t, flat_range=own) for n, t in enumerate(tensors)]
    theirs = {
        f"w{n}": DTensor.from_local(t, device_mesh, [Shard(0)]) for n, t in enumerate(tensors)
    }
    system = Holder(pieces, mesh)
    behind = Engine.asynchronous_type(options.folder / "behind", mesh, 1)

    def state(step: int) -> State:
        return State({"parameters": pieces}, About(step, "zero3", {"shard": RANKS}))

    def own_save() -> Path:
        return Engine.sharded_type(options.folder / "own", mesh, 1).save(state(1))

    def own_load() -> None:
        system.load(options.folder / "own")

    steps = iter(range(1, 1000))

    def own_stall() -> None:
        behind.save(state(next(steps)))

    # Of its own: a thread makes collective calls, in no order with those that time it.
    group = dist.new_group(backend="gloo")

    def dcp_stall() -> Any:
        folder = str(options.folder / "behind-dcp")
        return dcp.async_save(theirs, checkpoint_id=folder, process_group=group)

    actions: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "save": (own_save, lambda: dcp.save(theirs, checkpoint_id=str(options.folder / "dcp"))),
        "load": (own_load, lambda: dcp.load(theirs, checkpoint_id=str(options.folder / "dcp"))),
        "stall": (own_stall, dcp_stall),
    }
    found: dict[str, tuple[list[tuple[float, float]], list[tuple[float, float]]]] = {}
    for name, (ours, other) in actions.items():
        for number in range(options.rounds + 1):
            order = ((0, ours), (1, other))
            for side, action in order if number % 2 else order[::-1]:
                if rank == 0 and name == "save":
                    shutil.rmtree(options.folder / ("own", "dcp")[side], ignore_errors=True)
                expected = [t[:1000].clone() for t in tensors]
                if name == "load":
                    for tensor in tensors:
                        tensor.zero_()
                seconds, result = timed(action)
                if name == "load":
                    same = [
                        torch.equal(a, t[:1000]) for a, t in zip(expected, tensors, strict=True)
                    ]
                    assert all(same)
                if name == "stall":
                    behind.wait() if side == 0 else result.result()
                    dist.barrier()
                if number:  # the first one warms up
                    found.setdefault(name, ([], []))[side].append(seconds)
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--millions", type=int, default=200)
    parser.add_argument("--tensors", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    out = options.folder / "times.json"
    try:
        mp.spawn(program, (port, options, out), nprocs=RANKS)  # type: ignore[no-untyped-call]
        found = json.loads(out.read_text())
    finally:
        shutil.rmtree(options.folder)
    middle = {
        (name, side, kind): statistics.median(one[kind] for one in sides[side])
        for name, sides in found.items()
        for side in (0, 1)
        for kind in (0, 1)
    }
    for name, (ours, theirs) in found.items():
        ratios = sorted(a[0] / b[0] for a, b in zip(ours, theirs, strict=True))
        both = [
            f"{middle[name, side, 0]:.3f} s (CPU {middle[name, side, 1]:.3f} s)" for side in (0, 1)
        ]
        print(f"{name}: {' beside '.join(both)}, ratios {' '.join(f'{r:.2f}' for r in ratios)}")
    share = [middle["stall", 0, kind] / middle["save", 0, kind] for kind in (0, 1)]
    print(f"stall: {share[0]:.1%} of a synchronous save (CPU: {share[1]:.1%})")


if __name__ == "__main__":
    main()

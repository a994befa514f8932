"""The program that torchrun starts: ``torchrun ... -m tools.studies.elastic.worker FOLDER``.

Every process begins here, also those that are started anew after another one was killed: it meets
the others, loads the last checkpoint if there is one, and trains on.  Each step is saved, and the
rename of a manifest commits it.  ``records.py`` says what a rank writes.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import psutil
import torch
import torch.distributed as dist

from shardproof import registry, tensor_bytes, workloads
from shardproof.comm import Mesh
from shardproof.contract import Kind
from shardproof.impls.reference.checkpoint.errors import CheckpointError
from shardproof.impls.reference.checkpoint.root import newest
from tools.studies.elastic import records
from tools.studies.elastic.history import SPLITS, At, History

#: The environment variable that tells a member's number.
MEMBER = "SHARDPROOF_MEMBER"
#: Seconds that ranks wait for one that halts: who is killed wakes them at once.
PATIENCE = 600
SYSTEM = "reference/elastic"
KINDS: tuple[Kind, ...] = ("parameters", "optimizer", "buffers")
_PAUSE = 0.02


class Worker:
    """One rank of one generation."""

    def __init__(self, folder: Path) -> None:
        plan = json.loads((folder / records.PLAN).read_text())
        self.folder, self.member = folder, int(os.environ[MEMBER])
        self.history = History.from_dict(plan["history"])
        self.checkpoints = folder / records.CHECKPOINTS
        watch = threading.Thread(target=_end_with, args=plan["driver"], daemon=True)
        watch.start()

    def run(self) -> int:
        """Meet, load and train; return the exit code."""
        self.meet()
        system, history, world = self.system, self.history, self.world
        for step in range(system.committed.steps, history.steps):
            self.halt(step, "before")
            self.step = step
            size = history.batch_size(world, system.committed.began or world)
            first = system.progress()
            batch = self.workload.at(first, size).batch(step, world)[self.rank]
            result = system.step(batch, lambda point: None)
            samples = [int(i) for micro in batch.micro_batches for i in micro.sample_ids]
            line = {"step": step, "samples": samples, "loss": float(result.loss)}
            self.write(**line, digests=self.digests())
            self.halt(step, "unsaved")
            try:
                system.save(self.checkpoints, {"data": {"step": step + 1}}).wait()
            except CheckpointError as error:
                self.write(refused=str(error))
                print(f"member {self.member}: {error}", file=sys.stderr, flush=True)
                return 1
            self.write(committed=step)
        tensor_bytes.dump(self.generation / f"rank{self.rank}.end", self.holds())
        dist.barrier()
        system.close()
        dist.destroy_process_group()
        return 0

    def meet(self) -> None:
        """Join the others, wait until all expected members are present, and load the committed
        state.
        """
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        told: list[Any] = [None]
        if self.rank == 0:
            told = [(records.new_generation(self.folder), self.is_committed())]
        dist.broadcast_object_list(told)
        self.generation, has_checkpoint = told[0]
        self.workload = workloads.make(self.history.workload)
        self.system = cast("Any", registry.load(SYSTEM)())
        self.system.setup(
            self.workload.build_for(self.rank, self.rank),
            self.workload.state() if self.rank == 0 else None,
            self.history.optimizer,
            Mesh({"replicate": self.world}),
            {"batch": self.history.batch, "bucket_bytes": 4000},
        )
        if has_checkpoint:
            self.system.load(self.checkpoints)
        self.step = self.system.committed.steps
        self.system.module.register_forward_pre_hook(lambda *_: self.halt(self.step, "inside"))
        began = {"member": self.member, "world": self.world, "loaded": self.step}
        self.write(**began, pid=os.getpid(), created=psutil.Process().create_time())
        _wait_for(self.generation / records.GO)

    def is_committed(self) -> bool:
        """Whether there is a committed checkpoint in the folder."""
        return self.checkpoints.is_dir() and newest(self.checkpoints) is not None

    def halt(self, step: int, at: At) -> None:
        """Stop if the next event must find this member here."""
        halts, history = self.folder / records.HALTS, self.history
        for number, event in enumerate(history.events):
            go, over = (halts / f"{number}.{end}" for end in ("go", "over"))
            if event.what in SPLITS and history.newcomer(event) == self.member:
                if step > event.step:  # the old half tries to save first
                    _wait_for(over)
            elif not go.exists():
                if (history.halting(number), event.step, event.at) == (self.member, step, at):
                    (halts / f"{number}.reached").touch()
                    _wait_for(go)
                return

    def write(self, **line: Any) -> None:
        """Add a line to the rank's record."""
        records.append(self.generation / f"rank{self.rank}.jsonl", line)

    def holds(self) -> dict[str, dict[str, torch.Tensor]]:
        """All state of the rank, by kind and name."""
        return {
            kind: {piece.name: piece.tensor.detach() for piece in self.system.local_state(kind)}
            for kind in KINDS
        }

    def digests(self) -> dict[str, str]:
        """Kind and name -> digest."""
        every = ((f"{k} {n}", tensor) for k, of in self.holds().items() for n, tensor in of.items())
        return {name: tensor_bytes.digest(tensor) for name, tensor in every}


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(_PAUSE)


def _end_with(pid: int, created: float) -> None:
    """End this process when the driver has ended; a killed agent does not end its workers."""
    while records.is_alive(pid, created):
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(Worker(Path(sys.argv[1])).run())

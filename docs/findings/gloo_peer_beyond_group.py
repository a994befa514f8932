"""gloo: a send or a receive whose peer is no rank of the group ends in no error."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

WORLD, SECONDS = 2, 10


def work(rank: int, folder: str, call: str) -> None:
    """Call with a peer that the group does not have; what it raised is written down."""
    store = dist.FileStore(f"{folder}/{call}", WORLD)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=SECONDS)
    )
    if rank == 0:
        try:
            getattr(dist, call)(torch.ones(2), WORLD + 5)
        except (RuntimeError, ValueError, IndexError) as error:
            Path(folder, "error").write_text(f"{type(error).__name__}: {error}")


def ends(call: str) -> str:
    """How rank 0 ends: an error in words, a signal, or none of these."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork.Process(target=work, args=(rank, folder, call)) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        ranks[0].join(4 * SECONDS)
        code = ranks[0].exitcode
        for process in ranks:
            if process.is_alive():
                process.kill()
        for process in ranks:
            process.join()
        try:
            return Path(folder, "error").read_text().splitlines()[0]
        except FileNotFoundError:
            return "still waits" if code is None else f"exit code {code}"


if __name__ == "__main__":
    found = {call: ends(call) for call in ("send", "recv")}
    present = any(how == "still waits" or "code -" in how for how in found.values())
    print(f"expected an error that names the peer {WORLD + 5} of {WORLD} ranks; came {found}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)

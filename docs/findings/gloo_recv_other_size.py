"""gloo: a message and a receive of unlike sizes: too long ends the process, too short passes."""

import multiprocessing
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

WORLD, SENT, SECONDS = 2, 4, 10


def work(rank: int, folder: str, room: int) -> None:
    """Send ``SENT`` elements into a buffer of ``room``; what came is written down."""
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=SECONDS)
    )
    if rank == 0:
        dist.send(torch.ones(SENT), 1)
        return
    buffer = torch.full((room,), -7.0)
    try:
        dist.recv(buffer, 0)
        said = f"passes, received {buffer.tolist()}"
    except RuntimeError as error:
        said = f"RuntimeError: {error}".splitlines()[0]
    Path(folder, "said").write_text(said)


def ends(room: int) -> str:
    """What the receiver saw, or its exit code."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork.Process(target=work, args=(rank, folder, room)) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        for process in reversed(ranks):
            process.join(4 * SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        try:
            return Path(folder, "said").read_text()
        except FileNotFoundError:
            return f"ends with {ranks[1].exitcode}"


if __name__ == "__main__":
    longer, shorter = ends(SENT // 2), ends(SENT + 2)
    present = longer == "ends with -6" and shorter.startswith("passes")
    print(f"expected an error in both; {SENT} elements into {SENT // 2}: {longer};")
    print(f"{SENT} into {SENT + 2}: {shorter}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)

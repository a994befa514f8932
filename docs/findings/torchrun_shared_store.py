"""torchrun: workers that are started anew look for each other where the dead ones were."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist

OPT_OUT = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def worker(folder: Path) -> None:
    """Two ranks meet, one dies; anew, rank 0 looks for rank 1's address before there can be one."""
    rank, anew = os.environ["RANK"], (folder / "killed").exists()
    store = next(dist.rendezvous("env://"))[0]  # where init_process_group meets
    if not anew and rank == "1":
        store.set("address of rank 1", f"process {os.getpid()}, which is about to die")
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    elif anew and rank == "0":
        found = store.check(["address of rank 1"])
        (folder / "found").write_text(store.get("address of rank 1").decode() if found else "")
        (folder / "looked").touch()
    while not (folder / "looked").exists():  # rank 0: until its agent ends it to start both anew
        time.sleep(0.1)  # rank 1, anew: it has written nothing yet


def finds(opt_out: str) -> str:
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--max-restarts=1"]
        environment, command = os.environ | {OPT_OUT: opt_out}, [*command, __file__, name]
        with subprocess.Popen(command, env=environment) as agent:
            try:
                assert agent.wait(timeout=70) == 0, "the agent failed"
            finally:
                agent.terminate()  # it ends its workers
        return (Path(name) / "found").read_text()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(worker(Path(sys.argv[1])))
    default, apart = finds("0"), finds("1")
    print("expected rank 0, started anew, to find no address of a rank 1 that is not there yet;")
    print(f"by default it finds '{default}', with {OPT_OUT}=1 '{apart}'")
    print("DEFECT PRESENT" if default and not apart else "defect absent: fixed?")
    sys.exit(0 if default and not apart else 1)

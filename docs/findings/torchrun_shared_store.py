"""torchrun: workers that are started anew look for each other where the dead ones were."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

OPT_OUT = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
MOST_SECONDS = 60  # with the variable they meet again after 10
SETTINGS = "is_host=false,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=4"


def worker(folder: Path) -> None:
    if (folder / "killed").exists() and os.environ["RANK"] == "1":
        time.sleep(3)  # started anew, and a little later than the other
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    while dist.get_world_size() < 2:  # the other is late: its agent has this one started anew
        time.sleep(1)
    if not (folder / "killed").exists() and dist.get_rank() == 1:
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))  # the first time it raises: rank 1 is dead
    (folder / f"met{dist.get_rank()}").touch()
    while len([*folder.glob("met*")]) < 2:  # who leaves first would take the store along
        time.sleep(0.1)
    os._exit(0)  # gloo's threads may abort a process that just ends


def meets_again(opt_out: str) -> bool:
    with tempfile.TemporaryDirectory() as name:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2"]
        command += ["--max-restarts=1", "--monitor-interval=0.3", f"--rdzv-conf={SETTINGS}"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store.port}"]
        environment, command = os.environ | {OPT_OUT: opt_out}, [*command, __file__, name]
        with (Path(name) / "log").open("w") as log:
            agents = [subprocess.Popen(command, env=environment, stderr=log) for _ in range(2)]
            until = time.monotonic() + MOST_SECONDS
            while time.monotonic() < until and None in [agent.poll() for agent in agents]:
                time.sleep(0.1)
            [agent.terminate() for agent in agents]  # they end their workers
            time.sleep(5)
            [agent.kill() for agent in agents]
        return len([*Path(name).glob("met*")]) == 2


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(worker(Path(sys.argv[1])))
    default, apart = meets_again("0"), meets_again("1")
    print(f"expected the 2 workers to meet again; by default {default}, with {OPT_OUT}=1 {apart}")
    print("DEFECT PRESENT" if apart and not default else "defect absent: fixed?")
    sys.exit(0 if apart and not default else 1)

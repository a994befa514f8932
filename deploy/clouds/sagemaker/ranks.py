"""Entry point of the estimator: starts torchrun on its instance, and the first instance judges.

SageMaker's toolkit calls it once on every instance, with what it knows of them in ``SM_*``.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

#: Where ranks meet at the first instance.
PORT = 7777


def arguments(environment: Mapping[str, str]) -> list[str]:
    """Those of ``cluster.judge``; ends the process where instances share no folder."""
    results = environment["SM_OUTPUT_DATA_DIR"]
    hosts = json.loads(environment["SM_HOSTS"])
    shared = environment.get("SM_CHANNEL_RECORDS")
    if len(hosts) > 1 and shared is None:
        print(
            f"{len(hosts)} instances share no folder - "
            "give launch.py --efs, --subnets and --security-groups",
            file=sys.stderr,
        )
        raise SystemExit(2)
    # A job of its own folder: the file system may hold those of others.
    job = environment.get("TRAINING_JOB_NAME", "job")
    records = f"{results}/records" if shared is None else f"{shared}/{job}"
    node = str(hosts.index(environment["SM_CURRENT_HOST"]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "0"]
    torchrun += ["--nnodes", str(len(hosts)), "--node-rank", node]
    torchrun += ["--nproc-per-node", str(max(1, int(environment["SM_NUM_GPUS"])))]
    torchrun += ["--master-addr", hosts[0], "--master-port", str(PORT)]
    scenario = environment.get("SCENARIO", "ddp-gpt").split()
    choices = ["--backend", environment.get("BACKEND", "nccl")]
    choices += ["--tier", environment.get("TIER", "quick")]
    ranks = [*torchrun, "-m", "shardproof.cluster.torchrun", *scenario, *choices]
    return [records, "--node", node, "--results", results, "--", *ranks]


def main() -> None:
    here = Path(__file__).resolve().parent
    package = here / "shardproof"
    if (here / "suite").is_dir() and not package.exists():
        package.symlink_to("suite")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", os.environ["SM_NETWORK_INTERFACE_NAME"])
    os.environ["PYTHONPATH"] = f"{here}:{os.environ.get('PYTHONPATH', '')}"  # of the ranks
    sys.path.insert(0, str(here))
    sys.argv[1:] = arguments(os.environ)
    runpy.run_module("shardproof.cluster.judge", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

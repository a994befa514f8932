"""Entry point of the estimator: torchrun starts it once a rank, and it becomes the rank program.

SageMaker's toolkit calls ``torchrun --nnodes ... --nproc_per_node ... ranks.py`` on every instance,
with what it knows of them in ``SM_*``.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path


def arguments(environment: Mapping[str, str]) -> list[str]:
    """Those of the rank program; ends the process where instances share no folder."""
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
    scenario = environment.get("SCENARIO", "ddp-gpt").split()
    choices = ["--backend", environment.get("BACKEND", "nccl")]
    choices += ["--tier", environment.get("TIER", "quick")]
    return [*scenario, *choices, "--records", records, "--results", results]


def main() -> None:
    here = Path(__file__).resolve().parent
    package = here / "shardproof"
    if (here / "suite").is_dir() and not package.exists():
        with contextlib.suppress(FileExistsError):  # another rank of this instance was faster
            package.symlink_to("suite")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", os.environ["SM_NETWORK_INTERFACE_NAME"])
    os.environ["PYTHONPATH"] = f"{here}:{os.environ.get('PYTHONPATH', '')}"  # of the judge
    sys.path.insert(0, str(here))
    sys.argv[1:] = arguments(os.environ)
    runpy.run_module("shardproof.multinode.torchrun", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

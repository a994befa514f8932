"""Start a PyTorch estimator, one process an instance.

Needs ``pip install "sagemaker<3"`` and AWS credentials.

smdistributed would bring collectives of its own, which none of the suite's backends uses.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--role", required=True, help="ARN of the execution role")
    parser.add_argument("--framework-version", required=True, help="of PyTorch, 2.11 or newer")
    parser.add_argument("--py-version", default="py312")
    parser.add_argument("--instance-type", default="ml.g5.12xlarge")
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--efs", help="file system that several instances share")
    parser.add_argument("--subnets", nargs="*", help="with --efs")
    parser.add_argument("--security-groups", nargs="*", help="with --efs")
    parser.add_argument("--scenario", default="ddp-gpt")
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--tier", default="quick")
    options = parser.parse_args()

    from sagemaker.inputs import FileSystemInput  # type: ignore[import-not-found]
    from sagemaker.pytorch import PyTorch  # type: ignore[import-not-found]

    names = ("scenario", "backend", "tier")
    estimator = PyTorch(
        entry_point="ranks.py",
        source_dir=str(Path(__file__).parent),
        # Land beside ranks.py, where Python finds them.
        dependencies=[
            str(Path(__file__).parents[3] / name) for name in ("suite", "impls", "scenarios")
        ],
        role=options.role,
        framework_version=options.framework_version,
        py_version=options.py_version,
        instance_type=options.instance_type,
        instance_count=options.instances,
        environment={name.upper(): getattr(options, name) for name in names},
        subnets=options.subnets,
        security_group_ids=options.security_groups,
    )
    records = FileSystemInput(options.efs, "EFS", "/", "rw") if options.efs else None
    estimator.fit({"records": records} if records else None)


if __name__ == "__main__":
    main()

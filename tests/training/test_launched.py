"""Scripts that torchrun and mpirun start, and a process group that a user made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.launches

ROOT = Path(__file__).parents[2]
#: Prints what a plain loop in one process must print as well.
SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from plain_loop import LOSS, assert_equal, loader, model, trained
from shardproof import Training, join

{before}
built = Training(model(), LOSS, loader()).optimizer("adamw", lr=1e-2, clip=0.5)
result = built.strategy({strategy!r}).run(4)
expected, losses = trained(4, lr=1e-2, clip=0.5)
assert_equal(dict(result.model.state_dict()), expected)
assert all(abs(a - b) < 1e-9 for a, b in zip(result.losses, losses, strict=True))
world = join()
pair = world.new_group([0, world.size - 1])
assert pair.contains(0) and world.size == len(result.memory_stats())
{after}
print(f"rank {{world.rank}} of {{world.size}}: equal")
"""


def script(folder: Path, strategy: str, before: str = "", after: str = "world.leave()") -> Path:
    file = folder / "train.py"
    tests = str(Path(__file__).parent)
    file.write_text(SCRIPT.format(tests=tests, strategy=strategy, before=before, after=after))
    return file


def run(*command: str | Path, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    words = [str(word) for word in command]
    done = subprocess.run(
        words, env=environment, text=True, capture_output=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_torchrun(tmp_path: Path, strategy: str) -> None:
    told = run(*TORCHRUN, script(tmp_path, strategy))
    assert "rank 0 of 2: equal" in told and "rank 1 of 2: equal" in told


def test_a_group_of_the_users_own_is_used_and_left_alone(tmp_path: Path) -> None:
    before = "import torch.distributed as dist; dist.init_process_group('gloo')"
    after = "world.leave(); assert dist.is_initialized(); dist.destroy_process_group()"
    told = run(*TORCHRUN, script(tmp_path, "zero2", before, after))
    assert "rank 0 of 2: equal" in told and "rank 1 of 2: equal" in told


def test_mpirun(tmp_path: Path) -> None:
    from shardproof.backends import BACKENDS

    if reason := BACKENDS["mpi"].available():
        pytest.skip(reason)
    mpirun = Path(sys.executable).with_name("mpirun")
    words = ("--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable)
    told = run(mpirun, *words, script(tmp_path, "zero1"))
    assert "rank 0 of 2: equal" in told and "rank 1 of 2: equal" in told


def test_the_variable_chooses_the_backend(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    tests = str(Path(__file__).parent)
    file.write_text(
        f"import sys; sys.path.insert(0, {tests!r})\n"
        "import torch.distributed as dist\n"
        "from plain_loop import LOSS, loader, model\n"
        "from shardproof import Training\n"
        "def loss(outputs, targets):\n"
        "    print(dist.get_backend())\n"
        "    return LOSS(outputs, targets)\n"
        "Training(model(), loss, loader()).run(1, ranks=2)\n"
    )
    assert "threaded" in run(sys.executable, file, SHARDPROOF_BACKEND="in_memory")
    assert "gloo" in run(sys.executable, file)

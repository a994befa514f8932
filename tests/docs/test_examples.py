"""Every file of examples/ runs as its docstring says, and prints what it should."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shardproof.init.command import PLACES, written

ROOT = Path(__file__).parents[2]
ALL = {path.name: path for path in sorted((ROOT / "examples").iterdir()) if path.is_file()}
EXAMPLES = {name: path for name, path in ALL.items() if path.suffix == ".py"}
#: Most lines of a file.
MOST = 60
#: Command of a docstring -> its exit code and what its output must hold, in order.
EXPECTED = {
    "python examples/broken_ddp.py": (1, [r"fail: 2 ranks, fp64", r"fail: 3 ranks, fp64", "embed"]),
    "python examples/broken_ddp.py --mended": (0, [r"pass: 2 ranks", r"pass: 3 ranks"]),
    "python examples/linear_rule.py": (
        0,
        [r"ranks  batch", r" 16    256    256   0\.\d+   0\.1", r" 64   1024     64 .*nan"],
    ),
    "python examples/communication_hook.py": (
        0,
        [r"mean, 3 ranks: pass", r"total, 3 ranks: fail .*every gradient is 3 times too large"],
    ),
    "python examples/sharded_optimizer.py": (
        0,
        [r"sharded, 2 ranks: pass", r"fixed_rate, 2 ranks: fail .*one-step replay"],
    ),
    "python examples/pipeline_schedule.py": (
        0,
        [r"Mine, 2 stages: pass", r"Scaled, 2 stages: fail .*2 times too small"],
    ),
    "python examples/sampler.py": (
        0,
        [r"DistributedSampler, .*pass", r"SameOrder, .*fail .*epoch 1 has the order of epoch 0"],
    ),
    "python examples/own_model.py": (
        0,
        [
            rf"{system}, {ranks} ranks: pass"
            for system in ("pytorch/ddp", "reference/zero1")
            for ranks in (2, 3)
        ],
    ),
    "python examples/train_model.py": (
        0,
        [
            r"zero3 on 4 ranks: loss 1\.\d+ -> 0\.",
            r"zero1 on 2 ranks: steps 40 to 60",
            r"rank 3 of",
        ],
    ),
    "torchrun --nproc-per-node 2 examples/train_model.py": (
        0,
        [r"zero3 on 2 ranks: loss 1\.\d+ -> 0\.", r"zero1 on 2 ranks: steps 40 to 60"],
    ),
    "torchrun --nproc-per-node 2 examples/train_own_loop.py": (
        0,
        [r"step 59: loss 0", r"of 2 holds"],
    ),
    "python examples/train_own_loop.py": (0, [r"step 59: loss 0", r"rank 0 of 1 holds"]),
    "torchrun --nproc-per-node 4 examples/train_split_layers.py": (
        0,
        [r"step 59: loss 0", r"holds 32 of 64 rows"],
    ),
    "shardproof watch examples/ddp_script.py --nproc 2": (0, [r"compared and equal"]),
    "shardproof watch examples/ddp_script.py --nproc 2 -- --broken": (1, [r"fail: .*lr"]),
    "torchrun --nproc-per-node 2 examples/torchrun_script.py": (
        0,
        [r"fail: initial parameters differ"],
    ),
}


def commands(path: Path) -> list[str]:
    """The commands after ``Run:`` in the docstring of ``path``."""
    docstring = path.read_text().split('"""')[1]
    return [
        line.strip().removeprefix("Run: ")
        for line in docstring.split("Run: ")[1].splitlines()
        if line.strip()
    ]


def test_every_command_has_an_expected_output() -> None:
    assert {c for path in EXAMPLES.values() for c in commands(path)} == EXPECTED.keys()


@pytest.mark.parametrize("name", ALL)
def test_an_example_is_short_and_linked_from_a_page(name: str) -> None:
    assert len(ALL[name].read_text().splitlines()) < MOST
    pages = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    assert any(f"](../examples/{name})" in page for page in pages)


def test_the_workflow_is_what_init_writes() -> None:
    """tests/commands/test_init.py runs its steps."""
    source = "shardproof @ git+<this repository>@<commit>"
    made = written("mine:Mine", ["replicate"], [], source)
    assert ALL["gate_workflow.yaml"].read_text() == made[PLACES["workflow.yaml"]]


@pytest.mark.launches
@pytest.mark.parametrize("command", EXPECTED)
def test_an_example_prints_its_verdicts(tmp_path: Path, command: str) -> None:
    program, *given = shlex.split(command)
    given = [str(ROOT / word) if word.startswith("examples/") else word for word in given]
    start = {
        "python": [sys.executable],
        "shardproof": [sys.executable, "-m", "shardproof"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    }[program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [*start, *given],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
        timeout=600,
        check=False,
    )
    code, lines = EXPECTED[command]
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    assert re.search(".*".join(lines), output, re.DOTALL), output

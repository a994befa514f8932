"""The script in docs/checkpoints.md saves, and goes on in another world from what it saved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import here, python

pytestmark = pytest.mark.launches

PAGE = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text()
#: Most lines of the script.
MOST = 25


def test_the_script_goes_on_in_another_world(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(# train\.py\n.*?)```", PAGE, re.DOTALL)
    assert len([line for line in script.splitlines() if line.strip()]) <= MOST
    (tmp_path / "train.py").write_text(script)
    worlds = [int(ranks) for ranks in re.findall(r"torchrun --nproc-per-node (\d)", PAGE)]
    assert worlds == [2, 3]
    for run, world in enumerate(worlds):
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        done = python(*words, "train.py", cwd=tmp_path, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr
        steps = f"steps {2 * run} to {2 * run + 1}"
        # Ranks share one stream, so two of them may write into one line.
        said = sorted(re.findall(r"rank \d of \d: steps \d to \d", done.stdout))
        assert said == [f"rank {rank} of {world}: {steps}" for rank in range(world)]
    whole = here("checkpoint", "verify", "checkpoints", cwd=tmp_path)
    assert whole.returncode == 0 and "/step-00000004-" in whole.stdout, whole.stderr

"""Every check judges systems that ``Training`` built, and loops under ``wrap``."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import shardproof


@pytest.mark.launches
def test_systems_of_the_builder_pass_every_check(tmp_path: Path) -> None:
    file = "tests/training/trained.yaml"
    done = shardproof("run", file, "--tier", "full", "--results", str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout
    assert "47 judged (47 pass)" in done.stdout


@pytest.mark.launches
def test_a_schedule_that_is_one_step_late_is_caught(tmp_path: Path) -> None:
    file = "tests/training/late.yaml"
    done = shardproof("run", file, "--tier", "full", "--results", str(tmp_path / "run"))
    assert done.returncode == 1, done.stdout
    # Step 0 has the right rate; of step 1 the update is half of what it must be.
    assert "at step 1" in done.stdout and "1 judged (1 fail)" in done.stdout

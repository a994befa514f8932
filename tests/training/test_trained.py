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
    assert "41 judged (41 pass)" in done.stdout

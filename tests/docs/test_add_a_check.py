"""docs/add-a-check.md can be followed: its check kills its fault in a copy of the suite."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.launches

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/add-a-check.md").read_text()
CHECK, FAULT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
LAST_OF_GENERAL = '"active", "schedule"),'


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The suite with what the page adds to it."""
    for name in ("suite", "impls", "scenarios", "shardproof"):
        if (ROOT / name).is_symlink():
            (tmp_path / name).symlink_to((ROOT / name).readlink())
        else:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignored)
    named = re.match(r"# (suite/checks/(\w+)/__init__\.py)\n", CHECK)
    assert named, "the page does not say where the check goes"
    (tmp_path / named[1]).parent.mkdir()
    (tmp_path / named[1]).write_text(CHECK)
    registry = tmp_path / "suite/checks/__init__.py"
    text = registry.read_text()
    assert text.count(LAST_OF_GENERAL) == 1
    added = LAST_OF_GENERAL.replace(")", f', "{named[2]}")')
    registry.write_text(text.replace(LAST_OF_GENERAL, added))
    faults = tmp_path / "impls/mutants/data/ddp_update.py"
    assert "impls/mutants/data/ddp_update.py" in PAGE
    head = "from __future__ import annotations\n"
    text = faults.read_text().replace(head, f"{head}import math\nfrom dataclasses import replace\n")
    faults.write_text(f"{text}\n\n{FAULT}")
    return tmp_path


def test_its_check_kills_its_fault_and_passes_the_parent(copy: Path) -> None:
    files = [path for path in (copy / "suite/checks").iterdir() if path.suffix == ".py"]
    assert len(files) <= 20, "tests/test_layers.py would refuse the copy"
    words = ["-m", "shardproof", "mutants", "--impl", "ddp_reports_infinite_loss"]
    done = subprocess.run(
        [sys.executable, *words, "--results", "run"],
        cwd=copy,
        env={"PYTHONPATH": str(copy), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0 and "1 fault judged (1 killed, 0 survive)" in told, told
    assert "1 exact, 0 vague, 0 wrong" in told, told

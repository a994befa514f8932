"""A process is killed in mid-save: the last committed checkpoint loads, the rest is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"


def kills(first: int, last: int) -> dict[str, int]:
    """What these kills met; each is as promised."""
    command = [sys.executable, "-W", "ignore", str(SUPPORT / "killed_saves.py")]
    done = subprocess.run(
        [*command, str(first), str(last)],
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    met: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    assert met["kills"] == last - first and met["broken"] == 0
    return met


def test_a_few_kills() -> None:
    assert kills(0, 3)["locked"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_kills() -> None:
    met = kills(3, 60)
    # How many of each there are hangs on the load; each kind must be met often.
    assert met["torn"] > 10 and met["committed"] > 10

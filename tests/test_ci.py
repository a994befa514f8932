"""``.ci/run``: what a part of it may take, and all of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = (Path(__file__).parents[1] / ".ci/run").read_text()
#: The function that runs a part; bash's SECONDS is set by hand in place of a wait.
PART = SCRIPT[SCRIPT.index("most=") : SCRIPT.index("engine_and_images()")]


@pytest.mark.parametrize(
    ("before", "takes", "ends", "says"),
    [
        (0, 59, 0, "x took 1 min (limit 15, aim 9); 1 so far (limit 80, aim 45)"),
        (0, 15 * 60 + 1, 1, "x is over its limit"),
        (79 * 60, 60, 0, "80 so far"),
        (79 * 60, 61, 1, "with x all parts are over 80 minutes"),
    ],
)
def test_a_part_ends_over_its_limit_or_over_that_of_all(
    before: int, takes: int, ends: int, says: str
) -> None:
    script = (
        f"set -euo pipefail\n{PART}\nSECONDS={before}\nwork() {{ SECONDS=$((SECONDS + {takes})); }}"
    )
    done = subprocess.run(
        ["bash", "-c", f"{script}\npart x 15 9 work"], capture_output=True, text=True, check=False
    )
    assert done.returncode == ends, done.stdout + done.stderr
    assert says in done.stdout


def test_the_aims_are_45_minutes_together() -> None:
    parts = re.findall(r"\bpart (?:\"[^\"]+\"|\w+) (\d+) (\d+) \w", SCRIPT)
    assert len(parts) == len(re.findall(r"^(?:\w+=\S+ )*part ", SCRIPT, re.MULTILINE)) == 9
    assert all(int(aim) <= int(limit) for limit, aim in parts)
    assert sum(int(aim) for _, aim in parts) == 45

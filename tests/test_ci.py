"""``.ci/run``: what a part of it may take, and all of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = (ROOT / ".ci/run").read_text()
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


def test_days_take_turns_with_the_thirds_of_long_parts() -> None:
    used = re.findall(r"make (\w+) PART=\"\$third\"", SCRIPT)
    assert used == ["launches", "slow", "clusters"]
    (given,) = re.findall(r"^third=(.+)$", SCRIPT, re.MULTILINE)
    shown = [given.replace("$(date -u +%j)", day) for day in ("008", "009", "010", "365")]
    done = subprocess.run(
        ["bash", "-c", f"echo {' '.join(shown)}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["3/3", "1/3", "2/3", "3/3"]


def collected(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", __file__, "--collect-only", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_parts_have_each_test_once() -> None:
    whole, *parts = (
        {line for line in collected(*words).stdout.splitlines() if "::" in line}
        for words in ((), ("--part", "1/2"), ("--part", "2/2"))
    )
    assert len(whole) >= 7 and all(parts)
    assert parts[0] | parts[1] == whole and not parts[0] & parts[1]


@pytest.mark.parametrize("part", ["3/2", "0/2", "half"])
def test_a_part_that_is_none_is_refused(part: str) -> None:
    done = collected("--part", part)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"--part {part}: write N/M" in done.stderr

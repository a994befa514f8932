"""Every finding of docs/findings.md is still true of the installed packages, shown without us."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "docs/findings").glob("*.py"))
#: Exit codes of the scripts; anything else, or another last line, is a script that broke.
PRESENT, ABSENT, NOT_INSTALLED = 0, 1, 3


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_the_defect_is_present(script: Path, tmp_path: Path) -> None:
    """In a process group of its own, because a script that hangs has started ranks."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    ) as process:
        try:
            said, errors = process.communicate()
        finally:
            end(process.pid)
    lines = said.strip().splitlines() or [""]
    if process.returncode == NOT_INSTALLED and lines[-1].endswith("is not installed"):
        pytest.skip(lines[-1])
    if process.returncode == ABSENT and lines[-1] == "defect absent: fixed?":
        pytest.fail(f"finding is no longer true: update docs/findings.md\n{said}")
    assert process.returncode == PRESENT, f"the script broke\n{said}\n{errors[-3000:]}"
    assert lines[-1] == "DEFECT PRESENT"


def end(group: int) -> None:
    """Kill what is left of the script's own process group."""
    try:
        os.killpg(group, 9)
    except ProcessLookupError:
        return


def test_scripts_stand_alone() -> None:
    for script in SCRIPTS:
        text = script.read_text()
        assert len(text.splitlines()) <= 60, script.name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            assert not any(n.split(".")[0] in ("shardproof", "suite", "impls") for n in names)


def test_the_page_and_the_scripts_are_the_same() -> None:
    page = (ROOT / "docs/findings.md").read_text()
    linked = re.findall(r"\]\(findings/([a-z0-9_]+)\.py\)", page)
    assert sorted(set(linked)) == [script.stem for script in SCRIPTS]
    headings = re.findall(r"^### (\d+)\. ", page, re.MULTILINE)
    rows = re.findall(r"^\| \[(\d+)\]", page, re.MULTILINE)
    assert headings == rows == sorted(set(rows), key=int)
    assert len(rows) == len(SCRIPTS)
    known = re.findall(r"^\| \[\d+\].*\| (no|partly|yes) \| \[[a-z0-9_]+\]\(", page, re.MULTILINE)
    counts = [len(rows), *(known.count(word) for word in ("no", "partly", "yes"))]
    stated = re.search(
        r"lists (\d+) defects .* For (\d+) of them no report was found\. "
        r"For (\d+) there is .* (\d+) are known upstream\.",
        " ".join(page.split()),
    )
    assert stated is not None and [*map(int, stated.groups())] == counts

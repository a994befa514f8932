"""Follows a page from top to bottom in an empty folder: writes its files, types its commands.

```python           the first line, `# name.py`, names the file that the block is written to
```console          `$ command`, and below it lines of what the command prints, in their order;
                    `...` stands for anything, in a line or as a line
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from commands import ROOT

#: Commands that set a machine up; tests have it set up.
_SET_UP = ("git clone ", "pip install ", "cd ")
#: Program -> the module that it is.
_PROGRAMS = {
    "shardproof": "shardproof",
    "pytest": "pytest",
    "torchrun": "torch.distributed.run",
}


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Language and text of every fenced block of ``page``."""
    for found in re.finditer(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        yield found[1], found[2]


def steps(console: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a block, and the lines that are shown of its output."""
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        command, *lines = part.splitlines()
        yield command, [line for line in lines if line.strip() not in ("", "...")]


def follow(page: str, folder: Path) -> int:
    """Do all that ``page`` asks for in ``folder``; the number of lines of output that were found.

    :raises AssertionError: a command printed something else.
    """
    shown = 0
    for language, text in blocks(page):
        if language == "console":
            for command, lines in steps(text):
                if not command.startswith(_SET_UP):
                    _compare(command, lines, _typed(command, folder))
                    shown += len(lines)
        elif named := re.match(r"# ([\w./-]+\.\w+)\n", text):
            path = folder / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return shown


def _typed(command: str, folder: Path) -> str:
    """What ``command`` prints in ``folder``."""
    programs = folder / ".programs"
    if not programs.exists():
        programs.mkdir()
        calls = {name: f"-m {module} " for name, module in _PROGRAMS.items()} | {"python": ""}
        for name, call in calls.items():
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {call}"$@"\n')
            (programs / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    return done.stdout


def _compare(command: str, lines: list[str], output: str) -> None:
    """Every one of ``lines`` stands in ``output``, in their order."""
    printed = iter([" ".join(line.split()) for line in output.splitlines()])
    for line in lines:
        words = " ".join(line.split())
        pattern = ".*".join(re.escape(part) for part in words.split("..."))
        assert any(re.fullmatch(pattern, one) for one in printed), (
            f"$ {command}\ndid not print, at its place: {line}\n{output}"
        )

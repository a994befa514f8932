"""The lines of ``impls/reference`` that a case executes, in all its threads and forks."""

from __future__ import annotations

import os
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

from tools.studies.mutation.operators import ROOT

#: The folder that notes go to, of the processes that load a strategy which notes its lines.
VARIABLE = "SHARDPROOF_REACHED"
#: File of ``impls/reference`` -> lines.
Lines = dict[str, set[int]]


def note(number: int) -> None:
    """Write every new line of this process, from now on, into the record of case ``number``.

    ``coverage`` writes when a process ends in order, which ranks do not.
    """
    path = Path(os.environ[VARIABLE]) / f"{number}-{os.getpid()}-{threading.get_ident()}"
    out = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    seen = set[tuple[str, int]]()

    def stepped(frame: FrameType, event: str, argument: Any) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and place not in seen:
            seen.add(place)
            os.write(out, "{}\t{}\n".format(*place).encode())
        return stepped

    def called(frame: FrameType, event: str, argument: Any) -> Any:
        return stepped if "impls/reference/" in frame.f_code.co_filename else None

    threading.settrace(called)
    sys.settrace(called)


def lines(folder: Path) -> dict[int, Lines]:
    """Case -> file -> lines that its processes recorded in ``folder``."""
    found: dict[int, Lines] = defaultdict(lambda: defaultdict(set))
    for path in folder.iterdir():
        number = int(path.name.partition("-")[0])
        for text in path.read_text(encoding="utf-8").splitlines():
            file, line = text.split("\t")
            found[number][str(Path(file).resolve().relative_to(ROOT))].add(int(line))
    return found

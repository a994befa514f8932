"""Which lines and branches of ``impls/reference`` a case executes, in all its threads and forks."""

from __future__ import annotations

import dis
import os
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tools.studies.mutation.operators import ROOT

#: The folder that notes go to, of the processes that load a strategy which notes its lines.
VARIABLE = "SHARDPROOF_REACHED"
_YIELD = dis.opmap["YIELD_VALUE"]
#: From one line to the next; as coverage.py has it, negative where a function begins or ends.
Arc = tuple[int, int]


def note(number: int) -> None:
    """Write every new arc of this process, from now on, into the notes of case ``number``."""
    path = Path(os.environ[VARIABLE]) / f"{number}-{os.getpid()}-{threading.get_ident()}"
    out = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    seen: set[tuple[str, int, int]] = set()
    files: dict[str, str] = {}
    # Generators by id, and the line that each has yielded at: a frame kept here would keep tensors.
    suspended: dict[tuple[int, CodeType], int] = {}

    def write(file: str, before: int, after: int) -> None:
        arc = file, before, after
        if arc not in seen:
            seen.add(arc)
            os.write(out, f"{file}\t{before}\t{after}\n".encode())

    def called(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        name = files.setdefault(code.co_filename, _file_of(code))
        if not name:
            return None
        last = suspended.pop((id(frame), code), -code.co_firstlineno)

        def stepped(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event == "line":
                write(name, last, frame.f_lineno)
                last = frame.f_lineno
            elif event == "return" and code.co_code[frame.f_lasti] == _YIELD:
                suspended[id(frame), code] = last
            elif event == "return":
                write(name, last, -code.co_firstlineno)
            return stepped

        return stepped

    threading.settrace(called)
    sys.settrace(called)


def _file_of(code: CodeType) -> str:
    path = Path(code.co_filename)
    if "impls/reference/" not in path.as_posix():
        return ""
    return str(path.resolve().relative_to(ROOT))


def arcs(folder: Path) -> dict[int, dict[str, set[Arc]]]:
    """Case -> file -> arcs that its processes noted in ``folder``."""
    found: dict[int, dict[str, set[Arc]]] = defaultdict(lambda: defaultdict(set))
    for path in folder.iterdir():
        number = int(path.name.partition("-")[0])
        for line in path.read_text(encoding="utf-8").splitlines():
            file, before, after = line.split("\t")
            found[number][file].add((int(before), int(after)))
    return found


def lines(arcs_of_file: set[Arc]) -> set[int]:
    """The lines that arcs begin or end at."""
    return {line for arc in arcs_of_file for line in arc if line > 0}

"""A finding: the last right thing, the first wrong one, and the line between them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from shardproof.contract import Implementation
from shardproof.files import Stored
from shardproof.launch import frames
from shardproof.locate.recorded import Place as Frame

_TORCH = str(Path(torch.__file__).parent.parent)

#: ``operation``: it is right before and wrong after; ``missing``: what others have got was not done
#: here; ``moved``: right values at a wrong place; ``scaled``: a multiple of what is expected;
#: ``calls``: no value is wrong, but a call is not as promised; ``end``: a rank did not end well;
#: ``unplaced``: a check fails, and no difference could be placed; ``nothing``: the case passes.
Kind = Literal["operation", "missing", "moved", "scaled", "calls", "end", "unplaced", "nothing"]


@dataclass(frozen=True)
class Place(Stored):
    """A line of code, as people write it."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Finding(Stored):
    """The first difference of a case.

    ``right``: the last thing that is right; ``wrong``: the first that is not.  ``operation``: what
    lies between them; ``place``: its line; ``calls``: the lines that led there, innermost first.
    ``origin``: the line that gave the operation its number, or its settings.
    ``tensor``, ``step``, ``point``, ``ranks``: of what was seen to be wrong.
    """

    case: str
    kind: Kind
    verdict: str
    sentence: str
    right: str = ""
    wrong: str = ""
    operation: str = ""
    place: Place | None = None
    calls: Sequence[Place] = field(default_factory=tuple)
    origin: Place | None = None
    tensor: str = ""
    step: int = -1
    point: str = ""
    ranks: Sequence[int] = ()
    unit: str = ""
    phase: str = ""
    note: str = ""


def spelt(file: str) -> str:
    """A file as people name it: below the package that it belongs to."""
    if file.startswith(frames.SUITE):
        return str(Path(file).relative_to(frames.SUITE))
    for root in (_TORCH, *sys.path, str(Path.cwd())):
        if root and file.startswith(f"{root}/"):
            return file.removeprefix(f"{root}/")
    return file


def path_of(place: Place) -> str:
    """The file of ``place`` on this machine."""
    for root in (frames.SUITE, _TORCH, *sys.path, str(Path.cwd())):
        if (path := Path(root, place.file)).is_file():
            return str(path)
    return place.file


def spelt_places(found: Sequence[Frame]) -> tuple[Place, ...]:
    """The frames as people name them."""
    return tuple(Place(spelt(file), line, name.rpartition(".")[2]) for file, line, name in found)


def place_of(found: Sequence[Frame], system: type[Implementation]) -> Place | None:
    """The line to look at: the innermost one in the file of the system's own class.

    If that file does not stand on the stack, that of the strategy that it comes from; else the
    innermost line of all.
    """
    for file in own_files(system):
        for frame in found:
            if Path(frame[0]).resolve() == file:
                return spelt_places([frame])[0]
    return spelt_places(found[:1])[0] if found else None


def own_files(system: type[Implementation]) -> list[Path]:
    """The files of the system's own class, and of those that it comes from and are strategies."""
    owners = [
        owner
        for place, owner in enumerate(system.__mro__)
        if issubclass(owner, Implementation)
        and owner is not Implementation
        and (place == 0 or "strategy" in vars(owner))
    ]
    modules = [sys.modules.get(owner.__module__) for owner in owners]
    files = [getattr(module, "__file__", None) for module in modules]
    return list(dict.fromkeys(Path(file).resolve() for file in files if file))


def broken(case: str, why: str) -> Finding:
    """The finding of a search that ended without one."""
    return Finding(case, "unplaced", "judge error", f"the search itself broke: {why}")


def nothing(case: str, verdict: str, note: str = "") -> Finding:
    """The finding of a case that passes."""
    return Finding(case, "nothing", verdict, "nothing differs: the case passes", note=note)

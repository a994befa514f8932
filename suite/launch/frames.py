"""Where the implementation stood: the contract's method that ran, and its innermost own frame.

Frames of torch and of the judge tell a reader little: the line to look at is the last one outside
of them.  ``impls/`` is judged, so its frames count as anybody's.  Of a watched script that line is
the last one outside of all that is installed.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch

from shardproof.contract import Implementation

#: File, line and function.
Frame = tuple[str, int, str]

_SUITE = str(Path(__file__).parent.parent)
#: The same without links: another process may have imported it by another path.
_REAL = os.path.realpath(_SUITE)
_IMPLS = str(Path(__file__).parent.parent / "impls")
_CONTRACT = str(Path(__file__).parent.parent / "contract.py")
_TORCH = str(Path(torch.__file__).parent)
_LIBRARY = sysconfig.get_path("stdlib")
_INSTALLED = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},)
#: What the judge calls of an implementation.
METHODS = frozenset(
    name
    for name, value in vars(Implementation).items()
    if not name.startswith("_") and (callable(value) or isinstance(value, classmethod))
)


def is_judge(file: str) -> bool:
    """Whether ``file`` is the suite's own and no implementation."""
    return file.startswith(_SUITE) and not file.startswith(_IMPLS)


def is_library(file: str) -> bool:
    """Whether ``file`` is of Python's own library."""
    return file.startswith(_LIBRARY) and "-packages" not in file


def _is_own(file: str) -> bool:
    """Whether ``file`` is of the implementation, or of what it calls beside torch."""
    return not (file.startswith(("<", _TORCH)) or is_judge(file))


def method(frames: Sequence[Frame]) -> str:
    """The method of the contract that was called first, as ``step()``; empty: none was.

    ``frames`` are those of one thread, outermost first.
    """
    for file, _, function in frames:
        if function in METHODS and (_is_own(file) or file == _CONTRACT):
            return f"{function}()"
    return ""


def innermost(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame outside of torch and the suite; ``None``: there is none."""
    return next((frame for frame in reversed(frames) if _is_own(frame[0])), None)


@lru_cache(4096)
def is_shown(file: str) -> bool:
    """Whether ``file`` may be shown as where a script stood: it is not torch's, nor the suite's."""
    is_ours = file.startswith(_SUITE) or os.path.realpath(file).startswith(_REAL)
    return not (is_ours or file.startswith("<") or "/torch/" in file)


@lru_cache(4096)
def is_of_script(file: str) -> bool:
    """Whether ``file`` is the user's own: of no installed package, nor of Python or the suite."""
    return is_shown(file) and not file.startswith(_INSTALLED)


def place_in_script(frames: Sequence[Frame]) -> str:
    """``in f (train.py:12)`` for the user's innermost line; ``frames`` are outermost first.

    Without any: the innermost of another package; ``""`` if all are of torch and the suite.
    """
    shown = [frame for frame in frames if is_shown(frame[0])]
    own = [frame for frame in shown if is_of_script(frame[0])]
    for file, line, function in (own or shown)[-1:]:
        where = f"{file}:{line}"
        return f"at {where}" if function == "<module>" else f"in {function} ({where})"
    return ""

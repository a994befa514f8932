"""Where the implementation stood: the contract's method that ran, and its innermost own frame.

Frames of torch and of the judge tell a reader little: the line to look at is the last one outside
of them.  ``impls/`` is judged, so its frames count as anybody's.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch

from shardproof.contract import Implementation

#: File, line and function.
Frame = tuple[str, int, str]

SUITE = str(Path(__file__).parent.parent)
_IMPLS = str(Path(__file__).parent.parent / "impls")
_CONTRACT = str(Path(__file__).parent.parent / "contract.py")
_TORCH = str(Path(torch.__file__).parent)
_LIBRARY = sysconfig.get_path("stdlib")
#: What the judge calls of an implementation.
METHODS = frozenset(
    name
    for name, value in vars(Implementation).items()
    if not name.startswith("_") and (callable(value) or isinstance(value, classmethod))
)


def is_judge(file: str) -> bool:
    """Whether ``file`` is the suite's own and no implementation."""
    return file.startswith(SUITE) and not file.startswith(_IMPLS)


def is_library(file: str) -> bool:
    """Whether ``file`` is of Python's own library."""
    return file.startswith(_LIBRARY) and "-packages" not in file


def _is_own(file: str) -> bool:
    """Whether ``file`` is of the implementation, or of a library that it calls, other than
    torch.
    """
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
    """The innermost frame outside of torch and the suite; ``None``: there is none.

    Of a system that is built of the suite's parts the innermost line of its own.
    """
    own = [frame for frame in reversed(frames) if _is_own(frame[0])]
    users = (frame for frame in own if not frame[0].startswith(SUITE))
    return next(users, own[0] if own else None)

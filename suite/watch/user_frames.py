"""Which line of a stack is the script's own."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

#: Of Python, of installed packages and of the suite.
_OTHERS = (
    *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
    str(Path(__file__).parents[1]),
    "<frozen",
)


def innermost(frames: Sequence[tuple[str, int, str]]) -> str:
    """``in f (train.py:12)`` for the innermost of the user's own; frames are outermost first.

    Without any: the innermost of all; without frames: ``""``.
    """
    own = [frame for frame in frames if not frame[0].startswith(_OTHERS)]
    for file, line, function in reversed(own or frames):
        where = f"{file}:{line}"
        return f"at {where}" if function == "<module>" else f"in {function} ({where})"
    return ""

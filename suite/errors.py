"""Errors of inputs, in one line each: where, what, which value, and what to do.

Scenario files and selections raise them; the command line prints them and ends with exit code 2.
Beside them, errors of a machine that has nothing left.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One fault.  ``file`` and ``line`` (from 1) are empty for faults of a command line."""

    what: str
    remedy: str
    value: str | None = None
    file: str = ""
    line: int | None = None

    def __str__(self) -> str:
        where = ":".join(part for part in (self.file, str(self.line or "")) if part)
        value = "" if self.value is None else f" ({shorten(self.value)})"
        return f"{where + ': ' if where else ''}{self.what}{value} - {self.remedy}"


class InputError(ValueError):
    """Input that cannot be used; ``problems`` has at least one entry."""

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class ScenarioError(InputError):
    """A scenario file that cannot be used."""


class SelectionError(InputError):
    """A selection (``-k``, ``--impl``, a name) that cannot be read or matches nothing."""


class MachineError(RuntimeError):
    """This machine cannot run what was asked for, whatever the system; the message has the remedy.

    The command line prints it and ends with exit code 3.
    """


class LaunchError(InputError):
    """Ranks that were started in a way in which they cannot work together."""


#: What moves a terminal's cursor, turns the direction of text or is half a character; lines stay.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


#: Characters of an error's message or traceback that are kept.
_MOST_TEXT = 1 << 14


def said(error: BaseException) -> str:
    """The message of an error that a system raised, whose ``__str__`` may raise itself."""
    try:
        return bounded(str(error))
    except Exception as second:  # noqa: BLE001 - it is the system's
        return f"(its __str__ raised {type(second).__name__})"


def bounded(text: str) -> str:
    """``text``, or its beginning and end: a run tells and stores it many times."""
    left, half = len(text) - _MOST_TEXT, _MOST_TEXT // 2
    if left <= 0:
        return text
    return f"{text[:half]}\n... {left:,} characters left out ...\n{text[-half:]}"


_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))


def is_exhausted(error: BaseException) -> bool:
    """Whether ``error`` says that memory or descriptors of the machine are used up."""
    if isinstance(error, OSError):
        return error.errno in _EXHAUSTED
    # torch's are plain RuntimeErrors: of its allocator on the host, and of a GPU's.
    words = ("can't allocate memory", "out of memory")
    of_torch = isinstance(error, RuntimeError) and any(part in str(error) for part in words)
    return of_torch or isinstance(error, MemoryError)


def printable(text: str) -> str:
    """``text`` that others wrote, for a terminal or a file: such characters are spelt out."""
    return _UNSEEN.sub(lambda character: repr(character[0])[1:-1], text)


#: What a runner of CI takes for a command of its own, in the lines that it reads.
_COMMAND = re.compile(r"^(\s*:)(?=:)|(#)(?=#\w*\[)", re.MULTILINE)


def shown(text: str) -> str:
    """:func:`printable`, in which a runner of CI finds no command: it looks behind blanks, too."""
    return _COMMAND.sub(lambda begin: begin[0] + "\\", printable(text))


def one_line(text: str) -> str:
    """``text`` on one line of printable characters."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shorten(text: str, limit: int = 80) -> str:
    """:func:`one_line`, cut in the middle at ``limit`` characters."""
    line = one_line(text)
    if len(line) <= limit:
        return line
    half = (limit - 3) // 2
    return f"{line[:half]}...{line[-half:]}"


def nearest(value: str, valid: Iterable[str], noun: str = "valid names") -> str:
    """A remedy that names the nearest of ``valid``, or lists them if none is near."""
    names = sorted(set(valid))
    if len(several := value.split(",")) > 1 and {*several} & {*names}:
        return f"give one name; for several repeat the option, or call again: {' '.join(several)}"
    close = difflib.get_close_matches(value[:200].lower(), [n.lower() for n in names], 1, 0.55)
    if close:
        return f"did you mean {next(n for n in names if n.lower() == close[0])}?"
    if not names:
        return f"there are no {noun}"
    shown = ", ".join(names[:16]) + (f", ... ({len(names)} in all)" if len(names) > 16 else "")
    return f"{noun}: {shown}"

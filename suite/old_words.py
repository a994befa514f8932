"""Words of earlier versions: they keep working until 1.0, and a warning names the new one.

Scenario files, policies, case ids, ``-k``, arguments of ``prove``, baselines and stored runs are
read through this table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

from shardproof.errors import Problem

Kind = Literal["lane", "check", "verdict"]
#: What a word names -> old word -> new word.
OLD_WORDS: Mapping[Kind, Mapping[str, str]] = {
    "lane": {"native": "working_precision"},
    "check": {"engagement": "active"},
    "verdict": {"pass (native only)": "pass (working precision only)"},
}
#: Parts of an id before this one are names that users choose: scenario, implementation, backend.
_FIXED_PARTS = 3
_warned: set[str] = set()


def renamed(kind: Kind, word: str) -> str:
    """What ``word`` is called now, without a warning: for files that nobody writes by hand."""
    return OLD_WORDS[kind].get(word, word)


def current(kind: Kind, word: str, file: str = "", line: int | None = None) -> str:
    """What ``word``, which a user wrote, is called now; the first time an old one warns."""
    new = renamed(kind, word)
    if new != word:
        _warn(word, Problem(f"old name of a {kind}", f"write {new}", word, file, line))
    return new


def renamed_name(name: str) -> str:
    """A case id, or the name of an exact figure (``engagement.status``), in the words of now."""
    return _replace(name, {kind: dict(words) for kind, words in OLD_WORDS.items()})


def current_name(name: str, file: str = "") -> str:
    """A case id or name of a figure that a user wrote, in the words of now; an old one warns."""
    new = renamed_name(name)
    if new != name:
        _warn_of_name(name, new, file)
    return new


def matches(name: str, test: Callable[[str], bool], pattern: str) -> bool:
    """Whether a pattern that a user wrote fits ``name``, or what ``name`` was called before.

    ``test`` says so of one name; an id that fits under its old words alone warns.
    """
    if test(name):
        return True
    before = _former(name)
    if before == name or not test(before):
        return False
    _warn_of_name(pattern, name)
    return True


def glob(name: str, pattern: str) -> bool:
    """:func:`fnmatch.fnmatchcase`, old words included."""
    return matches(name, lambda text: fnmatchcase(text, pattern), pattern)


def stored_line(line: dict[str, Any]) -> dict[str, Any]:
    """A line of ``cases.jsonl`` (JSON form) in the words of now; its figures stay as they are."""
    _rename(line, "id", "verdict", "lane")
    for part in (line.get("case"), line.get("cell")):
        if isinstance(part, dict):
            stored_case(part)
    checks = line.get("checks")
    for check in checks if isinstance(checks, list) else ():
        if isinstance(check, dict):
            _rename(check, "check")
    for key in ("killed_by", "failing"):
        if isinstance(line.get(key), list):
            line[key] = [renamed("check", str(name)) for name in line[key]]
    return line


def stored_case(case: dict[str, Any]) -> dict[str, Any]:
    """A case (JSON form) in the words of now."""
    _rename(case, "id", "lane")
    if isinstance(case.get("checks"), (list, tuple)):
        case["checks"] = [renamed("check", str(name)) for name in case["checks"]]
    return case


def _rename(record: dict[str, Any], *keys: Kind | Literal["id"]) -> None:
    for key in keys:
        if isinstance(record.get(key), str):
            record[key] = renamed_name(record[key]) if key == "id" else renamed(key, record[key])


@cache
def _former(name: str) -> str:
    words = {kind: {new: old for old, new in table.items()} for kind, table in OLD_WORDS.items()}
    return _replace(name, words)


def _replace(name: str, words: Mapping[Kind, Mapping[str, str]]) -> str:
    if "::" not in name:
        check, dot, figure = name.partition(".")
        return words["check"].get(check, check) + dot + figure
    parts = name.split("::")
    for at in range(_FIXED_PARTS, len(parts)):
        # The lane, or lane and precision policy: `native-bf16`.
        lane, dash, policy = parts[at].partition("-")
        parts[at] = words["lane"].get(lane, lane) + dash + policy
    return "::".join(parts)


def _warn_of_name(written: str, new: str, file: str = "") -> None:
    for words in OLD_WORDS.values():
        for old, now in words.items():
            if now in new and re.search(rf"\b{re.escape(old)}\b", written):
                _warn(old, Problem("old word", f"write {now} for {old}", written, file))
                return
    # A pattern may hold a part of an old word only.
    _warn(written, Problem("fits old words only", f"new: {new}", written, file))


def _warn(word: str, problem: Problem) -> None:
    """Say ``problem`` on stderr, once for each word in a process."""
    if word not in _warned:
        _warned.add(word)
        print(f"warning: {problem}; the old word works until 1.0", file=sys.stderr)

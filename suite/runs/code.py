"""Which code of a user's own was judged: a digest of the file that a name leads to.

The suite's own code is told by its commit.  Of ``package.module:Class`` and ``file.py:Class`` a run
notes the digest of that one file, so that verdicts of two states of it are not taken for those of
one.  What the file imports is not looked at.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shardproof import by_path
from shardproof.checks.results import CaseResult
from shardproof.runs.header import Invocation

#: Hexadecimal digits of a SHA-256 that are kept.
_DIGITS = 16


def of(implementations: Iterable[str]) -> dict[str, str]:
    """Name -> digest of its file, of those that have one by their name; none is imported."""
    named = sorted({name for name in implementations if ":" in name})
    files = {name: file for name in named if (file := _file(name.partition(":")[0]))}
    return {n: hashlib.sha256(f.read_bytes()).hexdigest()[:_DIGITS] for n, f in files.items()}


def older(
    kept: Sequence[CaseResult], now: Mapping[str, str], before: Sequence[Invocation]
) -> list[CaseResult]:
    """The results of ``kept`` that are of other code: that of the last to plan each."""
    judged_by = {name: one.code for one in before for name in one.planned}
    systems = ((result, result.case.implementation) for result in kept)
    return [
        result
        for result, name in systems
        if (digest := judged_by.get(result.id, {}).get(name)) and digest != now.get(name, digest)
    ]


def _file(module: str) -> Path | None:
    if by_path.is_file(module):
        return found if (found := Path(module)).is_file() else None
    package, *rest = module.split(".")
    try:
        # Under ``python -m`` a program has the spec of what was started, not of what is named.
        spec = None if package == "__main__" else importlib.util.find_spec(package)
    except ValueError:  # a module that somebody made without one
        spec = None
    if spec is None:
        return None
    places = [Path(place, *rest) for place in spec.submodule_search_locations or ()]
    files = [f for p in places for f in (p.with_suffix(".py"), p / "__init__.py")]
    if not rest and spec.origin is not None:
        files.insert(0, Path(spec.origin))
    return next((file for file in files if file.is_file()), None)

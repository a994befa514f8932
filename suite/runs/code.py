"""Which code of a user's own was judged: a digest of the file that has the class.

The suite's own code is told by its commit.  Of a class of the user's own a run notes the file's
digest, so that verdicts of two states of it are not taken for those of one.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shardproof.checks.results import CaseResult
from shardproof.runs.header import Invocation

#: Hexadecimal digits of a SHA-256 that are kept.
_DIGITS = 16


def of(implementations: Iterable[str]) -> dict[str, str]:
    """Name -> digest of its file, of those that are ``package.module:Class``; none is imported."""
    found = {name: _file(name.partition(":")[0]) for name in implementations if ":" in name}
    return {
        name: hashlib.sha256(file.read_bytes()).hexdigest()[:_DIGITS]
        for name, file in sorted(found.items())
        if file is not None
    }


def older(
    kept: Sequence[CaseResult], now: Mapping[str, str], before: Sequence[Invocation]
) -> list[CaseResult]:
    """The results of ``kept`` that an invocation ``before`` may have had from other code."""
    changed = {
        name
        for name, digest in now.items()
        if any(one.code.get(name, digest) != digest for one in before)
    }
    return [result for result in kept if result.case.implementation in changed]


def _file(module: str) -> Path | None:
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    if rest:
        path = path.parent.joinpath(*rest)
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return path if path.is_file() else None

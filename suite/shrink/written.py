"""The files of a shrunk case: its scenario, and a script of the system alone where there is one."""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from shardproof.case import Case
from shardproof.commands import options
from shardproof.scenarios.load import load
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import Vocabulary
from shardproof.shrink import document
from shardproof.shrink.search import Shrinker, Shrunk

#: Characters of the name of a file, in front of a digest.
_LONGEST_NAME = 80


@dataclass(frozen=True)
class Written:
    """The files of one case.

    ``file``: the scenario.  ``fails_again``: read from there and run, it failed for the same cause.
    ``script``: that of the system alone, which shows the defect; ``None``: ``why_none`` says why
    there is none.
    """

    shrunk: Shrunk
    file: Path
    fails_again: bool
    script: Path | None = None
    why_none: str = ""

    @property
    def command(self) -> str:
        """The command that runs the file."""
        return command(self.shrunk.best, self.file)


def command(case: Case, file: Path) -> str:
    """The command that runs the scenario ``file`` of ``case``."""
    depth = f" --depth {case.depth}" if case.depth else ""
    return f"shardproof run {shlex.quote(str(file))}{depth}"


def name_of(case: Case) -> str:
    """The name of a file for ``case``, without an ending."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", case.id).strip("-.")[:_LONGEST_NAME]
    return f"{plain}-{hashlib.sha256(case.id.encode()).hexdigest()[:8]}"


def write(shrunk: Shrunk, file: Path) -> None:
    """Write the scenario of the best form so far."""
    best, reason = shrunk.best, (shrunk.result.reason.splitlines() or [""])[0]
    head = [
        f"Shrunk from {shrunk.case.id}",
        f"Cause: {shrunk.cause}",
        f"Run: {command(best, Path(file.name))}",
        f"Expected: {shrunk.result.verdict}: {reason[:300]}",
    ]
    about = f"the smallest case found that fails as {shrunk.case.implementation} did"
    text = document.text(best, about, str(shrunk.cause), "\n".join(head))
    options.write(file, text)


def fails_again(shrinker: Shrinker, shrunk: Shrunk, file: Path, vocabulary: Vocabulary) -> bool:
    """Whether the case of ``file``, read from the disk, fails for the cause of ``shrunk``."""
    (case,) = expand(load(file), vocabulary)
    _, cause = shrinker.confirm(document.at_depth(case, shrunk.best))
    return cause is not None and shrunk.cause.same(cause)

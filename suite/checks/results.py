"""Lines of ``cases.jsonl`` about cases and planted faults: written by ``cases``, read by reports.

``to_dict`` gives the line, ``from_dict`` reads it.  Unknown keys of a line and of its case are left
out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from shardproof.case import Case
from shardproof.checks import Outcome
from shardproof.contract import Depth, Options
from shardproof.files import Stored, field_names, require_types
from shardproof.registry import MUTANTS


class _Line(Stored):
    """A line without the keys of ``cases.jsonl`` that are ``None`` and optional."""

    OPTIONAL: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The line without its ``kind``."""
        fields = super().to_dict()
        return {k: v for k, v in fields.items() if v is not None or k not in self.OPTIONAL}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The instance that :meth:`to_dict` described.

        :raises TypeError: ``data`` lacks a field (lines have all but the optional ones), or one is
            of another type.
        """
        kind: Any = cls  # types are hashable
        fields = _known(kind, data)
        lacking = {*field_names(kind)} - {*fields, *cls.OPTIONAL}
        if lacking:
            raise TypeError(f"lacks {', '.join(sorted(lacking))}")
        if isinstance(fields.get("case"), Mapping):
            fields["case"] = _known(Case, fields["case"])
        line = super().from_dict(fields)
        require_types(line)
        return line


def _known(kind: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    names = field_names(kind)
    return {key: value for key, value in data.items() if key in names}


#: In the command that reruns a case of ``prove``: its run, where there is no folder yet.
OF_THIS_RUN = "--results RUN"


def rerun(case: Case, command: str = "shardproof run", folder: Path | None = None) -> str:
    """The command that judges ``case`` again; ``command``: how it begins where cases of scenarios
    ran, ``folder``: that of the run.
    """
    if case.scenario == "mutants" and not case.source:
        # A fault runs beside its parent, and a parent beside all its faults.
        planted = case.implementation.removeprefix(MUTANTS)
        unweighed = "" if "memory" in case.checks else " --tier quick"
        return f"shardproof mutants --impl {planted}{unweighed}{_depth(case)}"
    if not case.source and case.scenario != "prove":  # drawn by a campaign: no file has it
        return f"{command} --case '{case.id}'{_depth(case)}"
    return f"{command} {_argument(case, folder)} -k '{case.id}'{_depth(case)}"


def _depth(case: Case) -> str:
    planned = case.scenario == "prove" and not case.source  # with its depth
    return f" --depth {case.depth}" if case.depth and not planned else ""


def _argument(case: Case, folder: Path | None) -> str:
    """What names the scenario on the command line: its file, if it is not one of the suite's.

    A call of ``prove`` has none, only the plan of its run.
    """
    if case.scenario == "prove" and not case.source:
        run = OF_THIS_RUN if folder is None else f"--results {shlex.quote(str(folder))}"
        return f"--rerun-failed {run}"
    file = case.source.rpartition(":")[0]
    file = f"./{file}" if file.startswith("-") else file
    own = not file or file.startswith("scenarios/")
    return f"{case.scenario if own else shlex.quote(file)} --tier {case.tier}"


_FRACTION = re.compile(r"\d{1,40}(/[1-9]\d{0,39})?", re.ASCII)


@dataclass
class CaseResult(_Line):
    """What became of a case.

    ``worst_error`` and ``bound`` are those of the check ``equivalence``; bytes are fractions as
    text.  ``record`` is the file of the case's record in the run's folder, ``data`` the digest of
    its data set, ``depth`` how closely the system was held to its strategy, ``loss_factor`` how
    many times the true loss it was to tell, ``seen`` the events that occurred
    (:mod:`shardproof.evidence.seen`).
    """

    OPTIONAL = ("record", "data", "depth", "loss_factor", "seen")

    id: str
    case: Case
    verdict: str
    reason: str = ""
    checks: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    worst_error: float | None = None
    bound: float | None = None
    bytes_sent: str | None = None
    bytes_expected: str | None = None
    rerun: str = ""
    record: str | None = None
    data: str | None = None
    depth: Depth | None = None
    loss_factor: str | None = None
    seen: tuple[str, ...] | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The result in a line of ``cases.jsonl``.

        :raises TypeError: as for any line, or bytes that are no fraction.
        """
        result = super().from_dict(data)
        for figure in (result.bytes_sent, result.bytes_expected):
            if figure and not _FRACTION.fullmatch(figure):
                raise TypeError(f"no number of bytes: {figure!r:.80}")
        # JSON has no infinity: it is stored as text.
        result.seconds = float(result.seconds)
        result.worst_error, result.bound = (
            None if value is None else float(value) for value in (result.worst_error, result.bound)
        )
        return result

    def check(self, name: str) -> Outcome | None:
        """What the check ``name`` says; ``None``: it was not asked, or did not come to it."""
        return next((outcome for outcome in self.checks if outcome.check == name), None)

    def figures(self, check: str) -> Mapping[str, Any]:
        """The figures of one check; none where it was not asked."""
        outcome = self.check(check)
        return {} if outcome is None else outcome.figures


@dataclass(frozen=True)
class Kill(_Line):
    """What became of one planted fault.

    ``depth``: at which it was judged, if not as declared.  ``named``: whether the judge's words
    hold what the fault declares (``None``: it was not judged, or not as declared).
    """

    OPTIONAL = ("crash_says", "depth", "named")

    name: str
    parent: str
    killed_by: tuple[str, ...]
    failing: tuple[str, ...]
    killed: bool
    why_not: str
    verdict: str
    reason: str
    lane: str
    margin: float | None
    seconds: float
    crash_says: str = ""
    depth: str | None = None
    named: bool | None = None

    @property
    def left_out(self) -> bool:
        """Whether the budget had no room for it."""
        return self.verdict == "left out"


@dataclass(frozen=True)
class LeftOut(_Line):
    """A case, or a pair or cell that is timed (``pair``, as it is stored), that was not run."""

    OPTIONAL = ("case", "pair")

    id: str
    case: Case | None
    pair: Options | None
    reason: str

    def line(self) -> dict[str, Any]:
        """The line of ``cases.jsonl``."""
        return {"kind": "left out", **self.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What a line of ``cases.jsonl`` leaves out."""
        return super().from_dict({"case": None, "pair": None, **data})

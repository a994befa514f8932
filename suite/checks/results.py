"""Lines of ``cases.jsonl`` about cases and planted faults: written by ``cases``, read by reports.

``to_dict`` gives the line, ``from_dict`` reads it.  Unknown keys of a line and of its case are left
out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from shardproof.case import Case
from shardproof.checks import Outcome
from shardproof.contract import Depth, Options
from shardproof.files import Form, Number, Stored, from_others
from shardproof.registry import MUTANTS

# A claim is made before the numbers of a comparison.  An *operation* says what was done otherwise,
# a *factor* how many times too much there is, a *place* only where something is wrong.
Claim = Literal["operation", "factor", "place"]
#: Of a planted fault: its sentence says what the fault declares; it claims nothing, or no more than
#: a place; it claims an operation or a factor that the fault is not.
Told = Literal["exact", "vague", "wrong"]

#: Said where several numbers of the case may be the factor.
ALIKE = ", as many here: another number of ranks tells which"
#: What a comparison says of its tensor; a sentence that stands before it is the cause.
FINDING = re.compile(
    r"(?:differs from|further from fp64|summed loss|buffer differs|true gradient is zero)\b"
)
#: Checks whose sentences begin with a cause, where there is one.
_WITH_CAUSES = ("equivalence", "norm", "relations", "checkpoint")
_BEFORE = re.compile(r"^(?:\w+ does not hold|the restored state is correct, but .+ diverges): ")
_ENDS = re.compile(
    rf"{FINDING.pattern}|pre-clip|differs: |'[^']+' at step|step \d+[,:]|rank \d+, step"
)
#: What was done with what was saved is what was found.
_FOUND = re.compile(r"after the load|full_state|.*not loaded|evaluat(?:ion|e\(\))")
_PLACE = re.compile(
    r"only .+ (?:is|are) wrong|every tensor up to |only the loss of "
    r"|step \d+ is the first|only ranks? .+ differs|that state is wrong|(?:they|these) are wrong"
    r"|clip(?:s|ped) by a norm|wrong elements, of|is not the initial value"
    r"|the difference is within|not finite|no cause could be determined"
)
_FACTOR = re.compile(r"\btimes\b|too (?:large|small)|wrong sign|multiples of the expected")
_DTYPE = re.compile(r"as another dtype would be")


class _Line(Stored):
    """A line without the keys of ``cases.jsonl`` that are ``None`` and optional."""

    __pydantic_config__ = Stored.__pydantic_config__ | {"extra": "ignore"}
    OPTIONAL: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The line without its ``kind``."""
        whole = super().to_dict()
        return {k: v for k, v in whole.items() if v is not None or k not in self.OPTIONAL}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The instance that :meth:`to_dict` described.

        :raises TypeError: ``data`` lacks a field (lines have all but the optional ones), or one is
            of another type.
        """
        kind: Any = cls
        if lacking := {each.name for each in fields(kind)} - {*data, *cls.OPTIONAL}:
            raise TypeError(f"lacks {', '.join(sorted(lacking))}")
        case = data.get("case")
        if isinstance(case, Mapping):
            known = {each.name: case[each.name] for each in fields(Case) if each.name in case}
            data = {**data, "case": known}
        return from_others(cls, data)


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
    """The word that stands for the scenario on the command line: its file, if it is a user's.

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


def _bytes(text: Any) -> str:
    if isinstance(text, str) and _FRACTION.fullmatch(text):
        return text
    raise ValueError("Input should be a number of bytes")


#: A fraction as text.
Bytes = Annotated[str, Form(_bytes)]


@dataclass
class CaseResult(_Line):
    """The outcome of a case.

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
    seconds: Number = 0.0
    worst_error: Number | None = None
    bound: Number | None = None
    bytes_sent: Bytes | None = None
    bytes_expected: Bytes | None = None
    rerun: str = ""
    record: str | None = None
    data: str | None = None
    depth: Depth | None = None
    loss_factor: str | None = None
    seen: tuple[str, ...] | None = None

    def check(self, name: str) -> Outcome | None:
        """The sentence of the check ``name``; ``None``: it was not asked, or was not reached."""
        return next((outcome for outcome in self.checks if outcome.check == name), None)

    def figures(self, check: str) -> Mapping[str, Any]:
        """The figures of one check; none where it was not asked."""
        outcome = self.check(check)
        return {} if outcome is None else outcome.figures


@dataclass(frozen=True)
class Kill(_Line):
    """The outcome of one planted fault.

    ``depth``: at which it was judged, if not as declared.  ``named``: whether the judge's words
    hold what the fault declares (``None``: it was not judged, or not as declared); ``told``: or
    else whether they claim another cause.
    """

    OPTIONAL = ("crash_says", "depth", "named", "told")

    name: str
    parent: str
    killed_by: tuple[str, ...]
    failing: tuple[str, ...]
    killed: bool
    why_not: str
    verdict: str
    reason: str
    lane: str
    margin: Number | None
    seconds: float
    crash_says: str = ""
    depth: str | None = None
    named: bool | None = None
    told: Told | None = None

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
        """The part that a line of ``cases.jsonl`` leaves out."""
        return super().from_dict({"case": None, "pair": None, **data})


# ------------------------------------------------------------------------- what a sentence claims


def claim_of(line: str) -> Claim | None:
    """The claim in the line of one check; ``None``: nothing but the finding."""
    check, _, sentence = line.partition(": ")
    sentence = _BEFORE.sub("", sentence)
    if _DTYPE.search(sentence):
        return "operation"
    if check not in _WITH_CAUSES or _FOUND.match(sentence):
        return None
    end = _ENDS.search(sentence)
    cause = sentence[: end.start()].strip(": ") if end else ""
    if not cause:
        return None
    if _PLACE.search(cause):
        return "place"
    return "factor" if _FACTOR.search(cause) else "operation"


def told(says: str, reason: str) -> Told:
    """How near ``reason`` is to a fault that declares the pattern ``says``."""
    if re.search(says, reason):
        return "exact"
    claimed = {claim_of(line) for line in reason.splitlines()}
    return "wrong" if claimed & {"operation", "factor"} else "vague"

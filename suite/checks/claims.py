"""What a sentence of the judge claims, and how near a claim is to a fault that is known.

A claim is made before the numbers of a comparison.  An *operation* says what was done otherwise, a
*factor* how many times too much there is, a *place* only where something is wrong.
"""

from __future__ import annotations

import re
from typing import Literal

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
_BEFORE = re.compile(r"^(?:\w+ does not hold|what was saved was loaded, and yet): ")
_ENDS = re.compile(
    rf"{FINDING.pattern}|pre-clip|differs: |'[^']+' at step|step \d+[,:]|rank \d+, step"
)
#: What was done with what was saved is what was found.
_FOUND = re.compile(r"after the load|full_state|.*not loaded|evaluation")
_PLACE = re.compile(
    r"only what |only .+ (?:is|are) wrong|all is wrong up to |only the loss of "
    r"|step \d+ is the first|only ranks? .+ differs|that is wrong|they are wrong|these are wrong"
    r"|is not the initial value|no more is wrong|not finite|no cause could be told"
)
_FACTOR = re.compile(r"\btimes\b|too (?:large|small)|wrong sign|multiples of the truth")
_DTYPE = re.compile(r"as another dtype would be")


def of_line(line: str) -> Claim | None:
    """What the line of one check claims; ``None``: nothing but what was found."""
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
    claimed = {of_line(line) for line in reason.splitlines()}
    return "wrong" if claimed & {"operation", "factor"} else "vague"

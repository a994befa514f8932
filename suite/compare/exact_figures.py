"""The exact figures of a result: names, values and which way is better.

A figure is named ``check.key`` (``traffic.bytes_sent``); its value is a JSON scalar and is compared
with tolerance 0.  Lists and mappings are told by a digest (``#``, 12 hex digits of the SHA-256 of
their JSON), so that a changed byte shows without all of them being kept.  Left out is what no two
runs share: clocks, errors (another sum order is no change), and prose about sources.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from shardproof.checks import Outcome
from shardproof.verdicts import REPLICAS_ONLY, WORKING_PRECISION_ONLY

Scalar = str | int | float | bool | None
#: What JSON holds: figures before they are reduced to scalars, cells of cases, fingerprints.
Json = Scalar | Sequence["Json"] | Mapping[str, "Json"]
JsonObject = Mapping[str, Json]
Word = Literal["worse", "better", "changed"]

#: Figures that hang on clocks, on rounding, on the order in which asynchronous ranks came by, or on
#: which node has which rank.
INEXACT = frozenset(
    {
        *("equivalence.factor", "equivalence.undecidable", "equivalence.updates"),
        *("equivalence.stale", "memory.allocator", "memory.source", "schedule.measured"),
        *("traffic.between_nodes", "traffic.source"),
    }
)
#: Of pipelines these hang on when a message comes; in 571 pairs of other results peaks were equal.
OF_MESSAGES = frozenset({"memory.peaks", "schedule.activations"})
#: Exact where torch is the same build and chooses the same kernels; elsewhere these take other
#: temporaries, and a system that frees late holds others at an observation.
OF_ONE_CPU = frozenset({"memory.peaks", "memory.peak_bytes", "memory.resident"})
#: Exact where Python is the same release, and ranks were started in the same way: else it pickles
#: objects to other lengths (what two of them share, such as an interned string, is written once).
OF_ONE_PYTHON = frozenset({"traffic.control_bytes"})
#: Which way is better; of what is not named a difference is neither.
_LESS = frozenset(
    {
        *("memory.bytes_held", "memory.peak_bytes", "memory.ledger_bytes_a"),
        *("memory.ledger_bytes_b", "replicas.different", "schedule.in_flight_most"),
        *("traffic.bytes_sent", "traffic.calls_per_step", "traffic.control_bytes"),
        "traffic.setup_bytes",
    }
)
_MORE = frozenset(
    {
        *("equivalence.compared", "memory.ratio_measured", "overlap.gathers_ahead"),
        *("overlap.hidden", "overlap.issued_inside_backward"),
        *("relations.compared", "replicas.compared"),
    }
)
STATUS = ".status"
VERDICT = "verdict"
#: How closely a system was held to its strategy; the more loosely, the less a pass says.
DEPTH = "depth"
#: What an adapter multiplies losses by, which may undo a defect.
LOSS_FACTOR = "loss_factor"
_STRICTNESS = {"family": 0, "layout": 1, "own": 1}
#: From good to bad; what a change of verdict or of a check's status is measured by.
_ORDER = (
    *("pass", WORKING_PRECISION_ONLY, "killed", "timed", "holds", "xpass", "xfail", "below"),
    *("skip", REPLICAS_ONLY, "precondition", "inconclusive", "undecidable"),
    *("over budget", "flaky", "judge error"),
    *("refused", "hang", "crash", "fail"),
)
_NUMBER = re.compile(r"-?[0-9]+(/0*[1-9][0-9]*)?\Z")


def of_checks(
    checks: Sequence[Outcome], stages: int = 1
) -> tuple[dict[str, Scalar], dict[str, Json]]:
    """Figures of a result on ``stages`` pipeline ranks, and what digests among them stand for."""
    figures: dict[str, Scalar] = {}
    deep: dict[str, Json] = {}
    for check in checks:
        name = check.check
        figures[name + STATUS] = check.status
        for key, value in check.figures.items():
            figure = f"{name}.{key}"
            if figure in INEXACT or (stages > 1 and figure in OF_MESSAGES):
                continue
            figures[figure] = value
            if isinstance(value, (dict, list)):
                deep[figure], figures[figure] = value, digest(value)
            # One number for what is a number on every rank.
            if figure == "memory.peaks":
                peaks = [at.get("all", 0) for places in value.values() for at in places.values()]
                figures["memory.peak_bytes"] = max(peaks, default=0)
            elif figure == "schedule.in_flight":
                figures["schedule.in_flight_most"] = max(value.values(), default=0)
    return figures, deep


def digest(value: Any) -> str:
    """Stands for a list or mapping: equal for equal JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return "#" + hashlib.sha256(text.encode()).hexdigest()[:12]


def word(figure: str, before: Scalar, after: Scalar) -> Word:
    """Whether a figure that differs got worse, better, or neither."""
    if figure == VERDICT or figure.endswith(STATUS):
        was, now = _grade(before), _grade(after)
        if was is None or now is None or was == now:
            return "changed"
        return "worse" if now > was else "better"
    if figure == DEPTH:
        strict, stricter = (_STRICTNESS.get(str(value), 0) for value in (before, after))
        return "changed" if strict == stricter else "worse" if strict > stricter else "better"
    if figure not in _LESS and figure not in _MORE:
        return "changed"
    old, new = number(before), number(after)
    if old is None or new is None or old == new:
        return "changed"
    return "better" if (new < old) == (figure in _LESS) else "worse"


def _grade(value: Scalar) -> int | None:
    """Place in the order from good to bad; `None` of what has none, such as `oversubscribed`."""
    text = str(value)
    word = text if text in _ORDER else text.split("(", 1)[0].strip()
    return _ORDER.index(word) if word in _ORDER else None


def number(value: Scalar) -> Fraction | None:
    """The exact number that a figure is, also as text (``7/2``); `None` of any other."""
    if isinstance(value, str):
        return Fraction(value) if _NUMBER.match(value) else None
    if isinstance(value, bool) or value is None:
        return None
    return Fraction(value)


def show(value: Scalar) -> str:
    """A figure for people: thousands apart."""
    exact = number(value)
    if exact is None or isinstance(value, float):
        return "-" if value is None else str(value)
    if exact.denominator == 1:
        return f"{exact.numerator:,}"
    return f"{float(exact):,.3f} ({value})"


def first_difference(before: Any, after: Any, path: str = "") -> str:
    """Where two nested values first differ, as ``rank.phase.class: old, now new``."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after}, key=str):
            if key not in before or key not in after:
                state = "is new" if key not in before else "is gone"
                return f"{_joined(path, key)} {state}"
            if before[key] != after[key]:
                return first_difference(before[key], after[key], _joined(path, key))
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            return f"{path or 'it'} has {len(after)} entries, not {len(before)}"
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new:
                return first_difference(old, new, _joined(path, index))
    return f"{path or 'it'}: {_short(before)}, now {_short(after)}"


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _short(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."

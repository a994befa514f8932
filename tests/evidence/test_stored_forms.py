"""What runs stored before comes back, and is written again byte for byte.

``tests/data/stored_forms.jsonl`` holds lines ``[class, stored form]`` of real runs of evidence
format 7.  Fields with a default may be added; another form of those that are there is another
format, since digests in baselines depend on the bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardproof.case import Case, CheckpointPlan, Fault
from shardproof.checks import Outcome
from shardproof.checks.memory import MemoryFigures
from shardproof.checks.overlap import OverlapFigures
from shardproof.checks.results import CaseResult, Kill, LeftOut
from shardproof.checks.traffic import TrafficFigures
from shardproof.costs.model_facts import ModelFacts
from shardproof.evidence.account import Account
from shardproof.evidence.records import (
    Drawn,
    OracleFacts,
    RankRecord,
    TensorDigest,
    Voted,
    WorkloadFacts,
)
from shardproof.files import from_plain, standard, to_plain
from shardproof.ledgers.memory.log import MemoryLog
from shardproof.ledgers.traffic import LoggedCall
from shardproof.registry.declaration import Declaration
from shardproof.runs.random_kills import RandomKills

_CLASSES: tuple[Any, ...] = (
    *(
        Account,
        LoggedCall,
        Case,
        CaseResult,
        CheckpointPlan,
        Declaration,
        Drawn,
        Fault,
        Kill,
        LeftOut,
    ),
    *(MemoryFigures, MemoryLog, ModelFacts, OracleFacts, Outcome, OverlapFigures, RandomKills),
    *(RankRecord, TensorDigest, TrafficFigures, Voted, WorkloadFacts),
)
KINDS = {kind.__name__: kind for kind in _CLASSES}
FILE = Path(__file__).parents[1] / "data" / "stored_forms.jsonl"
FORMS = [tuple(json.loads(line)) for line in FILE.read_text().splitlines()]
NAMES = [f"{name}{number}" for number, (name, _) in enumerate(FORMS)]
each_form = pytest.mark.parametrize(("name", "form"), FORMS, ids=NAMES)


def written(value: Any) -> Any:
    form = value.to_dict() if hasattr(value, "to_dict") else to_plain(value)
    return standard(form)


def without_new(form: Any, before: Any) -> Any:
    """``form`` without fields that ``before`` lacks."""
    if isinstance(form, dict) and isinstance(before, dict):
        return {key: without_new(form[key], before[key]) for key in form if key in before}
    if isinstance(form, list) and isinstance(before, list) and len(form) == len(before):
        return [without_new(one, other) for one, other in zip(form, before, strict=True)]
    return form


def read(name: str, form: Any) -> Any:
    kind = KINDS[name]
    return kind.from_dict(form) if hasattr(kind, "from_dict") else from_plain(kind, form)


def test_every_class_has_an_example() -> None:
    assert {name for name, _ in FORMS} == {*KINDS}


@each_form
def test_a_form_is_written_as_it_was_read(name: str, form: dict[str, Any]) -> None:
    again = without_new(written(read(name, form)), form)
    assert json.dumps(again) == json.dumps(form)


@each_form
def test_unknown_keys_and_missing_ones_are_refused(name: str, form: dict[str, Any]) -> None:
    if name not in ("CaseResult", "Kill", "LeftOut", "TensorDigest"):  # lines may have more keys
        with pytest.raises(TypeError, match="unheard_of: Unexpected keyword argument, not 1"):
            read(name, form | {"unheard_of": 1})
    required = {"RankRecord": "rank", "Account": "case", "Case": "id", "Kill": "margin"}
    key = required.get(name) or ("verdict" if name == "CaseResult" else "")
    if key:
        with pytest.raises(TypeError, match=f"{key}: Field required|lacks {key}"):
            read(name, {k: v for k, v in form.items() if k != key})


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"seconds": "soon"}, "seconds: Value error, Input should be a number, not 'soon'"),
        ({"verdict": 1}, "verdict: Input should be a valid string, not 1"),
        ({"checks": {}}, "checks: Input should be a valid array, not {}"),
        ({"bytes_sent": "4/0"}, "bytes_sent: Value error, Input should be a number of bytes"),
        ({"worst_error": True}, "worst_error: Value error, Input should be a number, not True"),
        ({"seen": "all"}, "seen: Input should be a valid array, not 'all'"),
        ({"case": {"steps": "3"}}, "case.steps: Input should be a valid integer, not '3'"),
        ({"case": {"steps": True}}, "case.steps: Input should be a valid integer, not True"),
        ({"case": {"ledgers": 1}}, "case.ledgers: Input should be a valid boolean, not 1"),
        ({"case": {"mesh": {"shard": 2.5}}}, "case.mesh.shard: Input should be a valid integer"),
        ({"case": {"mesh": []}}, "case.mesh: Input should be an object, not []"),
        ({"case": {"lane": "fp65"}}, "case.lane: Input should be 'bitwise', 'dyadic', 'fp64' or"),
    ],
)
def test_a_line_of_others_must_have_the_types_as_they_are(wrong: dict[str, Any], says: str) -> None:
    form = next(form for name, form in FORMS if name == "CaseResult")
    if "case" in wrong:
        wrong = {"case": form["case"] | wrong["case"]}
    with pytest.raises(TypeError) as refused:
        CaseResult.from_dict(form | wrong)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_numbers_that_json_lacks_are_read_as_numbers() -> None:
    form = next(form for name, form in FORMS if name == "Kill" and form["margin"] == "inf")
    assert Kill.from_dict(form).margin == float("inf")


def test_a_line_may_hold_half_a_surrogate_pair() -> None:
    form = next(form for name, form in FORMS if name == "CaseResult")
    assert CaseResult.from_dict(form | {"reason": "a\ud800b"}).reason == "a\\ud800b"

"""Predicted and real seconds of a step: verdicts, the machine of the probes, and a real study.

No test here asserts an absolute time.
"""

from __future__ import annotations

import math

import pytest

from shardproof.bench.collectives import OPERATIONS
from shardproof.bench.subjects import GroupRecord, ProbeRecord
from shardproof.simulate import machines
from shardproof.verdicts import BROKEN, HELD, NOT_DECIDED
from tools.studies import step_seconds, step_turns
from tools.studies.model_check import CODES

#: Seconds of steps that vary by 3 % from round to round.
REAL = [1.0, 1.03, 0.98, 1.02, 0.97, 1.0, 1.01, 0.99]


@pytest.mark.parametrize(
    ("factor", "word", "code"),
    [(1.0, "holds", HELD), (1.1, "holds", HELD), (2.0, "broken", BROKEN), (0.5, "broken", BROKEN),
     (1.15, "inconclusive", NOT_DECIDED), (0.85, "inconclusive", NOT_DECIDED)],
)  # fmt: skip
def test_a_ratio_holds_only_if_its_whole_interval_is_near_1(
    factor: float, word: str, code: int
) -> None:
    text, found = step_seconds.judge([factor] * len(REAL), REAL)
    assert (found, CODES[found]) == (word, code)
    assert text.startswith(f"{factor:.2f} [")


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.5])
def test_a_doubled_prediction_never_holds(noise: float) -> None:
    real = [1 + noise, 1 - noise] * 4
    assert step_seconds.judge([2 * each for each in real], real)[1] == "broken"
    assert step_seconds.judge([2.0] * len(real), real)[1] != "holds"


def probed(rates: list[float], alpha: float, beta: float) -> ProbeRecord:
    """Probes with such FLOP rates, and calls of these constants, in as many sweeps."""
    calls = []
    for operation in OPERATIONS:
        # Rounds, and payloads that one of 2 ranks sends; reduce-scatter is an all-reduce of gloo.
        rounds, volume = {"all_gather": (1, 0.5), "broadcast": (1, 1)}.get(operation, (2, 1))
        for size in step_turns.PAYLOADS:
            seconds = rounds * alpha + volume * size * beta
            calls.append((operation, size, [seconds] * len(rates)))
    used = dict.fromkeys(OPERATIONS, (2.0, 1.0))
    return ProbeRecord({"": GroupRecord(2, calls, used)}, rates, [1e10] * len(rates))


def test_the_machine_has_the_constants_of_the_probes() -> None:
    fast, slow = probed([8e10, 6e10, 9e10], 1e-4, 1e-9), probed([7e10, 7e10, 5e10], 1e-4, 1e-9)
    on = step_seconds.machine([fast, slow])
    assert on.flops == {"float32": 6e10}  # of 7, 6 and 5, those of the slower rank
    assert math.isclose(on.intra.bandwidth, 1e9) and math.isclose(on.intra.latency, 1e-4)
    assert (on.bandwidth, on.busy) == (1e10, 0.5)
    assert on.gap == machines.small_operator_seconds()


def test_steps_and_constants_take_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two systems, two rounds: constants before and after the two steps of each turn."""
    seen: list[tuple[list[float], ...]] = []

    def judged(*both: list[float]) -> tuple[str, str]:
        seen.append(both)
        return "2.00", "broken"

    monkeypatch.setattr(step_seconds, "PARAMS", {"width": 32, "heads": 4, "layers": 1, "seq": 8})
    monkeypatch.setattr(step_seconds, "judge", judged)
    original = step_seconds.row

    def watched(run, turns):  # type: ignore[no-untyped-def]
        for records, steps in (turn for rank in turns for turn in rank):
            assert len(records.flop_rates) == len(steps) == 2
        return original(run, turns)

    monkeypatch.setattr(step_seconds, "row", watched)
    assert step_seconds.run(["reference/ddp", "reference/zero1"], rounds=2) == BROKEN
    assert [len(each) for both in seen for each in both] == [2] * 4
    assert min(seconds for both in seen for each in both for seconds in each) > 0
    assert capsys.readouterr().out.count("| 2.00 | broken |") == 2

"""Further state and loss terms (contract 3): sound systems pass, each broken promise is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardproof import OwnWorkload, contract
from shardproof.checks import equivalence
from shardproof.contract import Capabilities, Now, OptimizerSpec
from shardproof.registry import follows

ROOT = Path(__file__).parents[2]
SGD = OptimizerSpec()
GPT = "{name: charnames_gpt, global_batch: 12, params: {layers: 1, width: 16, seq: 8}}"
EXPERTS = "{name: digits_experts, global_batch: 12, params: {channels: 4, layers: 2, scope: SCOPE}}"
OWN = '{name: "test_extra_state:counting", global_batch: 12}'


class Counting(nn.Module):
    """A bias that training never touches, and counts of what forwards have seen."""

    bias: Tensor
    load: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 2)])
        self.register_buffer("bias", torch.zeros(2))
        self.register_buffer("load", torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        scores = self.blocks[0](inputs) + self.bias
        if self.training and torch.is_grad_enabled():
            chosen = scores.detach().argmax(-1)
            self.load += nn.functional.one_hot(chosen, 2).sum(0)
        return scores


def points(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(size, 6, generator=generator)
    return inputs, (inputs[:, :2].sum(1) > 0.3).long()


counting = OwnWorkload(Counting, nn.CrossEntropyLoss(reduction="none"), points)

SCENARIO = """
name: NAME
about: systems with state or terms of their own
sees: [state]
workload: WORKLOAD
matrix:
  implementation: [SYSTEMS]
  backend: in_memory
  mesh: {replicate: [RANKS]}
  optimizer: {name: sgd, weight_decay: 0.1}
  lane: fp64
checks: [equivalence, replicas, norm, traffic, memory, active]
steps: 3
"""
#: Name of a scenario -> workload, classes of tests/support/followed.py, numbers of ranks.
SCENARIOS = {
    "sound": (
        GPT,
        "Averaging HeldInBfloat16 WithoutRules Equal Scheduled Given Version2",
        "1, 3",
    ),
    "unseen": (GPT, "FrozenInBfloat16 WithoutRulesApart WithoutRulesStill", "2"),
    "broken": (
        GPT,
        "CountsMicroBatches LacksOne Invents EqualButStill EqualButApart ScheduledLate GivenOfOne "
        "DecaysSlower IsTheParameter DecaysTwice UsesMomentum RoundsOne",
        "2",
    ),
    "adamw": (GPT, "DecaysTwice UsesBetas UsesEps", "2"),
    "moved": (OWN, "MovesBuffer", "1, 3"),
    "unusable": (GPT, "ScheduledByDivision ScheduledByItself", "2"),
    "unmoved": (OWN, "MovesByLocalCounts ForgetsToMove", "2"),
    "global": (EXPERTS.replace("SCOPE", "global"), "AddsTerms", "1, 2, 5"),
    "rank": (EXPERTS.replace("SCOPE", "rank"), "AddsTerms", "2, 5"),
    "micro-batch": (EXPERTS.replace("SCOPE", "micro-batch"), "AddsTerms Version2", "2"),
    "wrong-terms": (
        EXPERTS.replace("SCOPE", "global"),
        "TermOfThisRank TermOfMicroBatches TermTimesRanks LeavesTermsOut Version2 "
        "PullTimesRanks PullsNothing PullOfThisRank TermOfEach TermOfTheFirst",
        "2",
    ),
}
SOUND = ("sound", "moved", "global", "rank", "micro-batch")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[tuple[str, str]]]]:
    """Scenario -> class -> verdict and reason of each of its cases: one run of all."""
    folder, files = tmp_path_factory.mktemp("contract3"), []
    for name, (workload, systems, ranks) in SCENARIOS.items():
        classes = ", ".join(f'"followed:{system}"' for system in systems.split())
        text = SCENARIO.replace("NAME", name).replace("WORKLOAD", workload)
        text = text.replace("sgd", "adamw") if name == "adamw" else text
        files.append(folder / f"{name}.yaml")
        files[-1].write_text(text.replace("SYSTEMS", classes).replace("RANKS", ranks))
    paths = (ROOT, ROOT / "tests/support", Path(__file__).parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "shardproof", "run", *map(str, files), "-j", "1"]
    subprocess.run([*command, "--results", str(folder / "run")], env=env, cwd=folder, check=False)
    found: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for line in (folder / "run/cases.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "verdict" in row:
            scenario, system = row["id"].split("::")[:2]
            of = found.setdefault(scenario.partition("[")[0], {})
            of.setdefault(system.partition(":")[2], []).append(
                (row["verdict"], row["reason"] or "")
            )
    return found


def test_sound_systems_pass(told: dict[str, dict[str, list[tuple[str, str]]]]) -> None:
    for scenario in SOUND:
        for system, cases in told[scenario].items():
            assert [verdict for verdict, _ in cases] == ["pass"] * len(cases), (system, cases)
        assert {*told[scenario]} == {*SCENARIOS[scenario][1].split()}


@pytest.mark.parametrize(
    ("scenario", "system", "says"),
    [
        ("broken", "CountsMicroBatches", "'updates' was updated 2 times (once a micro-batch"),
        ("broken", "LacksOne", "no rank returns 'average."),
        ("broken", "Invents", "'more' has no rule"),
        (
            "broken",
            "EqualButStill",
            "'temperature' was never updated: it still has its value from setup",
        ),
        ("broken", "EqualButApart", "elements of 'temperature'"),
        (
            "broken",
            "ScheduledLate",
            "the update used optimizer.weight_decay of step 0, not of step 1",
        ),
        ("broken", "GivenOfOne", "'largest'"),
        ("broken", "DecaysSlower", "'average.*' is 0.9 * was + 0.1 * parameter: does not"),
        ("broken", "IsTheParameter", "'average.*' is the parameter itself: does not"),
        ("broken", "DecaysTwice", "equivalence: weight decay was applied twice: "),
        ("broken", "UsesMomentum", "equivalence: the update used momentum 0.8, not 0.9: "),
        ("broken", "RoundsOne", "is rounded to bfloat16: differs from"),
        ("adamw", "DecaysTwice", "equivalence: weight decay was applied twice: "),
        ("adamw", "UsesBetas", "the update used betas (0.9, 0.999), not (0.9, 0.95): "),
        ("adamw", "UsesEps", "the update used eps 0.0001, not 1e-08: "),
        ("unmoved", "MovesByLocalCounts", "'bias'"),
        ("unmoved", "ForgetsToMove", "'bias' still has its value from before step 0"),
        (
            "wrong-terms",
            "TermOfThisRank",
            "'balance' is computed over each rank, not over the global batch and counts 0.5 times",
        ),
        ("wrong-terms", "TermOfMicroBatches", "'balance' is computed over each micro-batch"),
        ("wrong-terms", "TermTimesRanks", "'balance' counts 2 times"),
        (
            "wrong-terms",
            "TermOfEach",
            "'balance' is computed over each micro-batch of all ranks, not over the global batch",
        ),
        (
            "wrong-terms",
            "TermOfTheFirst",
            "'balance' is computed over the first micro-batch of all ranks, not over the global",
        ),
        ("wrong-terms", "LeavesTermsOut", "'balance' was left out"),
        (
            "wrong-terms",
            "PullTimesRanks",
            "equivalence: in the gradients, the loss term 'balance' counts 2 times",
        ),
        (
            "wrong-terms",
            "PullsNothing",
            "equivalence: in the gradients, the loss term 'balance' was left out",
        ),
        (
            "wrong-terms",
            "PullOfThisRank",
            "in the gradients, the loss term 'balance' is computed over each rank, not over the g",
        ),
    ],
)
def test_each_broken_promise_is_seen(
    told: dict[str, dict[str, list[tuple[str, str]]]], scenario: str, system: str, says: str
) -> None:
    [(verdict, reason)] = told[scenario][system]
    assert verdict == "fail"
    assert says in reason


@pytest.mark.parametrize(
    ("system", "says"),
    [
        ("ScheduledByDivision", "'optimizer.weight_decay' is inf in step 0"),
        ("ScheduledByItself", "a formula of 'step', not of 'was'"),
    ],
)
def test_a_schedule_that_no_update_can_use_is_no_fault_of_the_judge(
    told: dict[str, dict[str, list[tuple[str, str]]]], system: str, says: str
) -> None:
    [(verdict, reason)] = told["unusable"][system]
    assert verdict == "crash" and says in reason


def test_a_schedule_that_ends_below_zero_breaks_no_cause() -> None:
    rules = follows.of_rules({"optimizer.lr": "0.1 * (1 - step / 3)"}, SGD)
    assert rules.unusable(4) == "" and "is -0.03" in rules.unusable(5)
    values = [rules.settings(step)["lr"] for step in range(5)]
    assert [follows.is_usable(value) for value in values] == [True] * 4 + [False]


@pytest.mark.parametrize("decay", [0.5, 0.9999999, 1e-7, 1 / 3])
def test_a_rule_has_all_digits_of_a_decay(decay: float) -> None:
    rules = follows.of_rules({"mean": contract.average(decay)}, SGD)
    was, held = torch.tensor(1.0, dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64)
    now = Now(1, {"mean": was}, {"": held}, {}, {}, ())
    assert float(rules.values(["mean"], now)["mean"]) == decay * 1.0 + (1 - decay) * 3.0


def test_a_rule_whose_changes_are_below_the_bound_is_undecidable(
    told: dict[str, dict[str, list[tuple[str, str]]]],
) -> None:
    [(verdict, reason)] = told["unseen"]["FrozenInBfloat16"]
    assert verdict == "undecidable" and "every change by the rule of 'average.*' is below" in reason


@pytest.mark.parametrize(
    ("system", "says"),
    [
        ("WithoutRulesApart", "replicas 0 and 1 differ"),
        (
            "WithoutRulesStill",
            "was never updated: it still has its value from setup",
        ),
    ],
)
def test_state_without_any_rule_is_equal_and_moves(
    told: dict[str, dict[str, list[tuple[str, str]]]], system: str, says: str
) -> None:
    [(verdict, reason)] = told["unseen"][system]
    assert verdict == "fail" and says in reason, reason


def test_a_class_of_version_2_is_not_asked_for_terms_over_the_global_batch(
    told: dict[str, dict[str, list[tuple[str, str]]]],
) -> None:
    [(verdict, reason)] = told["wrong-terms"]["Version2"]
    assert (verdict, "not sum loss terms of scope 'global'" in reason) == ("skip", True)


@pytest.mark.parametrize(
    ("dtypes", "says"),
    [(["float64", "int64"], ""), (["float32", "float64", "bfloat16"], "bfloat16 and float32")],
)
def test_further_state_that_is_held_narrower_is_told(dtypes: list[str], says: str) -> None:
    rows = [SimpleNamespace(kind="extra", dtype=dtype) for dtype in dtypes]
    rows.append(SimpleNamespace(kind="gradients", dtype="float16"))
    figures: Any = SimpleNamespace(tensors=rows, case=SimpleNamespace(dtype="float64"))
    assert equivalence._narrower(figures) == says


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"average.*": contract.average(0.99)}, ""),
        ({"a*b": "0 -> was"}, "may have one '*', at its beginning or its end"),
        ({"*a*": "0 -> was"}, "may have one '*', at its beginning or its end"),
        ({"optimizer.betas": "0.9"}, "is not a setting of updates"),
        ({"optimizer.lr": "given"}, "write a formula"),
        ({"x": "0 -> __import__('os')"}, "unexpected"),
        ({"x": "was + other"}, "unknown name 'other'"),
    ],
)
def test_rules_are_read_before_anything_runs(rules: dict[str, str], says: str) -> None:
    assert says in (found := follows.problem(Capabilities(follows=rules)))
    assert bool(found) == bool(says)

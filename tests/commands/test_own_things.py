"""What people have and is no class of the contract: sound ones pass, defective ones fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import own_models
import own_things as own
import pandas as pd
import pytest
from commands import here

from shardproof import prove
from shardproof.case import WorkloadSpec
from shardproof.cases.kinds.samples import workload as epochs
from shardproof.contract import GroupSpec, OptimizerSpec
from shardproof.errors import SelectionError

pytestmark = pytest.mark.launches

SUPPORT = Path(own.__file__).parent
BOTH: dict[str, Any] = {"worlds": (2, 3)}
HALVES: dict[str, Any] = {"lanes": ("working_precision",), "precision": {"reduce": "float16"}}


def verdicts(frame: pd.DataFrame) -> list[tuple[int, str]]:
    return list(zip(frame["world"], frame["verdict"], strict=True))


def fails(frame: pd.DataFrame, says: str) -> None:
    """Every case of ``frame`` does, with that sentence."""
    assert set(frame["verdict"]) == {"fail"}, list(frame["reason"])
    assert all(says in reason for reason in frame["reason"]), list(frame["reason"])


# ------------------------------------------------------------------------------------------ a hook


@pytest.mark.parametrize("hook", [own.averages, own.averages_at_once])
def test_a_sound_hook_passes(hook: Any) -> None:
    frame = prove(hook=hook, **BOTH)
    assert verdicts(frame) == [(2, "pass"), (3, "pass")], list(frame["reason"])


@pytest.mark.parametrize(
    ("hook", "state", "says"),
    [
        (own.forgets_to_divide, None, "times too large"),
        (own.reduces_even_buckets, None, "it was not reduced"),
        (own.sums_stale, own.Before, "this is the gradient of the step before"),
        (own.sends_halves, None, "are those of rounding to bfloat16 or float16"),
    ],
)
def test_a_wrong_hook_fails(hook: Any, state: Any, says: str) -> None:
    fails(prove(hook=hook, state=state, **BOTH), says)


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        (
            own.forgets_to_return,
            "the hook returned None; a hook is called with (state, bucket)",
        ),
        (
            own.gives_the_buffer,
            "the hook returned a Tensor; a hook is called with (state, bucket)",
        ),
        (
            own.gives_nothing_later,
            "the hook returned a Future of None; a hook is called with",
        ),
    ],
)
def test_a_hook_that_gives_no_future_is_refused_where_it_stands(hook: Any, says: str) -> None:
    (row,) = prove(hook=hook, worlds=2, steps=1).to_dict("records")
    assert row["verdict"] == "refused" and says in row["reason"], row["reason"]
    line = hook.__code__.co_firstlineno
    assert f"own_things.py:{line}): " in row["reason"] and "Future" in row["reason"]


def test_a_hook_is_held_to_the_dtype_that_it_declares() -> None:
    frame = prove(hook=own.sends_halves, **BOTH, **HALVES)
    assert set(frame["verdict"]) == {"pass (working precision only)"}, list(frame["reason"])
    fails(prove(hook=own.forgets_to_divide, **BOTH, **HALVES), "times too large")


def test_a_scenario_takes_a_hook_by_its_path(tmp_path: Path) -> None:
    text = """\
name: mine
about: hooks of one's own
sees: [reduction]
workload: {name: charnames_gpt}
matrix:
  implementation:
    - {name: pytorch/ddp_hook, options: {hook: "own_things:averages"}, label: sound}
    - {name: pytorch/ddp_hook, options: {hook: "own_things:avarages"}, label: none}
  backend: gloo
  mesh: {replicate: 2}
  optimizer: sgd
checks: [equivalence, replicas]
"""
    (tmp_path / "mine.yaml").write_text(text)
    done = here("run", "mine.yaml", "--results", "run", cwd=tmp_path, paths=[SUPPORT])
    told = done.stdout + done.stderr
    assert done.returncode == 2 and "2 judged (1 refused, 1 pass)" in told, told
    assert "mine.yaml:8: option 'hook' = 'own_things:avarages': has no 'avarages'" in told
    assert "did you mean averages?" in told


# ------------------------------------------------------------------------------------ an optimizer


@pytest.mark.parametrize("optimizer", [own.sharded, own.Wrapper])
def test_a_sound_optimizer_passes(optimizer: Any) -> None:
    frame = prove(optimizer=optimizer, settings="adamw", clip=0.5, **BOTH)
    assert verdicts(frame) == [(2, "pass"), (3, "pass")], list(frame["reason"])


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (own.ForgetsToSend, "no update was made"),
        (own.StepsTwice, "every update is 2 times the true one"),
        (own.KeepsRate, "every update is 0.5 times the true one"),
    ],
)
def test_a_wrong_optimizer_fails(optimizer: Any, says: str) -> None:
    fails(prove(optimizer=optimizer, settings="adamw", **BOTH), says)


def test_a_colon_in_a_group_s_pattern_makes_no_path_of_an_optimizer() -> None:
    settings = OptimizerSpec("sgd", groups=(GroupSpec("(?:bias|norm)", weight_decay=0.1),))
    (row,) = prove("reference/ddp", optimizer=settings, worlds=2).to_dict("records")
    assert row["verdict"] == "pass", row["reason"]


def test_state_by_other_names_is_refused_and_none_is_needed() -> None:
    frame = prove(optimizer=own.OwnSlots, **BOTH)
    assert set(frame["verdict"]) == {"refused"}
    assert all("has the entries velocity" in reason for reason in frame["reason"])
    plain = OptimizerSpec("sgd", momentum=0.0)
    frame = prove(optimizer=own.OwnSlots, settings=plain, **BOTH)
    assert set(frame["verdict"]) == {"pass"}, list(frame["reason"])
    row, _ = prove(optimizer=own.without_groups, worlds=2).to_dict("records")
    assert row["verdict"] == "refused"
    assert "returned a WithoutGroups, which has no zero_grad or param_groups" in row["reason"]


# ---------------------------------------------------------------------------------------- a sampler


def test_a_sound_sampler_passes_also_resumed() -> None:
    frame = prove(sampler=own.Goes, **BOTH)
    assert verdicts(frame) == [(world, "pass") for world in (2, 3) for _ in epochs.USUAL]
    assert set(frame["workload"]) == {"epochs"} and set(frame["lane"]) == {"bitwise"}
    (row,) = prove(
        sampler=own.Goes,
        worlds=2,
        backends="gloo",
        workload=WorkloadSpec("epochs", params={"resume_at": 1, "resumes": 2, "into": 3}),
    ).to_dict("records")
    assert row["verdict"] == "pass", row["reason"]
    assert "workload=WorkloadSpec(" in row["rerun"] and "'resumes': 2" in row["rerun"]


def test_a_wrong_sampler_fails() -> None:
    frame = prove(sampler=own.CountsItsOwn, worlds=3)
    wrong = frame[frame["verdict"] == "fail"]
    assert [name.split("]")[0] for name in wrong["case"]] == [
        "prove[more-ranks",
        "prove[fewer-ranks",
    ]
    assert "lost in a resume in epoch 1" in wrong["reason"].iloc[0]
    assert "seen twice in epoch 1: before a resume and after it" in wrong["reason"].iloc[1]
    shuffled = prove(sampler=own.ForgetsTheEpoch, worlds=2).set_index("case")["reason"]
    told = {name.split("]")[0].removeprefix("prove["): reason for name, reason in shuffled.items()}
    assert "epoch 1 has the order of epoch 0" in told["pad"]
    assert "declines resume: the sampler has no state_dict and load_state_dict" in told["resumed"]


def test_a_sampler_of_one_world_is_not_asked_for_others() -> None:
    frame = prove(sampler=own.CountsItsOwn, options={"resume": "same_world"}, worlds=3)
    assert list(frame["verdict"]) == ["pass"] * 5 + ["skip"] * 2
    assert "declines other_world" in frame["reason"].iloc[-1]


def test_what_makes_no_sampler_is_refused() -> None:
    frame = prove(sampler=own.a_list, worlds=1, options={"resume": "never"})
    refused = frame[frame["verdict"] != "skip"]
    assert set(refused["verdict"]) == {"refused"}
    assert all("list has no set_epoch" in reason for reason in refused["reason"])


# -------------------------------------------------------------------- a plan of tensor parallelism

CHAIN: dict[str, Any] = {"workload": own_models.CHAIN}


def test_a_sound_plan_passes() -> None:
    frame = prove(tensor_plan=own.CHAIN_PLAN, clip=0.5, **CHAIN, **BOTH)
    assert verdicts(frame) == [(2, "pass"), (3, "pass")], list(frame["reason"])


def test_a_wrong_plan_fails() -> None:
    fails(prove(tensor_plan=own.WRONG_BIAS, **CHAIN, **BOTH), "summed loss")
    fails(prove(tensor_plan=own.cuts_heads, worlds=2), "summed loss")


def test_a_plan_for_another_model_is_refused() -> None:
    (row,) = prove(tensor_plan=own.ELSEWHERE, worlds=2, **CHAIN).to_dict("records")
    assert row["verdict"] == "refused" and "the model has no module 'blocks.*.up'" in row["reason"]


# ------------------------------------------------------------------------------------- a schedule

DEEP = WorkloadSpec("charnames_gpt", params={"layers": 6}, micro_batches=4)


@pytest.mark.parametrize(
    ("schedule", "workload"), [(own.OwnGPipe, own_models.CHAIN), (own.Ascending, DEEP)]
)
def test_a_sound_schedule_passes(schedule: Any, workload: Any) -> None:
    frame = prove(schedule=schedule, workload=workload, **BOTH)
    assert verdicts(frame) == [(2, "pass"), (3, "pass")], list(frame["reason"])


def test_a_wrong_schedule_fails() -> None:
    fails(prove(schedule=own.DividesAgain, **CHAIN, **BOTH), "every gradient is 2 times too small")


def test_an_unsound_schedule_is_not_run() -> None:
    (row,) = prove(schedule=own.LeavesOneOut, workload=DEEP, worlds=2).to_dict("records")
    assert row["verdict"] == "refused", row["reason"]
    assert "Invalid backward microbatches for stage 1" in row["reason"]


def test_a_file_of_actions_is_a_schedule() -> None:
    file = {"name": "own_things:two_stages.csv", "chunks": 1}
    (row,) = prove(schedule=file, worlds=2, **CHAIN).to_dict("records")
    assert row["verdict"] == "pass", row["reason"]


# -------------------------------------------------------------- what whole systems may ask for


def test_a_launcher_s_environment_is_there_for_processes() -> None:
    frame = prove(own.ReadsEnvironment, worlds=(2, 3), backends="gloo")
    assert set(frame["verdict"]) == {"pass"}, list(frame["reason"])
    frame = prove(own.ReadsEnvironment, worlds=2)
    assert list(frame["verdict"]) == ["crash", "skip"]
    assert all("are threads and share one environment" in reason for reason in frame["reason"])


def test_clipping_may_be_declined_in_one_dtype() -> None:
    lanes = ("fp64", "working_precision")
    frame = prove(own.ClipsInFloat32, worlds=2, clip=(None, 0.5), lanes=lanes)
    only = "pass (working precision only)"
    frame = frame[~frame["case"].str.contains("idle-shares", regex=False)].reset_index()
    assert list(frame["verdict"]) == ["pass", "skip", only, only], list(frame["reason"])
    assert frame["reason"][1] == "declines clipping in float64: a kernel of float32"


@pytest.mark.parametrize(
    ("system", "says"),
    [
        (own.SaysClippin, "declines: 'clippin' is not a known word; did you mean clipping?"),
        (own.SaysFloat65, "declines in: 'float65' is not a known word; did you mean float64?"),
        (own.ClaimsTheLayout, "declines 'clipping', but claiming 'zero1' implies 'clipping'"),
    ],
)
def test_what_is_declined_must_mean_something(system: Any, says: str) -> None:
    fails(prove(system, worlds=2), says)


# --------------------------------------------------------------------------- what cannot be judged


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "nothing to judge is given - give one of these: an implementation, hook=, optimizer="),
        ({"implementation": "plain", "hook": own.averages}, "several things to judge are given"),
        ({"hook": lambda state, bucket: None}, "ranks cannot import this hook .*<lambda>"),
        ({"hook": "nowhere:mine"}, "'nowhere:mine': cannot be imported: ModuleNotFoundError"),
        ({"hook": "own_things:dist"}, "'own_things:dist': <module .* cannot be called"),
        (
            {"hook": own.takes_the_bucket},
            r"takes_the_bucket\(bucket: .*own_things.py:\d+\) does not accept .* \(state, bucket\)",
        ),
        (
            {"hook": own.averages, "state": own.averages},
            r"does not accept the arguments \(group\); .* returns",
        ),
        (
            {"optimizer": own.cuts_heads},
            r"own_things.py:\d+\) does not accept the arguments \(groups, settings\)",
        ),
        (
            {"sampler": own.without_seed},
            r"own_things.py:\d+\) does not accept .* \(dataset, num_replicas=, rank=, shuffle=",
        ),
        (
            {"tensor_plan": own.averages},
            r"does not accept the arguments \(model\); .* returns a plan",
        ),
        ({"hook": "own_things"}, "is not of the form package.module:name"),
        ({"implementation": "plain", "state": own.Before}, "state= needs hook="),
        ({"tensor_plan": own.NO_PLAN}, "'colwise' is not a ParallelStyle"),
        ({"schedule": own.Before}, "is not a schedule class of torch.distributed.pipelining"),
        (
            {"schedule": "own_things:three.csv"},
            "file three.csv does not exist in the folder of module own_things",
        ),
        (
            {"implementation": "plain", "settings": "sgd"},
            "settings= has no effect without a function",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused_before_anything_runs(
    tmp_path: Path, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(SelectionError, match=says):
        prove(**given, results=tmp_path / "run")
    assert not (tmp_path / "run").exists()

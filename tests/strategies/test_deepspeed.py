"""DeepSpeed's stages: its JSON form, which needs no DeepSpeed, and whole cases, which do."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from shardproof import registry, workloads
from shardproof.case import WorkloadSpec
from shardproof.checks.results import CaseResult
from shardproof.contract import GroupSpec, OptimizerSpec, Refused, ScalerSpec
from shardproof.costs import cost_model_class
from shardproof.costs.expression import facts_of, model_facts_in
from shardproof.impls.deepspeed.costs import DeepSpeedPipeline, DeepSpeedZero1, DeepSpeedZero3
from shardproof.impls.deepspeed.json_form import parse, section
from shardproof.impls.deepspeed.pipeline import tied_names
from shardproof.schedules import problems

sys.path.append(str(Path(__file__).parents[1] / "contract_trial"))
from trial_cases import case, compared, judged, told

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="the optional extra 'deepspeed' is not installed",
)
STAGES = (0, 1, 2, 3)
ALL_SHARDED = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
#: Fields of a case that DeepSpeed runs on CPUs.
FP32_ON_GLOO: dict[str, Any] = {
    "backend": "gloo",
    "dtype": "float32",
    "lane": "working_precision",
}


@pytest.mark.parametrize(
    ("stage", "options", "told_by"),
    [
        (1, {"zero_optimisation": {}}, "did you mean 'zero_optimization'"),
        (1, {"zero_optimization": {"reduce_bucket": 1}}, "did you mean 'zero_optimization.reduce"),
        (1, {"zero_optimization": {"stage": 2}}, "contradicts deepspeed/zero1"),
        (1, {"zero_optimization": {"stage": 7}}, "must be 0, 1, 2 or 3"),
        (1, {"zero_optimization": {"reduce_bucket_size": 0}}, "at least 1"),
        (
            1,
            {"zero_optimization": {"reduce_bucket_size": 1.5}},
            "must be a whole number, not",
        ),
        (0, {"zero_optimization": {"overlap_comm": True}}, "has no effect in stage 0"),
        (
            1,
            {"zero_optimization": {"overlap_com": True}},
            "did you mean 'zero_optimization.overlap",
        ),
        (2, {"zero_optimization": {"contigous_gradients": True}}, "contiguous_gradients"),
        (2, {"zero_optimization": {"offload_optimiser": {}}}, "offload_optimizer"),
        (3, {"zero_optimization": {"offload_params": {}}}, "offload_param"),
        (3, {"zero_optimization": {"Stage": 3}}, "did you mean 'zero_optimization.stage'"),
        (
            2,
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            "has no effect in stage 2",
        ),
        (3, {"zero_optimization": {"offload_param": {"divice": "cpu"}}}, "offload_param.device"),
        (3, {"gradient_clipping": 1.0}, "the scenario's clip"),
        (3, {"fp16": {"enabled": True}}, "'fp16': DeepSpeed is tested in fp32 only"),
        (0, {"bf16": {"enabled": True}}, "'bf16': DeepSpeed is tested in fp32 only"),
        (1, {"precision": {"parameters": "bfloat16"}}, "'precision': DeepSpeed is tested in fp32"),
        (0, {"zero_optimization": {"bucket": 1}}, "valid: zero_optimization.stage$"),
    ],
)
def test_bad_forms_are_refused_by_name(stage: int, options: dict[str, Any], told_by: str) -> None:
    with pytest.raises(Refused, match=told_by):
        parse(options, stage)


def test_what_is_valid_is_what_the_stage_takes() -> None:
    with pytest.raises(Refused, match=r"unknown option 'zero_optimization\.x'; valid: ") as told:
        parse({"zero_optimization": {"x": 1}}, 2)
    assert "use_multi_rank_bucket_allreduce" in str(told.value)
    assert "stage3" not in str(told.value) and "offload_param" not in str(told.value)


def test_a_loss_scale_is_refused_and_not_dropped() -> None:
    scaled = OptimizerSpec("sgd", scaler=ScalerSpec())
    with pytest.raises(Refused, match="scaler"):
        registry.load("deepspeed/zero1")().setup(Mock(), None, scaled, Mock(), {})


@pytest.mark.parametrize("stage", STAGES)
def test_an_empty_form_is_the_stage_with_its_defaults(stage: int) -> None:
    assert parse({}, stage).stage == stage
    assert section({}, stage) == {"stage": stage}


def test_sizes_in_floating_form_become_integers() -> None:
    given = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}}
    assert section(given, 2)["reduce_bucket_size"] == 500_000_000


@pytest.mark.parametrize("stage", STAGES)
def test_claims_need_no_deepspeed(stage: int) -> None:
    claims = registry.load(f"deepspeed/zero{stage}").capabilities({})
    assert claims.packages == ("deepspeed",)
    assert claims.backends == ("gloo",) and claims.dtypes == ("float32",)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("stage", STAGES)
def test_numbers_norms_and_bytes_hold(stage: int) -> None:
    groups = (GroupSpec("norm|bias", lr_scale=0.5, weight_decay=0.0),)
    options = {"zero_optimization": ALL_SHARDED} if stage == 3 else {}
    cases = [
        case(
            f"deepspeed/zero{stage}",
            {"shard" if stage else "replicate": 2},
            **FP32_ON_GLOO,
            optimizer=optimizer,
            options=options,
            checks=("equivalence", "replicas", "norm", "traffic", "active"),
        )
        for optimizer in (
            OptimizerSpec(),
            OptimizerSpec("adamw", lr=1e-3, weight_decay=0.1, groups=groups, clip_norm=0.05),
        )
    ]
    results = judged(cases)
    assert {r.verdict for r in results} == {"pass (working precision only)"}, told(results)
    assert all(compared(r) > 100 for r in results)


@needs_deepspeed
def test_ranks_as_threads_are_not_asked_of_it() -> None:
    (result,) = judged(
        [case("deepspeed/zero1", {"shard": 2}, dtype="float32", lane="working_precision")]
    )
    assert (result.verdict, result.reason) == ("skip", "runs on gloo only")


def test_without_the_package_a_case_is_skipped_and_says_so(tmp_path: Path) -> None:
    hidden = (
        "import sys, json, pathlib; sys.modules['deepspeed'] = None\n"
        "from shardproof.case import Case\n"
        "from shardproof.cases.leader import CaseTask, run_case\n"
        "case, *folders = json.loads(sys.argv[1])\n"
        "task = CaseTask(Case.from_dict(case), *map(pathlib.Path, folders))\n"
        "print(json.dumps(run_case(task)['result']))"
    )
    told_case = case("deepspeed/zero2", {"shard": 2}, backend="gloo", dtype="float32")
    payload = [told_case.to_dict(), str(tmp_path / "case"), str(tmp_path / "oracles")]
    command = [sys.executable, "-c", hidden, json.dumps(payload)]
    place = Path(__file__).parents[2]
    done = subprocess.run(command, check=True, cwd=place, stdout=subprocess.PIPE)
    result = CaseResult.from_dict(json.loads(done.stdout))
    assert result.verdict == "skip"
    assert "'deepspeed' is not installed" in result.reason
    assert "docs/install-extras.md" in result.reason


@pytest.mark.parametrize(
    ("options", "factor"),
    [({}, 1.5), ({"zero_optimization": {"use_multi_rank_bucket_allreduce": False}}, 1.0)],
)
def test_traffic_is_told_beside_the_textbook(options: dict[str, Any], factor: float) -> None:
    facts = facts_of(case("deepspeed/zero1", {"shard": 2}, options=options, dtype="float32"))
    textbook = cost_model_class(DeepSpeedZero1.textbook)(facts.model_facts)
    sent = DeepSpeedZero1(facts.model_facts).payload()
    assert sent / textbook.payload() == pytest.approx(factor, rel=0.01)


def test_what_is_not_weighed_is_named_with_its_reason() -> None:
    for options, classes in (
        ({}, {"parameters", "masters"}),
        ({"zero_optimization": ALL_SHARDED}, {"masters"}),
    ):
        facts = facts_of(case("deepspeed/zero3", {"shard": 2}, options=options, dtype="float32"))
        unjudged = DeepSpeedZero3(facts.model_facts).unjudged()
        assert set(unjudged) == classes and all(unjudged.values())


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_nothing_is_compiled_or_left_behind(tmp_path: Path) -> None:
    home, scenario = tmp_path / "home", tmp_path / "one.yaml"
    home.mkdir()
    scenario.write_text(
        "name: one\nabout: one case of every kind of partition\nsees: [files]\n"
        "workload: {name: dyadic_mlp}\n"
        "matrix:\n  implementation: [deepspeed/zero2, deepspeed/zero3]\n"
        "  backend: [gloo]\n  mesh: {shard: 2}\n  optimizer: sgd\n  lane: working_precision\n"
        "checks: [equivalence]\ntier: full\ndeadline: 120\n"
    )
    names = ("TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
    environment = {k: v for k, v in os.environ.items() if k not in names} | {"HOME": str(home)}
    command = [
        sys.executable,
        "-m",
        "shardproof",
        "run",
        str(scenario),
        "--tier",
        "full",
        "-j",
        "1",
    ]
    command += ["--results", str(tmp_path / "run")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    left = [path for path in home.rglob("*") if path.is_file() and "shardproof" not in str(path)]
    assert not left


def test_importing_the_adapter_changes_no_environment() -> None:
    program = (
        "import os; before = dict(os.environ)\n"
        "import shardproof.impls.deepspeed.zero1\n"
        "assert dict(os.environ) == before, set(os.environ) ^ set(before)"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root)


# ------------------------------------------------------------------------------------- pipelines

PIPELINE = "deepspeed/pipeline"


def test_a_pipeline_is_claimed_and_told_without_deepspeed() -> None:
    system = registry.load(PIPELINE)
    claims = system.capabilities({"split": [2, 1]})
    assert claims.packages == ("deepspeed",) and claims.backends == ("gloo",)
    with pytest.raises(Refused, match="did you mean 'dynamic_shape'"):
        system.capabilities({"dynamic_shapes": True})
    told_before = system.schedule({}, 3, 2)
    assert told_before is not None and problems(told_before) == []


def test_what_a_pipeline_sends_against_a_hand_count() -> None:
    """4 micro-batches of 2 samples, 8 positions, width 16, fp32: 1,024 bytes an activation."""
    sizes = {"layers": 2, "width": 16, "heads": 2, "seq": 8, "vocab": 96}
    spec = WorkloadSpec("charnames_gpt", ("tied_over_units",), 0, 8, 4, params=sizes)
    clipped = OptimizerSpec(clip_norm=0.05)
    told_case = case(PIPELINE, {"pipe": 2}, workload=spec, optimizer=clipped, dtype="float32")
    sent = {
        (f.operation, f.bytes, f.calls)
        for f in DeepSpeedPipeline(model_facts_in(facts_of(told_case))).flows()
    }
    tied = 2 * 96 * 16 * 4
    assert sent == {
        *(("send", 2 * 4 * 1024, 8), ("recv", 0, 8)),
        *(("broadcast", 8, 2), ("all_reduce", 8, 2), ("all_reduce", tied, 2)),
    }
    for dynamic, ints in ((False, 0), (True, 4 * 256)):
        told = replace(told_case, options={"dynamic_shape": dynamic})
        assert DeepSpeedPipeline(model_facts_in(facts_of(told))).metadata_bytes() == 4 * ints


@needs_deepspeed
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 2), (2, 1), (2, 4), (3, 2), (4, 9)])
def test_deepspeed_runs_the_order_that_is_told(ranks: int, micro_batches: int) -> None:
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    told_before = registry.load(PIPELINE).schedule({}, ranks, micro_batches)
    assert told_before is not None
    for rank in range(ranks):
        runs = TrainSchedule(micro_batches=micro_batches, stages=ranks, stage_id=rank)
        names = [type(command).__name__ for step in runs for command in step]
        wanted = {"F": "ForwardPass", "BW": "BackwardPass"}
        assert [wanted[a.op] for a in told_before.computed(rank)] == [
            name for name in names if name in wanted.values()
        ]


@pytest.mark.parametrize(
    ("traits", "found"),
    [((), {}), (("tied_over_units",), {0: ["embed.token.weight"], 3: ["head.weight"]})],
)
def test_what_two_stages_share_is_named_on_both(
    traits: tuple[str, ...], found: dict[int, list[str]]
) -> None:
    work = workloads.make(WorkloadSpec("charnames_gpt", traits=traits, params={"layers": 4}))
    build = work.build_for(0)
    whole = build("meta")
    assert tied_names([build.stage(whole, unit, unit + 1) for unit in range(4)]) == found


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("traits", [(), ("tied_over_units",)])
def test_a_pipeline_has_the_numbers_of_one_device(traits: tuple[str, ...]) -> None:
    sizes = {"layers": 2, "width": 16, "heads": 2, "seq": 8, "vocab": 96}
    spec = WorkloadSpec(
        "charnames_gpt", traits=traits, micro_batches=4, global_batch=8, params=sizes
    )
    groups = (GroupSpec("norm|bias", lr_scale=0.5, weight_decay=0.0),)
    adamw = OptimizerSpec("adamw", lr=1e-3, weight_decay=0.1, groups=groups)
    (result,) = judged(
        [
            case(
                PIPELINE,
                {"pipe": 2},
                **FP32_ON_GLOO,
                workload=spec,
                optimizer=adamw,
                checks=("equivalence", "replicas", "traffic", "memory", "active"),
            )
        ]
    )
    assert result.verdict == "pass (working precision only)", told([result])
    assert compared(result) > 100

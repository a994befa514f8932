"""``torch.distributed.pipelining``: what the adapter tells as its schedule is what runs, for every
schedule; what torch cannot do is refused in words; its private parts that the adapter stands on.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_ranks import succeed

from shardproof import registry, workloads
from shardproof.case import WorkloadSpec
from shardproof.comm import Mesh
from shardproof.contract import GroupSpec, Implementation, OptimizerSpec, Refused, ScalerSpec
from shardproof.costs.expression import facts_of
from shardproof.impls.pytorch import pipelining
from shardproof.impls.pytorch.costs.pipelining import TorchPipelining
from shardproof.impls.pytorch.pipelining import CLASSES, Options, place, plan
from shardproof.oracle import training
from shardproof.schedules import Action, problems
from shardproof.workloads import Workload

sys.path.append(str(Path(__file__).parents[1] / "contract_trial"))
import trial_calls
from trial_cases import case, compared, judged, results_of, told

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = "pytorch/pipelining"
SIZES = {"layers": 4, "width": 8, "heads": 2, "seq": 8, "vocab": 96}


def workload(*traits: str, **changes: Any) -> Workload:
    """A GPT of four units; ``changes`` are fields of the spec."""
    fields: dict[str, Any] = {"global_batch": 8, "micro_batches": 4, "params": SIZES}
    return workloads.make(WorkloadSpec("charnames_gpt", traits=traits, **(fields | changes)))


def make(work: Workload, rank: int, ranks: int, **options: Any) -> Implementation:
    """The system on this rank, set up."""
    system = registry.load(NAME)()
    spec = OptimizerSpec("adamw", lr=1e-2, clip_norm=0.05)
    system.setup(work.build_for(rank), work.state(), spec, Mesh({"pipe": ranks}), options)
    return system


# -------------------------------------------------------------------------------------- as data


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "zbv"}, "did you mean 'zb_v'"),
        ({"schedule": {"name": "interleaved", "chunk": 3}}, "did you mean 'schedule.chunks'"),
        ({"schedule": {"name": "zb_v", "chunks": 3}}, r"zb_v, .* stages per rank\) must be 2"),
        ({"schedule": {"name": "1f1b", "chunks": 2}}, r"1f1b, .* stages per rank\) must be 1"),
        (
            {"schedule": {"name": "looped_bfs", "chunks": -1}},
            r"stages per rank\) must be at least 1",
        ),
        ({"split": 2}, "'split' must be of type list of int"),
        ({"shapes": "static"}, "inferred, given"),
        ({"splits": [2, 2]}, "did you mean 'split'"),
    ],
)
def test_options_are_refused_with_what_is_valid(options: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        registry.load(NAME).capabilities(options)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 2), (2, 4), (3, 6), (4, 8), (4, 16)])
def test_what_torch_says_it_will_do_is_sound(name: str, ranks: int, micro_batches: int) -> None:
    made = plan(Options(name), ranks, micro_batches)  # type: ignore[arg-type]
    assert problems(made) == []
    assert made.place == place(Options(name), ranks)  # type: ignore[arg-type]
    for stage in range(made.stages):
        order = made.computed(made.place[stage])
        done = [a.micro for a in order if a.stage == stage and a.op in ("W", "BW")]
        assert (done == sorted(done)) == (name != "looped_bfs" or micro_batches == 1)


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "words"),
    [
        (
            "1f1b",
            4,
            2,
            "at least as many micro-batches as stages, but there are 2 micro-batches and 4",
        ),
        ("interleaved", 2, 7, "multiple of the number of rounds"),
        ("interleaved_zb", 2, 7, "multiple of the number of rounds"),
        ("dualpipe_v", 2, 3, "at least as many microbatches as stages"),
    ],
)
def test_micro_batches_that_torch_refuses(
    name: str, ranks: int, micro_batches: int, words: str
) -> None:
    with pytest.raises(Refused, match=f"'schedule' = {name!r}.*{words}"):
        registry.load(NAME).schedule({"schedule": name}, ranks, micro_batches)


def test_the_order_that_torch_exports_for_1f1b_is_not_what_it_runs() -> None:
    """Once it is, the adapter may translate it like the others."""
    stage = pipelining.SimpleNamespace(num_stages=2, stage_index=1)
    order = CLASSES["1f1b"](stage, 3)._get_pipeline_order()[1]
    exported = [a.microbatch_index for a in order if a and a.computation_type.value == "F"]
    ours = plan(Options("1f1b"), 2, 3).computed(1)
    assert [a.micro for a in ours if a.op == "F"] == [0, 1, 2]
    assert exported == [1, 2, 3]


def test_what_is_sent_and_kept_against_hand_counts() -> None:
    """4 micro-batches of 2 samples, 8 positions, width 16, fp64: 2,048 bytes an activation."""
    spec = WorkloadSpec(
        "charnames_gpt",
        global_batch=8,
        micro_batches=4,
        params={"layers": 4, "width": 16, "heads": 2, "seq": 8, "vocab": 96},
    )

    def cost_model(name: str, **changes: Any) -> TorchPipelining:
        options = {"schedule": name}
        return TorchPipelining(
            facts_of(case(NAME, {"pipe": 2}, options=options, workload=spec, **changes)).model_facts
        )

    v = cost_model("zb_v", optimizer=OptimizerSpec("adamw", clip_norm=1.0, scaler=ScalerSpec()))
    sent = {(f.axis, f.operation, f.bytes) for f in v.flows()}
    # Boundaries 0-1 and 2-3 cross; 1-2 is on rank 1. An all-reduce of n bytes is 2 (N-1) n.
    assert sent == {
        *(("pipe", "send", 2 * 2 * 4 * 2048), ("pipe", "recv", 0)),
        *(("pipe", "all_reduce", 16), ("pipe", "all_reduce", 8)),
    }
    # Rank 0 has stages 0 (gives) and 3 (takes); rank 1 has stages 1 and 2, which do both.
    between, within = (
        [v.buffers(rank, 0, between_ranks) for rank in (0, 1)] for between_ranks in (True, False)
    )
    assert between == [4 * 3 * 2048] * 2
    assert within == [0, 4 * 3 * 2048]
    for rank in (0, 1):  # losses and norms beside, and nothing counted twice
        rest = v.communication_at_rest(rank, 0) + v.unclassified_limit(rank, 0)
        assert rest < between[rank] + within[rank] + 200
    loop = cost_model("interleaved")
    assert loop.payload() == 3 * 2 * 4 * 2048
    assert v.textbook == "pipeline"


# ------------------------------------------------------------------------------------- in a run


@pytest.mark.parametrize("name", CLASSES)
def test_every_rank_computes_what_was_told(name: str) -> None:
    work = workload()

    def body(rank: int, world: int) -> list[Action]:
        done = []

        @contextlib.contextmanager
        def trace(action: Action) -> Iterator[None]:
            yield
            done.append(action)

        system = make(work, rank, world, schedule=name)
        system.trace = trace
        system.step(work.batch(0, 1)[0], lambda point: None)
        return done

    told_before = plan(Options(name), 2, 4)  # type: ignore[arg-type]
    for rank, done in enumerate(succeed(body, 2)):
        assert tuple(done) == told_before.computed(rank)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v", "dualpipe_v"])
@pytest.mark.parametrize("shapes", ["inferred", "given"])
def test_evaluation_is_that_of_one_process_and_changes_nothing(name: str, shapes: str) -> None:
    work = workload()
    batch = work.batch(0, 1)[0]
    truth = training.evaluator(work)(work.state(), batch.micro_batches)

    def body(rank: int, world: int) -> tuple[Any, bool]:
        system = make(work, rank, world, schedule=name, shapes=shapes)
        system.step(work.batch(1, 1)[0], lambda point: None)
        system.load_pieces(
            "parameters",
            [
                type(piece).whole(piece.name, work.state()[piece.name])
                for piece in system.local_state("parameters")
            ],
        )
        loss = system.evaluate(batch)
        again = system.evaluate(batch)
        return None if loss is None else float(loss), loss == again

    found = succeed(body, 2)
    losses = [loss for loss, _ in found if loss is not None]
    assert losses == [pytest.approx(truth, rel=1e-12)]
    assert all(same for _, same in found)


def test_unequal_micro_batches_are_refused_before_anything_is_sent() -> None:
    work = workload(global_batch=9)

    def body(rank: int, world: int) -> None:
        with pytest.raises(Refused, match=r"\(2, 8\), \(3, 8\).*global_batch"):
            make(work, rank, world).step(work.batch(0, 1)[0], lambda point: None)

    succeed(body, 2)


@pytest.mark.parametrize(
    ("options", "traits", "words"),
    [
        ({"split": [3, 2]}, (), r"'split' = \[3, 2\]: there are 2 stages and 4 units"),
        ({"split": [4, 0]}, (), "give 2 numbers of at least 1 that add up to 4"),
        (
            {"schedule": {"name": "interleaved", "chunks": 3}},
            (),
            "6 stages, but the model has only 4 units",
        ),
        ({}, ("tied_over_units",), "'head.weight' is tied between stages on two ranks"),
    ],
)
def test_what_the_model_does_not_allow_is_refused_on_every_rank(
    options: dict[str, Any], traits: tuple[str, ...], words: str
) -> None:
    work = workload(*traits)

    def body(rank: int, world: int) -> None:
        with pytest.raises(Refused, match=words):
            make(work, rank, world, **options)

    succeed(body, 2)


def test_full_state_and_pieces_hold_all_that_there_is() -> None:
    work = workload("tied_over_units")

    def body(rank: int, world: int) -> tuple[list[str], list[str]]:
        system = make(work, rank, world, schedule="zb_v")
        own = [piece.name for piece in system.local_state("parameters")]
        return own, sorted(system.full_state("parameters"))

    found = succeed(body, 2)
    names = sorted(work.parameter_names)
    assert sorted(name for own, _ in found for name in own) == names
    assert all(whole == names for _, whole in found)


# ---------------------------------------------------------------------------------- whole cases


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_schedules_equal_the_oracle() -> None:
    """The scenario pipeline-native has all of them."""
    spec = WorkloadSpec("charnames_gpt", micro_batches=4, windows=2, global_batch=16, params=SIZES)
    groups = (GroupSpec("norm|bias", lr_scale=0.5, weight_decay=0.0),)
    adamw = OptimizerSpec("adamw", lr=1e-3, weight_decay=0.1, groups=groups, clip_norm=0.05)
    changes: list[tuple[str, dict[str, Any]]] = [
        ("1f1b", {"optimizer": adamw}),
        ("looped_bfs", {"optimizer": adamw}),
        ("zb_v", {"backend": "gloo", "optimizer": OptimizerSpec(clip_norm=0.05)}),
        ("dualpipe_v", {"lane": "bitwise"}),
        ("looped_bfs", {"lane": "bitwise"}),
    ]
    results = judged(
        [
            case(NAME, {"pipe": 2}, options={"schedule": name}, workload=spec, **change)
            for name, change in changes
        ]
    )
    assert [result.verdict for result in results] == ["pass"] * 5, told(results)
    # Its order of micro-batches promises no equal bits, so the bound of its dtype decides.
    assert "judged_in" not in results[3].figures("equivalence")
    assert results[4].figures("equivalence")["judged_in"] == "fp64"
    assert all(compared(r) > 100 for r in results)


def test_descending_micro_batches_promise_no_equal_bits_on_one_rank_either() -> None:
    spec = WorkloadSpec("charnames_gpt", micro_batches=3, global_batch=12, params=SIZES)
    made = case(
        NAME, {"pipe": 1}, options={"schedule": "looped_bfs"}, workload=spec, lane="bitwise"
    )
    (result,) = judged([made])
    assert result.verdict == "pass", told([result])
    assert result.figures("equivalence")["judged_in"] == "fp64"


def test_calls_outside_of_a_step() -> None:
    """Evaluation in mid-run, saved and resumed stage by stage, parameters forced."""
    cases = [case(NAME, {"pipe": 2}, options={"schedule": "1f1b"})]
    (result,) = results_of(trial_calls.conduct, cases)
    assert not result["error"], result["error"]
    first, last = result["ranks"]
    assert first["untrained"] is None
    assert last["untrained"] == pytest.approx(result["truth"], rel=1e-12)
    assert last["forced"] == last["untrained"]
    assert last["trained"] < last["untrained"]
    for rank in (first, last):
        assert rank["resumed"]
        assert rank["extra"] == {"step": 1}
        assert not rank["changed_by_evaluation"]

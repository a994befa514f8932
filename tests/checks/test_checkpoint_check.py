"""The check of checkpoints passes sound systems, and says what others lose; plans are checked.

Faults are planted in ``impls/mutants/checkpoint/`` and in ``tests/support/odd_checkpoints.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_case import made_case
from torch import Tensor

from shardproof import registry
from shardproof.case import Case, CheckpointPlan, Fault, WorkloadSpec
from shardproof.cases.kills import pair
from shardproof.cases.runner import run_cases
from shardproof.checks import checkpoint
from shardproof.checks.causes import state
from shardproof.checks.results import CaseResult
from shardproof.commands.verify import verify
from shardproof.contract import OptimizerSpec, ScalerSpec
from shardproof.evidence.assembled import Assembled
from shardproof.evidence.records import ComparisonRow
from shardproof.registry.declaration import Declaration
from shardproof.runs.run_folder import RunFolder
from shardproof.scenarios.load import SHIPPED, find, load_text
from shardproof.scenarios.matrix import expand, substitute
from shardproof.scenarios.vocabulary import installed
from tests.support.commands import assert_refused, here

SUPPORT = Path(__file__).parents[1] / "support"
ADAMW = OptimizerSpec("adamw", lr=3e-3, weight_decay=0.1, warmup_steps=2)
SAME = CheckpointPlan(save_at=2)
OFTEN = CheckpointPlan(save_at=2, saves=2)
NUMBERS = itertools.count()


def case(
    name: str, world: int, plan: CheckpointPlan = SAME, format_: str = "", **more: Any
) -> Case:
    """Small, because what is asked is whether runs agree."""
    axis = "replicate" if name.endswith(("ddp",)) or name.startswith("odd") else "shard"
    options = {"checkpoint": {"format": format_}} if format_ else {}
    fields: dict[str, Any] = {
        "id": f"{name}-{world}-{format_}-{next(NUMBERS)}",
        "workload": WorkloadSpec(
            "charnames_gpt",
            global_batch=10,
            micro_batches=1,
            params={"layers": 1, "width": 16, "seq": 8},
            seed=more.pop("seed", 0),
            traits=more.pop("traits", ()),
        ),
        "optimizer": ADAMW,
        "checks": ("equivalence", "traffic", "memory", "checkpoint"),
        "steps": 3,
        "options": options,
        "checkpoint": plan,
    }
    return made_case(name, more.pop("mesh", {axis: world}), **(fields | more))


def into(**other: Any) -> CheckpointPlan:
    return CheckpointPlan(2, into=other)


FORMATS = ("full", "sharded", "asynchronous")
#: Who loads has an outer optimizer, which who saved had not.
ALONE = into(implementation="reference/diloco", mesh={"replicate": 2})
#: Every world, several seeds, every format.
SOUND = [
    *(
        case(f"reference/{name}", world, format_=FORMATS[(world + n) % 3], seed=world * 7 + n)
        for n, name in enumerate(("ddp", "zero1", "zero3"))
        for world in (1, 2, 3, 4, 5)
    ),
    *(
        case(f"reference/{name}", 3, into(mesh={"shard": world}), FORMATS[world % 3], seed=world)
        for name in ("zero1", "fsdp")
        for world in (1, 2, 4, 5)
    ),
    case("reference/ddp", 2, OFTEN, "asynchronous", lane="bitwise", dtype="float32"),
    case("reference/zero1", 2, CheckpointPlan(1, again_at=2), "full"),
    case("reference/ddp", 3, CheckpointPlan(2, trained=1), "asynchronous"),
    case("reference/fsdp", 2, CheckpointPlan(2, into={"mesh": {"shard": 3}}, trained=2)),
    case("reference/zero3", 2, CheckpointPlan(1, again_at=1), "asynchronous"),
    case("reference/zero2", 2, ALONE, traits=("unused",)),
    # Before the save no step made an update: there is no optimizer state to load.
    case(
        "reference/zero1",
        2,
        CheckpointPlan(1),
        lane="working_precision",
        dtype="float32",
        precision={"parameters": "float16"},
        options={"precision": {"parameters": "float16"}},
        optimizer=dataclasses.replace(ADAMW, scaler=ScalerSpec(initial=2.0**60, interval=9)),
    ),
    # The formula of who saves is not asked of who loads.
    case(
        "reference/zero1",
        2,
        into(implementation="reference/zero3"),
        expect={"traffic": "zero1.payload_bytes"},
    ),
    case("reference/ddp", 2, backend="gloo", traits=("dropout_stateful", "tied")),
    case("odd_checkpoints:SavesLate", 2, OFTEN, "asynchronous", mesh={"shard": 2}),
    case(
        "reference/ddp",
        2,
        into(mesh={"replicate": 3}),
        lane="dyadic",
        dtype="float32",
        optimizer=OptimizerSpec(lr=0.125, momentum=0.0),
        workload=WorkloadSpec("dyadic_mlp", global_batch=12),
    ),
]
PLANTED = [
    pair(registry.load_mutant(n), weigh_all=False)
    for n in registry.mutant_names()
    if ".checkpoint." in registry.load_mutant(n).implementation.__module__
]
#: A system or a plan -> what the check says.
ODD = [
    (
        case("odd_checkpoints:ReturnsNothing", 2),
        "ReturnsNothing.load(path) returned None, expected the mapping that save was given",
    ),
    (
        case("odd_checkpoints:ReturnsAPath", 2),
        "ReturnsAPath.save(path, extra) returned PosixPath, expected an object with wait()",
    ),
    (
        case("odd_checkpoints:RoundsExtra", 2),
        "the extra values of save were not loaded on rank 0: 'odd' is ",
    ),
    (
        case("odd_checkpoints:RankOneIsBehind", 2, OFTEN),
        "progress was not loaded: rank 1 would resume from step 1, the newest checkpoint is of ",
    ),
    (
        case("odd_checkpoints:LosesDecay", 2),
        "the restored state is correct, but training then diverges: "
        "gradients and optimizer state are equal",
    ),
    (
        case(
            "reference/zero2",
            2,
            dataclasses.replace(
                ALONE, into={**ALONE.into, "implementation": "odd_checkpoints:KeepsItsStart"}
            ),
        ),
        "weight.outer_start' differ",
    ),
    (
        case("reference/ddp", 2, into(options={"bucket_bites": 1})),
        "the restoring run cannot be made: unknown option 'bucket_bites'",
    ),
    (
        case("reference/ddp", 2, into(implementation="reference/tensor", mesh={"tensor": 3})),
        "in the restoring run rank 0 raised Refused: ",
    ),
]
SKIPPED = [
    (case("odd_checkpoints:SavesNothing", 2), "declares no checkpoints"),
    (
        case("reference/ddp", 2, into(implementation="odd_checkpoints:SavesNothing")),
        "odd_checkpoints:SavesNothing declares no checkpoints",
    ),
]
KILLED = Fault("kill", 1, 1, "save", ("crash",), blames=1)
FAULTY = {
    "lost": case(
        "odd_checkpoints:KeepsNoLastOne",
        2,
        OFTEN,
        mesh={"shard": 2},
        fault=dataclasses.replace(KILLED, call=2),
        checks=("equivalence", "checkpoint", "faults"),
    ),
    "kept": case(
        "reference/zero1",
        2,
        OFTEN,
        fault=dataclasses.replace(KILLED, call=2),
        checks=("equivalence", "checkpoint", "faults"),
    ),
    "load": case(
        "reference/zero1",
        2,
        fault=Fault("raise", 1, 0, "load", ("crash",), blames=1),
        checks=("equivalence", "checkpoint", "faults"),
    ),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results by id, and the folder of the run."""
    planted = [one.case for one in PLANTED]
    cases = [*SOUND, *planted, *(c for c, _ in (*ODD, *SKIPPED)), *FAULTY.values()]
    found: dict[str, CaseResult] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SUPPORT))
        patch.setenv("PYTHONPATH", str(SUPPORT))
        with RunFolder(tmp_path_factory.mktemp("runs") / "run", ["test"]) as folder:
            folder.plan(cases)

            def note(result: CaseResult) -> None:
                folder.add(result)
                found[result.id] = result

            run_cases(cases, 2, note, on_account=folder.keep)
        yield SimpleNamespace(results=found, path=folder.path)


@pytest.mark.parametrize("case", SOUND, ids=lambda case: case.id)
def test_sound_systems_pass(run: Any, case: Case) -> None:
    result = run.results[case.id]
    assert result.verdict.startswith("pass"), result.reason
    judged = result.check("checkpoint")
    assert judged.status == "pass" and judged.figures["compared"] >= 8
    # No memory is promised of DiLoCo, and none of processes is judged.
    is_weighed = case.backend == "in_memory" and case.checkpoint is not ALONE
    kept = ["memory", "traffic"] if is_weighed else ["traffic"]
    assert judged.figures["promises"] == [f"after the load, {name}" for name in kept]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.mutant.name)
def test_planted_faults_are_told_by_what_was_lost(run: Any, planted: Any) -> None:
    judged = run.results[planted.case.id].check("checkpoint")
    assert judged is not None and judged.status == "fail"
    assert re.search(planted.mutant.says, judged.message), judged.message


@pytest.mark.parametrize(("case", "says"), ODD, ids=[case.id for case, _ in ODD])
def test_what_breaks_the_contract_or_a_plan_is_told(run: Any, case: Case, says: str) -> None:
    result = run.results[case.id]
    assert result.verdict == "fail" and says in result.reason, result.reason
    assert "/shardproof-" not in result.reason, "the case's own folder is another in every run"


@pytest.mark.parametrize(("case", "says"), SKIPPED, ids=[case.id for case, _ in SKIPPED])
def test_skips_give_the_reason(run: Any, case: Case, says: str) -> None:
    result = run.results[case.id]
    judged = result.check("checkpoint")
    told = result.reason if judged is None else judged.message
    assert says in told and (judged or result.verdict == "skip")
    assert judged is None or judged.status == "skip"


def test_after_a_kill_in_a_save_the_last_checkpoint_must_load(run: Any) -> None:
    kept, lost = (run.results[FAULTY[name].id] for name in ("kept", "lost"))
    assert kept.verdict == "pass", kept.reason
    assert kept.reason.endswith("the last committed checkpoint loads")
    assert [outcome.check for outcome in kept.checks] == ["faults", "checkpoint"]
    assert lost.verdict == "fail" and lost.reason.startswith("checkpoint: in the restoring run")
    assert "[as expected, kill (rank 1, step 1, save) gives crash: rank 1 killed" in lost.reason


def test_a_fault_of_the_load_falls_on_who_loads(run: Any) -> None:
    result = run.results[FAULTY["load"].id]
    assert result.verdict == "pass", result.reason
    assert "raise (rank 1, step 0, load) gives crash: rank 1 raised InjectedFault" in result.reason


def test_a_stored_run_is_judged_the_same(run: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SUPPORT))
        assert verify(run.path).problems == []


def test_traffic_of_saves_is_not_training_s(run: Any) -> None:
    """The full format gathers everything; the formula knows nothing of it."""
    ranks = SOUND[0]
    cases = [
        case("reference/zero1", 2, OFTEN, "full", checks=("traffic", "checkpoint")),
        case("reference/zero1", 2, OFTEN, "full", checks=("traffic",), checkpoint=None),
    ]
    found: list[CaseResult] = []
    run_cases(cases, 2, found.append)
    assert ranks.id in run.results
    assert {result.verdict for result in found} == {"pass"}, [r.reason for r in found]
    one, other = (result.figures("traffic") for result in found)
    for name in ("bytes_sent", "setup_bytes", "control_bytes", "calls_per_step"):
        assert one[name] == other[name]


# --------------------------------------------------------------------------------- sentences


def load(kind: str, saved: dict[str, Tensor], held: dict[str, Tensor], **more: Any) -> state.Load:
    """Of one copy of every tensor."""
    states = [Assembled({n: {0: t} for n, t in tensors.items()}) for tensors in (saved, held)]
    fields: dict[str, Any] = {"before": {}, "moments": {}} | more
    return state.Load(kind, 2, *states, **fields)


W, V = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
TWO = torch.tensor(2.0)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (load("parameters", {"w": W}, {"w": W.clone()}), ""),
        (load("parameters", {"w": W}, {}), "parameters were not loaded: there is none"),
        (load("parameters", {"w": W, "v": V}, {"w": W}), "parameters: 'v' is not there"),
        (
            load("parameters", {"w": W}, {"w": W, "v": V}),
            "after the load there is 'v', which was not saved",
        ),
        (
            load("parameters", {"w": W}, {"w": W.double()}),
            "parameters: 'w' was saved as float32 [3] and is float64 [3] after the load",
        ),
        (
            load("parameters", {"w": W}, {"w": V}, before={"w": V}),
            "parameters were not loaded: they are as the fresh system was set up",
        ),
        (
            load("parameters", {"w": W}, {"w": V}, moments={3: {"w": V}}),
            "parameters were not loaded: they are of step 3, and the checkpoint is of step 2",
        ),
        (
            load("parameters", {"w": W, "v": V}, {"w": W, "v": W}),
            "1 of 2 parameters were not loaded: 'v' has the elements of 'w'",
        ),
        (
            load("optimizer", {"w.exp_avg": W, "w.step": TWO}, {"w.exp_avg": W * 0, "w.step": TWO}),
            "optimizer state was not loaded: it is zero",
        ),
        (
            load("optimizer", {"w.exp_avg": W, "w.step": TWO}, {"w.exp_avg": W, "w.step": TWO * 0}),
            "step counters were not loaded: they count from 0, not from 2",
        ),
        (
            load("optimizer", {"w.master": W}, {"w.master": W + 1}),
            "masters were not loaded: 3 of 3 elements of 'w.master' differ",
        ),
    ],
)
def test_sentences_say_what_was_not_loaded(told: state.Load, says: str) -> None:
    assert state.of_load(told) == says


def test_three_names_are_said_and_all_are_kept() -> None:
    saved = {f"w{number}": W + number for number in range(5)}
    told = load("parameters", saved, {n: t + 0.5 * (n != "w0") for n, t in saved.items()})
    said = "4 of 5 parameters were not loaded: 3 of 3 elements of 'w1' differ"
    assert state.of_load(told) == f"{said} ('w1', 'w2', 'w3' and 1 more)"
    assert told.wrong == ["w1", "w2", "w3", "w4"]


def test_the_pattern_over_ranks_is_said() -> None:
    saved = Assembled({name: dict.fromkeys(range(2), W) for name in ("a", "b")})
    held = Assembled(
        {name: {n: W + (owner != n) for n in range(2)} for owner, name in enumerate("ab")}
    )
    told = state.of_load(state.Load("parameters", 2, saved, held, {}, {}))
    assert told.startswith("parameters were not loaded on each rank, of what other ranks own: ")


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (("a", "b"), ""),
        (("a", "a"), "the RNG of rank 1 (torch) is that of rank 0"),
        (("a", "z"), "the RNG of rank 1 (torch) was not loaded: it is as after set-up"),
        (("x", "b"), "the RNG of rank 0 (torch) differs from its state at the save"),
    ],
)
def test_sentences_on_generators_name_the_rank(held: tuple[str, str], says: str) -> None:
    saved, now, before = ([{"torch": d} for d in own] for own in (("a", "b"), held, ("y", "z")))
    assert state.of_draws(saved, now, before) == says


# ----------------------------------------------------------------------------------- deciding


def decided(*rows: ComparisonRow) -> tuple[str, str]:
    figures: Any = SimpleNamespace(case=SOUND[0], compared={"checkpoint": list(rows)})
    outcome = checkpoint.decide(figures)
    return outcome.status, outcome.message


def test_rows_decide() -> None:
    right = ComparisonRow(1, "after the load, parameters", "all that was saved", "all ranks", 0, 0)
    wrong = dataclasses.replace(right, error=1.0)
    assert decided(right) == ("pass", "")
    assert decided(wrong, ComparisonRow(problem="lost")) == ("fail", "lost")
    assert decided(wrong)[0] == "fail"
    assert decided() == ("undecidable", "nothing could be compared")
    assert decided(ComparisonRow(skip="why")) == ("skip", "why")


# -------------------------------------------------------------------------------------- plans

PLAN = """\
name: planned
about: saves
sees: [nothing]
workload: {name: charnames_gpt, global_batch: 6, micro_batches: 1, params: {layers: 1, width: 16}}
matrix:
  implementation: reference/zero1
  backend: gloo
  mesh: {shard: [2, 3]}
  optimizer: sgd
checks: [equivalence, checkpoint]
steps: 3
checkpoints:
  - {label: same, save_at: 2, saves: 2}
"""
FAULT = "faults:\n  - {kind: kill, rank: 0, step: 0, phase: PHASE, expect: {verdict: crash}}\n"


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("save_at: 2", "save_at: 3", 13, "no step follows the save (3) - valid: 1 to 2"),
        (
            "save_at: 2",
            "save_at: 1, again_at: 3",
            13,
            "must lie between save_at and the last step (3) - valid: 1 to 2",
        ),
        (
            "save_at: 2",
            "save_at: 2, again_at: 1",
            13,
            "again_at must lie between save_at and the last step (1) - v",
        ),
        ("save_at: 2", "save_at: 3, again_at: 3", 13, "(3) - give the scenario more steps"),
        ("saves: 2", "trained: 3", 13, "trained must not exceed save_at (3) - valid: 0 to 2"),
        ("saves: 2", "saves: 3", 13, "saves must not exceed save_at (3) - valid: 1 to 2"),
        ("label: same, ", "", 13, "missing key checkpoints[0].label"),
        (", checkpoint]", "]", 10, "checkpoint plans and the check `checkpoint` belong together"),
        (
            "saves: 2}\n",
            "saves: 2}\n  - {label: same, save_at: 1}\n",
            14,
            "checkpoint plan named twice",
        ),
        ("saves: 2", "into: {implementation: reference/zero9}", 13, "unknown implementation"),
        ("saves: 2", "into: {meshes: {shard: 2}}", 13, "unknown key checkpoints[0].into.meshes"),
        (
            "saves: 2",
            "into: {precision: {label: x, built: bfloat16}}",
            13,
            "the restoring run must have the same model dtype as the saving run",
        ),
        (
            "checkpoint]",
            "checkpoint, faults]\n" + FAULT.replace("PHASE", "save").replace("step: 0", "step: 2"),
            12,
            "phase save does not occur in this step (2) - valid: 0 to 1",
        ),
        (
            "checkpoint]",
            "checkpoint, faults]\n" + FAULT.replace("PHASE", "load").replace("step: 0", "step: 1"),
            12,
            "phase load does not occur in this step (1) - valid: 0 to 0",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_one_line_and_exit_code_2(
    tmp_path: Path, old: str, new: str, line: int, says: str
) -> None:
    assert old in PLAN
    assert_refused(tmp_path / "planned.yaml", PLAN.replace(old, new, 1), line, says)


def test_a_fault_of_a_save_needs_a_plan_of_saves(tmp_path: Path) -> None:
    text = PLAN[: PLAN.index("checkpoints:")].replace("checkpoint]", "faults]")
    file = tmp_path / "planned.yaml"
    file.write_text(text + FAULT.replace("PHASE", "save"))
    done = here("run", str(file), "--dry-run")
    told = done.stdout + done.stderr
    assert done.returncode == 2 and f"{file}:13: " in told, told
    assert (
        "fault plan kill: this scenario saves and loads nothing (save) - plan checkpoints" in told
    )


@pytest.mark.parametrize("key", ["again_at", "trained"])
def test_the_run_that_loads_does_no_more_than_that_beside_a_fault_plan(
    tmp_path: Path, key: str
) -> None:
    plan = PLAN.replace("saves: 2", f"{key}: 2").replace(", checkpoint]", ", checkpoint, faults]")
    (file := tmp_path / "mine.yaml").write_text(plan + FAULT.replace("PHASE", "load"))
    done = here("run", str(file), "--dry-run")
    told = done.stdout + done.stderr
    assert done.returncode == 2 and f"{file}:13: " in told, told
    what = f"checkpoint plan same: {key} cannot be combined with a fault plan"
    assert f"{what} (2) - leave {key} out" in told


def test_plans_are_in_ids_rules_match_them_and_other_systems_leave_loads_by_name_out() -> None:
    text = PLAN + "  - {label: as-ddp, save_at: 1, into: {implementation: reference/ddp}}\n"
    text += "quick:\n  - {checkpoint: as-*, world: 3}\ntier: full\n"
    cells = expand(load_text(text), installed())
    assert [cell.id.partition("::")[0] for cell in cells] == [
        "planned[same]",
        "planned[as-ddp]",
    ] * 2
    assert [cell.tier for cell in cells] == ["full", "full", "full", "quick"]
    assert cells[1].checkpoint == CheckpointPlan(
        1, into={"implementation": "reference/ddp", "options": {}}
    )
    assert all(Case.from_dict(cell.to_dict()) == cell for cell in cells)
    own = substitute(cells, "mine:Own")
    assert [c.id.partition("::")[0] for c in own] == ["planned[same]", "planned[same]"]


def test_the_suite_saves_by_every_strategy_and_format_into_every_kind_of_world() -> None:
    every = [c for file in find([str(SHIPPED / "checkpoint")]) for c in expand(file, installed())]
    cases = [c for c in every if c.implementation.startswith("reference/")]
    quick = [c for c in cases if c.tier == "quick"]

    def met(of: Callable[[Case], Any]) -> set[Any]:
        assert {of(c) for c in quick} == {of(c) for c in cases}
        return {of(c) for c in quick}

    strategies = (
        "naive_ddp",
        "ddp",
        "zero1",
        "zero2",
        "zero3",
        "fsdp",
        "tensor",
        "pipeline",
        "hybrid",
        "context",
        "expert",
    )
    assert met(lambda c: c.implementation) == {f"reference/{name}" for name in strategies}
    assert met(lambda c: c.options.get("checkpoint", {}).get("format", "sharded")) == {*FORMATS}
    assert met(lambda c: c.optimizer.name) == {"sgd", "adamw"}
    assert met(lambda c: c.backend) == {"in_memory", "gloo"}
    for strategy in strategies[1:]:
        own = [c for c in quick if c.implementation == f"reference/{strategy}"]
        assert any(checkpoint.is_same(c, checkpoint.who_loads(c)) for c in own), strategy
        assert any(checkpoint.who_loads(c).world != c.world for c in own), strategy


@pytest.mark.parametrize(
    ("traits", "plan", "is_judged"),
    [
        (("variable_lengths",), "same", True),
        (("variable_lengths",), "smaller", False),
        ((), "smaller", True),
    ],
)
def test_counts_of_padding_are_compared_on_one_mesh_only(
    traits: tuple[str, ...], plan: str, is_judged: bool
) -> None:
    [file] = find(["checkpoint-expert"])
    one = next(c for c in expand(file, installed()) if f"[{plan}]" in c.id and "+full" in c.id)
    one = dataclasses.replace(one, workload=dataclasses.replace(one.workload, traits=traits))
    declared = Declaration.of(registry.load(one.implementation), one.options)
    evidence: Any = SimpleNamespace(case=one, declaration=declared)
    why = checkpoint._not_defined(evidence)
    assert why == ("" if is_judged else "state counts padding, which depends on the mesh")

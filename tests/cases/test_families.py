"""Contract 2: systems with a layout of their own are held to what their family promises."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import adopted
import pytest
from made_case import made_case
from rich.console import Console

from shardproof import prove, report
from shardproof.case import WorkloadSpec
from shardproof.cases.runner import run_cases
from shardproof.checks import GENERAL
from shardproof.checks.results import CaseResult
from shardproof.commands.verify import verify
from shardproof.compare import baseline
from shardproof.contract import OptimizerSpec
from shardproof.costs.expert import ExpertParallel
from shardproof.costs.families import FAMILIES, HeldByRank
from shardproof.costs.model import NoCostModel
from shardproof.costs.model_facts import ModelFacts, TensorFacts
from shardproof.errors import SelectionError
from shardproof.registry.declaration import Declaration
from shardproof.report import capability_matrix, tables
from shardproof.runs import junit
from shardproof.runs.run_folder import RunFolder, read
from shardproof.scenarios.selection import Selection
from shardproof.scenarios.vocabulary import installed

HERE = Path(__file__).parents[1] / "support"
SMALL = WorkloadSpec(
    "charnames_gpt",
    global_batch=12,
    micro_batches=2,
    params={"layers": 2, "width": 60, "heads": 30, "seq": 8},
)
#: Class -> its axis, the verdict, and what the reason says.
EXPECTED = {
    "OwnDDP": ("replicate", "pass", ""),
    "MeanDDP": ("replicate", "pass", ""),
    "SilentMeanDDP": ("replicate", "fail", "summed loss"),
    "GreedyZero1": ("shard", "pass", ""),
    "FlatZero1": ("shard", "pass", ""),
    "FlatZero1OfItsOwn": ("shard", "pass", ""),
    "BringsNoModel": ("shard", "fail", "not a subclass of CostModel"),
    "PromisesLess": ("shard", "fail", "masters"),
    "Lopsided": ("shard", "fail", "declared balance 1.5"),
    "BecameDDP": ("shard", "fail", "nothing is sharded on any rank"),
    "BecameDDPOfThree": ("shard", "fail", "nothing is sharded on any rank"),
    "Unheard": ("replicate", "pass", ""),
    "WholeEmbedding": ("tensor", "pass", ""),
    "SplitsNothing": ("tensor", "fail", "nothing is sharded on any rank"),
}
#: Class and world: every class in two of three worlds.
CELLS = [
    (name, world)
    for number, name in enumerate(EXPECTED)
    for place, world in enumerate((2, 3, 5))
    if place != number % 3
]


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, int], CaseResult]:
    cases = [
        made_case(
            f"adopted:{name}",
            {EXPECTED[name][0]: world},
            id=f"{name} {world}",
            workload=SMALL,
            optimizer=OptimizerSpec("adamw", lr=0.003),
            checks=GENERAL,
        )
        for name, world in CELLS
    ]
    found: list[CaseResult] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.setenv("PYTHONPATH", str(HERE))
        run_cases(cases, 2, found.append)
    return {(r.case.implementation.partition(":")[2], r.case.world): r for r in found}


@pytest.mark.parametrize(("name", "world"), CELLS)
def test_verdicts_at_depth_family(
    results: dict[tuple[str, int], CaseResult], name: str, world: int
) -> None:
    _, verdict, says = EXPECTED[name]
    result = results[name, world]
    assert result.verdict == verdict, result.reason
    assert says in result.reason, result.reason


def test_a_sound_compressor_passes_whatever_its_integers_carry() -> None:
    cases = [
        made_case(
            f"reference/{strategy}",
            {axis: 3},
            id=f"{strategy} {compress['method']}",
            workload=SMALL,
            steps=4,
            options={"compress": compress},
            depth="family",
            checks=GENERAL,
        )
        for strategy, axis, compress in (
            ("ddp", "replicate", {"method": "topk", "density": 0.5}),
            ("zero2", "shard", {"method": "topk", "density": 0.5}),
            ("ddp", "replicate", {"method": "sign"}),
            ("zero2", "shard", {"method": "onebit"}),
            ("ddp", "replicate", {"method": "powersgd", "rank": 2}),
        )
    ]
    found: list[CaseResult] = []
    run_cases(cases, 2, found.append)
    assert {r.case.id: r.reason for r in found if r.verdict != "pass"} == {}
    assert len(found) == len(cases)


def test_positions_and_experts_are_held_to_their_families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    mixtures = replace(SMALL, params={"layers": 2, "width": 16, "seq": 8, "experts": 4})
    cases = [
        made_case(
            name,
            mesh,
            id=f"{name} {options}",
            workload=mixtures if "expert" in mesh else SMALL,
            options=options,
            optimizer=OptimizerSpec("adamw", lr=0.003),
            depth="family",
            checks=GENERAL,
        )
        for name, mesh, options in (
            ("reference/context", {"context": 2}, {"method": "all_gather"}),
            ("reference/context", {"replicate": 2, "context": 2}, {"method": "ring"}),
            ("reference/context", {"context": 2}, {"method": "all_to_all", "recompute_every": 1}),
            ("reference/expert", {"expert": 2}, {}),
            ("reference/expert", {"replicate": 2, "expert": 2}, {"recompute_every": 1}),
            ("adopted:CopiesExperts", {"expert": 2}, {}),
        )
    ]
    found: list[CaseResult] = []
    run_cases(cases, 2, found.append)
    wrong = {r.case.implementation: r for r in found if r.verdict != "pass"}
    assert {name: r.reason for name, r in wrong.items() if name.startswith("reference/")} == {}
    copies = wrong["adopted:CopiesExperts"]
    assert {c.check: c.status for c in copies.checks}["active"] == "fail"
    assert "nothing is sharded on any rank" in copies.reason
    # Promised and compared, where no family was named before.
    ends = {(r.case.implementation, c.check): c.status for r in found for c in r.checks}
    for check in ("active", "traffic", "memory"):
        assert ends["reference/context", check] == ends["reference/expert", check] == "pass"


def test_a_hybrid_whose_data_ranks_divide_experts_is_held_to_what_each_part_does() -> None:
    mixtures = replace(SMALL, params={"layers": 2, "width": 16, "seq": 8, "experts": 4})
    ring, whole = {"context": {"method": "ring"}}, {"experts": {"ranks": 2}}
    cases = [
        made_case(
            "reference/hybrid",
            mesh,
            id=f"{mesh} {options}",
            workload=mixtures,
            options=options,
            optimizer=OptimizerSpec("adamw", lr=0.003),
            depth="family",
            checks=GENERAL,
        )
        for mesh, options in (
            ({"shard": 2}, whole),
            ({"shard": 2, "context": 2}, {"data": "zero1", "recompute_every": 1, **ring, **whole}),
            ({"shard": 2}, {"data": "fsdp", "experts": {"ranks": 1, "data": "ddp"}}),
        )
    ]
    found: list[CaseResult] = []
    run_cases(cases, 2, found.append)
    assert {r.case.id: r.reason for r in found if r.verdict != "pass"} == {}
    ends = {(r.case.id, c.check): c.status for r in found for c in r.checks}
    assert all(ends[case.id, name] == "pass" for case in cases for name in ("active", "traffic"))


def of_mixture(**fields: Any) -> ModelFacts:
    """A dense parameter of 64 elements and two stacks of 4 experts, of 16 each."""
    stacks = [TensorFacts(f"mlp.experts.{n}", (4, 4, 4), "float64") for n in ("up", "down")]
    facts = ModelFacts(
        axes={"shard": 2},
        options={"data": "ddp", "experts": {"ranks": 2}},
        parameters=(TensorFacts("head", (8, 8), "float64"), *stacks),
        roles={"mlp.experts": "expert", "mlp.router": "router"},
        routed=(({"mlp": (4, 3, 2, 1)},) * 2,),
    )
    return replace(facts, **fields)


@pytest.mark.parametrize(
    ("held", "data", "says"),
    [
        (32, {}, ""),
        (64, {}, "nothing is sharded on any rank: each holds all 128 elements of the parameters"),
        (32, {"data": "ddp"}, ""),
        (16, {"data": "ddp"}, "rank 0 holds 32 of 64 elements"),
    ],
)
def test_experts_are_cut_by_their_option_and_the_rest_is_not(
    held: int, data: dict[str, str], says: str
) -> None:
    facts = of_mixture(axes={"shard": 4}, options={"data": "ddp", "experts": {"ranks": 2, **data}})
    elements = {"head": 64, "mlp.experts.up": held, "mlp.experts.down": held}
    shown = {
        rank: HeldByRank(
            {"parameters": elements},
            {n: "" if n == "head" else str(rank % (64 // held)) for n in elements},
        )
        for rank in range(4)
    }
    found = FAMILIES["hybrid"].problem(facts, shown, 1.0)
    assert found.startswith(says) and bool(found) == bool(says), found


def test_bytes_of_divided_experts_are_rows_and_the_gradients_that_are_summed() -> None:
    least, plain = FAMILIES["hybrid"].bytes(of_mixture())
    # One copy of each expert: nothing to sum.  6 times 20 rows of 4 float64 numbers.
    assert least == 2 * 64 * 8 and plain == least + 6 * 20 * 4 * 8
    data = {"data": "ddp", "experts": {"ranks": 2, "data": "ddp"}}
    least, _ = FAMILIES["hybrid"].bytes(of_mixture(axes={"shard": 4}, options=data))
    assert least == 2 * 3 * 64 * 8 + 2 * 1 * 128 * 8


def test_what_is_unknown_of_a_model_is_no_limit() -> None:
    """A user's own mixture has no entry, and attention without roles has no heads."""
    own = of_mixture(routed=(({},) * 2,))
    divided = {"axes": {"expert": 2}, "options": {}}
    with pytest.raises(NoCostModel, match="the choices of the router are unknown"):
        ExpertParallel(replace(own, **divided)).flows()
    assert FAMILIES["hybrid"].sent(own, 1.0).high == 2**62
    assert FAMILIES["expert"].sent(replace(own, **divided), 1.0).high == 2**62
    assert FAMILIES["expert"].sent(of_mixture(**divided), 1.0).high < 2**20
    cut = replace(own, axes={"context": 2}, options={})
    assert FAMILIES["context"].sent(cut, 1.0).high == 2**62
    assert FAMILIES["context"].sent(replace(cut, axes={"context": 1}), 1.0).high == 0


def test_what_was_held_to_a_family_or_an_own_model_is_judged_again_without_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GreedyZero1", "FlatZero1OfItsOwn"):
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(HERE))
            patch.setenv("PYTHONPATH", str(HERE))
            folder = tmp_path / name
            rows = prove(f"adopted:{name}", worlds=(2,), optimizer="adamw", results=folder)
        assert set(rows["verdict"]) == {"pass"}, list(rows["reason"])
        assert verify(folder).problems == []
        plain, *idle = read(folder).cases
        assert len(idle) == (name == "GreedyZero1"), (
            "a cost model of its own says nothing about shares"
        )
        assert plain.depth == ("own" if name == "FlatZero1OfItsOwn" else "family")
        words = " ".join(row[0] for row in tables.table([plain]).texts)
        assert ("own cost model" if plain.depth == "own" else "depth family") in words
    strict = prove("reference/zero1", worlds=(2,), depth="family")
    assert list(strict["verdict"]) == ["pass"]
    with pytest.raises(SelectionError, match="'family' or 'layout'"):
        prove("reference/zero1", depth="deep")  # type: ignore[arg-type]


def test_a_declared_loss_factor_is_told_wherever_the_depth_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter may undo a defect by a factor: no reader takes its pass for the usual one."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    folder = tmp_path / "run"
    prove("adopted:MeanDDP", worlds=(2,), optimizer="adamw", results=folder)
    run = read(folder)
    [result] = run.cases
    assert (result.verdict, result.loss_factor) == ("pass", "2 * world"), result.reason
    told = "(depth family, loss_factor 2 * world)"
    screen = Console(record=True, width=200, file=io.StringIO())
    report.show(run.cases, screen.print)
    for shown in (report.document(run), report.html(run), screen.export_text()):
        assert told in shown.replace("\\", "")
    assert '<property name="loss_factor" value="2 * world"' in junit.document(run)
    sentences = [c.sentence for c in capability_matrix.cells([result]) if c.judged]
    assert {s.partition("ranks: 2; ")[2] for s in sentences} == {
        "depth: family; loss_factor: 2 * world"
    }
    assert verify(folder).problems == []
    [entry] = baseline.load(str(folder)).cases.values()
    assert entry.figures["loss_factor"] == "2 * world"
    plain = replace(result, loss_factor="1")
    assert "loss_factor" not in tables.table([plain]).texts[0][0]
    for forged in (plain, replace(result, depth="layout")):
        with RunFolder(folder, ["forged"]) as again:
            again.add(forged)
        assert "the record gives" in " ".join(verify(folder).problems)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("LosesTheLoss", "loss_factor 'world - world' is 0 in this case"),
        ("DividesByNothing", "division by zero for this case"),
        ("SparsePieces", "SparsePieces.local_state: cannot store a torch.sparse_coo tensor"),
    ],
)
def test_what_means_nothing_is_the_systems_fault(
    monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    [row] = prove(f"adopted:{name}", worlds=(2,), optimizer="adamw").to_dict("records")
    assert row["verdict"] == "fail" and says in row["reason"], row["reason"]


def test_sound_systems_with_orders_and_buffers_of_their_own_pass_at_depth_family() -> None:
    """Late and exposed reductions, and receive buffers that stay, are a layout's."""
    ids = (
        "fsdp-traits[by_rank]::reference/zero3::in_memory::shard3::adamw::clip::fp64::quick",
        "fsdp-wrap[sizes]::reference/fsdp+layers::in_memory::shard3::adamw::clip::fp64::quick",
        "pipeline-native-traits[cnn]::pytorch/pipelining+zb_v::in_memory::pipe2"
        "::adamw::clip::fp64::quick",
    )
    cases = Selection(scenarios=ids).cases(installed())
    results, _ = run_cases([replace(c, depth="family") for c in cases], 2, lambda result: None)
    assert {result.verdict for result in results} == {"pass"}, [r.reason for r in results]


def test_a_system_that_reduces_every_micro_batch_need_not_add_as_one_process_does() -> None:
    cases = [
        made_case(
            f"adopted:{name}",
            {"replicate": 2},
            id=name,
            workload=SMALL,
            optimizer=OptimizerSpec("adamw", lr=0.003),
            lane="bitwise",
            dtype="float32",
            checks=GENERAL,
        )
        for name in ("EveryMicroBatchDDP", "SilentMeanDDP")
    ]
    found: dict[str, CaseResult] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.setenv("PYTHONPATH", str(HERE))
        run_cases(cases, 2, lambda result: found.setdefault(result.id, result))
    sound, silent = found["EveryMicroBatchDDP"], found["SilentMeanDDP"]
    assert sound.verdict == "pass (working precision only)", sound.reason
    assert silent.verdict == "fail", silent.verdict


@pytest.mark.parametrize(
    ("name", "world", "says"),
    [
        ("TriplesWhatItTells", 3, ""),
        ("TriplesAll", 2, ""),
        ("TriplesAll", 3, ""),
        ("TriplesAndAverages", 3, "; of the gradients: every gradient is 3 times too small"),
    ],
)
def test_a_wrong_loss_does_not_hide_what_is_wrong_with_gradients(
    name: str, world: int, says: str
) -> None:
    """Unless the same is said of both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.setenv("PYTHONPATH", str(HERE))
        frame = prove(f"adopted:{name}", worlds=world, checks="equivalence")
    (reason,) = frame["reason"]
    assert ("the loss is 3 times too large (3 = ranks): summed loss" in reason) is (world == 3)
    assert ("of the gradients" in reason) is bool(says) and says in reason, reason


@pytest.mark.parametrize(
    ("name", "verdicts", "says"),
    [
        ("GreedyZero1", {"pass"}, ""),
        ("FlatZero1", {"skip"}, "or name it in Capabilities.declines"),
        ("LeavesEarly", {"hang", "crash"}, "broadcast"),
        ("AlongCopies", {"pass"}, ""),
        ("LeavesEarlyAlongCopies", {"hang", "crash"}, "broadcast"),
    ],
)
def test_a_class_that_shards_a_state_meets_idle_shares(
    monkeypatch: pytest.MonkeyPatch, name: str, verdicts: set[str], says: str
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    rows = prove(f"adopted:{name}", worlds=(2, 3), optimizer="adamw").to_dict("records")
    assert rows[0]["verdict"] == "pass" and "idle-shares" in rows[1]["case"], rows[0]["reason"]
    assert rows[1]["verdict"] in verdicts and says in rows[1]["reason"], rows[1]["reason"]


def test_one_world_has_idle_shares_in_a_case_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    given = {"backends": ("in_memory",), "axis": "replicate", "optimizer": "adamw"}
    plain, idle = prove("adopted:LeavesEarlyAlongCopies", worlds=2, **given).to_dict("records")
    assert plain["verdict"] == "pass" and plain["case"].startswith("prove::"), plain["reason"]
    assert "workload='charnames_gpt'" in plain["rerun"] and "idle-shares" in idle["case"]
    assert idle["verdict"] in {"hang", "crash"} and "first_step" in idle["rerun"], idle["reason"]


def test_copies_that_are_not_numbered_have_not_lost_their_names() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.setenv("PYTHONPATH", str(HERE))
        frame = prove("adopted:NumbersNoCopies", worlds=2, optimizer="adamw")
    (row,) = frame.to_dict("records")
    assert row["verdict"] == "fail" and "changed the names" not in row["reason"], row["reason"]
    assert "owned more than once, by ranks [0, 1]" in row["reason"], row["reason"]
    assert "form no whole tensor after setup: " in row["reason"], row["reason"]


HYBRIDS = [
    # class, mesh, options, verdict, what the reason says
    ("OwnHybrid", {"pipe": 2, "tensor": 2}, {}, "pass", ""),
    ("OwnHybrid", {"replicate": 2, "tensor": 2}, {}, "pass", ""),
    ("OwnHybrid", {"pipe": 2, "shard": 2}, {"data": "fsdp"}, "pass", ""),
    ("OwnHybrid", {"shard": 2, "tensor": 2}, {"data": "zero1"}, "pass", ""),
    ("OwnHybrid", {"shard": 2, "tensor": 2}, {"data": "zero3"}, "pass", ""),
    ("OwnHybrid", {"pipe": 2, "replicate": 2, "tensor": 2}, {}, "pass", ""),
    ("OwnHybrid", {"pipe": 2, "shard": 2, "tensor": 2}, {}, "pass", ""),
    ("OwnHybrid", {"pipe": 2, "shard": 2, "tensor": 2}, {"data": "zero2"}, "pass", ""),
    ("OwnHybrid", {"pipe": 2, "shard": 2, "tensor": 2}, {"data": "fsdp"}, "pass", ""),
    ("ShardsNothing", {"shard": 2, "tensor": 2}, {}, "fail", "nothing is sharded on any rank"),
    ("ShardsNothing", {"pipe": 2, "shard": 2}, {}, "fail", "nothing is sharded on any rank"),
    ("RepeatsItself", {"replicate": 2, "tensor": 2}, {}, "fail", "along the axis 'tensor'"),
    ("RepeatsItself", {"pipe": 2, "replicate": 2}, {}, "fail", "nothing is cut by stages"),
    ("RepeatsItself", {"pipe": 2, "replicate": 2, "tensor": 2}, {}, "fail", "cut by stages"),
    ("TensorCutsAll", {"replicate": 2, "tensor": 2}, {}, "pass", ""),
    ("TensorCutsAll", {"shard": 2, "tensor": 2}, {}, "pass", ""),
    ("TensorCutsAllInstead", {"shard": 2, "tensor": 2}, {}, "fail", "nothing is sharded"),
    ("TensorCutsAllInstead", {"shard": 3, "tensor": 2}, {}, "fail", "nothing is sharded"),
    ("ShardCutsAllInstead", {"shard": 2, "tensor": 2}, {}, "fail", "along the axis 'tensor'"),
]


@pytest.fixture(scope="module")
def hybrids() -> list[CaseResult]:
    cases = [
        made_case(
            f"adopted:{name}",
            mesh,
            id=str(number),
            workload=replace(SMALL, params={"layers": 4, "width": 32, "heads": 4}),
            optimizer=OptimizerSpec("adamw", lr=0.003),
            checks=GENERAL,
            options=options,
        )
        for number, (name, mesh, options, _, _) in enumerate(HYBRIDS)
    ]
    found: dict[str, CaseResult] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.setenv("PYTHONPATH", str(HERE))
        run_cases(cases, 2, lambda result: found.setdefault(result.id, result))
    return [found[str(number)] for number in range(len(HYBRIDS))]


@pytest.mark.parametrize("number", range(len(HYBRIDS)))
def test_a_hybrid_of_somebody_elses_is_held_to_what_each_axis_cuts(
    hybrids: list[CaseResult], number: int
) -> None:
    *_, verdict, says = HYBRIDS[number]
    result = hybrids[number]
    assert result.verdict == verdict and says in result.reason, (HYBRIDS[number], result.reason)
    traffic = result.check("traffic")
    assert traffic is not None and traffic.status != "skip"
    if verdict == "pass":
        assert traffic.status == "pass", traffic.message


def test_what_a_class_does_not_have_is_not_asked_of_it() -> None:
    """Other members, which it raises Refused for, and dtypes that it does not declare."""
    declared = Declaration.of(adopted.OwnDDP, {})

    def reason(**fields: Any) -> str:
        return declared.excludes_case(made_case("adopted:OwnDDP", {"replicate": 2}, **fields), "")

    assert reason() == reason(precision={"built": "float64", "parameters": "float32"}) == ""
    assert reason(membership={"1": (0,)}).startswith("has no reconfigure, ")
    for field in ("parameters", "reduce", "buffers"):
        told = reason(precision={"built": "float32", field: "bfloat16"})
        assert (
            told
            == "does not support bfloat16 of the precision policy; its dtypes: float64, float32"
        )
    narrow = made_case("adopted:OwnDDP", {"replicate": 2}, precision={"parameters": "float16"})
    takes = replace(declared, dtypes=("float64", "bfloat16"))
    assert takes.excludes_case(narrow, "") == "", "which of them is for the class to refuse"

"""A workload of a user's own: what can be judged is, and what cannot is told before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import own_models
import own_things
import pytest
import torch
from commands import here
from own_models import ATTENDING, BACKWARDS, CHAIN, NESTED, NORMED, WRAPPING

from shardproof import prove, workloads
from shardproof.case import WorkloadSpec
from shardproof.errors import SelectionError
from shardproof.workloads.base import Workload

pytestmark = pytest.mark.launches

SUPPORT = Path(own_models.__file__).parent
SCENARIO = """\
name: mine
about: a model of one's own
sees: [reduction]
workload:
  name: own_models:ATTENDING
  params: {tied: false, unused: true}
matrix:
  implementation:
    - pytorch/ddp
    - {name: pytorch/ddp, options: {find_unused_parameters: true}, label: unused}
  backend: in_memory
  mesh: {replicate: 2}
  optimizer: adamw
checks: [equivalence, replicas, traffic]
"""


def made(name: str, *traits: str, dtype: str = "float64", **params: Any) -> Workload:
    spec = WorkloadSpec(f"own_models:{name}", traits=traits, params=params)
    return workloads.make(spec, dtype)


# ------------------------------------------------------------------------------ sound and defective


@pytest.mark.parametrize("system", ["reference/ddp", "reference/fsdp", "pytorch/fsdp1"])
@pytest.mark.parametrize("workload", [ATTENDING, NORMED], ids=["attending", "normed"])
def test_sound_systems_pass(system: str, workload: Any) -> None:
    frame = prove(system, workload=workload, worlds=(2, 3))
    assert list(frame["verdict"]) == ["pass", "pass"], list(frame["reason"])


@pytest.mark.parametrize("workload", [ATTENDING, NORMED], ids=["attending", "normed"])
def test_defective_ones_fail(workload: Any) -> None:
    frame = prove(hook=own_things.forgets_to_divide, workload=workload, worlds=(2, 3))
    assert list(frame["verdict"]) == ["fail", "fail"]
    assert all("times too large" in reason for reason in frame["reason"]), list(frame["reason"])


@pytest.mark.parametrize("options", [{}, {"recompute_every": 1}], ids=["kept", "recomputed"])
@pytest.mark.parametrize("system", ["reference/ddp", "reference/zero3", "reference/fsdp"])
def test_units_take_and_give_tensors_inside_of_others(system: str, options: dict[str, int]) -> None:
    frame = prove(system, workload=NESTED, worlds=(2, 3), options=options)
    assert list(frame["verdict"]) == ["pass", "pass"], list(frame["reason"])


def test_layers_may_be_registered_in_another_order_than_used() -> None:
    """Every bucket waits for that of the first layer, which is the first in the queue."""
    options = {"bucket_bytes": 2000}
    frame = prove("reference/zero2", workload=BACKWARDS, worlds=(2, 3), options=options)
    assert list(frame["verdict"]) == ["pass", "pass"], list(frame["reason"])
    in_order = made("CHAIN")
    names = [name for name, _ in in_order.model().named_parameters()]
    assert {n.rpartition(".")[0] for n in in_order.found.completed[:2]} == {"4"}
    completed = made("BACKWARDS").found.completed
    assert {*in_order.found.completed} == {*names}
    assert {n.rpartition(".")[0] for n in completed[-2:]} == {"first"}


def test_chains_are_cut_into_stages_and_others_are_refused() -> None:
    frame = prove("reference/pipeline", workload=CHAIN, worlds=(2, 3))
    assert list(frame["verdict"]) == ["pass", "pass"], list(frame["reason"])
    (row,) = prove("reference/pipeline", workload=ATTENDING, worlds=(2,)).to_dict("records")
    assert row["verdict"] == "refused" and "give a function stages=" in row["reason"]


def test_traits_of_the_batch_and_the_lanes_can_be_had() -> None:
    frame = prove(
        "reference/zero1",
        workload=ATTENDING,
        traits=("unequal_tokens", "incomplete_window", "two_groups"),
        worlds=(3,),
        clip=(None, 0.5),
        optimizer="adamw",
        lanes=("fp64", "working_precision"),
    )
    verdicts = ["pass", "pass", "pass (working precision only)", "pass (working precision only)"]
    assert list(frame["verdict"]) == verdicts, list(frame["reason"])
    (shown,) = set(frame["traits"])
    assert shown == "unequal_tokens incomplete_window two_groups tied"


def test_a_scenario_names_it_and_finds_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(SCENARIO)
    done = here("run", "mine.yaml", "--results", "run", cwd=tmp_path, paths=[SUPPORT])
    told = done.stdout + done.stderr
    assert done.returncode == 0 and "1 judged (1 pass), 0 xfailed, 1 skipped" in told, told
    (tmp_path / "elsewhere").mkdir()
    done = here("verify", str(tmp_path / "run"), cwd=tmp_path / "elsewhere")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "own_models:ATT",
            "nowhere:ATT",
            "mine.yaml:4: this workload cannot be built: unknown",
        ),
        (
            "ATTENDING",
            "ATENDING",
            "mine.yaml:5: workload 'own_models:ATENDING' has no",
        ),
        ("tied: false", "tide: 1", "unexpected keyword argument 'tide' - correct the workload"),
        ("  params:", "  traits: [unused, empty]\n  params:", "the model has no 'empty'"),
        (
            "  params:",
            "  traits: [scalar, conditional_by_rank]\n  params:",
            "has its own model, and trait",
        ),
        ("tied: false", "tied: {}", ""),
    ],
)
def test_what_is_wrong_in_a_scenario_is_told(tmp_path: Path, old: str, new: str, says: str) -> None:
    (tmp_path / "mine.yaml").write_text(SCENARIO.replace(old, new, 1))
    done = here("run", "mine.yaml", "--dry-run", cwd=tmp_path, paths=[SUPPORT])
    told = done.stdout + done.stderr
    assert done.returncode == (2 if says else 0) and says in told, told
    assert not says or "mine.yaml" in told


# ---------------------------------------------------------------------------- what cannot be judged


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("TWO_INPUTS", "raised TypeError: TwoInputs.forward() missing 1 required positional"),
        ("MAPPING", "the model returned a dict: return"),
        ("FLOAT32", "Float and Double (.*own_models.py:[0-9]+)"),
        ("DROPPING", "two forwards of one batch .*: 1 .Dropout, p=0.1.*build the model with p=0"),
        ("INFINITE", "the loss of the first batch is nan in float64, expected finite values"),
        ("SHORT", "returned a tensor of shape .23,., expected 24 samples"),
        (
            "MOVING",
            "changes its inputs from call to call: draw with the given generator only",
        ),
        ("MEAN", "returned one number for targets .24,.: return the loss of each target"),
        ("UNNAMED", "units: the model has no module '5'"),
        ("chain", "is <function chain .*>, not an OwnWorkload"),
    ],
)
def test_what_cannot_be_judged_says_why(name: str, says: str) -> None:
    with pytest.raises(workloads.WorkloadError, match=says.replace("()", r"\(\)")):
        _ = made(name).found


def test_prove_tells_it_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match=r"own_models:MEAN: .* - correct the workload"):
        prove("plain", workload=own_models.MEAN, worlds=(1,), results=tmp_path / "run")
    with pytest.raises(SelectionError, match="ranks cannot import this workload"):
        local = workloads.own.OwnWorkload(own_models.chain, own_models.each, own_models.points)
        prove("plain", workload=local, worlds=(1,))
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------ what is found


def test_what_a_model_shows_is_found() -> None:
    attending, normed = made("ATTENDING"), made("NORMED")
    assert attending.found.traits == ("tied",) and normed.found.traits == ("frozen",)
    # Adding to all keys alike changes no softmax; a batch norm takes away what is before it.
    keys = "blocks.0.self_attn.in_proj_bias"
    assert attending.zero_gradient[keys] == [((8, 16),)]
    assert normed.zero_gradient == {"first.bias": [((0, 8),)]}
    assert normed.depends_on_cut and not attending.depends_on_cut
    assert attending.units == ("blocks.0", "blocks.1") and made("CHAIN").units == ("0", "2", "4")
    spare = made("ATTENDING", tied=False, unused=True)
    assert spare.found.traits == ("unused",)
    assert spare.unused == {"spare.weight", "spare.bias"} == spare.found.unused
    assert spare.found.calls == {"spare": 0}


def test_values_are_the_models_own_and_ranks_start_apart() -> None:
    workload = made("ATTENDING", dtype="float32")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = own_models.Attending()
    state = workload.state()
    assert all(torch.equal(state[name], p) for name, p in module.named_parameters())
    assert torch.equal(state["table"], module.table)
    one, two = (dict(workload.build_for(rank)().named_parameters()) for rank in (0, 1))
    assert not any(torch.equal(one[name], two[name]) for name in one)
    meta = workload.build_for(0)("meta")
    assert meta.head.weight is meta.symbols.weight and meta.head.weight.is_meta


def test_a_loss_of_each_sample_weighs_all_its_targets() -> None:
    by_element, by_sample = made("NORMED"), made("BY_SAMPLE")
    losses = []
    for workload in (by_element, by_sample):
        module = workload.build_for(0)()
        workload.load(module)
        micro = workload.whole_batch(0)
        outputs = module(micro.inputs)
        losses.append(float(workload.family.loss({}, outputs, micro).detach()))
    # The sum over three elements, each weighed a third, and their sum, weighed as one.
    assert losses[1] == pytest.approx(3 * losses[0], rel=1e-12)


def test_what_a_strategy_finds_out_in_training_is_a_refusal() -> None:
    """Units that are no chain cannot be recomputed together; that is no crash of the system's."""
    frame = prove("reference/ddp", workload=NESTED, options={"recompute_every": 2}, worlds=(2,))
    assert list(frame["verdict"]) == ["refused"], list(frame["reason"])
    assert "option 'recompute_every': unit 'blocks.1' was not called with" in frame["reason"][0]


def test_stages_that_would_pass_containers_are_refused() -> None:
    frame = prove("reference/pipeline", workload=WRAPPING, worlds=(2,))
    assert list(frame["verdict"]) == ["refused"], list(frame["reason"])
    assert (
        "axis 'pipe': stage 0 returned a dict, but a stage must return one tensor"
        in frame["reason"][0]
    )
    frame = prove("reference/zero3", workload=WRAPPING, worlds=(2,))
    assert list(frame["verdict"]) == ["pass"], list(frame["reason"])

"""The loaded state is the saved one, and training continues as if it had never stopped.

The scenario's ``checkpoints`` say when a case saves and who loads.  Two runs are made beside it
(``cases/plans/checkpoint.py``).  One saves nothing: the case has its bits after every step, in
tensors, losses, metrics and generators, also where a save goes on behind training's back.  In the
other fresh ranks, set up from other values, from which they have trained if the plan says
``trained``, load the newest checkpoint and go on from the step that the returned ``extra`` names.
Right after the load they hold what was held at the save: names, dtypes, elements, step counters,
masters, tied tensors, generators.  In the same shape the steps that follow have the bits of the run
that was never interrupted; in another world, mesh, strategy or precision each is judged against the
oracle by the bounds of ``equivalence``, with the loss scale and the samples of the run that saved.
Who loads holds and sends in these steps what its own strategy promises, where the case has the
checks ``memory`` and ``traffic``.  Of several saves the newest ``keep`` are left.  With
``again_at`` who loaded saves, too, and what it saved is loaded in the same way.  Where a planned
fault ended the case, one of its checkpoints is loaded, whole.

Sees state that is not saved, not loaded, or loaded into the wrong place, rank or order; live
tensors that a writer saves late; progress, loss scale or generators that start again; ties that a
load parts; a save that moves numbers or draws; copies that a load leaves, or messages.

*Cannot see* what lies on the disk (``shardproof checkpoint verify`` reads that); a fault that shows
in no piece and in no step that follows; what who loaded saves next, without ``again_at``;
generators of a GPU; on another mesh, generators, and the steps that follow where these are drawn
from; if the batch is cut otherwise, buffers of other ranks than 0, those of the steps that follow,
and these steps as a whole where gradients depend on how it is cut; of a strategy that loses
something, or whose ranks train alone for a while, what a load in another shape gives back
(residuals and outer state are shared out again) and the steps that follow; temporaries at their
largest after a load, bytes of processes, and those that a cost model of the system's own would
promise after a load in another shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from shardproof import checks, workloads
from shardproof.case import Case, Lane
from shardproof.checks import Needs, Outcome, causes
from shardproof.checks.causes import state
from shardproof.checks.equivalence import compare_steps, exact
from shardproof.checks.numbers import Differs, Tally, saying
from shardproof.checks.one_update import MASTER
from shardproof.checks.two_runs import KINDS, of_rank_0, same_step, with_other, without_masters
from shardproof.contract import Kind
from shardproof.evidence.assembled import Assembled, Beside, Continued, Evidence, Figures
from shardproof.evidence.records import ComparisonRow

NEEDS: Needs = ("values", "every rank")

#: Of a case's options: what says how checkpoints are written.
OPTION = "checkpoint"
#: Checks of what the strategy promises that who loads is judged by, too, if the case names them.
PROMISES = ("memory", "traffic")
#: What they compare.
_PROMISED = "all that is promised"
#: The phase of rows that name each tensor which a load did not give back.
_LOST = "not loaded"


def who_loads(case: Case) -> Case:
    """The case that loads what ``case`` saves.

    :raises Refused: the implementation does not take its options.
    """
    assert case.checkpoint is not None
    other = with_other(case, case.checkpoint.into)
    return replace(other, id=f"{case.id}::loaded")


# ------------------------------------------------------------------------------------ measuring


def measure(evidence: Evidence) -> list[ComparisonRow]:
    """Compare the further runs with this one, up to the first mismatch."""
    if why := _not_defined(evidence):
        return [ComparisonRow(skip=why)]
    loaded = evidence.beside.get("loaded", Beside(skip="nothing was loaded"))
    if loaded.skip:
        return [ComparisonRow(skip=loaded.skip)]
    rows: list[ComparisonRow] = []
    try:
        # In the order of causes: a save that changes the run, what is left of it on disk, what a
        # load gives back, and what training makes of that.
        _saving_changes_nothing(evidence, rows)
        _newest_are_left(evidence, rows)
        found = _goes_on(evidence, loaded, rows)
        # It has the shape of who loads.
        if (again := evidence.beside.get("again")) is not None:
            with saying("of what was saved after a load, "):
                _goes_on(found, again, rows)
    except Differs as failure:
        rows.append(ComparisonRow(problem=str(failure)))
    return rows


def _not_defined(evidence: Figures) -> str:
    case, claims = evidence.case, evidence.declaration
    if case.checkpoint is None:
        return "the scenario plans no checkpoint"
    if claims.oracle == "emulated":  # what one run loses the other loses
        same = is_same(case, who_loads(case))
        return "" if same else "residuals depend on the mesh, which the reload changes"
    if claims.oracle != "plain" or claims.exactness not in ("bitwise", "reordered-sum"):
        return f"declares exactness {claims.exactness}, so two runs may differ"
    if "given" in claims.follows.values() and "variable_lengths" in case.workload.traits:
        # Such state may count padding, and ranks pad to the longest of their samples.
        same = is_same(case, who_loads(case))
        return "" if same else "state counts padding, which depends on the mesh"
    return ""


def _saving_changes_nothing(evidence: Evidence, rows: list[ComparisonRow]) -> None:
    if (beside := evidence.beside.get("unsaved")) is None:
        return  # a fault ended the case
    if beside.evidence is None:
        raise Differs(beside.problem)
    with saying("saving changes the run that saves: "):
        for step in evidence.steps:
            same_step(evidence, beside.evidence, step, rows)


def _newest_are_left(evidence: Evidence, rows: list[ComparisonRow]) -> None:
    left, plan = evidence.checkpoints_left, evidence.case.checkpoint
    keep = evidence.case.options.get(OPTION, {}).get("keep")
    if left is None or plan is None or keep is None:
        return
    wanted = min(keep, plan.saves)
    place = (plan.save_at - 1, "saves", "checkpoints that are left", "the folder")
    rows.append(ComparisonRow(*place, error=float(abs(left - wanted)), bound=0.0))
    if left != wanted:
        raise Differs(f"{left} checkpoints are left after {plan.saves} saves, expected {wanted}")


def _what_follows(base: Evidence, other: Continued, rows: list[ComparisonRow]) -> None:
    """The steps after the load."""
    for step in other.steps:
        _same_course(base, other, step)
    if is_same(base.case, other.case):
        for step in other.steps:
            try:
                same_step(base, other, step, rows)
            except Differs as failure:
                said = str(failure)
                if step == other.first_step:
                    said = causes.before(partial(state.of_reload, base, other, step), failure)
                found = "the restored state is correct, but training then diverges"
                raise Differs(f"{found}: {said}") from None
        return
    if _has_other_numbers(base.case, other):
        return
    cut = base.case.data_coordinates == other.case.data_coordinates
    if exact(other) and base.case.lane != "dyadic" and not (cut and exact(base)):
        # Who saved has not the bits of the oracle of who loads.
        wide = other.case.lowest_dtype == "float64"
        lane: Lane = "fp64" if wide else "working_precision"
        other.case = replace(other.case, lane=lane)
    with saying("after the load, "):
        compare_steps(other, rows, buffers=buffers_go_on(base, other))


def _goes_on(base: Evidence, beside: Beside, rows: list[ComparisonRow]) -> Continued:
    """The run that restores the checkpoint of ``base``, if it continues correctly."""
    if beside.evidence is None:
        raise Differs(beside.problem or beside.skip)
    assert isinstance(beside.evidence, Continued)
    what_was_loaded(base, beside.evidence, rows)
    _what_follows(base, beside.evidence, rows)
    _is_as_promised(beside.evidence, rows)
    return beside.evidence


def _is_as_promised(loaded: Continued, rows: list[ComparisonRow]) -> None:
    """The state and traffic of the steps that follow, where the case judges them."""
    for name in loaded.case.checks if loaded.steps else ():
        outcome = checks.decide(name, loaded)
        if outcome.status == "fail":
            raise Differs(f"after the load, {name}: {outcome.message}")
        if outcome.status == "pass":
            place = (loaded.first_step, f"after the load, {name}", _PROMISED, "all ranks")
            rows.append(ComparisonRow(*place, error=0.0, bound=0.0))


def _has_other_numbers(case: Case, other: Continued) -> bool:
    """Whether losses and gradients differ by definition: the lossy state depends on the shape,
    random numbers come from generators of another mesh, or the batch is cut differently.
    """
    loads = other.case
    if other.declaration.oracle == "emulated":
        return True
    if "dropout_stateful" in case.workload.traits and dict(case.mesh) != dict(loads.mesh):
        return True
    if case.data_coordinates == loads.data_coordinates:
        return False
    return workloads.make(case.workload, case.dtype, case.lane).depends_on_cut


def _same_course(base: Evidence, other: Evidence, step: int) -> None:
    """Whether both runs have the same samples and the same loss scale in ``step``."""
    steps = [[record.steps[step] for record in run.records] for run in (base, other)]
    # Ranks of one share have the same samples.
    shares = ({own.share: own.samples for own in ranks} for ranks in steps)
    seen, now = (sorted(n for samples in own.values() for n in samples) for own in shares)
    if seen != now:
        raise Differs(f"step {step} has samples {now[:4]}... after the load, not {seen[:4]}...")
    was, scale = (ranks[0].metrics.get("scale") for ranks in steps)
    if was != scale:
        what = f"it is {scale:g} at step {step}, {was:g} without a load"
        raise Differs(f"the loss scale was not loaded: {what}")


# ------------------------------------------------------------------------- right after the load


def is_same(case: Case, loads: Case) -> bool:
    """Whether the restoring system equals the saving one, so that the bits that follow are the
    same.
    """
    one, other = (
        (c.implementation, dict(c.mesh), dict(c.precision), {**c.options, OPTION: None})
        for c in (case, loads)
    )
    return one == other


def what_was_loaded(base: Evidence, other: Continued, rows: list[ComparisonRow]) -> None:
    """Progress, ties, tensors and generators, right after the load."""
    # First of all: a checkpoint of another step explains every tensor that differs.
    _progress(base, other)
    step, found = other.first_step - 1, []
    for kind in KINDS:
        if not base.has(step, "after_update"):
            raise Differs(f"step {step}: observe('after_update') was never called")
        load = _load(base, other, kind)
        told = load.saved.problems or load.held.problems
        found.append(sentence := "; ".join(told[:3]) or state.of_load(load))
        place = (step, f"after the load, {kind}", "all that was saved", "all ranks")
        if load.saved.tensors:
            rows.append(ComparisonRow(*place, error=float(bool(sentence)), bound=0.0))
        lost = (step, _LOST)
        rows += [
            ComparisonRow(*lost, name, "all ranks", error=1.0, bound=0.0) for name in load.wrong
        ]
    if wrong := "; ".join(filter(None, (*found, _ties(other), _draws(base, other)))):
        raise Differs(wrong)


def _progress(base: Evidence, other: Continued) -> None:
    """Whether every rank was given back what the caller saved."""
    plan = other.case.checkpoint
    assert plan is not None
    extras = {n: r.loaded.extra for n, r in other.ranks.items() if r.loaded is not None}
    steps = {rank: _step_of(extra) for rank, extra in extras.items()}
    # A fault may have come before the last save.
    saved = [plan.save_at] if "unsaved" in base.beside else [*plan.saved_at]
    for rank, step in steps.items():
        if step not in saved:
            newest = f"the newest checkpoint is of step {plan.save_at}"
            where = f"rank {rank} would resume from step {step}"
            raise Differs(f"progress was not loaded: {where}, {newest}")
    for rank, extra in extras.items():
        if steps[rank] != other.first_step:
            apart = f"step {steps[rank]}, another rank that of step {other.first_step}"
            raise Differs(f"rank {rank} loaded the checkpoint of {apart}")
        given = plan.extra(other.first_step)
        if odd := [key for key in {**given, **extra} if given.get(key) != extra.get(key)]:
            was, now = given.get(odd[0]), extra.get(odd[0])
            what = f"the extra values of save were not loaded on rank {rank}"
            raise Differs(f"{what}: {odd[0]!r} is {now}, expected {was}")


def _step_of(extra: Mapping[str, Any]) -> Any:
    """The step that a caller resumes from."""
    data = extra.get("data")
    return data.get("step") if isinstance(data, Mapping) else None


def _load(base: Evidence, other: Continued, kind: Kind) -> state.Load:
    """The state of ``kind`` at the save, in the form of the restoring run, and the loaded one."""
    step = other.first_step - 1
    saved, held = (run.observed(step, "after_update", kind) for run in (base, other))
    before = other.initial(kind).first() if kind != "optimizer" else {}
    moments = state.moments_of(base, kind, other.first_step)
    # What other ranks hold is dead where each step begins with rank 0's.
    keeps_own = buffers_go_on(base, other) and other.declaration.buffers != "rank0"
    if kind == "buffers" and not keeps_own:
        saved, held = of_rank_0(saved), of_rank_0(held)
    if not is_same(base.case, other.case):
        saved = _between_precisions(base, step, kind, saved, held)
        if kind == "optimizer":
            saved = replace(saved, tensors={**saved.tensors, **_begun_anew(other)})
    return state.Load(kind, other.first_step, saved, held, before, moments)


def _begun_anew(other: Continued) -> dict[str, dict[int, Tensor]]:
    """The outer optimizer's slots, if only the restoring run has one."""
    if other.meeting is None:
        return {}
    loaded = other.observed(other.first_step - 1, "after_update", "parameters").first()
    trained = {n: loaded[n] for n in other.workload.trainable_names if n in loaded}
    return {name: {0: slot} for name, slot in other.meeting.begin(trained).items()}


def buffers_go_on(base: Evidence, other: Evidence) -> bool:
    """Whether every data coordinate has its own buffers, or rank 0's, again."""
    rules = {run.declaration.buffers for run in (base, other)}
    return base.case.data_coordinates == other.case.data_coordinates and len(rules) == 1


def _between_precisions(
    base: Evidence, step: int, kind: Kind, saved: Assembled, held: Assembled
) -> Assembled:
    """A parameter in another dtype is its master, rounded; a master that was not saved is its
    parameter.
    """
    slots = base.observed(step, "after_update", "optimizer").first()
    if kind == "parameters":
        wide = {name: slots.get(f"{name}.{MASTER}") for name in saved.tensors}
        tensors = {
            name: {n: _rounded(t, wide[name], held.tensors.get(name)) for n, t in copies.items()}
            for name, copies in saved.tensors.items()
        }
        return replace(saved, tensors=tensors)
    if kind != "optimizer":
        return saved
    values = base.observed(step, "after_update", "parameters").tensors
    tensors = dict(without_masters(saved).tensors)
    for name, copies in held.tensors.items():
        owner = name.removesuffix(f".{MASTER}")
        if name != owner:
            own = saved.tensors.get(name) or values.get(owner, {})
            tensors[name] = {n: t.to(copies[min(copies)].dtype) for n, t in own.items()}
    return replace(saved, tensors=tensors)


def _rounded(tensor: Tensor, master: Tensor | None, held: Mapping[int, Tensor] | None) -> Tensor:
    """``tensor`` in the dtype in which it is ``held``."""
    if not held or (dtype := held[min(held)].dtype) == tensor.dtype:
        return tensor
    return (tensor if master is None else master).to(dtype)


def _ties(other: Continued) -> str:
    for record in other.records:
        for names in record.loaded.parted if record.loaded else ():
            shown = " and ".join(map(repr, names[:3]))
            return f"the load untied {shown} on rank {record.rank}: they were one parameter"
    return ""


def _draws(base: Evidence, other: Continued) -> str:
    """The problem of generators; ranks of another mesh have none of the saved ones."""
    if dict(base.case.mesh) != dict(other.case.mesh):
        return ""
    step = other.first_step - 1
    saved, held = ([r.steps[step].draws for r in run.records] for run in (base, other))
    before = [r.loaded.before if r.loaded else {} for r in other.records]
    return state.of_draws(saved, held, before)


# ------------------------------------------------------------------------------------- deciding


def decide(figures: Figures) -> Outcome:
    """The first thing that is wrong fails; a run that could not be made is a skip."""
    rows = figures.compared.get("checkpoint", [])
    for row in rows:
        if row.skip:
            return Outcome("checkpoint", "skip", row.skip)
    tally = Tally.of(rows)
    plan = figures.case.checkpoint
    numbers: dict[str, object] = {
        "compared": tally.compared,
        "saved_at": [] if plan is None else list(plan.saved_at),
        "not_tested": sorted(tally.not_tested),
        "promises": sorted({row.phase for row in rows if row.name == _PROMISED}),
    }
    if lost := [row.name for row in rows if row.phase == _LOST]:
        numbers["names"] = lost
    if not tally.compared and not tally.wrong:
        return Outcome("checkpoint", "undecidable", "nothing could be compared", None, numbers)
    return tally.outcome("checkpoint", numbers)

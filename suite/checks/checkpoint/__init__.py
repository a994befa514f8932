"""What is loaded is what was saved, and training goes on as if it had never stopped.

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
and these steps as a whole where gradients depend on how it is cut; the steps of a strategy that
loses something, or trains alone for a while, after a load in another shape; temporaries at their
largest after a load, bytes of processes, and those that a cost model of the system's own would
promise after a load in another shape.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from shardproof import checks, workloads
from shardproof.case import Case, Lane
from shardproof.checks import Needs, Outcome, causes
from shardproof.checks.causes.state import of_reload
from shardproof.checks.checkpoint.loaded import OPTION, buffers_go_on, is_same, what_was_loaded
from shardproof.checks.equivalence import compare_steps, exact
from shardproof.checks.numbers import Differs, Tally
from shardproof.checks.two_runs import same_step, with_other
from shardproof.evidence.assembled import Beside, Continued, Evidence, Figures
from shardproof.evidence.records import ComparisonRow

NEEDS: Needs = ("values", "every rank")

#: Checks of what the strategy promises that who loads is judged by, too, if the case names them.
PROMISES = ("memory", "traffic")
#: What they compare.
_PROMISED = "all that is promised"


def who_loads(case: Case) -> Case:
    """The case that loads what ``case`` saves.

    :raises Refused: the implementation does not take its options.
    """
    assert case.checkpoint is not None
    other = with_other(case, case.checkpoint.into)
    return replace(other, id=f"{case.id}::loaded")


# ------------------------------------------------------------------------------------ measuring


def measure(evidence: Evidence) -> list[ComparisonRow]:
    """Compare the runs beside this one with it, up to the first thing that is wrong."""
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
        if loaded.evidence is None:
            raise Differs(loaded.problem)
        assert isinstance(loaded.evidence, Continued)
        what_was_loaded(evidence, loaded.evidence, rows)
        _what_follows(evidence, loaded.evidence, rows)
        _is_as_promised(loaded.evidence, rows)
        _is_saved_again(evidence.beside.get("again"), loaded.evidence, rows)
    except Differs as failure:
        rows.append(ComparisonRow(problem=str(failure)))
    return rows


def _not_defined(evidence: Figures) -> str:
    case, claims = evidence.case, evidence.declaration
    if case.checkpoint is None:
        return "the scenario plans no checkpoint"
    if claims.oracle == "emulated":  # what one run loses the other loses
        same = is_same(case, who_loads(case))
        return "" if same else "it loses what hangs on the shape: after a reshape, something else"
    if claims.oracle != "plain" or claims.exactness not in ("bitwise", "reordered-sum"):
        return f"declares {claims.exactness} numbers: two runs need not agree"
    return ""


def _saving_changes_nothing(evidence: Evidence, rows: list[ComparisonRow]) -> None:
    if (beside := evidence.beside.get("unsaved")) is None:
        return  # a fault ended the case
    if beside.evidence is None:
        raise Differs(beside.problem)
    for step in evidence.steps:
        try:
            same_step(evidence, beside.evidence, step, rows)
        except Differs as failure:
            raise Differs(f"saving changes the run that saves: {failure}") from None


def _newest_are_left(evidence: Evidence, rows: list[ComparisonRow]) -> None:
    left, plan = evidence.checkpoints_left, evidence.case.checkpoint
    keep = evidence.case.options.get(OPTION, {}).get("keep")
    if left is None or plan is None or keep is None:
        return
    wanted = min(keep, plan.saves)
    place = (plan.save_at - 1, "saves", "checkpoints that are left", "the folder")
    rows.append(ComparisonRow(*place, error=float(abs(left - wanted)), bound=0.0))
    if left != wanted:
        raise Differs(f"after {plan.saves} saves {left} checkpoints are left, not {wanted}")


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
                    said = causes.before(partial(of_reload, base, other, step), failure)
                raise Differs(f"what was saved was loaded, and yet: {said}") from None
        return
    if _has_other_numbers(base.case, other):
        return
    cut = base.case.data_coordinates == other.case.data_coordinates
    if exact(other) and base.case.lane != "dyadic" and not (cut and exact(base)):
        # Who saved has not the bits of the oracle of who loads.
        wide = other.case.lowest_dtype == "float64"
        lane: Lane = "fp64" if wide else "working_precision"
        other.case = replace(other.case, lane=lane)
    try:
        compare_steps(other, rows, buffers=buffers_go_on(base, other))
    except Differs as failure:
        raise Differs(f"after the load, {failure}") from None


def _is_saved_again(again: Beside | None, loaded: Continued, rows: list[ComparisonRow]) -> None:
    """Whether what ``loaded`` saved is loaded as well; it has the shape of who loads."""
    if again is None:
        return
    try:
        if again.evidence is None:
            raise Differs(again.problem or again.skip)
        assert isinstance(again.evidence, Continued)
        what_was_loaded(loaded, again.evidence, rows)
        _what_follows(loaded, again.evidence, rows)
        _is_as_promised(again.evidence, rows)
    except Differs as failure:
        raise Differs(f"of what was saved after a load, {failure}") from None


def _is_as_promised(loaded: Continued, rows: list[ComparisonRow]) -> None:
    """What is held and sent in the steps that follow, where the case judges that."""
    for name in loaded.case.checks if loaded.steps else ():
        outcome = checks.decide(name, loaded)
        if outcome.status == "fail":
            raise Differs(f"after the load, {name}: {outcome.message}")
        if outcome.status == "pass":
            place = (loaded.first_step, f"after the load, {name}", _PROMISED, "all ranks")
            rows.append(ComparisonRow(*place, error=0.0, bound=0.0))


def _has_other_numbers(case: Case, other: Continued) -> bool:
    """Whether losses and gradients are others by definition: of who loses what hangs on the shape,
    drawn from generators that belong to ranks of another mesh, or of a batch that is cut otherwise.
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
        raise Differs(f"step {step} has samples {now[:4]}... after the load, {seen[:4]}... without")
    was, scale = (ranks[0].metrics.get("scale") for ranks in steps)
    if was != scale:
        what = f"it is {scale:g} at step {step}, {was:g} without a load"
        raise Differs(f"the loss scale was not loaded: {what}")


# ------------------------------------------------------------------------------------- deciding


def decide(figures: Figures) -> Outcome:
    """The first thing that is wrong fails; a run that could not be made is a skip."""
    rows = figures.compared.get("checkpoint", [])
    for row in rows:
        if row.skip:
            return Outcome("checkpoint", "skip", row.skip)
    tally = Tally.of(rows)
    plan = figures.case.checkpoint
    numbers = {
        "compared": tally.compared,
        "saved_at": [] if plan is None else list(plan.saved_at),
        "not_tested": sorted(tally.not_tested),
        "promises": sorted({row.phase for row in rows if row.name == _PROMISED}),
    }
    if not tally.compared and not tally.wrong:
        return Outcome("checkpoint", "undecidable", "nothing could be compared", None, numbers)
    return tally.outcome("checkpoint", numbers)

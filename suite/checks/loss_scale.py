"""Loss scaling: all ranks skip the same steps at the same scale; a skipped step changes no state.

The oracle follows the same policy, so scale and skipped steps must equal its, on every rank; where
data coordinates train alone, those of each.  After a skipped step parameters, masters, moments and
step counters are those of the step before, bit for bit; where ranks meet at its end, all but what
a meeting makes.  A case in which nothing ever overflows proves half of this: under the trait
``overflow_on_one_rank`` it is a ``precondition``.

*Cannot see* whether finite gradients were divided by the scale (``equivalence`` can, but for one
round-off of the scale in bf16 or fp16), nor who found the overflow: only that all act on it.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardproof.checks import Needs, Outcome, Worst
from shardproof.contract import is_outer
from shardproof.evidence.assembled import Figures
from shardproof.evidence.records import OracleStep, TensorRow

NEEDS: Needs = ("values",)

TRAIT = "overflow_on_one_rank"


def decide(figures: Figures) -> Outcome:
    """Compare every rank's metrics with the oracle's, and the state around skipped steps."""
    if figures.case.optimizer.scaler is None:
        return Outcome("loss_scale", "skip", "losses are not scaled")
    truth = figures.oracle.steps
    skipped = [s for s in figures.steps if truth[s].skipped or any(_alone(truth[s]))]
    numbers = {"scales": [truth[step].scale for step in figures.steps], "skipped": skipped}
    for step in figures.steps:
        for record in figures.records:
            if record.steps[step].present:
                own = truth[step].of_share(record.steps[step].share)
                if problem := _metrics(record.steps[step].metrics, own):
                    where = f"step {step}, rank {record.rank}: {problem}"
                    return Outcome("loss_scale", "fail", where, figures=numbers)
    for step in skipped:
        if (worst := _moved(figures.tensors, step, truth[step])) is not None:
            text = f"{worst.name!r} changed in step {step}, which overflowed and must not update"
            return Outcome("loss_scale", "fail", text, worst, numbers)
    if TRAIT in figures.workload.traits and not skipped:
        message = "no step overflowed: more steps are needed"
        return Outcome("loss_scale", "precondition", message, figures=numbers)
    return Outcome("loss_scale", "pass", figures=numbers)


def _metrics(metrics: Mapping[str, float], truth: OracleStep) -> str:
    """The problem of one rank's metrics (``""``: nothing)."""
    if missing := [name for name in ("scale", "skipped") if name not in metrics]:
        return f"its metrics miss {missing[0]!r}, which loss scaling must report"
    if bool(metrics["skipped"]) != bool(truth.skipped):
        did = "skipped the update" if metrics["skipped"] else "made the update"
        return f"it {did}, the oracle did not"
    if metrics["scale"] != truth.scale:
        return f"its scale was {metrics['scale']:g}, the oracle's {truth.scale:g}"
    return ""


def _alone(truth: OracleStep) -> list[bool]:
    """Which of the data coordinates that train alone left the update out."""
    return [bool(step.skipped) for step in truth.apart]


def _moved(rows: list[TensorRow], step: int, truth: OracleStep) -> Worst | None:
    """A parameter or slot whose bits after ``step`` are not those that it had before.

    Where each copy is one data coordinate's own, those that left the update out are asked.
    """
    alone = _alone(truth)
    before: dict[tuple[str, str, int], str] = {}
    after: dict[tuple[str, str, int], TensorRow] = {}
    earlier = (step - 1, "after_update" if step else "initial")
    for row in rows:
        key = (row.kind, row.name, row.replica)
        met = truth.met and (row.kind == "parameters" or is_outer(row.name))
        is_asked = row.kind in ("parameters", "optimizer") and not met
        if not is_asked or (alone and not alone[row.replica]):
            continue
        if (row.step, row.point) == earlier:
            before[key] = row.digest
        elif (row.step, row.point) == (step, "after_update"):
            after[key] = row
    for key, row in after.items():
        # Masters and outer slots exist from the first update on: there is none to keep before.
        is_fresh = not step and (row.name.endswith(".master") or is_outer(row.name))
        if not is_fresh and before.get(key) != row.digest:
            phase, owner = f"after_update {row.kind}", f"ranks {row.owners}"
            return Worst(row.name, step, phase, owner, float("inf"), 0.0)
    return None

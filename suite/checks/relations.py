"""Metamorphic relations: the result of a second run follows from the first, without an oracle.

``expect.relation`` names one of ten.  *split*: twice the micro-batches, the same gradients.
*cut*: the same global batch as one micro-batch of one window on one data coordinate, the same
gradients.
*permute*: the ranks' shares of the batch in reversed order, the same gradients.  *world1*: at a
world of 1 the system is ``plain``.  *scale*: all loss weights times 2, with SGD's rate halved and
its weight decay doubled (AdamW: eps doubled): gradients exactly doubled, parameters the same bits,
since a factor of 2 is never rounded.  *recompute*: no activation checkpointing, no difference but
in memory: where memory is measured, every forward keeps fewer bytes of activations than without.
*reload*: halfway every rank's pieces of parameters, optimizer state and buffers go into a fresh
instance, set up from other values, which goes on.  *thawed*: before each step an evaluation is
made while no parameter requires a gradient, which leaves no trace.  *again*: the same case once
more.  *same_as*: another implementation, other options of this one, the same ranks on other axes,
or all of these.

Compared are the final and the clipped gradients of every step, and after the update what ``AFTER``
lists; where another order of sums is allowed, under SGD only (AdamW turns the noise of a zero
gradient into a full-size update).  *split*, *permute* and *cut* are judged in fp64 at a relative
Frobenius error of 1e-12, and so is *reload* where sums of the backend hang on what lies where: a
fresh instance may lay its buckets out otherwise.  The others are judged bit for bit; *same_as* at
that error in lane fp64, bit for bit in others: a scenario claims equal bits by its lane.

Sees what depends on the cut (a mean of means), on who holds which data (a rank that counts more or
not at all), on being one of several (a cast on the way), on absolute size (a weight normalised
again, a threshold, a second eps), on what is kept for backward (fresh dropout masks, buffers that
are updated twice), on state that lies in no piece (a counter that starts again), on when and how
parameters are gathered, and the last bit (a sum in another order, a mean multiplied again), without
believing the oracle.

*Cannot see* a fault that both runs share (a sum where a mean belongs passes *permute* and *scale*;
an update with a wrong sign passes all but *world1* and *same_as*), nor traffic, order or any other
memory; nor strides that are lost, where the CPU's kernels add alike over both (``memory`` sees them
by the bytes that keep them); nor anything where the relation does not hold by definition (BatchNorm
or a branch by micro-batch under *split*, a generator that no piece holds under *reload*): these are
``skip`` with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from shardproof import axes, workloads
from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.checks import Needs, Outcome, causes, weighs
from shardproof.checks.causes.state import of_reload
from shardproof.checks.equivalence import stages_add_in_order
from shardproof.checks.numbers import FP64_BOUND, Tally, bitwise, relative_frobenius
from shardproof.checks.two_runs import Pair, with_other
from shardproof.evidence.assembled import Beside, Evidence, Figures
from shardproof.evidence.records import ComparisonRow

NEEDS: Needs = ("values", "every rank")

#: Relations that hold up to the order of sums, and those that hold bit for bit.
REORDERED = ("split", "permute", "cut")
EXACT = ("world1", "scale", "recompute", "reload")
#: Holds bit for bit, whatever a run loses.
AGAIN = "again"
#: What is compared after the update; in *scale* AdamW's moments are 2 and 4 times as large.
AFTER = dict.fromkeys((*REORDERED, "scale"), ("parameters",)) | dict.fromkeys(
    ("world1", "recompute", "reload", "same_as", "thawed", AGAIN),
    ("parameters", "optimizer", "buffers", "extra"),
)
#: Branches that a flagged sample opens; their number of micro-batches says which are flagged.
_BY_MICRO_BATCH = ("conditional_by_micro_batch", "conditional_last_micro_batch")


def name_of(relation: str | Mapping[str, Any] | None) -> str:
    """The relation's name; *same_as* is a mapping of that one key."""
    return next(iter(relation)) if isinstance(relation, Mapping) else str(relation)


def derive(evidence: Figures) -> tuple[Case | None, str]:
    """The case to run in addition to this one, or ``None`` and why the relation does not apply.

    :raises Refused: the implementation of *same_as* does not take its options.
    """
    case = evidence.case
    relation = name_of(case.expect.get("relation"))
    if why := _not_defined(evidence, relation):
        return None, why
    plain = replace(case, id=f"{case.id}::{relation}", checks=(), ledgers=False)
    return _DERIVE[relation](plain, evidence), ""


def _scale(case: Case, _: Figures) -> Case:
    spec = case.optimizer
    if spec.name == "adamw":
        # 2 m / (sqrt(4 v) + 2 eps): the same step, and AdamW's decay does not see the gradient.
        spec = replace(spec, eps=2 * spec.eps)
    else:
        groups = tuple(
            g if g.weight_decay is None else replace(g, weight_decay=2 * g.weight_decay)
            for g in spec.groups
        )
        # (lr / 2) (2 g + 2 wd w) is the same step, and factors of 2 are never rounded.
        decay = 2 * spec.weight_decay
        spec = replace(spec, lr=spec.lr / 2, weight_decay=decay, groups=groups)
    return replace(case, optimizer=spec, loss_scale=2.0)


def _recompute(case: Case, evidence: Figures) -> Case:
    """Without recomputation; its memory is measured where this run's is, to compare them."""
    case = replace(case, options={**case.options, "recompute_every": 0})
    is_weighed = weighs(evidence.case, evidence.declaration)
    return replace(case, checks=("memory",), ledgers=True) if is_weighed else case


_DERIVE: dict[str, Callable[[Case, Figures], Case]] = {
    "split": lambda case, _: replace(
        case, workload=replace(case.workload, micro_batches=2 * case.workload.micro_batches)
    ),
    "cut": lambda case, _: replace(
        case,
        mesh={name: 1 if name in axes.sharing(case.mesh) else n for name, n in case.mesh.items()},
        workload=replace(case.workload, micro_batches=1, windows=1),
    ),
    "thawed": lambda case, _: replace(case, thaws=True),
    "permute": lambda case, run: replace(case, shares=tuple(reversed(range(_shares(run))))),
    "world1": lambda case, _: replace(
        case, implementation="plain", options={}, mesh=axes.replicas(1)
    ),
    "scale": _scale,
    "recompute": _recompute,
    "reload": lambda case, _: replace(case, reload_at=case.steps // 2),
    "same_as": lambda case, _: with_other(case, case.expect["relation"]["same_as"]),
    AGAIN: lambda case, _: case,
}


def _not_defined(evidence: Figures, relation: str) -> str:
    case, claims = evidence.case, evidence.declaration
    if relation not in _DERIVE:
        return "the case names no relation (expect.relation)"
    if relation == AGAIN:
        return ""
    if relation == "recompute" and claims.exactness != "stale":
        return "" if case.options.get("recompute_every") else "option 'recompute_every' is off"
    if claims.oracle == "emulated" and relation in ("world1", "reload", "same_as"):
        pass  # what one run loses the other loses, or the scenario says that nothing is lost
    elif claims.oracle != "plain" or claims.exactness not in ("bitwise", "reordered-sum"):
        return f"declares exactness {claims.exactness}, so two runs may differ"
    if relation in REORDERED and case.dtype != "float64":
        return f"{relation} adds in another order: it is judged in float64"
    if relation in EXACT and case.optimizer.clip_norm is not None:
        return f"{relation} compares bits with clipping off"
    if relation == "world1" and case.world != 1:
        return "world1 compares a world of 1 with plain"
    if relation == "world1" and not stages_add_in_order(evidence):
        return "its stages add gradients up in another order than one process"
    if relation in ("permute", "cut", "thawed", "reload", "same_as") and case.changes_members:
        return f"members change: {relation} compares runs of the same ranks"
    if relation == "reload":
        return _not_reloadable(case)
    if relation == "same_as":
        return _not_movable(case)
    if relation == "permute" and _shares(evidence) < 2:
        return "one share of data: nothing to exchange"
    if relation in ("split", "cut"):
        return _not_splittable(evidence, relation)
    return ""


def _not_splittable(evidence: Figures, relation: str) -> str:
    spec = evidence.case.workload
    if by_cut := [trait for trait in spec.traits if trait in _BY_MICRO_BATCH]:
        return f"{by_cut[0]}: what runs depends on the micro-batch"
    if workloads.make(spec, evidence.case.dtype, evidence.case.lane).depends_on_cut:
        return "gradients depend, by definition, on how the batch is cut"
    if relation == "cut":
        whole = _shares(evidence) * spec.micro_batches * spec.windows == 1
        return "the batch is one micro-batch already" if whole else ""
    # Twice the micro-batches need at least one sample for each.
    if spec.global_batch <= _shares(evidence) * spec.micro_batches * spec.windows:
        return "every micro-batch is one sample already"
    return ""


def _not_movable(case: Case) -> str:
    if case.is_moved and case.lane == "bitwise" and not _is_ordered(case):
        return f"{case.backend} adds up in an order of its own: sums of two systems may differ"
    moved = case.expect["relation"]["same_as"].get("mesh", case.mesh)
    if replace(case, mesh=moved).data_coordinates == case.data_coordinates:
        return ""
    if workloads.make(case.workload, case.dtype, case.lane).depends_on_cut:
        return "gradients depend, by definition, on how the batch is cut"
    return ""


def _is_ordered(case: Case) -> bool:
    """Whether sums do not depend on the place of a number in a message."""
    return BACKENDS[case.backend].adds_in_order(case.world)


def _not_reloadable(case: Case) -> str:
    if case.steps < 2:
        return "one step has no middle"
    if not _is_ordered(case) and case.dtype != "float64":
        where = "a fresh instance may lay out its buckets in another way"
        return f"{case.backend} adds up in an order of its own, and {where}"
    if case.optimizer.scaler is not None:
        return "a loss scale is not a piece of local state"
    if "dropout_stateful" in case.workload.traits:
        return "dropout_stateful: a generator's state is not a piece of local state"
    return ""


def _shares(evidence: Figures) -> int:
    """Number of shares that the global batch was cut into."""
    shares = [record.steps[0].share for record in evidence.records]
    return 1 + max((share for share in shares if share is not None), default=0)


# ------------------------------------------------------------------------------------ measuring


def measure(evidence: Evidence) -> list[ComparisonRow]:
    """Compare the two runs, tensor by tensor and replica by replica, up to the first problem."""
    beside = evidence.beside.get("relation", Beside())
    other = beside.evidence
    if beside.problem:
        return [ComparisonRow(problem=beside.problem)]
    if other is None:
        return [ComparisonRow(skip=beside.skip or "there was no second run")]
    case = evidence.case
    relation = name_of(case.expect["relation"])
    by_order = relation in REORDERED or (relation == "same_as" and case.lane == "fp64")
    by_order |= relation == "reload" and not _is_ordered(case)
    compare = relative_frobenius(FP64_BOUND) if by_order else bitwise
    # AdamW divides by the root of the second moment: noise of a zero gradient becomes a full step.
    after = () if by_order and case.optimizer.name != "sgd" else AFTER[relation]
    moments = [("gradients_final", "gradients"), ("after_clip", "gradients")]
    moments += [("after_update", kind) for kind in after]
    alone = [run.declaration.trains_alone for run in (evidence, other)]
    if alone[0] != alone[1]:  # gradients and optimizer state are each rank's own in one of the two
        moments = [("after_update", "parameters")]
    differ = relation in ("same_as", "cut")
    pair = Pair(evidence, other, compare, differ, other.case.loss_scale)
    rows: list[ComparisonRow] = []
    if relation == "recompute" and (kept := _kept_as_well(evidence, other)):
        return [ComparisonRow(problem=kept)]
    for step in evidence.steps:
        if not evidence.has(step, "gradients_final"):
            text = f"step {step}: observe('gradients_final') was never called"
            return [*rows, ComparisonRow(problem=text)]
        for point, kind in moments:
            if evidence.has(step, point) and other.has(step, point):
                rows += pair.moment(step, point, kind)
        if any(row.problem for row in rows):
            break
        if step == other.case.reload_at:
            first = Tally.of(rows).failed
            if first and first.step == step:  # a reload explains nothing that came before it
                cause = causes.told(partial(of_reload, evidence, other, step))
                # After a failure that is told first, it says why.
                return [*rows, *([ComparisonRow(problem=cause)] if cause else [])]
    return rows


def _kept_as_well(evidence: Evidence, other: Evidence) -> str:
    """Where a recomputed forward keeps no fewer bytes than one without recomputation."""
    for record, without in zip(evidence.ranks.values(), other.ranks.values(), strict=True):
        # Bytes at the peak of the forward of every step, on all devices.
        here, there = Counter[int](), Counter[int]()
        for peaks, memory in ((here, record.memory), (there, without.memory)):
            for row in memory:
                if (row.moment, row.where, row.kind) == ("peak", "forward", "activations"):
                    peaks[row.step] += row.bytes
        # Equal is wrong, too: then recomputation saved nothing.
        for step in (step for step, most in there.items() if here[step] >= most):
            kept = f"{here[step]:,} bytes of activations, {there[step]:,} without recomputation"
            return f"rank {record.rank}, step {step}: a forward keeps {kept}"
    return ""


# ------------------------------------------------------------------------------------- deciding


def decide(figures: Figures) -> Outcome:
    """The first comparison beyond its bound fails; so does a second run that went wrong."""
    relation = name_of(figures.case.expect.get("relation"))
    rows = figures.compared.get("relations", [])
    for row in rows:
        if row.skip:
            return Outcome("relations", "skip", row.skip)
    tally = Tally.of(rows)
    tested = {"compared": tally.compared, "not_tested": sorted(tally.not_tested)}
    numbers = {"relation": relation, **tested}
    problem = tally.problem
    if tally.failed:
        cause = [problem] if problem and relation == "reload" else []
        problem = ": ".join([*cause, str(tally.failed)])
    if problem:
        message = f"{relation} does not hold: {problem}"
        return Outcome("relations", "fail", message, tally.worst, numbers)
    if not tally.compared:
        return Outcome("relations", "undecidable", "nothing could be compared", None, numbers)
    return Outcome("relations", "pass", "", tally.worst, numbers)

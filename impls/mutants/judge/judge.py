"""Faults planted in the judge, combined with a wrong system or a fault plan.

Doubled gradients a sound judge fails by ``equivalence``, which alone sees it: all replicas are
equal, and clipping is off.  A judge with one of these faults does not; it is killed if the case is
not green.  Where the suite makes a fault in a rank, the check ``faults`` holds the judge to the
rank and the sentence that the plan expects.

The leader of a case asks what the system declares: that is where its judge is spoilt.  No other
case sees it, since these leaders are not kept (``registry.changes_nothing``).  Only what measures
is spoilt: ``verify`` decides again from what was measured, with a sound judge, and must come to the
same verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from shardproof.case import Fault
from shardproof.cases import training
from shardproof.checks import CHECKS, equivalence, working_precision
from shardproof.contract import Capabilities
from shardproof.evidence.assembled import Assembled, Evidence
from shardproof.evidence.records import RankRecord
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import ADAMW
from shardproof.impls.reference.ddp import DDP, ReferenceDDP
from shardproof.impls.reference.parts.buckets import GradientBucket
from shardproof.launch import diagnosis

STEPS = 3

mutant = declare.family(ReferenceDDP, steps=STEPS)


class DoubledGradients(DDP):
    """In the last step every rank doubles its reduced gradients, so no loss shows it."""

    first_doubled: ClassVar[int] = STEPS - 1

    def wait_and_publish(self, bucket: GradientBucket) -> None:
        super().wait_and_publish(bucket)
        if self.step >= self.first_doubled:
            for view in bucket.views.values():
                view.mul_(2)


class AlwaysDoubledGradients(DoubledGradients):
    """Every rank doubles its reduced gradients in every step."""

    first_doubled = 0


class BeforeSpoiltJudge(ReferenceDDP):
    """A system whose judge :meth:`spoil_judge` makes faulty."""

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        cls.spoil_judge()
        return super().capabilities(options)

    @classmethod
    def spoil_judge(cls) -> None:
        """Plant the fault in the process that judges."""
        raise NotImplementedError


class Misjudged(BeforeSpoiltJudge):
    """Doubled gradients and a faulty judge."""

    handle_type = DoubledGradients


@mutant("judge_check_returns_nothing", says="nothing could be compared", killed_by=("undecidable",))
class CheckReturnsNothing(Misjudged):
    """The check measures nothing and reports no fault."""

    @classmethod
    def spoil_judge(cls) -> None:
        equivalence.measure = lambda evidence: []


@mutant("judge_lane_compares_nothing", says="nothing could be compared", killed_by=("undecidable",))
class LaneComparesNothing(Misjudged):
    """The lane fp64 compares only the initial parameters."""

    @classmethod
    def spoil_judge(cls) -> None:
        equivalence._against_oracle = lambda evidence, rows, buffers: None


@mutant(
    "judge_lane_compares_losses_only",
    says="passes, though .* was not compared",
    killed_by=("judge error",),
)
class LaneComparesLossesOnly(Misjudged):
    """The lane fp64 compares losses, but no gradient and no state."""

    @classmethod
    def spoil_judge(cls) -> None:
        equivalence._gradients = lambda *arguments: None
        equivalence._trajectory = lambda *arguments: None


@mutant(
    "judge_leaves_one_tensor_out",
    says="passes, though the norm|was not compared",
    killed_by=("judge error",),
)
class LeavesOneTensorOut(Misjudged):
    """Only the first tensor of each kind is compared, and with itself."""

    @classmethod
    def spoil_judge(cls) -> None:
        sound = equivalence._compare_all

        def compare(evidence: Any, state: Any, truth: Any, *rest: Any, **more: Any) -> None:
            first = next(iter(truth))
            alone = Assembled({first: state.tensors[first]}, state.owners)
            sound(evidence, alone, alone.first(), *rest, **more)

        equivalence._compare_all = compare


@mutant(
    "judge_compares_with_itself",
    says="passes, though the norm|was not compared",
    killed_by=("judge error",),
)
class ComparesWithItself(Misjudged):
    """Every tensor is compared with itself."""

    @classmethod
    def spoil_judge(cls) -> None:
        sound = equivalence._compare_all

        def compare(evidence: Any, state: Any, truth: Any, *rest: Any, **more: Any) -> None:
            sound(evidence, state, {n: t.clone() for n, t in state.first().items()}, *rest, **more)

        equivalence._compare_all = compare


@mutant(
    "judge_compares_with_itself_in_working_precision",
    says="passes, though the norm|was not compared",
    killed_by=("judge error",),
    lane="working_precision",
    dtype="float32",
    optimizer=ADAMW,
)
class ComparesWithItselfInWorkingPrecision(Misjudged):
    """In working precision every gradient is compared with itself."""

    handle_type = AlwaysDoubledGradients

    @classmethod
    def spoil_judge(cls) -> None:
        sound = working_precision.ratios

        def ratios(held: Any, single: Any, truth: Any, regions: Any = None) -> dict[str, float]:
            return sound({name: t.clone() for name, t in truth.items()}, single, truth, regions)

        working_precision.ratios = ratios


@mutant("judge_bound_is_infinite", says="passes, though the norm", killed_by=("judge error",))
class BoundIsInfinite(Misjudged):
    """The bound of the lane fp64 lets every error pass."""

    @classmethod
    def spoil_judge(cls) -> None:
        equivalence.FP64_BOUND = float("inf")


@mutant("judge_record_is_empty", says="no rank holds", killed_by=("equivalence",))
class RecordIsEmpty(Misjudged):
    """The ranks' records arrive without their observations."""

    @classmethod
    def spoil_judge(cls) -> None:
        sound = training.records_of

        def records_of(outcomes: Any, declaration: Any) -> list[RankRecord]:
            return [record.without_tensors() for record in sound(outcomes, declaration)]

        training.records_of = records_of


@mutant("judge_keeps_no_digests", says="form no whole tensor|digest", killed_by=("active",))
class KeepsNoDigests(Misjudged):
    """Comparisons use the system's own numbers, and no digest of them is kept."""

    @classmethod
    def spoil_judge(cls) -> None:
        ComparesWithItself.spoil_judge()
        Evidence.moments = lambda self: iter(())  # type: ignore[method-assign]


@mutant("judge_check_lost_its_entry", says="equivalence", killed_by=("judge error",))
class CheckLostItsEntry(Misjudged):
    """The check that compares with the oracle is missing from the list of checks."""

    @classmethod
    def spoil_judge(cls) -> None:
        CHECKS.pop("equivalence", None)


# ----------------------------------------------------------- who is to blame, and in which sentence


def planned(kind: Any, verdict: str, *says: str) -> Mapping[str, Any]:
    """A fault plan for the second of three ranks, which must be named."""
    blames = None if verdict == "fail" else 1
    fault = Fault(kind, 1, 1, "backward", (verdict,), blames=blames, says=says)
    return {"fault": fault, "mesh": {"replicate": 3}, "killed_by": ("faults",)}


@mutant(
    "judge_autopsy_names_wrong_rank",
    says="expected rank 1 as the cause, not rank 2: shape .* gives crash: desync",
    **planned("shape", "crash", "desync: call"),
)
class AutopsyNamesWrongRank(BeforeSpoiltJudge):
    """For calls that do not match, the rank after the one that differs is blamed."""

    @classmethod
    def spoil_judge(cls) -> None:
        sound = diagnosis.autopsy.find_mismatch

        def find_mismatch(standings: Any) -> Any:
            found = sound(standings)
            return found and replace(found, rank=((found.rank or 0) + 1) % len(standings))

        diagnosis.autopsy.find_mismatch = find_mismatch


@mutant(
    "judge_takes_consequence_for_cause",
    says="expected rank 1 as the cause, not rank 0: raise .* gives crash: rank 0 raised",
    **planned("raise", "crash", "rank 1 raised InjectedFault"),
)
class TakesConsequenceForCause(BeforeSpoiltJudge):
    """A rank that raises only because another one did is blamed for both errors."""

    @classmethod
    def spoil_judge(cls) -> None:
        sound = diagnosis.mark_consequences

        def mark_consequences(outcomes: Any) -> Any:
            return [replace(o, consequence=not o.consequence) for o in sound(outcomes)]

        diagnosis.mark_consequences = mark_consequences


@mutant(
    "judge_sees_no_flipped_bit",
    says="expected fail: corrupt .* gives undecidable",
    **planned("corrupt", "fail", "equivalence"),
)
class SeesNoFlippedBit(BeforeSpoiltJudge):
    """The check that must notice a flipped bit measures nothing."""

    @classmethod
    def spoil_judge(cls) -> None:
        CheckReturnsNothing.spoil_judge()

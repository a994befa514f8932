"""The strategy is in effect: each rank holds the shards that it implies.

Looks at the declared features against the strategy's profile, at parameter names after ``setup``,
at how many elements of parameters, gradients and optimizer state each rank holds (a shard that is
the whole is no shard; see :mod:`shardproof.costs`), at the dtypes of buffers and of outputs against
the policy of mixed precision, at the work of attention where ranks share positions, and, for data
parallelism, at the calls:
gradients travel in buckets (fewer than parameters, as many as the scenario expects with
``expect.buckets``), and accumulation stays silent until the last micro-batch.  Where the option
``recompute_every`` is given, every block's forward runs again in backward, or none does.  How many
gathers and reductions there are is counted by ``traffic``.  A silent fall-back to something simpler
is a ``fail``, however right its numbers.

*Cannot see* features that leave no trace in calls, names or capabilities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch

from shardproof import axes, strategies
from shardproof.checks import Needs, Outcome, first_problem, lacking
from shardproof.checks.overlap import REDUCTIONS
from shardproof.checks.traffic import axis_of, is_compressed, step_calls
from shardproof.costs import collectives
from shardproof.costs.families import HeldByRank
from shardproof.costs.layout import within
from shardproof.costs.model_facts import ITEMSIZE, ModelFacts
from shardproof.evidence.assembled import Figures
from shardproof.evidence.records import SHOWN_AT, RankRecord
from shardproof.ledgers.traffic import LoggedCall
from shardproof.table import some

NEEDS: Needs = ()

#: Names in one sentence.
_NAMED = 3


def decide(evidence: Figures) -> Outcome:
    """Compare what the strategy claims with what it left in calls, names and sizes."""
    looks = (_profile, _names, _sizes, _buffer_dtypes, _output_dtypes, _attention)
    if problem := next(filter(None, (look(evidence) for look in looks)), ""):
        return Outcome("active", "fail", problem)
    if unlogged := lacking(("calls",), evidence.case, evidence.declaration):
        return Outcome("active", "skip", unlogged)
    figures: dict[str, object] = {}
    problems = _silent_accumulation(evidence), _recomputation(evidence), _buckets(evidence, figures)
    for problem in filter(None, problems):
        return Outcome("active", "fail", problem, None, figures)
    if evidence.depth == "family" and evidence.family is None:
        return Outcome("active", "skip", no_family(evidence), None, figures)
    return Outcome("active", "pass", "", None, figures)


def _profile(evidence: Figures) -> str:
    """At depth ``layout`` the claimed strategy is known, and each of its features is declared, but
    for those that the case's options turn off.
    """
    if evidence.depth != "layout":
        return ""
    claimed = strategies.of(evidence.declaration.strategy)
    if not claimed.is_known:
        known = ", ".join(sorted(strategies.in_tree()))
        return f"unknown strategy {claimed.name!r}; known: {known}"
    missing = sorted(claimed.implied(evidence.case.options) - evidence.declaration.features)
    return f"claims {claimed.name!r} without declaring: {', '.join(missing)}" if missing else ""


def _names(evidence: Figures) -> str:
    """Every name that the workload has, and no other, is that of a whole tensor after ``setup``,
    where all ranks have shown their pieces.

    Ranks may hold one that makes no whole: copies that are not numbered are one tensor too often.
    """
    if lacking(("every rank",), evidence.case, evidence.declaration):
        return ""
    whole = {r.name for r in evidence.tensors if r.point == "initial" and r.kind == "parameters"}
    expected = set(evidence.workload.parameter_names)
    if whole == expected:
        return ""
    shown = [r.steps[0].shown().get("parameters", {}) for r in evidence.records if r.steps]
    held = {name for own in shown for name in own}
    if whole <= expected <= whole | held:
        lost = some(sorted(map(repr, expected - whole)), _NAMED)
        rule = "every element belongs to one rank, or to copies that Piece.replica numbers"
        return f"the pieces of {lost} form no whole tensor after setup: {rule}"
    changed = ", ".join(sorted(whole ^ expected)[:4])
    return f"setup changed the names of parameters: {changed}"


def no_family(evidence: Figures) -> str:
    """Why nothing is held to the strategy that is claimed."""
    strategy = evidence.declaration.strategy
    known = ", ".join(sorted(name for name, own in strategies.in_tree().items() if own.family))
    return f"{strategy!r} names no family of strategies; known: {known}"


def _sizes(evidence: Figures) -> str:
    """Every rank holds the elements of each name that the strategy promises, no more and no less.

    Sizes are those of the pieces that a rank showed in the last step; of the optimizer the largest
    slot counts.
    """
    strategy, facts = evidence.declaration.strategy, evidence.model_facts
    cost_model = evidence.cost_model()
    if evidence.case.changes_members or any(s.skipped for r in evidence.records for s in r.steps):
        return ""
    if evidence.family is not None and facts is not None:
        last_steps = {rank: record.steps[-1] for rank, record in evidence.ranks.items()}
        shown = {rank: HeldByRank(step.shown(), step.places) for rank, step in last_steps.items()}
        # Which parameters have gradients depends on the step.
        last = replace(facts, step=evidence.steps[-1])
        return evidence.family.problem(last, shown, evidence.declaration.balance)
    if cost_model is None:
        return ""
    unpromised = ("gradients", "optimizer") if cost_model.why_state_is_not_promised() else ()
    for record in evidence.records:
        local = cost_model.local(record.rank)
        for kind, point in SHOWN_AT.items():
            held = record.steps[-1].held.get(point, {}).get(kind)
            if held is None or kind in unpromised:
                continue
            wanted: Mapping[str, int] = getattr(local, kind)
            # No strategy promises which rank holds a piece without elements.
            own = {name: count for name, count in wanted.items() if count}
            odd = next((n for n in sorted({*own, *held}) if own.get(n, 0) != held.get(n, 0)), None)
            if odd is not None:
                found = f"{held.get(odd, 0):,} elements of the {kind} of {odd!r}"
                promise = f"{strategy} promises {own.get(odd, 0):,}"
                return f"rank {record.rank} holds {found}, {promise}"
    return ""


def _buffer_dtypes(evidence: Figures) -> str:
    """Floating-point buffers are held after the last update as the policy says, else as built.

    One that is re-bound may have come to be as wide as what it is computed from.
    """
    case = evidence.case
    wanted = case.precision.get("buffers", case.dtype)
    allowed = {wanted}
    if "rebound_buffer" in evidence.workload.traits:
        # In the dtype of a sum of the two.
        both = torch.promote_types(*(getattr(torch, d) for d in (wanted, case.compute_dtype)))
        allowed.add(str(both).removeprefix("torch."))
    for row in evidence.tensors:
        if row.kind != "buffers" or row.step != case.steps - 1:
            continue
        if row.dtype in ITEMSIZE and row.dtype not in allowed:
            held = f"ranks {row.owners} hold the buffer {row.name!r} in {row.dtype}"
            return f"{held}, precision.buffers asks for {wanted}"
    return ""


def _output_dtypes(evidence: Figures) -> str:
    """Losses are taken of outputs in the dtype that the policy names, if it names one."""
    wanted = evidence.case.precision.get("output")

    def wrong(record: RankRecord, step: int) -> str:
        odd = ", ".join(sorted(set(record.steps[step].outputs) - {wanted}))
        return f"outputs in {odd}, precision.output asks for {wanted}" if odd else ""

    return "" if wanted is None else first_problem(evidence, wrong)


def _attention(evidence: Figures) -> str:
    """Every rank computes the attention scores that its positions are due, and no others."""
    exchange = getattr(evidence.cost_model(), "exchange", None)
    if exchange is None or "packed" in evidence.workload.traits:
        return ""  # which scores documents hide depends on the data

    def wrong(record: RankRecord, step: int) -> str:
        own, now = record.steps[step], replace(exchange.facts, step=step)
        due, found = replace(exchange, facts=now).attended(record.rank), own.attended
        # A kernel that torch has no formula for counts nothing.
        if due is None or not found or due == found or not own.present:
            return ""
        told = f"expected {due:,} floating-point operations of attention, counted {found:,}"
        of = f"method {exchange.method!r} with cut {exchange.cut!r}"
        return f"{told}: its positions or masks are not those of {of}"

    return first_problem(evidence, wrong)


def _silent_accumulation(evidence: Figures) -> str:
    """No gradient reduction before the backward of the last micro-batch begins."""
    features = evidence.declaration.features
    if "accumulation_without_communication" not in features or evidence.case.world == 1:
        return ""

    compressed = is_compressed(evidence)

    def reduces(call: LoggedCall) -> bool:
        # Shards are gathered by such calls as well: those are not told apart.
        other = compressed and call.operation in ("all_gather", "all_to_all")
        by_other = other and not _along_shards(call, evidence)
        return call.operation in REDUCTIONS or by_other or _sums_by_sending(evidence, call)

    def wrong(record: RankRecord, step: int) -> str:
        events = record.events_of(step)
        #     forward, backward, forward, backward, forward, backward
        #     |----------- silent ----------------->|       the last begin of a whole forward
        starts = [n for n, kind, unit in events if (kind, unit) == ("forward", "")]
        reduced = [call for call in step_calls(record, step) if reduces(call)]
        early = sum(call.issued < starts[-1] for call in reduced) if len(starts) > 1 else 0
        text = "reductions before the last micro-batch: accumulation should not communicate"
        return f"{early} {text}" if early else ""

    return first_problem(evidence, wrong)


def _over_send_recv(evidence: Figures, operation: str = "all_reduce") -> bool:
    """Whether ``operation``, which sums gradients, is an algorithm over send and recv."""
    facts = evidence.model_facts
    return facts is not None and collectives.over_send_recv(facts, operation)


def _sums_by_sending(evidence: Figures, call: LoggedCall) -> bool:
    """Whether ``call`` is part of an algorithm over send and recv that sums gradients.

    Along shards it may be a part of gathering parameters; that is not told apart.
    """
    gathers = _over_send_recv(evidence, "all_gather") and _along_shards(call, evidence)
    return call.operation == "send" and _over_send_recv(evidence) and not gathers


def _along_shards(call: LoggedCall, evidence: Figures) -> bool:
    """Whether ranks of the group of ``call`` hold different shards."""
    mesh = evidence.case.mesh
    return not {*axes.sharded(mesh)}.isdisjoint(axis_of(call.group, mesh).split("+"))


def _recomputation(evidence: Figures) -> str:
    """Backward repeats every block's forward exactly once, or repeats none."""
    facts = evidence.model_facts
    every = facts.options.get("recompute_every") if facts else None
    if facts is None or every is None:
        return ""

    def wrong(record: RankRecord, step: int) -> str:
        begun, now = Counter(e[1:] for e in record.events_of(step)), replace(facts, step=step)
        for unit in facts.units:
            wanted = begun["forward", unit] if every else 0
            again = begun["recompute", unit]
            if again == 0 and (_asks_for_no_backward(facts, unit) or not now.is_reached(unit)):
                continue
            if again != wanted:
                asked = f"expected {wanted} (recompute_every: {every})"
                return f"{unit!r} is recomputed {again} times in backward, {asked}"
        return ""

    return first_problem(evidence, wrong)


def _asks_for_no_backward(facts: ModelFacts, unit: str) -> bool:
    """Whether nothing is trained up to the end of ``unit``: backward never comes to it."""
    trained = [tensor.trainable for tensor in facts.parameters]
    inside = [n for n, t in enumerate(facts.parameters) if any(within(o, unit) for o in t.owners)]
    return bool(inside) and not any(trained[: inside[-1] + 1])


def _buckets(evidence: Figures, figures: dict[str, object]) -> str:
    """A bucketed strategy reduces several buckets, fewer than there are parameters."""
    if evidence.depth != "layout" or evidence.case.world == 1:
        return ""
    if not strategies.of(evidence.declaration.strategy).in_buckets:
        return ""
    if _over_send_recv(evidence) or is_compressed(evidence):
        return ""  # calls of several buckets are alike; ``traffic`` bounds their number
    calls = (step_calls(record, evidence.steps[-1]) for record in evidence.records)
    counts = [sum(call.operation in REDUCTIONS for call in own) for own in calls]
    parameters = len(evidence.workload.trainable_names)
    figures.update(buckets=max(counts), parameters=parameters)
    if len(set(counts)) > 1:
        return f"ranks reduce different numbers of buckets: {counts}"
    least = int(evidence.case.expect.get("buckets", 1))
    if counts[0] < least:
        return f"{counts[0]} bucket(s) per step, the scenario expects at least {least}"
    # Buckets hold several tensors each: one call a tensor is no bucketing, however it is named.
    if counts[0] >= parameters:
        return f"{counts[0]} reductions for {parameters} parameters: gradients are not bucketed"
    return ""

"""The numbers equal the single-process oracle's: loss, gradients, parameters, optimizer, buffers.

Lanes: *bitwise* demands equal bits where the policy promises them (a world of 1; 2 ranks; for an
implementation that claims ``bitwise`` any world on a backend that folds in rank order, and any
pipeline alone; never where stages share a parameter), and elsewhere the bound of its dtype (see
:func:`judged_lane`); *dyadic*
demands them everywhere, since no sum is ever rounded there (a case over the exactness budget
is a ``precondition``); *fp64* demands a relative Frobenius error of at most 1e-12 per tensor;
*working_precision* allows a multiple of one device's error (``working_precision.py``).
Under AdamW parameters are never compared across trajectories: the update is replayed from the
implementation's own state (at most 4 ULP).
Data coordinates that train alone are compared with a trajectory each, meetings included.
A stale system is compared with a replay of its history, and its staleness with ``max_staleness``.
Further state is what its rule makes of the system's own state (``extra_state.py``, at most 4 ULP).
Slices whose true gradient is zero are compared absolutely.  Every comparison must fail on spoilt
copies of the truth; where it cannot, the tensor counts as not tested.

*Cannot see* memory, traffic or order; nor, under AdamW alone, what a one-step replay hides; nor, in
working precision, how a divisor or a loss scale was rounded (``working_precision.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from shardproof import axes
from shardproof.backends import BACKENDS
from shardproof.case import Lane
from shardproof.checks import (
    Needs,
    Outcome,
    between_steps,
    causes,
    extra_state,
    numbers,
    working_precision,
)
from shardproof.checks.causes.buffers import of_buffers
from shardproof.checks.causes.fits import some
from shardproof.checks.causes.gradients import beside_loss, of_clipping, of_gradients
from shardproof.checks.causes.routing import of_choices, of_experts
from shardproof.checks.causes.scalars import of_loss
from shardproof.checks.causes.state import initial as initial_state
from shardproof.checks.causes.state import of_buffers_at_start, of_start
from shardproof.checks.causes.terms import of_terms
from shardproof.checks.causes.updates import of_update
from shardproof.checks.numbers import FP64_BOUND, Compare, Comparison, Differs, Lacking, Moment
from shardproof.checks.one_update import (
    MASTER,
    buffers_after,
    clips_unseen,
    made_of,
    update_of,
)
from shardproof.contract import is_outer
from shardproof.costs.expression import FormulaError, evaluate
from shardproof.costs.stages import DESCENDING, schedule_name, stages_of
from shardproof.evidence.assembled import Assembled, Evidence, Figures
from shardproof.evidence.records import ComparisonRow
from shardproof.workloads import for_case

NEEDS: Needs = ("values", "every rank")

#: Bound of the loss: a sum of a few hundred terms, added in another order.
LOSS_BOUNDS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.05, "float16": 0.01}


#: Units of a comparison in working precision, and how a slice whose gradient is 0 is called.
_TIMES_ONE, _OF_NOISE = "times one device's", "times its noise"
_FINAL = "gradients_final"
_ZERO_SLICE, _IS_ZERO = " (zero slice)", "true gradient is zero, but"


#: What was compared so far; the first moment with a failure ends the check.
Rows = list[ComparisonRow]


@contextmanager
def _told(cause: Callable[[], str]) -> Iterator[None]:
    """Put what ``cause`` says in front of a failure."""
    try:
        yield
    # A subclass of Differs, so it comes first: without tensors there is no cause to look for.
    except Lacking:
        raise
    except Differs as failure:
        raise Differs(causes.before(cause, failure), failure.ranks) from None


def measure(evidence: Evidence) -> list[ComparisonRow]:
    """Compare everything observed with the oracle, up to the first moment with a failure."""
    if _precondition(evidence):
        return []
    rows: Rows = _beside_loss(evidence)
    try:
        # After ``setup`` every replica holds the initial parameters, bit for bit.
        state, initial = evidence.initial("parameters"), evidence.truth.initial
        # First of all: with other initial values everything that follows differs, too.
        with _told(partial(of_start, evidence, state, initial)):
            _compare_all(evidence, state, initial, numbers.bitwise, rows, -1, "initial parameters")
        _initial_buffers(evidence, rows)
        extra_state.measure(evidence, -1, rows)
        if evidence.declaration.oracle == "replay":
            _replayed(evidence, rows)
        else:
            compare_steps(evidence, rows)
        rows += between_steps.measure(evidence, LOSS_BOUNDS[evidence.case.lowest_dtype])
    except Differs as failure:
        rows.append(ComparisonRow(problem=str(failure)))
    return rows


def _beside_loss(evidence: Evidence) -> Rows:
    """Of a user's own model, which both runs share: whether its gradient is one of its loss."""
    case, name = evidence.case, evidence.workload.beside_loss
    if not name or sum(case.workload.micro_batch_counts(case.data_coordinates)) < 2:
        return []
    what = f"the model's gradient depends on how the batch is cut, but the loss does not: {name!r}"
    text = (
        f"{what}: the gradient of the whole first batch differs from the sum over its two halves. "
        "The forward adds a term once per micro-batch that is not part of the loss: declare it as "
        "a LossTerm (docs/contract.md, Loss terms)"
    )
    return [ComparisonRow(problem=text)]


def _initial_buffers(evidence: Evidence, rows: Rows) -> None:
    """After ``setup`` every rank holds the initial buffers, where anything is promised of them."""
    if evidence.declaration.buffers == "none":
        return
    state, given = evidence.initial("buffers"), for_case(evidence.case).state()
    moment = Moment(rows, -1, "initial buffers", "differs from the value given")
    for rank, piece, want in initial_state(evidence, "buffers", given):
        moment.note(numbers.bitwise(piece.tensor, want), piece.name, f"rank {rank}", [rank])
    start = partial(of_start, evidence, state, given, "buffers")
    with _told(lambda: start() or of_buffers_at_start(evidence)):
        moment.end(evidence.case.world)


def compare_steps(evidence: Evidence, rows: list[ComparisonRow], buffers: bool = True) -> None:
    """Add rows of the steps of ``evidence``, which may start from a checkpoint.

    Then its ``buffers`` may have begun under another rule, or in another world.

    :raises Differs: of the first moment with a failure.
    """
    if judged_lane(evidence) == "working_precision":
        _working_precision(evidence, rows)
    else:
        _against_oracle(evidence, rows, buffers)


def decide(figures: Figures) -> Outcome:
    """The first comparison beyond its bound fails; so does a problem that ended the comparing."""
    if lacking := _precondition(figures):
        budget = {"budget": figures.oracle.budget} if over_budget(figures) else {}
        return Outcome("equivalence", "precondition", lacking, None, budget)
    tally, lane = numbers.Tally.of(figures.compared.get("equivalence", [])), judged_lane(figures)
    found: dict[str, object] = {"compared": tally.compared, "not_tested": sorted(tally.not_tested)}
    if lane != figures.case.lane:
        found["judged_in"] = lane
    if narrow := _narrower(figures):
        found["not_judged"] = {"further_state": f"digits beyond {narrow}, in which it is held"}
    if lane == "working_precision":
        found["factor"] = working_precision.factor(figures)
        found["undecidable"] = sorted(n for n in tally.not_tested if n.startswith(_FINAL))
        found["not_tested"] = sorted(n for n in tally.not_tested if not n.startswith(_FINAL))
    replayed = {name: getattr(figures.oracle, name) for name in ("updates", "stale", "behind")}
    found |= {name: value for name, value in replayed.items() if value is not None}
    replay = figures.declaration.oracle == "replay"
    expected = {-1, figures.steps[-1]} if replay else {-1, *figures.steps}
    missing = sorted(expected - tally.steps)
    if missing and not tally.wrong:
        message = f"nothing could be compared at steps {missing}"
        return Outcome("equivalence", "undecidable", message, tally.worst, found)
    unseen = [row.skip for row in figures.compared.get("equivalence", []) if row.skip]
    if unseen and not tally.wrong:
        return Outcome("equivalence", "undecidable", "; ".join(unseen), tally.worst, found)
    return tally.outcome("equivalence", found)


def _narrower(figures: Figures) -> str:
    """In which dtypes further state is held that have fewer digits than the model's."""
    held = {r.dtype for r in figures.tensors if r.kind == "extra" and r.dtype in LOSS_BOUNDS}
    unit = working_precision.round_off
    return " and ".join(sorted(d for d in held if unit(d) > unit(figures.case.dtype)))


def judged_lane(figures: Figures) -> Lane:
    """The lane whose bounds hold: where equal bits are not promised, that of the case's dtype."""
    case = figures.case
    if case.lane != "bitwise" or promises_bits(figures):
        return case.lane
    return "fp64" if case.lowest_dtype == "float64" else "working_precision"


def _precondition(figures: Figures) -> str:
    """Why nothing can be compared (``""``: it can)."""
    return over_budget(figures) or _nothing_wider(figures) or figures.oracle.diverges()


def _nothing_wider(figures: Figures) -> str:
    """Why errors have no reference: the model has no dtype with smaller errors."""
    widest = figures.workload.widest
    if judged_lane(figures) != "working_precision" or widest != figures.case.lowest_dtype:
        return ""
    what = f"{figures.case.workload.name} has no version in a wider dtype than {widest}"
    return f"{what}, so its errors have no reference; use lane bitwise"


def over_budget(figures: Figures) -> str:
    """Why sums may have been rounded in the dyadic lane (``""``: none was)."""
    case, budget = figures.case, figures.oracle.budget
    if case.lane != "dyadic" or budget is None:
        return ""
    return budget.problem(case.dtype, case.world) or ""


def _against_oracle(evidence: Evidence, rows: Rows, buffers: bool) -> None:
    """Every step's loss, gradients, update and buffers."""
    compare = _compare(evidence)
    replays = not exact(evidence) and evidence.case.optimizer.name == "adamw"
    for step in evidence.steps:
        try:
            _loss(evidence, step, rows)
            for own in evidence.trajectories:
                _gradients(own, step, compare, rows)
            # After all gradients: a cause of a wrong update supposes right gradients.
            for own in evidence.trajectories:
                if replays:
                    _replay(own, step, rows)
                else:
                    _trajectory(own, step, compare, rows)
                extra_state.measure(own, step, rows)
            if buffers:
                _buffers(evidence, step, compare, rows, replays)
        except Differs as failure:
            cause = partial(causes.of_members, evidence, step, failure.ranks)
            raise type(failure)(causes.before(cause, failure), failure.ranks) from None


def _compare(evidence: Evidence) -> Compare:
    """How the lane compares a trajectory with the oracle's."""
    return numbers.bitwise if exact(evidence) else numbers.relative_frobenius(FP64_BOUND)


def _replayed(evidence: Evidence, rows: Rows) -> None:
    """The reported history of updates leads to the final state of the system."""
    if evidence.oracle.problem:
        raise Differs(f"the reported updates are impossible: {evidence.oracle.problem}")
    bound, behind = evidence.declaration.max_staleness, evidence.oracle.behind
    if bound is not None and behind is not None and behind > bound:
        raise Differs(f"a gradient was {behind} steps old, but max_staleness allows {bound}")
    several = len({event.worker for r in evidence.records for event in r.history}) > 1
    several = several and not evidence.case.options.get("dies")  # after whom one may be left
    if bound and not behind and several and len(evidence.steps) > 1:
        raise Differs(f"no gradient was ever stale, though max_staleness = {bound} allows it")
    state, final, last = evidence.final("parameters"), evidence.truth.final, evidence.steps[-1]
    _compare_all(evidence, state, final, _compare(evidence), rows, last, "drained parameters")


def _working_precision(evidence: Evidence, rows: Rows) -> None:
    """Every step against fp64, by the error of one device; the update by a replay."""
    case, regions = evidence.case, evidence.workload.zero_gradient
    bound, unit = working_precision.factor(evidence), working_precision.round_off(case.lowest_dtype)
    truths, singles, given = working_precision.teachers(evidence)
    failure = f"further from fp64 than {case.lowest_dtype} explains"
    for step in evidence.steps:
        truth, single = truths[step], singles[step]
        shares = _loss_shares(evidence, step, LOSS_BOUNDS[case.lowest_dtype])
        moment, total = Moment(rows, step, "forward", failure), sum(shares.values())
        count = sum(case.workload.micro_batch_counts(case.data_coordinates))
        error = working_precision.loss_ratio(total, single.loss, truth.loss, unit, count)
        moment.note(Comparison(error, bound), "loss", "all ranks", unit=_TIMES_ONE)
        _end_of_loss(evidence, step, shares, moment)
        for point, kind in ((_FINAL, "gradients"), ("after_clip", "clipped")):
            wanted, alone = getattr(truth, kind), getattr(single, kind)
            if wanted is None or evidence.oracle.steps[step].skipped:
                continue
            if point == "after_clip" and clips_unseen(evidence, step):
                continue
            state = evidence.observed(step, point, "gradients")
            _check_names(state, wanted, step, point, evidence.workload.frozen)
            held, moment = state.first(), Moment(rows, step, point, failure)
            ratios = working_precision.ratios(held, alone, wanted, regions)
            noise = working_precision.noise(held, wanted, regions, unit)
            if point == _FINAL:
                least = working_precision.scales(alone, wanted, regions)
                allowed = {group: bound * error for group, error in least.items()}
                for name in working_precision.hides(wanted, given.at.pop(step), allowed, regions):
                    rows.append(ComparisonRow(step, point, name, tested=False))
            if working_precision.is_unrounded(case, ratios):
                text = f"no gradient shows the rounding of {case.compute_dtype}"
                moment.problem("gradients", (), f"{text}, which 'precision' asks for")
            for errors, limit, of in ((ratios, bound, _TIMES_ONE), (noise, 1.0, _OF_NOISE)):
                for name, error in errors.items():
                    ranks, result = state.owners.get(name, []), Comparison(error, limit)
                    moment.note(result, name, _owner(state, name), ranks, unit=of)
            cause = of_clipping if point == "after_clip" else of_gradients
            with _told(partial(cause, evidence, step, state)):
                moment.end(case.world)
            if point == "after_clip" and case.lowest_dtype in numbers.NARROW:
                _factor(evidence, step, moment)
        _replay(evidence, step, rows)
        extra_state.measure(evidence, step, rows)


def _factor(evidence: Evidence, step: int, moment: Moment) -> None:
    """The factor of clipping on every rank, which the errors of gradients would hide."""
    for rank, problem in working_precision.wrong_factors(evidence, step):
        moment.problem("the factor of clipping", (rank,), f"rank {rank}: {problem}")
    moment.end(evidence.case.world)


def exact(evidence: Figures) -> bool:
    """Whether this lane compares bit for bit."""
    return judged_lane(evidence) in ("bitwise", "dyadic")


def promises_bits(evidence: Figures) -> bool:
    """Whether the policy promises equal bits between this case and the oracle."""
    case, exactness = evidence.case, evidence.declaration.exactness
    backend = BACKENDS[case.backend]
    # A GPU's kernels add up in an order of their own.
    if not backend.adds_like_one(1) or not stages_add_in_order(evidence):
        return False
    if case.world == 1:
        return True
    if case.optimizer.clip_norm is not None or exactness not in ("bitwise", "reordered-sum"):
        return False
    if axes.size(case.mesh, axes.combining(case.mesh)) > 1:
        return False  # a product that is split by rows adds its terms in another order
    if not _adds_up_first(evidence):
        return False  # (a + c) + (b + d), where one process adds (a + b) + (c + d)
    adding = case.world // axes.parts(case.mesh, "layers")  # stages add nothing up between them
    # Two terms have one sum in either order; of three the order decides the last bit.
    if adding == case.world == 2 or (adding == 1 and exactness == "bitwise"):
        return True
    return exactness == "bitwise" and backend.adds_in_rank_order


def stages_add_in_order(evidence: Figures) -> bool:
    """Whether the stages of a pipeline, if there are any, add gradients up as one process does."""
    name, facts = schedule_name(evidence.case.options), evidence.model_facts
    own = [schedule.ascends for schedule in evidence.schedules.values()] if name is None else []
    if name in DESCENDING or not all(own):
        return False  # an order that takes micro-batches otherwise than ascending
    if facts is None or axes.cutting("layers") not in facts.axes:
        return True
    # Each stage would add up its own part of a parameter that several share; one rank may have
    # several of them: (a + c) + (b + d), not (a + b) + (c + d).
    stages = stages_of(facts)
    return all(len(stages.homes(t)) <= 1 for t in facts.trainable if len(t.units) > 1)


def _adds_up_first(evidence: Figures) -> bool:
    """Whether a rank adds up its micro-batches before it reduces; of ours every one does, or folds.

    A system of somebody else's promises it by the feature, or by claiming equal bits.
    """
    case, declared = evidence.case, evidence.declaration
    counts = case.workload.micro_batch_counts(case.data_coordinates)
    claims = "accumulation_without_communication" in declared.features
    own = declared.depth != "family" or declared.exactness == "bitwise"
    return own or claims or max(counts, default=1) == 1


def _check_names(
    state: Assembled,
    expected: Mapping[str, object],
    step: int,
    phase: str,
    frozen: Collection[str] = (),
) -> None:
    if state.problems:
        raise Lacking(f"step {step}, {phase}: " + "; ".join(state.problems[:3]))
    missing = [name for name in expected if name not in state.tensors]
    extra = [name for name in state.tensors if name not in expected]
    if thawed := [name for name in extra if name in frozen]:
        raise Lacking(f"step {step}, {phase}: frozen parameters have gradients: {some(thawed)}")
    texts = [f"no rank holds {some(missing)}"] if missing else []
    texts += [f"{some(extra)}, which the oracle does not have"] if extra else []
    if texts:
        raise Lacking(f"step {step}, {phase}: {', but there is '.join(texts)}")


def _must_be_observed(evidence: Evidence, step: int, point: str) -> None:
    if not evidence.has(step, point):
        raise Differs(f"step {step}: observe({point!r}) was never called")


def _owner(state: Assembled, name: str) -> str:
    ranks = state.owners.get(name, [])
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"


def _copies(state: Assembled, name: str) -> Iterator[tuple[Tensor, list[int], str]]:
    """Every copy of a tensor, the ranks that hold it, and whose it is, in words."""
    for replica, actual in state.tensors[name].items():
        owner = _owner(state, name) + (f", replica {replica}" if replica else "")
        yield actual, state.holders.get((name, replica), []), owner


def _compare_all(
    evidence: Evidence,
    state: Assembled,
    truth: Mapping[str, Tensor],
    compare: Compare,
    rows: Rows,
    step: int,
    phase: str,
    zeros: bool = False,
) -> None:
    """Every replica of every tensor against ``truth``; power-tested; zero slices by their floor."""
    _check_names(state, truth, step, phase, evidence.workload.frozen)
    regions = evidence.workload.zero_gradient if zeros else {}
    floor = 0.0
    # Under mixed precision a rank may hold parameters as it computes with them, beside masters.
    rounded = {getattr(torch, evidence.case.compute_dtype)} if phase.endswith("parameters") else ()
    if zeros and not exact(evidence):
        unit = working_precision.round_off(evidence.case.dtype)
        floor = numbers.ZERO_FLOOR * unit * numbers.root_mean_square(list(truth.values()))
    silent_parts: dict[str, list[numbers.Region]] = {}
    for name, expected in truth.items():
        # A slot ``<parameter>.<slot>`` has the regions of its parameter.  Such a region is noise
        # only if it is small: momentum with weight decay, for one, is not.
        declared = regions.get(name) or regions.get(name.rpartition(".")[0]) or ()
        noisy = ((r, numbers.take(expected, r)) for r in declared if floor)
        silent_parts[name] = [r for r, part in noisy if numbers.root_mean_square([part]) <= floor]
    wants = {n: numbers.split_zero(truth[n], parts)[0] for n, parts in silent_parts.items()}
    for name, want in wants.items():
        for actual in state.tensors[name].values():
            wants[name] = want.to(actual.dtype) if actual.dtype in rounded else want
    passing = numbers.powerless(wants, evidence.case.world, compare.parts)
    moment = Moment(rows, step, phase, "differs from the oracle")
    for name, expected in truth.items():
        parts, want = silent_parts[name], wants[name]
        known: dict[int, Comparison] = {}  # equal copies are one object: compared once
        for actual, ranks, owner in _copies(state, name):
            if actual.dtype in rounded:
                expected = expected.to(actual.dtype)
            if actual.shape != expected.shape or actual.dtype != expected.dtype:
                held, want_of = (f"{t.dtype} {tuple(t.shape)}" for t in (actual, expected))
                moment.problem(name, ranks, f"{name!r} is {held}, expected {want_of}")
                continue
            have, silent = numbers.split_zero(actual, parts)
            result = known.get(id(actual))
            if result is None and zeros and not exact(evidence) and not bool(expected.any()):
                result = Comparison(numbers.root_mean_square([actual]), floor)
            known[id(actual)] = result = result or compare(have, want)
            moment.note(result, name, owner, ranks)
            for part in silent:
                result, why = Comparison(numbers.root_mean_square([part]), floor), _IS_ZERO
                moment.note(result, name, owner, ranks, part=_ZERO_SLICE, failure=why)
        if passing[name]:
            rows.append(ComparisonRow(step, phase, name, tested=False))
    moment.end(evidence.case.world)


def _loss(evidence: Evidence, step: int, rows: Rows) -> None:
    truth = evidence.oracle.steps[step].loss
    bound = LOSS_BOUNDS[evidence.case.lowest_dtype]
    shares = _loss_shares(evidence, step, bound)
    total = sum(shares.values())
    # A hinge loss can be exactly zero; then so must be the sum of shares.
    error = abs(total - truth) / (abs(truth) or 1.0)
    moment = Moment(rows, step, "forward", f"summed loss {total!r} against {truth!r}")
    moment.note(Comparison(error, bound), "loss", "all ranks")
    _end_of_loss(evidence, step, shares, moment)


def _end_of_loss(
    evidence: Evidence, step: int, shares: Mapping[int | None, float], moment: Moment
) -> None:
    """End ``moment``; a wrong loss must not hide what is wrong with gradients by itself."""
    try:
        moment.end(evidence.case.world)
    except Lacking:
        raise
    except Differs as failure:
        loss = causes.told(partial(of_terms, evidence, step, sum(shares.values())))
        loss = loss or causes.told(partial(of_choices, evidence, step))
        loss = loss or causes.told(partial(of_loss, evidence, step, shares))
        loss = loss or causes.told(partial(of_experts, evidence, step))
        times = sum(shares.values()) / (evidence.oracle.steps[step].loss or math.inf)
        beside = causes.told(partial(beside_loss, evidence, step, loss, times))
        told = causes.before(lambda: loss, failure)
        raise Differs(f"{told}; of the gradients: {beside}" if beside else told) from None


def _loss_factor(evidence: Evidence) -> float:
    """How many times the true loss the system tells, as it declares."""
    declared = evidence.declaration.loss_factor
    try:
        # A formula, because what a system divides its loss by depends on the case.
        factor = float(evaluate(declared, evidence.facts))
    except (FormulaError, OverflowError) as error:
        raise Differs(f"loss_factor: {error}") from None
    if factor <= 0:
        raise Differs(f"loss_factor {declared!r} is {factor:g} in this case, but must be above 0")
    return factor


def _loss_shares(evidence: Evidence, step: int, bound: float) -> dict[int | None, float]:
    """The loss of every data coordinate; ranks that know it agree (relative to the oracle's)."""
    truth = evidence.oracle.steps[step].loss
    factor = _loss_factor(evidence)
    told_by: dict[int, tuple[int | None, float]] = {}
    given = [record.steps[step].share for record in evidence.records]
    wanted = {share for share in given if share is not None}
    for record in evidence.records:
        rank, coordinate, loss = record.rank, record.steps[step].share, record.steps[step].loss
        if loss is None:
            continue
        loss /= factor
        if not math.isfinite(loss):
            of_start = causes.told(partial(of_buffers_at_start, evidence)) if not step else ""
            told = f"step {step}: the loss of rank {rank} is {loss}"
            raise Differs(": ".join(filter(None, (of_start, told))))
        told_by[rank] = coordinate, loss
    try:
        shares = evidence.whole_losses(told_by, bound, truth)
    except ValueError as error:
        raise Differs(f"step {step}: {error}") from None
    if missing := sorted(wanted - set(shares)):
        raise Differs(f"step {step}: no rank reported a loss for data coordinates {missing}")
    return shares


def _gradients(evidence: Evidence, step: int, compare: Compare, rows: Rows) -> None:
    truth = evidence.truth.steps[step]
    if truth.skipped:
        return  # an overflow: what is not finite has no size
    points = {"gradients_final": truth.gradients, "after_clip": truth.clipped}
    for point, expected in points.items():
        if expected is None or (point == "after_clip" and clips_unseen(evidence, step)):
            continue
        _must_be_observed(evidence, step, point)
        state = evidence.observed(step, point, "gradients")
        cause = of_clipping if point == "after_clip" else of_gradients
        with _told(partial(cause, evidence, step, state)):
            _compare_all(evidence, state, expected, compare, rows, step, point, zeros=True)


def _trajectory(evidence: Evidence, step: int, compare: Compare, rows: Rows) -> None:
    """Parameters and optimizer state against the oracle's own trajectory."""
    truth = evidence.truth.steps[step]
    _must_be_observed(evidence, step, "after_update")
    expected = {
        "parameters": truth.parameters,
        "optimizer": {**truth.optimizer, **_masters(evidence, step, truth.parameters)},
    }
    for kind, zeros in (("parameters", False), ("optimizer", True)):
        state = evidence.observed(step, "after_update", kind)
        phase = f"after_update {kind}"
        with _told(partial(of_update, evidence, step, truth.parameters)):
            _compare_all(evidence, state, expected[kind], compare, rows, step, phase, zeros)


def _masters(evidence: Evidence, step: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The slots ``<parameter>.master`` that must be right: one for each of ``values`` held rounded,
    and each further one shown (a shard that the optimizer updates next to whole parameters).
    """
    held = evidence.observed(step, "after_update", "parameters").first()
    shown = evidence.observed(step, "after_update", "optimizer").tensors
    built = getattr(torch, evidence.case.dtype)
    return {
        f"{name}.{MASTER}": values[name]
        for name in evidence.workload.trainable_names
        if name in held and (held[name].dtype != built or f"{name}.{MASTER}" in shown)
    }


def _replay(evidence: Evidence, step: int, rows: Rows) -> None:
    """One optimizer step on one device from the implementation's own state and gradients."""
    truth = evidence.truth.steps[step]
    _must_be_observed(evidence, step, "after_update")
    after = evidence.observed(step, "after_update", "parameters")
    slots = evidence.observed(step, "after_update", "optimizer")
    _check_names(after, truth.parameters, step, "after_update parameters")
    masters = _masters(evidence, step, truth.parameters)
    _check_names(slots, {**truth.optimizer, **masters}, step, "after_update optimizer")
    update = update_of(evidence, step)
    before, made = update.before, made_of(evidence, step)
    # A parameter with a master is exactly its rounding, a frozen one what it was.
    #     gradient --+
    #     state -----+--> one step on one device --> master --rounded--> parameter
    #     master ----+
    exact_values = {name: value for name, value in before.items() if name not in update.trainable}
    held_as = {name: name.removesuffix(f".{MASTER}") for name in masters}
    exact_values |= {held_as[name]: slots.first()[name] for name in masters}
    held = made.parameters | {n: t.to(after.first()[n].dtype) for n, t in exact_values.items()}
    expected_slots = made.slots | {n: made.parameters[own] for n, own in held_as.items()}
    earlier = made.terms | {f"{name}.{MASTER}": tensor for name, tensor in before.items()}
    # Where ranks meet there are the last places of the updates, and those of a sum of them.
    on_gpu = BACKENDS[evidence.case.backend].device != "cpu"
    once = partial(numbers.replay_ulps, evidence.case.optimizer.name, on_gpu=on_gpu)
    passes = partial(numbers.parts_within_ulps, ulps=once(False))
    with _told(partial(of_update, evidence, step, held)):
        for state, wanted, reference, phase in (
            (after, held, {**before, **made.terms}, "replayed update of parameters"),
            (slots, expected_slots, earlier, "replayed update of optimizer"),
        ):
            _check_names(state, wanted, step, phase)
            passing = numbers.powerless(wanted, evidence.case.world, passes)
            moment = Moment(rows, step, phase, "differs from a one-step replay")
            for name, value in wanted.items():
                like = reference.get(name, value).to(value.dtype)
                is_slot = state is slots and not name.endswith(f".{MASTER}") and not is_outer(name)
                met = 2 if truth.met and (state is after or is_outer(name)) else 1
                ulps = 0 if name in exact_values else met * once(is_slot)
                compare = partial(numbers.within_ulps, reference=like, ulps=ulps)
                if passing[name]:
                    rows.append(ComparisonRow(step, phase, name, tested=False))
                known: dict[int, Comparison] = {}
                for actual, ranks, owner in _copies(state, name):
                    known[id(actual)] = result = known.get(id(actual)) or compare(actual, value)
                    moment.note(result, name, owner, ranks, unit="ULP")
            moment.end(evidence.case.world)


def _buffers(evidence: Evidence, step: int, compare: Compare, rows: Rows, replays: bool) -> None:
    """Buffers of every data coordinate against the declared rule; ``none``: nothing is promised.

    Where axes that are no data axes multiply the copies, those of one coordinate follow each other.
    With ``replays`` one beyond the bound is compared with a replay of the step, but for the first.
    """
    truth = evidence.truth.steps[step].buffers
    if not truth or not truth[0] or evidence.declaration.buffers == "none":
        return
    state = evidence.observed(step, "after_update", "buffers")
    _check_names(state, truth[0], step, "buffers")
    moved = evidence.case.changes_members  # then copies may be numbered by rank
    shares = {rank: r.steps[step].share or 0 for rank, r in evidence.ranks.items() if moved}
    moment = Moment(rows, step, "buffers", "buffer differs from the rule's")
    wrong: tuple[str, int, Tensor] | None = None
    for name, copies in state.tensors.items():
        #     2 data coordinates, 4 copies     coordinate 0: copies 0 1     coordinate 1: copies 2 3
        each = max(1, len(copies) // len(truth))
        for replica, actual in copies.items():
            ranks = state.holders.get((name, replica), [])
            coordinate = min(replica // each, len(truth) - 1)
            coordinate = shares.get(ranks[0], coordinate) if ranks else coordinate
            expected = truth[coordinate][name]
            how = compare if expected.is_floating_point() else numbers.bitwise
            result = how(actual, expected)
            if replays and how is compare and step > evidence.steps[0] and not result.ok:
                made = buffers_after(evidence, step, replica, coordinate)
                result = how(actual, made[name]) if name in made else result
            wrong = wrong if wrong or result.ok else (name, coordinate, actual)
            moment.note(result, name, f"data coordinate {coordinate}", ranks)
    with _told(lambda: of_buffers(evidence, step, *wrong) if wrong else ""):
        moment.end(evidence.case.world)

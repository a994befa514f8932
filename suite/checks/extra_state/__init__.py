"""Further state is what its declared rule makes of training (``Capabilities.follows``).

After every update that is made, a rule is computed from the state before it and from what the
system itself holds after it, all of which equivalence has compared already; buffers are the
oracle's.  So no difference adds up from step to step, and the bound is 4 units in the last place
(of the largest value that a rule takes) in every lane.  Where no change that a rule prescribes is
larger than that, nothing is known of the rule, and the case is undecidable.  State that is
``equal`` only, or has no rule because the system declares none, must have moved by the last step.
A part of equivalence.

*Cannot see* what a value is used for, but of those that updates use (``optimizer.weight_decay``):
the oracle trains with these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shardproof.checks import causes
from shardproof.checks.causes.fits import LEFT_OVER, multiple, some
from shardproof.checks.numbers import REPLAY_ULPS, Differs, Lacking, Moment, within_ulps
from shardproof.checks.one_update import wide
from shardproof.contract import Now
from shardproof.evidence.assembled import Assembled, Evidence
from shardproof.evidence.records import ComparisonRow
from shardproof.oracle.asked import follows_of
from shardproof.registry.follows import EQUAL, SETTING, Follows

Tensors = Mapping[str, Tensor]


def measure(evidence: Evidence, step: int, rows: list[ComparisonRow]) -> None:
    """Add rows of the further state after ``step`` (-1: after ``setup``).

    :raises Differs: it is not what its rules say.
    """
    rules = follows_of(evidence.case, evidence.declaration)
    state = _held(evidence, step)
    if rules:
        _check_names(evidence, rules, state, step)
        _compare(evidence, rules, state, step, rows)
    if step == evidence.steps[-1]:
        _must_have_moved(evidence, rules, state, rows)
        rows += _without_power(evidence, rules)


def _compare(
    evidence: Evidence, rules: Follows, state: Assembled, step: int, rows: list[ComparisonRow]
) -> None:
    """Add rows of the state whose value after ``step`` a rule gives."""
    now = _now(evidence, step)
    wanted = rules.values(state.tensors, now)
    if evidence.truth.steps and step >= 0 and evidence.truth.steps[step].skipped:
        # No update: what goes on from its last value stays, a schedule may be anywhere.
        wanted = {name: value for name, value in now.was.items() if name in wanted}
        wanted = {n: v for n, v in wanted.items() if not n.startswith(SETTING)}
    phase = "after_update extra" if step >= 0 else "initial extra"
    moment = Moment(rows, step, phase, "does not follow its rule")
    for name, value in wanted.items():
        for replica, actual in state.tensors[name].items():
            ranks = state.holders.get((name, replica), [])
            if actual.shape != value.shape:
                text = f"{name!r} has shape {list(actual.shape)}, expected {list(value.shape)}"
                moment.problem(name, ranks, text)
                continue
            want = value.to(actual.dtype)
            result = within_ulps(
                *_floats(actual, want, _largest(rules, name, now, want)), REPLAY_ULPS
            )
            moment.note(result, name, f"ranks {ranks}", ranks, unit="ULP")
    try:
        moment.end(evidence.case.world)
    except Differs as failure:
        cause = partial(_cause, evidence, rules, step)
        raise Differs(causes.before(cause, failure), failure.ranks) from None


def _held(evidence: Evidence, step: int) -> Assembled:
    return (
        evidence.initial("extra") if step < 0 else evidence.observed(step, "after_update", "extra")
    )


def _floats(actual: Tensor, want: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All as floating point: a counter has no last place."""
    if actual.is_floating_point():
        return actual, want, largest.to(actual.dtype)
    return actual.double(), want.double(), want.double()


def _largest(rules: Follows, name: str, now: Now, want: Tensor) -> Tensor:
    """The largest of the values that a rule adds up: their sum may cancel."""
    found = rules.rule_of(name)
    terms = [now.was.get(name), now.parameters.get(found[1]) if found else None]
    sizes = [t.double().abs() for t in (*terms, want) if t is not None and t.shape == want.shape]
    return torch.stack(sizes).amax(0)


def _check_names(evidence: Evidence, rules: Follows, state: Assembled, step: int) -> None:
    """Whether all that was declared is shown, and nothing else."""
    place = f"step {step}, extra_state"
    if state.problems:
        raise Lacking(f"{place}: " + "; ".join(state.problems[:3]))
    buffers = evidence.initial("buffers").tensors
    trained = evidence.workload.trainable_names
    wanted: list[str] = []
    for rule in rules.rules:
        before, star, after = rule.name.partition("*")
        names = [before + name for name in trained] if star else [rule.name]
        # A rule by the end of a name asks for nothing: it is that of what is there.
        wanted += [name for name in names if name not in buffers and not after]
    if missing := [name for name in wanted if name not in state.tensors]:
        remedy = "return each from extra_state(), named as in Capabilities.follows"
        raise Lacking(f"{place}: no rank returns {some(missing)}: {remedy}")
    if more := [name for name in state.tensors if rules.rule_of(name) is None]:
        remedy = "add one to Capabilities.follows"
        raise Lacking(f"{place}: {some(more)} has no rule: {remedy}")


def _now(evidence: Evidence, step: int) -> Now:
    """The input of rules after ``step``."""
    parameters = wide(evidence, step)
    if step < 0:
        return Now(step, {}, parameters, {}, {}, ())
    was = _held(evidence, step - 1) if step else evidence.initial("extra")
    truth, point = evidence.truth.steps[step], "gradients_final"
    point = "after_clip" if evidence.has(step, "after_clip") else point
    gradients = {} if truth.skipped else evidence.observed(step, point, "gradients").first()
    slots = evidence.observed(step, "after_update", "optimizer").first()
    return Now(step, was.first(), parameters, gradients, slots, truth.buffers)


def _must_have_moved(
    evidence: Evidence, rules: Follows, state: Assembled, rows: list[ComparisonRow]
) -> None:
    """State of which no more is known than that it is equal on all ranks changes at least once."""
    first, place = evidence.initial("extra").first(), (evidence.steps[-1], "after_update extra")
    for name, tensor in state.first().items():
        found = rules.rule_of(name)
        if (found is not None and found[0].text != EQUAL) or name not in first:
            continue
        if torch.equal(first[name], tensor):
            raise Differs(f"{name!r} was never updated: it still has its value from setup")
        rows.append(ComparisonRow(*place, name, "all ranks", 0.0, 0.0))


def _without_power(evidence: Evidence, rules: Follows) -> Iterator[ComparisonRow]:
    """A row for each rule that state would keep to, within the bound, if it never moved."""
    kept: dict[str, str] = {}
    moved: set[str] = set()
    for step in evidence.steps if rules else ():
        if evidence.truth.steps and evidence.truth.steps[step].skipped:
            continue
        now = _now(evidence, step)
        for name, value in rules.values(now.was, now).items():
            was, rule = now.was[name], rules.rule_of(name)[0].name  # type: ignore[index]
            if rule in moved or was.shape != value.shape or torch.equal(was.double(), value):
                continue
            want = value.to(was.dtype)
            sizes = _floats(was, want, _largest(rules, name, now, want))
            if within_ulps(*sizes, REPLAY_ULPS).ok:
                kept[rule] = str(was.dtype).removeprefix("torch.")
            else:
                moved.add(rule)
    for rule in sorted(kept.keys() - moved):
        what = f"every change by the rule of {rule!r} is below the bound, {REPLAY_ULPS} ULP"
        yield ComparisonRow(skip=f"{what} of {kept[rule]}: hold it in a wider dtype")


# ------------------------------------------------------------------------------------------ causes


def _cause(evidence: Evidence, rules: Follows, step: int) -> str:
    """The cause of all wrong state, from ``step`` on; empty: nothing explains it."""
    wrong, found = _explained(evidence, rules, step)
    # At the beginning several causes may come to the same: of an average that begins as its
    # parameter, to be late and not to move at all.
    for later in (s for s in evidence.steps if s > max(step, 0) and found):
        also = _explained(evidence, rules, later)[1]
        found = [sentence for sentence in found if sentence in also] or found
    state = _held(evidence, step).tensors
    apart = [name for name in wrong if len(wrong[name]) < len(state[name])]
    which = dict.fromkeys(r.name for name in wrong if (r := rules.rule_of(name)[0]))  # type: ignore[index]
    told = found or ["differs between ranks"] * bool(apart)
    return f"{some([*which])} {', or '.join(told)}" if told else ""


def _as_average(rules: Follows, pairs: Sequence[tuple[Tensor, str]], now: Now) -> list[str]:
    """Which average of its parameter wrong state is instead; empty: none."""
    held, was = dict[str, Tensor](), dict[str, Tensor]()
    for number, (copy, name) in enumerate(pairs):
        parameter = now.parameters.get(rules.rule_of(name)[1])  # type: ignore[index]
        if parameter is None or name not in now.was:
            return []
        new = parameter.double()
        held[str(number)], was[str(number)] = copy.double() - new, now.was[name].double() - new
    times = multiple(held, was, LEFT_OVER["float64"])
    if times is None or times == 1:
        return []
    average = f"is {times:.6g} * was + {1 - times:.6g} * parameter"
    return [average if abs(times) > LEFT_OVER["float64"] else "is the parameter itself"]


def _explained(
    evidence: Evidence, rules: Follows, step: int
) -> tuple[dict[str, list[Tensor]], list[str]]:
    """The copies that are wrong after ``step``, as name -> ranks, and sentences that explain all of
    them.
    """
    state, now = _held(evidence, step), _now(evidence, step)
    held = {
        name: [copy for copy in state.tensors[name].values() if not _same(copy, value)]
        for name, value in rules.values(state.tensors, now).items()
    }
    wrong = {name: copies for name, copies in held.items() if copies}
    pairs = [(copy, name) for name, copies in wrong.items() for copy in copies]
    found = [
        sentence
        for values, sentence in _tries(evidence, rules, [*wrong], now)
        if pairs and all(name in values and _same(copy, values[name]) for copy, name in pairs)
    ]
    # Last: what was updated twice, or late, is an average of another decay, too.
    return wrong, found or _as_average(rules, pairs, now)


def _tries(
    evidence: Evidence, rules: Follows, names: Sequence[str], now: Now
) -> Iterator[tuple[Tensors, str]]:
    """Values as state often has them, and what to say of them."""
    make = partial(rules.values, names)
    if now.step < 0:
        return
    yield now.was, "was not updated"
    before = replace(now, parameters=wide(evidence, now.step - 1))
    yield make(before), "was computed from the parameters before the update"
    for other, which in ((now.step + 1, "the next step"), (now.step - 1, "the step before")):
        if other >= 0:
            yield make(replace(now, step=other)), f"is that of {which}"
    case, again = evidence.case, make(now)
    most = max(case.workload.micro_batch_counts(case.data_coordinates), default=1)
    for times in range(2, max(most, case.world) + 1):
        again = make(replace(now, was={**now.was, **again}))
        of = [
            f"once a {what}"
            for what, n in (("micro-batch", most), ("rank", case.world))
            if n == times
        ]
        yield again, f"was updated {times} times" + (f" ({' or '.join(of)})" if of else "")


def _same(held: Tensor, value: Tensor) -> bool:
    want = value.to(held.dtype)
    if held.shape != want.shape:
        return False
    return torch.allclose(held.double(), want.double(), rtol=1e-6, atol=0.0)

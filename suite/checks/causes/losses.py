"""Of what a wrong loss is the loss: which micro-batches, which weights, which mode, which state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations

from torch import Tensor

from shardproof import axes
from shardproof.checks.causes import fits
from shardproof.checks.causes.words import factor
from shardproof.contract import Batch, MicroBatch
from shardproof.evidence.assembled import Evidence
from shardproof.oracle import training
from shardproof.workloads import for_case

#: Loss by data coordinate and micro-batch.
Losses = list[list[float]]
#: Kinds of biases, by the ends of their names, of which pairs are tried.
_MOST_KINDS = 12
#: What outputs are cast to by mistake.
_NARROW = ("float32", "bfloat16", "float16")
_CLOSE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}


def of_loss(evidence: Evidence, step: int, shares: Mapping[int | None, float]) -> str:
    """A sentence on the loss of ``step``, of which ``shares`` are those of data coordinates."""
    held, truth = sum(shares.values()), evidence.truth.steps[step]
    within = _CLOSE[evidence.case.lowest_dtype]
    known = fits.known(evidence)
    numbers = {n for n in known.values() if n > 1}
    tries: list[Iterator[tuple[float, str]]] = [
        _multiples(truth.loss, numbers, known),
        _logarithms(evidence, truth.loss),
        _of_batches(evidence, step),
    ]
    if step:
        before = evidence.truth.steps[step - 1].loss
        tries.append(iter([(before, "this is the loss of the step before")]))
        tries.append(_of_state(evidence, step, "training"))
    if found := fits.nearest(held, truth.loss, chain.from_iterable(tries), within):
        return found
    wrong = [
        number
        for number, share in shares.items()
        if number is not None
        and number < len(truth.losses)
        and abs(share - truth.losses[number]) > within * abs(truth.losses[number])
    ]
    if wrong and len(shares) > len(wrong):
        return f"only the loss of data coordinates {wrong} is wrong"
    return ""


def of_evaluation(evidence: Evidence, step: int, held: float, truth: float) -> str:
    """A sentence on the loss that an evaluation of the batch of ``step`` tells."""
    within = _CLOSE[evidence.case.lowest_dtype]
    known = fits.known(evidence)
    tries = chain(
        _multiples(truth, {n for n in known.values() if n > 1}, known),
        _of_state(evidence, step, "evaluation"),
    )
    return fits.nearest(held, truth, tries, within)


def _multiples(
    truth: float, numbers: set[float], known: Mapping[str, float]
) -> Iterator[tuple[float, str]]:
    for number in numbers:
        for times in (number, 1 / number):
            sentence = factor(times, known).replace("every gradient", "the loss")
            yield times * truth, sentence


def _logarithms(evidence: Evidence, truth: float) -> Iterator[tuple[float, str]]:
    for axis, size in evidence.case.mesh.items():
        if size > 1:
            # Cross-entropy is log(sum of exp) - logit: n times the sum adds log(n).
            for value in (truth + math.log(size), truth - math.log(size)):
                way = "large" if value > truth else "small"
                yield (
                    value,
                    f"the loss is too {way} by log({size}), the ranks of the axis {axis!r}: each "
                    "class was counted otherwise in the sum of exponentials",
                )


def _of_batches(evidence: Evidence, step: int) -> Iterator[tuple[float, str]]:
    """Sums over other micro-batches, or with other weights, in training mode and not."""
    workload = for_case(evidence.case)
    batches = evidence.shares(step)
    states = fits.states(evidence, step)
    for mode in ("training", "evaluation"):
        loss_of = training.evaluator(workload, evidence.case.precision, mode == "training")
        losses = _losses(loss_of, states, batches)
        if mode == "evaluation":
            yield _sum(losses), "this is the loss in evaluation mode"
            continue
        yield from _selections(losses, batches)
        yield from _weighted(losses, batches)
        yield from _biases(evidence, loss_of, states, batches)
        yield (
            _sum(_losses(loss_of, states, [_next_targets(batch) for batch in batches])),
            "this is the loss against the targets of the next micro-batch",
        )
        yield from _of_outputs(evidence, states, batches, True)


def _biases(
    evidence: Evidence,
    loss_of: Callable[..., float],
    states: Sequence[Mapping[str, Tensor]],
    batches: Sequence[Batch],
) -> Iterator[tuple[float, str]]:
    """Biases that every tensor rank adds before the sum over the axis."""
    axis, ranks = axes.cutting("widths"), axes.parts(evidence.case.mesh, "widths")
    biases = [n for n in states[0] if n.endswith(".bias")] if ranks > 1 else []
    kinds = {".".join(name.rsplit(".", 3)[-3:]) for name in biases}
    if len(kinds) > _MOST_KINDS:
        return
    for count in (1, 2):
        for chosen in combinations(sorted(kinds), count):
            scaled = [
                {n: t * ranks if n.endswith(chosen) else t for n, t in state.items()}
                for state in states
            ]
            yield (
                _sum(_losses(loss_of, scaled, batches)),
                f"the biases {' and '.join(chosen)} were added on every rank of the axis {axis!r}",
            )


def _of_outputs(
    evidence: Evidence,
    states: Sequence[Mapping[str, Tensor]],
    batches: Sequence[Batch],
    training_mode: bool,
) -> Iterator[tuple[float, str]]:
    """Losses of outputs in another dtype than the case asks for."""
    workload, precision = for_case(evidence.case), evidence.case.precision
    for dtype in _NARROW:
        loss_of = training.evaluator(workload, {**precision, "output": dtype}, training_mode)
        yield (
            _sum(_losses(loss_of, states, batches)),
            f"the outputs were cast to {dtype} before the loss",
        )


def _of_state(evidence: Evidence, step: int, mode: str) -> Iterator[tuple[float, str]]:
    """Losses with other parameters, and for an evaluation in training mode or other weights."""
    workload = for_case(evidence.case)
    batches = evidence.shares(step)
    precision = evidence.case.precision
    loss_of = training.evaluator(workload, precision, mode == "training")
    if mode == "evaluation":
        now = fits.states(evidence, step)
        losses = _losses(loss_of, now, batches)
        yield from _selections(losses, batches)
        yield from _weighted(losses, batches)
        trained = _losses(training.evaluator(workload, precision, True), now, batches)
        yield _sum(trained), "this is the loss in training mode"
        yield from _of_outputs(evidence, now, batches, False)
    before = fits.states(evidence, step - 1)
    before = [before[min(number, len(before) - 1)] for number in range(len(batches))]
    yield (
        _sum(_losses(loss_of, before, batches)),
        "this is the loss with the parameters before the last update",
    )


def _losses(
    loss_of: Callable[..., float],
    states: Sequence[Mapping[str, Tensor]],
    batches: Sequence[Batch],
) -> Losses:
    return [
        [loss_of(state, [micro]) for micro in batch.micro_batches]
        for state, batch in zip(states, batches, strict=True)
    ]


def _sum(losses: Losses) -> float:
    return sum(map(sum, losses))


def _selections(losses: Losses, batches: Sequence[Batch]) -> Iterator[tuple[float, str]]:
    whole = _sum(losses)
    yield sum(own[-1] for own in losses if own), "only the last micro-batch is in the loss"
    yield sum(own[0] for own in losses if own), "only the first micro-batch is in the loss"
    yield whole - sum(own[-1] for own in losses if own), "the last micro-batch is not in the loss"
    sizes = [[len(window) for window in batch.windows] for batch in batches]
    if max(map(len, sizes)) > 1:
        last = sum(sum(own[-size[-1] :]) for own, size in zip(losses, sizes, strict=True) if own)
        first = sum(sum(own[: size[0]]) for own, size in zip(losses, sizes, strict=True) if own)
        yield last, "only the last window is in the loss"
        yield first, "only the first window is in the loss"
    for number, own in enumerate(losses):
        if len(losses) > 1:
            yield sum(own), f"this is the loss of data coordinate {number} alone"
            yield whole - sum(own), f"the loss of data coordinate {number} is missing"


def _weighted(losses: Losses, batches: Sequence[Batch]) -> Iterator[tuple[float, str]]:
    """Means of means, where weights ask for a sum over tokens."""
    weights = [[float(m.weights.double().sum()) for m in batch.micro_batches] for batch in batches]
    # A loss is a weighted sum over tokens: divided by the weights it is their mean.
    means = [
        [a / w if w else 0.0 for a, w in zip(own, ws, strict=True)]
        for own, ws in zip(losses, weights, strict=True)
    ]
    count = sum(map(len, means))
    yield (
        _sum(means) / count,
        "every micro-batch counts the same in the loss, however many tokens it has",
    )
    shares = [sum(own) / sum(ws) for own, ws in zip(losses, weights, strict=True) if sum(ws)]
    yield (
        sum(shares) / len(losses),
        "every data coordinate counts the same in the loss, however many tokens it has",
    )
    largest = max((len(w) for batch in batches for w in batch.windows), default=1)
    yield (
        sum(
            sum(values) * len(window) / largest
            for own, batch in zip(losses, batches, strict=True)
            for window, values in _by_window(own, batch)
        ),
        "an incomplete window is divided by the number of micro-batches of a complete one",
    )


def _by_window(
    losses: Sequence[float], batch: Batch
) -> Iterator[tuple[tuple[MicroBatch, ...], Sequence[float]]]:
    start = 0
    for window in batch.windows:
        yield window, losses[start : start + len(window)]
        start += len(window)


def _next_targets(batch: Batch) -> Batch:
    """The inputs of every micro-batch with the targets and weights of the next."""
    micros = list(batch.micro_batches)
    turned = [*micros[1:], *micros[:1]]
    changed = iter(
        replace(m, targets=n.targets, weights=n.weights)
        if m.targets.shape == n.targets.shape
        else m
        for m, n in zip(micros, turned, strict=True)
    )
    return Batch(batch.step, tuple(tuple(next(changed) for _ in w) for w in batch.windows))

"""The predicted time of a step: measured compute of one rank + alpha-beta communication. Pure.

docs/model.md says what compute is, which two bounds there are, and which is the prediction.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from shardproof.backends import BACKENDS
from shardproof.bench.model.alpha_beta import Links, algorithms_of
from shardproof.bench.model.messages import Window
from shardproof.bench.subjects import Call
from shardproof.costs import CostModel, ModelFacts
from shardproof.costs.model import Flow
from shardproof.table import grouped

if TYPE_CHECKING:
    from shardproof.ledgers import traffic

Overlap = Literal["none", "full"]
#: Bytes that an optimizer reads and writes for each element of an fp32 parameter, at least.
UPDATE_BYTES = {"adamw": 7 * 4, "sgd": 5 * 4}


#: Payloads at which an operation is probed, from the smallest to the largest that a step sends.
RUNGS = 6


class Unmodelled(ValueError):
    """No prediction; the message says what is missing."""


def seen(rows: Iterable[traffic.LoggedCall]) -> list[Call]:
    """The calls of one rank's step from rows of its traffic ledger; groups of one cost nothing."""
    counts = Counter(
        (row.operation, len(row.group), row.payload_bytes, row.floating, row.axis)
        for row in rows
        if len(row.group) > 1
    )
    return [Call(*key[:3], n, *key[3:]) for key, n in counts.items()]


def sizes(calls: Iterable[Call]) -> dict[str, list[int]]:
    """Payloads by operation, ascending: what :mod:`shardproof.bench.model.probes` measures at."""
    by_operation: dict[str, set[int]] = {}
    for call in calls:
        if call.operation != "recv":
            by_operation.setdefault(call.operation, set()).add(math.ceil(call.bytes))
    return {operation: sorted(payloads) for operation, payloads in by_operation.items()}


def ladder(calls: Sequence[Call]) -> dict[str, list[int]]:
    """Payloads to probe each operation at: equal ratios, from the least to the most that is sent.

    One size is probed at itself and at a sixteenth, or there would be no alpha.  Messages of a
    pipeline are as long at any world: theirs from a half on, for a network that caps bandwidth lets
    the first kilobytes through at once.
    """
    rungs = {}
    for operation, payloads in sizes(calls).items():
        least, most = max(8, payloads[0]), max(8, payloads[-1])
        if least * 2 > most:
            least = max(8, most // (2 if operation == "send" else 16))
        ratio = (most / least) ** (1 / (RUNGS - 1))
        rungs[operation] = sorted({4 * round(least * ratio**i / 4) for i in range(RUNGS)})
    return rungs


def apart(axes: Mapping[str, int], calls: Sequence[Call]) -> dict[str, list[Call]]:
    """``calls`` by the axis that they go along, where each axis is probed apart: several are cut.

    What goes over a group of all ranks, and everything where one axis is cut, stands under "".
    """
    if sum(size > 1 for size in axes.values()) < 2:
        return {"": [*calls]}
    found: dict[str, list[Call]] = {"": []}
    for call in calls:
        along = all(axis in axes for axis in call.axis.split("+"))
        found.setdefault(call.axis if along else "", []).append(call)
    return found


def promised(cost_model: CostModel, known: Sequence[Call] = (), world: int = 0) -> list[Call]:
    """The calls of a mean rank by closed formula, at the world of the promise's facts.

    What no formula gives is taken over from ``known``, the calls that the ledger saw at ``world``
    ranks: control traffic, and how many buckets DDP has (else counted for its own layout).

    :raises NoCostModel: no formula for the options.
    """
    facts = cost_model.facts
    calls = [_call(facts, flow, known) for flow in cost_model.flows()]
    for call in known:
        if not call.floating:
            axes = call.axis.split("+")
            ranks = facts.world if call.ranks == world else call.ranks
            if all(axis in facts.axes for axis in axes):
                ranks = math.prod(map(facts.size, axes))
            calls.append(dataclasses.replace(call, ranks=ranks))
    return calls if facts.world > 1 else []


def _call(facts: ModelFacts, flow: Flow, known: Sequence[Call]) -> Call:
    ranks = math.prod(facts.size(axis) for axis in flow.axis.split("+"))
    senders = Fraction(facts.world)
    if flow.operation not in ("send", "recv"):
        senders *= Fraction((2 if flow.operation == "all_reduce" else 1) * (ranks - 1), ranks)
    count = _count(facts, flow, known)
    payload = float(flow.bytes / senders / (count or 1))
    return Call(flow.operation, ranks, payload, float(count), axis=flow.axis)


def _count(facts: ModelFacts, flow: Flow, known: Sequence[Call]) -> Fraction:
    """Calls of one rank; where only a range is promised, as many as were seen or are laid out."""
    least, most = (Fraction(end, facts.world) for end in flow.range)
    if least == most:
        return least
    alike = [c for c in known if c.floating and c.operation == flow.operation]
    alike = [c for c in alike if c.axis == flow.axis] or alike
    guess = Fraction(sum(c.count for c in alike)) if alike else Fraction(ddp_buckets(facts))
    return min(max(guess, least), most)


def ddp_buckets(facts: ModelFacts) -> int:
    """Buckets of reference/ddp: reverse order of registration, the first one of each dtype small.

    The order in which gradients arrive can make it one more or less.
    """
    first = int(facts.option("first_bucket_bytes", 2**20))
    limit = int(facts.option("bucket_bytes", 25 * 2**20))
    by_dtype = grouped((tensor.dtype, tensor) for tensor in reversed(facts.trainable))
    count = 0
    for tensors in by_dtype.values():
        filled, most = 0, first
        for tensor in tensors:
            if filled and filled + tensor.nbytes > most:
                count, filled, most = count + 1, 0, limit
            filled += tensor.nbytes
        count += filled > 0
    return count


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step.  ``alpha_seconds`` + ``beta_seconds`` = ``communication_seconds``;
    ``low_seconds`` is the bound where all is hidden that can be.
    """

    compute_seconds: float
    communication_seconds: float
    alpha_seconds: float
    beta_seconds: float
    low_seconds: float
    overlap: Overlap
    why: str = ""

    @property
    def high_seconds(self) -> float:
        """The bound where nothing is hidden."""
        return self.compute_seconds + self.communication_seconds

    @property
    def step_seconds(self) -> float:
        """The prediction: the bound that ``overlap`` names."""
        return self.low_seconds if self.overlap == "full" else self.high_seconds

    @property
    def exposed_share(self) -> float:
        """Share of the predicted step that is not compute."""
        return 1 - self.compute_seconds / self.step_seconds if self.step_seconds else 0.0

    def to_dict(self) -> dict[str, float | str]:
        """The JSON form, with what follows from the fields."""
        return asdict(self) | {
            "high_seconds": self.high_seconds,
            "step_seconds": self.step_seconds,
            "exposed_share": self.exposed_share,
        }


def overlap_of(backend: str, cores_per_rank: float | None, threads: int = 1) -> tuple[Overlap, str]:
    """Which bound is the prediction on ``backend``, and why.

    ``cores_per_rank``: physical cores of the machine over its ranks; ``None``: not known.
    """
    known = BACKENDS[backend]
    if known.hides_latency is not None:
        return "full" if known.hides_latency else "none", known.hides_because
    if cores_per_rank is not None and cores_per_rank >= threads + 1:
        return "full", f"{backend}'s threads have a core next to the {threads} that compute"
    return "none", f"every core computes: {backend}'s threads take time from compute"


def predict(
    calls: Iterable[Call],
    compute_seconds: float,
    links: Links,
    backend: str,
    *,
    cores_per_rank: float | None = None,
    threads: int = 1,
    window: Window | None = None,
) -> Prediction:
    """A step of ``compute_seconds`` in which a rank makes ``calls`` over ``links``.

    The messages of a pipeline's ``window`` are played: what it waits for them, and nothing of it is
    hidden.

    ``cores_per_rank`` and ``threads`` (that compute) bound what can be hidden and choose the
    prediction.

    :raises Unmodelled: an operation without a fit, or a backend without cost formulas.
    """
    algorithms_by = algorithms_of(backend)
    if not algorithms_by:
        known = ", ".join(filter(algorithms_of, BACKENDS))
        raise Unmodelled(f"no cost formulas for backend {backend}, only for {known}")
    alpha = beta = busy = waiting = 0.0
    for call in calls:
        if call.operation == "recv" or call.ranks < 2:
            continue
        algorithms = algorithms_by.get(call.operation)
        fit = links.of(call)
        if algorithms is None or fit is None:
            along = f" along {call.axis}" if links.along else ""
            raise Unmodelled(f"{call.operation}{along} was not timed on {backend}")
        one = fit.seconds(call.bytes, call.ranks, algorithms)
        latency, whole = fit.seconds(0, call.ranks, algorithms) * call.count, one * call.count
        busy += whole * fit.busy
        if call.operation == "send" and call.floating and window is not None:
            latency = window.exposed(call.count, fit.seconds(0, call.ranks, algorithms))
            whole = window.exposed(call.count, one)
            waiting += whole
        alpha, beta = alpha + min(latency, whole), beta + whole - min(latency, whole)
    seconds = alpha + beta
    low = max(compute_seconds + waiting, seconds)
    if cores_per_rank:
        low = max(low, (compute_seconds * threads + busy) / cores_per_rank)
    low = min(low, compute_seconds + seconds)
    why = overlap_of(backend, cores_per_rank, threads)
    return Prediction(compute_seconds, seconds, alpha, beta, low, *why)


@dataclass(frozen=True)
class Scorecard:
    """Figures without a unit: the only ones that are compared between different machines.

    ``achieved_over_predicted``: speed, predicted seconds over measured ones; below 1: slower than
    the model.  ``exposed_share``: of the measured step, what the same ranks do not need when they
    send nothing.  ``memory_over_formula``: most bytes that a rank holds in a step over its model
    states by formula; what is above 1 is activations, buckets and temporaries.
    ``achieved_over_probed``: speed against a machine that does nothing but the step's FLOPs and the
    optimizer's reads and writes at the rates that were probed, and the communication.
    """

    achieved_over_predicted: float
    exposed_share: float
    memory_over_formula: float | None = None
    achieved_over_probed: float | None = None


def probed_compute(
    flops: float, elements: float, optimizer: str, flop_rate: float, byte_rate: float
) -> float:
    """Seconds of ``flops`` at ``flop_rate`` (1/s), and of updating ``elements`` fp32 elements at
    ``byte_rate`` (bytes/s): AdamW reads p, g, m, v and writes p, m, v; SGD with momentum one less
    of each.
    """
    return flops / flop_rate + elements * UPDATE_BYTES[optimizer] / byte_rate


def slowest(ranks: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Seconds by segment and step: the most over ``ranks``, for the slowest one sets the pace."""
    return [
        [max(step) for step in zip(*segments, strict=True)] for segments in zip(*ranks, strict=True)
    ]

"""Two runs of the same shape have the same bits in a step."""

from __future__ import annotations

from shardproof.checks.numbers import Differs, Tally, bitwise
from shardproof.checks.two_runs import Pair
from shardproof.contract import Kind
from shardproof.evidence.assembled import Evidence
from shardproof.evidence.records import ComparisonRow

KINDS: tuple[Kind, ...] = ("parameters", "optimizer", "buffers")
#: What is compared of a step, as it happens.
MOMENTS: tuple[tuple[str, Kind], ...] = (
    ("gradients_final", "gradients"),
    ("after_clip", "gradients"),
    *(("after_update", kind) for kind in KINDS),
)


def same_step(base: Evidence, other: Evidence, step: int, rows: list[ComparisonRow]) -> None:
    """Whether all that both runs show of ``step`` is the same, bit for bit.

    :raises Differs: it is not; rows name the first tensor.
    """
    for record, again in zip(base.records, other.records, strict=True):
        one, two = record.steps[step], again.steps[step]
        where = f"rank {record.rank}, step {step}"
        for name, was, now in (
            ("loss", one.loss, two.loss),
            ("norm", one.norm, two.norm),
            *((f"metric {key!r}", v, two.metrics.get(key)) for key, v in one.metrics.items()),
        ):
            # Two NaNs are the same here: bits are compared, not sizes.
            if was != now and not (was != was and now != now):
                raise Differs(f"{where}: the {name} is {now!r}, not {was!r}")
        odd = [name for name, digest in one.draws.items() if two.draws.get(name) != digest]
        if odd:
            raise Differs(f"{where}: the RNG ({odd[0]}) is in another state")
    pair = Pair(base, other, bitwise, masters=True)
    for point, kind in MOMENTS:
        if not base.has(step, point):
            continue
        phase = point if kind == "gradients" else f"{point} {kind}"
        # The usual case: then nothing has to be put together from pieces.
        if _all_equal(base, other, step, point, kind):
            place = (step, phase, "all tensors", "all ranks")
            rows.append(ComparisonRow(*place, error=0.0, bound=0.0))
            continue
        told = pair.moment(step, point, kind)
        if problem := next((row.problem for row in told if row.problem), ""):
            raise Differs(problem)
        failed = Tally.of(told).failed
        if failed is not None:
            raise Differs(f"differs: {failed}")
        rows += told


def _all_equal(base: Evidence, other: Evidence, step: int, point: str, kind: Kind) -> bool:
    """Whether every rank held the same pieces with the same bits."""
    pairs = zip(base.records, other.records, strict=True)
    moments = ([r.steps[step].observed.get(point, {}) for r in pair] for pair in pairs)
    return all(kind in one and kind in two and one[kind].equals(two[kind]) for one, two in moments)

"""Two runs laid side by side: what ``relations`` and ``checkpoint`` compare, moment by moment.

Two systems may hold different numbers of copies: a copy that only one run has is compared with the
other's first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardproof import registry
from shardproof.case import Case
from shardproof.checks import numbers
from shardproof.checks.numbers import Compare, Comparison, Region, root_mean_square, split_zero
from shardproof.checks.one_update import MASTER
from shardproof.contract import Kind
from shardproof.evidence.assembled import Assembled, Evidence
from shardproof.evidence.records import ComparisonRow

KINDS: tuple[Kind, ...] = ("parameters", "optimizer", "buffers", "extra")
#: What is compared of a step, as it happens.
MOMENTS: tuple[tuple[str, Kind], ...] = (
    ("gradients_final", "gradients"),
    ("after_clip", "gradients"),
    *(("after_update", kind) for kind in KINDS),
)


def with_other(case: Case, other: Mapping[str, Any]) -> Case:
    """``case`` of another ``implementation``, other ``options``, another ``mesh`` or ``precision``,
    as scenarios give them (``schema.Other``, ``schema.Into``).

    :raises Refused: the implementation does not take its options.
    """
    name = other.get("implementation", case.implementation)
    precision = other.get("precision", case.precision)
    kept = case.options if name == case.implementation else {"precision": case.precision}
    options = {**kept, **other.get("options", {})}
    if "precision" in other:
        options["precision"] = precision
    if not options.get("precision"):
        options.pop("precision", None)
    axes = registry.load(name).capabilities(options).axes
    usual = case.mesh if set(case.mesh) <= set(axes) else {axes[0]: case.world}
    mesh = other.get("mesh", usual)
    return replace(case, implementation=name, options=options, mesh=mesh, precision=precision)


@dataclass(frozen=True)
class Pair:
    """A run and another one of its case, of the same system or, with ``copies_differ``, another.

    Gradients of the other are ``factor`` times those of the first.  ``masters``: these are compared
    as well; a system may keep them where another needs none.
    """

    base: Evidence
    other: Evidence
    compare: Compare
    copies_differ: bool = False
    factor: float = 1.0
    masters: bool = False

    def moment(self, step: int, point: str, kind: str) -> list[ComparisonRow]:
        """Rows of one moment, or a problem: what cannot be laid side by side."""
        base, other = (run.observed(step, point, kind) for run in (self.base, self.other))
        if kind == "optimizer" and not self.masters:
            base, other = without_masters(base), without_masters(other)
        phase = point if kind == "gradients" else f"{point} {kind}"
        rules = [run.declaration.buffers for run in (self.base, self.other)]
        meshes = [run.case.mesh for run in (self.base, self.other)]
        if kind == "buffers" and (rules[0] != rules[1] or meshes[0] != meshes[1]):
            base, other = of_rank_0(base), of_rank_0(other)
        if problem := mismatch(base, other, self.copies_differ):
            return [ComparisonRow(problem=f"step {step}, {phase}: {problem}")]
        regions = self.base.workload.zero_gradient if kind == "gradients" else {}
        floor = 0.0
        if kind == "gradients" and self.compare is not numbers.bitwise:
            unit = torch.finfo(getattr(torch, self.base.case.dtype)).eps / 2
            # Relative to the whole model: noise has no scale of its own.
            floor = numbers.ZERO_FLOOR * unit * root_mean_square(list(base.first().values()))
        factor = self.factor if kind == "gradients" else 1.0
        rows: list[ComparisonRow] = []
        passing = numbers.powerless(base.first(), self.base.case.world, self.compare.parts)
        for name, copies in base.tensors.items():
            for replica, want, have in both(copies, other.tensors[name]):
                want = want if factor == 1 else want * factor
                for part, result in self._parts(want, have, regions.get(name, ()), floor):
                    place = (step, phase, name + part, f"replica {replica}")
                    rows.append(ComparisonRow(*place, result.error, result.bound))
            if passing[name]:
                rows.append(ComparisonRow(step, phase, name, tested=False))
        return rows

    def _parts(
        self, want: Tensor, have: Tensor, regions: Sequence[Region], floor: float
    ) -> list[tuple[str, Comparison]]:
        """The tensor's comparison and, where its true value is 0, those of its noise."""
        if not floor or want.shape != have.shape:
            return [("", self.compare(have, want))]
        quiet = [r for r in regions if root_mean_square([numbers.take(want, r)]) <= floor]
        rest, _ = split_zero(want, quiet)
        loud, silent = split_zero(have, quiet)
        if not bool(rest.any()) or not bool(loud.any()):
            noise = max(root_mean_square([rest]), root_mean_square([loud]))
            pairs = [("", Comparison(noise if noise == noise else math.inf, floor))]
        else:
            pairs = [("", self.compare(loud, rest))]
        zeros = (Comparison(root_mean_square([part]), floor) for part in silent)
        return [*pairs, *((" (zero slice)", zero) for zero in zeros)]


def both(
    copies: Mapping[int, Tensor], others: Mapping[int, Tensor]
) -> list[tuple[int, Tensor, Tensor]]:
    """Every copy with the other run's of that number, or its first."""
    first, first_other = copies[min(copies)], others[min(others)]
    numbers = sorted({*copies, *others})
    return [(n, copies.get(n, first), others.get(n, first_other)) for n in numbers]


def without_masters(state: Assembled) -> Assembled:
    """The slots of an optimizer alone."""
    kept = {n: t for n, t in state.tensors.items() if n.rpartition(".")[2] != MASTER}
    return replace(state, tensors=kept)


def of_rank_0(state: Assembled) -> Assembled:
    """Only rank 0's copies: they are the same whether other ranks keep buffers or receive its."""
    kept = {name: {0: copies[0]} for name, copies in state.tensors.items() if 0 in copies}
    return replace(state, tensors=kept)


def mismatch(base: Assembled, other: Assembled, copies_differ: bool) -> str:
    """Why the two runs' tensors cannot be laid side by side (``""``: they can)."""
    problems = base.problems or other.problems
    if problems:
        return "; ".join(problems[:3])
    for name in dict.fromkeys([*base.tensors, *other.tensors]):
        here, there = (sorted(run.tensors.get(name, ())) for run in (base, other))
        if here != there and not (copies_differ and here and there):
            return f"{name!r} exists on replicas {here} in one run, on {there} in the other"
    return ""


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
                raise numbers.Differs(f"{where}: the {name} is {now!r}, not {was!r}")
        if odd := [name for name, digest in one.draws.items() if two.draws.get(name) != digest]:
            raise numbers.Differs(f"{where}: the RNG ({odd[0]}) is in a different state")
    pair = Pair(base, other, numbers.bitwise, masters=True)
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
            raise numbers.Differs(problem)
        if (failed := numbers.Tally.of(told).failed) is not None:
            raise numbers.Differs(f"differs: {failed}")
        rows += told


def _all_equal(base: Evidence, other: Evidence, step: int, point: str, kind: Kind) -> bool:
    """Whether every rank held the same pieces with the same bits."""
    pairs = zip(base.records, other.records, strict=True)
    moments = ([r.steps[step].observed.get(point, {}) for r in pair] for pair in pairs)
    return all(kind in one and kind in two and one[kind].equals(two[kind]) for one, two in moments)

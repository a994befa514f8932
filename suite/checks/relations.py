"""Metamorphic relations: a second run whose result follows from the first, with no oracle needed.

``expect.relation`` names one of five.  *split*: twice the micro-batches, the same gradients.
*permute*: the ranks' shares of the batch in reversed order, the same gradients.  *world1*: at a
world of 1 the system is ``plain``, bit for bit.  *scale*: all loss weights times 2, with SGD's rate
halved and its weight decay doubled (AdamW: eps doubled): gradients exactly doubled, parameters the
same bits, since a factor of 2 is never rounded.  *recompute*: without activation checkpointing the
same bits.  Compared are the final gradients of every step and the parameters (*split*, *permute*:
under SGD only); *split* and *permute* in fp64 at a relative Frobenius error of 1e-12, the others
bit for bit; *recompute* compares buffers, too.

Sees what depends on the cut (a mean of means), on who holds which data (a rank that counts more or
not at all), on being one of several (a cast on the way), on absolute size (a weight normalised
again, a threshold, a second eps), on what is kept for backward (fresh dropout masks, buffers that
are updated twice), without believing the oracle.

*Cannot see* a fault that both runs share (a sum where a mean belongs passes *permute* and *scale*;
an update with a wrong sign passes all but *world1*), nor buffers, memory, traffic or order; nor
anything where the relation does not hold by definition (BatchNorm or a branch by micro-batch under
*split*, an order of data without shares to exchange): these are ``skip`` with the reason.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from suite import workloads
from suite.case import Case
from suite.checks import Outcome, Worst
from suite.checks.numbers import (
    FP64_BOUND,
    ZERO_FLOOR,
    Compare,
    Comparison,
    Region,
    bitwise,
    powerless,
    relative_frobenius,
    root_mean_square,
    split_zero,
    take,
)
from suite.evidence import Assembled, Evidence, Figures, Row

#: Relations that hold up to the order of sums, and those that hold bit for bit.
REORDERED, EXACT = ("split", "permute"), ("world1", "scale", "recompute")
#: Branches that a flagged sample opens; their number of micro-batches says which are flagged.
_BY_MICRO_BATCH = ("conditional_by_micro_batch", "conditional_last_micro_batch")


def derive(evidence: Figures) -> tuple[Case | None, str]:
    """The case to run beside this one, or ``None`` and why the relation says nothing here."""
    case = evidence.case
    relation = case.expect.get("relation")
    why = _not_defined(evidence, relation)
    if why:
        return None, why
    workload, optimizer = case.workload, case.optimizer
    derived = dataclasses.replace(case, id=f"{case.id}::{relation}", checks=(), ledgers=False)
    if relation == "split":
        twice = dataclasses.replace(workload, micro_batches=2 * workload.micro_batches)
        return dataclasses.replace(derived, workload=twice), ""
    if relation == "permute":
        shares = tuple(reversed(range(_shares(evidence))))
        return dataclasses.replace(derived, shares=shares), ""
    if relation == "world1":
        mesh = {"replicate": 1}
        return dataclasses.replace(derived, implementation="plain", options={}, mesh=mesh), ""
    if relation == "recompute":
        return dataclasses.replace(derived, options={**case.options, "recompute_every": 0}), ""
    if optimizer.name == "adamw":
        optimizer = dataclasses.replace(optimizer, eps=2 * optimizer.eps)
    else:
        groups = tuple(
            g if g.weight_decay is None else dataclasses.replace(g, weight_decay=2 * g.weight_decay)
            for g in optimizer.groups
        )
        optimizer = dataclasses.replace(
            optimizer,
            lr=optimizer.lr / 2,
            weight_decay=2 * optimizer.weight_decay,
            groups=groups,
        )
    return dataclasses.replace(derived, optimizer=optimizer, loss_scale=2.0), ""


def _not_defined(evidence: Figures, relation: str | None) -> str:
    case, claims = evidence.case, evidence.capabilities
    if relation not in (*REORDERED, *EXACT):
        return "the case names no relation (expect.relation)"
    if relation == "recompute" and claims["exactness"] != "stale":
        return "" if case.options.get("recompute_every") else "option 'recompute_every' is off"
    if claims["oracle"] != "plain" or claims["exactness"] not in ("bitwise", "reordered-sum"):
        return f"declares {claims['exactness']} numbers: two runs need not agree"
    if relation in REORDERED and case.dtype != "float64":
        return f"{relation} adds in another order: it is judged in float64"
    if relation in EXACT and case.optimizer.clip_norm is not None:
        return f"{relation} compares bits with clipping off"
    if relation == "world1" and case.world != 1:
        return "world1 compares a world of 1 with plain"
    if relation == "permute":
        if case.membership:
            return "members change: shares have no fixed order"
        if _shares(evidence) < 2:
            return "one share of data: nothing to exchange"
    if relation == "split":
        return _not_splittable(evidence)
    return ""


def _not_splittable(evidence: Figures) -> str:
    spec = evidence.case.workload
    by_cut = [trait for trait in spec.traits if trait in _BY_MICRO_BATCH]
    if by_cut:
        return f"{by_cut[0]}: what runs depends on the micro-batch"
    if workloads.make(spec, evidence.case.dtype, evidence.case.lane).depends_on_cut:
        return "gradients depend, by definition, on how the batch is cut"
    if spec.global_batch <= _shares(evidence) * spec.micro_batches * spec.windows:
        return "every micro-batch is one sample already"
    return ""


def _shares(evidence: Figures) -> int:
    """Number of shares that the global batch was cut into."""
    told = [record["steps"][0].get("share") for record in evidence.records]
    return 1 + max((share for share in told if share is not None), default=0)


# ------------------------------------------------------------------------------------ measuring


def measure(evidence: Evidence) -> list[Row]:
    """Compare the two runs, tensor by tensor and replica by replica, up to the first problem."""
    other = evidence.related
    if other is None:
        return [{"skip": evidence.unrelated or "there was no second run"}]
    if isinstance(other, str):
        return [{"problem": other}]
    relation = evidence.case.expect["relation"]
    rows: list[Row] = []
    compare = relative_frobenius(FP64_BOUND) if relation in REORDERED else bitwise
    for step in evidence.steps:
        if not evidence.has(step, "gradients_final"):
            return [*rows, {"problem": f"step {step}: 'gradients_final' was never observed"}]
        rows += _compare(evidence, other, step, "gradients_final", "gradients", compare)
        if relation in EXACT or evidence.case.optimizer.name == "sgd":
            rows += _compare(evidence, other, step, "after_update", "parameters", compare)
        if relation == "recompute" and evidence.observed(step, "after_update", "buffers").tensors:
            rows += _compare(evidence, other, step, "after_update", "buffers", compare)
        if any("problem" in row for row in rows):
            break
    return rows


def _compare(
    evidence: Evidence, other: Evidence, step: int, point: str, kind: str, compare: Compare
) -> list[Row]:
    """Rows of one moment."""
    base, derived = (run.observed(step, point, kind) for run in (evidence, other))
    phase = point if kind == "gradients" else f"{point} {kind}"
    problem = _mismatch(base, derived)
    if problem:
        return [{"problem": f"step {step}, {phase}: {problem}"}]
    factor = other.case.loss_scale if kind == "gradients" else 1.0
    regions = evidence.workload["zero_gradient"] if kind == "gradients" else {}
    floor = 0.0
    if kind == "gradients" and compare is not bitwise:
        unit = torch.finfo(getattr(torch, evidence.case.dtype)).eps / 2
        floor = ZERO_FLOOR * unit * root_mean_square(list(base.first().values()))
    rows: list[Row] = []
    for name, copies in base.tensors.items():
        place = {"step": step, "phase": phase, "name": name}
        for replica, tensor in copies.items():
            want, have = tensor if factor == 1 else tensor * factor, derived.tensors[name][replica]
            owner = f"replica {replica}"
            for part, result in _pairs(want, have, regions.get(name, ()), floor, compare):
                told = {"error": result.error, "bound": result.bound}
                rows.append(place | {"name": name + part, "owner": owner} | told)
        whole = base.replica(name, min(copies))
        if powerless(whole, evidence.case.world, compare):
            rows.append(place | {"tested": False})
    return rows


def _pairs(
    want: Tensor, have: Tensor, regions: Sequence[Region], floor: float, compare: Compare
) -> list[tuple[str, Comparison]]:
    """The tensor's comparison and, where its true value is 0, those of its noise."""
    if not floor or want.shape != have.shape:
        return [("", compare(have, want))]
    quiet = [region for region in regions if root_mean_square([take(want, region)]) <= floor]
    rest, _ = split_zero(want, quiet)
    found, silent = split_zero(have, quiet)
    if not bool(rest.any()) or not bool(found.any()):
        noise = max(root_mean_square([rest]), root_mean_square([found]))
        pairs = [("", Comparison(noise if noise == noise else math.inf, floor))]
    else:
        pairs = [("", compare(found, rest))]
    for part in silent:
        pairs.append((" (zero slice)", Comparison(root_mean_square([part]), floor)))
    return pairs


def _mismatch(base: Assembled, derived: Assembled) -> str:
    """Why the two runs' tensors cannot be laid side by side (``""``: they can)."""
    problems = base.problems or derived.problems
    if problems:
        return "; ".join(problems[:3])
    for name in dict.fromkeys([*base.tensors, *derived.tensors]):
        here, there = (sorted(run.tensors.get(name, ())) for run in (base, derived))
        if here != there:
            return f"{name!r} exists on replicas {here} in one run, on {there} in the other"
    return ""


# ------------------------------------------------------------------------------------- deciding


def decide(figures: Figures) -> Outcome:
    """The first comparison beyond its bound fails; so does a second run that went wrong."""
    relation = figures.case.expect.get("relation")
    worst: Worst | None = None
    compared, not_tested, problem = 0, set(), ""
    for row in figures.compared.get("relations", []):
        if "skip" in row:
            return Outcome("relations", "skip", row["skip"])
        if "problem" in row:
            problem = problem or row["problem"]
        elif not row.get("tested", True):
            not_tested.add(f"{row['phase']}: {row['name']}")
        elif not problem:
            compared += 1
            place = (row["name"], row["step"], row["phase"], row["owner"])
            this = Worst(*place, row["error"], row["bound"])
            if worst is None or _share(this) > _share(worst):
                worst = this
            if not this.error <= this.bound:
                problem = str(this)
    told = {"relation": relation, "compared": compared, "not_tested": sorted(not_tested)}
    if problem:
        return Outcome("relations", "fail", f"{relation} does not hold: {problem}", worst, told)
    if not compared:
        return Outcome("relations", "undecidable", "nothing could be compared", None, told)
    return Outcome("relations", "pass", "", worst, told)


def _share(worst: Worst) -> float:
    if not worst.error <= worst.bound:
        return math.inf
    return worst.error / worst.bound if worst.bound else 0.0

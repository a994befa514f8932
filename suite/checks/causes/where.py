"""Where it is wrong: on which ranks, in which tensors."""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.checks.causes import fits
from shardproof.checks.causes.fits import Tensors, some
from shardproof.evidence.assembled import Evidence
from shardproof.evidence.held import part
from shardproof.workloads import for_case

#: Step, observation point and kind of state.
Moment = tuple[int, str, str]


def of_place(evidence: Evidence, moment: Moment, truth: Tensors, wrong: Sequence[str]) -> str:
    """What is common to all that is wrong, and to nothing that is right; empty: nothing is."""
    limit = fits.limit_of(evidence)
    bad: dict[int, list[str]] = {}
    zero, holders = True, set[int]()
    for rank, own in fits.pieces(evidence, *moment):
        for piece in own:
            if piece.name not in wrong or not piece.tensor.numel():
                continue
            holders.add(rank)
            if not fits.equal(piece.tensor, part(piece, truth[piece.name]), limit):
                bad.setdefault(rank, []).append(piece.name)
                zero = zero and not bool(piece.tensor.any())
    ranks = sorted(bad)
    if not ranks:
        return ""
    is_zero = " and is zero" if zero else ""
    if set(ranks) != holders:
        names = list(dict.fromkeys(name for rank in ranks for name in bad[rank]))
        who = f"rank {ranks[0]} holds" if len(ranks) == 1 else f"ranks {ranks} hold"
        return f"only what {who} of {some(names)} is wrong{is_zero}"
    kind = _kind(evidence, truth, wrong)
    if kind:
        return f"only {kind} wrong{is_zero}: {some(wrong)}"
    return _boundary(evidence, truth, wrong)


def _kind(evidence: Evidence, truth: Tensors, wrong: Sequence[str]) -> str:
    """What the tensors ``wrong`` are, of which the others are none."""
    names, others = set(wrong), set(truth) - set(wrong)
    if not others:
        return ""
    workload = for_case(evidence.case)
    tied = _tied(evidence)
    if names <= tied and not others & tied:
        return "tensors that several modules share are"
    if names == {name for name in truth if name.endswith("bias")}:
        return "biases are"
    for unit in workload.units:
        if names == {n for n in truth if n.startswith(f"{unit}.")}:
            return f"what unit {unit!r} has is"
    return ""


def _boundary(evidence: Evidence, truth: Tensors, wrong: Sequence[str]) -> str:
    """Where the wrong gradients end, if all that lie before it in forward order are wrong."""
    workload = for_case(evidence.case)
    tied = _tied(evidence)
    #     forward    a -> b -> c -> d -> loss
    #     backward   a <- b <- c <- d <- loss      a fault between c and b spoils b and a
    # Tied tensors have several places in this order, so they are left out.
    order = [n for n in workload.trainable_names if n in truth and n not in tied]
    bad = [n for n in order if n in set(wrong)]
    if not bad or len(bad) == len(order) or bad != order[: len(bad)]:
        return ""
    return f"all is wrong up to {bad[-1]!r} in forward order, and all is right behind it"


def _tied(evidence: Evidence) -> set[str]:
    """Parameters that several modules have."""
    facts = evidence.model_facts
    return {t.name for t in facts.parameters if len(t.owners) > 1} if facts else set()


def of_full_state(evidence: Evidence, name: str, digest: str) -> str:
    """When the system held what it gathered of the parameter ``name``; empty: never."""
    for row in evidence.tensors:
        if (row.kind, row.name, row.digest) == ("parameters", name, digest):
            when = "after setup" if row.step < 0 else f"after step {row.step}"
            return f"it is what was held {when}"
    return ""

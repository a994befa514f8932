"""What is wrong with a loss term beside the token loss: left out, of another scope, or weighted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shardproof.checks.causes import fits
from shardproof.contract import LossTerm, Scope
from shardproof.evidence.assembled import Evidence
from shardproof.oracle import training
from shardproof.workloads import for_case

#: How the parts of the batch are called over which a term is computed.
_OVER: Mapping[Scope, str] = {
    "micro-batch": "each micro-batch",
    "rank": "each rank",
    "global": "the global batch",
}
#: Relative to the loss: two ways to compute a term must differ by more to be told apart.
_WITHIN = 1e-9


def of_terms(evidence: Evidence, step: int, total: float) -> str:
    """A sentence on the summed loss ``total`` of ``step``; empty: no term explains it."""
    case = evidence.case
    terms = for_case(case).build_for(0).terms
    if not terms or case.lowest_dtype != "float64":
        return ""
    sums = _statistics(evidence, step, terms)
    values = [_values(term, [own[n] for own in sums]) for n, term in enumerate(terms)]
    right = sum(own[term.scope] for term, own in zip(terms, values, strict=True))
    rest = evidence.oracle.steps[step].loss - right
    for term, own in zip(terms, values, strict=True):
        others = right - own[term.scope]
        for value, sentence in _tries(evidence, step, term, own):
            if abs(total - rest - others - value) <= _WITHIN * abs(total):
                return f"the loss term {term.name!r} {sentence}"
    return ""


def _statistics(
    evidence: Evidence, step: int, terms: Sequence[LossTerm]
) -> list[list[list[Tensor]]]:
    """By data coordinate, term and micro-batch, from what the system held before the step."""
    workload, precision = for_case(evidence.case), evidence.case.precision
    pairs = zip(fits.states(evidence, step), evidence.shares(step), strict=True)
    return [training.statistics(workload, precision, state, batch, terms) for state, batch in pairs]


def _values(term: LossTerm, parts: Sequence[Sequence[Tensor]]) -> dict[Scope, float]:
    """The term over each scope, added up."""
    ranks = [torch.stack([*own]).sum(0) for own in parts if own]
    return {
        "micro-batch": sum((float(term.value(one)) for own in parts for one in own), 0.0),
        "rank": sum((float(term.value(own)) for own in ranks), 0.0),
        "global": float(term.value(torch.stack(ranks).sum(0))),
    }


def _tries(
    evidence: Evidence, step: int, term: LossTerm, values: Mapping[Scope, float]
) -> Iterator[tuple[float, str]]:
    yield 0.0, "was left out"
    factors = {name: float(number) for name, number in fits.known(evidence, step).items()}
    counted = [(1.0, "")]
    for name, number in factors.items():
        counted += [(n, f"counts {n:.4g} times ({name}: {number:g})") for n in (number, 1 / number)]
    for times, how in counted:
        for scope, value in values.items():
            over = f"is computed over {_OVER[scope]}, not over {_OVER[term.scope]}"
            sentence = " and ".join(filter(None, (over if scope != term.scope else "", how)))
            if sentence:
                yield times * value, sentence

"""The problem of a loss term next to the token loss: left out, of another scope, or weighted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product, zip_longest
from typing import get_args

import torch
from torch import Tensor

from shardproof.checks.causes import fits
from shardproof.contract import Batch, LossTerm, Scope
from shardproof.evidence.assembled import Evidence
from shardproof.oracle import training
from shardproof.workloads import for_case

#: How the parts of the batch are called over which a term is computed.
#: The last ones are no scopes.
_OVER: Mapping[str, str] = {
    "micro-batch": "each micro-batch",
    "rank": "each rank",
    "global": "the global batch",
    "each": "each micro-batch of all ranks",
    "first": "the first micro-batch of all ranks",
    "last": "the last micro-batch of all ranks",
}
#: Relative to the loss: two ways to compute a term must differ by more to be told apart.
_WITHIN = 1e-9
#: How near a fitted factor is to the number that it stands for.
_APART = 1e-5


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


def of_term_gradients(evidence: Evidence, step: int, held: fits.Tensors) -> str:
    """A sentence on the gradients ``held`` of ``step``; empty: no term explains them."""
    terms = for_case(evidence.case).build_for(0).terms
    if not terms or evidence.case.lowest_dtype != "float64":
        return ""
    names, truth = [*held], evidence.truth.steps[step].gradients
    own = [_pulled(evidence, step, term, term.scope) for term in terms]
    got, want, *right = (fits.flat(tensors, truth, names) for tensors in (held, truth, *own))
    for term, pull in zip(terms, right, strict=True):
        # The own scope first: where two are the same part of the batch, it tells no scope.
        for scope in sorted(get_args(Scope), key=lambda one: one != term.scope):
            other = fits.flat(_pulled(evidence, step, term, scope), truth, names)
            #     held = truth - what the term adds + times x what it adds over ``scope``
            gap, size = got - want + pull, float(other @ other)
            times = float(gap @ other) / size if size else 0.0
            if float((gap - times * other).norm()) <= fits.limit_of(evidence) * float(pull.norm()):
                sentence = _otherwise(term, scope, times, fits.known(evidence, step))
                return f"in the gradients, the loss term {term.name!r} {sentence}" * bool(sentence)
    return ""


def _otherwise(term: LossTerm, scope: str, times: float, known: Mapping[str, float]) -> str:
    if abs(times) <= _APART:
        return "was left out"
    over = f"is computed over {_OVER[scope]}, not over {_OVER[term.scope]}"
    ratio = max(times, 1 / times, key=abs)
    of = [name for name, number in known.items() if abs(ratio - number) <= _APART * number]
    names = f" ({ratio:.4g} = {' or '.join(of)})" if of else ""
    how = "" if abs(times - 1) <= _APART else f"counts {times:.4g} times{names}"
    return " and ".join(filter(None, (over if scope != term.scope else "", how)))


def _pulled(evidence: Evidence, step: int, term: LossTerm, scope: Scope) -> dict[str, Tensor]:
    """The gradients that ``term`` adds to a step if it is computed over each ``scope``."""
    workload, precision = for_case(evidence.case), evidence.case.precision
    pairs = [*zip(fits.states(evidence, step), evidence.shares(step), strict=True)]
    if scope == "micro-batch":  # as of so many ranks with one micro-batch each
        pairs = [(s, Batch(step, ((m,),))) for s, batch in pairs for m in batch.micro_batches]
    one = replace(term, scope="global" if scope == "global" else "rank")
    own = [training.statistics(workload, precision, *pair, [one]) for pair in pairs]
    found: dict[str, Tensor] = {}
    for pair, pulled in zip(pairs, training.pulls([one], own), strict=True):
        for part in training.parts(workload, precision, *pair, pulled, alone=True):
            found |= {n: found[n] + g if n in found else g for n, g in part.items()}
    return found


def _statistics(
    evidence: Evidence, step: int, terms: Sequence[LossTerm]
) -> list[list[list[Tensor]]]:
    """By data coordinate, term and micro-batch, from what the system held before the step."""
    workload, precision = for_case(evidence.case), evidence.case.precision
    pairs = zip(fits.states(evidence, step), evidence.shares(step), strict=True)
    return [training.statistics(workload, precision, state, batch, terms) for state, batch in pairs]


def _values(term: LossTerm, parts: Sequence[Sequence[Tensor]]) -> dict[str, float]:
    """The term over each scope, and in each way that no scope has, added up."""
    ranks = [torch.stack([*own]).sum(0) for own in parts if own]
    each = zip_longest(*parts, fillvalue=torch.zeros_like(ranks[0]))
    by_number = [float(term.value(torch.stack(own).sum(0))) for own in each]
    return {
        "micro-batch": sum((float(term.value(one)) for own in parts for one in own), 0.0),
        "rank": sum((float(term.value(own)) for own in ranks), 0.0),
        "global": float(term.value(torch.stack(ranks).sum(0))),
        "each": sum(by_number),
        "first": by_number[0],
        "last": by_number[-1],
    }


def _tries(
    evidence: Evidence, step: int, term: LossTerm, values: Mapping[str, float]
) -> Iterator[tuple[float, str]]:
    known = fits.known(evidence, step)
    factors = [times for number in known.values() for times in (number, 1 / number)]
    for times, scope in product((0.0, 1.0, *factors), values):
        if sentence := _otherwise(term, scope, times, known):
            yield times * values[scope], sentence

"""Workloads: a model family with real data, and the traits that make faults show."""

from __future__ import annotations

from shardproof.case import Case, Lane, WorkloadSpec
from shardproof.contract import Scope
from shardproof.workloads import own
from shardproof.workloads.base import Workload, WorkloadFamily, resolve
from shardproof.workloads.cnn import DigitsCNN
from shardproof.workloads.dyadic import DyadicMLP
from shardproof.workloads.experts import DigitsExperts
from shardproof.workloads.gpt import CharnamesGPT
from shardproof.workloads.knobs import Params, WorkloadError, lookup
from shardproof.workloads.penalty import DigitsPenalty
from shardproof.workloads.rnn import CharnamesRNN
from shardproof.workloads.traits import TRAITS as TRAITS
from shardproof.workloads.traits import suggested_groups as suggested_groups

_FAMILIES: tuple[WorkloadFamily, ...] = (
    *(CharnamesGPT(), CharnamesRNN(), DigitsCNN(), DigitsPenalty(), DigitsExperts(), DyadicMLP()),
)
WORKLOADS: dict[str, WorkloadFamily] = {family.name: family for family in _FAMILIES}


def make(
    spec: WorkloadSpec, dtype: str = "float64", lane: Lane = "fp64", rounded_to: str | None = None
) -> Workload:
    """The workload that ``spec`` names, in ``dtype`` (``float64|float32|bfloat16|float16``).

    ``rounded_to``: see :class:`Workload`.

    :raises WorkloadError: unknown workload, knob, trait or dtype, a value that does not fit, or a
        lane that the workload has no form for.
    """
    family = _family(spec.name)
    workload = Workload(family, spec, dtype, rounded_to)
    _check_lane(family, lane, workload.params)
    return workload


def for_case(case: Case) -> Workload:
    """The workload that the ranks of ``case`` train.

    Under mixed precision it starts from values that the dtype of computation holds exactly, so that
    masters and what is computed with begin alike.
    """
    return make(case.workload, case.dtype, case.lane, case.precision.get("parameters"))


def check(spec: WorkloadSpec, lane: Lane = "fp64") -> None:
    """Raise :class:`WorkloadError` unless ``spec`` can be made for ``lane``; builds nothing.

    A user's own is not imported here (``registry.preflight`` does, in another process).
    """
    if ":" in spec.name:
        own.check_name(spec.name, spec.traits)
        return
    family = _family(spec.name)
    _check_lane(family, lane, resolve(family, spec))


def _family(name: str) -> WorkloadFamily:
    return own.load(name) if ":" in name else lookup(name, WORKLOADS, "workload")


def scopes(spec: WorkloadSpec, is_whole: bool = True) -> set[Scope]:
    """Scopes of the loss terms that ``Build.loss`` leaves out; unknown for a user's own.

    ``is_whole``: a rank has all positions of a micro-batch, of which ``Build.loss`` adds the terms.
    """
    if spec.name not in WORKLOADS:
        return set()
    family = WORKLOADS[spec.name]
    found = {term.scope for term in family.terms(family.resolve(spec.params))}
    return found - {"micro-batch"} if is_whole else found


def in_lane(lane: Lane) -> list[str]:
    """Names of the workloads that have a form for ``lane``."""
    return [name for name, family in WORKLOADS.items() if lane != "dyadic" or family.dyadic]


def _check_lane(family: WorkloadFamily, lane: Lane, params: Params) -> None:
    if lane == "dyadic" and not family.dyadic:
        why = f"{family.name} has no {lane} form: its numbers are not small integers"
        raise WorkloadError(f"{why}; workloads with this form: {', '.join(in_lane(lane))}")
    if unfit := family.unfit(params, lane):
        raise WorkloadError(unfit)

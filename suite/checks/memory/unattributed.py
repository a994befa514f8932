"""Unclaimed memory at its largest: temporaries of a rank, against those of one process.

What is neither state nor sent nor kept from forward to backward has no formula: kernels and
autograd take it.  But one process that trains the same model on the largest micro-batch takes it,
too, so it is measured there, once a case.  A strategy needs in addition the gradients of the unit
that it is about to hand over, and one that is being made [derived; no clean quick case takes more];
of several micro-batches, the sums of the earlier ones lie apart until the last backward takes them.
A copy of the whole model or of all gradients is more, however short it lives, where the model has
several units.

Judged of reference strategies on a CPU, without mixed precision, compression, offload,
recomputation and backwards whose two halves are apart: those keep temporaries of their own, or
gradients until their pass comes.  The update is judged in runs of two steps or more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from shardproof import strategies
from shardproof.backends import BACKENDS
from shardproof.checks import weighs
from shardproof.costs.model_facts import ITEMSIZE
from shardproof.costs.stages import comes_apart
from shardproof.evidence.assembled import Figures
from shardproof.evidence.records import ComparisonRow, RankRecord
from shardproof.ledgers import program_order
from shardproof.ledgers.memory.recorder import MemoryLedger
from shardproof.ledgers.memory.summary import PHASES

if TYPE_CHECKING:
    from shardproof.case import Case
    from shardproof.evidence.assembled import Evidence

KIND = "temporary"
#: Numbers, votes, and flags of a strategy.
_SMALL = 1024
_OURS = ("reference", "mutants")
_OWN_TEMPORARIES = ("precision", "compress", "recompute_every", "offload")


def why_not(evidence: Figures) -> str:
    """Why temporaries are not judged here; empty: they are."""
    case, declaration, facts = evidence.case, evidence.declaration, evidence.model_facts
    if case.implementation.partition("/")[0] not in _OURS:
        return "only temporaries of reference systems are judged"
    is_bounded = strategies.of(declaration.strategy).bounds_temporaries
    if not is_bounded or evidence.family is not None or facts is None:
        return "no strategy of which it is known"
    backend = BACKENDS[case.backend]
    on_cpu = backend.exact_memory and backend.device == "cpu"
    if not on_cpu or not weighs(case, declaration):
        return f"temporaries are not measured on {case.backend}"
    if case.precision:
        return "mixed precision"
    if any(trait.startswith("conditional") for trait in case.workload.traits):
        return "use varies by micro-batch"
    if comes_apart(facts.options):
        return "gradients wait for the pass of their weights"
    inner = facts.options.get("data_options") or {}
    both = (facts.options, inner)
    asked = (n for n in _OWN_TEMPORARIES for o in both if o.get(n) not in (None, 0, "none"))
    return next((f"option {name}" for name in asked), "")


def measure(evidence: Evidence) -> Iterator[ComparisonRow]:
    """The largest bytes of temporaries in each ``phase`` of one process, as ``bound``."""
    case = evidence.case
    if not why_not(evidence):
        for phase, size in _one_process(_Key(case.oracle_key("none"), case)).items():
            yield ComparisonRow(0, phase, KIND, "one process", 0.0, float(size))


@dataclass(frozen=True)
class _Key:
    """A case as far as one process that trains its model depends on it: by its ``key``."""

    key: str
    case: Case = field(compare=False)


@lru_cache(maxsize=16)
def _one_process(key: _Key) -> Mapping[str, int]:
    """Phase -> bytes, of one step on the largest micro-batch; where parameters are used later than
    others, the most of a step before and of one after.
    """
    from shardproof import workloads

    case, workload = key.case, workloads.for_case(key.case)
    first = max((workload.first_use(name) or 0 for name in workload.trainable_names), default=0)
    parts = [range(first), range(first, case.steps)]
    found = [_of_steps(case, steps) for steps in parts if steps and steps[0] < case.steps]
    return {phase: max(one.get(phase, 0) for one in found) for phase in found[-1]}


def _of_steps(case: Case, steps: range) -> Mapping[str, int]:
    """Phase -> bytes, of one step on the largest micro-batch of ``steps``."""
    from shardproof import workloads
    from shardproof.oracle.optimizers import build_optimizer

    workload = workloads.for_case(case)
    model, build = workload.model(), workload.build_for(0)
    workload.load(model)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = build_optimizer(case.optimizer, named)
    batches = (b for s in steps for b in workload.batch(s, case.data_coordinates))
    micro = max((m for b in batches for m in b.micro_batches), key=lambda m: m.inputs.numel())
    # The ranks' own clock: a model with gradients in its loss has backwards in its forward.
    log, before = program_order.RankLog(), program_order.current()
    program_order.install(log, process=False)
    try:
        program_order.watch(model, build.units)
        with MemoryLedger(lambda: log.phase) as ledger, log.step(0):
            ledger.step = 0
            loss = build.loss(model.train()(micro.inputs), micro)
            loss.backward()
            ledger.classify(modules=[model])
            with log.observe("gradients_final"):
                pass  # ends the backward
            optimizer.step()
            ledger.classify(modules=[model], optimizers=[optimizer])
            ledger.mark("over")
    finally:
        program_order.install(before, process=False)
    peaks = ledger.log.peaks(KIND)
    return {phase: peaks[0, phase].bytes for phase in PHASES if (0, phase) in peaks}


def exceeds(evidence: Figures, record: RankRecord) -> tuple[int, str, int, int] | None:
    """Step, phase, bytes and the most there may be, where a rank has more; ``None``: nowhere."""
    bounds = {
        row.phase: int(row.bound)
        for row in evidence.compared.get("memory", ())
        if row.name == KIND and row.bound is not None
    }
    if not bounds or evidence.model_facts is None or why_not(evidence):
        return None
    held, is_seen_again = Counter[tuple[int, str]](), evidence.case.steps > 1
    for row in record.memory:
        # What a first update lays out for the step after it, such as buckets in the order of
        # arrival, is communication once it is sent, which a run of one step never sees.
        if row.where == "update" and not is_seen_again:
            continue
        if (row.moment, row.kind) == ("peak", KIND) and row.device != "file":
            held[row.step, row.where] += row.bytes
    for (step, phase), size in sorted(held.items()):
        if size > (most := bounds.get(phase, 0) + in_addition(evidence, phase)):
            return step, phase, size, most
    return None


def in_addition(evidence: Figures, phase: str) -> int:
    """Bytes of the model's largest unit (what lies in none is one) and of its largest parameter,
    and in forwards and backwards of all gradients, if a step has several micro-batches.
    """
    facts, units = evidence.model_facts, Counter[str]()
    assert facts is not None
    sizes = {tensor.name: tensor.numel * ITEMSIZE[tensor.dtype] for tensor in facts.parameters}
    for name, size in sizes.items():
        units[next((unit for unit in facts.units if name.startswith(f"{unit}.")), "")] += size
    sums = 0
    if phase != "update" and facts.rounds > 1:
        # Sums of the micro-batches before lie apart until the last backward takes them.
        sums = sum(sizes[tensor.name] for tensor in facts.trainable)
    return max(units.values(), default=0) + max(sizes.values(), default=0) + sums + _SMALL

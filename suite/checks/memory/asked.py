"""Expectations of a scenario about memory (``expect.memory``): bytes by class, and a ratio.

Each figure is that of the rank that holds most: bytes of state after the last update,
``activations`` and ``peak`` (of all classes at once) at their largest in the last step.  ``ratio``
is the state under full replication over the state that is held.
"""

from __future__ import annotations

from fractions import Fraction

from shardproof.checks import Worst
from shardproof.costs import whole_bytes
from shardproof.costs.ddp import DDP
from shardproof.costs.expression import evaluate
from shardproof.costs.model import JUDGED
from shardproof.evidence.assembled import Figures
from shardproof.evidence.records import RankRecord


def differs(evidence: Figures) -> tuple[str, Worst] | None:
    """The first figure that is not as expected, in a sentence; ``None``: all are."""
    wanted, step = evidence.case.expect["memory"], evidence.steps[-1]
    by_rank = {record.rank: _held(record, step) for record in evidence.records}
    assert evidence.model_facts is not None
    whole, within = whole_bytes(DDP(evidence.model_facts)), Fraction(str(wanted["within"]))
    for name in (name for name in wanted if name != "within"):
        kind = "state" if name == "ratio" else name
        rank = max(by_rank, key=lambda rank: by_rank[rank][kind])
        held = Fraction(by_rank[rank][kind])
        found = whole / max(held, Fraction(1)) if name == "ratio" else held
        expected = evaluate(wanted[name], evidence.facts)
        if (error := abs(found - expected)) > within * expected:
            about = f"expected {_text(expected)} ({wanted[name]}), measured {_text(found)}"
            margin = f"; tolerance {float(within):g} of it" if within else ""
            message = f"expect.memory.{name}: {about} on rank {rank} in step {step}{margin}"
            return message, Worst(name, step, "after_update", f"rank {rank}", float(error), 0.0)
    return None


def _held(record: RankRecord, step: int) -> dict[str, int]:
    """Bytes of one rank's device by the names that a scenario may use."""
    rows = [row for row in record.memory if row.step == step and row.device != "file"]
    marked = [row for row in rows if (row.moment, row.where) == ("mark", "after_update")]
    held = {kind: sum(row.bytes for row in marked if row.kind == kind) for kind in JUDGED}
    held["state"] = sum(held.values())
    for name, kind in (("activations", "activations"), ("peak", "all")):
        peaks = [row.bytes for row in rows if (row.moment, row.kind) == ("peak", kind)]
        held[name] = max(peaks, default=0)
    return held


def _text(value: Fraction) -> str:
    return f"{value.numerator:,}" if value.denominator == 1 else f"{float(value):,.4g} ({value})"

"""Of which moment a gathered state is, and of what an evaluation is the loss."""

from __future__ import annotations

from shardproof.checks.causes.losses import of_evaluation
from shardproof.evidence.assembled import Evidence

__all__ = ["of_evaluation", "of_full_state"]


def of_full_state(evidence: Evidence, name: str, digest: str) -> str:
    """When the system held what it gathered of the parameter ``name``; empty: never."""
    for row in evidence.tensors:
        if (row.kind, row.name, row.digest) == ("parameters", name, digest):
            when = "after setup" if row.step < 0 else f"after step {row.step}"
            return f"it is what was held {when}"
    return ""

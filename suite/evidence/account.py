"""The account of a case: all that its verdict is made of, as plain data without tensors.

A leader writes it, the run's records keep it (``runs.records``), and ``cases.verdict``
makes the verdict from it, when the case ran and whenever the run is verified.  Whole tensors are
kept only where a check failed: the copies of the tensor that it names, and the oracle's.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardproof.case import Case
from shardproof.launch.outcome import RankOutcome
from shardproof.registry.declaration import Declaration

if TYPE_CHECKING:
    from torch import Tensor

    from shardproof.evidence.assembled import Evidence, Figures

#: A failing tensor with more bytes than this is not kept whole.
WHOLE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class LeaderEnd:
    """How a judging process ended that left nothing else."""

    exit_code: int | None
    signal: int | None
    timed_out: bool
    seconds: float
    output: str


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A copy of a tensor that a failing check names; ``owner``: a replica, or the oracle.

    ``data``: its bytes in base64.
    """

    step: int
    point: str
    kind: str
    name: str
    owner: str
    dtype: str
    shape: list[int]
    data: str


@dataclass
class Account:
    """What became of one case.  Empty texts and ``None``: it did not come to that.

    ``broken``: the implementation could not be loaded; ``refused``: it declined the options, as
    ``[error type, message]``; ``cannot_fit``: why what it declares cannot be done to this model, or
    on this mesh; ``unsound_schedules``: what is wrong with the schedules that it declares, by
    size of the window; ``missing``: which backend or package this machine lacks;
    ``no_oracle_because``: why no oracle can tell what is true here; ``fault``: the judge itself
    failed; ``leader``: how the judging process ended that left nothing else.
    """

    case: Case
    declaration: Declaration | None = None
    broken: str = ""
    refused: list[str] | None = None
    cannot_fit: str = ""
    unsound_schedules: dict[str, list[str]] = field(default_factory=dict)
    missing: str = ""
    no_oracle_because: str = ""
    fault: str = ""
    leader: LeaderEnd | None = None
    outcomes: list[RankOutcome] = field(default_factory=list)
    figures: dict[str, Any] | None = None
    whole: list[WholeTensor] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    data_digest: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; :meth:`from_dict` is its inverse."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        declared = None if self.declaration is None else self.declaration.to_dict()
        return fields | {
            "case": self.case.to_dict(),
            "declaration": declared,
            "leader": None if self.leader is None else dataclasses.asdict(self.leader),
            # The file of a rank's record is gone when the case is over.
            "outcomes": [dataclasses.asdict(end) | {"record": None} for end in self.outcomes],
            "whole": [dataclasses.asdict(tensor) for tensor in self.whole],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Account:
        """The account that :meth:`to_dict` described."""
        fields = {**data, "case": Case.from_dict(data["case"])}
        declared = fields.pop("claims", None) or fields.get("declaration")  # the name in older runs
        fields["declaration"] = None if declared is None else Declaration.from_dict(declared)
        if data.get("leader") is not None:
            fields["leader"] = LeaderEnd(**data["leader"])
        fields["outcomes"] = [RankOutcome(**end) for end in data.get("outcomes", ())]
        fields["whole"] = [WholeTensor(**tensor) for tensor in data.get("whole", ())]
        return cls(**fields)


def restore(case: Case, data: Mapping[str, Any]) -> Figures:
    """Figures as :meth:`~shardproof.evidence.assembled.Figures.to_dict` left them."""
    from shardproof.evidence.assembled import StoredFigures

    return StoredFigures.from_dict(case, data)


# ------------------------------------------------------------------------------ whole tensors


def whole_tensors(evidence: Evidence, worst: Mapping[str, Any]) -> list[WholeTensor]:
    """Every copy, and the oracle's, of the tensor that a failing check names."""
    place = _place(worst["step"], worst["phase"])
    if place is None:
        return []
    step, point, kind = place
    name = worst["name"].removesuffix(" (zero slice)")
    state = evidence.final(kind) if point == "final" else evidence.observed(step, point, kind)
    copies: dict[str, Tensor] = {
        f"replica {replica}": tensor for replica, tensor in state.tensors.get(name, {}).items()
    }
    truth = _truth(evidence.truth, step, point, kind).get(name)
    if truth is not None and not worst["phase"].startswith("replayed"):
        copies["oracle"] = truth
    from shardproof import tensor_bytes

    return [
        WholeTensor(
            step,
            point,
            kind,
            name,
            owner,
            tensor_bytes.dtype_name(tensor),
            list(tensor.shape),
            base64.b64encode(tensor_bytes.raw(tensor)).decode(),
        )
        for owner, tensor in copies.items()
        if tensor.numel() * tensor.element_size() <= WHOLE_BYTES
    ]


def _place(step: int, phase: str) -> tuple[int, str, str] | None:
    """Where the tensors of a check's ``phase`` were observed; ``None``: it is about a number."""
    if step < 0:
        return -1, "initial", "parameters"
    if phase in ("gradients_final", "after_clip"):
        return step, phase, "gradients"
    if phase.startswith("drained "):
        return step, "final", phase.split()[-1]
    kind = phase.split()[-1]
    if kind in ("parameters", "optimizer", "buffers"):
        return step, "after_update", kind
    return None


def _truth(oracle: Mapping[str, Any], step: int, point: str, kind: str) -> Mapping[str, Any]:
    if point == "initial":
        found = oracle.get("initial")
    elif point == "final":
        found = oracle.get("final")
    elif kind == "buffers" or step >= len(oracle.get("steps", ())):
        found = None
    else:
        found = oracle["steps"][step].get("clipped" if point == "after_clip" else kind)
    return found or {}

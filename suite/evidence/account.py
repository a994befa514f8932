"""The account of a case: all that its verdict is made of, as plain data without tensors.

A leader writes it, the run's records keep it (``runs.records``), and ``cases.verdict``
makes the verdict from it, when the case ran and whenever the run is verified.  Whole tensors are
kept only where a check failed: the copies of the tensor that it names, and the oracle's.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from shardproof import tensor_bytes
from shardproof.case import Case
from shardproof.evidence.assembled import Evidence, Figures, StoredFigures
from shardproof.files import Form, Stored
from shardproof.launch.outcome import RankOutcome
from shardproof.oracle.truth import Tensors, Truth
from shardproof.registry.declaration import Declaration

#: A failing tensor with more bytes than this is not kept whole.
WHOLE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class LeaderEnd:
    """How a judging process ended that left no result."""

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


#: Figures are written and read by :class:`Account` itself, since reading them takes the case.
_APART = Form(lambda figures: figures, lambda figures: None)


@dataclass
class Account(Stored):
    """The outcome of one case. Empty texts and ``None``: that point was not reached.

    ``broken``: the implementation could not be loaded; ``refused``: it declined the options, as
    ``[error type, message]``; ``cannot_fit``: why what it declares cannot be done to this model, or
    on this mesh; ``unsound_schedules``: what is wrong with the schedules that it declares, by
    size of the window; ``missing``: which backend or package this machine lacks;
    ``no_oracle_because``: why no oracle can tell what is true here; ``fault``: the judge itself
    failed; ``leader``: how the judging process ended that left nothing else; ``machine``: what of
    this machine, not of the system, broke the case.
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
    machine: str = ""
    leader: LeaderEnd | None = None
    outcomes: list[RankOutcome] = field(default_factory=list)
    figures: Annotated[Figures | None, _APART] = None
    whole: list[WholeTensor] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    data_digest: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The stored form, without tensors; :meth:`from_dict` reads it."""
        data = super().to_dict()
        data["figures"] = None if self.figures is None else self.figures.to_dict()
        for outcome in data["outcomes"]:
            outcome["record"] = None  # the file of a rank's record is gone when the case is over
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Account:
        """The account that :meth:`to_dict` described."""
        fields = {**data}
        figures = fields.pop("figures", None)
        account = super().from_dict(fields)
        if figures is not None:
            account.figures = StoredFigures.from_dict(account.case, figures)
        return account


# ------------------------------------------------------------------------------ whole tensors


def whole_tensors(evidence: Evidence, step: int, phase: str, name: str) -> list[WholeTensor]:
    """Every copy, and the oracle's, of the tensor that a failing check names."""
    if (place := _place(step, phase)) is None:
        return []
    step, point, kind = place
    name = name.removesuffix(" (zero slice)")
    state = evidence.final(kind) if point == "final" else evidence.observed(step, point, kind)
    copies = {f"replica {replica}": t for replica, t in state.tensors.get(name, {}).items()}
    truth = _truth(evidence.truth, step, point, kind).get(name)
    if truth is not None and not phase.startswith("replayed"):
        copies["oracle"] = truth
    small = {o: t for o, t in copies.items() if t.numel() * t.element_size() <= WHOLE_BYTES}
    make = partial(WholeTensor, step, point, kind, name)
    dtype_name, raw = tensor_bytes.dtype_name, tensor_bytes.raw
    return [
        make(owner, dtype_name(t), list(t.shape), base64.b64encode(raw(t)).decode())
        for owner, t in small.items()
    ]


def _place(step: int, phase: str) -> tuple[int, str, str] | None:
    """Where the tensors of a check's ``phase`` were observed; ``None``: it is about a number."""
    if step < 0:
        return -1, "initial", phase.split()[-1]
    if phase in ("gradients_final", "after_clip"):
        return step, phase, "gradients"
    if phase.startswith("drained "):
        return step, "final", phase.split()[-1]
    kind = phase.split()[-1]
    known = kind in ("parameters", "optimizer", "buffers", "extra")
    return (step, "after_update", kind) if known else None


def _truth(truth: Truth, step: int, point: str, kind: str) -> Tensors:
    """The oracle's tensors of that moment; empty: it has none."""
    if kind == "buffers":
        return {}
    if point in ("initial", "final"):
        return truth.initial if point == "initial" else truth.final
    if kind == "extra" or step >= len(truth.steps):
        return {}
    shown = "clipped" if point == "after_clip" else kind
    tensors: Tensors | None = getattr(truth.steps[step], shown)
    return tensors or {}

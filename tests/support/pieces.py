"""Pieces that travelled from a rank to a test as plain data, put together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardproof.contract import Batch, Implementation, Kind, Piece
from shardproof.evidence.assembled import Assembled, assemble
from shardproof.workloads import Workload

#: Fields of pieces.
Rows = list[dict[str, Any]]


def rows(pieces: Iterable[Piece]) -> Rows:
    """``pieces`` as the judge wants them, with copies of their tensors."""
    return [vars(piece) | {"tensor": piece.tensor.detach().clone()} for piece in pieces]


def held_in_a_step(system: Implementation, batch: Batch) -> dict[str, Rows]:
    """Gradients once they are final, parameters and optimizer state after the step on ``batch``."""
    seen: dict[str, Rows] = {}

    def observe(point: str) -> None:
        if point == "gradients_final":
            seen["gradients"] = rows(system.local_state("gradients"))

    system.step(batch, observe)
    kinds: tuple[Kind, ...] = ("parameters", "optimizer")
    return seen | {kind: rows(system.local_state(kind)) for kind in kinds}


def complete(work: Workload, ranks: Sequence[Mapping[str, Rows]]) -> dict[str, Assembled]:
    """What ``ranks`` held, by kind: all that AdamW trains of ``work``, nothing more or less."""
    model = work.build_for(0)("meta")
    names = {n for n, _ in model.named_parameters()}
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    wanted = {
        "parameters": names,
        "gradients": trained,
        "optimizer": {f"{n}.{s}" for n in trained for s in ("step", "exp_avg", "exp_avg_sq")},
    }
    whole = {kind: assembled(dict(enumerate(rank[kind] for rank in ranks))) for kind in wanted}
    for kind, expected in wanted.items():
        assert whole[kind].problems == []
        assert set(whole[kind].tensors) == expected
    return whole


def whole_tensors(
    per_rank: Mapping[int, Iterable[Mapping[str, Any]]], names: Collection[str]
) -> dict[str, Tensor]:
    """The tensors of all ranks, put together: those of ``names``, copies equal bit for bit."""
    state = assembled(per_rank)
    assert not state.problems, state.problems
    assert set(state.tensors) == set(names)
    for name, copies in state.tensors.items():
        for copy in copies.values():
            assert torch.equal(copy, copies[0]), f"{name}: copies differ"
    return {name: copies[0] for name, copies in state.tensors.items()}


def assembled(per_rank: Mapping[int, Iterable[Mapping[str, Any]]]) -> Assembled:
    """``per_rank[rank]`` lists the fields of that rank's pieces."""
    return assemble({rank: [Piece(**row) for row in rows] for rank, rows in per_rank.items()})

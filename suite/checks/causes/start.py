"""Where wrong initial parameters come from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardproof.checks.causes import fits
from shardproof.checks.causes.fits import Tensors, some
from shardproof.checks.causes.gradients import same_elements
from shardproof.checks.causes.words import number
from shardproof.checks.one_update import Update
from shardproof.contract import Piece
from shardproof.evidence.assembled import Assembled, Evidence
from shardproof.evidence.held import part
from shardproof.workloads import for_case


def of_start(evidence: Evidence, state: Assembled, truth: Tensors) -> str:
    """A sentence on parameters after ``setup``; empty: nothing explains them."""
    wrong: dict[int, list[Piece]] = {}
    places: dict[str, list[tuple[int, Piece]]] = {}
    for rank, own in fits.pieces(evidence, -1, "", "parameters"):
        for piece in own:
            if piece.name in truth and piece.tensor.numel():
                places.setdefault(piece.name, []).append((rank, piece))
                if not _same(piece.tensor, part(piece, truth[piece.name])):
                    wrong.setdefault(rank, []).append(piece)
    if wrong and _is_updated(evidence, wrong):
        return "an update with gradients of zero was made before the first step"
    for rank, bad in wrong.items():
        names = list(dict.fromkeys(piece.name for piece in bad))
        # Rank 0 is asked once: its own builder is that of rank 0.
        for source in dict.fromkeys((rank, 0)):
            built = _built(evidence, source)
            if all(_same(p.tensor, part(p, built[p.name])) for p in bad):
                who = "itself" if source == rank else f"on rank {source}"
                return (
                    f"rank {rank} starts {some(names)} from the values that were built {who}, "
                    "not from those given"
                )
        for other, there in places[names[0]]:
            if all(
                any(
                    _same(p.tensor, part(q, truth[p.name]))
                    for r, q in places[p.name]
                    if r == other and (q.slices, q.flat_range) != (p.slices, p.flat_range)
                )
                for p in bad
            ) and (there.slices, there.flat_range) != (bad[0].slices, bad[0].flat_range):
                return f"rank {rank} starts {some(names)} from rank {other}'s part"
        if all(same_elements(p.tensor, part(p, truth[p.name])) for p in bad):
            return f"rank {rank} starts with the right elements of {some(names)} in another order"
        held = {str(n): p.tensor for n, p in enumerate(bad)}
        want = {str(n): part(p, truth[p.name]) for n, p in enumerate(bad)}
        times = fits.multiple(held, want, fits.limit_of(evidence))
        if times is not None and times != 1:
            return f"rank {rank} starts {some(names)} from {number(times)} times the values given"
    whole = {n: t for n, t in state.first().items() if n in truth and t.shape == truth[n].shape}
    moved = [n for n, t in whole.items() if not _same(t, truth[n]) and same_elements(t, truth[n])]
    return f"the right elements in another order: {some(moved)}" if moved else ""


def _is_updated(evidence: Evidence, wrong: Mapping[int, list[Piece]]) -> bool:
    """Whether all elements are those given, or those that weight decay alone makes of them."""
    workload, spec = for_case(evidence.case), evidence.case.optimizer
    given = {n: t for n, t in workload.state().items() if n in workload.shapes}
    # With gradients of zero weight decay still moves parameters.
    zeros = {n: torch.zeros_like(given[n]) for n in workload.trainable_names}
    made = Update(spec, 0, tuple(zeros), given, zeros, {}).make().parameters
    for piece in (p for own in wrong.values() for p in own):
        held, old, new = piece.tensor, part(piece, given[piece.name]), made[piece.name]
        if not bool(((held == old) | (held == part(piece, new))).all()):
            return False
    return True


def _built(evidence: Evidence, rank: int) -> dict[str, Tensor]:
    """Parameters as the builder of ``rank`` made them."""
    coordinate = evidence.data_coordinate.get(rank, 0)
    module = for_case(evidence.case).build_for(rank, coordinate)()
    return {name: p.detach() for name, p in module.named_parameters()}


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one.double() == other.double()).all())

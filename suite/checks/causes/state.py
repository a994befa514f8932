"""Where wrong state comes from: initial parameters, and what a load or a fresh instance lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from shardproof.backends.errors import name_ranks
from shardproof.checks.causes import fits
from shardproof.checks.causes.fits import Tensors, same_elements, some
from shardproof.checks.causes.updates import of_meeting
from shardproof.checks.numbers import bitwise
from shardproof.checks.one_update import MASTER, Update
from shardproof.checks.two_runs import both
from shardproof.contract import Kind, Piece
from shardproof.evidence.assembled import Assembled, CoordinateEvidence, Evidence
from shardproof.evidence.held import part
from shardproof.tensor_bytes import dtype_name
from shardproof.workloads import for_case

#: Names of wrong tensors, and what they should be and are: one copy of each.
Wrong = Mapping[str, tuple[Tensor, Tensor]]
#: Where each kind of state is named: what it is called, and which of its tensors these are.
NOUNS: Mapping[str, Sequence[tuple[str, Callable[[str], bool]]]] = {
    "parameters": [("parameters", lambda slot: True)],
    "optimizer": [
        ("step counters", lambda slot: slot == "step"),
        ("masters", lambda slot: slot == MASTER),
        ("optimizer state", lambda slot: slot not in ("step", MASTER)),
    ],
    "buffers": [("buffers", lambda slot: True)],
    "extra": [("further state", lambda slot: True)],
}


# ----------------------------------------------------------------------------------- after set-up


def initial(evidence: Evidence, kind: Kind, truth: Tensors) -> Iterator[tuple[int, Piece, Tensor]]:
    """The state of ``kind`` on each rank after ``setup``: its piece, and the right one.

    Where each step begins with the buffers of rank 0, only those of its data coordinate count.
    """
    is_sent = kind == "buffers" and evidence.declaration.buffers == "rank0"
    for rank, own in fits.pieces(evidence, -1, "", kind):
        if not (is_sent and evidence.data_coordinate.get(rank)):
            for piece in (p for p in own if p.name in truth and p.tensor.numel()):
                # Mixed precision may hold it in another dtype than it is built in.
                yield rank, piece, part(piece, truth[piece.name]).to(piece.tensor.dtype)


def of_buffers_at_start(evidence: Evidence) -> str:
    """A sentence that names initial buffers that are not those given; empty: all are."""
    wrong: dict[str, list[int]] = {}
    for rank, piece, want in initial(evidence, "buffers", for_case(evidence.case).state()):
        if not bitwise(piece.tensor, want).ok:
            wrong.setdefault(piece.name, []).append(rank)
    ranks = sorted({rank for own in wrong.values() for rank in own})
    them = "is not the initial value" if len(wrong) == 1 else "are not the initial values"
    return f"the buffer {some([*wrong])} on {name_ranks(ranks)} {them}" if wrong else ""


def _not_given(evidence: Evidence, rank: int) -> str:
    """The remedy for a rank that ``setup`` gave no state: the declaration says it is broadcast."""
    if rank == 0 or evidence.declaration.initial_state == "everywhere":
        return ""
    return (
        " (setup gives them to rank 0 alone: broadcast them, or declare "
        "Capabilities(initial_state='everywhere'))"
    )


def of_start(
    evidence: Evidence, state: Assembled, truth: Tensors, kind: Kind = "parameters"
) -> str:
    """A sentence on what is held of ``kind`` after ``setup``; empty: nothing explains it."""
    wrong: dict[int, list[Piece]] = {}
    places: dict[str, list[tuple[int, Piece]]] = {}
    for rank, piece, given in initial(evidence, kind, truth):
        places.setdefault(piece.name, []).append((rank, piece))
        if not bitwise(piece.tensor, given).ok:
            wrong.setdefault(rank, []).append(piece)
    if wrong and kind == "parameters" and _is_updated(evidence, wrong):
        return "an update with gradients of zero was made before the first step"
    for rank, bad in wrong.items():
        names = list(dict.fromkeys(piece.name for piece in bad))
        # Rank 0 is asked once: its own builder is that of rank 0.
        for source in dict.fromkeys((rank, 0)):
            built = _built(evidence, source)
            if all(p.name in built and fits.same(p.tensor, part(p, built[p.name])) for p in bad):
                who = "itself" if source == rank else f"on rank {source}"
                built_by = f"the values that were built {who}"
                started = f"rank {rank} starts {some(names)} from {built_by}, not from those given"
                return started + _not_given(evidence, rank)
        for other, there in places[names[0]]:
            if all(
                any(
                    fits.same(p.tensor, part(q, truth[p.name]))
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
            factor = fits.number(times)
            return f"rank {rank} starts {some(names)} from {factor} times the values given"
    whole = {n: t for n, t in state.first().items() if n in truth and t.shape == truth[n].shape}
    wrong_ones = {n: t for n, t in whole.items() if not fits.same(t, truth[n])}
    moved = [n for n, tensor in wrong_ones.items() if same_elements(tensor, truth[n])]
    return f"the right elements in another order: {some(moved)}" if moved else ""


def _is_updated(evidence: Evidence, wrong: Mapping[int, list[Piece]]) -> bool:
    """Whether all elements are those given, or those that weight decay alone makes of them."""
    workload, spec = for_case(evidence.case), evidence.case.optimizer
    given = {n: t for n, t in workload.state().items() if n in workload.shapes}
    # With gradients of zero weight decay still moves parameters.
    zeros = {n: torch.zeros_like(given[n]) for n in workload.trainable_names}
    made = Update(spec, 0, tuple(zeros), given, zeros, {}).make().parameters
    for piece in (p for own in wrong.values() for p in own):
        held, old, new = piece.tensor, *(part(piece, each[piece.name]) for each in (given, made))
        if not bool(((held == old) | (held == new)).all()):
            return False
    return True


def _built(evidence: Evidence, rank: int) -> dict[str, Tensor]:
    """Parameters and buffers as the builder of ``rank`` made them."""
    coordinate = evidence.data_coordinate.get(rank, 0)
    module = for_case(evidence.case).build_for(rank, coordinate)()
    named = chain(module.named_parameters(), module.named_buffers())
    return {name: tensor.detach() for name, tensor in named}


# ----------------------------------------------------------------------------------- after a load


@dataclass(frozen=True)
class Load:
    """The state of ``kind`` in a checkpoint, and after the load.

    ``moments``: what the run that saved held at other times, by the steps that were done then.
    ``before``: what the fresh system was set up from (optimizers: nothing).  ``wrong``: gets the
    names of all that is not what was saved.
    """

    kind: str
    steps_done: int
    saved: Assembled
    held: Assembled
    before: Mapping[str, Tensor]
    moments: Mapping[int, Mapping[str, Tensor]]
    wrong: list[str] = field(default_factory=list)


def moments_of(base: Evidence, kind: str, but: int) -> dict[int, Mapping[str, Tensor]]:
    """The state of ``kind`` in ``base`` by the number of steps done, except ``but``."""
    return {
        step + 1: base.observed(step, "after_update", kind).first()
        for step in base.steps
        if step + 1 != but and base.has(step, "after_update")
    }


def of_load(load: Load) -> str:
    """One sentence for each sort of state that is not what was saved; empty: all of it is."""
    found = []
    for noun, belongs in NOUNS[load.kind]:
        names = [name for name in load.saved.tensors if belongs(name.rpartition(".")[2])]
        if told := _of_sort(load, noun, names):
            found.append(told)
    if extra := [name for name in load.held.tensors if name not in load.saved.tensors]:
        found.append(f"after the load there is {some(extra)}, which was not saved")
    return "; ".join(found)


def _of_sort(load: Load, noun: str, names: Sequence[str]) -> str:
    saved, held = load.saved.tensors, load.held.tensors
    was = "was" if noun.endswith("state") else "were"
    missing = [name for name in names if name not in held]
    load.wrong.extend(missing)
    if missing and len(missing) == len(names):
        return f"{noun} {was} not loaded: there is none"
    if missing:
        return f"{noun}: {some(missing)} {'is' if len(missing) == 1 else 'are'} not there"
    for name in names:
        want, have = (copies[min(copies)] for copies in (saved[name], held[name]))
        if (want.dtype, want.shape) != (have.dtype, have.shape):
            was_saved, there = (f"{dtype_name(t)} {list(t.shape)}" for t in (want, have))
            return f"{noun}: {name!r} was saved as {was_saved} and is {there} after the load"
    wrong: dict[str, tuple[Tensor, Tensor]] = {}
    of_copies: dict[int, set[str]] = {}
    of_all: dict[int, set[str]] = {}
    right: set[int] = set()
    for name in names:
        pairs = {n: (want, have) for n, want, have in both(saved[name], held[name])}
        odd = [n for n, pair in pairs.items() if not bitwise(*pair).ok]
        for n in pairs:
            of_all.setdefault(n, set()).add(name)
        for n in odd:
            of_copies.setdefault(n, set()).add(name)
        if odd:
            wrong[name] = pairs[min(odd)]
            right |= pairs.keys() - odd
    if not wrong:
        return ""
    load.wrong.extend(wrong)
    where = ""
    if right - of_copies.keys():
        which = ", ".join(map(str, sorted(of_copies)))
        where = f" on {'replica' if len(of_copies) == 1 else 'replicas'} {which} only"
    elif pattern := fits.of_others(of_copies, of_all):
        where = f" {pattern}"
    every = len(wrong) == len(names)
    them = noun if every else f"{len(wrong)} of {len(names)} {noun}"
    why = _why(load, noun, wrong)
    those = "" if every or (len(wrong) == 1 and "'" in why) else f" ({some([*wrong])})"
    return f"{them} {was} not loaded{where}: {why}{those}"


def _why(load: Load, noun: str, wrong: Wrong) -> str:
    """The origin of wrong tensors, which are not the saved ones."""
    they = "it is" if noun.endswith("state") else "they are"

    def is_now(tensors: Mapping[str, Tensor]) -> bool:
        return all(n in tensors and bitwise(now, tensors[n]).ok for n, (_, now) in wrong.items())

    if is_now(load.before):
        return f"{they} as the fresh system was set up"
    if all(not bool(now.any()) for _, now in wrong.values()):
        if noun == "step counters":
            return f"they count from 0, not from {load.steps_done}"
        return f"{they} zero"
    # A save that another thread writes late holds the state of a later step.
    for done, moment in load.moments.items():
        if is_now(moment):
            return f"{they} of step {done}, and the checkpoint is of step {load.steps_done}"
    for number in sorted({n for copies in load.saved.tensors.values() for n in copies}):
        if is_now({n: own[number] for n, own in load.saved.tensors.items() if number in own}):
            return f"{they} those of replica {number}"
    name, (want, now) = next(iter(wrong.items()))
    for other, tensor in load.saved.first().items():
        if other != name and tensor.numel() > 1 and bitwise(tensor, now).ok:
            return f"{name!r} has the elements of {other!r}"
    odd = bitwise(now, want).error
    return f"{odd:.0f} of {want.numel()} elements of {name!r} differ"


#: Of generators: digests by rank and name.
Draws = Sequence[Mapping[str, str]]


def of_draws(saved: Draws, held: Draws, before: Draws) -> str:
    """A sentence on generators; empty: all are as when saved."""
    for rank, (was, now) in enumerate(zip(saved, held, strict=True)):
        for name, digest in was.items():
            if now.get(name, digest) == digest:
                continue
            which = f"the RNG of rank {rank} ({name})"
            owner = next((r for r, own in enumerate(saved) if own.get(name) == now[name]), None)
            if owner is not None:
                return f"{which} is that of rank {owner}"
            if before[rank].get(name) == now[name]:
                return f"{which} was not loaded: it is as after set-up"
            return f"{which} differs from its state at the save"
    return ""


# --------------------------------------------------------------------------------- after a reload


def of_reload(base: Evidence, reloaded: Evidence, step: int) -> str:
    """A sentence on ``step``, the first after the reload; empty: nothing is certain.

    ``base`` went on without one, and up to this step the two runs were equal.  Each sentence tells
    why parameters are others after the update: where they are not, only something else was lost
    (buffers), and there is none.  Where gradients and optimizer state have the bits of ``base`` and
    parameters do not, the update added the same to something else.
    """
    updated = [run.observed(step, "after_update", "parameters") for run in (base, reloaded)]
    if any(state.problems for state in updated) or _equal(*updated):
        return ""
    gradients = [run.observed(step, "gradients_final", "gradients") for run in (base, reloaded)]
    slots = [run.observed(step, "after_update", "optimizer") for run in (base, reloaded)]
    if any(state.problems for state in (*gradients, *slots)):
        return ""
    if not _equal(*gradients):
        return "the gradients of the first step after the reload differ, before any update"
    # Masters are copies of parameters.
    here, there = (
        {n: t for n, t in state.first().items() if not n.endswith(".master")} for state in slots
    )
    counters = {n: (here[n], there[n]) for n in here if n.endswith(".step") and n in there}
    counted = {(float(was.max()), float(now.max())) for was, now in counters.values()}
    # After one step a fresh counter is 1, whatever the other run counted.
    anew = bool(counted) and all(now == 1.0 < was for was, now in counted)
    others = [name for name in here if not name.endswith(".step")]
    same = [name for name in others if name in there and torch.equal(here[name], there[name])]
    if anew and len(same) == len(others):
        was, now = next(iter(counted))
        return f"the step counter started again: {now:g} after the reload, {was:g} without one"
    begin = (_begins_with(gradients[1], of, base.case.optimizer.betas[0]) for of in (here, there))
    if (anew or not counters) and [*begin] == [False, True]:
        return "the optimizer state was not loaded: it starts again with the gradients of this step"
    # Parameters of ranks that train alone are moved by meetings as well as by updates.
    if met := next(filter(None, (of_meeting(own, step) for own in _alone(base, reloaded))), ""):
        return met
    alike = here.keys() == there.keys() and all(was == now for was, now in counted)
    if alike and others and len(same) == len(others):
        return (
            "gradients and optimizer state are equal, so the update started from values other "
            "than the loaded ones (masters, or another copy of parameters), or with another rate"
        )
    return ""


def _alone(base: Evidence, reloaded: Evidence) -> list[CoordinateEvidence]:
    """The state of a coordinate of ``reloaded`` that trains alone, by the oracle of ``base``."""
    judged = copy(reloaded)
    judged.truth, judged.meeting = base.truth, base.meeting
    judged.__dict__.pop("trajectories", None)  # of the oracle that it had before
    return [own for own in judged.trajectories if isinstance(own, CoordinateEvidence)]


def _equal(one: Assembled, other: Assembled) -> bool:
    """Whether both hold the same names and bits on every replica."""
    return one.tensors.keys() == other.tensors.keys() and all(
        torch.equal(copy, other.tensors[name][replica])
        for name, copies in one.tensors.items()
        for replica, copy in copies.items()
        if replica in other.tensors[name]
    )


def _begins_with(gradients: Assembled, slots: Tensors, beta: float) -> bool:
    """Whether every momentum, or first moment, is that of its gradient alone."""
    # AdamW begins from zero: (1 - beta) g.  torch's SGD takes the first gradient as it is.
    first = {".exp_avg": 1 - beta, ".momentum_buffer": 1.0}
    found = gradients.first()
    pairs = [
        (tensor, found[own] * share)
        for end, share in first.items()
        for name, tensor in slots.items()
        if name.endswith(end) and (own := name.removesuffix(end)) in found
    ]
    return bool(pairs) and all(
        torch.allclose(tensor, made.to(tensor.dtype), rtol=1e-5, atol=0.0) for tensor, made in pairs
    )


# ------------------------------------------------------------------------------- a gathered state


def of_full_state(evidence: Evidence, name: str, digest: str) -> str:
    """When the system held what it gathered of the parameter ``name``; empty: never."""
    for row in evidence.tensors:
        if (row.kind, row.name, row.digest) == ("parameters", name, digest):
            when = "after setup" if row.step < 0 else f"after step {row.step}"
            return f"it is the value held {when}"
    return ""

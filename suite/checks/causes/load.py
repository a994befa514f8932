"""What a load lost or mixed up, told from what is held right after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardproof.checks.causes.fits import some
from shardproof.checks.one_update import MASTER
from shardproof.checks.two_runs import both
from shardproof.evidence.assembled import Assembled, Evidence

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
}


@dataclass(frozen=True)
class Load:
    """What a checkpoint of ``kind`` held, and what is held after the load.

    ``moments``: what the run that saved held at other times, by the steps that were done then.
    ``before``: what the fresh system was set up from (optimizers: nothing).
    """

    kind: str
    steps_done: int
    saved: Assembled
    held: Assembled
    before: Mapping[str, Tensor]
    moments: Mapping[int, Mapping[str, Tensor]]


def moments_of(base: Evidence, kind: str, but: int) -> dict[int, Mapping[str, Tensor]]:
    """What ``base`` held of ``kind`` after its steps, by the number of steps done, ``but`` one."""
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
    extra = [name for name in load.held.tensors if name not in load.saved.tensors]
    if extra:
        found.append(f"after the load there is {some(extra)}, which was not saved")
    return "; ".join(found)


def _of_sort(load: Load, noun: str, names: Sequence[str]) -> str:
    saved, held = load.saved.tensors, load.held.tensors
    was = "was" if noun == "optimizer state" else "were"
    missing = [name for name in names if name not in held]
    if missing and len(missing) == len(names):
        return f"{noun} {was} not loaded: there is none"
    if missing:
        return f"{noun}: {some(missing)} {'is' if len(missing) == 1 else 'are'} not there"
    for name in names:
        want, have = _first(saved[name]), _first(held[name])
        if (want.dtype, want.shape) != (have.dtype, have.shape):
            was_saved, there = (f"{_dtype(t)} {list(t.shape)}" for t in (want, have))
            return f"{noun}: {name!r} was saved as {was_saved} and is {there} after the load"
    wrong: dict[str, tuple[Tensor, Tensor]] = {}
    copies: set[int] = set()
    right: set[int] = set()
    for name in names:
        same = {n: _alike(want, have) for n, want, have in both(saved[name], held[name])}
        if not all(same.values()):
            first = min(n for n, ok in same.items() if not ok)
            wrong[name] = next((w, h) for n, w, h in both(saved[name], held[name]) if n == first)
            copies |= {n for n, ok in same.items() if not ok}
            right |= {n for n, ok in same.items() if ok}
    if not wrong:
        return ""
    where = ""
    if right - copies:
        which = ", ".join(map(str, sorted(copies)))
        where = f" on {'replica' if len(copies) == 1 else 'replicas'} {which} only"
    every = len(wrong) == len(names)
    them = noun if every else f"{len(wrong)} of {len(names)} {noun}"
    return f"{them} {was} not loaded{where}: {_why(load, noun, wrong)}"


def _why(load: Load, noun: str, wrong: Wrong) -> str:
    """What the wrong tensors are in place of what was saved."""
    they = "it is" if noun == "optimizer state" else "they are"
    if all(
        name in load.before and _alike(load.before[name], now) for name, (_, now) in wrong.items()
    ):
        return f"{they} as the fresh system was set up"
    if all(not bool(now.any()) for _, now in wrong.values()):
        if noun == "step counters":
            return f"they count from 0, not from {load.steps_done}"
        return f"{they} zero"
    # A save that another thread writes late holds the state of a later step.
    for done, moment in load.moments.items():
        if all(name in moment and _alike(moment[name], now) for name, (_, now) in wrong.items()):
            return f"{they} of step {done}, and the checkpoint is of step {load.steps_done}"
    for number in sorted({n for copies in load.saved.tensors.values() for n in copies}):
        own = {name: load.saved.tensors[name].get(number) for name in wrong}
        if all(t is not None and _alike(t, wrong[name][1]) for name, t in own.items()):
            return f"{they} those of replica {number}"
    name, (_, now) = next(iter(wrong.items()))
    for other, tensor in load.saved.first().items():
        if other != name and tensor.numel() > 1 and _alike(tensor, now):
            return f"{name!r} has the elements of {other!r}"
    want = wrong[name][0]
    odd = int((~((want == now) | (want.isnan() & now.isnan()))).sum())
    return f"{odd} of {want.numel()} elements of {name!r} are others"


def of_draws(
    saved: Sequence[Mapping[str, str]],
    held: Sequence[Mapping[str, str]],
    before: Sequence[Mapping[str, str]],
) -> str:
    """A sentence on generators, from digests by rank and name; empty: all are as when saved."""
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
            return f"{which} is in another state than when it was saved"
    return ""


def _first(copies: Mapping[int, Tensor]) -> Tensor:
    return copies[min(copies)]


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether both have the same elements; NaN equals NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

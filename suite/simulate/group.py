"""A process group whose calls move nothing: one rank of any world runs by itself on fake tensors.

Tensors without values stay as they are.  Known integers that are exchanged, such as counts of rows
for experts, come back as if every rank had given this rank as much as it gives itself.  Tensors
with values carry control numbers, by which ranks decide together (``Comm.agree``).  Their results
use the numbers that the ranks simulated so far gave to the same call.  Any other rank is assumed
to give the same numbers as this one (:class:`Hearsay`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from shardproof.backends.backend import Backend, Joining
from shardproof.backends.base import GroupBase
from shardproof.backends.errors import CollectiveMismatch
from shardproof.backends.futures import OwnHandle, announce_delayed_reduction
from shardproof.backends.request import Request, check
from shardproof.ledgers.memory import installed
from shardproof.simulate.fakes.known import forget, tell

NAME = "sim"


#: A call of control numbers: the members of its group, and how many such calls came before it.
Place = tuple[tuple[int, ...], int]
#: Sender and receiver of a message of control numbers, and how many came before it.
Letter = tuple[int, int, int]
#: Operation, reduction and root of such a call.
_Kind = tuple[str, str | None, int]


#: Limit on equal numbers in a row from one rank, to calls that no other rank has made.
_MOST_ALONE = 100


class Hearsay:
    """Control numbers that simulated ranks gave to calls, and the answers that they got."""

    def __init__(self) -> None:
        self._said: dict[Place, dict[int, Tensor]] = {}
        self._answered: dict[tuple[Place, int], tuple[_Kind, Tensor]] = {}
        self._counts: dict[tuple[int, ...], int] = {}
        self._sent: dict[Letter, Tensor | None] = {}
        self._received: dict[Letter, Tensor] = {}
        #: Whether the rank got a message that its sender has not sent yet, or waits in vain.
        self.guessed = False
        #: How often a rank gave another number or message than in the round before.
        self.changes = 0
        self._alone = 0

    def begin(self) -> None:
        """Reset the counts, because another rank begins."""
        self._counts.clear()
        self.guessed, self._alone = False, 0

    def end(self, rank: int) -> None:
        """End global rank ``rank``: forget calls of its earlier run that it did not repeat."""
        for (place, own), _ in [*self._answered.items()]:
            members, number = place
            if members[own] == rank and number > self._counts.get(members, -1):
                del self._answered[place, own], self._said[place][own]
        for kept, end in ((self._sent, 0), (self._received, 1)):
            self._prune(kept, end, rank)

    def _prune(self, kept: dict[Letter, Any], end: int, rank: int) -> None:
        """Forget messages of ``rank``, which stands at place ``end`` of a letter."""
        for letter in [*kept]:
            sender, receiver, number = letter
            if letter[end] == rank and number > self._counts.get((sender, receiver, -1), -1):
                del kept[letter]

    def send(self, sender: int, receiver: int, own: Tensor | None) -> None:
        """Note the message ``own`` (``None``: its values are unknown); both are global ranks."""
        letter = self._letter(sender, receiver)
        self.changes += letter not in self._sent or not _equal(self._sent[letter], own)
        self._sent[letter] = None if own is None else own.clone()

    def receive(self, sender: int, receiver: int, blank: Tensor) -> Tensor | None:
        """The message of ``sender``, of the shape of ``blank``, or ``None`` if it is unknown.

        If the sender was not simulated, a message of another rank stands in for its own.
        """
        letter = self._letter(sender, receiver)
        shape, dtype = blank.shape, blank.dtype
        like = (
            own
            for own in self._sent.values()
            if own is not None and own.shape == shape and own.dtype == dtype
        )
        given = self._sent[letter] if letter in self._sent else next(like, None)
        self.guessed |= letter not in self._sent
        if given is None or given.shape != shape:
            self._received.pop(letter, None)
            return None
        self._received[letter] = given
        return given

    def _letter(self, sender: int, receiver: int) -> Letter:
        number = self._counts[sender, receiver, -1] = (
            self._counts.get((sender, receiver, -1), -1) + 1
        )
        return sender, receiver, number

    def answer(self, members: tuple[int, ...], rank: int, request: Request, own: Tensor) -> Tensor:
        """The result of ``request`` for ``members``, to which group rank ``rank`` gives ``own``."""
        number = self._counts[members] = self._counts.get(members, -1) + 1
        place = members, number
        said = self._said.setdefault(place, {})
        self._follow(members, number, rank, own)
        self.changes += rank not in said or not torch.equal(said[rank], own)
        said[rank] = own.clone()
        kind = request.operation, request.reduce, request.root or 0
        self._answered[place, rank] = kind, (given := self._combined(place, rank, kind))
        return given

    def _follow(self, members: tuple[int, ...], number: int, rank: int, own: Tensor) -> None:
        """Count how often in a row ``rank`` gives equal numbers, and no other rank gives any.

        :raises LookupError: the rank waits for others, which took part in earlier calls.
        """
        before = self._said.get((members, number - 1), {}).get(rank)
        others = self._said[members, number].keys() - {rank}
        is_same = before is not None and torch.equal(before, own) and not others
        self._alone = self._alone + 1 if is_same else 0
        if self._alone > _MOST_ALONE and self._said[members, 0].keys() - {rank}:
            self.guessed = True
            raise LookupError(f"rank {members[rank]} waits for ranks that have not answered yet")

    def _combined(self, place: Place, rank: int, kind: _Kind) -> Tensor:
        operation, reduce, root = kind
        said, size = self._said[place], len(place[0])
        own = said[rank]
        if operation == "broadcast":
            return said.get(root, own)
        # After a wrong answer a rank may have made another call at this place.
        alike = [words for words in said.values() if words.shape == own.shape]
        heard = torch.stack([*alike, *[own] * (size - len(alike))])
        if reduce == "sum":
            return heard.sum(0).to(own.dtype)
        return heard.amax(0) if reduce == "max" else heard.amin(0)

    def require_alike(self) -> None:
        """Raise if two ranks made different calls at one place: real ones would wait or fail.

        :raises CollectiveMismatch: they did.
        """
        calls = dict[Place, dict[tuple[Any, ...], int]]()
        for (place, rank), (kind, _) in self._answered.items():
            key = *kind, tuple(self._said[place][rank].shape)
            calls.setdefault(place, {}).setdefault(key, place[0][rank])
        for (_, number), made in calls.items():
            if len(made) > 1:
                (one, a), (other, b) = [*made.items()][:2]
                what = (
                    f"rank {a} calls {one[0]} of {one[-1]}, but rank {b} {other[0]} of {other[-1]}"
                )
                raise CollectiveMismatch(f"agreement {number} of a group: {what}")

    def unsettled(self) -> set[int]:
        """Global ranks with an answer or a message that later numbers of other ranks refute."""
        answers = {
            place[0][rank]
            for (place, rank), (kind, given) in self._answered.items()
            if not torch.equal(given, self._combined(place, rank, kind))
        }
        return answers | {
            receiver
            for (sender, receiver, number), given in self._received.items()
            if not _equal(self._sent.get((sender, receiver, number), given), given)
        }

    @property
    def is_settled(self) -> bool:
        """Whether each answer agrees with the numbers of all ranks simulated by now."""
        return not self.unsettled()


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


#: The answers of the simulation in progress.
hearsay = Hearsay()


class _Done(OwnHandle):
    """The handle of a call, which is over as soon as it is made."""

    def _settle(self, timeout: float | None) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Always."""
        return True


class SimulatedGroup(GroupBase):
    """The process group of the one rank that runs."""

    backend_name = NAME

    def _chunks(self, tensor: Tensor) -> Sequence[Tensor]:
        if not (isinstance(tensor, FakeTensor) and tensor.numel() and tensor.is_contiguous()):
            return super()._chunks(tensor)
        if tensor.numel() % self._size:
            return super()._chunks(tensor)  # raises the error
        # One view stands for all: thousands of them would cost more than the step.
        return [tensor.detach().view(self._size, -1)[0]] * self._size

    def _start(self, request: Request) -> OwnHandle:
        check(request, self._size, self._rank)
        tensors = (t for item in (*request.inputs, *request.outputs) for t in item)
        installed.communicated([t.twin for t in tensors if hasattr(t, "twin")])
        with unset_fake_temporarily(), torch.no_grad():
            self._pass_on(request)
            for given, received in zip(request.inputs, request.outputs, strict=False):
                if not any(isinstance(t, FakeTensor) for t in (*given, *received)):
                    self._answer(request, given, received)
            if request.operation != "recv":
                for tensor in (t for item in request.outputs for t in item):
                    forget(tensor)
            if request.method == "all_to_all_single":
                self._exchange(*request.args[:2])
        return _Done(request)

    def _exchange(self, output: Tensor, given: Tensor) -> None:
        """Fill ``output`` with the integers of all members, if those of this rank are known."""
        values = given.constant if isinstance(given, FakeTensor) else None
        if values is not None and output.shape == given.shape and not len(given) % self._size:
            own = values.view(self._size, -1)[self._rank]
            tell(output, own.repeat(self._size).view(output.shape))

    def _pass_on(self, request: Request) -> None:
        """Send or receive a message of integers; one without values needs no transfer.

        :raises LookupError: a control number comes from a rank that was not simulated yet.
        """
        items = request.inputs if request.operation == "send" else request.outputs
        if request.operation not in ("send", "recv") or request.peer is None:
            return
        own, peer = self.global_ranks[self._rank], self.global_ranks[request.peer]
        for tensor in (t for item in items for t in item if not t.is_floating_point()):
            values = tensor.constant if isinstance(tensor, FakeTensor) else tensor
            if request.operation == "send":
                hearsay.send(own, peer, values)
                continue
            heard = hearsay.receive(peer, own, tensor)
            if values is tensor:
                if heard is None:
                    raise LookupError(f"rank {own} waits for rank {peer}, not simulated yet")
                tensor.copy_(heard)
                continue
            forget(tensor)
            if heard is not None:
                tell(tensor, heard.clone())

    def _answer(
        self, request: Request, given: Sequence[Tensor], received: Sequence[Tensor]
    ) -> None:
        """Fill ``received`` from the simulated ranks, or as if all ranks had ``given``."""
        if request.operation in ("all_reduce", "broadcast"):
            (own,) = given
            own.copy_(hearsay.answer(self.global_ranks, self._rank, request, own))
            return
        for number, target in enumerate(received):
            target.copy_(given[min(number, len(given) - 1)])
            if request.reduce == "sum":
                target.mul_(self._size)

    def shutdown(self) -> None:
        """Nothing to release."""


def _create(options: Any, _: Any) -> SimulatedGroup:
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return SimulatedGroup(options.group_rank, len(ranks), options.timeout, ranks)


class Simulated(Backend):
    """One rank runs, on fake tensors; all other ranks of its world exist as numbers only."""

    name = NAME
    has_values = False
    exact_memory = True
    adds_in_rank_order = True
    takes_over = False
    hides_latency = False
    hides_because = "calls move nothing, so they take no time"

    def available(self, world: int = 1) -> str | None:
        """``None``: it needs torch only."""
        return None

    def join(self, joining: Joining) -> None:
        """Join as rank ``joining.rank`` of ``joining.world``; no other rank runs."""
        announce_delayed_reduction()
        if NAME.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        # No other rank would reach a barrier after the initialization.
        os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "0")
        dist.init_process_group(
            NAME,
            rank=joining.rank,
            world_size=joining.world,
            store=dist.HashStore(),
            timeout=timedelta(seconds=joining.timeout_s),
        )

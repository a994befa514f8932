"""Activations and gradients in transit between the stages of a pipeline.

Receives are posted into fresh buffers.  A sent tensor is kept until its receiver sends a message
that depends on it, or until the window ends.  Between two ranks messages arrive in
the order in which they are sent.

Only the sender knows the shape of an activation, which follows from the shape of the micro-batch's
inputs.  So its *form*, a few integers, goes ahead of the first activation that crosses a boundary
for inputs of some shape.  Both sides know when that is, because all ranks of a data coordinate have
the same micro-batches.  A gradient has the form of its activation.

Posting never blocks: a receive whose form is not known yet waits in a queue, and those behind it
with it, until somebody needs the message.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardproof import comm
from shardproof.comm import Comm
from shardproof.schedules import Action

#: A boundary (the stage before it) and the shape of a micro-batch's inputs.
Key = tuple[int, tuple[int, ...]]
Form = tuple[tuple[int, ...], torch.dtype]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: Most dimensions of an activation.
DIMENSIONS = 8


@dataclass
class Due:
    """A receive that is still to be posted."""

    receive: Action
    key: Key
    form: tuple[Any, Tensor] | None = None  # under way


class Messages:
    """This rank's side of the channels to the other ranks of ``comm``.

    A message is named by its receive (``RF3@1``: activations that stage 1 gets).
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.forms: dict[Key, Form] = {}
        self.due: dict[int, deque[Due]] = defaultdict(deque)
        self.posted: dict[Action, tuple[Any, Tensor]] = {}
        self.sent: dict[Action, list[tuple[Any, Tensor]]] = {}
        #: Received message -> the sent ones whose arrival it proves.
        self.proved: Mapping[Action, Sequence[Action]] = {}

    def send(self, message: Action, key: Key, tensor: Tensor, peer: int) -> None:
        """Start sending ``tensor``; its form is sent before the first activation of its kind."""
        tensor = tensor.detach().contiguous()
        going = [tensor]
        if message.op == "RF" and key not in self.forms:
            self.forms[key] = tuple(tensor.shape), tensor.dtype
            going.insert(0, self._encode(self.forms[key]))
        self.sent[message] = [(self.comm.send(t, peer, async_op=True), t) for t in going]
        # Nothing comes back in an evaluation, so completed sends are released here.  In training
        # that would make the memory of a rank depend on the speed of the others.
        for earlier, works in () if torch.is_grad_enabled() else list(self.sent.items()):
            if all(work.is_completed() for work, _ in works):
                self.arrived(earlier)

    def arrived(self, message: Action) -> None:
        """Release the tensor sent as ``message``, which has arrived."""
        for work, _ in self.sent.pop(message, ()):
            work.wait()

    def post(self, receive: Action, key: Key, peer: int) -> None:
        """Post the receive of a message if the forms of it and of the earlier ones are known."""
        self.due[peer].append(Due(receive, key))
        self._advance(peer)

    def take(self, receive: Action, peer: int) -> Tensor:
        """The message, after waiting for it."""
        if receive not in self.posted:
            self._advance(peer, receive)
        work, buffer = self.posted.pop(receive)
        work.wait()
        for message in self.proved.get(receive, ()):
            self.arrived(message)
        return buffer

    def finish(self) -> None:
        """Wait until all sent messages have arrived."""
        for message in list(self.sent):
            self.arrived(message)

    def _advance(self, peer: int, wanted: Action | None = None) -> None:
        """Post pending receives from ``peer``; wait for forms if ``wanted`` comes after them."""
        # In the order of the queue: between two ranks a receive matches the next send, whatever it
        # was meant for.
        queue = self.due[peer]
        while queue:
            due = queue[0]
            if due.key in self.forms:
                buffer = self.buffer(due.key)
                work = self.comm.recv(buffer, peer, async_op=True)
                self.posted[due.receive] = work, buffer
                queue.popleft()
                wanted = None if due.receive == wanted else wanted
                continue
            if due.receive.op == "RF" and due.form is None:
                buffer = self._blank()
                due.form = self.comm.recv(buffer, peer, async_op=True), buffer
            # A gradient's form is known once its activation's is; only a taker may wait for it.
            if wanted is None or due.form is None:
                return
            work, buffer = due.form
            work.wait()
            self.forms[due.key] = _decode(buffer)

    def buffer(self, key: Key) -> Tensor:
        """A new buffer: earlier received tensors may still be needed."""
        shape, dtype = self.forms[key]
        return torch.empty(shape, dtype=dtype, device=self.comm.device)

    def _blank(self) -> Tensor:
        return self._integers([])

    def _integers(self, values: list[int]) -> Tensor:
        padded = [*values, *[0] * (DIMENSIONS + 2 - len(values))]
        return comm.control(padded, dtype=torch.int64, device=self.comm.device)

    def _encode(self, form: Form) -> Tensor:
        """int64: number of the dtype, number of dimensions, their sizes, zeros."""
        shape, dtype = form
        if len(shape) > DIMENSIONS or dtype not in DTYPES:
            raise ValueError(
                f"a stage returned a tensor of {dtype} with {len(shape)} dimensions, but stages "
                f"can send only floating-point tensors of up to {DIMENSIONS} dimensions"
            )
        return self._integers([DTYPES.index(dtype), len(shape), *shape])


def _decode(encoded: Tensor) -> Form:
    number, dimensions, *sizes = encoded.tolist()
    return tuple(sizes[:dimensions]), DTYPES[number]

"""Activation checkpointing: a group of units keeps its input and is recomputed in backward.

Problem.  Backward needs what forward computed; kept for a whole model, these activations outweigh
the model's state.  A group of k units that keeps nothing but its input trades them for a second
forward (Chen et al., arXiv 1604.06174).

    forward    first unit     keep the input, the generators' states, copies of the buffers, and
                              which positions this is of
               every unit     whatever autograd wants to save is thrown away, only counted
    backward   first need     run the group again from its input; its n-th saved tensor is the n-th
                              thrown away; each is handed to autograd once and let go
    after it   as before      generators go on where they stood, buffers are those of forward

Only the first graph is ever differentiated, so gradient hooks fire once a backward, and a sharded
unit that is gathered when its recomputation begins is still gathered when its backward follows.
Forwards are wrapped, not modules: names, parameters and hooks stay, and hooks on a unit run in the
second forward, too (inside backward: that is how they can tell).

Numbers: the same operations on the same values, hence the same bits as without.
Cost: activations of L/k inputs and k units instead of L units; one more forward, no bytes sent.
Left out: dropout that draws from the global generator (rank threads share it, nobody may put its
state back), and second derivatives, both refused where a module tells; units that change tensors
of their input in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.dropout import _DropoutNd

from shardproof.contract import Refused
from shardproof.impls.reference.engine.state import refuse_second_derivatives
from shardproof.impls.reference.parts.nested import alike, mapped, tensors_in


def recompute_units(
    module: nn.Module, units: Sequence[str], every: int, call_type: type[Call] | None = None
) -> list[Group]:
    """Wrap the forwards of ``units`` (dotted names, in forward order), ``every`` units per group.

    0 leaves ``module`` as it is.  In a group each unit but the first is called with what the one
    before returned, and with nothing else.  :meth:`Group.close` gives the units their forwards
    back; where groups share units, the last group first.
    """
    if every > len(units):
        raise Refused(
            f"option 'recompute_every' = {every}: the model has {len(units)} units; valid: 0 "
            f"(never) to {len(units)}"
        )
    if every:
        refuse_second_derivatives(
            module,
            f"option 'recompute_every' = {every}",
            "a gradient that a forward takes cannot be recomputed",
            "set recompute_every to 0 (never)",
        )
    groups = []
    for start in range(0, len(units), every) if every else ():
        names = units[start : start + every]
        modules = [module.get_submodule(name) for name in names]
        groups.append(Group(names, modules, call_type or Call))
    return groups


class Group:
    """Consecutive units that are recomputed together."""

    def __init__(
        self, names: Sequence[str], units: Sequence[nn.Module], call_type: type[Call]
    ) -> None:
        self.names, self.units, self.call_type = names, units, call_type
        self.modules = [part for unit in units for part in unit.modules()]
        for name, unit in zip(names, units, strict=True):
            _refuse_global_draws(name, unit)
        values = [value for part in self.modules for value in vars(part).values()]
        self.generators = [value for value in values if isinstance(value, Generator)]
        spans = (vars(part).get("span") for part in self.modules)
        #: What the units know of the positions of a forward (``Build.__call__`` in contract.py).
        self.spans = [*{id(span): span for span in spans if span is not None}.values()]
        self.call: Call | None = None  # the forward under way
        self.again: Call | None = None  # the one that is being repeated
        self.chained = False  # whether outputs were seen to be the next unit's inputs
        #: Per unit the forward that was set on the module itself, if it was not its class's.
        self.own: list[Callable[..., Any] | None] = []
        for number, unit in enumerate(units):
            self.own.append(vars(unit).get("forward"))
            unit.forward = partial(self.forward, number, unit.forward)

    @property
    def title(self) -> str:
        """The units, for messages."""
        return " to ".join(dict.fromkeys((self.names[0], self.names[-1])))

    def close(self) -> None:
        """Restore the forwards of the units."""
        while self.own:
            # The last unit first: one that occurs twice gets back the forward that it had before
            # both.
            own, unit = self.own.pop(), self.units[len(self.own)]
            if own is None:
                del unit.forward
            else:
                unit.forward = own

    def forward(self, number: int, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Forward of unit ``number``, whose original forward is ``compute``."""
        # The second forward: what it would save is what the first graph asks for.
        if self.again is not None:
            with self.again.collecting():
                return compute(*args, **kwargs)
        # Nothing is saved without gradients, so nothing needs to be computed again.
        if not torch.is_grad_enabled():
            return compute(*args, **kwargs)
        if number == 0:
            self.call = self.call_type(self, args, kwargs)
        call = self.call
        if call is None or call.reached != number:
            expected = self.names[call.reached] if call else self.names[0]
            raise _refused(
                f"unit {self.names[number]!r} was called, but unit {expected!r} was expected: "
                "only units that run one after the other can be recomputed as one group; set "
                "recompute_every to 1"
            )
        # Of tensors one check is enough: it compares whole activations, and calls keep their order.
        if number and not (self.chained and isinstance(call.output, Tensor)):
            self.check_chain(number, call.output, args, kwargs)
        with call.forgetting():
            output = compute(*args, **kwargs)
        call.advance(output)
        if call.reached == len(self.units):
            self.call, self.chained = None, True
        return output

    def check_chain(self, number: int, output: Any, args: Any, kwargs: Any) -> None:
        """Raise unless unit ``number`` is called with ``output``, cast or not, as its only
        input.
        """
        if len(args) != 1 or kwargs or not alike(args[0], output, _cast):
            raise _refused(
                f"unit {self.names[number]!r} was not called with the output of "
                f"{self.names[number - 1]!r} as its only argument, so the two units cannot be "
                "recomputed as one group; set recompute_every to 1"
            )


class Call:
    """One forward of a group, with the state needed to repeat it."""

    def __init__(self, group: Group, args: Any, kwargs: Any) -> None:
        self.group = group
        self.given = mapped((args, kwargs), _apart, keep=False)
        # A version tells a change in place, after which a repetition would start from other values.
        self.inputs = [(t, t._version) for t in tensors_in(self.given)]
        self.draws = [generator.get_state() for generator in group.generators]
        self.positions = [dict(vars(span)) for span in group.spans]
        self.buffers = Buffers(group.modules)
        self.reached = 0
        self.output: Any = None
        self.saved: list[tuple[torch.Size, torch.dtype]] = []
        self.collected: list[Tensor | None] = []

    def advance(self, output: Any) -> None:
        """One more unit has run."""
        self.reached += 1
        is_last = self.reached == len(self.group.units)
        # Copied: the repetition hands on what was returned, not what a caller made of it.
        self.output = None if is_last else mapped(output, lambda tensor: tensor, keep=False)

    def forgetting(self) -> saved_tensors_hooks:
        """Give autograd a number for every tensor that it wants to save, and resolve the number
        later.
        """

        def pack(tensor: Tensor) -> int:
            self.saved.append((tensor.shape, tensor.dtype))
            return len(self.saved) - 1

        def unpack(number: int) -> Tensor:
            if not self.collected or self.collected[number] is None:
                self.repeat()
            # Handed over once and let go: memory falls as backward goes on.
            tensor, self.collected[number] = self.collected[number], None
            assert tensor is not None
            return tensor

        return saved_tensors_hooks(pack, unpack)

    def collecting(self) -> saved_tensors_hooks:
        """Collect the tensors that a second graph would save; they are those that the first
        lacks.
        """

        def pack(tensor: Tensor) -> None:
            self.collected.append(tensor.detach())

        def unpack(_: None) -> Tensor:
            raise _refused(
                f"the forward of {self.group.title} takes derivatives, so this forward cannot be "
                "recomputed; set recompute_every to 0"
            )

        return saved_tensors_hooks(pack, unpack)

    def repeat(self) -> None:
        """Run the units again, from the same input, draws and buffers."""
        first, *rest = self.group.units
        names = self.group.title
        if any(tensor._version != version for tensor, version in self.inputs):
            raise _refused(
                f"the input of {names} was changed in place after the forward, so recomputation "
                "would use other values; change a copy of the input, or set recompute_every to 0"
            )
        self.collected = []
        self.group.again = self
        try:
            # Backward runs without gradients, but the units must save what they saved in forward.
            with torch.enable_grad(), self.as_before():
                # Units may write into containers that they are given.
                args, kwargs = mapped(self.given, lambda tensor: tensor, keep=False)
                output = first(*args, **kwargs)
                for unit in rest:
                    output = unit(output)
        finally:
            self.group.again = None
        again = [(t.shape, t.dtype) for t in self.collected if t is not None]
        if again != self.saved:
            # Not refused: it may be a fault of this file's.
            raise RuntimeError(
                f"the forward of {names} saved {len(self.saved)} tensors, but its recomputation "
                f"saved {len(again)} or other shapes or dtypes: a forward must depend "
                "only on its input, generators and buffers; if it cannot, set recompute_every to 0"
            )

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Restore generators, positions and buffers from the start of the forward, and the current
        ones afterwards.
        """
        generators, spans = self.group.generators, self.group.spans
        now = [generator.get_state() for generator in generators]
        for generator, state in zip(generators, self.draws, strict=True):
            generator.set_state(state)
        positions = [dict(vars(span)) for span in spans]
        for span, held in zip(spans, self.positions, strict=True):
            vars(span).update(held)
        try:
            with self.buffers.as_read():
                yield
        finally:
            for generator, state in zip(generators, now, strict=True):
                generator.set_state(state)
            for span, held in zip(spans, positions, strict=True):
                vars(span).update(held)


Bound = list[dict[str, Tensor | None]]  # per module: its buffers by name


class Buffers:
    """Copies of all buffers of ``modules``.

    All, because a tensor does not tell whether it was written: batch norms hide it.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.copies = _copied(self.bound())

    def bound(self) -> Bound:
        """The current buffers."""
        return [dict(module._buffers) for module in self.modules]

    def bind(self, buffers: Bound) -> None:
        """Bind other tensors to the names."""
        for module, named in zip(self.modules, buffers, strict=True):
            module._buffers.update(named)

    @contextmanager
    def as_read(self) -> Iterator[None]:
        """Bind copies of the copies, so that code inside leaves no trace."""
        now = self.bound()
        self.bind(_copied(self.copies))
        try:
            yield
        finally:
            self.bind(now)


def _copied(buffers: Bound) -> Bound:
    """A copy of every tensor; those that are shared stay shared."""
    tensors = {id(t): t for named in buffers for t in named.values() if t is not None}
    copies = {key: tensor.detach().clone() for key, tensor in tensors.items()}
    return [{n: None if t is None else copies[id(t)] for n, t in b.items()} for b in buffers]


def _cast(given: Tensor, output: Tensor) -> bool:
    """Whether ``given`` equals ``output``, cast or not."""
    if given is output:
        return True
    cast = output.detach().to(given.dtype)
    return given.shape == output.shape and torch.equal(given.detach(), cast)


def _apart(tensor: Tensor) -> Tensor:
    """Detach from the graph: repeating a group must not reach earlier units."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _refused(what: str) -> Refused:
    return Refused(f"option 'recompute_every': {what}")


def _refuse_global_draws(name: str, unit: nn.Module) -> None:
    for place, part in unit.named_modules(prefix=name):
        if isinstance(part, _DropoutNd) and part.p > 0:
            raise _refused(
                f"{place!r} ({type(part).__name__}, p = {part.p}) uses the global random "
                "generator, which recomputation does not restore; use a dropout module that has "
                "its own torch.Generator"
            )

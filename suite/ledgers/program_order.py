"""The program-order log of a rank: which unit computes, which phase a call belongs to.

Numbers, not clocks: every event (a unit's forward or backward begins, a call is issued or waited
for) takes the next number of one counter per rank, so "issued before that unit's backward" can be
read off exactly on any machine.

Phases: ``setup`` outside of ``step``; inside it ``backward`` while autograd runs (and after it
began), ``forward`` after a unit's forward, ``update`` once the gradients are final.  Nothing counts
in ``save`` and ``load``, between steps, nor in ``observe``, inside an observation point.  All of it
comes from hooks that the suite sets on the module that it builds; wrapping (DDP), class swaps
(FSDP2) and copies keep them.  Where a pipeline traces its computations, they are logged as
:class:`Done` and set the phase as well.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from shardproof.schedules import Action

Phase = Literal["setup", "forward", "backward", "update", "save", "load", "observe"]
T = TypeVar("T")

# Private, so looked up once and with a fall-back that merely knows no backward pass.
_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def inside_backward() -> bool:
    """Whether the calling thread is inside a backward pass of autograd."""
    return _graph_task() != -1


class PerRank(Generic[T]):
    """A value of the calling rank, be the rank a thread or the whole process."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self._process: T | None = None

    def get(self) -> T | None:
        """The value of this rank, ``None`` where nothing was set."""
        value: T | None = getattr(self._thread, "value", None)
        return self._process if value is None else value

    def set(self, value: T | None, process: bool) -> None:
        """Set the value for the whole process, or for the calling thread only.

        A value of the process replaces that of the calling thread, because a leader may have been a
        rank among threads before.
        """
        if process:
            self._process = value
        self._thread.value = None if process else value


@dataclass(frozen=True, slots=True)
class Done:
    """A computation of a pipeline's stage that has ended, in window ``window`` of its step.

    ``begin`` and ``end`` are event numbers; ``began`` and ``ended`` seconds of
    ``time.perf_counter``, one clock for all processes of a machine; ``cpu`` those for which the
    rank's thread had a core.
    """

    step: int
    window: int
    op: str
    stage: int
    micro: int
    begin: int
    end: int
    began: float
    ended: float
    cpu: float


class RankLog:
    """Events and phases of one rank."""

    def __init__(self) -> None:
        #: ``(number, kind, name)``; a unit begins: forward, recompute, backward; or step, observe.
        self.events: list[tuple[int, str, str]] = []
        #: What a pipeline computed, in the order in which it ended.
        self.actions: list[Done] = []
        #: The unit clock: how many units began to compute (in either direction) so far.
        self.units = 0
        self._next = 0
        self._in_step = False
        self._observing = 0
        self._stage: Phase = "forward"
        self._between: Phase = "setup"
        self._step = -1
        #: Units that compute, each inside the one before.
        self._inside: list[str] = []
        #: Forwards of the step by stage and micro-batch.
        self._seen: Counter[tuple[int, int]] = Counter()
        #: Called when a phase may have begun.
        self.listener: Callable[[], None] | None = None

    @property
    def number(self) -> int:
        """The optimizer step under way, or the last one; -1 before the first."""
        return self._step

    @property
    def now(self) -> int:
        """The number that the next event will take."""
        return self._next

    def tick(self) -> int:
        """Take a number without an event (calls carry their own)."""
        self._next += 1
        return self._next - 1

    def note(self, kind: str, name: str) -> int:
        """Append an event; returns its number."""
        number = self.tick()
        self.events.append((number, kind, name))
        return number

    def unit(self, kind: Literal["forward", "backward"], name: str) -> None:
        """Unit ``name`` begins to compute; a forward inside backward is a recomputation."""
        recompute = kind == "forward" and inside_backward()
        self.note("recompute" if recompute else kind, name)
        self._inside = [*self._inside, name] if kind == "forward" else [name]
        self.units += 1
        if self._stage != "update":
            self._stage = "backward" if recompute else kind
        self._tell()

    def unit_ended(self) -> None:
        """The forward of the innermost unit has ended."""
        self._inside = self._inside[:-1]

    @property
    def layer(self) -> str:
        """The unit that computes (empty: none, or the whole model outside of its units)."""
        return self._inside[-1] if self._inside and self.phase in ("forward", "backward") else ""

    def _tell(self) -> None:
        if self.listener is not None:
            self.listener()

    @property
    def phase(self) -> Phase:
        """The phase that a call made now belongs to."""
        if self._observing:
            return "observe"
        if not self._in_step:
            return self._between
        if inside_backward() and self._stage != "update":
            self._stage = "backward"
        return self._stage

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Optimizer step ``number`` runs inside."""
        self.note("step", str(number))
        self._in_step, self._stage, self._step, self._inside = True, "forward", number, []
        self._seen.clear()
        try:
            self._tell()
            yield
        finally:
            self._in_step = False

    @contextmanager
    def between(self, phase: Literal["save", "load"]) -> Iterator[None]:
        """The system saves or loads inside: a part of no step."""
        self.note(phase, "")
        self._between = phase
        try:
            self._tell()
            yield
        finally:
            self._between = "setup"

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """A stage computes ``action`` inside; outside of a step nothing is logged.

        The n-th forward of a micro-batch belongs to the n-th window, and so does what follows it.
        """
        if not self._in_step:
            yield
            return
        if self._stage != "update":
            self._stage = "forward" if action.op == "F" else "backward"
        place = action.stage, action.micro
        self._seen[place] += action.op == "F"
        window, begin, began = max(self._seen[place] - 1, 0), self.tick(), time.perf_counter()
        cpu = time.thread_time()
        yield
        cpu, ended, end = time.thread_time() - cpu, time.perf_counter(), self.tick()
        self.actions.append(Done(self._step, window, *action, begin, end, began, ended, cpu))

    @contextmanager
    def observe(self, point: str) -> Iterator[None]:
        """An observation point: what happens inside is the judge's business and not counted."""
        self.note("observe", point)
        self._observing += 1
        try:
            yield
        finally:
            self._observing -= 1
            if point == "gradients_final":
                self._stage = "update"
        self._tell()


#: The log of the calling rank (``None`` with ledgers off); ``install`` sets it for the calling
#: thread, or with ``process`` for the whole process.
_LOG: PerRank[RankLog] = PerRank()
current, install = _LOG.get, _LOG.set


#: The inputs of a unit's call under way, by identity, with their versions before it.
_Versions = dict[int, tuple[Tensor, int | None]]


def _forward_begins(
    unit: str, before: _Versions, module: nn.Module, inputs: Any, named: Mapping[str, Any]
) -> None:
    if (log := current()) is not None:
        log.unit("forward", unit)
        before.clear()
        if torch.is_grad_enabled():
            for tensor in nested_tensors((inputs, named)):
                before[id(tensor)] = tensor, None if tensor.is_inference() else tensor._version


def _forward_ended(
    unit: str,
    before: _Versions,
    module: nn.Module,
    inputs: Any,
    named: Mapping[str, Any],
    outputs: Any,
) -> None:
    """Leaves a hook on the outputs: the first gradient that arrives begins the unit's backward.

    Not on what is only handed on: an input, unless it was changed in place.  Hooks after ours may
    have exchanged inputs; those count as handed on.
    """
    if (log := current()) is not None:
        log.unit_ended()
    if log is None or not torch.is_grad_enabled():
        return
    given = {id(tensor) for tensor in nested_tensors((inputs, named))}
    versions = {key: version for key, (_, version) in before.items()}
    before.clear()

    def is_handed_on(tensor: Tensor) -> bool:
        known = versions.get(id(tensor), tensor._version)
        return id(tensor) in given and known == tensor._version

    found = (tensor for tensor in nested_tensors(outputs) if tensor.requires_grad)
    computed = [tensor for tensor in found if not is_handed_on(tensor)]
    first: list[int] = []  # the output whose gradient comes first, in each backward

    def arrived(number: int, gradient: Tensor) -> None:
        log = current()
        first[:] = first or [number]
        if log is not None and first == [number]:
            log.unit("backward", unit)

    for number, tensor in enumerate(computed):
        tensor.register_hook(partial(arrived, number))


def watch(module: nn.Module, names: Iterable[str] = ()) -> None:
    """Advance the unit clock from ``module`` (as unit ``""``) and its submodules ``names``.

    Does nothing when the calling rank has no log.  Raises ``AttributeError`` for an unknown name.
    """
    if current() is None:
        return
    for name in dict.fromkeys(("", *names)):
        unit = module.get_submodule(name)
        before: _Versions = {}
        unit.register_forward_pre_hook(partial(_forward_begins, name, before), with_kwargs=True)
        unit.register_forward_hook(partial(_forward_ended, name, before), with_kwargs=True)


def nested_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested arguments or results."""
    if isinstance(value, Tensor):
        yield value
        return
    items: Iterable[Any] = ()
    if isinstance(value, (tuple, list)):
        items = value
    elif isinstance(value, dict):
        items = value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        items = (getattr(value, field.name, None) for field in fields(value))
    for item in items:
        yield from nested_tensors(item)

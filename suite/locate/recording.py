"""A recording of one rank: every operator, every call to a group, and what was observed when.

A dispatch mode copies what each operator reads and writes; a hook at the process group does the
same of calls.  Storages are held until the recording ends, so that no other tensor gets their
identity.  Everything is in program order, from ``setup`` on, up to the step that is looked at.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shardproof import tensor_bytes
from shardproof.backends import base
from shardproof.backends.request import Request, wholes
from shardproof.contract import Implementation, Piece
from shardproof.launch import frames
from shardproof.launch.frames import Frame
from shardproof.ledgers import program_order
from shardproof.ledgers.memory import operators
from shardproof.ledgers.program_order import PerRank, inside_backward, nested_tensors

#: Elements of one tensor above which its content is not kept.
MOST_ELEMENTS = 1 << 21
#: Frames that an event keeps, innermost first.
MOST_FRAMES = 12
#: Namespaces of operators that only hand a call on to a process group.
_CALLS = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_TORCH = str(Path(torch.__file__).parent)
#: Parts of torch that are systems under test, and what in them only hands on.
_SYSTEMS = tuple(f"{_TORCH}/{part}" for part in ("distributed/", "nn/parallel/"))
_HANDS_ON = tuple(
    f"{_TORCH}/distributed/{name}"
    for name in ("distributed_c10d.py", "c10d_logger.py", "_functional_collectives.py")
)
#: Arguments that operators write and do not declare: running statistics.
_UNDECLARED = {"aten::native_batch_norm": (3, 4), "aten::batch_norm_update_stats": (1, 2)}
#: Views that leave a part out.
_PARTS = tuple(f"aten.{name}" for name in ("slice", "split", "select", "narrow", "chunk", "unbind"))
_OPTIMIZERS = f"{_TORCH}/optim/"
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl

#: Only wraps functions of others.
_WRAPS = "/typing_extensions.py"
#: Storage, first and last byte, content (a number in ``tensors``; -1: not kept).
Region = tuple[int, int, int, int]
_CURRENT: PerRank[Recorder] = PerRank()


class Recorder(TorchDispatchMode):
    """Records the calling rank while it is entered.

    ``last``: the last step that is recorded; ``most``: bytes of copies after which it stops.
    """

    def __init__(self, last: int, most: int) -> None:
        super().__init__()
        self.last, self.most = last, most
        self.events: list[dict[str, Any]] = []
        self.tensors: list[Tensor] = []
        self.bytes = 0
        self.truncated = False
        self._places: list[list[Any]] = []
        self._place_numbers: dict[Any, int] = {}
        self._held: dict[int, torch.UntypedStorage] = {}
        self._versions = Counter[int]()
        self._copied: dict[tuple[Any, ...], tuple[int, int]] = {}
        self._calls = Counter[tuple[Any, ...]]()
        self._handed_on: list[Region] | None = None
        self._in_observation = 0
        self._optimizers: list[torch.optim.Optimizer] = []
        self._settings: dict[int, list[dict[str, Any]]] = {}

    # ------------------------------------------------------------------------ around the program

    def __enter__(self) -> Recorder:
        _CURRENT.set(self, process=False)
        self._before = base.INJECTION.get()
        base.INJECTION.set(_Calls(self, self._before), process=False)
        self._profiled = sys.getprofile()
        sys.setprofile(self._returns)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        sys.setprofile(self._profiled)
        base.INJECTION.set(self._before, process=False)
        _CURRENT.set(None, process=False)

    def store(self, path: Path) -> None:
        """Write the recording; :mod:`shardproof.locate.recorded` reads it."""
        data = {
            "events": self.events,
            "places": self._places,
            "tensors": self.tensors,
            "truncated": self.truncated,
        }
        tensor_bytes.dump(path, data)

    # ------------------------------------------------------------------------------- the mode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types:  # DTensor runs every operator on fakes once, to learn shapes
            return func(*args, **kwargs)
        for cls in types:
            # Wrappers (DTensor) go first and come back here as the tensors that they hold.
            if cls.__torch_dispatch__ is not _NO_DISPATCH:
                return NotImplemented
        if func.namespace in _CALLS:
            return self._hand_on(func, args, kwargs)
        if not self._records():
            return func(*args, **kwargs)
        if operators.learn(func)[0] == operators.VIEW:
            self._viewed(func, args)
            return func(*args, **kwargs)
        place = self._place()
        if place < 0:
            return func(*args, **kwargs)
        mutated = _mutated(func)
        given = [self._region(t) for t in nested_tensors((args, list(kwargs.values())))]
        result = func(*args, **kwargs)
        changed = [args[at] for at in mutated[0] if at < len(args) and args[at] is not None]
        changed += [kwargs[name] for name in mutated[1] if name in kwargs]
        written = [t for t in nested_tensors((changed, result)) if _plain(t)]
        unique = {(id(t.untyped_storage()), t.storage_offset()): t for t in written}
        if unique:
            scalars = [x for x in (*args, *kwargs.values()) if type(x) is float]
            wrote = self._written(unique.values())
            more = {"scalars": scalars, "updates": _is_updating()}
            self.add("op", str(func), place, given, wrote, **more)
        return result

    def _viewed(self, func: Any, args: Any) -> None:
        """Note a view of a part, which moves values without an operator that writes."""
        if str(func).startswith(_PARTS) and _plain(args[0]) and (place := self._place()) >= 0:
            key = args[0].untyped_storage()._cdata
            self._held.setdefault(key, args[0].untyped_storage())
            self.add("view", str(func), place, [(key, 0, 0, -1)], [])

    def _hand_on(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Functional collectives copy their input in C++, where no mode sees it."""
        if func.namespace == "c10d" or not self._records():
            return func(*args, **kwargs)
        before = self._handed_on
        self._handed_on = [self._region(t) for t in nested_tensors(args) if _plain(t)]
        try:
            return func(*args, **kwargs)
        finally:
            self._handed_on = before

    def _records(self) -> bool:
        log = program_order.current()
        if log is None or log.number > self.last or self.truncated:
            return False
        return log.phase != "observe" or self._in_observation > 0

    # -------------------------------------------------------------------------------- entries

    def add(
        self,
        kind: str,
        name: str,
        place: int,
        reads: Sequence[Region],
        writes: Sequence[Region],
        **more: Any,
    ) -> dict[str, Any]:
        """Append an event of the calling rank."""
        log = program_order.current()
        event = {
            "kind": kind,
            "name": name,
            "place": place,
            "reads": list(reads),
            "writes": list(writes),
            "step": log.number if log else -1,
            "phase": log.phase if log else "",
            "unit": log.layer if log else "",
            "backward": inside_backward(),
            "at": len(self.events),
            **more,
        }
        self.events.append(event)
        return event

    def call(self, request: Request, group: Any) -> dict[str, Any] | None:
        """Note that ``request`` is issued on ``group``."""
        if not self._records():
            return None
        ranks = tuple(group.global_ranks)
        key: tuple[Any, ...] = (group.getGroupName(), *ranks)
        peer = None if request.peer is None else ranks[request.peer]
        if request.operation in ("send", "recv"):
            key = (*key, request.operation, peer, request.tag)
        number, self._calls[key] = self._calls[key], self._calls[key] + 1
        given = self._handed_on
        if given is None:
            given = [self._region(t) for item in request.inputs for t in wholes(item)]
        return self.add(
            "call",
            request.operation,
            self._place(),
            given,
            [],
            group=list(ranks),
            axis=group.axis,
            number=number,
            group_name=group.getGroupName(),
            reduce=request.reduce or "",
            root=-1 if request.root is None else ranks[request.root],
            peer=-1 if peer is None else peer,
            tag=request.tag,
            text=request.text(),
            loads=[
                [dtype, floating, payload, str(share)]
                for dtype, floating, payload, share in request.loads(group._size, group._rank)
            ],
        )

    def completed(self, event: dict[str, Any], request: Request) -> None:
        """Note that the results of a call are there."""
        outputs = [t for item in request.outputs for t in wholes(item)]
        if outputs:
            written = self._written(outputs)
            self.add("done", event["name"], event["place"], [], written, call=event["at"])

    def observed(self, what: str, name: str, tensor: Tensor, **more: Any) -> None:
        """Note what the system shows or returns."""
        # Anew, whatever wrote it: what is shown is what counts.
        self._versions[tensor.untyped_storage()._cdata] += 1
        self.add("seen", name, -1, [self._region(tensor)], [], what=what, **more)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Record also what the system computes for an observation."""
        self._in_observation += 1
        try:
            yield
        finally:
            self._in_observation -= 1

    def pieces(self, kind: str, pieces: Iterable[Piece]) -> None:
        """Note the ``pieces`` of ``kind`` that the system shows now."""
        log = program_order.current()
        if log is None or not self._records():
            return
        point = log.events[-1][2] if log.phase == "observe" else log.phase
        for piece in pieces:
            tensor = piece.tensor.detach()
            if _plain(tensor):
                place = {
                    "shape": list(piece.global_shape),
                    "slices": None if piece.slices is None else [list(s) for s in piece.slices],
                    "flat": None if piece.flat_range is None else list(piece.flat_range),
                    "replica": piece.replica,
                }
                self.observed(kind, piece.name, tensor, point=point, **place)

    # ------------------------------------------------------------------- numbers from Python

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what becomes of the settings of ``optimizer``."""
        if not any(one is optimizer for one in self._optimizers):
            self._optimizers.append(optimizer)

    def _returns(self, frame: Any, event: str, value: Any) -> None:
        """A function of the system returned: a number, or with other settings of an optimizer."""
        if event != "return" or not _is_of_a_system(frame.f_code.co_filename):
            return
        if self.truncated or _CURRENT.get() is not self:
            return
        if type(value) in (int, float) and value not in (0, 1):
            self._note(frame, "returned", [], value=float(value))
        elif type(value) is bool:
            self._note(frame, "decided", [], value=float(value))
        if isinstance(value, list) and value and all(_is_group(each) for each in value):
            self._note(frame, "set", [_settings(group) for group in value], value=0.0)
        for optimizer in self._optimizers:
            now = [_settings(group) for group in optimizer.param_groups]
            before = self._settings.get(id(optimizer))
            if now != before:
                self._settings[id(optimizer)] = now
                self._note(frame, "set", now, value=0.0)

    def _note(self, frame: Any, kind: str, settings: list[Any], value: float) -> None:
        log = program_order.current()
        if log is not None and log.number <= self.last:
            place = self._place(frame)
            self.add(kind, kind, place, [], [], settings=settings, value=value)

    # ------------------------------------------------------------------------------- contents

    def _written(self, tensors: Iterable[Tensor]) -> list[Region]:
        tensors = [t for t in tensors if _plain(t)]
        for tensor in tensors:
            self._versions[tensor.untyped_storage()._cdata] += 1
        return [self._region(tensor) for tensor in tensors]

    def _region(self, tensor: Tensor) -> Region:
        """The place of ``tensor`` in memory, and a copy of what is there now."""
        if not _plain(tensor):
            return (0, 0, 0, -1)
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._held.setdefault(key, storage)
        item = tensor.element_size()
        first = int(tensor.storage_offset()) * item
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        reach = sum((int(n) - 1) * int(s) for n, s in steps) + 1 if tensor.numel() else 0
        last = first + reach * item
        shape = (key, first, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        version, known = self._copied.get(shape, (-1, -1))
        if version != self._versions[key]:
            known = self._copy(tensor)
            self._copied[shape] = self._versions[key], known
        return (key, first, last, known)

    def _copy(self, tensor: Tensor) -> int:
        if tensor.numel() > MOST_ELEMENTS or self.bytes > self.most:
            self.truncated = self.truncated or self.bytes > self.most
            return -1
        with _disable_current_modes(), torch.no_grad():
            self.tensors.append(tensor.detach().clone())
        self.bytes += tensor.nbytes
        return len(self.tensors) - 1

    def _place(self, frame: Any = None) -> int:
        """The number of the calling frames of the system; -1: the suite itself computes."""
        found: list[Frame] = []
        frame = frame or sys._getframe(2)
        while frame is not None and len(found) < MOST_FRAMES:
            code = frame.f_code
            if _is_of_a_system(code.co_filename):
                found.append((code.co_filename, frame.f_lineno, code.co_qualname))
            frame = frame.f_back
        if not found:
            return -1
        key = tuple(found)
        if key not in self._place_numbers:
            self._place_numbers[key] = len(self._places)
            self._places.append([list(one) for one in found])
        return self._place_numbers[key]


@cache
def _is_of_a_system(file: str) -> bool:
    """Whether code of ``file`` is under test, or of a library that it calls, other than torch."""
    if file.startswith("<") or file.startswith(_HANDS_ON) or file.endswith(_WRAPS):
        return False
    if file.startswith(_TORCH):
        return file.startswith(_SYSTEMS)
    return not frames.is_judge(file) and not frames.is_library(file)


def _is_updating() -> bool:
    """Whether an optimizer of torch computes."""
    frame: FrameType | None = sys._getframe(2)
    depth = 0
    while frame is not None and depth < MOST_FRAMES:
        if frame.f_code.co_filename.startswith(_OPTIMIZERS):
            return True
        frame, depth = frame.f_back, depth + 1
    return False


def _is_group(value: Any) -> bool:
    """Whether ``value`` is a parameter group of an optimizer."""
    return isinstance(value, dict) and "params" in value


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a parameter group."""
    plain = (int, float, list, tuple)
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in group.items()
        if name != "params" and isinstance(value, plain) and not isinstance(value, bool)
    }


@cache
def _mutated(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names of the arguments that ``func`` writes."""
    arguments = func._schema.arguments
    if (undeclared := _UNDECLARED.get(func._schema.name)) is not None:
        return undeclared, ()
    wrote = [n for n, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
    return tuple(wrote), tuple(arguments[n].name for n in wrote)


def _plain(tensor: Any) -> bool:
    is_plain = isinstance(tensor, Tensor) and tensor.layout is torch.strided
    return (
        is_plain
        and tensor.device.type != "meta"
        and type(tensor).__torch_dispatch__ is (_NO_DISPATCH)
    )


class _Calls:
    """Stands at the process group, before what was there (a fault plan)."""

    def __init__(self, recorder: Recorder, inner: base.Injected | None) -> None:
        self.recorder, self.inner = recorder, inner

    def call(self, request: Request, group: Any, issue: Any) -> base.Handle:
        """Issue ``request`` and note what goes in and what comes out."""
        event = self.recorder.call(request, group)
        with _disable_current_modes():
            inner = self.inner
            handle = inner.call(request, group, issue) if inner is not None else issue(request)
        if event is None:
            return handle
        settle = handle._settle
        seen: list[bool] = []

        def settled(timeout: float | None) -> None:
            with _disable_current_modes():
                settle(timeout)
            if not seen:
                seen.append(True)
                self.recorder.completed(event, request)

        handle._settle = settled  # type: ignore[method-assign]
        return handle


# ------------------------------------------------------------------------ what the system shows


def watch(system: type[Implementation]) -> None:
    """Let recorders of this process see what ``system`` shows and returns; for its life."""
    if "_recorded" in vars(system):
        return
    shown, step, further = system.local_state, system.step, system.extra_state
    add_group = torch.optim.Optimizer.add_param_group

    def local_state(self: Any, kind: Any) -> list[Piece]:
        recorder = _CURRENT.get()
        if recorder is None:
            return shown(self, kind)
        with recorder.observing():
            pieces = shown(self, kind)
            recorder.pieces(kind, pieces)
        return pieces

    def stepped(self: Any, *given: Any, **named: Any) -> Any:
        result = step(self, *given, **named)
        recorder = _CURRENT.get()
        if recorder is not None and recorder._records():
            for name in ("loss", "norm"):
                if isinstance(value := getattr(result, name, None), Tensor):
                    recorder.observed("result", name, value)
        return result

    def extra_state(self: Any) -> Any:
        recorder = _CURRENT.get()
        if recorder is None:
            return further(self)
        with recorder.observing():
            state = further(self)
            if isinstance(state, Mapping):
                named = state.items()
                state_pieces = [Piece.whole(n, v) for n, v in named if isinstance(v, Tensor)]
            else:
                state_pieces = list(state)
            recorder.pieces("extra", state_pieces)
        return state

    def added(self: Any, *given: Any, **named: Any) -> Any:
        if (recorder := _CURRENT.get()) is not None:
            recorder.optimizer(self)
        return add_group(self, *given, **named)

    torch.optim.Optimizer.add_param_group = added  # type: ignore[method-assign]
    system.extra_state = extra_state  # type: ignore[method-assign]
    system.local_state = local_state  # type: ignore[method-assign]
    system.step = stepped  # type: ignore[method-assign]
    system._recorded = True  # type: ignore[attr-defined]

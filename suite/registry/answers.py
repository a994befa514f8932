"""The results of a system's methods, checked against the contract: a wrong type is its own fault.

Every function asks one method.

:raises BrokenContract: with class and method, what came, and what is asked.
"""

from __future__ import annotations

import json
import marshal
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardproof.contract import (
    Batch,
    Event,
    Implementation,
    Kind,
    Now,
    Options,
    Piece,
    StepResult,
)
from shardproof.ledgers import traffic
from shardproof.registry.declaration import BrokenContract


def asked(system: object, method: str, value: Any, kinds: Any, wanted: str) -> Any:
    """``value``, which ``method`` returned, if it is of one of ``kinds``."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise broken(system, method, "None" if value is None else type(value).__name__, wanted)
    return value


def broken(system: object, method: str, came: str, wanted: str) -> BrokenContract:
    """The error that says what ``method`` returned, and what is asked."""
    name = (system if isinstance(system, type) else type(system)).__name__
    return BrokenContract(f"{name}.{method} returned {came}, expected {wanted}")


def pieces(system: Implementation, kind: Kind, rank: int = 0) -> list[Piece]:
    """``local_state(kind)``, without communication: the state of others may hide this rank's.

    Of kind ``extra``: ``extra_state()``; ``rank`` numbers what is no piece.
    """
    method, wanted = f"local_state({kind!r})", "a list of Piece objects"
    ledger = traffic.current()
    before = len(ledger.calls) if ledger else 0
    if kind == "extra":
        method, held = "extra_state()", _extra(system, rank)
    else:
        held = list(asked(system, method, system.local_state(kind), (list, tuple), wanted))
    for call in ledger.calls[before:] if ledger else ():
        what = f"{type(system).__name__}.{method} called {call.operation}"
        raise BrokenContract(f"{what}, but it must return this rank's state without communication")
    for piece in held:
        if not isinstance(piece, Piece):
            raise broken(system, method, f"a list that contains a {type(piece).__name__}", wanted)
        described = _described(piece)
        if described in _sound:
            continue
        for field, wrong, right in _faults(piece):
            if wrong:
                came = f"a piece {piece.name!r:.80} with {field}={getattr(piece, field)!r:.80}"
                raise broken(system, method, came, right)
        if described is not None:
            _sound.add(described)
    return held


def _extra(system: Implementation, rank: int) -> list[Piece]:
    """``extra_state()``; named tensors and numbers become whole pieces of this rank."""
    method, wanted = "extra_state()", "named tensors and numbers, or a list of Piece objects"
    told = asked(system, method, system.extra_state(), (Mapping, list, tuple), wanted)
    if not isinstance(told, Mapping):
        return list(told)
    found = []
    for name, value in told.items():
        asked(system, method, value, (Tensor, int, float), wanted)
        exact = torch.int64 if isinstance(value, int) else torch.float64
        tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=exact)
        found.append(Piece.whole(name, tensor.detach(), replica=rank))
    return found


def followed(system: type[Implementation], options: Options, now: Now) -> dict[str, Tensor]:
    """``given_state(now, options)``."""
    method = "given_state(now, options)"
    try:
        told = system.given_state(now, options)
    except Exception as error:
        raise BrokenContract(f"{system.__name__}.{method} raised {error!r}") from error
    return tensors(system, method, told, "a dict of named tensors")


#: Descriptions of pieces that were looked at and found right: they come at every observation.
_sound: set[bytes] = set()


def _described(piece: Piece) -> bytes | None:
    """All that :func:`_faults` looks at, types included; ``None``: it is not of plain values."""
    tensors = isinstance(piece.tensor, Tensor), isinstance(piece.source, Tensor | None)
    where = piece.global_shape, piece.slices, piece.flat_range, piece.replica
    try:
        return marshal.dumps((tensors, piece.name, where), 2)  # the last without references
    except ValueError:
        return None


def _faults(piece: Piece) -> Iterator[tuple[str, bool, str]]:
    """Fields, whether each is wrong, and what is asked; to be left at the first that is wrong."""
    shape, flat = piece.global_shape, piece.flat_range
    yield "tensor", not isinstance(piece.tensor, Tensor), "a Tensor"
    yield "name", not _is_text(piece.name), "a str that UTF-8 can hold"
    yield "global_shape", not _numbers(shape), "a tuple of int"
    yield "replica", type(piece.replica) is not int, "an int"
    yield "source", not isinstance(piece.source, Tensor | None), "a Tensor or None"
    yield "slices", not _within(piece.slices, shape), "a (start, stop) per dimension, or None"
    is_outside = flat is not None and not _within((flat,), (math.prod(shape),))
    yield "flat_range", is_outside, "(start, stop) in the flattened tensor, or None"


def _is_text(value: object) -> bool:
    """Half of a surrogate pair is none: no record can hold it."""
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value


def _numbers(values: object) -> bool:
    return isinstance(values, tuple | list) and all(type(value) is int for value in values)


def _within(ranges: Any, sizes: Sequence[int]) -> bool:
    """Whether ``ranges`` are a (start, stop) of each size; ``None`` is none at all."""
    return ranges is None or (
        isinstance(ranges, tuple | list)
        and len(ranges) == len(sizes)
        and all(_numbers(r) and len(r) == 2 for r in ranges)
        and all(0 <= r[0] <= r[1] <= size for r, size in zip(ranges, sizes, strict=True))
    )


def step(system: Implementation, step: int, value: Any) -> StepResult:
    """The result of ``step``, with a loss and a norm that are numbers.

    Asked when the step is over: to read a tensor is an operator, which the ledger would count.
    """
    method = f"step {step}"
    result: StepResult = asked(system, method, value, StepResult, "a StepResult")
    number(system, f"{method}: loss", result.loss)
    number(system, f"{method}: norm", result.norm)
    for value in asked(system, f"{method}: metrics", result.metrics, Mapping, "a dict").values():
        asked(system, f"{method}: metrics", value, (int, float), "named numbers")
    return result


def progress(system: Implementation) -> int | None:
    """``progress()``."""
    wanted = "an int of at least 0, or None"
    told: int | None = asked(system, "progress()", system.progress(), (int, type(None)), wanted)
    if told is not None and told < 0:
        raise broken(system, "progress()", str(told), wanted)
    return told


def number(system: object, method: str, value: Any) -> float | None:
    """A loss or norm as a number: NaN where it is infinite, ``None`` where it is not known."""
    wanted = "a Tensor of one number, or None"
    asked(system, method, value, (Tensor, float, int, type(None)), wanted)
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
        raise broken(system, method, f"a {value.dtype} tensor of shape {list(value.shape)}", wanted)
    if value is None:
        return None
    return float(value) if math.isfinite(float(value)) else math.nan


def evaluation(system: Implementation, batch: Batch) -> float | None:
    """``evaluate``."""
    return number(system, "evaluate(batch)", system.evaluate(batch))


def full_state(system: Implementation, kind: Kind) -> dict[str, Tensor]:
    """``full_state(kind)``."""
    method, wanted = f"full_state({kind!r})", "a dict of named tensors"
    return tensors(system, method, system.full_state(kind), wanted)


def tensors(system: object, method: str, value: Any, wanted: str) -> dict[str, Tensor]:
    """``value``, which ``method`` returned, if it is a mapping of names to tensors."""
    for name, tensor in asked(system, method, value, Mapping, wanted).items():
        if not _is_text(name) or not isinstance(tensor, Tensor):
            raise broken(system, method, f"{{{name!r:.80}: {type(tensor).__name__}}}", wanted)
    return dict(value)


def saved(system: Implementation, value: Any) -> Any:
    """The result of ``save``: something to wait for, or ``None``."""
    if value is not None and not callable(getattr(value, "wait", None)):
        came = type(value).__name__
        raise broken(system, "save(path, extra)", came, "an object with wait(), or None")
    return value


def extra(system: Implementation, value: Any) -> dict[str, Any]:
    """The result of ``load``, as JSON gives it back."""
    wanted = "the mapping that save was given"
    asked(system, "load(path)", value, Mapping, wanted)
    try:
        return dict(json.loads(json.dumps(dict(value))))
    except (TypeError, ValueError) as error:
        raise broken(
            system, "load(path)", f"a value that JSON cannot store ({error})", wanted
        ) from None


def events(system: Implementation) -> list[Event]:
    """``events()``."""
    wanted = "a list of Event objects"
    listed = list(asked(system, "events()", system.events(), (list, tuple), wanted))
    for event in listed:
        asked(system, "events()", event, Event, wanted)
        fields = (event.order, event.worker, event.step, event.version)
        if not _numbers(fields):
            raise broken(system, "events()", f"{event!r:.200}", f"{wanted} of int")
        if not isinstance(event.keys, tuple) or not all(map(_is_text, event.keys)):
            raise broken(system, "events()", f"keys {event.keys!r:.200}", "a tuple of names")
    return listed

"""Results of operators on fake tensors, remembered by the arguments that decide their shapes.

torch remembers them too, but compares more than one process without symbolic shapes needs: its keys
and its copies of metadata took more than half of a simulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from shardproof.ledgers.program_order import nested_tensors

#: Operators whose result is not decided by shapes, or that give an argument another shape.
_OTHER = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)
#: Operators that change the storage of an argument, or whose results are constants.
_NEVER = ("set_", "resize_", "resize_as_", "lift", "lift_fresh", "lift_fresh_copy")
_PLAIN = (
    int,
    float,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.layout,
    torch.device,
    torch.memory_format,
)


class _Unknown(Exception):
    """An argument or a result of a sort that is not remembered."""


class _Made(NamedTuple):
    """A tensor of a result.  ``of``: the place of the argument whose storage it shares, or -1."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    device: torch.device
    of: int


#: A tensor of a result: a new one, or a view; the place of an argument, which it is; or ``None``.
_Result = _Made | int | None
#: Key -> the result, and its type if it has several tensors.
_results: dict[Any, tuple[type | None, Sequence[_Result]]] = {}
#: Operators met so far by their id, each with whether shapes alone decide its results: their hash
#: is computed in Python.
_met: dict[int, tuple[bool, Any]] = {}
_META = torch.device("meta")
_make_subclass: Any = Tensor._make_subclass
_protect: Any = torch._C._set_warn_deprecated_on_mutable_data_ptr
_FAKE: Any = torch._C._TorchDispatchModeKey.FAKE
_active_mode: Any = torch._C._get_dispatch_mode
_unwatched: Any = torch._C._DisableTorchDispatch


def key_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A key of everything that decides the result of ``func``; ``None``: it is not remembered."""
    name = id(func)
    if name not in _met:
        _met[name] = _is_plain(func), func
    if not _met[name][0]:
        return None
    try:
        named = tuple((name, _part(value)) for name, value in kwargs.items()) if kwargs else ()
        return name, torch.get_default_dtype(), tuple([_part(one) for one in args]), named
    except _Unknown:
        return None


def known(mode: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    """:func:`recall` for an operator that would go to ``mode`` next, if ``mode`` is active."""
    if _active_mode(_FAKE) is not mode or (key := key_of(func, args, kwargs)) not in _results:
        return False, None
    with _unwatched():
        return recall(mode, key, args)


def recall(mode: Any, key: Any, args: Sequence[Any]) -> tuple[bool, Any]:
    """Whether a result is known for ``key``, and a new one like it."""
    if (found := _results.get(key)) is None:
        return False, None
    kind, tensors = found
    made = [_again(mode, one, args) for one in tensors]
    return True, made[0] if kind is None else kind(made)


def remember(key: Any, args: Sequence[Any], result: Any) -> None:
    """Remember ``result`` for ``key``, if a later call can be given its like."""
    kind = type(result) if isinstance(result, (tuple, list)) else None
    try:
        made = [_described(one, args) for one in ([result] if kind is None else result)]
    except _Unknown:
        return
    new = [one for one in ([result] if kind is None else result) if isinstance(one, Tensor)]
    storages = {one.untyped_storage()._cdata for one in new}
    # A place says which argument is shared, not which tensor of a list.
    listed = [one for one in args if isinstance(one, (list, tuple))]
    given = {one.untyped_storage()._cdata for one in nested_tensors(listed)}
    is_clear = len(storages) == len(new) and not storages & given
    if is_clear and kind in (None, tuple, list):
        _results[key] = kind, made


def _is_plain(func: Any) -> bool:
    """Whether shapes alone decide the results of ``func``."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return False
    name = func.overloadpacket.__name__
    return name not in _NEVER and not any(tag in func.tags for tag in _OTHER)


def _part(value: Any) -> Any:
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None:
            raise _Unknown
        place = value.storage_offset(), value.fake_device
        return value.dtype, value.shape, value.stride(), place
    if kind in (list, tuple):
        return tuple(map(_part, value))
    if kind in _PLAIN:
        return kind, value  # 1, 1.0 and True are equal
    raise _Unknown


def _described(tensor: Any, args: Sequence[Any]) -> _Result:
    if tensor is None:
        return None
    for place, given in enumerate(args):
        if given is tensor:
            return place
    if type(tensor) is not FakeTensor or tensor.constant is not None or tensor.is_complex():
        raise _Unknown
    storage, of = tensor.untyped_storage(), -1
    for place, given in enumerate(args):
        is_tensor = type(given) is FakeTensor
        if is_tensor and given.untyped_storage()._cdata == storage._cdata:
            of = place
    shape, stride, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
    if of < 0:
        last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        held = (last + 1 if tensor.numel() else 0) * tensor.element_size()
        if offset or storage.nbytes() != held:
            raise _Unknown
    return _Made(tensor.dtype, shape, stride, offset, tensor.fake_device, of)


def _again(mode: Any, one: _Result, args: Sequence[Any]) -> Any:
    if not isinstance(one, _Made):
        return None if one is None else args[one]
    # No mode is active here, so both are plain tensors of the device meta.
    if one.of < 0:
        inner = torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device=_META)
    else:
        inner = torch.empty(0, dtype=one.dtype, device=_META)
        inner.set_(args[one.of].untyped_storage(), one.offset, one.shape, one.stride)
    return _fake(mode, inner, one.device)


def _fake(mode: Any, inner: Tensor, device: torch.device) -> Any:
    """``FakeTensor(mode, inner, device)`` in a third of the time.

    torch makes the first one of a device, and each further one gets its attributes.
    """
    if (given := mode.attributes.get(device)) is None:
        made = FakeTensor(mode, inner, device)
        mode.attributes[device] = {**vars(made)}
        return made
    made = _make_subclass(
        FakeTensor, inner, False, dispatch_device=True, device_for_backend_keys=device
    )
    _protect(made)
    made.__dict__.update(given)
    return made

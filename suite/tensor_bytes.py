"""Tensors as bytes: nested data with tensors in one file, and the digest of one tensor.

A file is a JSON index, then the raw bytes.

``torch.save`` pickles (code can run on load) and takes 17 microseconds to write a tensor and 60 to
read it; a case's record holds thousands of small ones.  Here it is about 5 each way, and reading a
file that somebody else wrote can only fail, never execute.

Layout: magic (8 bytes), index length and data length (u64, little endian), index (JSON, padded with
spaces to a multiple of 16), data.  In the index a mapping with a single key that starts with ``!``
is a tag::

    {"!t": [dtype, [shape], offset]}   tensor, at 16-byte aligned ``offset`` into the data
    {"!u": [...]}                      tuple
    {"!d": [[key, value], ...]}        mapping whose keys are not plain strings
    {"!s": number}                     a long text that stands in full further up, as that number
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardproof.files import fast_json, read_fast_json, write_whole

_MAGIC = b"SHPROOF1"
_HEAD = struct.Struct("<8sQQ")
_ALIGN = 16
_PLAIN = frozenset((int, float, bool, type(None)))
#: A text of so many characters is written once.
_LONG = 200


class NotPlain(TypeError):
    """A tensor that has no plain elements in memory, or is of a subclass."""


class DamagedFile(ValueError):
    """A file that :func:`dump` did not write, or a damaged one."""


def dump(path: Path, obj: Any) -> None:
    """Write ``obj`` to ``path``; a reader sees the old file or the whole new one.

    ``obj`` is made of dict (keys: str, int, float, bool, None or tuples of these), list, tuple,
    str, int, float, bool, None and dense CPU or device tensors of any dtype, which lose
    ``requires_grad`` and strides.  :class:`TypeError` names the place of anything else.
    """
    writer = _Writer()
    index = fast_json(writer.encode(obj, ""))
    index += b" " * (-(_HEAD.size + len(index)) % _ALIGN)
    write_whole(path, [_HEAD.pack(_MAGIC, len(index), writer.size), index, *writer.chunks])


def load(path: Path) -> Any:
    """Read what :func:`dump` wrote.  Tensors are writable and share one buffer's lifetime."""
    with path.open("rb") as file:
        data = bytearray(os.fstat(file.fileno()).st_size)
        size = file.readinto(data)
    if size < _HEAD.size:
        raise DamagedFile(f"{path}: the file is too short ({size} bytes)")
    magic, index_size, data_size = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise DamagedFile(f"{path}: not a file of tensors (starts with {bytes(magic)!r})")
    start = _HEAD.size + index_size
    if start + data_size != len(data):
        raise DamagedFile(f"{path}: the header says {start + data_size} bytes, found {len(data)}")
    try:
        tree = read_fast_json(bytes(data[_HEAD.size : start]))
        return _Reader(data, start).decode(tree)
    except DamagedFile as error:
        raise DamagedFile(f"{path}: {error}") from None
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise DamagedFile(f"{path}: damaged index: {error}") from error


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor's elements in row-major order, on whatever device it lies."""
    plain = tensor.detach().cpu().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def require_plain(tensor: Tensor, place: str) -> None:
    """Raise :class:`NotPlain` that names ``place`` unless ``tensor`` is dense and no subclass."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        hint = "; pack its local tensor" if hasattr(tensor, "to_local") else ""
        raise NotPlain(f"cannot store {_name(tensor)} at {place or 'the top level'}{hint}")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        what = f"{tensor.layout} tensor of {tensor.dtype} on {tensor.device}"
        raise NotPlain(f"cannot store a {what} at {place or 'the top level'}")


def dtype_name(tensor: Tensor) -> str:
    """The dtype as records and scenarios write it: ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def digest(tensor: Tensor) -> str:
    """SHA-256 of :func:`raw`; it says nothing of dtype and shape."""
    return hashlib.sha256(raw(tensor)).hexdigest()


class _Writer:
    """Turns a tree into its JSON form and collects the tensors' bytes."""

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        self.size = 0
        self._texts: dict[str, int] = {}

    def encode(self, obj: Any, place: str) -> Any:
        kind = type(obj)
        if kind in _PLAIN:
            return obj
        if kind is str:
            return self._text(obj)
        if isinstance(obj, Tensor):
            return {"!t": self._tensor(obj, place)}
        if isinstance(obj, dict):
            return self._mapping(obj, place)
        if isinstance(obj, list):
            return self._items(obj, place)
        if isinstance(obj, tuple):
            return {"!u": self._items(obj, place)}
        if isinstance(obj, str):  # subclasses (enumerations, NumPy's float64) become plain
            return self._text(str(obj))
        for base in (int, float):
            if isinstance(obj, base):
                return base(obj)
        raise TypeError(f"cannot store {_name(obj)} at {place or 'the top level'}")

    def _items(self, values: Sequence[Any], place: str) -> list[Any]:
        return [
            v if type(v) in _PLAIN else self.encode(v, f"{place}[{i}]")
            for i, v in enumerate(values)
        ]

    def _text(self, text: str) -> Any:
        number = self._texts.get(text)
        if number is not None:
            return {"!s": number}
        if len(text) >= _LONG:
            self._texts[text] = len(self._texts)
        return text

    def _mapping(self, obj: dict[Any, Any], place: str) -> Any:
        if all(type(key) is str for key in obj) and not (
            len(obj) == 1 and next(iter(obj)).startswith("!")
        ):
            return {
                key: value if type(value) in _PLAIN else self.encode(value, f"{place}.{key}")
                for key, value in obj.items()
            }
        pairs = []
        for key, value in obj.items():
            where = f"{place}[{key!r}]"
            if isinstance(key, Tensor):
                raise TypeError(f"cannot store a tensor as dict key at {place or 'the top level'}")
            pairs.append([self.encode(key, where), self.encode(value, where)])
        return {"!d": pairs}

    def _tensor(self, tensor: Tensor, place: str) -> list[Any]:
        require_plain(tensor, place)
        plain = tensor.detach()
        if plain.device.type != "cpu":
            plain = plain.cpu()
        if plain.is_conj() or plain.is_neg():  # bits that only torch's own operators obey
            plain = plain.resolve_conj().resolve_neg()
        plain = plain.contiguous()
        count = plain.numel() * plain.element_size()
        offset = self.size
        if count:
            # A copy: the caller may go on writing into the tensor while a large file is written.
            self.chunks.append(ctypes.string_at(plain.data_ptr(), count))
            padding = -count % _ALIGN
            if padding:
                self.chunks.append(bytes(padding))
            self.size += count + padding
        return [str(plain.dtype).removeprefix("torch."), list(plain.shape), offset]


class _Reader:
    """Turns the JSON form back into the tree."""

    def __init__(self, data: bytearray, start: int) -> None:
        self._data = data
        self._start = start
        self._texts: list[str] = []

    def decode(self, node: Any) -> Any:
        if isinstance(node, dict):
            if len(node) == 1:
                tag = next(iter(node))
                if tag.startswith("!"):
                    return self._tagged(tag, node[tag])
            return {k: v if type(v) in _PLAIN else self.decode(v) for k, v in node.items()}
        if isinstance(node, list):
            return [v if type(v) in _PLAIN else self.decode(v) for v in node]
        if isinstance(node, str) and len(node) >= _LONG:
            self._texts.append(node)
        return node

    def _tagged(self, tag: str, value: Any) -> Any:
        if tag == "!t":
            return self._tensor(*value)
        if tag == "!s":
            return self._texts[value]
        if tag == "!u":
            return tuple(self.decode(item) for item in value)
        if tag == "!d":
            return {self.decode(key): self.decode(item) for key, item in value}
        raise DamagedFile(f"unknown tag {tag!r}")

    def _tensor(self, name: str, shape: list[int], offset: int) -> Tensor:
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise DamagedFile(f"unknown dtype {name!r}")
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        begin = self._start + offset
        end = begin + count * dtype.itemsize
        if offset < 0 or offset % _ALIGN or count < 0 or end > len(self._data):
            raise DamagedFile(f"a tensor of shape {shape} has the invalid offset {offset}")
        return torch.frombuffer(self._data, dtype=dtype, count=count, offset=begin).view(shape)


def _name(obj: Any) -> str:
    kind = type(obj)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")

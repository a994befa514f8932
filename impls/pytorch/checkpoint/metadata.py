"""``.metadata`` of ``torch.distributed.checkpoint``, read without executing it.

torch writes it as a pickle, which may run any code when it is loaded, and torch's own reader does
load it.  Here the few classes that torch puts into one are stood in for by records that only keep
what they are given; whatever else is named is refused, and so is a file that is too large.

    what torch's reader gets                what is taken of it
    Metadata.state_dict_metadata            by key: dtype, shape and chunks of a tensor, or that it
                                            is something else
    Metadata.storage_data                   by key and first element: file, offset, length
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from shardproof.impls.pytorch.checkpoint.plain_pickle import read_pickle
from shardproof.impls.reference.checkpoint.errors import TAKE_ANOTHER, CheckpointError

#: A chunk takes about 200 bytes of it; what is made of a byte can take 60.
MOST_BYTES = 4 << 20
_NAMES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *(("pathlib", name) for name in ("PosixPath", "WindowsPath", "PurePosixPath")),
}


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and its location: a file of the folder, first byte, bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class Stored:
    """One key: a tensor in ``chunks``, or, without a dtype, a value in one chunk without a
    shape.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Record:
    """A placeholder for a torch object: the name of its class, arguments and attributes."""

    kind = ""
    given: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:
        return id(self)

    def __getitem__(self, name: str) -> Any:
        """An attribute; KeyError if there is none."""
        if not isinstance(self.state, dict):
            raise KeyError(name)
        return self.state[name]


#: Made once: a file may name them as often as it likes.
_RECORDS = {named: type(named[1], (Record,), {"kind": named[1]}) for named in _NAMES}


class _Reader(pickle.Unpickler):
    """A reader of numbers, texts, lists, tuples, dictionaries, and records."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return _RECORDS[module, name]
        if module == "torch" and name.replace("_", "").isalnum() and name.islower():
            return name  # a dtype: never called, for a text cannot be
        raise pickle.UnpicklingError(
            f"the file refers to {module}.{name}, which is not part of checkpoint metadata"
        )

    def persistent_load(self, given: Any) -> NoReturn:
        raise pickle.UnpicklingError("the file refers to an object outside the file")


def read(data: bytes, file: Path) -> dict[str, Stored]:
    """Keys of a checkpoint, and their stored values.

    :raises CheckpointError: no such file, or one that names anything that could be carried out.
    """
    try:
        found = read_pickle(data, _Reader)
        tensors, places = _plain(found["state_dict_metadata"]), _plain(found["storage_data"])
        lies = {_index(index): _place(where) for index, where in places.items()}
        return {_text(key): _stored(_text(key), one, lies) for key, one in tensors.items()}
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, EOFError) as error:
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__} {error}"
    except pickle.UnpicklingError as error:
        why = str(error)
    except (MemoryError, RecursionError, OverflowError, ImportError) as error:
        why = type(error).__name__
    what = f"this file is not metadata of torch.distributed.checkpoint: {why:.200}"
    raise CheckpointError(file, what, TAKE_ANOTHER) from None


#: Of one key and first element (none: no tensor): file, first byte, bytes.
Lies = Mapping[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]


def _stored(key: str, one: Any, lies: Lies) -> Stored:
    if _is(one, "BytesStorageMetadata"):
        return Stored("", (), (Chunk((), (), *lies[key, None]),))
    if not _is(one, "TensorStorageMetadata"):
        raise ValueError(f"the entry {key:.80} is neither a tensor nor bytes")
    dtype = one["properties"].state[0]  # what torch's own __setstate__ takes
    chunks = []
    for chunk in _items(one["chunks"]):
        offsets, sizes = _numbers(chunk["offsets"]), _numbers(chunk["sizes"])
        chunks.append(Chunk(offsets, sizes, *lies[key, offsets]))
    return Stored(_text(dtype), _numbers(one["size"]), tuple(chunks))


def _index(index: Any) -> tuple[str, tuple[int, ...] | None]:
    offset = index["offset"] if "offset" in index.state else None
    return _text(index["fqn"]), None if offset is None else _numbers(offset)


def _place(where: Any) -> tuple[str, int, int]:
    if where.state.get("transform_descriptors"):
        raise ValueError(
            "the data files were written with torch's stream extensions (e.g. compression), "
            "which this reader does not support"
        )
    begin, length = _numbers([where["offset"], where["length"]])
    return _text(where["relative_path"]), begin, length


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, Record) and value.kind == kind


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, not {value!r:.80}")
    return value


def _plain(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected a dictionary, not {value!r:.80}")
    return value


def _items(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, not {value!r:.80}")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    """The numbers of a list or a ``torch.Size``."""
    if _is(value, "Size"):
        (value,) = value.given
    if not isinstance(value, (list, tuple)) or len(value) > 64:
        raise TypeError(f"expected a list of at most 64 numbers, not {value!r:.80}")
    if any(type(n) is not int or not 0 <= n <= 1 << 62 for n in value):
        raise ValueError(f"expected whole numbers from 0 to 2 ** 62, not {value!r:.80}")
    return tuple(value)

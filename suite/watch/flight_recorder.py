"""Dumps of torch's Flight Recorder: what each rank of a job called last, on NCCL or gloo.

torch writes one file a rank when a call times out, named after ``TORCH_NCCL_DEBUG_INFO_TEMP_FILE``
or ``TORCH_FR_DUMP_TEMP_FILE`` and the rank (``nccl_trace_rank_3``), as a pickle or as JSON.  A
pickle may run any code when it is loaded, so only plain values are taken from it: what names a
class or a function is refused.
"""

from __future__ import annotations

import json
import pickle
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from shardproof.backends.errors import name_ranks
from shardproof.backends.heartbeat import Noted
from shardproof.launch.autopsy import How, Standing
from shardproof.registry.pickles import read_pickle
from shardproof.watch.calls import place_in_script

_FILE = re.compile(r"^\w*trace_rank_(\d+)(\.json)?$")
#: A dump of the default 2,000 calls has 2 MB.
_MOST_BYTES = 64 << 20


class _Plain(pickle.Unpickler):
    """Numbers, texts, lists, tuples and dictionaries."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(
            f"the pickle contains {module}.{name}, expected only numbers, strings and containers"
        )

    def persistent_load(self, given: Any) -> NoReturn:
        raise pickle.UnpicklingError(
            "the pickle contains a persistent ID, expected only numbers, strings and containers"
        )


def files(folder: Path) -> dict[int, Path]:
    """The dumps in ``folder``, by rank."""
    found = ((_FILE.match(path.name), path) for path in sorted(folder.iterdir()))
    return {int(match[1]): path for match, path in found if match and path.is_file()}


def standings(folder: Path) -> list[Standing]:
    """How the ranks whose dumps are in ``folder`` stood when these were written, by rank.

    A rank of their groups that left none is ``gone``.

    :raises ValueError: a file is no dump; nothing of it was carried out.
    """
    dumps = {rank: _read(path) for rank, path in files(folder).items()}
    calls = {rank: _calls(rank, dump, [*dumps]) for rank, dump in sorted(dumps.items())}
    found = [_standing(rank, dumps[rank], own) for rank, own in calls.items()]
    groups = [ranks for dump in dumps.values() for ranks in _groups(dump).values()]
    expected = {rank for ranks in groups for rank in ranks}
    found += [Standing(rank, "gone", "left no dump") for rank in sorted(expected - {*dumps})]
    return sorted(found, key=lambda one: one.rank)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"the file is larger than {_MOST_BYTES >> 20} MiB")
        data = path.read_bytes()
        plain = json.loads(data) if data[:1] == b"{" else read_pickle(data, _Plain)
        entries = plain["entries"]
        if not all(isinstance(entry.get("profiling_name"), str) for entry in entries):
            raise ValueError("expected a string as the 'profiling_name' of each entry")
    except Exception as error:  # what a damaged pickle raises is of any kind
        raise ValueError(f"{path}: this is not a dump of the Flight Recorder: {error}") from error
    return dict(plain)


def _groups(dump: Mapping[str, Any]) -> dict[str, list[int]]:
    """Name of a group -> its global ranks, as far as the dump tells."""
    groups = {}
    for group in (dump.get("pg_config") or {}).values():
        ranks = group.get("ranks", "")
        listed = json.loads(ranks) if isinstance(ranks, str) and ranks else ranks
        groups[str(group.get("name", ""))] = [int(rank) for rank in listed or ()]
    return groups


def _calls(rank: int, dump: Mapping[str, Any], known: Sequence[int]) -> list[Noted]:
    groups = _groups(dump)
    made = []
    for number, entry in enumerate(dump["entries"], 1):
        name, about = (*entry["process_group"], "")[:2]
        # The default group of some versions has no name there.
        members = groups.get(str(name)) or groups.get("") or sorted({rank, *known})
        operation = entry["profiling_name"].rpartition(":")[2]
        sizes = entry.get("input_sizes") or []
        dtypes = [str(dtype).lower() for dtype in entry.get("input_dtypes") or ()]
        each = zip(dtypes, sizes, strict=False)
        shapes = ", ".join(f"{dtype}[{'x'.join(map(str, size))}]" for dtype, size in each)
        peer = re.match(r"(send|recv) (\d+)(?:->|<-)(\d+)", operation)
        if peer:
            other = peer[3]
            operation, way = peer[1], "to" if peer[1] == "send" else "from"
            shapes = f"{way} {other}, {shapes}"
        text = f"{operation}({shapes}) on {name_ranks(members)}"
        # The autopsy numbers calls from 0, the recorder from 1.
        in_group = 0 if entry.get("is_p2p") else int(entry["collective_seq_id"]) + 1
        group = zlib.crc32(f"{name}/{about}".encode())
        made.append(Noted(number, group, in_group, zlib.crc32(text.encode()), text))
    return made


def _standing(rank: int, dump: Mapping[str, Any], calls: Sequence[Noted]) -> Standing:
    if not calls:
        return Standing(rank, "stands")
    # gloo does not say when a call was over; then whoever lacks nobody is not said to wait.
    open_ = [
        call
        for call, entry in zip(calls, dump["entries"], strict=True)
        if entry.get("state") != "completed" and not entry.get("retired")
    ]
    last = reversed(dump["entries"][-1].get("frames") or ())
    frames = [(str(f["filename"]), int(f["line"]), str(f["name"])) for f in last]
    unknown = all(entry.get("state") != "completed" for entry in dump["entries"])
    how: How = "waits" if open_ or unknown else "stands"
    awaited = open_[0] if open_ else None
    return Standing(rank, how, calls=calls, awaited=awaited, place=place_in_script(frames))

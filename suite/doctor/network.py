"""The links that ranks send over: NVLink between GPUs, and InfiniBand between nodes.

Parsers take the text that a tool prints, so tests can give them recorded outputs.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from shardproof.runs.machine import output
from shardproof.wings import Finding

#: Devices that the kernel has for InfiniBand and RoCE, and those that a program opens.
DEVICES, OPENED = Path("/sys/class/infiniband"), Path("/dev/infiniband")
#: Bytes that a program must be allowed to lock before cards can read its memory.
_LOCKED_BYTES = 64 << 20
#: Words of ``nvidia-smi topo -m`` for a path without NVLink, the nearest first.
PATHS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the PCIe host bridge of a CPU",
    "NODE": "the host bridges of one NUMA node",
    "SYS": "the link between CPU sockets",
}
#: Pairs and ports that a sentence names.
_NAMED = 4
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")

#: Two GPUs -> the word for the path between them: ``NV18``, ``SYS``, ...
Topology = Mapping[tuple[str, str], str]


def topology(text: str) -> Topology:
    """The path between each two GPUs, from the output of ``nvidia-smi topo -m``."""
    rows = [_ESCAPES.sub("", line).split() for line in text.splitlines()]
    heading = next((row for row in rows if row[:1] == ["GPU0"] and row[1:2] != ["X"]), [])
    gpus = [word for word in heading if re.fullmatch(r"GPU\d+", word)]
    cells = {row[0]: row[1:] for row in rows if row and row[0] in gpus and "X" in row}
    return {
        (one, other): cells[one][gpus.index(other)]
        for one, other in combinations(gpus, 2)
        if len(cells.get(one, ())) > gpus.index(other)
    }


def links(text: str) -> dict[str, tuple[int, int]]:
    """Links that are up, and all links, of each GPU, from ``nvidia-smi nvlink --status``."""
    found: dict[str, tuple[int, int]] = {}
    gpu = ""
    for line in _ESCAPES.sub("", text).splitlines():
        if heading := re.match(r"GPU (\d+):", line):
            gpu = f"GPU{heading[1]}"
        elif gpu and (link := re.match(r"\s+Link \d+: (.+)", line)):
            up, of = found.get(gpu, (0, 0))
            found[gpu] = up + (re.match(r"[\d.]+ GB/s", link[1]) is not None), of + 1
    return found


def islands(paths: Topology) -> list[list[str]]:
    """GPUs that NVLink connects, directly or through others."""
    groups: list[list[str]] = []
    for one, other in paths:
        for gpu in (one, other):
            if not any(gpu in group for group in groups):
                groups.append([gpu])
        if paths[one, other].startswith("NV"):
            first, second = (next(g for g in groups if gpu in g) for gpu in (one, other))
            if first is not second:
                groups.remove(second)
                first += second
    return sorted(sorted(group, key=_number) for group in groups)


def _number(gpu: str) -> int:
    return int(gpu.removeprefix("GPU"))


def of_topology(paths: Topology) -> Finding:
    """Whether NVLink connects every pair of GPUs; if not, where it ends."""
    what = "NVLink between GPUs"
    if not paths:
        return Finding(what, "good", "no two GPUs to connect")
    kinds = Counter(paths.values())
    listed = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))
    text = f"{len(paths)} pairs of GPUs: {listed}"
    if all(kind.startswith("NV") for kind in kinds):
        return Finding(what, "good", text)
    groups = islands(paths)
    if len(groups) == len({gpu for pair in paths for gpu in pair}):
        farthest = max(kinds, key=lambda kind: [*PATHS].index(kind) if kind in PATHS else -1)
        slow = f"{text}: no NVLink; the longest path is {PATHS.get(farthest, farthest)}"
        remedy = (
            "keep all-reduces of activations small: shard the data axis or use a pipeline before "
            "tensor parallelism; use GPUs of one socket first (CUDA_VISIBLE_DEVICES)"
        )
        return Finding(what, "note", slow, remedy)
    joined = "; ".join(",".join(group) for group in groups)
    remedy = f"make tensor-parallel groups of GPUs that NVLink joins: {joined}"
    return Finding(what, "note", text, remedy)


def of_links(found: Mapping[str, tuple[int, int]]) -> Finding | None:
    """Whether every link of every GPU is up; ``None`` if no GPU has links."""
    if not found:
        return None
    down = {gpu: f"{gpu} {up} of {of} up" for gpu, (up, of) in found.items() if up < of}
    if not down:
        counts = sorted({of for _, of in found.values()})
        text = f"all up: {len(found)} GPUs with {' or '.join(map(str, counts))} links each"
        return Finding("NVLink links", "good", text)
    remedy = (
        "look for Xid 74 in `dmesg` and reseat or replace the bridge; with NVSwitch, start "
        "nvidia-fabricmanager; then run `nvidia-smi nvlink --status` again"
    )
    return Finding("NVLink links", "note", _some([*down.values()]), remedy)


def _some(words: Sequence[str]) -> str:
    more = f" and {len(words) - _NAMED} more" if len(words) > _NAMED else ""
    return ", ".join(words[:_NAMED]) + more


class Port(NamedTuple):
    """A port of an InfiniBand or RoCE card, as the kernel describes it."""

    name: str
    state: str
    physical: str
    rate: str
    layer: str

    @property
    def is_active(self) -> bool:
        """Whether data can go through it."""
        return self.state == "ACTIVE"


def ports(devices: Path = DEVICES) -> list[Port]:
    """Every port below ``devices``; empty if the kernel has none."""

    def word(file: Path) -> str:
        try:
            return file.read_text().strip().split(": ")[-1]
        except OSError:
            return "unknown"

    found = []
    for folder in sorted(devices.glob("*/ports/*")):
        name = f"{folder.parts[-3]}:{folder.name}"
        found.append(Port(name, *(word(folder / file) for file in _FILES)))
    return found


_FILES = ("state", "phys_state", "rate", "link_layer")


def chosen(names: Iterable[str], pattern: str) -> list[str]:
    """The names that ``NCCL_IB_HCA`` or ``NCCL_SOCKET_IFNAME`` selects.

    Its words are prefixes; after ``=`` whole names; after ``^`` names that are left out.
    """
    excludes, rest = pattern.startswith("^"), pattern.removeprefix("^")
    exact, words = rest.startswith("="), rest.removeprefix("=").split(",")

    def fits(name: str, word: str) -> bool:
        device = name.split(":")[0]
        if ":" in word or exact:
            return word in (name, device)
        return name.startswith(word)

    return [name for name in names if any(fits(name, word) for word in words) != excludes]


def infiniband(
    found: Sequence[Port], variables: Mapping[str, str], opened: Path = OPENED, locked: int = -1
) -> Iterator[Finding]:
    """Cards, their ports, and settings that switch them off.

    ``locked``: bytes that a process may lock in memory; negative: as many as it likes.
    """
    what, off = "InfiniBand", _is_on(variables.get("NCCL_IB_DISABLE", "0"))
    if not found:
        text = "no card: between nodes NCCL and gloo send over TCP"
        yield Finding(what, "good", f"{text}; NCCL_IB_DISABLE changes nothing" if off else text)
        return
    active = [port for port in found if port.is_active]
    text = _some([f"{p.name} {p.state}, {p.rate}, {p.layer}" for p in found])
    if not active:
        yield Finding(what, "note", text, _raised(found))
    elif off:
        remedy = "unset NCCL_IB_DISABLE: with it NCCL sends over TCP, many times slower"
        yield Finding(what, "note", f"{text}; but NCCL_IB_DISABLE is set", remedy)
    else:
        down = [port for port in found if not port.is_active]
        yield Finding(what, "note" if down else "good", text, _raised(down) if down else "")
    pattern = variables.get("NCCL_IB_HCA", "")
    if active and pattern and not chosen([port.name for port in active], pattern):
        names = _some([port.name.split(":")[0] for port in active])
        remedy = f"name an active port ({names}), or unset NCCL_IB_HCA"
        yield Finding("NCCL_IB_HCA", "note", "selects no active port", remedy)
    if active and not off and not opened.exists():
        remedy = "in containers: --device=/dev/infiniband and --ulimit memlock=-1"
        yield Finding("access to InfiniBand", "note", f"there is no {opened}", remedy)
    if active and not off and 0 <= locked < _LOCKED_BYTES:
        remedy = "`ulimit -l unlimited`; in containers --ulimit memlock=-1"
        yield Finding("memory that may be locked", "note", f"{locked >> 10} KiB", remedy)


def _raised(down: Sequence[Port]) -> str:
    """Bring up ports that are not active: what to do depends on how far they came."""
    if any(port.state in ("INIT", "ARMED") for port in down):
        return "a cable is in, and no subnet manager answered: start opensm, or ask for the fabric"
    return "check cable and switch (`ibstat`); NCCL_IB_HCA names the cards to use"


def _is_on(value: str) -> bool:
    return value.strip() not in ("", "0")


def examine() -> Iterator[Finding]:
    """All findings about this machine's links and cards."""
    tool = shutil.which("nvidia-smi")
    asked = [output(tool, *words) if tool else None for words in _QUESTIONS]
    paths, states = (text or "" for text in asked)
    yield of_topology(topology(paths))
    if finding := of_links(links(states)):
        yield finding
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield from infiniband(ports(), os.environ, locked=soft)


_QUESTIONS = (("topo", "-m"), ("nvlink", "--status"))

"""Settings of torch, NCCL and gloo that are in force: timeouts, transports, output for debugging.

Values of other variables than those listed here are never printed, nor any that is not a number.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from shardproof.doctor.network import chosen
from shardproof.wings import Finding

#: torch 2.13: ``ProcessGroupNCCL.hpp`` (calls) and its ``HeartbeatMonitor``.
CALL_OF_NCCL, WATCHDOG = timedelta(minutes=10), timedelta(minutes=8)
HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
#: What torchrun and ``init_process_group`` take for ``MASTER_PORT``.
PORT = 29500
#: Names that people set for a timeout, and no library reads.
NO_TIMEOUTS = ("NCCL_SOCKET_TIMEOUT", "NCCL_TIMEOUT", "NCCL_TIMEOUT_MS", "TORCH_NCCL_TIMEOUT")
INSTEAD = "pass timeout=timedelta(minutes=60) to init_process_group and new_group"
#: Name and value -> effect, and what to do about it.  NCCL reads `1` as on.
HINDRANCES = {
    ("NCCL_P2P_DISABLE", "1"): ("GPUs do not send directly, not even over NVLink", "unset it"),
    ("NCCL_SHM_DISABLE", "1"): (
        "ranks of one node send over the network",
        "unset it; if /dev/shm is too small, enlarge it (--shm-size 1g)",
    ),
    ("NCCL_NET_GDR_LEVEL", "LOC"): ("cards do not read memory of GPUs", "unset it"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"): (
        "a call past its timeout is not ended: ranks wait for ever",
        "unset it (3 is the default)",
    ),
    ("TORCH_NCCL_ENABLE_MONITORING", "0"): (
        "a watchdog that is stuck itself is not ended",
        "unset it, or raise " + HEARTBEAT,
    ),
    ("TORCH_NCCL_BLOCKING_WAIT", "1"): ("every wait stops the CPU: no overlap", "unset it"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): (
        "every collective is compared between ranks first",
        "unset it when the fault is found",
    ),
    ("CUDA_LAUNCH_BLOCKING", "1"): ("every kernel is waited for", "unset it"),
    ("NCCL_DEBUG", "TRACE"): ("NCCL prints every call", "INFO is enough to see its transports"),
}
#: Files with settings of NCCL, which count where the environment has none.
FILES = (Path("/etc/nccl.conf"), Path("~/.nccl.conf"))


def timeouts(variables: Mapping[str, str], call: timedelta) -> Finding:
    """How long calls may take; ``call``: torch's limit for all backends but NCCL."""
    given = variables.get(HEARTBEAT, "")
    watchdog = timedelta(seconds=int(given)) if given.isdecimal() else WATCHDOG
    text = (
        f"a call and the rendezvous may take {_minutes(call)}, on NCCL {_minutes(CALL_OF_NCCL)} "
        f"(`timeout=` of init_process_group); NCCL's watchdog {_minutes(watchdog)}"
    )
    unread = [name for name in NO_TIMEOUTS if name in variables]
    if unread:
        return Finding("timeouts", "note", f"{text}; no library reads {', '.join(unread)}", INSTEAD)
    if given and not given.isdecimal():
        return Finding("timeouts", "note", text, f"give {HEARTBEAT} a whole number of seconds")
    return Finding("timeouts", "good", text)


def _minutes(time: timedelta) -> str:
    return f"{time.total_seconds() / 60:g} min"


def hindrances(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Settings that slow calls down or keep a failure from ending."""
    for (name, value), (effect, remedy) in HINDRANCES.items():
        if variables.get(name, "").upper() == value:
            yield Finding(name, "note", f"{value}: {effect}", remedy)


def interfaces(
    variables: Mapping[str, str], names: Sequence[str], has_gpus: bool
) -> Iterator[Finding]:
    """Whether the interface of NCCL exists; that of gloo has a finding of its own."""
    pattern = variables.get("NCCL_SOCKET_IFNAME", "")
    if not pattern:
        return
    found = chosen(names, pattern)
    if found:
        yield Finding("interface of NCCL", "good", ", ".join(found))
        return
    there = ", ".join(names)
    text = f"NCCL_SOCKET_IFNAME selects none of {there}"
    yield Finding("interface of NCCL", "bad" if has_gpus else "note", text, "name one of these")


def port(variables: Mapping[str, str]) -> Finding:
    """Whether ranks can meet at the port that launchers use unless another is named."""
    given = variables.get("MASTER_PORT", "")
    number = int(given) if given.isdecimal() and int(given) < 1 << 16 else PORT
    try:
        socket.create_server(("", number)).close()
    except OSError as error:
        remedy = "`torchrun --standalone`, or another MASTER_PORT; end a job that was left over"
        return Finding("rendezvous port", "note", f"{number}: {error.strerror}", remedy)
    return Finding("rendezvous port", "good", f"{number} is free")


def files(paths: Sequence[Path] = FILES) -> Iterator[Finding]:
    """Files from which NCCL takes settings, with the names in them."""
    for path in paths:
        try:
            text = path.expanduser().read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        names = re.findall(r"^\s*(NCCL_\w+)\s*=", text, re.MULTILINE)
        if names:
            yield Finding(f"settings in {path}", "note", ", ".join(names), "they count as well")


def examine(has_gpus: bool) -> Iterator[Finding]:
    """All findings about settings of this shell and machine."""
    from torch.distributed.constants import default_pg_timeout

    yield timeouts(os.environ, default_pg_timeout)
    yield port(os.environ)
    yield from hindrances(os.environ)
    yield from interfaces(os.environ, [name for _, name in socket.if_nameindex()], has_gpus)
    yield from files()

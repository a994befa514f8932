"""Sets and measures the caps of a node inside it, and cuts it off; of the standard library alone.

So that it starts at once.

``python -m shardproof.cluster.containers.node_caps WORD [ARGUMENT...]``; each function below is a
word, and its result is printed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from shardproof.cluster.nodes.doors import START_SECONDS, awaited

#: The interface that the engine gives a container.
INTERFACE = "eth0"
#: Where a node receives what is sent to measure bandwidth.  Ranks take ports from 32768 on.
PORT = 29400
#: Seconds that a core is kept busy: many times the 0.1 s over which the kernel counts a quota.
_BUSY_SECONDS = 2.0
#: Seconds that sender and receiver have to find each other.
_MEET_SECONDS = 60.0
#: Seconds after which a transfer, made to take one, is measured as far as it came.
_MOST_SECONDS = 3.0
_CHUNK = 1 << 16
#: The number of the tbf in the kernel.
_HANDLE = 1 << 16
#: What stands for the interface itself in place of another queueing discipline's number.
_AT_ROOT = 0xFFFFFFFF
#: Exit code of ``delay`` where the kernel has no netem.
NO_NETEM = 4
_MEMORY_FILES = ("memory.max", "memory/memory.limit_in_bytes")  # of cgroup 2 and 1


class NoCap(RuntimeError):
    """A cap cannot be set or measured; the message says why and what to do."""


def burst(bytes_per_second: int) -> int:
    """Bytes that pass at once: those of 2 ms, as timers may be late; some packets at least."""
    return max(1 << 14, bytes_per_second // 500)


def wait(*doors: str, seconds: float = START_SECONDS) -> None:
    """Until the agents have imported what ranks need, which takes all their cores.

    :raises NoCap: one has not come.
    """
    if (late := awaited(map(Path, doors), seconds)) is not None:
        raise NoCap(f"the agent of {late.name} has not started within {seconds:g} s")


def shape(bytes_per_second: str) -> None:
    """Send no faster than this: the token bucket filter of the kernel (tbf).

    What ``tc qdisc replace dev eth0 root tbf`` does, as one message to the kernel, because images
    need no ``tc`` then.  It needs the capability NET_ADMIN in the network of the node.

    :raises NoCap: the kernel does not take it.
    """
    try:
        _ask_kernel(shaping(socket.if_nametoindex(INTERFACE), int(bytes_per_second)))
    except OSError as error:
        remedy = {
            errno.ENOENT: "the kernel has no tbf; load the kernel module sch_tbf",
            errno.EPERM: "the engine must grant NET_ADMIN in a node's network; use one that does",
        }.get(error.errno or 0, "`shardproof doctor --cluster` lists what the kernel has")
        raise NoCap(f"bandwidth cannot be capped ({error.strerror}): {remedy}") from None


def link(state: str) -> None:
    """Take the node's interface ``down``, and with it its routes, or ``up``; its address stays.

    :raises OSError: the kernel does not do it.
    """
    set_link, is_up = 16, 1
    flags = is_up if state == "up" else 0
    interface = socket.if_nametoindex(INTERFACE)
    body = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, interface, flags, is_up)
    _ask_kernel(_message(set_link, 0, body))


def shaping(interface: int, bytes_per_second: int) -> bytes:
    """The message that asks the kernel for a tbf (``linux/rtnetlink.h``, ``pkt_sched.h``)."""
    ethernet, parameters, burst_attribute = 1, 1, 6
    at_once = burst(bytes_per_second)
    # What waits, for 50 ms or longer; more is dropped.  TCP hands over up to 64 KiB in one piece.
    queue = at_once + max(1 << 18, bytes_per_second // 20)
    rate = struct.pack("=BBHhHI", 0, ethernet, 0, 0, 0, bytes_per_second)
    no_peak = bytes(len(rate))
    tbf = _attribute(parameters, rate + no_peak + struct.pack("=III", queue, 0, 0))
    tbf += _attribute(burst_attribute, struct.pack("=I", at_once))
    return _queueing(interface, _HANDLE, _AT_ROOT, b"tbf\0", tbf)


def delay(microseconds: str, below: str = "") -> None:
    """Send everything so much later: the network emulator of the kernel (netem).

    ``below``: something, where ``shape`` has capped the bandwidth.  Ends with exit code
    ``NO_NETEM`` where the kernel has none.

    :raises NoCap: the kernel does not take it.
    """
    interface = socket.if_nametoindex(INTERFACE)
    try:
        _ask_kernel(delaying(interface, 1000 * int(microseconds), bool(below)))
    except OSError as error:
        if error.errno == errno.ENOENT:
            sys.exit(NO_NETEM)
        raise NoCap(f"messages cannot be delayed ({error.strerror})") from None


def delaying(interface: int, nanoseconds: int, below: bool) -> bytes:
    """The message that asks the kernel for a netem, at the root or ``below`` a tbf."""
    latency, packets = 10, 100_000  # packets that may be under way
    netem = struct.pack("=IIIIII", 0, packets, 0, 0, 0, 0)
    netem += _attribute(latency, struct.pack("=q", nanoseconds))
    parent = _HANDLE + 1 if below else _AT_ROOT
    return _queueing(interface, 2 * _HANDLE, parent, b"netem\0", netem)


def _queueing(interface: int, handle: int, parent: int, name: bytes, options: bytes) -> bytes:
    """The message that asks the kernel for a queueing discipline of that name in place of any."""
    new_qdisc, replace, create, kind_attribute, options_attribute = 36, 0x100, 0x400, 1, 2
    body = struct.pack("=BxxxiIII", socket.AF_UNSPEC, interface, handle, parent, 0)
    body += _attribute(kind_attribute, name) + _attribute(options_attribute, options)
    return _message(new_qdisc, replace | create, body)


def _message(kind: int, flags: int, body: bytes) -> bytes:
    request, ack = 1, 4
    return struct.pack("=IHHII", 16 + len(body), kind, request | ack | flags, 1, 0) + body


def _attribute(number: int, value: bytes) -> bytes:
    padding = bytes(-len(value) % 4)
    return struct.pack("=HH", 4 + len(value), number) + value + padding


def _ask_kernel(message: bytes) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.send(message)
        answer = kernel.recv(_CHUNK)
    (code,) = struct.unpack_from("=i", answer, 16)
    if code:
        raise OSError(-code, os.strerror(-code))


def cores(processes: str) -> float:
    """Cores that so many busy processes get."""
    before, began, busy = _of_children(), time.monotonic(), []
    for _ in range(int(processes)):
        if (pid := os.fork()) == 0:
            while time.monotonic() < began + _BUSY_SECONDS:
                pass
            os._exit(0)
        busy.append(pid)
    for pid in busy:
        os.waitpid(pid, 0)
    return (_of_children() - before) / (time.monotonic() - began)


def _of_children() -> float:
    """CPU seconds of those that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def memory(folder: str = "/sys/fs/cgroup") -> int:
    """Bytes that the kernel lets the node have, by its cgroup; 0: no limit is known."""
    for name in _MEMORY_FILES:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            return int((Path(folder) / name).read_text())
    return 0


def receive(skip: str, *, port: int = PORT) -> float:
    """Bytes per second at which one sender's bytes come, the first ``skip`` of them left out."""
    came, counted_from = 0, 0
    with socket.create_server(("", port)) as server:
        server.settimeout(_MEET_SECONDS)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(_MOST_SECONDS)
        first = began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            while (part := connection.recv(_CHUNK)) and time.monotonic() < first + _MOST_SECONDS:
                came += len(part)
                if not counted_from and came >= int(skip):
                    counted_from, began = came, time.monotonic()
    return (came - counted_from) / (time.monotonic() - began)


def send(host: str, count: str, *, port: int = PORT) -> None:
    """Send so many bytes to ``receive`` on another node, as soon as that is there.

    :raises OSError: it does not come, or cannot be reached.
    """
    deadline, connection = time.monotonic() + _MEET_SECONDS, None
    while connection is None:
        try:
            connection = socket.create_connection((host, port), timeout=_MEET_SECONDS)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    with connection, contextlib.suppress(OSError):  # the receiver has seen enough
        for first in range(0, int(count), _CHUNK):
            connection.sendall(bytes(min(_CHUNK, int(count) - first)))


_WORDS: dict[str, Callable[..., object]] = {
    word.__name__: word for word in (wait, shape, delay, link, cores, memory, receive, send)
}


def main(word: str, *arguments: str) -> None:
    """Do what ``word`` says."""
    try:
        print(_WORDS[word](*arguments))
    except (NoCap, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])

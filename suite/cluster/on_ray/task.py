"""The Ray task: judges one case on the machine on which Ray put it.

A process of Ray has threads and may be killed at any time.  So it neither imports torch nor forks:
it keeps a *case server* (``cluster/on_ray/server.py``), which does both, for all its cases.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

from shardproof import VERSION

#: What must be equal wherever cases of one run are judged, by name.
Versions = dict[str, str]


class OtherVersions(Exception):
    """This machine would judge by another suite, torch or Python."""


class ServerGone(Exception):
    """The case server ended with the case."""


def judge(case: bytes, wanted: Versions) -> bytes:
    """Judge ``case``; it, the result and the account are JSON, as the case server reads and writes.

    :raises OtherVersions: another suite, torch or Python than ``wanted``.
    :raises ServerGone: the case server ended.
    """
    require(wanted)
    server = _server()
    try:
        return server.judge(case)
    except ServerGone:
        _server.cache_clear()
        raise


def require(wanted: Versions) -> None:
    """Check the versions of this machine.

    :raises OtherVersions: they differ.
    """
    here = versions()
    odd = {name: value for name, value in wanted.items() if here.get(name) != value}
    if odd:
        told = (f"{name} {here.get(name)} instead of {value}" for name, value in odd.items())
        raise OtherVersions(", ".join(told))


@functools.cache
def versions() -> Versions:
    """Those of this machine; the suite's has a digest, which a version under work needs."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "(none)"
    suite = f"{VERSION} ({_code()})"
    return {"shardproof": suite, "torch": torch, "Python": platform.python_version()}


def _code() -> str:
    """Digest of the modules of the suite and of the implementations that it brings."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for part in (root, (root / "impls").resolve()):
        for file in sorted(part.rglob("*.py")):
            if "impls" not in file.relative_to(part).parts[:1]:
                digest.update(f"{file.relative_to(part)} ".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def _server() -> Server:
    return Server()


class Server:
    """The other end of a case server.  The server ends when this process does."""

    def __init__(self) -> None:
        path = os.pathsep.join(str(Path(p).resolve()) for p in sys.path)
        started = subprocess.Popen(
            [sys.executable, "-m", "shardproof.cluster.on_ray.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        assert started.stdin is not None and started.stdout is not None
        self._out, self._back = started.stdin, started.stdout
        started.wait()  # it goes on in a child, see there

    def judge(self, case: bytes) -> bytes:
        """Have the case judged.

        :raises ServerGone: it ended.
        """
        try:
            self._out.write(case + b"\n")
            self._out.flush()
            line = self._back.readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise ServerGone("the worker process ended during a case: see its log with `ray logs`")
        return line

    def close(self) -> None:
        """Have it end."""
        self._out.close()
        self._back.close()

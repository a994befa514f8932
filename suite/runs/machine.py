"""The versions that judged a run, and the allow-listed facts about its machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from shardproof import VERSION
from shardproof.launch.fork_server import REPRODUCIBLE
from shardproof.launch.nodes import facts_here
from shardproof.launch.process_control import cores
from shardproof.runs.header import Fingerprint, Gpu, Invocation

_PACKAGES = ("torch", "numpy", "pydantic", "PyYAML", "scikit-learn", "scipy")
#: They make torch, oneDNN and MKL use other kernels than the CPU's best, which round otherwise.
KERNEL_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
)
_ROOT = Path(__file__).resolve().parents[2]
#: In an image: what it was made of (``Dockerfile``).
_IMAGE = _ROOT / "image.json"


def begun(command: Sequence[str], now: str) -> Invocation:
    """An invocation of ``command`` that starts on this machine.

    The head of a cluster is told what was typed, by which commit.
    """
    facts = facts_here()
    cluster = {} if facts is None else {"cluster": facts["told"]}
    if facts is not None:
        command = facts["command"]
    return Invocation(
        **cluster,
        # A file name may hold bytes that are no text.
        command=[os.fsencode(word).decode(errors="replace") for word in command],
        started=now,
        ended=None,
        exit_code=None,
        pid=os.getpid(),
        nonce=secrets.token_hex(16),
        suite=VERSION,
        commit=commit() if facts is None else facts["commit"],
        python=platform.python_version(),
        packages={name: _version(name) for name in _PACKAGES},
        fingerprint=fingerprint(),
    )


def fingerprint() -> Fingerprint:
    return Fingerprint(
        cpu=cpu_model(),
        cores=cores(),
        memory_bytes=_memory_bytes(),
        system=platform.system(),
        machine=platform.machine(),
        gpus=gpus(),
        kernels=_kernels(),
    )


def gpus() -> list[Gpu]:
    """Every GPU that the driver's own tool lists; empty without one."""
    tool = shutil.which("nvidia-smi")
    query = "--query-gpu=name,memory.total,driver_version"
    listed = output(tool, query, "--format=csv,noheader") if tool else None
    rows = [[part.strip() for part in line.split(",")] for line in (listed or "").splitlines()]
    return [Gpu(name=row[0], memory=row[1], driver=row[2]) for row in rows if len(row) == 3]


def _kernels() -> dict[str, str]:
    """The kernels of torch on this CPU, and the variables that choose kernels of ranks."""
    import torch  # not above: who only reads runs does without

    chosen = {name: os.environ[name] for name in KERNEL_VARIABLES if name in os.environ}
    return {"torch": torch.backends.cpu.get_cpu_capability(), **REPRODUCIBLE, **chosen}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The suite's commit, with ``+changes`` if files differ from it; ``None``: it is unknown.

    In an image, which is outside of git, the image tells it.
    """
    if told := image().get("commit"):
        return told
    head = output("git", "-C", str(_ROOT), "rev-parse", "HEAD")
    changed = output("git", "-C", str(_ROOT), "status", "--porcelain", "--untracked-files=no")
    if head is None or changed is None:
        return None
    return head + ("+changes" if changed else "")


def image() -> dict[str, str]:
    """The labels of the image in which this runs: ``commit`` and ``source``, the digest of its
    inputs; those that its build did not get are left out.
    """
    try:
        told = json.loads(_IMAGE.read_text())
    except OSError:
        return {}
    return {name: str(value) for name, value in told.items() if value}


def output(*command: str) -> str | None:
    """The output of ``command``; ``None`` if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def cpu_model() -> str:
    """The name of this machine's CPU."""
    try:
        told = re.search(r"(?im)^model name\s*:(.*)$", Path("/proc/cpuinfo").read_text("utf-8"))
    except OSError:  # not on Linux, or hidden in a sandbox
        told = None
    return (told[1] if told else platform.processor()).strip()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):  # a system that does not count pages
        return None

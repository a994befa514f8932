"""The part of ``shardproof doctor --cluster``: containers, their network, Slurm and Ray."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shardproof.cluster.containers import engine, image_inputs
from shardproof.wings import Finding

#: Bytes that both images and the layers that make them take.
IMAGES_BYTES = 8 << 30
#: Seconds that a program has to answer.
_SECONDS = 20.0
#: Weather: what is asked of the kernel, and how ``tc`` is asked for it.
_QDISCS = {
    "tbf": ("rate", "100mbit", "burst", "64k", "latency", "50ms"),
    "htb": ("default", "1"),
    "netem": ("delay", "1ms"),
}
#: Gives the exit code and the output of a command.
Ask = Callable[..., tuple[int, str]]


def _has(what: str, found: str | None, lacking: str, remedy: str) -> Finding:
    """The finding for ``found``; if empty, for what is ``lacking``, which is no fault."""
    if found:
        return Finding(what, "good", found)
    return Finding(what, "note", lacking, remedy)


def examine() -> Iterator[Finding]:
    """All findings; nothing is changed."""
    try:
        client = engine.client()
    except engine.NoCluster as error:
        yield Finding("container engine", "bad", str(error), "start it, then run this again")
    else:
        with contextlib.closing(client):
            yield from of_engine(client.info(), client.version())
            yield from _images(client)
    yield from weather(ask, os.geteuid() == 0)
    yield slurm(ask)
    yield _ray()


def engine_alone() -> Iterator[Finding]:
    """Whether a container engine answers."""
    missing, remedy = engine.engine_missing(), "needed by `shardproof cluster` only"
    yield _has("container engine", None if missing else "answers", missing or "", remedy)


def ask(*command: str) -> tuple[int, str]:
    """Exit code and output; 127 where there is no such program, 124 where it does not answer."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except FileNotFoundError:
        return 127, f"no program {command[0]}"
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {_SECONDS:g} s"
    return done.returncode, (done.stdout + done.stderr).strip()


def of_engine(info: Mapping[str, Any], version: Mapping[str, Any]) -> Iterator[Finding]:
    """The engine's report on itself: versions, cgroup, limits, space and GPUs."""
    told = f"{version.get('Version')}, API {version.get('ApiVersion')}, {info.get('Driver')}"
    yield Finding("container engine", "good", told)
    cgroup = f"version {info.get('CgroupVersion')}, {info.get('CgroupDriver')}"
    limits = {"--memory": "MemoryLimit", "--cpus": "CpuCfsQuota"}
    lacking = [option for option, key in limits.items() if not info.get(key)]
    whole = None if lacking else f"{cgroup}, limits of memory and of CPU time"
    remedy = "enable these cgroup controllers at boot, or leave the options out"
    yield _has("cgroup", whole, f"{cgroup}, without support of {' and '.join(lacking)}", remedy)
    yield _space(Path(str(info.get("DockerRootDir", ""))))
    runtime = "runtime nvidia" if "nvidia" in info.get("Runtimes", {}) else None
    remedy = "install the NVIDIA container toolkit, if nodes are to have GPUs"
    yield _has("GPUs in containers", runtime, "no runtime nvidia", remedy)


def _space(folder: Path) -> Finding:
    if not folder.is_dir():
        return Finding("space for images", "note", f"{folder} is not on this machine")
    free = shutil.disk_usage(folder).free
    text = f"{free / 2**30:.1f} GiB free in {folder}"
    if free < IMAGES_BYTES:
        return Finding("space for images", "bad", text, "make room, e.g. `docker system prune`")
    return Finding("space for images", "good", text)


def _images(client: Any) -> Iterator[Finding]:
    for target in (*image_inputs.LEAN, *image_inputs.EVERYTHING):
        name = engine.image_name(target)
        sizes = [f"{one.attrs['Size'] / 1e9:.2f} GB" for one in client.images.list(name)]
        remedy = "`shardproof cluster build`"
        yield _has(f"image {name}", next(iter(sizes), None), "not built", remedy)


def weather(ask: Ask, is_root: bool) -> Iterator[Finding]:
    """Which queueing disciplines the kernel has, tried in a network of their own."""
    if ask("tc", "-V")[0]:
        yield Finding("tc", "note", "not installed", "install iproute2 to try what the kernel has")
        return
    if not is_root:
        yield Finding("tc", "note", "not tried", "run as root: the test makes a network namespace")
        return
    for name, words in _QDISCS.items():
        code, said = ask(
            "unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", name, *words
        )
        reason = said.splitlines()[-1] if said else f"exit code {code}"
        remedy = f"load the kernel module sch_{name}, if there is one"
        yield _has(f"tc {name}", None if code else "the kernel has it", reason, remedy)


def slurm(ask: Ask) -> Finding:
    """Whether there is a Slurm whose controller answers."""
    code, said = ask("sinfo", "--noheader", "--format", "%D nodes %T")
    if code == 127:
        return Finding("Slurm", "note", "not installed", "needed by deploy/slurm only")
    nodes = None if code else ", ".join(said.splitlines())
    remedy = "start slurmctld and slurmd, or run this on a login node; for deploy/slurm only"
    return _has("Slurm", nodes, "no controller answers", remedy)


def _ray() -> Finding:
    found = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found = importlib.metadata.version("ray")
    remedy = "pip install 'shardproof[ray]', for `run --on ray`"
    return _has("Ray", found, "not installed", remedy)

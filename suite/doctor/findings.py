"""Traps of this machine, each with its remedy, before they cost a run."""

from __future__ import annotations

import difflib
import importlib.util
import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import yaml

from shardproof import wings
from shardproof.backends import BACKENDS, Backend
from shardproof.backends.gloo import INTERFACE, Gloo, loopback, problem_of_interface
from shardproof.backends.gloo_cuda import GlooCuda
from shardproof.backends.mpi import Mpi
from shardproof.doctor import network, settings
from shardproof.launch.process_control import cores
from shardproof.runs import machine
from shardproof.wings import Finding

#: Bytes of shared memory that the records of a few cases at once may take.
SHARED_BYTES = 256 << 20
#: Bytes of memory that two cases at once need, torch included.
MEMORY_BYTES = 2 << 30
#: Bytes that the records of a full run take, with room to spare.
DISK_BYTES = 256 << 20


#: Where a name is nearer than this to a known one, it is that one misspelt.
_NEAR = 0.8


def examine(results: Path, thorough: bool = False) -> Iterator[Finding]:
    """All findings, quick ones first; ``results`` is where runs are to be written.

    ``thorough``: wings look at all that they need.
    """
    yield Finding("python", "good", sys.version.split()[0])
    for look_at in (_torch, _cores, _memory, _shared_memory, _left_over, _name):
        yield look_at()
    yield _results(results)
    of_gloo, of_mpi = [_interface(), _gloo()], list(_mpi())
    yield from (*of_gloo, *of_mpi, _gpus(), _nccl(), _variables())
    yield from (*network.examine(), *settings.examine(has_gpus=bool(machine.gpus())))
    yield from _backends({Gloo: of_gloo, Mpi: of_mpi})
    for wing in wings.wings():
        yield from wing.findings(thorough)


def _backends(tried: Mapping[type[Backend], Sequence[Finding]]) -> Iterator[Finding]:
    """Whether cases of each backend can run here; ``tried``: what was found out by trying."""
    for name, backend in BACKENDS.items():
        found = [f for kind, each in tried.items() if isinstance(backend, kind) for f in each]
        what, failed = f"backend {name}", [f for f in found if f.state == "bad"]
        reason = backend.available()
        if reason:
            yield Finding(what, "note", reason, backend.remedy)
        elif failed:
            yield Finding(what, "bad", f"{failed[0].what}: {failed[0].found}", failed[0].remedy)
        else:
            yield Finding(what, "good", _reach(backend))


def _reach(backend: Backend) -> str:
    """How many ranks ``backend`` takes here."""
    if backend.device != "cuda" or backend.shares_devices:
        return "can run here, at any number of ranks"
    import torch

    return f"can run here, at up to {torch.cuda.device_count()} ranks: one per GPU"


def look(what: str, found: str, remedy: str, state: Literal["note", "bad"] = "bad") -> Finding:
    """One look; good, if there is nothing to remedy."""
    return Finding(what, state if remedy else "good", found, remedy)


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "bad", "not installed", "`make setup`, or pip install torch")
    import torch

    build = f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        remedy = "install a build of torch with distributed and gloo"
        return Finding("torch", "bad", f"{build}, without gloo", remedy)
    return Finding("torch", "good", build)


def _cores() -> Finding:
    remedy = "ranks take turns: runs take longer" if cores() < 2 else ""
    return look("cores", str(cores()), remedy, "note")


def _memory() -> Finding:
    import psutil

    free = int(psutil.virtual_memory().available)
    remedy = "free 2 GiB, or run with -j 1" if free < MEMORY_BYTES else ""
    return look("memory", f"{free / 2**30:.1f} GiB available", remedy)


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        text = f"none; work folders go to {tempfile.gettempdir()}"
        return Finding("/dev/shm", "note", text, "mount a tmpfs there for faster runs")
    size, remedy = shutil.disk_usage(folder), ""
    if size.total < SHARED_BYTES:
        remedy = "/dev/shm is too small; in containers: --shm-size 1g (default: 64 MiB)"
    elif size.free < SHARED_BYTES:
        remedy = "remove files from /dev/shm, or enlarge it (in containers: --shm-size 1g)"
    text = f"{size.free / 2**20:.0f} of {size.total / 2**20:.0f} MiB free"
    return look("/dev/shm", text, remedy)


def _left_over() -> Finding:
    from shardproof.launch.workspace import sweep, workspace_base

    removed = sweep(workspace_base())
    text = f"removed {len(removed)} of killed runs" if removed else "none"
    return Finding("left-over work folders", "good", text)


def _results(results: Path) -> Finding:
    folder = results.resolve()
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as stream:
            stream.write(b"x" * 4096)
            stream.flush()
    except OSError as error:
        remedy = "choose another folder with --results"
        return Finding("results", "bad", f"{folder} cannot be written: {error.strerror}", remedy)
    free = shutil.disk_usage(folder).free
    text = f"{folder} is writable, {free / 2**30:.1f} GiB free"
    return look("results", text, "make room" if free < DISK_BYTES else "")


def _name() -> Finding:
    """torch's launchers hand out this machine's name: it must have an address, and between
    machines one that others can reach.
    """
    name, remedy = socket.gethostname(), ""
    try:
        address = socket.gethostbyname(name)
    except OSError:
        found = f"{name} has no address"
        remedy = f"add `127.0.0.1 {name}` to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo"
    else:
        found = f"{name} is {address}"
        if ipaddress.ip_address(address).is_loopback:
            found += ", the loopback, which other machines cannot reach"
            remedy = (
                "nothing to do on one machine; for several correct /etc/hosts, or name the "
                "interface that they share in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
            )
    return look("host name", found, remedy, "note")


def _interface() -> Finding:
    """The interface of gloo: the loopback, unless the environment names another."""
    given = os.environ.get(INTERFACE, "")
    if problem := problem_of_interface(given):
        return Finding("interface of gloo", "bad", problem.what, problem.remedy)
    return Finding("interface of gloo", "good", given or loopback())


def _tried(command: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """Lines that ``command`` prints as it fails; empty: it succeeds."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=90, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return ["no answer within 90 s"]
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return said if done.returncode else []


_PAIR = """
import datetime, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
def rank(number, path):
    options = dist.ProcessGroupGloo._Options()
    options._timeout = datetime.timedelta(seconds=20)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = dist.ProcessGroupGloo(dist.FileStore(path, 2), number, 2, options)
    value = torch.ones(1)
    group.allreduce([value]).wait()
    assert value.item() == 2
if __name__ == "__main__":
    mp.spawn(rank, (sys.argv[1],), 2)
"""


def _gloo() -> Finding:
    """Two processes add two numbers over the loopback interface."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "pair.py"
        script.write_text(_PAIR, encoding="utf-8")
        said = _tried([sys.executable, str(script), f"{folder}/store"])
    remedy = "bring the loopback interface up (`ip link set lo up`) and allow 127.0.0.1"
    found = said[-1] if said else "two processes talk"
    return look("gloo over loopback", found, remedy if said else "")


_MPI_PAIR = """
from mpi4py import MPI
world = MPI.COMM_WORLD
assert world.Get_size() == 2, f"each process is alone: {MPI.Get_library_version().split(',')[0]}"
assert world.allreduce(1) == 2
"""


def _mpi() -> Iterator[Finding]:
    """Which MPI there is, whether mpi4py is of the same, and whether ranks may outnumber cores."""
    from shardproof.backends.mpi import found as mpi_found
    from shardproof.launch.mpi import mpirun

    reason = mpi_found.problem()
    found = mpi_found.find()
    if reason or found is None:
        remedy = f"cases on mpi are skipped here; {mpi_found.REMEDY}"
        yield Finding(Mpi.name, "note", reason or "", remedy)
        return
    command = [*found.command(2), sys.executable, "-m", "mpi4py", "-c", _MPI_PAIR]
    with tempfile.TemporaryDirectory() as folder:
        said = _tried(command, os.environ | found.environment(Path(folder)))
    where = f"{found.family} ({found.version}), {found.mpirun}"
    if said:
        errors = [line for line in said if "Error" in line]
        remedy = "install one MPI only: mpi4py and mpirun must belong to the same one"
        yield Finding(Mpi.name, "bad", f"{where}: {(errors or said)[0]}", remedy)
        return
    yield Finding(Mpi.name, "good", f"{where}: two processes talk")
    ranks = max(8, 2 * cores())
    problem = mpirun.problem(ranks)
    remedy = "allow more slots (batch system, hostfile), or choose a smaller --world"
    fine = f"{ranks} ranks start on {cores()} cores"
    yield look("mpi slots", problem or fine, remedy if problem else "")


def known_variables() -> set[str]:
    """Names of the variables that NCCL or torch reads."""
    listed = yaml.safe_load(Path(__file__).with_name("nccl.yaml").read_text())
    return {f"{prefix}{name}" for prefix, names in listed.items() for name in names.split()}


def _gpus() -> Finding:
    """The GPUs that torch can use, or why it can use none: no fault, cases there are skipped."""
    import torch

    reason, listed = GlooCuda().available(), machine.gpus()
    if reason is None:
        return Finding("GPUs", "good", ", ".join(gpu.name for gpu in listed) or "usable by torch")
    if not listed:
        return Finding("GPUs", "note", reason, "cases on nccl and gloo_cuda are skipped here")
    built = torch.version.cuda
    if built is None:
        found = f"{len(listed)} in this machine, but this torch is built without CUDA"
        return Finding("GPUs", "bad", found, "install a build of torch with CUDA")
    found = f"{len(listed)} in this machine, but torch (CUDA {built}) can use none"
    hidden = " or unset CUDA_VISIBLE_DEVICES," if "CUDA_VISIBLE_DEVICES" in os.environ else ""
    remedy = f"install a driver for CUDA {built} (nvidia-smi shows the version),{hidden}"
    return Finding("GPUs", "bad", found, f"{remedy} or a torch for an older CUDA")


def _nccl() -> Finding:
    """Driver and NCCL; two releases of NCCL in one job do not connect, so both are printed."""
    import torch

    drivers = sorted({gpu.driver for gpu in machine.gpus()})
    driver = f"driver {', '.join(drivers)}" if drivers else "no driver"
    if torch.version.cuda is None or not torch.distributed.is_nccl_available():
        remedy = "for cases on nccl install a build of torch with CUDA"
        return Finding("NCCL", "note", f"{driver}; this torch is built without NCCL", remedy)
    version = ".".join(map(str, torch.cuda.nccl.version()))
    text = f"{driver}; NCCL {version}, CUDA {torch.version.cuda}"
    remedy = "" if drivers else "install the driver: cases on nccl are skipped here"
    return look("NCCL", text, remedy, "note")


def _variables() -> Finding:
    """Variables that are set and not read: a misspelt one is silently without effect."""
    known = known_variables()
    given = sorted(name for name in os.environ if name.startswith(("NCCL_", "TORCH_NCCL_")))
    unknown = [name for name in given if name not in known]
    if not unknown:
        return Finding("NCCL variables", "good", ", ".join(given) or "none set")
    meant = []
    for name in unknown:
        near = difflib.get_close_matches(name, known, 1, _NEAR)
        other = "unset, unless a plugin of NCCL reads it"
        if name in settings.NO_TIMEOUTS:
            near, other = [], settings.INSTEAD
        meant.append(f"{name}: {f'did you mean {near[0]}?' if near else other}")
    found = f"neither NCCL nor torch knows {', '.join(unknown)}"
    return Finding("NCCL variables", "note", found, "; ".join(meant))

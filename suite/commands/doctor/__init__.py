"""``shardproof doctor``: traps of this machine, each with its remedy, before they cost a run."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shardproof import wings
from shardproof.backends import BACKENDS, Backend
from shardproof.backends.gloo import Gloo, loopback
from shardproof.backends.mpi import Mpi
from shardproof.commands.doctor import nccl
from shardproof.commands.doctor.finding import Finding
from shardproof.launch.process_control import cores

#: Bytes of shared memory that the records of a few cases at once may take.
SHARED_BYTES = 256 << 20
#: Bytes of memory that two cases at once need, torch included.
MEMORY_BYTES = 2 << 30
#: Bytes that the records of a full run take, with room to spare.
DISK_BYTES = 256 << 20


def examine(results: Path, thorough: bool = False) -> Iterator[Finding]:
    """All findings, quick ones first; ``results`` is where runs are to be written.

    ``thorough``: wings look at all that they need.
    """
    yield Finding("python", "good", sys.version.split()[0])
    yield _torch()
    yield _cores()
    yield _threads()
    yield _memory()
    yield _shared_memory()
    yield _left_over()
    yield _results(results)
    yield _clock()
    yield _name()
    of_gloo, of_mpi = [_interface(), _gloo()], list(_mpi())
    yield from (*of_gloo, *of_mpi)
    yield from nccl.examine()
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

    return f"can run here, at up to {torch.cuda.device_count()} ranks: one a GPU"


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
    count = cores()
    if count < 2:
        return Finding("cores", "note", "1", "ranks take turns: runs take longer")
    return Finding("cores", "good", str(count))


def _threads() -> Finding:
    given = {k: os.environ[k] for k in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if k in os.environ}
    text = ", ".join(f"{k}={v}" for k, v in given.items()) or "not set"
    # Ranks are forked from a process that computes with one thread, whatever is set here.
    return Finding("threads of math libraries", "good", f"{text}; ranks use 1 each")


def _memory() -> Finding:
    import psutil

    free = int(psutil.virtual_memory().available)
    text = f"{free / 2**30:.1f} GiB available"
    if free < MEMORY_BYTES:
        return Finding("memory", "bad", text, "free 2 GiB, or run with -j 1")
    return Finding("memory", "good", text)


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        text = f"none; work folders go to {tempfile.gettempdir()}"
        return Finding("/dev/shm", "note", text, "mount a tmpfs there for faster runs")
    size = shutil.disk_usage(folder)
    text = f"{size.free / 2**20:.0f} of {size.total / 2**20:.0f} MiB free"
    if size.total < SHARED_BYTES:
        remedy = "it is too small; in containers: --shm-size 1g (their default is 64 MiB)"
        return Finding("/dev/shm", "bad", text, remedy)
    if size.free < SHARED_BYTES:
        remedy = "remove what fills it, or make it larger (in containers: --shm-size 1g)"
        return Finding("/dev/shm", "bad", text, remedy)
    return Finding("/dev/shm", "good", text)


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
    if free < DISK_BYTES:
        return Finding("results", "bad", text, "make room")
    return Finding("results", "good", text)


def _clock() -> Finding:
    step = time.get_clock_info("perf_counter").resolution
    before, began = time.time(), time.monotonic()
    time.sleep(0.05)
    drift = abs((time.time() - before) - (time.monotonic() - began))
    if step > 1e-6:
        text = f"resolution {step:g} s"
        return Finding("clock", "note", text, "do not trust timings of this machine")
    if drift > 0.01:
        text = f"the wall clock jumped {drift:.3f} s in 0.05 s"
        return Finding("clock", "note", text, "wait until the clock is set")
    return Finding("clock", "good", f"resolution {step:g} s, steady")


def _name() -> Finding:
    """torch's launchers hand out this machine's name: it must have an address, and between
    machines one that others can reach.
    """
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        remedy = f"add `127.0.0.1 {name}` to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo"
        return Finding("host name", "note", f"{name} has no address", remedy)
    if ipaddress.ip_address(address).is_loopback:
        remedy = (
            "nothing to do on one machine; for several correct /etc/hosts, or name the interface "
            "that they share in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        )
        found = f"{name} is {address}, the loopback, which other machines cannot reach"
        return Finding("host name", "note", found, remedy)
    return Finding("host name", "good", f"{name} is {address}")


def _interface() -> Finding:
    """What gloo listens on: the loopback, unless the environment names another interface."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    there = [name for _, name in socket.if_nameindex()]
    missing = [name for name in filter(None, chosen.split(",")) if name not in there]
    if missing:
        remedy = f"unset it, or name one of {', '.join(there)}"
        text = f"GLOO_SOCKET_IFNAME={chosen}, but there is no {', '.join(missing)}"
        return Finding("interface of gloo", "bad", text, remedy)
    return Finding("interface of gloo", "good", chosen or loopback())


_PAIR = """
import datetime, sys, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
def rank(number, path):
    store = dist.FileStore(path, 2)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = datetime.timedelta(seconds=20)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = dist.ProcessGroupGloo(store, number, 2, options)
    value = torch.ones(1)
    group.allreduce([value]).wait()
    assert value.item() == 2
if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (folder + "/store",), 2)
"""


def _gloo() -> Finding:
    """Two processes add two numbers over the loopback interface."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "pair.py"
        script.write_text(_PAIR, encoding="utf-8")
        try:
            command = [sys.executable, str(script)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        except subprocess.TimeoutExpired:
            text, code = "no answer within 90 s", 1
        else:
            code = done.returncode
            text = (done.stderr.strip().splitlines() or [f"exit code {code}"])[-1]
    if code:
        remedy = "bring the loopback interface up (`ip link set lo up`) and allow 127.0.0.1"
        return Finding("gloo over loopback", "bad", text, remedy)
    return Finding("gloo over loopback", "good", "two processes talk")


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
        settings = os.environ | found.environment(Path(folder))
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=90, check=False, env=settings
            )
        except subprocess.TimeoutExpired:
            text, code = "no answer within 90 s", 1
        else:
            code = done.returncode
            said = [line for line in done.stderr.splitlines() if "Error" in line]
            text = (said or done.stderr.strip().splitlines() or [f"exit code {code}"])[0]
    where = f"{found.family} ({found.version}), {found.mpirun}"
    if code:
        remedy = "have one MPI only: mpi4py must find the library whose mpirun is found"
        yield Finding(Mpi.name, "bad", f"{where}: {text}", remedy)
        return
    yield Finding(Mpi.name, "good", f"{where}: two processes talk")
    ranks = max(8, 2 * cores())
    if problem := mpirun.problem(ranks):
        remedy = "allow more slots: no batch system's limits, no hostfile, or fewer --world"
        yield Finding("mpi slots", "bad", problem, remedy)
    else:
        yield Finding("mpi slots", "good", f"{ranks} ranks start on {cores()} cores")

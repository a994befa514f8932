"""The rank program under torchrun: ``torchrun ... -m shardproof.cluster.torchrun SCENARIO``.

Also under ``mpirun`` and ``srun``, and with every rank by hand; ``--backend mpi`` needs an
``mpirun`` and no address.  Every rank of the job runs the same cases one after the other, each in a
fresh process group on one store, and leaves what it saw in a folder that all ranks share
(``--records``)::

    records/plan.json               which cases, in which order, when the first began
            case<n>/rank<k>.rec     what rank k holds (see shardproof.cases.rank_program)
                    rank<k>.end     how it ended
                    rank<k>.stacks  where it stood when its time was up

Then rank 0 judges, or whoever starts ``python -m shardproof.cluster.judge RECORDS``.  A rank that
raises spoils its case only; one that hangs or computes too long ends the job (:class:`_Guard`).

Needs torch, numpy, pydantic, PyYAML and psutil, nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import gc
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from shardproof import tensor_bytes, workloads
from shardproof.backends import BACKENDS, USUAL_PROCESSES, Joining, heartbeat, joined
from shardproof.backends.disturbances import disturbances_of
from shardproof.backends.mpi import group
from shardproof.case import Case
from shardproof.cases.rank_program import run_rank
from shardproof.cluster.launchers import foreign_records, meeting
from shardproof.cluster.launchers.place import MEETING_SECONDS, Place, interface_to
from shardproof.errors import InputError
from shardproof.launch.diagnosis import RankProcess
from shardproof.launch.fork_server import REPRODUCIBLE
from shardproof.launch.fork_server_main import import_lazy_modules
from shardproof.launch.outcome import RankOutcome, of_exception
from shardproof.launch.rank_process import LAST_RESORT
from shardproof.launch.watchdog import TICK_SECONDS, Watchdog
from shardproof.scenarios import vocabulary
from shardproof.scenarios.selection import Selection
from shardproof.verdicts import BAD_INPUT, BROKEN, HELD

#: The program that judges, which a rank does not import.
JUDGE = ("-m", "shardproof.cluster.judge")
#: Seconds that rank 0 has to judge, while the others of an MPI job wait.
JUDGING_SECONDS = 7200.0
#: Seconds that a rank at a standstill waits until the others have written their stacks as well.
STACKS_SECONDS = 10.0


def work(place: Place, cases: Sequence[Case], records: Path) -> int:
    """Run ``cases`` as rank ``place.rank``; 0 if every one came to an outcome on this rank.

    :raises LaunchError: the ranks cannot work together, and why.
    """
    torch.set_num_threads(1)
    given = os.environ.get("GLOO_SOCKET_IFNAME")
    if given is None and (name := interface_to(place.address)):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    store = place.store()
    meeting.answer(store, place, MEETING_SECONDS, given)
    import_lazy_modules()  # or the first case pays for it
    meeting.agree(store, place, [case.id for case in cases])
    if place.rank == 0:
        hosts = meeting.hosts(store, place.world)
        foreign_records.write_plan(records, cases, place.world, hosts)
        store.set("plan", foreign_records.plan_digest(records))
    meeting.meet(store, place, "start", MEETING_SECONDS)
    meeting.see_plan(store, place, records)
    for number, case in enumerate(cases):
        if case.skip:
            continue
        folder = foreign_records.case_folder(records, number)
        folder.mkdir(parents=True, exist_ok=True)
        with _Guard(place, case, number, folder):
            _one(store, place, case, number, folder)
            meeting.meet(store, place, f"case{number}", case.deadline * LAST_RESORT)
    meeting.part(store, place, MEETING_SECONDS)
    return HELD


class _Guard:
    """Ends this rank if it computes beyond its budget, or if all ranks of the job stand still.

    Each watches itself in a thread and tells the others in the store.  Who ends the job leaves its
    stacks: ``rank<k>.stacks`` begins with the reason.
    """

    def __init__(self, place: Place, case: Case, number: int, folder: Path) -> None:
        self._place, self._case = place, case
        self._key = f"case{number}/still"
        self._stacks = folder / f"rank{place.rank}.stacks"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)
        self._beats = tempfile.TemporaryDirectory(prefix="shardproof-")

    def __enter__(self) -> None:
        beats = Path(self._beats.name) / "heartbeat"
        heartbeat.create(beats, 1)
        heartbeat.attach(beats, 0, thread=False)
        # A connection of its own: the rank's is busy while the rank waits in the store.
        self._store = self._place.store(serves=False)
        self._watchdog = Watchdog(beats, 1, BACKENDS[self._case.backend])
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._beats.cleanup()

    def _watch(self) -> None:
        me, asleep = [RankProcess(os.getpid(), (0,))], int(self._case.deadline / TICK_SECONDS)
        stood = False
        while not self._over.wait(TICK_SECONDS):
            self._watchdog.look(me)
            (spent,) = self._watchdog.spent
            if spent > self._case.deadline:
                self._end(f"{foreign_records.OVER_BUDGET} {spent:.1f} s of CPU")
            stands = self._watchdog.stand_still(max(1, asleep))
            if stands != stood:
                self._store.add(self._key, 1 if stands else -1)
                stood = stands
            if stands and self._store.add(self._key, 0) == self._place.world:
                self._end(foreign_records.STANDSTILL, together=True)

    def _end(self, why: str, together: bool = False) -> NoReturn:
        with self._stacks.open("w") as file:
            file.write(f"{why}\n")
            file.flush()
            faulthandler.dump_traceback(file)
        if together:
            meeting.meet(self._store, self._place, f"{self._key}/told", STACKS_SECONDS)
        _exit(BROKEN)


def _one(store: dist.Store, place: Place, case: Case, number: int, folder: Path) -> None:
    """One case on this rank: record and outcome are written whatever happens."""
    began = time.monotonic()
    (folder / f"rank{place.rank}.began").touch()
    before = _sockets()
    try:
        workload = workloads.for_case(case)
        joining = Joining(
            place.rank,
            place.world,
            dist.PrefixStore(f"case{number}", store),
            case.deadline * LAST_RESORT,
            case.ledgers,
            disturbances=disturbances_of(case.workload.traits),
        )
        joined.join(case.backend, joining)
        record = run_rank(case, workload, place.rank)
        tensor_bytes.dump(folder / f"rank{place.rank}.rec", record.to_dict())
        outcome = RankOutcome(place.rank, "ok", ended=time.monotonic() - began)
        # A rank that left now would reset connections on which its last bytes are under way.
        with contextlib.suppress(TimeoutError):
            meeting.meet(store, place, f"case{number}/returned", 1.0)
    except Exception as error:  # noqa: BLE001 - whatever it is, it becomes this rank's outcome
        outcome = of_exception(place.rank, error, time.monotonic() - began)
        joined.tell_failure(error)
    if outcome.status != "ok" and not BACKENDS[case.backend].mpirun:
        _wake_peers(before)
    with contextlib.suppress(RuntimeError):
        joined.leave()
    gc.collect()
    outcome.store(folder / f"rank{place.rank}.end")


def _sockets() -> set[int]:
    """The descriptors of this process that are sockets."""
    return {int(entry.name) for entry in Path("/proc/self/fd").iterdir() if entry.is_socket()}


def _wake_peers(before: set[int]) -> None:
    """Shut the connections made since ``before``: a rank that waits for this one sees it now.

    Neither destroying nor aborting a gloo group does so while anything still refers to it, and the
    peers would wait until their time is up.
    """
    for descriptor in _sockets() - before:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            # Not gloo's listening socket: its thread ends the process if that fails.
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)


def _without_fault(case: Case) -> Case:
    """Skipped if it plans a fault: who looks at ranks from outside has started them."""
    if case.fault is None or case.skip:
        return case
    return dataclasses.replace(case, skip="a fault plan needs ranks that the suite starts")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shardproof.cluster.torchrun", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("scenario", nargs="*", help="file, folder or name (default: as of run)")
    parser.add_argument("--records", type=Path, default=Path("results/records"), metavar="FOLDER")
    parser.add_argument("--backend", default=USUAL_PROCESSES)
    parser.add_argument("--tier", choices=("quick", "full"), default="quick")
    parser.add_argument("-k", dest="expression", default="", metavar="EXPR")
    parser.add_argument("--impl", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--no-judge", action="store_true", help="write no verdicts, only records")
    parser.add_argument("--prune", action="store_true", help="drop tensors of passed cases")
    where = "run folder of the verdicts (default: a new one next to RECORDS)"
    parser.add_argument("--results", type=Path, metavar="FOLDER", help=where)
    return parser


def _judge(records: Path, options: argparse.Namespace) -> int:
    """Judge in another process: this one's threads may wait for peers."""
    command = [sys.executable, *JUDGE, str(records), *(["--prune"] if options.prune else [])]
    if options.results is not None:
        command += ["--results", str(options.results)]
    return subprocess.run(command, check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that the command line names as one rank; the exit code."""
    options = _parser().parse_args(arguments)
    for name, value in REPRODUCIBLE.items():  # MKL asks at its first product
        os.environ.setdefault(name, value)
    try:
        backend = BACKENDS.get(options.backend)
        over_mpi = backend is not None and backend.mpirun
        place = Place.by_mpi() if over_mpi else Place.find(os.environ)
        selection = Selection(
            scenarios=options.scenario,
            implementations=options.impl,
            backends=[options.backend],
            worlds=[place.world],
            expression=options.expression,
            tier=options.tier,
        )
        cases = [_without_fault(case) for case in selection.cases(vocabulary.installed())]
        code = work(place, cases, options.records)
        if place.rank == 0 and not options.no_judge:
            code = _judge(options.records, options)
        if over_mpi:
            # MPICH ends whoever still runs once all have left MPI, so they leave it together.
            meeting.meet(place.store(), place, "judged", JUDGING_SECONDS)
            group.stop()
        return code
    except InputError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except (TimeoutError, dist.DistError) as error:
        print(f"shardproof.cluster.torchrun: {error}", file=sys.stderr)
        return BROKEN


def _exit(code: int) -> NoReturn:
    """End without destructors: a failed group's threads may wait for peers for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        _exit(main())
    except SystemExit as left:
        _exit(left.code if isinstance(left.code, int) else BROKEN)
    except BaseException:  # noqa: BLE001 - last stop before the process's end
        traceback.print_exc()
        _exit(BROKEN)

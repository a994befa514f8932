"""Judge what ranks left: ``python -m shardproof.cluster.judge RECORDS [--results FOLDER]``.

RECORDS is a folder of the rank program (``shardproof.cluster.torchrun``), which starts this where
it judges itself.  A run folder like that of ``shardproof run``.  ``-- COMMAND...`` is run before:
it starts the ranks, and ends with the words of the rank program.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardproof import verdicts
from shardproof.case import Case
from shardproof.checks.results import CaseResult
from shardproof.cluster.launchers import foreign_records, meeting
from shardproof.cluster.launchers.foreign_records import read_plan
from shardproof.commands.console import make_console
from shardproof.commands.supervision import Interrupts, open_folder, supervised
from shardproof.errors import InputError
from shardproof.launch.fork_server import REPRODUCIBLE
from shardproof.runs import junit
from shardproof.runs.run_folder import read

if TYPE_CHECKING:
    from shardproof.runs.run_folder import RunFolder


def judge(
    records: Path,
    results: Path | None = None,
    prune: bool = False,
    command: Sequence[str] = (),
) -> int:
    """Judge ``records`` into the run folder ``results`` and print it; returns the exit code.

    Without ``results`` the folder is a new one beside ``records``.  ``prune`` removes the tensors
    of cases that held; whole tensors are kept for failures only.

    :raises SelectionError: no plan in ``records``, or ``results`` cannot be written.
    """
    plan = read_plan(records)
    torch.set_num_threads(1)
    waiting = {case.id: case for case in plan.cases}

    with open_folder(results, records.parent, command, may_hold_more=True) as run:
        nodes = [node.to_dict() for node in plan.nodes]
        run.tell_cluster({"nodes": nodes} | ({"image": plan.image} if plan.image else {}))
        run.plan(run.bind(plan.cases))

        def body(interrupts: Interrupts) -> int:
            for node in plan.nodes if len(plan.nodes) > 1 else ():
                print(f"{node.name}: ranks {meeting.spans(node.ranks)}", flush=True)
            counted, left = _judge_all(records, run, interrupts, waiting, prune)
            counts = verdicts.count(counted)
            code = verdicts.exit_code(counts)
            print(verdicts.summary(counts, left), flush=True)
            return verdicts.NOT_DECIDED if left and code == verdicts.HELD else code

        def stopped() -> str:
            for case in waiting.values():
                run.leave_out(case, "the judging was ended")
            return f"stopped: {len(waiting)} cases are left out"

        def finish() -> None:
            run.write("junit.xml", junit.document(read(run.path)))

        return supervised(run, make_console(), body, stopped, finish)


def _judge_all(
    records: Path, run: RunFolder, interrupts: Interrupts, waiting: dict[str, Case], prune: bool
) -> tuple[list[CaseResult], int]:
    """Results, and how many cases no rank came to; those that are done leave ``waiting``."""
    counted, left = [], 0
    with tempfile.TemporaryDirectory() as cache:
        every = foreign_records.results_of(records, Path(cache), run.bind)
        for number, (case, judged) in enumerate(every):
            with interrupts.held():
                del waiting[case.id]
                if judged is None:
                    left += 1
                    run.leave_out(case, "the ranks ended before this case")
                    print(f"{'left out':<10} {case.id}", flush=True)
                    continue
                account, result = judged
                counted.append(result)
                run.keep(result, json.loads(json.dumps(account.to_dict(), default=str)))
                run.add(result)
                print(_line(result), flush=True)
                if prune and verdicts.kind(result.verdict) in verdicts.GREEN:
                    for path in foreign_records.case_folder(records, number).glob("*.rec"):
                        path.unlink()
    return counted, left


def _line(result: CaseResult) -> str:
    error, bound = result.worst_error, result.bound
    figures = ""
    if error is not None and bound is not None:
        figures = f"  error {error:.1e} of {bound:.1e}"
    reason = f"  {result.reason}" if result.reason else ""
    return f"{result.verdict:<10} {result.id}{figures}  {result.seconds:.2f} s{reason}"


def after(command: Sequence[str], records: Path, node: int) -> int | None:
    """Run ``command``, which starts the ranks of this node, or of all nodes; an exit code, or
    ``None``: this process has to judge what they left in ``records``.

    A rank that hangs or dies takes rank 0 along, so rank 0 cannot judge that.  Node 0 judges; the
    others end with 0 once there is something to judge: where a node fails, Kubernetes and clouds
    end the job, and node 0 with it.

    :raises SystemExit: this process was told to end, and so have the ranks.
    """
    before = foreign_records.plan_digest(records)
    code = _ended([*command, "--records", str(records), "--no-judge"])
    if foreign_records.plan_digest(records) == before:
        print(f"the ranks ended with code {code} before any case: no verdict", file=sys.stderr)
        return code or verdicts.BROKEN
    if code:
        print(f"the ranks ended with code {code}: their records are judged", file=sys.stderr)
    return verdicts.HELD if node else None


def _ended(command: Sequence[str]) -> int:
    """Its exit code, as a shell tells it.

    Who is told to end ends without a verdict, once the ranks have.  SIGINT comes from a terminal,
    which sends it to the command as well.
    """
    ends: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def told(signum: int, _: object) -> None:
        ends.append(signum)
        if process is not None and signum == signal.SIGTERM:
            process.terminate()

    before = {each: signal.signal(each, told) for each in (signal.SIGTERM, signal.SIGINT)}
    process = subprocess.Popen(command)
    if signal.SIGTERM in ends:
        process.terminate()
    code = process.wait()
    for each, handler in before.items():
        signal.signal(each, handler)
    if ends:
        raise SystemExit(128 + ends[0])
    return code if code >= 0 else 128 - code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shardproof.cluster.judge",
        usage="%(prog)s [RECORDS] [options] [-- COMMAND...]",
        description=(__doc__ or "").split("\n\n")[1],
    )
    where = "folder of the rank program (default, with COMMAND: RESULTS/records)"
    parser.add_argument("records", nargs="?", type=Path, metavar="RECORDS", help=where)
    where = "run folder of the verdicts (default: a new one next to RECORDS)"
    parser.add_argument("--results", type=Path, metavar="FOLDER", help=where)
    parser.add_argument("--prune", action="store_true", help="drop tensors of passed cases")
    parser.add_argument("--node", type=int, default=0, help="number of this node; 0 judges")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge as the command line says; the exit code."""
    words = sys.argv[1:] if arguments is None else [*arguments]
    end = words.index("--") if "--" in words else len(words)
    own, command, parser = words[:end], words[end + 1 :], _parser()
    given = parser.parse_args(own)
    records = given.records
    if command and records is None and given.results is not None:
        records = given.results / "records"
    if records is None:
        parser.error("RECORDS is needed" + (", or --results" if command else ""))
    if command and (code := after(command, records, given.node)) is not None:
        return code
    for name, value in REPRODUCIBLE.items():  # MKL asks at its first product
        os.environ.setdefault(name, value)
    typed = ["python", "-m", "shardproof.cluster.judge", *words]
    try:
        return judge(records, given.results, given.prune, typed)
    except InputError as error:
        print(error, file=sys.stderr)
        return verdicts.BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())

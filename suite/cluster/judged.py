"""Ranks, then verdicts: ``python -m shardproof.cluster.judged --results FOLDER -- COMMAND...``.

COMMAND starts the ranks of this node, or of all nodes, and ends with the words of the rank program
(``shardproof.cluster.torchrun``).  A rank that hangs or dies takes rank 0 along, so rank 0 cannot
judge that; this process can, whatever COMMAND ended with.

With ``--node N`` node 0 judges.  The others end with 0 once there is something to judge: where a
node fails, Kubernetes and clouds end the job, and node 0 with it.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from shardproof.cluster import torchrun
from shardproof.cluster.launchers import foreign_records
from shardproof.verdicts import BROKEN, HELD


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m shardproof.cluster.judged", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument("--node", type=int, default=0, help="number of this node, from 0")
    where = "run folder of the verdicts (default: a new one beside RECORDS)"
    parser.add_argument("--results", type=Path, help=where)
    parser.add_argument("--records", type=Path, help="that all nodes share (RESULTS/records)")
    parser.add_argument("command", nargs="+", help="starts ranks")
    options = parser.parse_args(arguments)
    if options.records is options.results is None:
        parser.error("--results or --records is needed")
    records = options.records or options.results / "records"
    before = foreign_records.plan_digest(records)
    code = _run([*options.command, "--records", str(records), "--no-judge"])
    if foreign_records.plan_digest(records) == before:
        print(f"the ranks ended with code {code} before any case: no verdict", file=sys.stderr)
        return code or BROKEN
    if code:
        print(f"the ranks ended with code {code}: what they left is judged", file=sys.stderr)
    if options.node:
        return HELD
    into = [] if options.results is None else ["--results", str(options.results)]
    return _run([sys.executable, *torchrun.JUDGE, str(records), *into])


def _run(command: Sequence[str]) -> int:
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


if __name__ == "__main__":
    sys.exit(main())

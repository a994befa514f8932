"""A rank that the user's own launcher has started: it judges and reports by itself.

The ranks tell one another what they saw when the script ends, and rank 0 reports.  A rank that an
exception ends reports for those whose records are in the same folder, if it is the first to do so:
its launcher is about to kill the others.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

from shardproof.files import write_whole
from shardproof.watch.exchange import BrokenExchange
from shardproof.watch.rank import Watch, activate

#: Who made this file reports.
_LOCK = "reported"


def watch_this_rank() -> None:
    """Watch this process, and report when it ends unless ``shardproof watch`` will.

    A process that multiprocessing started, as of a DataLoader, runs the script's first lines again
    and is no rank: it is left alone.
    """
    # While a spawned child reads the script, multiprocessing knows its parent not yet.
    is_read_again = getattr(multiprocessing.current_process(), "_inheriting", False)
    if is_read_again or multiprocessing.parent_process() is not None:
        return
    watch = activate()
    if not watch.settings.launched:
        watch.at_end(_report)


def _report(watch: Watch) -> None:
    folder, record = watch.settings.folder, watch.record
    if not record.error:
        _gather(watch)
        if record.rank:
            return
    try:
        os.close(os.open(folder / _LOCK, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    from shardproof.watch import judge, report

    made = report.Report(judge.judge(folder))
    report.write(made, folder)
    sys.stderr.write(f"{report.text(made)}evidence: {folder}\n")


def _gather(watch: Watch) -> None:
    """Bring the records of all ranks into the folder of rank 0, as far as they can be reached."""
    if watch.exchange is None or watch.exchange.broken:
        return
    try:
        texts = watch.exchange.texts(watch.text())
    except BrokenExchange:
        return
    if watch.record.rank == 0:
        for rank, text in enumerate(texts):
            write_whole(watch.settings.folder / f"rank{rank}.json", text + "\n")

"""Machines that a simulated step is timed on: named ones (``machines.yaml``), and this one.

``here`` is measured: matrix products and copies by processes that all run at once, one per core,
and collectives of two ranks by ``shardproof bench collectives``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from shardproof.costs.collectives import BACKEND
from shardproof.errors import MachineError, Problem, SelectionError, nearest

#: The machine that is measured.
HERE = "here"
_FILE = Path(__file__).with_name("machines.yaml")
#: Rows and columns of the multiplied matrices, and copied bytes: both exceed a cache.
_ROWS, _COPIED = 1024, 64 * 2**20
#: Least seconds of one measurement of a rate, and how many of them there are.
_SECONDS, _TIMES = 0.1, 5
#: Bytes of the measured collectives: small ones show the latency, large ones the bandwidth.
_SIZES = ("4KiB", "256KiB", "4MiB", "16MiB")
_DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True)
class Link:
    """``bandwidth``: bytes/s one way of one GPU; ``latency``: seconds of one hop."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Machine:
    """Figures of one GPU and of its links; ``machines.yaml`` says what each is.

    ``node``: GPUs that share the links ``intra``; between nodes each has a link ``inter`` of its
    own.  ``busy``: share of the seconds of a call in which the rank that computes moves the bytes
    itself, so that no compute hides them.  ``carried_out``: operation -> the one that the backend
    carries it out as.
    """

    name: str
    says: str
    flops: Mapping[str, float]
    matrix_share: float
    attention_share: float
    memory: float
    bandwidth: float
    bandwidth_share: float
    gap: float
    node: int
    intra: Link
    inter: Link
    call: float
    busy: float = 0.0
    carried_out: Mapping[str, str] = field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        """FLOP/s of the data sheet in ``dtype``; those of float32 if the sheet has no figure."""
        return self.flops.get(dtype, self.flops["float32"])

    def seconds(self, flops: float, size: float, dtype: str, is_attention: bool = False) -> float:
        """Seconds of an operator of so many ``flops`` in ``dtype`` that moves ``size`` bytes.

        The roofline model (Williams et al., 2009): the time of its arithmetic or of its memory
        traffic, whichever is longer.
        """
        share = self.attention_share if is_attention else self.matrix_share
        arithmetic = flops / (share * self.peak(dtype))
        return max(arithmetic, size / (self.bandwidth_share * self.bandwidth))

    def with_nodes(self, ranks: int) -> Machine:
        """The same GPUs with ``ranks`` of them in a node.

        :raises SelectionError: ``ranks`` is less than 1.
        """
        if ranks < 1:
            what = "a node needs at least 1 rank"
            raise SelectionError(Problem(what, "give --node 8", str(ranks)))
        return replace(self, node=ranks)


@cache
def machines() -> Mapping[str, Machine]:
    """Name -> machine, as in ``machines.yaml``."""
    given = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    found = {}
    for name, keys in given.items():
        intra, inter = (Link(**keys.pop(link)) for link in ("intra", "inter"))
        found[name] = Machine(name=name, intra=intra, inter=inter, **keys)
    return found


def machine(name: str, node: int = 0) -> Machine:
    """The machine called ``name``, with ``node`` ranks in a node (0: as many as it has).

    :raises SelectionError: there is none; the error suggests the nearest name.
    """
    if name == HERE:
        found = measured()
    elif name in machines():
        found = machines()[name]
    else:
        remedy = nearest(name, [*machines(), HERE], "machines")
        raise SelectionError(Problem("unknown machine", remedy, name))
    return found.with_nodes(node) if node else found


# ------------------------------------------------------------------------------------ this machine


@cache
def measured() -> Machine:
    """This machine as one node with a rank per core; its links are measured between two processes.

    :raises MachineError: the measurement failed.
    """
    cores = len(os.sched_getaffinity(0))
    return of_rates(_rates(cores), _link(), cores)


def of_rates(rates: Mapping[str, float], link: Link, cores: int, busy: float = 1.0) -> Machine:
    """This machine with rates as :func:`print_rates` prints them, a rank on each core.

    Over the loopback interface cores copy every byte, and all of them compute: ``busy`` is 1.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / cores
    # Shares are 1, because the measured rates were reached.  ``gap`` is a small operator's time.
    return Machine(
        name=HERE,
        says=f"this machine, {cores} cores, measured",
        flops={dtype: rates[dtype] for dtype in _DTYPES if dtype in rates},
        matrix_share=1.0,
        attention_share=1.0,
        memory=memory,
        bandwidth=rates["bandwidth"],
        bandwidth_share=1.0,
        gap=rates["gap"],
        node=cores,
        intra=link,
        inter=link,
        call=0.0,
        busy=busy,
        # torch's gloo sums everything on every rank and keeps a part.
        carried_out={"reduce_scatter": "all_reduce"},
    )


def _rates(cores: int) -> dict[str, float]:
    """FLOP/s by dtype, bytes/s of a copy, seconds of a small operator; the slowest core's."""
    program = "from shardproof.simulate import machines; machines.print_rates()"
    started = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(cores)
    ]
    told = [one.communicate()[0] for one in started]
    if any(one.returncode for one in started):
        raise MachineError("measuring this machine failed - name another one: --machine h100")
    found: list[dict[str, float]] = [json.loads(text) for text in told]
    slow = {name: min(one[name] for one in found) for name in (*_DTYPES, "bandwidth")}
    return {**slow, "gap": max(one["gap"] for one in found)}


def print_rates() -> None:
    """Print the rates of one core as JSON; another process runs this."""
    import torch

    torch.set_num_threads(1)
    found = {}
    for dtype in _DTYPES:
        left, right = (torch.ones(_ROWS, _ROWS, dtype=getattr(torch, dtype)) for _ in range(2))
        found[dtype] = 2 * _ROWS**3 / _took(lambda a=left, b=right: a @ b)  # type: ignore[misc]
    source, target = (torch.ones(_COPIED // 4) for _ in range(2))
    found["bandwidth"] = 2 * _COPIED / _took(lambda: target.copy_(source))
    found["gap"] = small_operator_seconds()
    print(json.dumps(found))


@cache
def small_operator_seconds() -> float:
    """Seconds of an operator on a few numbers: nearly all of it is overhead."""
    import torch

    few = torch.ones(8)
    return _took(lambda: few.add_(1.0))


def _took(work: Callable[[], object]) -> float:
    """Median seconds of ``work``."""
    work()
    return statistics.median(_each(work))


def _each(work: Callable[[], object]) -> Iterator[float]:
    for _ in range(_TIMES):
        count, began = 0, time.perf_counter()
        while (passed := time.perf_counter() - began) < _SECONDS:
            work()
            count += 1
        yield passed / count


def _link() -> Link:
    """Alpha and beta of two ranks, as ``shardproof bench collectives`` fits them."""
    with TemporaryDirectory() as folder:
        sizes = [word for size in _SIZES for word in ("--bytes", size)]
        words = ["bench", "collectives", "--world", "2", "--rounds", "3", "--algorithm", "ring"]
        where = ["--results", str(Path(folder) / "run"), "--no-progress", "--json"]
        command = [sys.executable, "-m", "shardproof", *words, *sizes, *where]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise MachineError(f"timing collectives failed ({why}) - name another: --machine h100")
    return link_of(json.loads(done.stdout))


def link_of(told: Mapping[str, Any]) -> Link:
    """The link of the tables that ``shardproof bench collectives --json`` prints.

    It has the median over the backend's own operations: a link has one alpha and one beta.
    """
    tables: Sequence[Mapping[str, Any]] = told["tables"]
    rows = [row for table in tables for row in table["rows"] if row.get("algorithm") == BACKEND]
    alphas = [row["alpha us"] for row in rows if row.get("alpha us")]
    rates = [row["1/beta GB/s"] for row in rows if row.get("1/beta GB/s")]
    if not alphas or not rates:
        raise MachineError("no collective was timed - name another machine: --machine h100")
    return Link(statistics.median(rates) * 1e9, statistics.median(alphas) / 1e6)

"""The plan of ``shardproof bench collectives``: the backend's own, and the suite's over sends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from shardproof import verdicts
from shardproof.backends import BACKENDS, USUAL_PROCESSES
from shardproof.bench import collectives, sides
from shardproof.bench.collective_times import KIND, Timed
from shardproof.bench.command.options import OfCollectives
from shardproof.bench.leader_tasks import LaunchFailed, time_collectives
from shardproof.bench.reported import Collectives
from shardproof.bench.session import Session
from shardproof.commands import options, supervision
from shardproof.commands.console import echo, make_console, print_line
from shardproof.errors import Problem, SelectionError

if TYPE_CHECKING:
    from shardproof.launch.nodes import Nodes


def parse_sizes(texts: Sequence[str]) -> tuple[int, ...]:
    """Bytes, as ``4``, ``64KiB`` or ``16MiB``; multiples of 4, for elements are of float32.

    :raises SelectionError: none of these.
    """
    sizes = set()
    for text in texts:
        match = re.fullmatch(r"(\d{1,10})(KiB|MiB)?", text, re.ASCII)
        size = int(match[1]) * {None: 1, "KiB": 2**10, "MiB": 2**20}[match[2]] if match else 0
        if not 4 <= size <= 2**30 or size % 4:
            remedy = "write a multiple of 4 bytes up to 1024MiB, e.g. 4, 64KiB or 16MiB"
            raise SelectionError(Problem("--bytes: this is not a valid size", remedy, text))
        sizes.add(size)
    return tuple(sorted(sizes)) or collectives.SIZES


@dataclass(frozen=True)
class CollectivesPlan:
    """Collectives to time as options ask for it; ``request``: on the ranks that there are."""

    #: No word names anything that is to be read, and no bandwidth is asked for.
    names: ClassVar[Sequence[str]] = ()
    rates: ClassVar[Sequence[int]] = ()

    given: OfCollectives
    request: collectives.Request | None = None

    @property
    def dry_run(self) -> bool:
        """Whether nothing is timed."""
        return self.given.dry_run

    @property
    def ids(self) -> list[str]:
        """The ids of what is timed."""
        request = self.request
        return [] if request is None else [request.id_of(*system) for system in request.systems]

    @property
    def backends(self) -> set[str]:
        """The backend that ranks run on."""
        return {self.given.backend or USUAL_PROCESSES}

    def on(self, nodes: Nodes | None) -> CollectivesPlan:
        """The plan for the ranks of ``nodes`` (``None``: of this machine).

        :raises SelectionError: a request that cannot be met there.
        """
        given = self.given
        per_node = 0 if nodes is None or nodes.count == 1 else nodes.ranks_per_node
        (backend,) = self.backends
        request = collectives.Request(
            backend=backend,
            world=given.world or (2 if nodes is None else nodes.places),
            algorithms=tuple(given.algorithm or ()),
            ranks_per_node=given.ranks_per_node or per_node,
            sizes=parse_sizes(given.sizes or ()),
            rounds=given.rounds,
            deadline=given.deadline,
        )
        sides.check_backend(backend)
        if not BACKENDS[backend].sends:
            what = "this backend cannot send from one rank to another"
            raise SelectionError(Problem(what, "choose another backend", backend))
        if request.world < 2:
            raise SelectionError(Problem("1 rank sends nothing", "choose --world 2 or more", "1"))
        if nodes is not None and request.world > nodes.places:
            what = f"{request.world} ranks do not fit on {nodes}"
            raise SelectionError(Problem(what, "raise --nodes or --ranks-per-node"))
        request.check()
        return replace(self, request=request)

    def run(self) -> int:
        """Time what :meth:`on` made of the plan, or print it; the exit code."""
        from shardproof.launch.nodes import Nodes

        assert self.request is not None
        request, ids = self.request, self.ids
        if self.dry_run:
            for name in ids:
                echo(name)
            return verdicts.HELD
        options.wait_for(Nodes.here())
        console = make_console()
        with supervision.open_folder(self.given.results) as folder:

            def body(interrupts: supervision.Interrupts) -> int:
                folder.plan_others(ids)
                where = f"{request.backend}, {request.world} ranks, {request.rounds} rounds"
                if self.given.progress:
                    print_line(console, f"timing {len(ids)} collectives on {where}")
                try:
                    with Session() as session:
                        what = (request, session.folder()), request.deadline
                        lines = session.lead(time_collectives, list[Timed], "collectives", *what)
                except LaunchFailed as failed:
                    print_line(console, f"{failed.verdict}: {failed.reason}")
                    return verdicts.BROKEN
                with interrupts.held():
                    for line in lines:
                        folder.add(line.to_dict(), KIND)
                if self.given.quiet:
                    told = f"{len(lines)} collectives timed; evidence: {folder.path}"
                    print_line(console, told)
                else:
                    Collectives(lines).show(console)
                    print_line(console, "every size, and a drawing: report.html")
                return verdicts.HELD

            def stopped() -> str:
                return "stopped: no system finished all its rounds, so no times were stored"

            return supervision.supervised(folder, console, body, stopped, quiet=self.given.quiet)

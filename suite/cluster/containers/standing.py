"""A cluster that stays while one works: started once, run in often, ended by name.

Its head carries as a label what another command has to know to run in it.  What is mounted is fixed
when it starts: the working folder, read only, and the folder of results.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardproof.cluster.containers import caps, cluster, head_command, interrupts
from shardproof.cluster.containers import engine as images
from shardproof.cluster.containers.caps import Caps
from shardproof.cluster.containers.cluster import LABEL, ROLE, Cluster
from shardproof.cluster.containers.engine import NoCluster
from shardproof.cluster.containers.guardian import guarded
from shardproof.cluster.containers.image_inputs import EVERYTHING
from shardproof.cluster.containers.needs import Needs
from shardproof.errors import Problem, SelectionError
from shardproof.runs.header import NAME as RUN_FILE

#: The label of a head that stays: what was started, as JSON.
STANDING = f"{LABEL}.standing"
#: What names of sockets begin with that keep other commands away; tests have others.
_SOCKETS = ""


def full_name(name: str) -> str:
    """``lab`` -> ``shardproof-lab``.

    :raises SelectionError: no name of a cluster that stays.
    """
    full = name if name.startswith(f"{LABEL}-") else f"{LABEL}-{name}"
    if not cluster.stays(full):
        what = "no name of a cluster: a letter, then up to 30 letters, digits and '-', all small"
        raise SelectionError(Problem(what, "choose another, such as lab", name))
    return full


@dataclass(frozen=True)
class Standing:
    """One that runs: what was started, its head and its nodes."""

    made: Cluster
    head: Any
    nodes: Sequence[Any]

    def require_seen(self, paths: Sequence[Path], results: Path) -> None:
        """:raises SelectionError: something that a run needs is mounted nowhere."""
        name = self.made.name.removeprefix(f"{LABEL}-")
        if Path.cwd() != self.made.folder:
            what = f"cluster {name} was started in {self.made.folder}"
            raise SelectionError(Problem(what, "run it there", file=str(Path.cwd())))
        if not results.is_relative_to(self.made.results):
            what, remedy = (
                f"cluster {name} cannot write there",
                f"choose one in {self.made.results}",
            )
            raise SelectionError(Problem(what, remedy, str(results), "--results"))
        for path in paths:
            if not any(path.is_relative_to(seen) for seen in self.made.own):
                what = f"cluster {name} does not see it"
                remedy = f"copy it into {self.made.folder}, or leave --on out"
                raise SelectionError(Problem(what, remedy, file=str(path)))

    def require_needs(self, needs: Needs) -> None:
        """:raises SelectionError: it has not what a run asks for by name."""
        name = self.made.name.removeprefix(f"{LABEL}-")
        if needs.gpus.per_node:
            what = f"cluster {name} has no GPUs: none that stays has"
            raise SelectionError(Problem(what, "leave --on out", "--on"))
        if needs.targets == EVERYTHING and self.made.images.get("targets") != [*EVERYTHING]:
            what = f"cluster {name} has neither DeepSpeed nor MPI"
            remedy = f"`shardproof cluster down {name}`, then `up {name} --all-packages`"
            raise SelectionError(Problem(what, remedy, "--on"))

    def run(
        self,
        engine: Any,
        command: Sequence[str],
        typed: Sequence[str],
        results: Path,
        say: Callable[[str], None],
    ) -> int:
        """Run ``shardproof`` with the words of ``command`` in it; its exit code.

        :raises NoCluster: its nodes have not what was declared, or the engine breaks.
        """
        one = replace(self.made, results=results, command=typed)
        # Another run would take of what is measured, and be measured: both would be refused.
        is_capped = bool(self.made.caps.declared or self.made.slow)
        name = self.made.name.removeprefix(f"{LABEL}-")
        busy = alone(self.made.name) if is_capped else contextlib.nullcontext()
        with busy, interrupts.interruptible(), cluster.told_by_the_engine():
            for run in left_over(engine, self.head):
                what = f"run {run}, whose command was killed, goes on in cluster {name}"
                what = f"{what}; `shardproof cluster down {name}` ends it"
                if is_capped:
                    raise NoCluster(what)
                say(f"{what}\n")
            return cluster.run_in(engine, self.head, self.nodes, one, command, say)


def take_back(engine: Any, name: str) -> Callable[[], None]:
    """What gives folders of runs in cluster ``name``, once it has ended, to the caller again.

    Of a run whose command was killed: nobody else does.
    """
    heads = (
        part for part in cluster.parts(engine, name) if STANDING in getattr(part, "labels", {})
    )
    tops = [Path(json.loads(head.labels[STANDING])["results"]) for head in heads]

    def give() -> None:
        for file in (file for top in tops for file in top.rglob(RUN_FILE)):
            if file.stat().st_uid != os.geteuid() and name in _clusters_of(file):
                cluster.give(file.parent, os.geteuid())

    return give


def _clusters_of(header: Path) -> list[object]:
    """The names of the clusters that wrote a run."""
    try:
        commands = json.loads(header.read_text())["invocations"]
        return [(command.get("cluster") or {}).get("name") for command in commands]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []  # no header that one can read


def left_over(engine: Any, head: Any) -> list[str]:
    """Runs in a head whose commands were killed: nobody follows them."""
    return [run for run in head_command.going_on(engine, head) if not cluster.goes_on(run)]


def running(engine: Any, part: Any) -> list[str]:
    """Runs that go on in ``part``, where that is the head of a cluster that stays, and runs."""
    is_head = STANDING in getattr(part, "labels", {}) and part.status == "running"
    return head_command.going_on(engine, part) if is_head else []


def folder(part: Any) -> str:
    """Where the cluster that stays whose head is ``part`` was made, and is run in; else empty."""
    stored = cluster.label_of(part, STANDING)
    return str(json.loads(stored)["folder"]) if stored else ""


@contextlib.contextmanager
def alone(name: str) -> Iterator[int]:
    """Inside, no other command on this machine is, with cluster ``name``; what is held for that.

    A name in the kernel's list of sockets, which goes with the process and lies in no folder.

    :raises NoCluster: another command is.
    """
    with socket.socket(socket.AF_UNIX) as held:
        try:
            held.bind(f"\0{_SOCKETS}{name}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            short = name.removeprefix(f"{LABEL}-")
            raise NoCluster(f"another command is busy with cluster {short}: wait for it") from None
        yield held.fileno()


def require_free(engine: Any, name: str) -> None:
    """:raises SelectionError: there is a cluster ``name``; be :func:`alone`, so that none comes."""
    if cluster.parts(engine, name):
        short = name.removeprefix(f"{LABEL}-")
        remedy = f"`shardproof cluster run --on {short}`, or `cluster down {short}`"
        raise SelectionError(Problem("there is one already", remedy, short))


def up(engine: Any, made: Cluster, say: Callable[[str], None], held: int) -> None:
    """Start ``made`` and leave it; where that fails nothing of that name stays: be ``alone``, which
    gave what is ``held``, and look first whether the name is free.

    :raises NoCluster: the engine cannot, or its nodes have not what was declared.
    """
    stored = {
        "nodes": made.nodes,
        "ranks_per_node": made.ranks_per_node,
        "results": str(made.results),
        "folder": str(made.folder),
        "images": dict(made.images),
        "own": [str(path) for path in made.own],
        "caps": asdict(made.caps),
        "slow": {node: asdict(own) for node, own in made.slow.items()},
    }
    made = replace(made, labels={STANDING: json.dumps(stored)})
    with (
        guarded(made.name, made.results, [held]),
        cluster.removed_afterwards(engine, made.name) as leave,
    ):
        head, nodes = cluster.start(engine, made)
        with cluster.told_by_the_engine():
            caps.wait(engine, head, cluster.doors(made))
            cluster.under_weather(engine, head, nodes, made, say)
        leave()


def find(engine: Any, name: str) -> Standing:
    """The cluster ``name`` (:func:`full_name`).

    :raises SelectionError: there is none.
    :raises NoCluster: it has ended, or was made of other images than there are now.
    """
    short = name.removeprefix(f"{LABEL}-")
    anew = f"`shardproof cluster down {short}`, then `up {short}`"
    boxes = [part for part in cluster.parts(engine, name) if hasattr(part, "labels")]
    heads = [box for box in boxes if box.labels.get(ROLE) == "head" and STANDING in box.labels]
    if not heads:
        remedy = f"`shardproof cluster up {short}` makes it; `cluster ps` lists what there is"
        raise SelectionError(Problem("there is no such cluster", remedy, short, "--on"))
    stored = json.loads(heads[0].labels[STANDING])
    nodes = [box for box in boxes if box.labels.get(ROLE) == "node"]
    nodes.sort(key=lambda box: int(box.name.rpartition("node")[2]))
    gone = [box.name for box in (heads[0], *nodes) if box.status != "running"]
    if gone or len(nodes) != stored["nodes"]:
        raise NoCluster(f"cluster {short} has ended in part ({', '.join(gone) or 'nodes'}): {anew}")
    if images.is_old(engine, stored["images"]["judge"]):
        raise NoCluster(
            f"cluster {short} was made of other files than this checkout has now: {anew}"
        )
    made = Cluster(
        name=name,
        nodes=stored["nodes"],
        ranks_per_node=stored["ranks_per_node"],
        results=Path(stored["results"]),
        folder=Path(stored["folder"]),
        images=stored["images"],
        own=[Path(path) for path in stored["own"]],
        caps=Caps(**stored["caps"]),
        slow={int(node): Caps(**own) for node, own in stored["slow"].items()},
    )
    return Standing(made, heads[0], nodes)

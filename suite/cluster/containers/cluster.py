"""Containers of this machine as nodes: started, followed, and removed on every path.

A cluster is a private network without a way out, a *head*, in which ``shardproof run`` judges, and
nodes, in each of which an agent forks ranks (``cluster/nodes/``).  The nodes share the head's
process table and its ``/dev/shm``; each has its own network, CPU and memory.  All carry the label
``shardproof=<name>``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardproof.cluster.containers import caps, head_command
from shardproof.cluster.containers.caps import Caps
from shardproof.cluster.containers.engine import NoCluster, failures
from shardproof.cluster.containers.needs import Gpus
from shardproof.cluster.containers.node_caps import INTERFACE
from shardproof.cluster.containers.node_faults import NodeFaults
from shardproof.cluster.nodes.asking import FOLDER
from shardproof.cluster.nodes.doors import door
from shardproof.commands.supervision import Interrupts
from shardproof.launch import process_control
from shardproof.launch.nodes import ENVIRONMENT, NODE
from shardproof.runs.machine import KERNEL_VARIABLES, commit
from shardproof.table import grouped
from shardproof.verdicts import BAD_INPUT, BROKEN, HELD, INTERRUPTED, NOT_DECIDED

LABEL = "shardproof"
#: The label that tells what process of which place has made it.
MADE_BY = f"{LABEL}.by"
#: The label that tells the folder of its results, which belong to :data:`OWN_USER` meanwhile.
WRITES = f"{LABEL}.results"
LEFT_OVER = "left over"
#: Names of clusters, by :func:`name_of_a_run`.
_OF_A_RUN = re.compile(rf"{LABEL}-\d+-\d+")
#: Who the processes of the head are where the user is root, and those of nodes always: a class
#: under test runs as the latter, and can neither end the judge nor write where that writes.
OWN_USER, RANK_USER = 10001, 10002
#: Processes and threads of a container, and a node's share of the machine's memory, at most.
_MOST_PROCESSES, _MEMORY_SHARE = 4096, 0.75
_SHARED_MEMORY = "2g"
#: This machine has no address in the network of nodes: they reach nothing that listens here.
NO_HOST = {"com.docker.network.bridge.inhibit_ipv4": "true"}
#: Tries to remove a cluster, and seconds after which there is no other.
_REMOVE_TRIES, _REMOVE_SECONDS = 5, 60
_MODULES = ("shardproof.cases.preloaded", "shardproof.cases.training")


@dataclass(frozen=True)
class Cluster:
    """The plan of a start. ``own``: folders of the user's, mounted read only if they are here.

    ``slow``: of one node, what it has instead of ``caps``.  ``measured``: what nodes have of these,
    by node, once they have started; ``far``: ranks delay messages, since the kernel cannot.
    """

    name: str
    nodes: int
    ranks_per_node: int
    results: Path
    folder: Path
    images: Mapping[str, Any]
    own: Sequence[Path] = ()
    caps: Caps = field(default_factory=Caps)
    gpus: Gpus = field(default_factory=Gpus)
    measured: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    command: Sequence[str] = ()
    #: What a head is told of faults of nodes: the plan of ``--fault``, or nothing; ``None``: that
    #: there are none.
    faults: Mapping[str, Any] | None = None
    slow: Mapping[int, Caps] = field(default_factory=dict)
    far: bool = False

    @property
    def node_caps(self) -> list[Caps]:
        """The limits of each node."""
        return [self.caps.but(self.slow.get(node, Caps())) for node in range(self.nodes)]

    @property
    def facts(self) -> dict[str, Any]:
        """Its entry in ``run.json``."""
        per_node = self.ranks_per_node
        places = [list(range(n * per_node, (n + 1) * per_node)) for n in range(self.nodes)]
        facts: dict[str, Any] = {}
        if self.slow:
            facts["slow_nodes"] = {f"node{n}": caps.declared for n, caps in self.slow.items()}
        if self.caps.delay_seconds is not None:
            facts["delayed_by"] = "ranks" if self.far else "kernel"
        return facts | {
            "name": self.name,
            "nodes": [{"name": f"node{n}", "ranks": ranks} for n, ranks in enumerate(places)],
            "ranks_per_node": per_node,
            "gpus": [self.gpus.numbers(node) for node in range(self.nodes)],
            "images": dict(self.images),
            "declared": self.caps.declared,
            "measured": {name: list(values) for name, values in self.measured.items()},
        }


def run(
    engine: Any,
    cluster: Cluster,
    command: Sequence[str],
    say: Callable[[str], None],
    keep: bool = False,
) -> int:
    """Run ``command`` in a head; its exit code.

    ``say`` gets its output as it comes.  Whatever happens, nothing of the cluster stays, unless
    ``keep`` is set and it has run to its end.

    :raises NoCluster: the engine cannot start it or breaks, or its nodes have not what was
        declared.
    """
    with removed_afterwards(engine, cluster.name) as leave:
        head, nodes = start(engine, cluster)
        with _lent(cluster.results), told_by_the_engine():
            cluster = _under_weather(engine, head, nodes, cluster, say)
            with _faults(engine, cluster, head, nodes):
                code = head_command.run(engine, head, command, _told(cluster), say)
        if keep and code != INTERRUPTED:
            leave()
    if code not in (HELD, BROKEN, BAD_INPUT, NOT_DECIDED, INTERRUPTED):
        say(f"the head container ended with code {code}: it was stopped from outside, or crashed\n")
        return NOT_DECIDED
    return code


def start(engine: Any, cluster: Cluster) -> tuple[Any, list[Any]]:
    """Start the containers of the head and of the nodes, which wait for a command.

    :raises NoCluster: the engine cannot.
    """
    with told_by_the_engine():
        head = _head(engine, cluster)
        return head, _start_nodes(engine, cluster, head)


@contextlib.contextmanager
def told_by_the_engine() -> Iterator[None]:
    """:raises NoCluster: the engine says that it cannot, or answers no more."""
    try:
        yield
    except failures() as error:
        raise NoCluster(f"the container engine cannot run the cluster: {error}") from None


def _faults(
    engine: Any, cluster: Cluster, head: Any, nodes: Sequence[Any]
) -> contextlib.AbstractContextManager[None]:
    """Inside, faults of nodes are made, where any were planned."""
    if cluster.faults is None:
        return contextlib.nullcontext()
    do, delays = _in_network(engine, cluster), cluster.caps.delay_seconds and not cluster.far
    return NodeFaults(engine, head, nodes, cluster.node_caps, do, bool(delays)).served()


def _in_network(engine: Any, cluster: Cluster) -> Callable[..., None]:
    """Does what a word of ``node_caps.py`` says in the network of a node."""
    labels = {LABEL: cluster.name}
    return functools.partial(caps.in_network, engine, cluster.images["rank"], labels)


def _under_weather(
    engine: Any, head: Any, nodes: Sequence[Any], cluster: Cluster, say: Callable[[str], None]
) -> Cluster:
    """It, with messages delayed as declared, and what was measured of all that was.

    :raises NoCluster: its nodes have not what was declared.
    """
    do, is_far = _in_network(engine, cluster), cluster.caps.delay_seconds is not None
    if is_far and not caps.delay(do, nodes, cluster.node_caps):
        say("the kernel has no netem: ranks delay their messages to other nodes (gloo)\n")
        cluster = replace(cluster, far=True)
    doors = [str(door(FOLDER, node)) for node in range(cluster.nodes)]
    found = caps.measured(engine, head, nodes, doors, cluster.node_caps, _told(cluster))
    return replace(cluster, measured=found)


def _told(cluster: Cluster) -> dict[str, str]:
    """The facts that its head knows (``launch.nodes.facts_here``)."""
    typed: dict[str, Any] = {
        "nodes": cluster.nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "command": list(cluster.command),
        "commit": commit(),
        "told": cluster.facts,
    }
    if cluster.far:
        typed["far_seconds"] = cluster.caps.delay_seconds
    if cluster.faults is not None:
        typed["faults"] = dict(cluster.faults)
    return {ENVIRONMENT: json.dumps(typed)}


def _head(engine: Any, cluster: Cluster) -> Any:
    """Started first: the nodes share its process table and memory."""
    return engine.containers.run(
        cluster.images["judge"],
        ["sleep", "infinity"],
        name=f"{cluster.name}-head",
        hostname="head",
        init=True,
        network_mode="none",
        ipc_mode="shareable",
        shm_size=_SHARED_MEMORY,
        **cluster.gpus.requested(*range(cluster.nodes)),
        **_common(cluster, user(), {}, (cluster.results,)),
    )


def _start_nodes(engine: Any, cluster: Cluster, head: Any) -> list[Any]:
    network = engine.networks.create(
        cluster.name, internal=True, options=NO_HOST, labels=_labels(cluster)
    )
    nodes, memory = [], int(engine.info()["MemTotal"] * _MEMORY_SHARE)
    for node, own in enumerate(cluster.node_caps):
        agent = ["python3", "-m", "shardproof.cluster.nodes.agent", str(FOLDER), str(node)]
        started = engine.containers.run(
            cluster.images["rank"],
            [*agent, *_MODULES],
            name=f"{cluster.name}-node{node}",
            hostname=f"node{node}",
            network=network.name,
            pid_mode=f"container:{head.id}",
            ipc_mode=f"container:{head.id}",
            **{"mem_limit": memory, "memswap_limit": memory, **own.limits},
            **cluster.gpus.requested(node),
            **_common(cluster, rank_user(), {"GLOO_SOCKET_IFNAME": INTERFACE, NODE: str(node)}),
        )
        if (rate := own.bits_per_second) is not None:
            _in_network(engine, cluster)(started, "shape", rate // 8)
        nodes.append(started)
    return nodes


def _labels(cluster: Cluster) -> dict[str, str]:
    return {LABEL: cluster.name, MADE_BY: made_by(os.getpid()), WRITES: str(cluster.results)}


def _common(
    cluster: Cluster, user: int, environment: Mapping[str, str], written: Sequence[Path] = ()
) -> dict[str, Any]:
    from docker.types import Mount

    kernels = {name: os.environ[name] for name in KERNEL_VARIABLES if name in os.environ}
    return {
        "detach": True,
        "labels": _labels(cluster),
        "user": f"{user}:{os.getegid() if os.geteuid() else OWN_USER}",
        "pids_limit": _MOST_PROCESSES,
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "tmpfs": {"/tmp": ""},
        "mounts": [
            Mount(str(path), str(path), type="bind", read_only=path not in written)
            for path in (*cluster.own, *written)
        ],
        "working_dir": str(cluster.folder),
        "environment": {
            "HOME": "/tmp",
            "USER": "shardproof",
            "PYTHONDONTWRITEBYTECODE": "1",
            # The image's suite runs, not that of a checkout which is mounted, nor its random.py:
            # the working folder is looked through last, once a class is asked for (``by_path``).
            "PYTHONSAFEPATH": "1",
            # Hides warnings of the systems under test, which every rank repeats for every case.
            "PYTHONWARNINGS": "ignore",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **kernels,
            **environment,
        },
    }


def user() -> int:
    """The user of the head, which judges."""
    return os.geteuid() or OWN_USER


def rank_user() -> int:
    """The user of the ranks on nodes."""
    return RANK_USER if user() != RANK_USER else RANK_USER + 1


@contextlib.contextmanager
def _lent(results: Path) -> Iterator[None]:
    """Give the folder to who writes it, where that is another than the caller; take it back."""
    give(results, user())
    try:
        yield
    finally:
        give(results, os.geteuid())


def give(results: Path, owner: int) -> None:
    """Make ``owner`` the owner of the folder and of all in it, unless it is."""
    if results.stat().st_uid != owner:
        for path in (*results.rglob("*"), results):  # the folder last: it says that all is done
            os.chown(path, owner, owner, follow_symlinks=False)


# ------------------------------------------------------------------------------------- removal


@contextlib.contextmanager
def removed_afterwards(engine: Any, name: str) -> Iterator[Callable[[], None]]:
    """Remove all of cluster ``name`` however the block ends; what it gets, called, leaves all."""
    kept = threading.Event()
    with Interrupts() as interrupts:
        try:
            yield kept.set
        finally:
            with interrupts.held():
                left = [] if kept.is_set() else remove(engine, name)
            if left:
                print(f"could not be removed: {', '.join(left)}; `shardproof cluster clean`")


def parts(engine: Any, name: str = "") -> list[Any]:
    """Containers, then networks, of cluster ``name`` ("": of all that commands have made, and of
    containers of yours with such a label).
    """
    filters = {"label": f"{LABEL}={name}" if name else LABEL}
    containers = engine.containers.list(all=True, filters=filters, ignore_removed=True)
    found = [*containers, *engine.networks.list(filters=filters)]
    return found if name else [part for part in found if _OF_A_RUN.fullmatch(label_of(part))]


def label_of(part: Any, which: str = LABEL) -> str:
    """The name of the cluster that a container or network belongs to, or another label."""
    attributes = part.attrs
    labels = attributes.get("Labels") or attributes.get("Config", {}).get("Labels") or {}
    return str(labels.get(which, ""))


def remove(engine: Any, name: str) -> list[str]:
    """Remove cluster ``name``; the names of what is left, normally nothing.

    Whatever the engine does: this ends those that break, too.  One that answers no more leaves all.
    """
    deadline = time.monotonic() + _REMOVE_SECONDS
    left, empty = [name], 0
    for attempt in range(_REMOVE_TRIES):
        with contextlib.suppress(*failures()):
            _remove_once(parts(engine, name))
            left = [part.name for part in parts(engine, name)]
            # Twice: what the engine was asked for right before an interrupt may come after a look.
            empty = 0 if left else empty + 1
        if empty == 2 or time.monotonic() > deadline:
            break
        time.sleep(0.2 * (attempt + 1))
    return left


def _remove_once(there: list[Any]) -> None:
    # The head first: it would judge cases whose nodes go.
    for part in sorted(there, key=lambda part: not part.name.endswith("-head")):
        with contextlib.suppress(*failures()):  # it went by itself, or goes at the next try
            if hasattr(part, "kill"):
                part.remove(force=True, v=True)
            else:
                part.remove()


def clean(engine: Any, say: Callable[[str], None], everything: bool = False) -> bool:
    """Remove leftovers of runs; active ones only with ``everything``. Returns whether all went."""
    gone = True
    for name, there in sorted(grouped((label_of(part), part) for part in parts(engine)).items()):
        does = what_it_does(there)
        if not everything and does != LEFT_OVER:
            say(f"kept: {name}, which {does}; `cluster clean --all` removes it, too\n")
        else:
            gone = not remove(engine, name) and gone
            for folder in {Path(label_of(part, WRITES)) for part in there}:
                # Neither the command nor its guardian has lived to take it back.
                if folder.is_absolute() and folder.is_dir() and folder.stat().st_uid == OWN_USER:
                    give(folder, os.geteuid())
    return gone


def what_it_does(there: Sequence[Any]) -> str:
    """Whether a cluster with these parts is active or left over, in words.

    One engine may serve several machines and containers, whose processes are not seen here: what
    they have started goes on as long as a container of it runs.
    """
    made_by = next(filter(None, (label_of(part, MADE_BY) for part in there)), "/")
    place, _, process = made_by.rpartition("/")
    if place != this_place():
        runs = any(getattr(part, "status", "") in ("running", "paused") for part in there)
        return "is active and was started elsewhere" if runs else LEFT_OVER
    pid, _, began = process.partition("-")
    return "is active" if str(process_control.began(int(pid))) == began else LEFT_OVER


def made_by(pid: int) -> str:
    """The label of what process ``pid`` of this place makes."""
    return f"{this_place()}/{pid}-{process_control.began(pid)}"


@functools.cache
def this_place() -> str:
    """Where numbers of processes mean the same: one start of a machine, and there one namespace."""
    start = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{start}/{Path('/proc/self/ns/pid').readlink()}"


def name_of_a_run() -> str:
    """The name of what this process runs now, and of its cluster."""
    return f"{LABEL}-{os.getpid()}-{int(time.time())}"

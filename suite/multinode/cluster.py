"""Containers of this machine as nodes: started, followed, and removed on every path.

A cluster is a private network without a way out, a *head*, in which ``shardproof run`` judges, and
nodes, in each of which an agent forks ranks (``launch/nodes/``).  The nodes share the head's
process table and its ``/dev/shm``; each has its own network, CPU and memory.  All carry the label
``shardproof=<name>``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardproof.launch.nodes.nodes import ENVIRONMENT, FOLDER, door
from shardproof.multinode import caps
from shardproof.multinode.caps import Caps
from shardproof.multinode.engine import NoCluster, image_name
from shardproof.multinode.node_caps import INTERFACE
from shardproof.runs.machine import KERNEL_VARIABLES, commit
from shardproof.verdicts import BAD_INPUT, BROKEN, HELD, INTERRUPTED, NOT_DECIDED

LABEL = "shardproof"
#: Who the processes in containers are where the user is root.
OWN_USER = 10001
_SHARED_MEMORY = "2g"
#: Seconds that a head has to end in order after an interrupt.
_END_SECONDS = 30
_MODULES = ("shardproof.cases.preloaded", "shardproof.cases.training_run")


@dataclass(frozen=True)
class Cluster:
    """What to start.  ``own``: folders of the user's, mounted read only where they are here.

    ``measured``: what its nodes have of ``caps``, by node, once they have started.
    """

    name: str
    nodes: int
    ranks_per_node: int
    results: Path
    folder: Path
    images: Mapping[str, str]
    own: Sequence[Path] = ()
    caps: Caps = field(default_factory=Caps)
    measured: Mapping[str, Sequence[float]] = field(default_factory=dict)
    command: Sequence[str] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """What ``run.json`` tells of it."""
        per_node = self.ranks_per_node
        places = [list(range(n * per_node, (n + 1) * per_node)) for n in range(self.nodes)]
        return {
            "name": self.name,
            "nodes": [{"name": f"node{n}", "ranks": ranks} for n, ranks in enumerate(places)],
            "ranks_per_node": per_node,
            "images": dict(self.images),
            "declared": self.caps.declared,
            "measured": {name: list(values) for name, values in self.measured.items()},
        }

    @property
    def environment(self) -> str:
        """What its head knows of it (``launch.nodes.nodes.facts_here``)."""
        typed = {"command": list(self.command), "commit": commit(), "told": self.facts}
        return json.dumps({"nodes": self.nodes, "ranks_per_node": self.ranks_per_node, **typed})


def run(
    engine: Any,
    cluster: Cluster,
    command: Sequence[str],
    say: Callable[[str], None],
    keep: bool = False,
) -> int:
    """Run ``shardproof`` with the words of ``command`` in a head; its exit code.

    ``say`` gets its output as it comes.  Whatever happens, nothing of the cluster stays, unless
    ``keep`` is set and it has run to its end.

    :raises NoCluster: the engine cannot start it, or its nodes have not what was declared.
    """
    from docker.errors import DockerException

    owner = _user()
    with _lent(cluster.results, owner), _removed_afterwards(engine, cluster.name, keep):
        try:
            head = _head(engine, cluster, owner)
            nodes = _start_nodes(engine, cluster, owner, head)
            doors = [str(door(FOLDER, node)) for node in range(cluster.nodes)]
            found = caps.measured(engine, head, nodes, doors, cluster.caps)
            cluster = replace(cluster, measured=found)
            code = _judged(engine, head, cluster, command, say)
        except DockerException as error:
            raise NoCluster(f"the engine cannot run the cluster: {error}") from None
    if code not in (HELD, BROKEN, BAD_INPUT, NOT_DECIDED, INTERRUPTED):
        say(f"the head ended with code {code}: it was stopped from outside, or died\n")
        return BROKEN
    return code


def _judged(
    engine: Any, head: Any, cluster: Cluster, command: Sequence[str], say: Callable[[str], None]
) -> int:
    """Run the command in the head, to its end or to a first interrupt's; its exit code."""
    pid = f"/dev/shm/run-{os.getpid()}"
    words = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', pid, "python3", "-m", "shardproof", *command]
    environment = {ENVIRONMENT: cluster.environment}
    judge = engine.api.exec_create(head.id, words, environment=environment)["Id"]

    # Not the thread's join: one that is interrupted takes the thread for ended.
    ended = threading.Event()

    def follow() -> None:
        try:
            for part in engine.api.exec_start(judge, stream=True):
                say(part.decode("utf-8", "replace"))
        finally:
            ended.set()

    threading.Thread(target=follow, daemon=True).start()
    try:
        while not ended.wait(0.2):
            pass
    except KeyboardInterrupt:
        _ignore_signals()
        # Its own way to stop in order: results are kept, and reports made.
        head.exec_run(["sh", "-c", 'kill -INT "$(cat "$0")"', pid])
        ended.wait(_END_SECONDS)
        return INTERRUPTED
    return int(engine.api.exec_inspect(judge)["ExitCode"])


def _head(engine: Any, cluster: Cluster, user: int) -> Any:
    """Started first: the nodes share its process table and memory."""
    return engine.containers.run(
        image_name("judge"),
        ["sleep", "infinity"],
        name=f"{cluster.name}-head",
        hostname="head",
        labels={LABEL: cluster.name, f"{LABEL}.role": "head"},
        init=True,
        network_mode="none",
        ipc_mode="shareable",
        shm_size=_SHARED_MEMORY,
        **_common(cluster, user, {}, [_mount(cluster.results, read_only=False)]),
    )


def _start_nodes(engine: Any, cluster: Cluster, user: int, head: Any) -> list[Any]:
    labels = {LABEL: cluster.name, f"{LABEL}.role": "node"}
    network = engine.networks.create(cluster.name, internal=True, labels={LABEL: cluster.name})
    nodes = []
    for node in range(cluster.nodes):
        agent = ["python3", "-m", "shardproof.launch.nodes.agent", str(FOLDER), str(node)]
        started = engine.containers.run(
            image_name("rank"),
            [*agent, *_MODULES],
            name=f"{cluster.name}-node{node}",
            hostname=f"node{node}",
            labels=labels,
            network=network.name,
            pid_mode=f"container:{head.id}",
            ipc_mode=f"container:{head.id}",
            **cluster.caps.limits,
            **_common(cluster, user, {"GLOO_SOCKET_IFNAME": INTERFACE}, []),
        )
        if cluster.caps.bits_per_second is not None:
            rate = cluster.caps.bits_per_second
            caps.shape(engine, image_name("rank"), started, rate, {LABEL: cluster.name})
        nodes.append(started)
    return nodes


def _common(
    cluster: Cluster, user: int, environment: Mapping[str, str], mounts: Sequence[Any]
) -> dict[str, Any]:
    kernels = {name: os.environ[name] for name in KERNEL_VARIABLES if name in os.environ}
    return {
        "detach": True,
        "user": f"{user}:{user if os.geteuid() == 0 else os.getegid()}",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "tmpfs": {"/tmp": ""},
        "mounts": [*(_mount(path, read_only=True) for path in cluster.own), *mounts],
        "working_dir": str(cluster.folder),
        "environment": {
            "HOME": "/tmp",
            "USER": "shardproof",
            "PYTHONDONTWRITEBYTECODE": "1",
            # Hides warnings of the systems under test, which every rank repeats for every case.
            "PYTHONWARNINGS": "ignore",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **kernels,
            **environment,
        },
    }


def _mount(path: Path, read_only: bool) -> Any:
    from docker.types import Mount

    return Mount(str(path), str(path), type="bind", read_only=read_only)


def _user() -> int:
    return os.geteuid() or OWN_USER


@contextlib.contextmanager
def _lent(results: Path, user: int) -> Iterator[None]:
    """Give the folder to ``user``, where that is another than the caller, and take it back."""

    def give(owner: int) -> None:
        for path in (results, *results.rglob("*")):
            os.chown(path, owner, owner, follow_symlinks=False)

    if user == os.geteuid():
        yield
        return
    give(user)
    try:
        yield
    finally:
        give(os.geteuid())


# ------------------------------------------------------------------------------------- removal


@contextlib.contextmanager
def _removed_afterwards(engine: Any, name: str, keep: bool) -> Iterator[None]:
    """Remove all of cluster ``name`` however the block ends; with ``keep``, if it is cut short."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    previous: dict[int, Any] = {number: signal.signal(number, _interrupt) for number in numbers}
    previous[signal.SIGINT] = signal.getsignal(signal.SIGINT)
    done = False
    try:
        yield
        done = True
    finally:
        _ignore_signals()
        try:
            left = [] if keep and done else remove(engine, name)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        if left:
            print(f"could not be removed: {', '.join(left)}; `shardproof cluster clean`")


def _ignore_signals() -> None:
    """A second Ctrl-C must not stop what ends a cluster in order; it takes seconds."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def parts(engine: Any, name: str = "") -> list[Any]:
    """Containers, then networks, of cluster ``name`` ("": of all)."""
    filters = {"label": f"{LABEL}={name}" if name else LABEL}
    containers = engine.containers.list(all=True, filters=filters, ignore_removed=True)
    return [*containers, *engine.networks.list(filters=filters)]


def label_of(part: Any) -> str:
    """The name of the cluster that a container or network belongs to."""
    attributes = part.attrs
    labels = attributes.get("Labels") or attributes.get("Config", {}).get("Labels") or {}
    return str(labels.get(LABEL, ""))


def remove(engine: Any, name: str) -> list[str]:
    """Remove cluster ``name``; the names of what is left, normally nothing."""
    from docker.errors import DockerException

    for attempt in range(5):
        for part in parts(engine, name):
            with contextlib.suppress(DockerException):  # it went by itself, or goes at the next try
                if hasattr(part, "kill"):
                    part.remove(force=True, v=True)
                else:
                    part.remove()
        if not (left := parts(engine, name)):
            return []
        time.sleep(0.2 * (attempt + 1))
    return [part.name for part in left]


def clean(engine: Any, say: Callable[[str], None], everything: bool = False) -> bool:
    """Remove what runs left behind; those that go on only with ``everything``.  Whether it went."""
    gone = True
    for name in sorted({label_of(part) for part in parts(engine)} - {""}):
        if not everything and goes_on(name):
            say(f"left: {name}, which goes on; `cluster clean --all` ends it, too\n")
        else:
            gone = not remove(engine, name) and gone
    return gone


def goes_on(name: str) -> bool:
    """Whether the process that started cluster ``name`` is there, and no other has its number."""
    named = re.fullmatch(r"shardproof-(\d+)-\d+", name)
    if named is None:
        return False
    try:
        os.kill(int(named[1]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # another user's
    command = Path(f"/proc/{named[1]}/cmdline")
    return not command.exists() or b"cluster" in command.read_bytes()

"""Caps of nodes: set, measured before a run, and judged.

The kernel may be told of a cap and not keep it, and a busy machine cannot give what was asked for.
So every cap that is declared is measured in the nodes (``node_caps.py``), and a run whose machine
is further off than ``TOLERANCE`` does not begin.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardproof.cluster.containers.engine import NoCluster, said
from shardproof.cluster.containers.node_caps import NO_NETEM, burst
from shardproof.launch.nodes import cap_in_words

#: How far what is measured may be from what was declared.
TOLERANCE = 0.2
#: Tries of a probe: another program that wakes up for a moment spoils one.
_TRIES = 3
_PROGRAM = ("python3", "-m", "shardproof.cluster.containers.node_caps")
_ROUND_TRIP = ("python3", "-m", "shardproof.cluster.containers.round_trip")
#: What to do where a busy machine does not give what is declared.
_BUSY = {
    "": "end other work on the machine, or declare less",
    "delay_seconds": "end other work on the machine, or declare more",
}
#: Bytes at least that bandwidth is measured by.
_LEAST_BYTES = 1 << 18


@dataclass(frozen=True)
class Caps:
    """The limits of each node; ``None``: no limit."""

    cpus: float | None = None
    memory_bytes: int | None = None
    bits_per_second: int | None = None
    #: That a message to another node takes more.
    delay_seconds: float | None = None

    def but(self, other: Caps) -> Caps:
        """These, and where ``other`` says something, that."""
        return replace(self, **other.declared)

    @property
    def declared(self) -> dict[str, Any]:
        """Those that were asked for."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def limits(self) -> dict[str, Any]:
        """Those that the engine sets as it starts a container."""
        limits: dict[str, Any] = {}
        if self.cpus is not None:
            limits["nano_cpus"] = int(self.cpus * 1e9)
        if self.memory_bytes is not None:
            limits["mem_limit"] = limits["memswap_limit"] = self.memory_bytes
        return limits


def in_network(
    engine: Any, image: str, labels: Mapping[str, str], node: Any, *words: object
) -> None:
    """Do what a word of ``node_caps.py`` says in the network of ``node``.

    By a container that ends at once: ranks and agents have no capabilities.

    :raises NoCluster: it cannot be done; says why.
    """
    from docker.errors import ContainerError

    try:
        engine.containers.run(
            image,
            [*_PROGRAM, *map(str, words)],
            name=f"{node.name}-caps",
            labels=dict(labels),
            network_mode=f"container:{node.id}",
            user="0",
            cap_drop=["ALL"],
            cap_add=["NET_ADMIN"],
            security_opt=["no-new-privileges:true"],
            read_only=True,
            stdout=False,
            stderr=True,
            remove=True,
        )
    except ContainerError as error:
        said = error.stderr.decode("utf-8", "replace") if error.stderr else str(error)
        raise NoCluster(f"{node.name}: {said.strip()}") from error


def delay(do: Callable[..., None], nodes: Sequence[Any], caps: Sequence[Caps]) -> bool:
    """Have the kernel delay what ``nodes`` send, each as its ``caps`` say; whether it can.

    ``do``: :func:`in_network`, of an engine, an image and labels.

    :raises NoCluster: it does not take it; says why.
    """
    for node, own in zip(nodes, caps, strict=True):
        try:
            do(node, *delaying(own))
        except NoCluster as error:
            if getattr(error.__cause__, "exit_status", 0) == NO_NETEM:
                return False
            raise
    return True


def delaying(own: Caps) -> list[object]:
    """Words of ``node_caps.py`` that have the kernel delay what a node sends."""
    below = ["below"] if own.bits_per_second is not None else []
    return ["delay", round(1e6 * (own.delay_seconds or 0)), *below]


def measured(
    engine: Any,
    head: Any,
    nodes: Sequence[Any],
    doors: Sequence[str],
    caps: Sequence[Caps],
    told: Mapping[str, str],
) -> dict[str, list[float | None]]:
    """The measured caps of the nodes; waits for their agents.

    One figure a node, ``None`` where nothing is declared of it.  ``told``: the environment of what
    runs in the head.

    :raises NoCluster: a figure is too far off, or a probe broke.
    """
    declared = declared_of(caps)
    if not declared:
        return {}
    wait(engine, head, doors)
    # Each is the sender once; begun when it is asked for, so that they send in turn.
    senders = zip(nodes, [*nodes[1:], nodes[0]], strict=True)
    rates = [functools.partial(_bandwidth, engine, *pair) for pair in senders]
    probes: dict[str, Callable[[int, float], Callable[[], float]]] = {
        "cpus": lambda node, count: _figure(engine, nodes[node], "cores", math.ceil(count)),
        "memory_bytes": lambda node, _: _figure(engine, nodes[node], "memory"),
        "bits_per_second": lambda node, rate: functools.partial(rates[node], int(rate)),
    }

    def probe(name: str, wanted: Sequence[float | None]) -> list[float | None]:
        if name == "delay_seconds":
            answer = _begin(engine, head, *_ROUND_TRIP, environment=told)()
            return [float(word) / 2 for word in answer.splitlines()[-1].split()]
        # All begin before the first has ended: that is how ranks compute.
        begun = [
            None if value is None else probes[name](n, value) for n, value in enumerate(wanted)
        ]
        return [None if answer is None else answer() for answer in begun]

    found = {
        name: _best(functools.partial(probe, name), wanted) for name, wanted in declared.items()
    }
    if off := [*complaints(declared, found)]:
        raise NoCluster("; ".join(off))
    return found


def declared_of(caps: Sequence[Caps]) -> dict[str, list[float | None]]:
    """The caps declared for any node, as name -> one figure a node."""
    names = dict.fromkeys(name for each in caps for name in each.declared)
    return {name: [each.declared.get(name) for each in caps] for name in names}


def wait(engine: Any, head: Any, doors: Sequence[str]) -> None:
    """Return once the agents of all nodes are there.

    :raises NoCluster: one does not come.
    """
    _begin(engine, head, *_PROGRAM, "wait", *doors)()


def complaints(
    declared: Mapping[str, Sequence[float | None]], found: Mapping[str, Sequence[float | None]]
) -> Iterator[str]:
    """The caps that are too far off, each with both figures and a remedy."""
    for name, wanted in declared.items():
        for node, (asked, has) in enumerate(zip(wanted, found[name], strict=True)):
            if asked is not None and has is not None and _off(asked, has) > TOLERANCE:
                # Of memory and time more, of all else less is what a busy machine gives.
                scarce = {"memory_bytes": False, "delay_seconds": has > asked}
                less = scarce.get(name, has < asked)
                why = _BUSY.get(name, _BUSY[""]) if less else "the kernel does not apply this cap"
                figures = (
                    f"declared {cap_in_words(name, asked)}, measured {cap_in_words(name, has)}"
                )
                yield f"node {node}: {figures}, more than {TOLERANCE:.0%} off: {why}"


def _best(
    probe: Callable[[Sequence[float | None]], list[float | None]], wanted: Sequence[float | None]
) -> list[float | None]:
    """The first figures that hold, or the nearest of all tries."""

    def worst(found: Sequence[float | None]) -> float:
        pairs = zip(wanted, found, strict=True)
        return max(_off(asked, has) for asked, has in pairs if asked and has is not None)

    nearest = probe(wanted)
    for _ in range(_TRIES - 1):
        if worst(nearest) <= TOLERANCE:
            break
        nearest = min(nearest, probe(wanted), key=worst)
    return nearest


def _off(wanted: float, has: float) -> float:
    return abs(has - wanted) / wanted


def _bandwidth(engine: Any, sender: Any, receiver: Any, rate: int) -> float:
    """Bits per second from one node to another, counted after what passes at once."""
    skip = 2 * burst(rate // 8)
    count = skip + max(_LEAST_BYTES, rate // 8)  # a second's
    answer = _figure(engine, receiver, "receive", skip)
    _begin(engine, sender, *_PROGRAM, "send", receiver.name, str(count))()
    return 8 * answer()


def _figure(engine: Any, container: Any, *words: object) -> Callable[[], float]:
    """As :func:`_begin`, of a word of ``node_caps.py`` whose answer is a number."""
    answer = _begin(engine, container, *_PROGRAM, *map(str, words))
    return lambda: json.loads(answer())


def _begin(
    engine: Any, container: Any, *words: str, environment: Mapping[str, str] | None = None
) -> Callable[[], str]:
    """Start a command in a container; what waits for its answer.

    :raises NoCluster: by what waits: it broke.
    """
    asked = engine.api.exec_create(container.id, [*words], environment=environment)["Id"]
    all_said = said(engine, container, asked)

    def answer() -> str:
        text = all_said().strip()
        if engine.api.exec_inspect(asked)["ExitCode"]:
            what = words[3] if len(words) > 3 else words[-1].rpartition(".")[2]
            raise NoCluster(f"{container.name}: {what} cannot be measured: {text}")
        return text

    return answer

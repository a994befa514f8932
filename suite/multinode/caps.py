"""Caps of nodes: set, measured before a run, and judged.

The kernel may be told of a cap and not keep it, and a busy machine cannot give what was asked for.
So every cap that is declared is measured in the nodes (``node_caps.py``), and a run whose machine
is further off than ``TOLERANCE`` does not begin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardproof.multinode.engine import NoCluster
from shardproof.multinode.node_caps import burst

#: How far what is measured may be from what was declared.
TOLERANCE = 0.2
#: Tries of a probe: another program that wakes up for a moment spoils one.
_TRIES = 3
_PROGRAM = ("python3", "-m", "shardproof.multinode.node_caps")
#: Bytes at least that bandwidth is measured by.
_LEAST_BYTES = 1 << 18


@dataclass(frozen=True)
class Caps:
    """What each node may have; ``None``: all that there is."""

    cpus: float | None = None
    memory_bytes: int | None = None
    bits_per_second: int | None = None

    @property
    def declared(self) -> dict[str, float]:
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


def shape(
    engine: Any, image: str, node: Any, bits_per_second: int, labels: Mapping[str, str]
) -> None:
    """Cap what ``node`` sends, by a container that ends at once.

    Ranks and agents have no capabilities, so another container does it in the network of theirs.

    :raises NoCluster: it cannot be set; says why.
    """
    from docker.errors import ContainerError

    try:
        engine.containers.run(
            image,
            [*_PROGRAM, "shape", str(bits_per_second // 8)],
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
        raise NoCluster(f"{node.name}: {said.strip()}") from None


def measured(
    engine: Any, head: Any, nodes: Sequence[Any], doors: Sequence[str], caps: Caps
) -> dict[str, list[float]]:
    """What the nodes have of what is declared, one figure a node; waits for their agents.

    :raises NoCluster: a figure is too far off, or a probe broke.
    """
    if not caps.declared:
        return {}
    _ask(engine, head, "wait", *doors)

    def cpus() -> list[float]:
        # All at once: that is how ranks compute.
        busy = str(math.ceil(caps.cpus or 0))
        asked = [_begin(engine, node, "cores", busy) for node in nodes]
        return [float(answer()) for answer in asked]

    def memory_bytes() -> list[float]:
        return [int(_ask(engine, node, "memory")) for node in nodes]

    def bits_per_second() -> list[float]:
        # In turn, from each to the next, so that each is a sender once.
        following = [*nodes[1:], nodes[0]]
        rate = caps.bits_per_second or 0
        return [_bandwidth(engine, *pair, rate) for pair in zip(nodes, following, strict=True)]

    probes = {"cpus": cpus, "memory_bytes": memory_bytes, "bits_per_second": bits_per_second}
    found = {name: _best(probes[name], value) for name, value in caps.declared.items()}
    if off := [*complaints(caps.declared, found)]:
        raise NoCluster("; ".join(off))
    return found


def complaints(
    declared: Mapping[str, float], found: Mapping[str, Sequence[float]]
) -> Iterator[str]:
    """What is too far off, each with both figures and a remedy."""
    for name, wanted in declared.items():
        for node, has in enumerate(found[name]):
            if _off(wanted, has) > TOLERANCE:
                less = has < wanted and name != "memory_bytes"
                why = (
                    "free the machine, or declare less" if less else "the kernel keeps no such cap"
                )
                figures = f"declared {_text(name, wanted)}, measured {_text(name, has)}"
                yield f"node {node}: {figures}, more than {TOLERANCE:.0%} off: {why}"


def _best(probe: Callable[[], list[float]], wanted: float) -> list[float]:
    """The first figures that hold, or the nearest of all tries."""
    nearest = [math.inf]
    for _ in range(_TRIES):
        nearest = min(nearest, probe(), key=lambda found: max(_off(wanted, has) for has in found))
        if all(_off(wanted, has) <= TOLERANCE for has in nearest):
            break
    return nearest


def _off(wanted: float, has: float) -> float:
    return abs(has - wanted) / wanted


def _text(name: str, value: float) -> str:
    if name == "cpus":
        return f"{value:.3g} cores"
    if name == "memory_bytes":
        return f"{value / 2**20:.0f} MiB" if value else "no limit of memory"
    return f"{value / 1e6:.4g} mbit/s"


def _bandwidth(engine: Any, sender: Any, receiver: Any, rate: int) -> float:
    """Bits per second from one node to another, counted after what passes at once."""
    skip = 2 * burst(rate // 8)
    count = skip + max(_LEAST_BYTES, rate // 8)  # a second's
    answer = _begin(engine, receiver, "receive", str(skip))
    _ask(engine, sender, "send", receiver.name, str(count))
    return 8 * float(answer())


def _ask(engine: Any, container: Any, *words: str) -> str:
    return _begin(engine, container, *words)()


def _begin(engine: Any, container: Any, *words: str) -> Callable[[], str]:
    """Start a word of ``node_caps.py`` in a container; what waits for its answer.

    :raises NoCluster: by what waits: it broke.
    """
    asked = engine.api.exec_create(container.id, [*_PROGRAM, *words])["Id"]
    parts = engine.api.exec_start(asked, stream=True)

    def answer() -> str:
        said = b"".join(parts).decode("utf-8", "replace").strip()
        if engine.api.exec_inspect(asked)["ExitCode"]:
            raise NoCluster(f"{container.name}: {words[0]} cannot be measured: {said}")
        return said

    return answer

"""Faults of nodes, from outside: what a fault plan names is done by the engine's client.

The rank that comes to the place of its plan asks for the fault and waits
(``cluster/nodes/asking.py``), so that it strikes there, and not by the clock.  What a plan expects
something of is undone when its case has ended; a plan of ``--fault`` leaves the node as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardproof.cluster.containers import caps
from shardproof.cluster.containers.caps import Caps
from shardproof.cluster.containers.engine import NoCluster, failures
from shardproof.cluster.nodes.asking import FOLDER, HEAL, PIPE
from shardproof.cluster.nodes.doors import door

#: Of a core, in microseconds of each 100,000: what a throttled node has.
_SLOW_QUOTA, _PERIOD = 10_000, 100_000
#: What a node may take beyond what it has when its memory is to be filled.
_ROOM = 256 << 20


class NodeFaults:
    """Does to the nodes of a cluster what is asked for in its ``head``.

    ``delays``: the kernel delays what they send.
    """

    def __init__(
        self,
        engine: Any,
        head: Any,
        nodes: Sequence[Any],
        declared: Sequence[Caps],
        helper: Callable[..., None],
        delays: bool = False,
    ) -> None:
        self._engine, self._head, self._nodes = engine, head, nodes
        self._declared, self._helper, self._delays = declared, helper, delays
        self._timers: dict[int, threading.Timer] = {}
        self._undo: dict[int, Callable[[], None]] = {}

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        """Inside, ranks and leaders can ask."""
        pipe = str(FOLDER / PIPE)
        # Agents and ranks are another user than the head.
        script = 'mkdir -p -m 777 "$(dirname "$0")"; mkfifo -m 666 "$0"; echo; exec cat <> "$0"'
        asked = self._engine.api.exec_create(self._head.id, ["sh", "-c", script, pipe])["Id"]
        parts = self._engine.api.exec_start(asked, stream=True)
        next(parts)  # the pipe is there
        threading.Thread(target=self._follow, args=(parts,), daemon=True).start()
        try:
            yield
        finally:
            for timer in self._timers.values():
                timer.cancel()

    def _follow(self, parts: Iterator[bytes]) -> None:
        said = b""
        for part in parts:
            *lines, said = (said + part).split(b"\n")
            for line in filter(None, lines):
                self._answer(json.loads(line))

    def _answer(self, request: dict[str, Any]) -> None:
        reason = ""
        refused: tuple[type[Exception], ...] = (NoCluster, *failures())
        try:
            self._do(str(request["what"]), int(request["node"]), float(request["seconds"]))
        except refused as error:
            reason = str(error)
        with contextlib.suppress(*failures()):  # the head has gone
            # Under another name until it is whole.
            write = 'printf %s "$1" > "$0.part"; mv "$0.part" "$0"'
            self._head.exec_run(["sh", "-c", write, request["answer"], reason])

    def _do(self, what: str, node: int, seconds: float) -> None:
        if what == HEAL:
            self._heal(node)
            return
        if what == "stop_client":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "stop_head":
            self._head.kill()
            return
        self._undo[node] = getattr(self, f"_{what}")(node)
        if seconds and what in ("pause_node", "cut_node"):
            self._timers[node] = threading.Timer(seconds, self._heal, (node,))
            self._timers[node].start()

    def _heal(self, node: int) -> None:
        if (timer := self._timers.pop(node, None)) is not None:
            timer.cancel()
        if (undo := self._undo.pop(node, None)) is not None:
            undo()

    # What undoes it is the result of each.

    def _kill_node(self, node: int) -> Callable[[], None]:
        self._nodes[node].kill()

        def start() -> None:
            where = str(door(FOLDER, node))
            self._head.exec_run(["rm", "-f", where])
            self._nodes[node].start()
            if (rate := self._declared[node].bits_per_second) is not None:
                self._helper(self._nodes[node], "shape", rate // 8)
            if self._delays:
                self._helper(self._nodes[node], *caps.delaying(self._declared[node]))
            caps.wait(self._engine, self._head, [where])

        return start

    def _pause_node(self, node: int) -> Callable[[], None]:
        self._nodes[node].pause()
        return self._nodes[node].unpause

    def _cut_node(self, node: int) -> Callable[[], None]:
        self._helper(self._nodes[node], "link", "down")
        return lambda: self._helper(self._nodes[node], "link", "up")

    def _slow_node(self, node: int) -> Callable[[], None]:
        if self._declared[node].cpus is not None:
            raise NoCluster("slow_node cannot cap cores that are capped already: leave out --cpus")
        self._nodes[node].update(cpu_period=_PERIOD, cpu_quota=_SLOW_QUOTA)
        return lambda: self._nodes[node].update(cpu_quota=-1)

    def _fill_memory(self, node: int) -> Callable[[], None]:
        if self._declared[node].memory_bytes is not None:
            return lambda: None  # it has a cap
        used = self._nodes[node].stats(stream=False)["memory_stats"]["usage"]
        self._cap(node, used + _ROOM)
        limit = self._nodes[node].attrs.get("HostConfig", {}).get("Memory")
        return lambda: self._cap(node, limit or self._engine.info()["MemTotal"])

    def _cap(self, node: int, size: int) -> None:
        self._nodes[node].update(mem_limit=size, memswap_limit=size)

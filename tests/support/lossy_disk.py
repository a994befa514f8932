"""A disk that loses power: every prefix of what was done to it, without what was not synced.

:class:`Recorder` does to the real disk what it is told, and writes it down.  :func:`crashes` then
gives what a power cut after each operation may leave.  What POSIX promises is kept: the bytes of a
file once it was synced, a name once its folder was.  Of the rest anything may be lost or not.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shardproof.impls.reference.checkpoint.files import FileLayer


@dataclass(eq=False)
class Node:
    """A file or a folder, whatever its names are; only folders have no bytes."""

    is_folder: bool


@dataclass(frozen=True)
class Operation:
    """``node`` gets ``data``, or the name ``bound``, or loses ``unbound``; or is synced."""

    node: Node
    data: bytes = b""
    #: (folder, name)
    bound: tuple[Node, str] | None = None
    unbound: tuple[Node, str] | None = None
    is_sync: bool = False

    @property
    def folders(self) -> set[Node]:
        """Whose sync makes the change of names last."""
        return {place[0] for place in (self.bound, self.unbound) if place}


@dataclass
class Recorder(FileLayer):
    """The file layer of a test; ``root`` exists.  Ranks that are threads may share one."""

    root: Path
    done: list[Operation] = field(default_factory=list)
    nodes: dict[Path, Node] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.nodes[self.root] = Node(is_folder=True)

    def _place(self, path: Path) -> tuple[Node, str]:
        return self.nodes[path.parent], path.name

    def _new(self, path: Path, is_folder: bool) -> None:
        node = self.nodes[path] = Node(is_folder)
        self.done.append(Operation(node, bound=self._place(path)))

    def create(self, path: Path) -> int:
        with self.lock:
            file = super().create(path)
            self._new(path, is_folder=False)
            return file

    def write(self, path: Path, file: int, data: memoryview) -> None:
        with self.lock:
            super().write(path, file, data)
            self.done.append(Operation(self.nodes[path], data=bytes(data)))

    def sync(self, path: Path, file: int) -> None:
        with self.lock:
            self.done.append(Operation(self.nodes[path], is_sync=True))

    def make_folder(self, path: Path) -> None:
        with self.lock:
            super().make_folder(path)
            self._new(path, is_folder=True)

    def sync_folder(self, path: Path) -> None:
        with self.lock:
            self.done.append(Operation(self.nodes[path], is_sync=True))

    def rename(self, old: Path, new: Path) -> None:
        with self.lock:
            super().rename(old, new)
            places = {"unbound": self._place(old), "bound": self._place(new)}
            node = self.nodes[new] = self.nodes.pop(old)
            self.done.append(Operation(node, **places))

    def unlink(self, path: Path) -> None:
        with self.lock:
            super().unlink(path)
            self.done.append(Operation(self.nodes.pop(path), unbound=self._place(path)))

    def remove_folder(self, path: Path) -> None:
        with self.lock:
            super().remove_folder(path)
            self.done.append(Operation(self.nodes.pop(path), unbound=self._place(path)))


def crashes(recorder: Recorder, place: Path, seeds: int) -> Iterator[tuple[int, str, Path]]:
    """Number of operations done, what was lost, and a folder that stands for the root after it.

    Of what was not synced everything is kept, everything is lost, or, ``seeds`` times, any of it.
    """
    for count in range(len(recorder.done) + 1):
        ways = ["kept", "lost", *map(str, range(seeds))]
        for way in ways:
            source = random.Random(f"{count} {way}")
            chance = {"kept": 1.0, "lost": 0.0}.get(way, 0.5)
            kept = [
                one
                for at, one in enumerate(recorder.done[:count])
                if _lasts(recorder.done[at + 1 : count], one) or source.random() < chance
            ]
            root = place / f"{count}-{way}"
            _build(recorder.nodes[recorder.root], kept, root)
            yield count, way, root


def _lasts(later: list[Operation], one: Operation) -> bool:
    """Whether a sync among the ``later`` operations makes ``one`` outlive a power cut."""
    if one.is_sync:
        return True
    synced = {other.node for other in later if other.is_sync}
    return one.folders <= synced if one.folders else one.node in synced


def _build(root: Node, kept: list[Operation], place: Path) -> None:
    """The folder ``place``, as the operations ``kept`` left the folder ``root``."""
    names: dict[Node, dict[str, Node]] = {}
    data: dict[Node, bytes] = {}
    for one in kept:
        data[one.node] = data.get(one.node, b"") + one.data
        if one.unbound:
            names.setdefault(one.unbound[0], {}).pop(one.unbound[1], None)
        if one.bound:
            names.setdefault(one.bound[0], {})[one.bound[1]] = one.node

    def put(node: Node, path: Path) -> None:
        if not node.is_folder:
            path.write_bytes(data.get(node, b""))
            return
        path.mkdir()
        for name, inner in names.get(node, {}).items():
            put(inner, path / name)

    put(root, place)

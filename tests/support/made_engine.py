"""A container engine that starts nothing, and a cluster to ask it for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker
import pytest
from commands import here

from shardproof.cluster.containers import cluster, engine
from shardproof.cluster.containers.caps import Caps
from shardproof.verdicts import BAD_INPUT


class Part:
    """A container or network that was made."""

    def __init__(self, engine: MadeEngine, name: str, labels: dict[str, str], run: Any) -> None:
        self.engine, self.name, self.id, self.asked = engine, name, f"id-of-{name}", run
        self.attrs = {"Labels": labels}
        self.labels, self.status = labels, "running"

    def remove(self, **_: object) -> None:
        self.engine.parts.remove(self)

    def exec_run(self, words: list[str]) -> None:
        self.engine.tell(words)


class MadeEngine:
    """Stands in for the client of docker's SDK: notes what it is asked for, and starts nothing.

    The head's command says ``says`` and ends with ``code`` (``None``: it goes on); container number
    ``breaks`` cannot be started.
    """

    def __init__(self, code: int | None = 0, says: bytes = b"", breaks: int = -1) -> None:
        self.parts: list[Part] = []
        self.made: list[Part] = []
        self.executed: list[Any] = []
        self.told: list[list[str]] = []
        self.containers = SimpleNamespace(run=self._run, list=self._list("box"))
        self.info = lambda: {"MemTotal": 8 << 30}
        self.networks = SimpleNamespace(create=self._create, list=self._list("network"))
        self.probed = {"memory": b"1073741824"}  # what is measured in nodes, by word
        self.api = SimpleNamespace(
            exec_create=self._execute,
            exec_start=lambda word, **_: iter([self.probed.get(word, b"") if word else says]),
            exec_inspect=lambda word: {"ExitCode": 0 if word else code},
        )
        self._breaks = breaks

    def add(self, name: str, labels: dict[str, str], run: Any = None) -> Part:
        part = Part(self, name, labels, run)
        self.parts.append(part)
        self.made.append(part)
        return part

    def tell(self, words: list[str]) -> None:
        """Note what a container is told."""
        self.told.append(words)

    def _execute(self, container: str, words: list[str], **named: Any) -> dict[str, str]:
        self.executed.append(((container, words), named))
        is_inside = words[2] == "shardproof.cluster.containers.node_caps"
        asked = words[-1].rpartition(".")[2] if "round_trip" in words[-1] else ""
        return {"Id": words[3] if is_inside else asked}

    def _run(self, image: str, command: list[str], **options: Any) -> Part:
        if len(self.made) == self._breaks:
            raise docker.errors.APIError("no such device")
        return self.add(options["name"], options["labels"], (image, command, options))

    def _create(self, name: str, **options: Any) -> Part:
        return self.add(name, options["labels"], options)

    def _list(self, kind: str) -> Any:
        def listed(filters: dict[str, str], **_: object) -> list[Part]:
            _, _, name = filters["label"].partition("=")
            return [
                part
                for part in self.parts
                if name in ("", part.attrs["Labels"]["shardproof"])
                and (kind == "network") == isinstance(part.asked, dict)
            ]

        return listed


def made_cluster(results: Path) -> cluster.Cluster:
    here = Path("/home/me/work")
    images = {"rank": "sha256:1", "judge": "sha256:2"}
    return cluster.Cluster(
        "shardproof-1-2", 2, 3, results, here, images, own=[here], caps=Caps(memory_bytes=1 << 30)
    )


def assert_refused_at_once(monkeypatch: pytest.MonkeyPatch, says: str, *words: str) -> None:
    """``shardproof cluster`` with these words is bad input, told before any engine is asked."""
    monkeypatch.setattr(engine, "client", lambda: pytest.fail("it asked for the engine"))
    done = here("cluster", *words)
    assert done.returncode == BAD_INPUT, done.stdout + done.stderr
    assert says in " ".join(done.stderr.split())

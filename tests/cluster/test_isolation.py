"""What containers cannot do, tried: reach the outside, be reached from there, or see secrets."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from real_engine import real_engine

from shardproof.cluster.containers import cluster
from shardproof.cluster.containers import engine as engine_room

SECRET = "not-for-containers"
#: Tries to connect; prints how that ended.
CONNECT = (
    "import socket, sys\n"
    "try: print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).recv(9).decode())\n"
    "except OSError as error: print(type(error).__name__)\n"
)
#: Prints the address of the default gateway; the kernel writes its bytes from last to first.
GATEWAY = (
    "import socket\n"
    "routes = [line.split() for line in open('/proc/net/route')][1:]\n"
    "(gateway,) = [route[2] for route in routes if route[1] == '0' * 8]\n"
    "print(socket.inet_ntoa(bytes.fromhex(gateway)[::-1]))\n"
)
LISTEN = (
    "import socket\n"
    "server = socket.create_server(('', 4711))\n"
    "open('/dev/shm/listens', 'w').close()\n"
    "while True: server.accept()[0].sendall(b'a node')\n"
)
WRITES = (
    "import pathlib\n"
    "for place in ('/', '/opt/shardproof', '/opt/venv', '/etc', '/proc/sys/kernel'):\n"
    "    try: (pathlib.Path(place) / 'domainname').write_text('x'); print(place)\n"
    "    except OSError: pass\n"
)


@dataclass
class Started:
    """A cluster of two nodes."""

    engine: Any
    made: cluster.Cluster
    head: Any
    nodes: list[Any]

    def says(self, box: Any, program: str, *words: str) -> str:
        """What a program of Python says in a container."""
        return str(box.exec_run(["python3", "-c", program, *words]).output.decode()).strip()

    def stranger(self, program: str, *words: str) -> str:
        """What a program says in a container outside the cluster, in the engine's own network."""
        image, labels = self.made.images["rank"], {"shardproof": self.made.name}
        command = ["python3", "-c", program, *words]
        said = self.engine.containers.run(image, command, remove=True, labels=labels)
        return str(said.decode()).strip()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    engine = real_engine()
    folder = tmp_path_factory.mktemp("results")
    folder.chmod(0o755)
    name = f"shardproof-{os.getpid()}-1"
    images = engine_room.build(engine)
    made = cluster.Cluster(name, 2, 2, folder, folder, images)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("PIP_INDEX_URL", f"https://me:{SECRET}@mirror.example/simple")
        with cluster.removed_afterwards(engine, name):
            head, nodes = cluster.start(engine, made)
            yield Started(engine, made, head, nodes)
    assert not cluster.parts(engine, name)


@pytest.mark.slow
@pytest.mark.timeout(300)
class TestIsolation:
    def test_nothing_reaches_the_outside_nor_this_machine(self, started: Started) -> None:
        # Of this machine's address the engine itself tells only from its second start on.
        machine = started.stranger(GATEWAY)
        for box in (started.head, *started.nodes):
            for address in ("1.1.1.1", machine):
                assert started.says(box, CONNECT, address, "53") in ("OSError", "TimeoutError")
        interfaces = "import socket; print(*[name for _, name in socket.if_nameindex()])"
        assert started.says(started.head, interfaces) == "lo"

    def test_nodes_reach_one_another_and_nobody_else_reaches_them(self, started: Started) -> None:
        one, other = started.nodes
        one.exec_run(["python3", "-c", LISTEN], detach=True)
        wait = "import os, time\nwhile not os.path.exists('/dev/shm/listens'): time.sleep(0.05)"
        started.says(other, wait)
        assert started.says(other, CONNECT, one.name, "4711") == "a node"
        one.reload()
        (network,) = one.attrs["NetworkSettings"]["Networks"].values()
        assert not any((one.attrs["NetworkSettings"]["Ports"] or {}).values()), "no port"
        # Some networks answer for addresses that nobody has; who answers here is not the node.
        assert started.stranger(CONNECT, network["IPAddress"], "4711") != "a node"

    def test_no_right_and_no_secret_is_in_them(self, started: Started) -> None:
        status = "print(*[l for l in open('/proc/self/status') if l[:6] in ('CapEff', 'NoNewP')])"
        for box in (started.head, *started.nodes):
            box.reload()
            assert SECRET not in json.dumps(box.attrs)
            assert started.says(box, status).split() == ["CapEff:", "0" * 16, "NoNewPrivs:", "1"]
            assert started.says(box, "import os; print(os.getuid() == 0)") == "False"
            assert started.says(box, WRITES) == ""

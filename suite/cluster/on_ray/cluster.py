"""A Ray cluster as the judge of cases: each is one task of it.

Ray says where a task runs, and runs it again where its process or its node was lost.  A case that
breaks by itself has a result like any other and is no business of Ray's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.cases.runner import CaseHost, Judged, broken
from shardproof.checks.results import CaseResult
from shardproof.cluster.on_ray import LOCAL, address_of_environment, task
from shardproof.errors import Problem, SelectionError, shorten
from shardproof.evidence.account import LeaderEnd
from shardproof.files import fast_json, read_fast_json
from shardproof.launch.process_control import cores
from shardproof.table import number

#: Seconds in which a port opens, and in which each node tells its versions.
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 120.0
#: Seconds that a case waits for a node that could run it, where none is left.
PLACE_SECONDS = 60.0
#: Times that Ray runs a task again whose process or node it lost.
RETRIES = 3
#: Of a cluster that is started here, whose results are small.
STORE_BYTES = 80 << 20
_POLL_SECONDS = 1.0


@contextlib.contextmanager
def joined(address: str, jobs: int | None) -> Iterator[RayCluster]:
    """The cluster at ``address``, with at most ``jobs`` cases at once; left at the end.

    Empty: the one that RAY_ADDRESS names or this machine belongs to, or a new one.

    :raises SelectionError: there is none, it does not answer, or a node has other versions.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a test tells nobody that it ran
    try:
        import ray
    except ImportError as error:
        remedy = "pip install 'shardproof[ray]'"
        raise SelectionError(Problem(f"--on needs the package ray: {error}", remedy)) from None
    address = address or address_of_environment(os.environ.get("RAY_ADDRESS", ""))
    if address not in ("", LOCAL) and (why := _why_closed(address)):
        remedy = "install the extra ray there and run `ray start --head`"
        raise SelectionError(Problem(f"no Ray cluster answers: {why}", remedy, address))
    with contextlib.ExitStack() as shut_down:
        shut_down.callback(ray.shutdown)
        try:
            _init(ray, address, jobs or cores())
            cluster = RayCluster(ray, jobs)
            cluster.require_versions()
        except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
            what = f"the Ray cluster cannot be joined: {shorten(str(error), 300)}"
            needs = "use the same Ray, Python and token (RAY_AUTH_MODE=token) as the cluster"
            raise SelectionError(Problem(what, needs, address or None)) from None
        yield cluster


def _why_closed(address: str) -> str:
    """Why no server answers on that port, for which Ray would wait minutes; empty: it is open."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _init(ray: Any, address: str, jobs: int) -> None:
    """Join a cluster; without an address that of this machine, or a new one that ends with us."""
    how: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    address = address or _of_this_machine() or LOCAL
    if address == LOCAL:
        how |= {"num_cpus": jobs, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        how["_node_ip_address"] = "127.0.0.1"  # else that of a network, and served to it
    with warnings.catch_warnings(action="ignore"):  # what comes to nothing is an error, told once
        ray.init(address, **how)


def _of_this_machine() -> str:
    """The cluster that `ray start` noted; empty: there is none, or it left its note behind."""
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    try:
        address = note.read_text().strip()
    except OSError:
        return ""
    return "" if _why_closed(address) else address


class RayCluster(CaseHost):
    """A cluster that this process has joined."""

    def __init__(self, ray: Any, jobs: int | None) -> None:
        self._ray, self._jobs = ray, jobs
        self._versions = task.versions()
        once = {"max_retries": RETRIES, "retry_exceptions": False}
        self._judge = ray.remote(num_cpus=1, **once)(task.judge)
        self._require = ray.remote(num_cpus=0, **once)(task.require)
        gpus = (int(node["Resources"].get("GPU", 0)) for node in self._nodes())
        self._gpus = max(gpus, default=0)

    @property
    def places(self) -> int:
        """Cases at once: a CPU each, of those that the cluster has now."""
        cpus = int(self._ray.cluster_resources().get("CPU", 0))
        return max(1, min(cpus, self._jobs or cpus))

    @property
    def facts(self) -> dict[str, Any]:
        """Its entry in ``run.json``."""
        nodes = [
            {"name": node["NodeManagerHostname"], "cpus": node["Resources"].get("CPU", 0)}
            for node in self._nodes()
        ]
        return {"ray": self._ray.__version__, "nodes": nodes}

    def __str__(self) -> str:
        return f"Ray: {number(len(self._nodes()), 'node')}, {self.places} cases at once"

    def _nodes(self) -> list[Any]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def require_versions(self) -> None:
        """Ask every node for its versions.

        :raises SelectionError: they differ, or it does not answer.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        asked = []  # two nodes may have one name
        for node in self._nodes():
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            answer = self._require.options(scheduling_strategy=there).remote(self._versions)
            asked.append((node["NodeManagerHostname"], answer))
        for name, answer in asked:
            try:
                self._ray.get(answer, timeout=ANSWER_SECONDS)
            except self._ray.exceptions.RayTaskError as error:
                raise _unfit(name, error) from None
            except self._ray.exceptions.GetTimeoutError:
                what = f"the Ray node {name} did not answer within {ANSWER_SECONDS:g} s"
                raise SelectionError(Problem(what, "run `ray status` to see why")) from None

    def judge(self, cases: Iterable[Case]) -> Generator[Judged, None, None]:
        """Judge them as tasks; a ``cases.runner.Judge``."""
        running: dict[Any, tuple[Case, float]] = {}
        since: dict[str, float] = {}
        rest, exhausted = iter(cases), False
        try:
            while not exhausted or running:
                while not exhausted and len(running) < self.places:
                    case = next(rest, None)
                    exhausted = case is None
                    if case is not None:
                        running[self._start(case)] = case, time.monotonic()
                if not running:
                    return
                ended, _ = self._ray.wait([*running], timeout=_POLL_SECONDS)
                for answer in ended:
                    yield self._end(answer, *running.pop(answer))
                for answer, why in () if ended else self._without_place(running, since):
                    self._ray.cancel(answer, force=True)
                    yield _lost(*running.pop(answer), why)
        finally:
            for answer in running:
                self._ray.cancel(answer, force=True)

    def _without_place(
        self, running: Mapping[Any, tuple[Case, float]], since: dict[str, float]
    ) -> list[tuple[Any, str]]:
        """Those for which there has been no node for long, and why; Ray would wait for ever.

        ``since`` keeps from one call to the next when each reason was first seen.
        """
        whys = {answer: self._no_place(case) for answer, (case, _) in running.items()}
        now = time.monotonic()
        for why in since.keys() - set(whys.values()):
            del since[why]
        return [
            (answer, why)
            for answer, why in whys.items()
            if why and now - since.setdefault(why, now) >= PLACE_SECONDS
        ]

    def _no_place(self, case: Case) -> str:
        """The resource that ``case`` asks for and no live node has; empty: one node has all."""
        gpus = self._gpus_of(case)
        for resources in (node["Resources"] for node in self._nodes()):
            if resources.get("CPU", 0) >= 1 and resources.get("GPU", 0) >= gpus:
                return ""
        wanted = f"a CPU and {number(gpus, 'GPU')}" if gpus else "a CPU"
        return f"no live Ray node has {wanted}: see `ray status`"

    def _gpus_of(self, case: Case) -> int:
        return min(case.world, self._gpus) if BACKENDS[case.backend].device == "cuda" else 0

    def _start(self, case: Case) -> Any:
        gpus = self._gpus_of(case)
        return self._judge.options(num_gpus=gpus).remote(fast_json(case.to_dict()), self._versions)

    def _end(self, answer: Any, case: Case, began: float) -> Judged:
        try:
            value = read_fast_json(self._ray.get(answer))
        except self._ray.exceptions.RayError as error:
            if isinstance(error, task.OtherVersions):  # of a node that came later
                raise _unfit("that joined later", error) from None
            return _lost(case, began, shorten(str(error), 1000))
        return Judged(case, CaseResult.from_dict(value["result"]), value["account"])


def _lost(case: Case, began: float, why: str) -> Judged:
    """A case that Ray did not bring to its end."""
    return Judged(case, *broken(case, LeaderEnd(None, None, False, time.monotonic() - began, why)))


def _unfit(node: str, error: Any) -> SelectionError:
    """A node that cannot judge, and why; ``error``: Ray's, of a task there."""
    if isinstance(error.cause, task.OtherVersions):
        why = f"has {error.cause}"
    else:
        why = f"cannot load the suite: {shorten(str(error).strip().splitlines()[-1], 200)}"
    remedy = "install the same shardproof, torch and Python on every node"
    return SelectionError(Problem(f"the Ray node {node} {why}", remedy))

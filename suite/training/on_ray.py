"""Ranks as actors of a Ray cluster: each joins the others as a process of torchrun would.

    the script                              actor 0 ... actor N-1, each with a CPU (or a GPU)
    ------------------------------------    -------------------------------------------------
    a placement group: all ranks or none    started by Ray, on one node or on several
    where is rank 0?                        its address, a free port
    RANK, WORLD_SIZE, MASTER_ADDR ...       join(), and the training of the rank

The first error ends all actors: the other ranks would wait for the one that failed.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shardproof.backends import Backend
from shardproof.errors import LaunchError, Problem
from shardproof.training.places import GRACE_SECONDS, Program, TrainingFailed
from shardproof.training.world import join

#: Seconds that a cluster has to find room for all ranks.
PLACE_SECONDS = 60.0
_CLIENT_PORT = 10001


class RankActor:
    """One rank; Ray makes a process of it."""

    def address(self) -> tuple[str, int]:
        """Where the other ranks reach this one: its node, and a port that is free now."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def train(
        self, program: Program, variables: dict[str, str], backend: str, timeout: float
    ) -> Any:
        """Join the world that ``variables`` describe, and run the program in it."""
        import torch

        os.environ.update(variables)
        torch.set_num_threads(1)
        world = join(backend, timeout)
        result = program(world)  # after an error the script ends this process
        world.leave()
        return result


def run(where: str, backend: Backend, world: int, program: Program, timeout: float) -> list[Any]:
    """Run ``program`` on ``world`` ranks of the cluster ``where``; what each returned, in order.

    ``where``: ``ray`` (the cluster of RAY_ADDRESS, else a new one here) or ``ray://HOST[:PORT]``.

    :raises LaunchError: no Ray, no such cluster, or no room in it.
    :raises TrainingFailed: a rank failed in a way that it could not hand over.
    """
    if backend.threads or backend.mpirun:
        remedy = "leave the backend out: ranks on Ray are processes"
        raise LaunchError(Problem("this backend does not run on Ray", remedy, backend.name))
    on_gpu = backend.device != "cpu"
    with _cluster(where, world) as ray, _room(ray, world, on_gpu) as place:
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(place)
        kind = {"num_cpus": 1, "num_gpus": int(on_gpu), "scheduling_strategy": strategy}
        made = ray.remote(**kind)(RankActor)
        actors = [made.remote() for _ in range(world)]
        try:
            host, port = ray.get(actors[0].address.remote())
            meeting = {"WORLD_SIZE": str(world), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
            answers = [
                actor.train.remote(program, {**meeting, "RANK": str(rank)}, backend.name, timeout)
                for rank, actor in enumerate(actors)
            ]
            return _results(ray, answers)
        finally:
            for actor in actors:
                ray.kill(actor)


@contextmanager
def _cluster(where: str, world: int) -> Iterator[Any]:
    """Ray, joined; a cluster that the user's script has joined stays joined."""
    found = re.fullmatch(r"ray(?:://([\w.-]+)(?::(\d{1,5}))?)?", where)
    if found is None:
        remedy = "give ray, or ray://HOST[:PORT] of a Ray client server"
        raise LaunchError(Problem("'on' is not the address of a Ray cluster", remedy, where))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        remedy = "pip install 'shardproof[ray]', or leave `on` out"
        raise LaunchError(Problem(f"Ray cannot be imported: {error}", remedy, where)) from None
    if ray.is_initialized():
        yield ray
        return
    address = f"ray://{found[1]}:{found[2] or _CLIENT_PORT}" if found[1] else None
    how: dict[str, Any] = {"logging_level": "ERROR"}
    if address is None and not os.environ.get("RAY_ADDRESS"):
        # Without this address it would serve all of the network.
        how |= {"num_cpus": world, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    try:
        ray.init(address, **how)
    except (ConnectionError, RuntimeError, ValueError) as error:
        remedy = "run `ray start --head`, or use the Ray token of the cluster in this process"
        raise LaunchError(Problem(f"no Ray cluster answers: {error}", remedy, where)) from None
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _room(ray: Any, world: int, on_gpu: bool) -> Iterator[Any]:
    """A CPU, or a CPU and a GPU, for every rank at once."""
    share = {"CPU": 1.0, **({"GPU": 1.0} if on_gpu else {})}
    place = ray.util.placement_group([share] * world, strategy="PACK")
    try:
        try:
            ray.get(place.ready(), timeout=PLACE_SECONDS)
        except ray.exceptions.GetTimeoutError:
            has = {name: ray.cluster_resources().get(name, 0.0) for name in share}
            what = f"the Ray cluster has {has}, but each of the {world} ranks needs {share}"
            raise LaunchError(Problem(what, "use fewer ranks, or see `ray status`")) from None
        yield place
    finally:
        ray.util.remove_placement_group(place)


def _results(ray: Any, answers: list[Any]) -> list[Any]:
    """Of every rank, once all have ended; after an error the others have a moment to end."""
    errors: dict[int, Exception] = {}
    waiting = list(answers)
    while waiting:
        ended, waiting = ray.wait(waiting, num_returns=1, timeout=GRACE_SECONDS if errors else None)
        if not ended:
            break
        try:
            ray.get(ended[0])
        except ray.exceptions.RayError as error:
            errors[answers.index(ended[0])] = error
    if errors:
        raise _cause(errors, ray.exceptions.RayTaskError) from None
    get: Callable[[list[Any]], list[Any]] = ray.get
    return get(answers)


def _cause(errors: dict[int, Exception], raised: type[Exception]) -> Exception:
    """The error to raise: bad input, else a rank that was lost, else the first that failed."""
    for error in errors.values():
        cause = getattr(error, "cause", None)
        if isinstance(cause, ValueError):  # keeps its type, whatever the place
            return cause
    for rank, error in errors.items():
        if not isinstance(error, raised):
            return TrainingFailed(f"rank {rank} was lost by Ray: {error}")
    rank, error = next(iter(errors.items()))
    return TrainingFailed(f"rank {rank} failed on Ray: {error}")

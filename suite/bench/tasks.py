"""What runs in leaders for a session of pairs: processes that start fresh ranks and wait for them.

Each task takes a ``payload`` of plain data that names its ``workdir`` and returns plain data:
the ``records`` of its ranks, or the ``problem``.  :meth:`shardproof.bench.session.Bench.lead` waits
for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardproof.bench.sides import LETTERS, Pair


def examine_sides(payload: Mapping[str, Any]) -> dict[str, Any]:
    """What each side declares and lacks here (:class:`Answer` by letter), without running it."""
    from shardproof.registry.declaration import ask

    pair = Pair.from_dict(payload["pair"])
    answers = {}
    for letter in LETTERS:
        side = pair.side(letter)
        answer = ask(side.implementation, side.options, pair.backend, pair.dtype, pair.world)
        answers[letter] = answer.to_dict()
    return answers


def time_sides(payload: Mapping[str, Any]) -> dict[str, Any]:
    """One launch of A, its twin and B."""
    from shardproof.bench import timed_ranks

    pair = Pair.from_dict(payload["pair"])
    meshes = {side: payload[side] for side in timed_ranks.SIDES}
    workdir = Path(payload["workdir"])
    return launched(
        pair.backend,
        pair.world,
        pair.deadline,
        workdir,
        lambda rank, _: timed_ranks.run(
            pair, meshes, payload["launch"], payload["blocks"], workdir, rank
        ),
    )


def weigh_side(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Memory of one side on threads, which are counted exactly."""
    import dataclasses

    from shardproof.bench import timed_ranks

    pair = dataclasses.replace(Pair.from_dict(payload["pair"]), backend="in_memory")
    return _on_ranks(payload, pair, _of_side(timed_ranks.memory, pair, payload))


def run_alone(payload: Mapping[str, Any]) -> dict[str, Any]:
    """One side on its own ranks, untimed."""
    from shardproof.bench import timed_ranks

    pair, workdir = Pair.from_dict(payload["pair"]), Path(payload["workdir"])
    program = functools.partial(timed_ranks.alone, workdir=workdir)
    return _on_ranks(payload, pair, _of_side(program, pair, payload))


def profile_side(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Phases of one side's step."""
    from shardproof.bench.profile import profile

    pair = Pair.from_dict(payload["pair"])
    return _on_ranks(payload, pair, _of_side(profile, pair, payload))


def _of_side(
    function: Callable[..., dict[str, Any]], pair: Pair, payload: Mapping[str, Any]
) -> Callable[[int, int], dict[str, Any]]:
    return lambda rank, _: function(pair, payload["side"], payload["mesh"], rank)


def _on_ranks(
    payload: Mapping[str, Any], pair: Pair, program: Callable[[int, int], dict[str, Any]]
) -> dict[str, Any]:
    return launched(pair.backend, pair.world, pair.deadline, Path(payload["workdir"]), program)


def launched(
    backend: str,
    world: int,
    deadline: float,
    workdir: Path,
    program: Callable[[int, int], dict[str, Any]],
    ledgers: bool = False,
) -> dict[str, Any]:
    """The ``records`` of ``program`` on fresh ranks, or the ``problem``: (verdict, sentence)."""
    from shardproof import tensor_bytes
    from shardproof.launch.ranks import root_cause, run_ranks

    workdir.mkdir(parents=True)
    outcomes = run_ranks(backend, world, program, workdir, deadline, ledgers=ledgers)
    cause = root_cause(outcomes)
    if cause is None:
        return {"records": [tensor_bytes.load(o.record) for o in outcomes if o.record is not None]}
    if cause.error_type == "Refused":
        return {"problem": ("precondition", cause.message)}
    verdict = "hang" if cause.status == "hung" else "crash"
    where = cause.traceback.splitlines()[-3:-1] if cause.traceback else []
    return {"problem": (verdict, " ".join([cause.sentence(), *where]))}

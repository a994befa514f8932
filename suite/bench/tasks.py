"""What runs in leaders for a session of pairs: processes that start fresh ranks and wait for them.

Each task takes a ``payload`` of plain data that names its ``workdir``, and leaves what it has to
tell in ``told.json`` there (:func:`tell`); :meth:`shardproof.bench.session.Bench.lead` reads it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardproof.bench.sides import LETTERS, Pair, Side
from shardproof.files import write_whole


def examine_sides(payload: dict[str, Any]) -> None:
    """What each side says of itself, without running it."""
    pair = Pair.from_dict(payload["pair"])
    tell(
        payload,
        {
            letter: about(pair.side(letter), pair.backend, pair.dtype, pair.world)
            for letter in LETTERS
        },
    )


def about(side: Side, backend: str, dtype: str, world: int) -> dict[str, Any]:
    """The ``axes`` that a system has, and what is ``missing`` here or that it ``refused``.

    ``threads``: whether it also runs on ``in_memory``, where bytes are counted exactly.
    """
    import importlib.util

    from shardproof import registry
    from shardproof.backends import BACKENDS
    from shardproof.contract import Refused

    try:
        system = registry.load(side.implementation)
        claims = system.capabilities(side.options)
    except registry.BrokenImplementation as error:
        return {"missing": str(error)}
    except Refused as error:
        return {"refused": str(error)}
    missing = BACKENDS[backend].available() or ""
    absent = [name for name in claims.packages if importlib.util.find_spec(name) is None]
    if absent:
        missing = f"package {', '.join(absent)} is not installed"
    elif backend not in claims.backends:
        missing = f"does not run on {backend}, only on {', '.join(claims.backends)}"
    elif dtype not in claims.dtypes:
        missing = f"does not train in {dtype}, only in {', '.join(claims.dtypes)}"
    elif claims.max_world is not None and world > claims.max_world:
        missing = f"runs on at most {claims.max_world} ranks"
    threads = "in_memory" in claims.backends
    return {
        "axes": list(claims.axes),
        "missing": missing,
        "threads": threads,
        "strategy": system.strategy,
    }


def time_sides(payload: dict[str, Any]) -> None:
    """One launch of A, its twin and B."""
    from shardproof.bench import timed_ranks

    pair = Pair.from_dict(payload["pair"])
    meshes = {side: payload[side] for side in timed_ranks.SIDES}
    workdir = Path(payload["workdir"])
    _on_ranks(
        payload,
        pair,
        pair.backend,
        lambda rank, _: timed_ranks.run(
            pair, meshes, payload["launch"], payload["blocks"], workdir, rank
        ),
    )


def weigh_side(payload: dict[str, Any]) -> None:
    """Memory of one side on threads, which are counted exactly."""
    import dataclasses

    from shardproof.bench import timed_ranks

    pair = dataclasses.replace(Pair.from_dict(payload["pair"]), backend="in_memory")
    _on_ranks(payload, pair, pair.backend, _of_side(timed_ranks.memory, pair, payload))


def run_alone(payload: dict[str, Any]) -> None:
    """One side on its own ranks, untimed."""
    from shardproof.bench import timed_ranks

    pair, workdir = Pair.from_dict(payload["pair"]), Path(payload["workdir"])
    program = functools.partial(timed_ranks.alone, workdir=workdir)
    _on_ranks(payload, pair, pair.backend, _of_side(program, pair, payload))


def profile_side(payload: dict[str, Any]) -> None:
    """Phases of one side's step."""
    from shardproof.bench.profile import profile

    pair = Pair.from_dict(payload["pair"])
    _on_ranks(payload, pair, pair.backend, _of_side(profile, pair, payload))


def _of_side(
    function: Callable[..., dict[str, Any]], pair: Pair, payload: Mapping[str, Any]
) -> Callable[[int, int], dict[str, Any]]:
    return lambda rank, _: function(pair, payload["side"], payload["mesh"], rank)


def _on_ranks(
    payload: Mapping[str, Any],
    pair: Pair,
    backend: str,
    program: Callable[[int, int], dict[str, Any]],
) -> None:
    workdir = Path(payload["workdir"])
    tell(payload, launched(backend, pair.world, pair.deadline, workdir, program))


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


def tell(payload: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    """Leave word for the session that waits for this leader."""
    workdir = Path(payload["workdir"])
    workdir.mkdir(parents=True, exist_ok=True)
    write_whole(workdir / "told.json", json.dumps(told))

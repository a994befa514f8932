"""Whether implementations that are not the suite's own can be loaded, before anything is run.

A name can lead to a module that raises, hangs or ends its process on import.  So it is loaded in a
leader, never here, and what is wrong is told in one sentence instead of once for every case.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from shardproof import registry
from shardproof.case import Case
from shardproof.errors import InputError, Problem, SelectionError, shorten
from shardproof.files import write_whole
from shardproof.launch.pool import Ended, Pool

#: For the import of a user's modules; torch is imported already.
SECONDS = 60.0
_LONGEST = 400


def check_cases(cases: Iterable[Case]) -> None:
    """As :func:`check`, for the implementations of ``cases``; a fault names the file and line."""
    places = {case.implementation: case.source for case in cases}
    check(places, sources=places)


def check(
    names: Iterable[str], pool: Pool | None = None, sources: Mapping[str, str] | None = None
) -> None:
    """Load those of ``names`` that are a user's own, in leaders of ``pool`` (``None``: a new one).

    :raises SelectionError: some cannot be loaded: no such class, an import that raises, hangs or
        ends the process, or no implementation.  All of them are told.
    """
    own = [name for name in dict.fromkeys(names) if registry.is_foreign(name)]
    if not own:
        return
    for name in own:
        registry.check(name)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardproof-load-")))
        told = {name: folder / f"{number}.json" for number, name in enumerate(own)}
        items = [(name, {"name": name, "told": str(told[name])}, SECONDS) for name in own]
        leaders = pool if pool is not None else stack.enter_context(Pool(1))
        ends = list(
            stack.enter_context(closing(leaders.run("shardproof.registry.preflight:tell", items)))
        )
        wrong = {ended.key: _fault(ended, told[ended.key]) for ended in ends}
    remedy = "nothing was run: correct the name or the module"
    problems = []
    for name, fault in wrong.items():
        file, _, line = (sources or {}).get(name, "").rpartition(":")
        if fault:
            at: dict[str, Any] = {"file": file, "line": int(line)} if file else {}
            problems.append(Problem(shorten(fault, _LONGEST), remedy, **at))
    if problems:
        raise SelectionError(problems)


def tell(payload: Mapping[str, Any]) -> None:
    """Task of the leader: load one implementation and write down what is wrong with it."""
    fault = ""
    try:
        registry.load(payload["name"])
    except (InputError, registry.BrokenImplementation) as error:
        fault = str(error)
    write_whole(Path(payload["told"]), json.dumps(fault))


def _fault(ended: Ended, told: Path) -> str:
    if told.exists():
        return str(json.loads(told.read_text()))
    if ended.timed_out:
        how = f"did not end within {SECONDS:g} s"
    else:
        how = f"ended its process ({_end(ended)})"
    last: Sequence[str] = ended.output.strip().splitlines()[-1:]
    return f"implementation {ended.key!r} cannot be imported: the import {how}" + "".join(
        f": {line}" for line in last
    )


def _end(ended: Ended) -> str:
    if ended.signal is not None:
        return f"signal {ended.signal}"
    return "with its fork server" if ended.exit_code is None else f"exit code {ended.exit_code}"

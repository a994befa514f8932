"""Whether implementations that are not the suite's own can be loaded, before anything is run.

A name can lead to a module that raises, hangs or ends its process on import.  So it is loaded in a
leader, never here, and what is wrong is told in one sentence instead of once for every case.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from shardproof import registry
from shardproof.contract import Options, Refused
from shardproof.errors import InputError, Problem, SelectionError, printable, shorten
from shardproof.launch.pool import Pool, TaskEnd
from shardproof.registry import old_names
from shardproof.registry.declaration import BrokenContract, Declaration

#: For the import of a user's modules; torch is imported already.
SECONDS = 60.0
_LONGEST = 400


def check(
    names: Iterable[str], pool: Pool | None = None, sources: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """Load those of ``names`` that are a user's own, in leaders of ``pool`` (``None``: a new one).

    Gives the axes that each of them declares without options; none where it takes some.

    ``sources``: the file and line that gave each, which a fault then names.

    :raises SelectionError: some cannot be loaded: no such class, an import that raises, hangs or
        ends the process, or no implementation.  All of them are told.
    """
    own = [name for name in dict.fromkeys(names) if registry.is_foreign(name)]
    if not own:
        return {}
    for name in own:
        registry.check(name)
    with ExitStack() as stack:
        leaders = pool if pool is not None else stack.enter_context(Pool(1))
        items = [(name, name, SECONDS) for name in own]
        ends = list(stack.enter_context(closing(leaders.run(try_to_load, items))))
    loaded: dict[str, Loaded]
    loaded = {end.key: end.value or (_unfinished(end), [], []) for end in ends}
    for text in dict.fromkeys(text for _, texts, _ in loaded.values() for text in texts):
        print(printable(f"warning: {text}"), file=sys.stderr)
    remedy = "nothing was run: correct the name or the module"
    problems = []
    for name, (fault, _, _) in loaded.items():
        file, _, line = (sources or {}).get(name, "").rpartition(":")
        if fault:
            problem = Problem(shorten(fault, _LONGEST), remedy)
            problems.append(replace(problem, file=file, line=int(line)) if line else problem)
    if problems:
        raise SelectionError(problems)
    return {name: axes for name, (_, _, axes) in loaded.items()}


#: The fault of an implementation (empty: none), warnings of old names, and its axes.
Loaded = tuple[str, list[str], list[str]]


def try_to_load(name: str) -> Loaded:
    """Task of a leader."""
    fault, axes = "", list[str]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DeprecationWarning)
        try:
            axes = list(Declaration.of(registry.load(name), {}).axes)
        except (Refused, BrokenContract):
            axes = []  # it takes options: its cases will tell
        except (InputError, registry.BrokenImplementation) as error:
            fault = str(error)
    of_old_names = (each for each in caught if str(each.message).endswith(old_names.ENDS))
    texts = [f"{each.filename}:{each.lineno}: {each.message}" for each in of_old_names]
    return fault, texts, axes


def check_options(name: str, options: Options, pool: Pool) -> None:
    """Ask ``name``, in a leader of ``pool``, whether it takes ``options``.

    :raises SelectionError: it refuses them, or ended the process that asked.
    """
    with closing(pool.run(try_options, [("options", (name, options), SECONDS)])) as ends:
        (end,) = ends
    fault = f"{name} was asked for its options: {_how(end)}" if end.value is None else end.value
    if fault:
        remedy = "nothing was run: correct the option"
        raise SelectionError(Problem(shorten(fault, _LONGEST), remedy))


def try_options(system: tuple[str, Options]) -> str:
    """Task of a leader: why the system refuses its options; empty: it does not.

    What else is wrong is told by its cases.
    """
    name, options = system
    try:
        Declaration.of(registry.load(name), options)
    except Refused as error:
        return str(error)
    except (BrokenContract, registry.BrokenImplementation):
        pass
    return ""


def _unfinished(end: TaskEnd[str]) -> str:
    return f"implementation {end.key!r} cannot be imported: {_how(end)}"


def _how(end: TaskEnd[Any]) -> str:
    """How a leader ended that gave no answer, with its last words."""
    if end.timed_out:
        how = f"did not end within {SECONDS:g} s"
    elif end.signal is not None:
        how = f"ended its process (signal {end.signal})"
    elif end.exit_code is not None:
        how = f"ended its process (exit code {end.exit_code})"
    else:
        how = "ended its process (with its fork server)"
    last: Sequence[str] = end.output.strip().splitlines()[-1:]
    return f"the import {how}" + "".join(f": {line}" for line in last)

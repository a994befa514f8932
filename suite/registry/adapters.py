"""Things of users that are no class of the contract: a hook, an optimizer, a sampler, a plan.

Each goes into an adapter around PyTorch as an option, by the path under which ranks import it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from shardproof import registry
from shardproof.by_path import CannotImport, attribute, program
from shardproof.contract import Options
from shardproof.errors import Problem, SelectionError

#: An object that a module or the program holds, or its path ``package.module:name``.
Thing = Any
#: Names of the module that runs as the program; processes of ``multiprocessing`` have the second.
PROGRAM = ("__main__", "__mp_main__")
#: Objects of these may be one and the same in modules that know nothing of each other.
_SHARED = (int, float, complex, bytes, tuple, frozenset)
#: Argument -> the one that it belongs to, and whose adapter takes it.
BELONGS = {"state": "hook"}


def path_of(thing: Any, what: str) -> str:
    """How other processes import ``thing``: the path of the module or of the program that holds it.

    :raises SelectionError: neither does, or the program is no file.
    """
    if isinstance(thing, str):
        return thing
    module = str(getattr(thing, "__module__", None))
    name = str(getattr(thing, "__qualname__", None))
    if module not in PROGRAM and _holds(module, name, thing):
        return f"{module}:{name}"
    modules = {} if isinstance(thing, _SHARED) else dict(sys.modules)
    for holder, held in modules.items():
        for key, value in list(vars(held).items()) if held is not None else ():
            if value is thing and holder not in PROGRAM:
                return f"{holder}:{key}"
    if _holds("__main__", name, thing):
        return f"{_program(name, what)}:{name}"
    for key, value in list(vars(sys.modules["__main__"]).items()):
        if value is thing:
            return f"{_program(key, what)}:{key}"
    code = getattr(thing, "__code__", None)
    file, line = (code.co_filename, code.co_firstlineno) if code else ("", None)
    given = repr(thing) if name == "None" else name
    remedy = "define it with a name at the top level of a module or script"
    raise SelectionError(Problem(f"ranks cannot import this {what}", remedy, given, file, line))


def _program(name: str, what: str) -> str:
    """How others import the program that holds the ``what`` called ``name``.

    :raises SelectionError: it is no file.
    """
    path = program()
    if not path:
        problem = f"ranks cannot import this {what} from a notebook, console or pipe"
        remedy = "write the code into a file (in a notebook: %%writefile mine.py) and import it"
        raise SelectionError(Problem(problem, remedy, name))
    return path


def _as_option(thing: Thing, what: str) -> Any:
    """The path of ``thing``; of a schedule also ``{"name": ..., "chunks": ...}``."""
    if what == "schedule" and isinstance(thing, Mapping) and "name" in thing:
        return {**thing, "name": path_of(thing["name"], what)}
    return path_of(thing, what)


def _holds(module: str, name: str, thing: Any) -> bool:
    """Whether ``module``, once imported, is where ``name`` leads to ``thing``."""
    if module not in sys.modules or "<" in name:
        return False
    try:
        return attribute(sys.modules[module], name) is thing
    except CannotImport:
        return False


def subject(
    implementation: str | type[Any] | None, things: Mapping[str, Any], options: Options
) -> tuple[str, dict[str, Any]]:
    """The name of what is to be judged, and its options.

    ``things`` are by the names of ``prove``'s arguments; where one is given, it goes into its
    adapter.

    :raises SelectionError: none or several are given, or one that ranks cannot import.
    """
    there = {name: thing for name, thing in things.items() if thing is not None}
    systems = [name for name in there if name not in BELONGS]
    if len(systems) + (implementation is not None) != 1:
        names = ", ".join(("an implementation", *(f"{name}=" for name in registry.takers())))
        what = "several things to judge are given" if systems else "nothing to judge is given"
        raise SelectionError(Problem(what, f"give one of these: {names}"))
    for name, owner in BELONGS.items():
        if name in there and owner not in there:
            raise SelectionError(Problem(f"{name}= needs {owner}=", f"give {owner}= as well"))
    if implementation is not None:
        if not isinstance(implementation, str | type):
            remedy = "give a name, e.g. 'reference/ddp', or a class"
            what = "this is not an implementation"
            raise SelectionError(Problem(what, remedy, repr(implementation)))
        return path_of(implementation, "class"), dict(options)
    paths = {name: _as_option(thing, name) for name, thing in there.items()}
    return registry.takers()[systems[0]], {**options, **paths}

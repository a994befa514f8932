"""What people have and is no class of the contract: a hook, an optimizer, a schedule, a plan.

Each goes into an adapter around PyTorch as an option, by the path under which ranks import it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from shardproof.contract import CannotImport, Options, attribute
from shardproof.errors import Problem, SelectionError

#: An object that a module holds, or its path ``package.module:name``.
Thing = Any
#: Argument of ``prove`` -> the adapter that takes it as the option of that name.
ADAPTERS = {
    "hook": "pytorch/ddp_hook",
    "optimizer": "pytorch/ddp_optimizer",
    "schedule": "pytorch/own_schedule",
    "tensor_plan": "pytorch/tensor_plan",
}
#: Argument -> the one that it belongs to, and whose adapter takes it.
BELONGS = {"state": "hook"}


def path_of(thing: Any, what: str) -> str:
    """How other processes import ``thing``: the path of the module that holds it.

    :raises SelectionError: no module does, but for the program itself.
    """
    if isinstance(thing, str):
        return thing
    module = str(getattr(thing, "__module__", None))
    name = str(getattr(thing, "__qualname__", None))
    if _holds(module, name, thing):
        return f"{module}:{name}"
    for holder, held in list(sys.modules.items()):
        for key, value in list(vars(held).items()) if held is not None else ():
            if value is thing and holder != "__main__":
                return f"{holder}:{key}"
    problem, given = f"ranks cannot import this {what}", repr(thing) if name == "None" else name
    raise SelectionError(Problem(problem, "put it at the top of a module", given))


def _as_option(thing: Thing, what: str) -> Any:
    """The path of ``thing``; of a schedule also ``{"name": ..., "chunks": ...}``."""
    if what == "schedule" and isinstance(thing, Mapping) and "name" in thing:
        return {**thing, "name": path_of(thing["name"], what)}
    return path_of(thing, what)


def _holds(module: str, name: str, thing: Any) -> bool:
    """Whether ``module``, once imported, is where ``name`` leads to ``thing``."""
    if module == "__main__" or module not in sys.modules or "<" in name:
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
        names = ", ".join(("an implementation", *(f"{name}=" for name in ADAPTERS)))
        what = "several things to judge at once" if systems else "nothing to judge"
        raise SelectionError(Problem(what, f"give one of: {names}"))
    for name, owner in BELONGS.items():
        if name in there and owner not in there:
            raise SelectionError(Problem(f"{name}= belongs to {owner}=", f"give {owner}=, too"))
    if implementation is not None:
        if not isinstance(implementation, str | type):
            remedy = "give a name, e.g. 'reference/ddp', or a class"
            raise SelectionError(Problem("not an implementation", remedy, repr(implementation)))
        return path_of(implementation, "class"), dict(options)
    paths = {name: _as_option(thing, name) for name, thing in there.items()}
    return ADAPTERS[systems[0]], {**options, **paths}

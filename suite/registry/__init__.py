"""Finds implementations, without importing them until one is asked for.

An implementation is named in one of three ways:

1. ``family/name`` or ``name``: a module ``impls/<family>/<name>.py`` (or a folder of that name)
   with ``IMPLEMENTATION = <the class, or its name>``.  Private modules, ``reference/parts`` and
   mutants are left out of the list.
2. The name of an entry point in the group ``shardproof.implementations`` of an installed package.
   A name that a folder already has keeps meaning the folder's.
3. ``package.module:Class``; modules in the working folder are found too.  Or ``file.py:Class``.

Mutants are ``mutants/<name>``: listed apart, loaded only when named exactly.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardproof.by_path import (
    CannotImport,
    at_path,
    entry_points,
    import_module,
    is_module,
    no_module,
)
from shardproof.errors import Problem, SelectionError, nearest

if TYPE_CHECKING:
    from shardproof.contract import Implementation
    from shardproof.impls.mutants.declare import Mutant

GROUP = "shardproof.implementations"
MUTANTS = "mutants/"
#: Asked for a class before it is imported: what stands for it in a process that must not do so.
STAND_INS: list[Callable[[str], type[Implementation] | None]] = []

_EXPORT = re.compile(r"^IMPLEMENTATION\b", re.MULTILINE)
_TAKES = re.compile(r'^TAKES = "(\w+)"$', re.MULTILINE)
_OWN_CLASS = re.compile(r"([A-Za-z_][\w.]*|[^:]+\.py):[A-Za-z_][\w.]*")


class UnknownImplementation(SelectionError):
    """No implementation has this name."""

    def __init__(self, name: str, remedy: str) -> None:
        super().__init__(Problem("unknown implementation", remedy, value=name))


class BrokenImplementation(RuntimeError):
    """An implementation that cannot be used; ``__cause__`` is what its import raised, if it did."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        super().__init__(f"implementation {name!r} {why}")


def names() -> list[str]:
    """Every implementation that can be listed, sorted; mutants apart.  Imports none of them."""
    return sorted({*_folder(), *entry_points(GROUP)})


def mutant_names() -> list[str]:
    """``mutants/<name>`` of every mutant, by file and in order of declaration.  Imports none."""
    return [MUTANTS + name for name in _mutant_modules()]


def check(name: str) -> None:
    """Raise :class:`UnknownImplementation` if no such thing exists; imports nothing.

    Of ``package.module:Class`` the form is checked and that the package exists: whether it can be
    imported is asked in another process (``shardproof.registry.preflight``).
    """
    if ":" in name:
        if not _OWN_CLASS.fullmatch(name):
            raise UnknownImplementation(name, "write package.module:Class or file.py:Class")
        module = name.partition(":")[0]
        if not is_module(module):
            raise UnknownImplementation(name, no_module(module))
    elif name.startswith(MUTANTS):
        if name not in mutant_names():
            raise UnknownImplementation(name, nearest(name, mutant_names(), "mutants"))
    elif name not in _folder() and name not in entry_points(GROUP):
        raise UnknownImplementation(name, nearest(name, names(), "implementations"))


def is_foreign(name: str) -> bool:
    """Whether ``name`` is a user's own: a class by its path, or another package's entry point."""
    return not name.startswith(MUTANTS) and name not in _folder()


def changes_nothing(name: str) -> bool:
    """Whether its import leaves the process as it was.

    So it is for reference strategies, adapters of PyTorch and faults planted in these; other
    libraries patch torch, and a fault of the judge spoils it for whatever comes after.
    """
    if name.startswith(MUTANTS):
        return ".judge." not in _mutant_modules()[name.removeprefix(MUTANTS)]
    return not is_foreign(name) and name.startswith(("reference/", "pytorch/"))


def load(name: str) -> type[Implementation]:
    """The implementation class called ``name``.

    :raises UnknownImplementation: no such name; the nearest one is suggested.
    :raises BrokenImplementation: its module raises on import, or exports no complete subclass of
        ``shardproof.contract.Implementation``.
    """
    check(name)
    for stand_in in STAND_INS:
        if (found := stand_in(name)) is not None:
            return found
    if name.startswith(MUTANTS):
        return load_mutant(name).implementation
    if (module := _folder().get(name)) is None:
        path = name if ":" in name else entry_points(GROUP)[name][-1].value
        return _checked(name, _find(name, path))
    export = _find(name, f"{module}:IMPLEMENTATION")
    return _checked(name, _find(name, f"{module}:{export}") if isinstance(export, str) else export)


def load_mutant(name: str) -> Mutant:
    """The mutant called ``name`` (with or without ``mutants/``) and all that it declares."""
    full = name if name.startswith(MUTANTS) else MUTANTS + name
    check(full)
    short = full.removeprefix(MUTANTS)
    try:
        module = import_module(_mutant_modules()[short])
    except CannotImport as error:
        raise BrokenImplementation(full, str(error)) from error
    for value in vars(module).values():
        declared = vars(value).get("mutant") if isinstance(value, type) else None
        if declared is not None and declared.name == short:
            _checked(full, declared.implementation)
            return cast("Mutant", declared)
    raise BrokenImplementation(full, f"is declared in {module.__name__}, but no class defines it")


def _root() -> Path:
    spec = importlib.util.find_spec("shardproof.impls")  # finds, does not import
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("the package 'shardproof.impls' is missing: reinstall shardproof")
    return Path(spec.submodule_search_locations[0])


def modules(family: str) -> list[str]:
    """Every module of the folder ``impls/<family>``, those that its systems import late as well."""
    root = _root()
    paths = sorted((root / family).rglob("*.py"))
    names = [".".join(path.relative_to(root).with_suffix("").parts) for path in paths]
    return [f"shardproof.impls.{name.removesuffix('.__init__')}" for name in names]


@cache
def takers() -> Mapping[str, str]:
    """A thing that is no class of the contract, such as a hook -> the implementation that
    takes it.
    """
    return {found[1]: name for name, text in _exports() if (found := _TAKES.search(text))}


@cache
def _folder() -> Mapping[str, str]:
    """Name -> module, of every file under ``impls`` that exports ``IMPLEMENTATION``."""
    return {name: ".".join(("shardproof.impls", *name.split("/"))) for name, _ in _exports()}


def _exports() -> Iterator[tuple[str, str]]:
    """Name and text of these files."""
    root = _root()
    for path in sorted([*root.glob("*.py"), *root.glob("*/*.py"), *root.glob("*/*/__init__.py")]):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        hidden = any(part.startswith("_") for part in parts) or parts[:1] == ("mutants",)
        if parts and not hidden and _EXPORT.search(text := path.read_text(encoding="utf-8")):
            yield "/".join(parts), text


@cache
def _mutant_modules() -> Mapping[str, str]:
    """Mutant -> module, read off the decorators ``@mutant("name", ...)``."""
    modules: dict[str, str] = {}
    for path in sorted((_root() / "mutants").glob("**/*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for call in getattr(node, "decorator_list", ()):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "mutant":
                    parts = "shardproof.impls", *path.relative_to(_root()).with_suffix("").parts
                    modules[ast.literal_eval(call.args[0])] = ".".join(parts)
    return modules


def _find(name: str, path: str) -> Any:
    """The class at ``path`` (``package.module:Class``)."""
    try:
        return at_path(path)
    except CannotImport as error:
        raise BrokenImplementation(name, str(error)) from (error.__cause__ or error)


def _checked(name: str, value: Any) -> type[Implementation]:
    from shardproof.contract import Implementation

    if not (isinstance(value, type) and issubclass(value, Implementation)):
        raise BrokenImplementation(name, f"is {value!r}, not a subclass of Implementation")
    strategy = getattr(value, "strategy", None)
    if not isinstance(strategy, str | None) or strategy == "":
        asked = "expected the name of a strategy, such as strategy = 'zero1'"
        raise BrokenImplementation(name, f"has strategy = {strategy!r}; {asked}")
    lacking = sorted(value.__abstractmethods__) + ["strategy"] * (strategy is None)
    if lacking:
        raise BrokenImplementation(name, f"does not define: {', '.join(lacking)}")
    return value

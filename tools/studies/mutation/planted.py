"""Strategies with a systematic fault, and strategies that record their executed lines, by their
names.

``tools.studies.mutation.planted:fault_ddp_<file>_<number>`` is ``reference/ddp`` with that
fault (:func:`of_fault`); ``..:reached_ddp_<case>`` notes the lines of case number ``case``.
Loading such a name changes the process for good, so that only leaders and their ranks load it; none
of them serves another case.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import threading
from collections import Counter
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from shardproof import registry
from tools.studies.mutation import operators, reached
from tools.studies.mutation.operators import SECOND_TIME, Fault

_NAME = re.compile(r"(fault|reached)_([a-z0-9]+(?:_[a-z0-9]+)*)__(?:(.+)__)?([0-9]+)")
_PACKAGE = "shardproof.impls.reference"
_SLASH = "_S_"
#: What is said of a fault whose function is not found, or has other free variables with it.
NOT_PLANTED = "cannot be given other code"


def of_fault(strategy: str, fault: Fault) -> str:
    """The name of ``reference/<strategy>`` with ``fault``."""
    file = fault.file.removesuffix(".py").replace("/", _SLASH)
    return f"{__name__}:fault_{strategy}__{file}__{fault.number}"


def of_case(strategy: str, number: int) -> str:
    """The name of ``reference/<strategy>`` that records its lines for case ``number``."""
    return f"{__name__}:reached_{strategy}__{number}"


@functools.cache
def __getattr__(name: str) -> Any:
    found = _NAME.fullmatch(name)
    if found is None:
        raise AttributeError(name)
    kind, strategy, file, number = found.groups()
    parent = registry.load(f"reference/{strategy}")
    if kind == "fault":
        _plant(f"{file.replace(_SLASH, '/')}.py", int(number))
    else:
        reached.note(int(number))
    return type(name, (parent,), {"__module__": __name__})


def _plant(file: str, number: int) -> None:
    """Replace the code of the fault's function.

    :raises LookupError: there is no such fault, or no function that could get its code.
    """
    fault, tree = operators.planted_code(file, number)
    parts = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    module = importlib.import_module(_PACKAGE if parts == "__init__" else f"{_PACKAGE}.{parts}")
    codes = _codes(compile(tree, inspect.getfile(module), "exec"))
    code = next(code for code in codes if code.co_qualname == fault.function)
    function = next((f for f in functions(module) if f.__qualname__ == fault.function), None)
    if function is None or code.co_freevars != function.__code__.co_freevars:
        raise LookupError(f"{fault.name}: {fault.function} {NOT_PLANTED}")
    seen: Counter[tuple[int, str]] = Counter()

    def comes_for_the_second_time(place: str) -> bool:
        seen[threading.get_ident(), place] += 1
        return seen[threading.get_ident(), place] == 2

    setattr(module, SECOND_TIME, comes_for_the_second_time)
    function.__code__ = code


def _codes(code: CodeType) -> Iterator[CodeType]:
    """All code objects inside ``code``."""
    for inner in (constant for constant in code.co_consts if isinstance(constant, CodeType)):
        yield inner
        yield from _codes(inner)


def functions(of: ModuleType | type) -> Iterator[FunctionType]:
    """Functions of a module and methods of its classes, without their decorators."""
    module = of.__module__ if inspect.isclass(of) else of.__name__
    for value in vars(of).values():
        if not inspect.isclass(value):
            yield from (found for found in _inside(value) if found.__module__ == module)
        elif value.__module__ == module:
            yield from functions(value)


def _inside(member: Any) -> Iterator[FunctionType]:
    for name in ("fget", "fset", "func", "__func__", "__wrapped__"):
        with contextlib.suppress(AttributeError):
            yield from _inside(getattr(member, name))
    if isinstance(member, FunctionType):
        yield member

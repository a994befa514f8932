"""The import names of contract 1 (``suite.contract`` ...) lead to the modules of ``shardproof``.

Systems written for contract 1 say ``from suite.contract import Implementation``.  A name of the
table below is answered with the module that is loaded already, never with a second copy: a class
loaded twice is no subclass of itself.  A package of the user that is called ``suite`` comes first,
since this finder is asked last and answers for no package but its own.  Until 1.0.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

OLD = "suite"
REMEDY = "the package is called shardproof: write `import shardproof`"
#: How each warning ends.
ENDS = "the old name works until 1.0"
#: Old name -> new name.
NAMES = {
    "suite.contract": "shardproof.contract",
    "suite.comm": "shardproof.comm",
    "suite.schedules": "shardproof.schedules",
    "suite.pytest_plugin": "shardproof.commands.pytest_plugin",
    "suite.worker": "shardproof.cluster.torchrun",
    "suite.__main__": "shardproof.__main__",
}


class _Package(Loader):
    """Makes the package ``suite``, which has no code and no folder of its own."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        package = ModuleType(OLD, "The old name of shardproof.")
        vars(package)["__getattr__"] = _attribute
        return package

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it is complete."""


class _Alias(Loader):
    """Answers an old name with the module of the new one."""

    def __init__(self, new: str) -> None:
        self._new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        _warn(spec.name, self._new)
        module = importlib.import_module(self._new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Python has given the module the old name's spec: it keeps its own.
        module.__spec__ = self._spec

    def get_code(self, fullname: str) -> CodeType | None:
        """For ``python -m``, which runs the code under the name ``__main__``."""
        print(f"warning: {fullname} is now {self._new}; {ENDS}", file=sys.stderr)
        spec = importlib.util.find_spec(self._new)
        assert spec is not None and isinstance(spec.loader, InspectLoader)
        return spec.loader.get_code(self._new)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == OLD:
            return ModuleSpec(OLD, _Package(), is_package=True)
        if fullname.partition(".")[0] != OLD or not _is_ours(sys.modules.get(OLD)):
            return None
        if fullname not in NAMES:
            raise ImportError(f"no module {fullname!r}: {REMEDY}", name=fullname)
        new = NAMES[fullname]
        spec = importlib.util.find_spec(new)
        # The origin is what ``python -m`` shows as the program's file.
        return ModuleSpec(fullname, _Alias(new), origin=spec.origin if spec else None)


_FINDER = _Finder()


def install() -> None:
    """Have old names answered in this process from now on, after all other finders."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)


def take_over() -> None:
    """Replace the module ``suite`` that Python loads right now from a checkout's folder."""
    install()
    package = importlib.util.module_from_spec(ModuleSpec(OLD, _Package(), is_package=True))
    sys.modules[OLD] = package


def _is_ours(package: ModuleType | None) -> bool:
    spec = getattr(package, "__spec__", None)
    return spec is not None and isinstance(spec.loader, _Package)


def _attribute(name: str) -> Any:
    import shardproof

    if name not in shardproof.__all__:
        raise AttributeError(f"module {OLD!r} has no attribute {name!r}: {REMEDY}")
    _warn(f"{OLD}.{name}", f"shardproof.{name}")
    return getattr(shardproof, name)


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is now {new}; {ENDS}", DeprecationWarning, stacklevel=3)

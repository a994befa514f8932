"""Objects that a user names by a path: ``package.module:name`` or ``file.py:name``.

Processes of ranks load by it what a script or a package of a user's own defines.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardproof.errors import nearest
from shardproof.table import grouped

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: Keeps what follows to the program; whoever imports the file does not run it.
GUARD = '`if __name__ == "__main__":`'


class CannotImport(ValueError):
    """The object of ``package.module:name`` is not there; says why in one sentence."""


class LoadedSoFar(BaseException):
    """A script that is loaded for its functions has come to what only its program does."""


#: What was loaded by its file, by the file's path.
_of_files: dict[Path, ModuleType] = {}
#: In a script that was loaded by its file only so far: the line that it had come to.
_STOPPED = "__shardproof_stopped__"
_loading: list[str] = []
_ONE_BY_ONE = threading.RLock()


def at_path(path: str) -> Any:
    """The object that ``package.module:name`` or ``file.py:name`` names.

    So functions of a user's own reach the processes of ranks.

    :raises CannotImport: no such module, one that raises, or no such name in it.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise CannotImport("is not of the form package.module:name or file.py:name")
    return attribute(import_module(module), name)


@cache
def entry_points(group: str) -> Mapping[str, list[EntryPoint]]:
    """Name -> the entry points of ``group`` that installed packages give it; imports none."""
    from importlib import metadata

    return grouped((point.name, point) for point in metadata.entry_points(group=group))


def import_module(name: str) -> ModuleType:
    """The module ``name``; those in the working folder count, as for ``python -m``.

    ``file.py`` is loaded once, never as ``__main__``: what stands under ``if __name__ ==
    "__main__":`` is not run, and a call that is the program's own (:func:`only_in_programs`) ends
    the loading there.

    :raises CannotImport: no such module, or one that raises.
    """
    _find_local_modules()
    _loading.append(name)
    try:
        with _ONE_BY_ONE:  # ranks that are threads, as Python's own imports are
            return _load_file(Path(name)) if is_file(name) else importlib.import_module(name)
    except LoadedSoFar:
        what = "calls prove() while ranks import it"
        raise CannotImport(f"{what}: put the call under {GUARD}") from None
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "importlib" not in frame.filename]
        own = [frame for frame in own if frame.filename != __file__]
        where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
        why = f"cannot be imported: {type(error).__name__}: {error}{where}"
        raise CannotImport(why) from error
    finally:
        _loading.pop()


def _load_file(path: Path) -> ModuleType:
    """The module that ``path`` holds, under its path, by which :func:`at_path` finds it."""
    path = path.resolve()
    if path in _of_files:
        return _of_files[path]
    name = _from_here(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # where a program finds what lies beside it
    module = sys.modules[name] = _of_files[path] = importlib.util.module_from_spec(spec)
    module.__package__ = ""  # the dot before ``py`` parts no package from a module
    try:
        spec.loader.exec_module(module)
    except LoadedSoFar as stopped:
        frames = traceback.extract_tb(stopped.__traceback__)
        own = (frame.lineno for frame in frames if frame.filename == str(path))
        setattr(module, _STOPPED, next(own, None))
    except BaseException:
        del sys.modules[name], _of_files[path]
        raise
    return module


def only_in_programs() -> None:
    """Call it in what a user's program does and its functions do not: a rank that loads the file
    of these stops there, instead of doing what the program does.

    :raises LoadedSoFar: a module is being imported by its path.
    """
    if _loading:
        raise LoadedSoFar


def is_file(module: str) -> bool:
    """Whether ``module`` is the path of a file, not the name of a module."""
    return module.endswith(".py")


def is_module(name: str) -> bool:
    """Whether there is a module or a file ``name``, as far as can be said without an import."""
    if is_file(name):
        return Path(name).is_file()
    package = name.partition(".")[0]
    if not package.isidentifier():
        return False
    _find_local_modules()
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a program by its name: ``__main__``
        return False


def no_module(name: str) -> str:
    """The remedy where :func:`is_module` finds none."""
    if is_file(name):
        return f"there is no file {name!r} here: check the path"
    package = name.partition(".")[0]
    return f"there is no module {package!r} here or installed: check the name and PYTHONPATH"


def program() -> str:
    """How others import what runs as ``__main__``: ``package.module``, ``file.py``, or empty."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return str(spec.name)
    file = str(getattr(main, "__file__", None) or "")
    if not is_file(file) or not Path(file).is_file():
        return ""  # a notebook, a console, a pipe
    return _from_here(Path(file).resolve())


def _from_here(path: Path) -> str:
    here = Path.cwd().resolve()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _find_local_modules() -> None:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def attribute(module: ModuleType, name: str) -> Any:
    """The object that ``module`` holds under the dotted ``name``.

    :raises CannotImport: nothing; the nearest name is suggested.
    """
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            own = [n for n, v in vars(value).items() if _is_own(n, v, module)]
            choices = nearest(part, own, "names of its own")
            raise CannotImport(f"has no {name!r} in {_called(module)}; {choices}")
        value = getattr(value, part)
    return value


def _is_own(name: str, value: Any, module: ModuleType) -> bool:
    """Whether it is of the package of ``module``, and not what that imports."""
    package = module.__name__.partition(".")[0]
    made_in = getattr(value, "__module__", None) or package
    is_hidden = name.startswith("_") or isinstance(value, ModuleType)
    return not is_hidden and made_in.partition(".")[0] == package


def _called(module: ModuleType) -> str:
    """Its name for people; of a file also what is not in it, though it stands there."""
    if module not in _of_files.values():
        return module.__name__
    file = Path(str(module.__file__)).name
    if _STOPPED in vars(module):
        line = getattr(module, _STOPPED)
        return f"{file} before its call of prove() in line {line} (put such calls under {GUARD})"
    return f"{file} (names under {GUARD} are missing)"

"""Find scenario files by their name, folder or path, read them, report each fault with its line."""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shardproof.errors import Problem, ScenarioError, SelectionError, nearest
from shardproof.files import read_input
from shardproof.scenarios.schema import Matrix, Scenario
from shardproof.scenarios.source import MAX_BYTES, SCENARIO, Node, parse, read, resolve, value_text
from shardproof.scenarios.vocabulary import Vocabulary
from shardproof.wings import FileKind, file_kinds

#: Scenarios shipped with the suite, used if the working folder has no ``scenarios/``.
SHIPPED = (Path(__file__).parent / "files").resolve()

#: What is run where nothing is named.
USUAL = ("conformance", "checkpoint")
Shape = typing.TypeVar("Shape", bound=BaseModel)
#: Keys that only policies of ``shardproof gate`` have.
_POLICY = "verdicts|figures|times|xfails"


@dataclass(frozen=True)
class ScenarioFile:
    """A valid scenario, and the line of each of its parts."""

    scenario: Scenario
    file: str
    node: Node

    @property
    def name(self) -> str:
        """The name that the scenario gives itself."""
        return self.scenario.name

    def problem(self, path: Iterable[str | int], what: str, remedy: str, value: str) -> Problem:
        """A problem at the line of the part at ``path``."""
        return Problem(what, remedy, value, self.file, self.node.locate(path))

    def check_names(self, vocabulary: Vocabulary) -> None:
        """Raise :class:`ScenarioError` for every name that ``vocabulary`` does not have."""
        _as(Scenario, self.node, self.file, vocabulary)


def load(path: Path) -> ScenarioFile:
    """Read one file.

    :raises ScenarioError: all faults of the first faulty stage (text, then shape); or the file is
        of another kind (:func:`kind_of`).
    """
    if kind := kind_of(path):
        raise ScenarioError([_not_judged(path, f"a {kind.name} scenario", kind)])
    if _has(path, _POLICY) and not _has(path, "matrix"):
        remedy = "use the file in `shardproof gate RUN --against BASELINE --policy FILE`"
        raise ScenarioError(Problem("is a policy, not a scenario", remedy, file=_shown(path)))
    return of_node(read(path), _shown(path))


def kind_of(path: Path) -> FileKind | None:
    """The kind of a file that a wing reads; ``None``: a scenario, or a file that cannot be read.

    Its top-level keys decide, not its folder: those of the kind, and no ``matrix:``.  The caller
    that loads an unreadable file reports it.
    """
    if _has(path, "matrix"):
        return None
    return next((kind for kind in file_kinds().values() if _has(path, kind.keys)), None)


def _has(path: Path, keys: str) -> bool:
    """Whether one of ``keys`` stands at the top level of a file that can be read."""
    try:
        raw = read_input(path, MAX_BYTES)
    except (OSError, SelectionError):
        return False
    return bool(re.search(rf"(?m)^(?:{keys})[ \t]*:", raw.decode("utf-8", "replace")))


def files_of_wings(folder: Path) -> dict[Path, FileKind]:
    """The files below ``folder`` that wings read, with their kind."""
    return {path: kind for path in _yaml_below(folder) if (kind := kind_of(path))}


def run_by_a_wing(arguments: Sequence[str]) -> Callable[[Any, Any], int] | None:
    """Runs the files and folders in ``arguments``, if all are of one kind that a wing runs."""
    found: dict[Path, FileKind | None] = {}
    for path in map(named, arguments):
        found |= files_of_wings(path) if path.is_dir() else {path: kind_of(path)}
        found |= dict.fromkeys(files_below(path) if path.is_dir() else ())
    kinds = {kind.name if kind else "": kind for kind in found.values()}
    kind = next(iter(kinds.values()), None)
    return partial(kind.run, [*found]) if kind and kind.run and len(kinds) == 1 else None


def _not_judged(path: Path, what: str, kind: FileKind) -> Problem:
    shown = _shown(path)
    return Problem(f"{what} must be run separately", f"run `{kind.command} {shown}`", shown)


def load_text(text: str, file: str = "<text>") -> ScenarioFile:
    """The same for text; ``file`` names it in errors."""
    return of_node(parse(text, file), file)


def read_as(path: Path, kind: type[Shape], noun: str = SCENARIO) -> tuple[Shape, Node]:
    """A file of another shape than a scenario, and the lines of its parts.

    ``noun`` names it in errors; it may be empty where no key is required.

    :raises ScenarioError: all its faults.
    """
    optional = not any(field.is_required() for field in kind.model_fields.values())
    node = read(path, noun, optional)
    return _as(kind, node, _shown(path)), node


def default_folder() -> Path:
    """``scenarios/`` of the working folder, else the scenarios shipped with the suite."""
    here = Path("scenarios")
    return here if here.is_dir() else SHIPPED


def named(argument: str) -> Path:
    """The path ``argument``; one that is not there and begins as in a checkout: the shipped file.

    Pages and case ids name the suite's own files from ``scenarios/`` on, in any working folder.
    """
    path = Path(argument)
    if path.parts[:1] == ("scenarios",) and not path.exists():
        shipped = SHIPPED.joinpath(*path.parts[1:])
        return shipped if shipped.exists() else path
    return path


def find(arguments: Sequence[str] = (), folder: Path | None = None) -> list[ScenarioFile]:
    """Load the files, folders (all levels) or scenario names in ``arguments``.

    No arguments mean the folders :data:`USUAL` of ``folder`` (default: :func:`default_folder`).

    :raises ScenarioError: for faulty files and for a scenario name that two files use.
    :raises SelectionError: for a name that no scenario has.
    """
    root = folder or default_folder()
    paths: dict[Path, None] = {}
    usual = [str(root / name) for name in USUAL if (root / name).is_dir()]
    for argument in arguments or usual:
        for path in _paths(argument, root):
            paths.setdefault(path.resolve(), None)
    if not paths:
        named = " ".join(arguments) or str(root / USUAL[0])
        raise SelectionError(Problem("no scenario file", "name a file or another folder", named))
    return load_all(paths)


def load_all(paths: Iterable[Path]) -> list[ScenarioFile]:
    """Load every path; the faults of all files are raised together."""
    problems: list[Problem] = []
    owner: dict[str, ScenarioFile] = {}
    for path in paths:
        try:
            file = load(path)
        except ScenarioError as error:
            problems += error.problems
            continue
        if (first := owner.setdefault(file.name, file)) is not file:
            what = f"scenario name already used by {first.file}"
            problems.append(file.problem(["name"], what, "choose another name", file.name))
    if problems:
        raise ScenarioError(problems)
    return [*owner.values()]


def _paths(argument: str, root: Path) -> list[Path]:
    try:
        path = named(argument)
        is_folder, is_file = path.is_dir(), path.exists()
    except (OSError, ValueError):
        raise SelectionError(Problem("not a path", "name a file or folder", argument)) from None
    if is_folder:
        return _judged_in(path)
    if is_file or path.suffix in (".yaml", ".yml"):
        return [path]
    stems = {candidate.stem: candidate for candidate in files_below(root)}
    if argument in stems:
        return [stems[argument]]
    if (root / argument).is_dir():
        return _judged_in(root / argument)
    for candidate, kind in files_of_wings(root).items():
        if argument in (candidate.stem, f"{candidate.parent.name}/{candidate.stem}"):
            raise SelectionError(_not_judged(candidate, f"a {kind.name} scenario", kind))
    if path.parent != Path():
        return [path]
    # The name inside a file may differ from the file name.
    names: list[str] = []
    for candidate in stems.values():
        try:
            name = load(candidate).name
        except ScenarioError:
            continue
        if name == argument:
            return [candidate]
        names.append(name)
    remedy = nearest(argument, [*names, *stems], "scenarios")
    raise SelectionError(Problem("unknown scenario", remedy, argument))


def _judged_in(folder: Path) -> list[Path]:
    """The scenarios below a named folder; a folder with only files of wings is an error."""
    files = files_below(folder)
    if not files and (others := files_of_wings(folder)):
        kind = next(iter(others.values()))
        raise SelectionError(_not_judged(folder, f"a folder of {kind.name} scenarios", kind))
    return files


def files_below(folder: Path) -> list[Path]:
    """The scenarios that are judged."""
    return [
        path
        for path in _yaml_below(folder)
        # One with ``about`` and nothing else of ours is a file of a wing that is missing here.
        # Files of wings have ``figures`` as well as policies do.
        if kind_of(path) is None
        and (_has(path, "matrix|checks|sees|verdicts|times|xfails") or not _has(path, "about"))
    ]


def _yaml_below(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        if error.filename == str(folder):
            what = f"cannot be searched for scenarios: {error.strerror}"
            raise SelectionError(Problem(what, "name a folder of scenarios", str(folder))) from None
        # A folder inside that goes while it is read, or may not be, has no scenarios.

    found = [Path(at, name) for at, _, names in os.walk(folder, onerror=refuse) for name in names]
    named = (path for path in sorted(found) if path.suffix in (".yaml", ".yml"))
    return [path for path in named if path.is_file() and path.name[0] not in "._"]


def _shown(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def of_node(node: Node, file: str) -> ScenarioFile:
    """The scenario that ``node`` is, in the file that errors name."""
    return ScenarioFile(_as(Scenario, node, file), file, node)


def _as(kind: type[Shape], node: Node, file: str, vocabulary: Vocabulary | None = None) -> Shape:
    try:
        return kind.model_validate(node.plain(), context=vocabulary)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise ScenarioError([_problem(detail, node, file, kind) for detail in details]) from None


def _problem(detail: ErrorDetails, node: Node, file: str, kind_of: type[BaseModel]) -> Problem:
    location = [part for part in detail["loc"] if not str(part).startswith("[")]  # [key], tags
    kind, context = detail["type"], detail.get("ctx", {})
    key, given = str(location[-1]) if location else "", detail["input"]
    where, about = dotted(location), _describe(location, kind_of)
    value: str | None = value_text(given)
    remedy = f"correct it{about}"
    if kind == "extra_forbidden":
        model, value = _model_at(location[:-1], kind_of), key
        keys = model.model_fields if model else ()
        what, remedy = f"unknown key {where}", nearest(key, keys, "valid keys")
        if key in Matrix.model_fields and "matrix" in keys:
            remedy = f"{key} is an axis: move it into matrix"
    elif kind == "missing":
        what, remedy, value = f"missing key {where}", f"add `{key}: ...`{about}", None
    elif kind == "literal_error":
        valid = re.findall(r"'([^']*)'", str(context.get("expected", "")))
        is_key = "[key]" in detail["loc"]
        what = f"unknown key {where}" if is_key else f"{where}: unknown value"
        remedy = nearest(str(given), valid, "valid keys" if is_key else "valid names")
    elif kind == "unknown_name":
        what = detail["msg"]
        remedy = nearest(str(given), context["known"], f"{context['kind']}s")
    elif kind == "value_error":
        what = f"{where}: {context.get('error', detail['msg'])}"
    else:
        wanted = re.sub(r"^(Input|Value|String|List|Dictionary) ", "", detail["msg"])
        wanted = re.sub(r"valid dictionary( or instance of \w+)?", "mapping", wanted)
        what = f"{where}: {wanted[0].lower()}{wanted[1:]}"
        if isinstance(given, str):
            value = repr(given)
            is_number = type(resolve(given.strip())) in (int, float)
            if kind in ("int_type", "float_type") and is_number:
                remedy = f"write {given.strip()} without quotes{about}"
            elif kind == "model_type":
                remedy = f"write {{name: {given}}}{about}"
        elif isinstance(given, list) and location == ["workload"]:
            remedy = (
                f"give one here; variants, each with a label, belong under matrix.workload{about}"
            )
    return Problem(what, remedy, value, file, node.locate(location))


def dotted(location: Sequence[str | int]) -> str:
    """A path as messages write it: ``matrix.cases[0].backend``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".") or "scenario"


def _describe(location: Sequence[str | int], kind: type[BaseModel]) -> str:
    parent = _model_at(location[:-1], kind)
    field = parent.model_fields.get(str(location[-1])) if parent and location else None
    return f": {field.description}" if field is not None and field.description else ""


def _model_at(location: Sequence[str | int], kind: type[BaseModel]) -> type[BaseModel] | None:
    """The model that holds the keys at ``location`` of a file of shape ``kind``."""
    model: type[BaseModel] | None = kind
    for part in location:
        if isinstance(part, int):
            continue  # items of a list have the model of the list's annotation
        field = model.model_fields.get(part) if model else None
        model = _model_in(field.annotation) if field is not None else None
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in typing.get_args(annotation):
        if (model := _model_in(argument)) is not None:
            return model
    return None

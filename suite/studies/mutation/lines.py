"""Lines and branches of ``impls/reference`` that were executed, of those that there are.

Lines outside of functions are not counted: whoever imports a file executes them.  Neither is a
branch that ends in an error: those are *guards*, which tests and cases that must be refused ask.
Where ``untaken.yaml`` explains a branch that nobody took, it counts for no share.
"""

from __future__ import annotations

import ast
import functools
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from shardproof.studies.mutation.operators import ROOT
from shardproof.studies.mutation.reached import Arc
from shardproof.table import Table

#: The share of branches that the cases must execute.
LEAST = 0.98
RULES = Path(__file__).with_name("untaken.yaml")
GUARD = "ends in an error: a guard, asked by tests and by cases that must be refused"


@dataclass(frozen=True)
class File:
    """Counts of one file, and the branches that nobody took: from a line to a line.

    ``explained``: reason -> how many there are beside, taken by nobody either.
    """

    name: str
    statements: int
    executed: int
    branches: int
    taken: int
    missing: Sequence[Arc]
    explained: Mapping[str, int] = field(default_factory=dict)


def measured(arcs: Mapping[str, set[Arc]]) -> list[File]:
    """Every file of ``impls/reference``, by what coverage.py finds in its source.

    :raises ModuleNotFoundError: the package ``coverage`` is not installed.
    """
    import coverage

    with tempfile.TemporaryDirectory(prefix="shardproof-lines-") as folder:
        data = coverage.CoverageData(str(Path(folder) / "data"))
        data.add_arcs({str(ROOT / file): noted for file, noted in arcs.items()})
        data.touch_files([str(path) for path in ROOT.rglob("*.py")])
        data.write()
        reader = coverage.Coverage(data_file=data.data_filename(), branch=True, config_file=False)
        reader.load()
        out = Path(folder) / "lines.json"
        reader.json_report(outfile=str(out))
        files = json.loads(out.read_text())["files"]
    return [_file(Path(name), told) for name, told in sorted(files.items())]


def _file(path: Path, told: Mapping[str, Any]) -> File:
    name, source = str(path.resolve().relative_to(ROOT)), path.read_text(encoding="utf-8")
    inside, errors = _places(source)
    lines = source.splitlines()
    executed, unexecuted = ([n for n in told[f"{key}_lines"] if n in inside] for key in _LINES)
    taken = [arc for arc in told["executed_branches"] if arc[1] not in errors]
    missing: list[Arc] = []
    explained = Counter[str]()
    for before, after in told["missing_branches"]:
        if reason := GUARD if after in errors else why(name, lines[before - 1]):
            explained[reason] += 1
        else:
            missing.append((before, after))
    statements = len(executed) + len(unexecuted)
    branches = len(taken) + len(missing)
    return File(name, statements, len(executed), branches, len(taken), missing, explained)


_LINES = ("executed", "missing")


def _places(source: str) -> tuple[set[int], set[int]]:
    """The lines inside of functions, and those that raise or begin a block that ends so."""
    inside, errors = set[int](), set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise):
            errors.add(node.lineno)
        if isinstance(node, ast.FunctionDef):
            inside.update(range(node.body[0].lineno, node.end_lineno or 0), [node.end_lineno or 0])
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(body, list) and body and isinstance(body[-1], ast.Raise):
                errors.add(body[0].lineno)
    return inside, errors


@functools.cache
def rules() -> Sequence[tuple[Sequence[str], Sequence[str], str]]:
    """Globs on files and on lines, and the reason.

    :raises ValueError: a rule of ``untaken.yaml`` has other keys.
    """
    return [_rule(given) for given in yaml.safe_load(RULES.read_text(encoding="utf-8"))]


def _rule(given: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[str], str]:
    if {*given} != {"file", "at", "reason"}:
        raise ValueError(f"{RULES.name}: a rule has a file, at and a reason: {given}")
    globs = [given[key] for key in ("file", "at")]
    files, places = ([glob] if isinstance(glob, str) else glob for glob in globs)
    return files, places, str(given["reason"])


def why(file: str, line: str) -> str:
    """Why a branch at ``line`` of ``file`` may be taken by nobody; empty: no rule says."""
    for files, places, reason in rules():
        named = any(fnmatchcase(file, glob) for glob in files)
        if named and any(fnmatchcase(line.strip(), glob) for glob in places):
            return reason
    return ""


def why_unreached(file: str, line: int) -> str:
    """Why no case need come to ``line`` of ``file``: a branch before or around it says.

    Empty: none does, so that a case is lacking.
    """
    return _reasons(file).get(line, "")


@functools.cache
def _reasons(file: str) -> Mapping[int, str]:
    source = (ROOT / file).read_text(encoding="utf-8")
    lines, reasons = source.splitlines(), dict[int, str]()

    def visit(node: ast.AST, reason: str) -> None:
        line = getattr(node, "lineno", None)
        if line is not None:
            reason = reason or why(file, lines[line - 1])
            reasons[line] = reasons.get(line) or reason
        for _, value in ast.iter_fields(node):
            within = reason
            if isinstance(value, list) and value and isinstance(value[-1], ast.Raise):
                within = reason or ("" if isinstance(node, _WHOLE) else GUARD)
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, within)
                if isinstance(child, ast.If) and isinstance(child.body[-1], _LEAVES):
                    within = within or why(file, lines[child.lineno - 1])

    visit(ast.parse(source), "")
    return reasons


#: Their bodies are no branches.
_WHOLE = (ast.Module, ast.ClassDef, ast.FunctionDef)
#: What ends a branch, so that the lines after it are the other one.
_LEAVES = (ast.Return, ast.Continue, ast.Break)


def share(files: Sequence[File]) -> float:
    """Of branches, those that were taken."""
    return sum(file.taken for file in files) / max(1, sum(file.branches for file in files))


def suffices(files: Sequence[File]) -> bool:
    """Whether enough branches were taken."""
    return share(files) >= LEAST


def page(files: Sequence[File]) -> str:
    """Tables of the files with missing branches and of reasons, and the whole in a sentence."""
    rows = []
    for file in files:
        if file.missing or file.executed < file.statements:
            missing = ", ".join(f"{a} to {b if b > 0 else 'the end'}" for a, b in file.missing)
            lines, branches = f"{file.executed}/{file.statements}", f"{file.taken}/{file.branches}"
            rows.append((file.name, lines, branches, missing))
    table = Table("", ("file", "lines", "branches", "not taken"), rows, align="lrrl")
    reasons = sum((Counter(file.explained) for file in files), Counter[str]())
    ordered = [(str(count), reason) for reason, count in reasons.most_common()]
    why_not = Table("", ("taken by nobody", "why"), ordered, align="rl")
    lines, executed = (sum(getattr(f, name) for f in files) for name in ("statements", "executed"))
    told = f"{executed:,} of {lines:,} lines, {share(files):.1%} of branches"
    return f"{table.markdown()}\n{why_not.markdown()}\n{told} (asked: {LEAST:.0%}).\n"

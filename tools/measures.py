"""Measures of the source: lines of code, long functions, comments, docstrings.

    python -m tools.measures          the table, and what is over its limit
    python -m tools.measures --all    also names long functions, and what has no docstring

A line of code is a line that is neither blank, nor a comment, nor part of a docstring.  The core is
``suite/`` without its wings.  ``tests/test_measures.py`` holds the limits.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from shardproof import wings

ROOT = Path(__file__).resolve().parents[1]
SUITE, TOOLS = ROOT / "suite", ROOT / "tools"
#: A function is long above this many lines, and has many parameters from this number on.
LONG, MANY = 60, 9
#: Rooms whose comments are counted: there they are needed most.
COMMENTED = ("costs", "launch", "checks")


@dataclass(frozen=True)
class Source:
    """Counts of one file: lines of code, comment lines, and its functions that are too large."""

    path: Path
    code: int
    comments: int
    long: list[str] = field(default_factory=list)
    many: list[str] = field(default_factory=list)
    #: Public classes and functions -> whether they have a docstring.
    public: dict[str, bool] = field(default_factory=dict)

    @property
    def room(self) -> str:
        """The folder of ``suite/`` or ``tools/`` that holds the file, or that root itself."""
        return self.path.relative_to(ROOT).parts[1].removesuffix(".py")


@cache
def of_file(path: Path) -> Source:
    """Counts of the file at ``path``."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    documented = {number for node in ast.walk(tree) for number in _docstring(node)}
    code = comments = 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("#"):
            comments += 1
        elif stripped and number not in documented:
            code += 1
    name = path.relative_to(ROOT)
    long, many = [], []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            given = node.args
            parameters = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
            if lines > LONG:
                long.append(f"{name}:{node.lineno} {node.name}: {lines} lines")
            if parameters >= MANY:
                many.append(f"{name}:{node.lineno} {node.name}: {parameters} parameters")
    public = {
        f"{name}:{node.lineno} {node.name}": ast.get_docstring(node) is not None
        for node in _public(tree)
    }
    return Source(path, code, comments, long, many, public)


def _public(parent: ast.Module | ast.ClassDef) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """Public classes and functions, without nested functions and setters of properties."""
    for node in parent.body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) or node.name.startswith("_"):
            continue
        if not any(
            isinstance(d, ast.Attribute) and d.attr == "setter" for d in node.decorator_list
        ):
            yield node
        if isinstance(node, ast.ClassDef):
            yield from _public(node)


def _docstring(node: ast.AST) -> Iterator[int]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
        text = node.body[0]
        yield from range(text.lineno, (text.end_lineno or text.lineno) + 1)


def sources(root: Path) -> list[Source]:
    """Counts of every Python file below ``root``; links to other folders are not followed."""
    files = (path for path in sorted(root.rglob("*.py")) if not _is_linked(path, root))
    return [of_file(path) for path in files]


def _is_linked(path: Path, root: Path) -> bool:
    return any(folder.is_symlink() for folder in path.parents if folder.is_relative_to(root))


def core() -> list[Source]:
    """Files of the suite without its wings."""
    return [one for one in sources(SUITE) if one.room not in wings.names()]


def lines(of: list[Source]) -> int:
    """Lines of code of all files together."""
    return sum(one.code for one in of)


def commented(rooms: tuple[str, ...] = COMMENTED) -> float:
    """The share of comment lines in ``rooms``, of lines of code and comments."""
    chosen = [one for one in sources(SUITE) if one.room in rooms]
    comments = sum(one.comments for one in chosen)
    return comments / (comments + lines(chosen))


def documented() -> float:
    """The share of public classes and functions of the suite that have a docstring."""
    public = [has_text for one in sources(SUITE) for has_text in one.public.values()]
    return sum(public) / len(public)


def main() -> None:
    """Print the measures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="name every function that is counted")
    options = parser.parse_args()
    every = sources(SUITE)
    for name in sorted({one.room for one in every}):
        room = [one for one in every if one.room == name]
        kind = "wing" if name in wings.names() else ""
        print(f"{name:<14}{len(room):>4} files{lines(room):>8,} lines of code  {kind}")
    print(f"core of suite/ {lines(core()):,}")
    print(f"suite/ and tools/ {lines(every) + lines(sources(TOOLS)):,}")
    print(f"comments in {', '.join(COMMENTED)}: {commented():.1%}")
    for title, found in (
        (f"functions over {LONG} lines in suite/", [text for one in every for text in one.long]),
        (f"functions with {MANY} parameters and more", [t for one in every for t in one.many]),
        (
            f"public docstrings of suite/: {documented():.1%}; without",
            [name for one in every for name, has_text in one.public.items() if not has_text],
        ),
    ):
        print(f"{title}: {len(found)}")
        if options.all:
            print("".join(f"  {text}\n" for text in found), end="")


if __name__ == "__main__":
    main()

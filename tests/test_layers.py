"""Imports point down, as the first page of docs/architecture.md lists them.

The list of rooms and the arrows that may never be drawn are read from that page, so that page and
code cannot differ.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from shardproof import wings

ROOT = Path(__file__).parents[1]
SUITE, IMPLS = ROOT / "suite", ROOT / "impls"
PAGE = (ROOT / "docs/architecture.md").read_text()

#: What an implementation may import of the suite.
FOR_IMPLEMENTATIONS = ("contract", "comm", "axes", "schedules", "by_path")
#: The room that may name implementations: it finds them.
LOADERS = {"registry"}
#: Strategies that combine others.
COMPOSERS = {"hybrid"}
#: What strategies share; none of these is a strategy.
SHARED = {"checkpoint", "collectives", "engine", "parts", "units"}
MOST_ROOMS, MOST_FILES_IN_ROOT, MOST_FILES = 30, 15, 20


def listed(intro: str) -> list[str]:
    """First words of the indented list after ``intro``."""
    found = re.search(rf"^{intro}[^#]*?\n((?:    \w+ [^\n]*\n)+)", PAGE, re.M)
    assert found, f"docs/architecture.md has no list after {intro!r}"
    return [line.split()[0] for line in found[1].splitlines()]


def rooms() -> list[str]:
    """Rooms of the core from the bottom up."""
    return listed("## Direction of imports\n")


def forbidden() -> set[tuple[str, str]]:
    """Arrows that would point down and still are not drawn."""
    sentence = re.search(r"^Never: (.*?)\.$", PAGE, re.M | re.S)
    assert sentence, "docs/architecture.md names no forbidden arrows"
    return {(a, b) for a, b in re.findall(r"`(\w+) -> (\w+)`", sentence[1])}


def room_of(module: str) -> str:
    """The room of ``shardproof.<module>``; modules in the root are words."""
    first = module.split(".")[0]
    if first == "impls" or (SUITE / first).is_dir():
        return first
    return "words"


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> Iterator[str]:
    """Modules of ``shardproof`` that ``path`` imports anywhere, without that first part."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (n.removeprefix("shardproof.") for n in names if n.startswith("shardproof."))


def arrows() -> dict[tuple[str, str], list[str]]:
    """(room, room) -> places that import.  The entry points in the root belong to no room."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in SUITE.rglob("*.py"):
        if path.parent == SUITE and path.name in ("__init__.py", "__main__.py"):
            continue
        own = room_of(".".join(path.relative_to(SUITE).with_suffix("").parts))
        for module in imported(path):
            if (target := room_of(module)) != own:
                found.setdefault((own, target), []).append(f"{path.relative_to(ROOT)}: {module}")
    return found


def test_every_import_points_down() -> None:
    order = rooms()
    drawn = arrows()
    print(f"{len(order)} rooms, {len(drawn)} arrows")
    folders = {path.parent.name for path in SUITE.glob("*/__init__.py")} - {"impls"}
    around = {*wings.names()}
    assert {*listed(r"A \*wing\* is a room")} == around, "the page lists each wing"
    assert {*order} - {"words"} == folders - around, "the page lists each room once"
    assert len(order) == len({*order})
    place = {name: number for number, name in enumerate(order)}
    never = forbidden()

    def is_wrong(own: str, target: str) -> bool:
        if target in around:
            return True
        if target == "impls":
            return own not in LOADERS
        if own in around:
            return False
        return place[target] > place[own] or (own, target) in never

    wrong = [
        f"{own} -> {target}: {use}"
        for (own, target), uses in drawn.items()
        if is_wrong(own, target)
        for use in uses
    ]
    assert not wrong, "\n".join(wrong)


def test_rooms_are_few_and_not_crowded() -> None:
    top = [
        path for path in (*SUITE.iterdir(), *IMPLS.iterdir()) if (path / "__init__.py").is_file()
    ]
    assert len([path for path in top if not path.is_symlink()]) <= MOST_ROOMS
    crowded = {
        str(folder.relative_to(ROOT)): count
        for base in (SUITE, IMPLS)
        for folder in (base, *(path for path in base.rglob("*") if path.is_dir()))
        if (count := len(list(folder.glob("*.py"))))
        > (MOST_FILES_IN_ROOT if folder == SUITE else MOST_FILES)
    }
    assert not crowded


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {
        ".".join(
            path.relative_to(base.parent if base == IMPLS else base).with_suffix("").parts
        ): path
        for base in (SUITE, IMPLS)
        for path in base.rglob("*.py")
    }
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}

    def uses(name: str) -> set[str]:
        return {
            known
            for module in imported_at_run_time(modules[name])
            for known in (module, module.rpartition(".")[0])[: 1 if module in modules else 2]
            if known in modules and known != name
        }

    graph = {name: uses(name) for name in modules}
    while leaves := [name for name, needs in graph.items() if not needs]:
        for leaf in leaves:
            del graph[leaf]
        graph = {name: needs - {*leaves} for name, needs in graph.items()}
    circle = {name for name in graph if any(name in needs for needs in graph.values())}
    assert not circle, f"modules in or between circles: {sorted(circle)}"


def imported_at_run_time(path: Path) -> Iterator[str]:
    """As :func:`imported`, without what only type checkers read."""
    typing_only = {
        id(inner)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(parsed(path)):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("shardproof.")
            and id(node) not in typing_only
        ):
            for alias in node.names:
                yield f"{node.module}.{alias.name}".removeprefix("shardproof.")


def test_implementations_import_the_contract_only() -> None:
    wrong = []
    for path in IMPLS.rglob("*.py"):
        # A planted fault also names the case that shows it.
        allowed = FOR_IMPLEMENTATIONS + (("case",) if "mutants" in path.parts else ())
        # One that is planted in the judge names what it spoils.
        allowed += ("cases", "checks", "evidence", "launch") if path.parent.name == "judge" else ()
        wrong += [
            f"{path.relative_to(ROOT)} imports {module}"
            for module in imported(path)
            if module.split(".")[0] not in (*allowed, "impls")
        ]
    assert not wrong, "\n".join(wrong)


def test_no_strategy_imports_another() -> None:
    reference = IMPLS / "reference"
    wrong = []
    for path in reference.rglob("*.py"):
        own = path.relative_to(reference).parts[0].removesuffix(".py")
        if own in SHARED | COMPOSERS | {"__init__"}:
            continue
        for module in imported(path):
            parts = module.split(".")
            is_strategy = parts[:2] == ["impls", "reference"] and len(parts) > 2
            if is_strategy and parts[2] not in SHARED | {own}:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_reference_strategies_stay_readable() -> None:
    """Under 250 lines of code; docstrings, comments and blank lines are not counted."""
    for path in (IMPLS / "reference").rglob("*.py"):
        skipped: set[int] = set()
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
                node
            ):
                doc = node.body[0]
                skipped |= set(range(doc.lineno, (doc.end_lineno or doc.lineno) + 1))
        lines = [
            text
            for number, text in enumerate(path.read_text().splitlines(), 1)
            if text.strip() and not text.strip().startswith("#") and number not in skipped
        ]
        assert len(lines) < 250, f"{path.relative_to(ROOT)} has {len(lines)} lines of code"


def test_test_files_have_names_of_their_own() -> None:
    """Or pytest takes one for the other, and collects neither."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]

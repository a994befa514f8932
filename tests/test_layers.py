"""Imports point down, as the first page of docs/architecture.md lists them.

The list of rooms and the arrows that may never be drawn are read from that page, so that page and
code cannot differ.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
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
#: Strategies that combine others; `context` sums its gradients as `ddp` does.
COMPOSERS = {"hybrid", "context"}
#: What strategies share; none of these is a strategy.
SHARED = {"checkpoint", "collectives", "engine", "parts", "units"}
MOST_ROOMS, MOST_FILES_IN_ROOT, MOST_FILES = 36, 15, 20
#: Strategy -> files of impls/reference that its import may load, packages included.
MOST_LOADED = {"naive_ddp": 15, "ddp": 20, "zero1": 30, "zero2": 30, "zero3": 30, "fsdp": 30}
#: Where a function of impls/reference may import: in what ``late`` decorates, and here.  All of
#: these are called when a system is set up, never in a step.
AT_SET_UP = {"recompute", "emulator"}


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


def imported(path: Path, at_run_time: bool = False) -> Iterator[str]:
    """Modules of ``shardproof`` that ``path`` imports anywhere, without that first part.

    ``at_run_time``: without what only type checkers read.
    """
    typing_only = {
        id(inner)
        for node in ast.walk(parsed(path))
        if at_run_time and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for part in node.body
        for inner in ast.walk(part)
    }
    for node in ast.walk(parsed(path)):
        if id(node) not in typing_only:
            yield from modules_named_by(node)


def modules_named_by(node: ast.AST) -> list[str]:
    """Modules of ``shardproof`` that ``node`` imports, without that first part."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return []
    return [n.removeprefix("shardproof.") for n in names if n.startswith("shardproof.")]


def arrows() -> dict[tuple[str, str], list[str]]:
    """(room, room) -> places that import.  The entry points in the root belong to no room."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in SUITE.rglob("*.py"):
        if path.parent == SUITE and path.name in ("__init__.py", "__main__.py"):
            continue
        own = room_of(".".join(path.relative_to(SUITE).with_suffix("").parts))
        # Hooks of wings name types of the rooms that call them, for type checkers only.
        for module in imported(path, at_run_time=path == SUITE / "wings.py"):
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
    """Imports inside functions count."""
    circle = in_circles({name: used_by(name, path) for name, path in sources().items()})
    assert not circle, f"modules in or between circles: {circle}"


@cache
def sources() -> dict[str, Path]:
    """Module -> file; but for the package itself, which hands out what lies above all rooms."""
    paths = {
        ".".join(
            path.relative_to(base.parent if base == IMPLS else base).with_suffix("").parts
        ): path
        for base in (SUITE, IMPLS)
        for path in base.rglob("*.py")
        if path != SUITE / "__init__.py"
    }
    return {name.removesuffix(".__init__"): path for name, path in paths.items()}


def used_by(name: str, path: Path) -> set[str]:
    """Modules that the module ``name`` imports when it runs."""
    known = sources()
    named = {
        module if module in known else module.rpartition(".")[0]
        for module in imported(path, at_run_time=True)
    }
    return (named & known.keys()) - {name}


def in_circles(graph: dict[str, set[str]]) -> list[str]:
    """Modules of ``graph`` that import each other, or lie between such."""
    while leaves := [name for name, needs in graph.items() if not needs]:
        graph = {name: needs - {*leaves} for name, needs in graph.items() if name not in leaves}
    return sorted(name for name in graph if any(name in needs for needs in graph.values()))


def test_an_import_inside_a_function_closes_a_circle(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("def f():\n    from shardproof import other\n")
    other.write_text("import shardproof.one\nif TYPE_CHECKING:\n    import shardproof.typed\n")
    graph = {path.stem: {*imported(path, at_run_time=True)} for path in (one, other)}
    assert graph == {"one": {"other"}, "other": {"one"}} and in_circles(graph) == ["one", "other"]


def test_a_strategy_loads_few_files_beside_its_own() -> None:
    """What it needs in every run; checkpoints, compression and algorithms come when asked for."""
    script = (
        "import importlib, json, sys\n"
        "own = 'shardproof.impls'\n"
        "for strategy in sys.argv[1:]:\n"
        "    for name in [name for name in sys.modules if name.startswith(own)]:\n"
        "        del sys.modules[name]\n"
        "    importlib.import_module(f'{own}.reference.{strategy}')\n"
        "    names = [n for n in sys.modules if n.startswith(f'{own}.reference')]\n"
        "    print(json.dumps([strategy, names]))\n"
    )
    command = [sys.executable, "-c", script, *MOST_LOADED]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    loaded = dict(json.loads(line) for line in told.splitlines())
    print({strategy: len(names) for strategy, names in loaded.items()})
    assert loaded.keys() == MOST_LOADED.keys()
    for strategy, most in MOST_LOADED.items():
        assert len(loaded[strategy]) <= most, (strategy, sorted(loaded[strategy]))


def test_reference_systems_import_at_set_up_not_in_a_step() -> None:
    for path in (IMPLS / "reference").rglob("*.py"):
        for function in ast.walk(parsed(path)):
            if isinstance(function, ast.FunctionDef) and function.name not in AT_SET_UP:
                late = any(ast.unparse(one) == "late" for one in function.decorator_list)
                inside = [
                    module for node in ast.walk(function) for module in modules_named_by(node)
                ]
                assert late or not inside, f"{path.relative_to(ROOT)}: {function.name}: {inside}"


def is_of_costs(path: Path) -> bool:
    """Whether the file holds cost models of an upstream system."""
    return "costs" in path.relative_to(ROOT).with_suffix("").parts[2:]


def test_implementations_import_the_contract_only() -> None:
    wrong = []
    for path in IMPLS.rglob("*.py"):
        # A planted fault also names the case that shows it.
        allowed = FOR_IMPLEMENTATIONS + (("case",) if "mutants" in path.parts else ())
        # One that is planted in the judge names what it spoils.
        allowed += ("cases", "checks", "evidence", "launch") if path.parent.name == "judge" else ()
        # Records and costs of upstream systems lie beside adapters, whose import loads neither.
        allowed += ("strategies",) if path.stem == "strategies" else ()
        allowed += ("costs",) if is_of_costs(path) else ()
        # A model that comes from a package is declared as a user's own, by the public name.
        allowed += ("OwnWorkload",) if path.stem == "tiny_moe" else ()
        wrong += [
            f"{path.relative_to(ROOT)} imports {module}"
            for module in imported(path)
            if module.split(".")[0] not in (*allowed, "impls")
            or ("costs" in module.split(".") and not is_of_costs(path))
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


#: Words that mean something else as well: an axis, a form of a call, a group of one rank, a role.
ALSO_WORDS = {"tensor", "single", "context", "expert"}


def test_strategies_are_named_in_one_place() -> None:
    """A name of a strategy, alone or as that of an implementation, is no literal elsewhere.

    Sentences and docstrings may name them.
    """
    from shardproof.strategies import in_tree

    name = re.compile(rf"(\w*/)?({'|'.join({*in_tree()} - ALSO_WORDS)})")
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}"
        for path in SUITE.rglob("*.py")
        if path != SUITE / "strategies.py" and SUITE / "costs" not in path.parents
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and name.fullmatch(node.value)
    ]
    assert not wrong, "ask the record in suite/strategies.py: " + "; ".join(wrong)


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


def test_backends_are_named_in_files_of_their_own() -> None:
    """Others ask for properties (``suite/backends/backend.py``); texts may name one."""
    from shardproof.backends import BACKENDS

    folder, wrong = SUITE / "backends", []
    for path in SUITE.rglob("*.py"):
        own = path.relative_to(folder).parts[0] if path.is_relative_to(folder) else ""
        wrong += [
            f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}"
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Constant)
            and node.value in BACKENDS.own
            and own.removesuffix(".py") != node.value
        ]
    assert not wrong, "\n".join(wrong)


def test_public_classes_have_names_of_their_own() -> None:
    """Wings apart, and modules of models, whose names records keep."""
    places: dict[str, list[str]] = {}
    for path in SUITE.rglob("*.py"):
        if path.relative_to(SUITE).parts[0] in {"impls", *wings.names()}:
            continue
        for node in parsed(path).body:
            is_public = isinstance(node, ast.ClassDef) and not node.name.startswith("_")
            if is_public and "nn.Module" not in map(ast.unparse, node.bases):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    several = {name: where for name, where in places.items() if len(where) > 1}
    assert not several, several


def test_wings_are_found_without_the_packages_of_the_command_line() -> None:
    """Ranks read scenario files, so they import every wing, in an image that has no typer."""
    program = (
        "import sys; sys.modules['typer'] = None\n"
        "from shardproof import wings; print(*wings.line_kinds())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

"""The registry: finds by file, entry point and path; says clearly what is wrong; imports late."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import python

from shardproof import by_path, registry
from shardproof.cases import kills, kinds
from shardproof.checks import CHECKS
from shardproof.contract import Implementation
from shardproof.errors import InputError

ROOT = Path(__file__).resolve().parents[2]

COMPLETE = """
from shardproof.impls.plain import Plain

class Mine(Plain):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable folder; what was imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(tmp_path)):
            del sys.modules[name]
    by_path.entry_points.cache_clear()


# ------------------------------------------------------------------------------------------ listing


def test_listing_imports_neither_torch_nor_implementations() -> None:
    code = (
        "import sys; from shardproof import registry\n"
        "assert registry.names() and registry.mutant_names()\n"
        "registry.check('reference/ddp'); registry.check('json:JSONDecoder')\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'impls')])"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_lists_implementations_and_nothing_else() -> None:
    names = registry.names()
    assert {"plain", "pytorch/ddp", "reference/ddp", "reference/naive_ddp"} <= set(names)
    assert names == sorted(names)
    for hidden in ("reference/engine", "mutants/ddp", "mutants/declare"):
        assert hidden not in names
    assert not [name for name in names if "parts" in name]


@pytest.mark.parametrize("name", registry.names())
def test_everything_listed_loads(name: str) -> None:
    assert issubclass(registry.load(name), Implementation)


def test_finds_files_folders_and_classes_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = folder / "impls"
    for path, text in {
        "family/alone.py": COMPLETE + "IMPLEMENTATION = Mine\n",
        "family/by_name.py": COMPLETE + "IMPLEMENTATION = 'Mine'\n",
        "family/whole/__init__.py": COMPLETE + "IMPLEMENTATION: type = Mine\n",
        "family/_private.py": COMPLETE + "IMPLEMENTATION = Mine\n",
        "family/helper.py": "# no IMPLEMENTATION here\n",
        "mutants/some.py": COMPLETE + "IMPLEMENTATION = Mine\n",
    }.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text)
    monkeypatch.setattr(registry, "_root", lambda: package)
    registry._folder.cache_clear()
    try:
        found = registry._folder()
    finally:
        monkeypatch.undo()
        registry._folder.cache_clear()
    assert dict(found) == {
        "family/alone": "shardproof.impls.family.alone",
        "family/by_name": "shardproof.impls.family.by_name",
        "family/whole": "shardproof.impls.family.whole",
    }


def test_entry_points_are_listed_and_loaded(folder: Path) -> None:
    (folder / "guest_ddp.py").write_text(COMPLETE)
    info = folder / "guest-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[shardproof.implementations]\nguest/mine = guest_ddp:Mine\nplain = guest_ddp:Mine\n"
    )
    by_path.entry_points.cache_clear()
    importlib.invalidate_caches()
    assert "guest/mine" in registry.names()
    assert registry.load("guest/mine").__name__ == "Mine"
    assert registry.load("plain").__name__ == "Plain", "a folder's name keeps its meaning"


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("reference/dpp", "did you mean reference/ddp?"),
        ("Reference/DDP", "did you mean reference/ddp?"),
        ("zzz", "implementations: deepspeed/moe, deepspeed/pipeline"),
        ("", "implementations:"),
        ("mutants/ddp_never_reduce", "did you mean mutants/ddp_never_reduces?"),
        ("module:1", "package.module:Class"),
        (":Class", "package.module:Class"),
        ("../x:y", "package.module:Class"),
    ],
)
def test_unknown_names_suggest_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(registry.UnknownImplementation) as caught:
        registry.load(name)
    assert hint in str(caught.value)
    assert isinstance(caught.value, InputError)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("1 / 0\n", ZeroDivisionError),
        ("import no_such_package_here\n", ModuleNotFoundError),
        ("def broken(:\n", SyntaxError),
        ("import sys; sys.exit(3)\n", SystemExit),
    ],
)
def test_a_module_that_raises_on_import(
    folder: Path, text: str, cause: type[BaseException]
) -> None:
    (folder / "raises.py").write_text(text)
    with pytest.raises(registry.BrokenImplementation) as caught:
        registry.load("raises:Mine")
    assert isinstance(caught.value.__cause__, cause)
    assert "'raises:Mine'" in str(caught.value) and cause.__name__ in str(caught.value)


def test_a_class_that_is_not_there(folder: Path) -> None:
    (folder / "there.py").write_text(COMPLETE)
    with pytest.raises(registry.BrokenImplementation, match="did you mean Mine"):
        registry.load("there:Mien")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Mine = 3\n", "not a subclass of Implementation"),
        ("class Mine:\n    pass\n", "not a subclass of Implementation"),
        (
            "from shardproof.contract import Implementation\nclass Mine(Implementation):\n"
            "    def step(self, batch, observe): ...\n",
            "capabilities, local_state, setup, strategy",
        ),
    ],
)
def test_what_is_no_implementation(folder: Path, text: str, words: str) -> None:
    (folder / "thing.py").write_text(text)
    with pytest.raises(registry.BrokenImplementation, match=words):
        registry.load("thing:Mine")


def test_modules_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_me.py").write_text(COMPLETE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    importlib.invalidate_caches()
    assert registry.load("beside_me:Mine").__name__ == "Mine"
    del sys.modules["beside_me"]


# ------------------------------------------------------------------------------------------ mutants


@pytest.mark.parametrize("name", registry.mutant_names())
def test_a_mutant_is_declared_in_full(name: str) -> None:
    mutant = registry.load_mutant(name)
    assert registry.load_mutant(name.removeprefix("mutants/")) is mutant
    assert registry.load(name) is mutant.implementation
    parent = registry.load(mutant.parent)
    assert issubclass(mutant.implementation, parent) and mutant.implementation is not parent
    assert mutant.killed_by and set(mutant.killed_by) <= {*CHECKS, *kills.VERDICT_KILLERS}
    assert mutant.summary and mutant.summary[-1] != "."
    kinds.of(mutant.workload).check(mutant.workload)
    parent.capabilities(mutant.options)


def test_mutants_are_told_apart() -> None:
    names = registry.mutant_names()
    assert len(set(names)) == len(names) >= 12
    assert not set(names) & set(registry.names())


@pytest.mark.parametrize("path", sorted((ROOT / "impls" / "mutants").rglob("*.py")), ids=str)
def test_a_mutant_changes_one_method_or_ten_lines(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.decorator_list and path.stem != "declare":
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
            docstring = node.body[0]
            lines = (node.end_lineno or 0) - (docstring.end_lineno or 0) - 1
            assert len(methods) <= 1 or lines <= 12, f"{node.name}: {lines} lines"

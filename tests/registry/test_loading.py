"""A user's own implementation is loaded before anything runs, in a process that it may ruin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, python

from shardproof.errors import SelectionError
from shardproof.registry import preflight

#: What stands in the module, the name that is asked for, and what is told.
MODULES = {
    "no_class": ("class Mine: ...", "Min", "has no 'Min' in no_class; did you mean Mine?"),
    "no_subclass": ("class Mine: ...", "Mine", "not a subclass of Implementation"),
    "raising": ("open('/no/such/file')", "Mine", "cannot be imported: FileNotFoundError"),
    "leaving": ("raise SystemExit('not today')", "Mine", "cannot be imported: SystemExit: not"),
    "ending": ("import os; print('bye', flush=True); os._exit(3)", "Mine", "(exit code 3): bye"),
    "numbered": (
        "from shardproof.impls.plain import Plain\nclass Mine(Plain): strategy = 5",
        "Mine",
        "has strategy = 5; expected the name of a strategy, such as strategy = 'zero1'",
    ),
    "killed": ("import os; os.kill(os.getpid(), 9)", "Mine", "ended its process (signal 9)"),
}


#: As on a busy machine: two seconds for 0.4 CPU seconds.
_SLOW = """
import time
while time.process_time() < 0.4 + START if "START" in globals() else True:
    START = globals().get("START", time.process_time())
    begun = time.process_time()
    while time.process_time() < begun + 0.02: ...
    time.sleep(0.08)
from shardproof.impls.plain import Plain
class Mine(Plain): ...
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, (text, *_) in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text + "\n")
    (tmp_path / "hanging.py").write_text("while True: ...\n")
    (tmp_path / "still.py").write_text("import threading\nthreading.Event().wait()\n")
    (tmp_path / "slow.py").write_text(_SLOW)
    (tmp_path / "right.py").write_text(
        "from shardproof.impls.plain import Plain\nclass Mine(Plain): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_every_fault_is_told_at_once_and_in_one_line(modules: Path) -> None:
    names = {module: f"{module}:{name}" for module, (_, name, _) in MODULES.items()}
    with pytest.raises(SelectionError) as refused:
        preflight.check(["reference/ddp", "right:Mine", *names.values()])
    told = {problem.what.split("'")[1]: str(problem) for problem in refused.value.problems}
    assert set(told) == set(names.values())
    for module, (_, _, says) in MODULES.items():
        line = told[names[module]]
        assert says in line and "\n" not in line and "nothing was run" in line, line


def test_an_import_that_hangs_is_ended(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "SECONDS", 0.5)
    with pytest.raises(SelectionError, match=r"'hanging:Mine' .* did not end within 0.5 s"):
        preflight.check(["hanging:Mine"])


def test_an_import_that_stands_still_is_ended_and_one_that_is_slow_is_not(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "SECONDS", 1.0)
    with pytest.raises(SelectionError, match=r"'still:Mine' .* of CPU time or of sleep"):
        preflight.check(["still:Mine", "slow:Mine"])
    assert preflight.check(["slow:Mine"])["slow:Mine"]


def test_the_suites_own_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "Pool", None)
    preflight.check(["reference/ddp", "plain", "mutants/ddp_never_reduces"])


@pytest.mark.parametrize(
    ("name", "says"), [("no_class:Min", "has no 'Min'"), ("json:loads", "not a")]
)
def test_run_ends_with_code_2_and_writes_nothing(
    command: Any, modules: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.chdir(modules)
    before = sorted(modules.iterdir())
    code, out, err = command("run", "ddp-gpt", "--impl", name)
    assert (code, out) == (2, ""), out
    assert says in err and len(err.splitlines()) == 1, err
    assert err.startswith(f"implementation '{name}'"), "no file names it"
    assert sorted(set(modules.iterdir()) - {modules / "__pycache__"}) == before


def test_a_scenario_names_the_line(command: Any, modules: Path) -> None:
    text = """\
name: own
about: a class that does not exist
sees: [nothing]
workload: {name: charnames_gpt}
matrix:
  implementation:
    - plain
    - no_class:Min
  backend: in_memory
  mesh: {replicate: 1}
  optimizer: sgd
checks: [equivalence]
"""
    (modules / "own.yaml").write_text(text)
    code, _, err = command("run", str(modules / "own.yaml"), "--tier", "full", "--dry-run")
    assert code == 2 and f"{modules / 'own.yaml'}:8: implementation 'no_class:Min'" in err, err
    (modules / "own.yaml").write_text(
        text.replace("    - no_class:Min\n", "").replace("sgd\n", "sgd\n  lane: dyadic\n")
    )
    code, _, err = command("check-scenario", str(modules / "own.yaml"))
    assert code == 2 and "own.yaml:11: workload charnames_gpt has no form for lane dyadic" in err
    assert "workloads that have one: dyadic_mlp" in err


def test_a_checkouts_folder_is_no_import_name() -> None:
    done = python("-c", "import suite", cwd=ROOT)
    assert done.returncode == 1 and "write `import shardproof`" in done.stderr


def test_no_module_is_loaded_twice() -> None:
    code = (
        "import importlib, os, pkgutil, sys, shardproof\n"
        "def failed(name): ...\n"
        "for module in pkgutil.walk_packages(shardproof.__path__, 'shardproof.', failed):\n"
        "    try:\n"
        "        importlib.import_module(module.name)\n"
        "    except ModuleNotFoundError as error:\n"
        "        assert error.name.partition('.')[0] == 'deepspeed', error\n"
        "files = {}\n"
        "for name, module in list(sys.modules.items()):\n"
        "    file = getattr(module, '__file__', None)\n"
        "    if file and name != '__main__':\n"
        "        files.setdefault(os.path.realpath(file), set()).add(id(module))\n"
        "twice = [file for file, modules in files.items() if len(modules) > 1]\n"
        f"own = ({str(ROOT / 'suite')!r}, {str(ROOT / 'impls')!r})\n"
        "assert not [file for file in twice if file.startswith(own)], twice\n"
        "assert sum(name.startswith('shardproof.') for name in sys.modules) > 250\n"
    )
    done = python("-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]

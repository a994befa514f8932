"""Import names of contract 1 keep working, with a warning; nothing is loaded twice or hidden."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from commands import python

from shardproof.registry import preflight
from shardproof.registry.old_names import NAMES

ROOT = Path(__file__).parents[2]
OWN_CLASS = """\
from suite.contract import Implementation
from shardproof.impls.plain import Plain
assert issubclass(Plain, Implementation)
class Mine(Plain): ...
"""


def run(code: str, *paths: Path, at: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """``code`` in a process of its own, in the folder ``at`` with ``paths`` first on its path."""
    head = f"import sys; sys.path[:0] = {[str(path) for path in paths]!r}\n"
    return python("-W", "always", "-c", head + code, cwd=at)


def test_an_old_name_is_the_same_module_with_a_warning() -> None:
    done = run(
        "import importlib\n"
        f"for old, new in {NAMES!r}.items():\n"
        "    one, other = importlib.import_module(old), importlib.import_module(new)\n"
        "    assert one is other and one.__spec__.name == new, (old, new)\n"
        "from suite import prove, contract\n"
        "import shardproof, shardproof.contract\n"
        "assert prove is shardproof.prove and contract is shardproof.contract\n"
    )
    assert done.returncode == 0, done.stderr
    for old, new in NAMES.items():
        assert f"DeprecationWarning: {old} is now {new}" in done.stderr
    assert "DeprecationWarning: suite.prove is now shardproof.prove" in done.stderr


@pytest.mark.parametrize("line", ["import suite.results", "from suite import results"])
def test_other_names_are_refused_with_the_remedy(line: str) -> None:
    done = run(line)
    assert done.returncode == 1 and "write `import shardproof`" in done.stderr


def test_old_programs_start() -> None:
    done = python("-m", "suite.worker", "--help")
    assert done.returncode == 0 and "--records" in done.stdout
    assert "suite.worker is now shardproof.cluster.torchrun" in done.stderr


def test_a_users_class_may_use_old_names_and_is_told_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "of_contract_1.py").write_text(OWN_CLASS)
    monkeypatch.syspath_prepend(tmp_path)
    preflight.check(["of_contract_1:Mine"])
    warning = capfd.readouterr().err
    assert "of_contract_1.py:1: suite.contract is now shardproof.contract" in warning
    assert "works until 1.0" in warning


def test_packages_of_the_user_hide_nothing_and_are_not_hidden(tmp_path: Path) -> None:
    for package in ("suite", "impls"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"MINE = {package!r}\n")
    (tmp_path / "suite" / "contract.py").write_text("MINE = 'contract'\n")
    done = run(
        "from shardproof import registry\n"
        "from shardproof.registry import old_names\n"
        "old_names.install()\n"
        "assert registry.load('plain').__module__ == 'shardproof.impls.plain'\n"
        "assert len(registry.names()) > 10\n"
        "import impls, suite.contract\n"
        "assert (impls.MINE, suite.MINE, suite.contract.MINE) == ('impls', 'suite', 'contract')\n"
        "try:\n"
        "    import suite.comm\n"
        "except ModuleNotFoundError as error:\n"
        "    assert 'shardproof' not in str(error)\n"
        "else:\n"
        "    raise AssertionError('answered for a foreign package')\n",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_no_module_is_loaded_twice() -> None:
    done = run(
        "import importlib, os, pkgutil, shardproof, suite\n"
        "import suite.contract, suite.worker\n"
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
    assert done.returncode == 0, done.stderr[-2000:]

"""A wheel in an empty folder is all that a user needs: it brings its scenarios."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages that holds this checkout's wheel and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # builds leave files behind
    source.mkdir()
    for name in ("suite", "impls", "scenarios", "shardproof"):
        copy(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("shardproof-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "packages")
    return folder / "packages"


def copy(place: Path, to: Path) -> None:
    """A folder with its links, or a link."""
    if place.is_symlink():
        to.symlink_to(place.readlink())
    else:
        shutil.copytree(place, to, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))


def run(packages: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(packages), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def test_the_wheel_finds_its_scenarios_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    listed = run(installed, tmp_path / "empty", "-m", "shardproof", "list", "scenarios")
    assert listed.returncode == 0, listed.stderr
    assert {"ddp-gpt", "zero-gpt", "hybrid"} <= {*listed.stdout.split()}
    planned = run(installed, tmp_path / "empty", "-m", "shardproof", "run", "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert "ddp-gpt::reference/" in planned.stdout


def test_the_wheel_has_one_top_level_package(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"shardproof"}
    assert (installed / "shardproof/py.typed").is_file()
    assert (installed / "shardproof/report/templates/report.html").is_file()


def test_own_packages_called_suite_and_impls_hide_nothing(installed: Path, tmp_path: Path) -> None:
    for name in ("suite", "impls"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        (tmp_path / "mine" / name / "__init__.py").write_text("OWN = True\n")
    code = (
        "import suite, impls; from shardproof import registry; assert suite.OWN and impls.OWN;"
        "registry.load('reference/zero2'); assert 'reference/zero2' in registry.names()"
    )
    done = run(installed, tmp_path / "mine", "-c", code)
    assert done.returncode == 0, done.stderr

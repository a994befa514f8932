"""A virtual environment of its own, in which a package of ``tests/plugins`` is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

from commands import in_turn

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "tests/plugins"


class PluginEnvironment:
    """An environment under ``folder`` that sees this interpreter's packages and this checkout.

    ``system_site_packages`` would show those of the base interpreter only, so a ``.pth`` file
    names the folder that holds torch.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.EnvBuilder(with_pip=False, symlinks=True).create(folder / "environment")
        self.python = folder / "environment/bin/python"
        (packages,) = folder.glob("environment/lib/python*/site-packages")
        (packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def install(self, name: str) -> None:
        """Install the package ``tests/plugins/<name>`` with pip, without any network."""
        source = self.folder / "source" / name  # a build leaves files behind
        shutil.copytree(PLUGINS / name, source, ignore=shutil.ignore_patterns("__pycache__"))
        options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
        done = self.run(
            "-m", "pip", "install", "--disable-pip-version-check", *options, str(source)
        )
        assert done.returncode == 0, done.stderr

    def shardproof(
        self, commands: Mapping[str, Sequence[str]]
    ) -> dict[str, subprocess.CompletedProcess[str]]:
        """What ``shardproof`` does there, in a folder of its own, by the names of the commands."""
        given = {"told": self.folder / "told.json", "cwd": self.folder}
        done = in_turn(*commands.values(), python=str(self.python), **given)
        return dict(zip(commands, done, strict=True))

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """What the environment's Python does."""
        variables = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "120",
        }
        return subprocess.run(
            [str(self.python), *words],
            cwd=self.folder,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )

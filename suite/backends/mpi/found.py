"""The MPI of this machine: which ``mpirun``, of which family, and the flags that it needs here."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FAMILIES = {"Open MPI": "Open MPI", "OpenRTE": "Open MPI", "PRRTE": "Open MPI"} | {
    "HYDRA": "MPICH",
    "Intel(R) MPI": "MPICH",
}
REMEDY = (
    "install MPI with pip install 'shardproof[mpi]', or your system's Open MPI or MPICH, and put "
    "its mpirun on PATH"
)
_VERSION_SECONDS = 20.0


@dataclass(frozen=True)
class MpiRuntime:
    """An ``mpirun``; ``version`` is the first line that it says about itself."""

    mpirun: str
    family: str
    version: str

    def command(self, ranks: int, nodes: Mapping[str, int] | None = None) -> list[str]:
        """The words before the program: as many ranks as asked, also as root and on few cores.

        ``nodes``: how many each node has, in order, where they are spread (Open MPI only).
        """
        if self.family == "MPICH":
            return [self.mpirun, "-n", str(ranks)]
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        flags = [*root, "--oversubscribe", "--bind-to", "none"]
        if nodes is not None:
            hosts = ",".join(f"{node}:{count}" for node, count in nodes.items())
            # Each daemon ends with what has started it.
            flags += ["--leave-session-attached", "--host", hosts]
        return [self.mpirun, *flags, "-n", str(ranks)]

    @property
    def stays_on_one_machine(self) -> str | None:
        """Why it does not spread ranks over nodes; ``None``: it does."""
        if self.family == "MPICH":
            return "MPICH starts no ranks on other nodes here: use Open MPI 5, or one node"
        return None

    def launched_by(self, program: str) -> dict[str, str]:
        """Settings: ``program NODE COMMAND`` starts a daemon on a node, for each from here."""
        return {"PRTE_MCA_plm_ssh_agent": program, "PRTE_MCA_plm_ssh_no_tree_spawn": "1"}

    def environment(self, folder: Path) -> dict[str, str]:
        """Settings: its files lie in ``folder``, and ranks that wait inside it yield the core."""
        if self.family == "MPICH":
            return {"TMPDIR": str(folder)}
        places = {f"OMPI_MCA_btl_{name}_backing_directory": str(folder) for name in ("sm", "vader")}
        return {"TMPDIR": str(folder), "OMPI_MCA_mpi_yield_when_idle": "1", **places}


@functools.cache
def find() -> MpiRuntime | None:
    """The MPI installed with this Python (as wheels bring it), or else the first on ``PATH``."""
    beside = str(Path(sys.prefix) / "bin")
    for name in ("mpirun", "mpiexec"):
        for places in (beside, None):
            path = shutil.which(name, path=places)
            if path is not None and (found := _ask(path)) is not None:
                return found
    return None


def _ask(mpirun: str) -> MpiRuntime | None:
    """The kind of this MPI; ``None``: an unknown one."""
    try:
        command = [mpirun, "--version"]
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=_VERSION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = said.stdout + said.stderr
    family = next((family for word, family in FAMILIES.items() if word in text), None)
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    wanted = next(
        (line for line in lines if line.startswith("Version:")), lines[0] if lines else ""
    )
    return MpiRuntime(mpirun, family, wanted) if family else None


def problem() -> str | None:
    """Why ranks cannot talk by MPI here; ``None``: they can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "MPI needs the package mpi4py, which is not installed: see docs/install-extras.md"
    return None if find() is not None else f"MPI needs mpirun, which is missing: {REMEDY}"

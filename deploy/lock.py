"""``make lock``: what the images install, with a hash of every file of each release.

Writes ``deploy/locks/``: ``rank.txt``, and what ``judge.txt`` and ``all.txt`` add to it.  Versions
are those of constraints.txt; hashes are what the index says (``PIP_INDEX_URL`` names another).
``torch.txt`` is not written: its hashes stand on the page of the index that has builds for CPUs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "deploy" / "locks"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
#: What a rank needs besides torch.
RANK = ("numpy", "pydantic", "PyYAML", "psutil")
#: Packages of other systems than Linux, and torch, which has a lock of its own.
_LEFT_OUT = re.compile(r"torch==|[^;]*; sys_platform == 'win32'")


def requirements() -> dict[str, list[str]]:
    """Lock -> what it must satisfy."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    everything = [name for name in project["dependencies"] if not name.startswith("torch")]
    more = [*extras["deepspeed"], *extras["mpi"]]
    return {"rank": [*RANK], "judge": [*RANK, *everything], "all": [*RANK, *everything, *more]}


def blocks(text: str) -> dict[str, str]:
    """Package -> its lines in a lock."""
    found = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    return {block.partition("==")[0]: block for block in found if "==" in block}


def solved(uv: Path, wanted: list[str]) -> dict[str, str]:
    """All that ``wanted`` needs, beside the torch that is locked."""
    torch = next(iter(blocks((LOCKS / "torch.txt").read_text()).values())).split()[0]
    wheels = ROOT / "wheels"
    place = ["--extra-index-url", TORCH_INDEX, "--index-strategy", "unsafe-best-match"]
    if any(wheels.glob("torch-*.whl")):
        place = ["--find-links", str(wheels)]
    if index := os.environ.get("PIP_INDEX_URL"):
        place += ["--default-index", index]
    command = [str(uv), "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"]
    command += ["--generate-hashes", "--no-header", "--no-annotate"]
    command += ["-c", str(ROOT / "constraints.txt"), *place, "-"]
    text = "\n".join([torch, *wanted])
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"uv ended with exit code {done.returncode}; deploy/locks is as it was")
    return {
        name: lines for name, lines in blocks(done.stdout).items() if not _LEFT_OUT.match(lines)
    }


def main() -> None:
    """Solve all, then write."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, "uv"]
        subprocess.run(pip, check=True)
        found = {lock: solved(Path(folder) / "bin" / "uv", w) for lock, w in requirements().items()}
    for lock in ("judge", "all"):
        before = found["rank"] if lock == "judge" else found["rank"] | found["judge"]
        found[lock] = {name: lines for name, lines in found[lock].items() if name not in before}
    for lock, packages in found.items():
        text = "# Written by `make lock`.\n" + "".join(packages.values())
        (LOCKS / f"{lock}.txt").write_text(text)
        print(f"deploy/locks/{lock}.txt: {len(packages)} packages")


if __name__ == "__main__":
    main()

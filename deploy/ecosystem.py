"""``make ecosystem``: systems that people use, each held to its known verdict.

    make ecosystem                        all that can be installed
    make ecosystem PICOTRON=path          picotron as well, from a checkout of it
    python deploy/ecosystem.py --picotron path -j 2

Each optional package is installed into an overlay of the environment that runs this file, so that
all share its torch.  Then ``shardproof run scenarios/ecosystem`` judges: a known failure is an
``xfail`` with the words that it must say, so any other verdict than the known one is red.  What
cannot be installed is a ``skip`` with the reason.  Exit codes are those of ``shardproof run``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import site
import subprocess
import sys
import tomllib
import venv
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OVERLAY = ROOT / ".venv-ecosystem"
PYTHON = OVERLAY / "bin" / "python"
#: Seconds in which one package must be installed.
PATIENCE = 180
#: Extras of pyproject.toml -> the module that comes with it.
EXTRAS = {
    "accelerate": "accelerate",
    "fabric": "lightning_fabric",
    "fairscale": "fairscale",
    "torchft": "torchft",
    "megatron": "megatron",
}


def make_overlay() -> Path:
    """The overlay's own site-packages; it also sees those of this Python.

    Made anew when pins, extras or this Python changed.
    """
    base = site.getsitepackages()
    packages = OVERLAY / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    parts = [*base, sys.version, importlib.metadata.version("torch")]
    parts += [(ROOT / name).read_text() for name in ("constraints.txt", "pyproject.toml")]
    state, stamp = hashlib.sha256("\n".join(parts).encode()).hexdigest(), OVERLAY / "made-of"
    if not stamp.exists() or stamp.read_text() != state:
        venv.create(OVERLAY, clear=True, with_pip=False)
        # addsitedir also reads the .pth files there, one of which may be shardproof's own.
        lines = "".join(f"import site; site.addsitedir({folder!r})\n" for folder in base)
        (packages / "beside.pth").write_text(lines)
        stamp.write_text(state)
    return packages


def install(extra: str, packages: Path) -> str:
    """Install what ``extra`` asks for; why that failed, or nothing."""
    if (packages / EXTRAS[extra]).is_dir():
        return ""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = OVERLAY / "pins.txt"
    torch = f"torch=={importlib.metadata.version('torch')}\n"
    pins.write_text((ROOT / "constraints.txt").read_text() + torch)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wanted = project["optional-dependencies"][extra]
    command = [*pip, "--retries", "1", "--constraint", str(pins), *wanted]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return f"not installed within {PATIENCE} s"
    if (packages / "torch").exists():
        raise SystemExit(f"{extra} brought a second torch into {packages}: correct its extra")
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return (lines or [f"pip ended with exit code {done.returncode}"])[-1] if done.returncode else ""


def link_picotron(checkout: str | None, packages: Path) -> str:
    """Make the package of a picotron ``checkout`` importable; why it is not, or nothing."""
    link = packages / "picotron.pth"
    link.unlink(missing_ok=True)
    if checkout is None:
        return "no checkout given: make ecosystem PICOTRON=path"
    folder = Path(checkout).expanduser().resolve()
    if not (folder / "picotron" / "pipeline_parallel").is_dir():
        what = f"--picotron {checkout}: no checkout of picotron"
        print(f"{what}; give the folder that holds its package 'picotron'", file=sys.stderr)
        raise SystemExit(2)
    link.write_text(f"{folder}\n")
    return ""


def versions(packages: Path) -> dict[str, str]:
    """Scenario -> version of the system that it judges, as far as one is installed."""
    found = {
        path.name.rpartition(".dist-info")[0].partition("-")[0]: distribution.version
        for path in packages.glob("*.dist-info")
        for distribution in [importlib.metadata.Distribution.at(path)]
    }
    own = {extra: found.get(module, "-") for extra, module in EXTRAS.items()}
    return own | {"compiled": f"torch {importlib.metadata.version('torch')}"}


def table(run: Path, known: dict[str, str]) -> list[str]:
    """One line for each system and expectation: what was expected of it, and what came out."""
    rows: dict[tuple[str, str, str], Counter[str]] = {}
    for line in (run / "cases.jsonl").read_text().splitlines():
        result = json.loads(line)
        case = result["case"]
        says = " ... ".join(case["xfail_says"])
        expected = f"fail: {says}" if case["xfail"] else "pass"
        system = case["implementation"] + (f"+{case['label']}" if case["label"] else "")
        key = system, known.get(case["scenario"], "-"), expected
        got = "fail, as expected" if result["verdict"] == "xfail" else result["verdict"]
        rows.setdefault(key, Counter())[got] += 1
    lines = ["| system | version | expected | cases |", "|---|---|---|---|"]
    for (system, version, expected), got in rows.items():
        cases = ", ".join(f"{count} {verdict}" for verdict, count in sorted(got.items()))
        lines.append(f"| {system} | {version} | {expected} | {cases} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, judge, print the table; the exit code of ``shardproof run``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--picotron", metavar="PATH", help="a checkout of picotron to judge")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--results", type=Path, help="run folder; default: a new one in results/")
    options = parser.parse_args(arguments)
    packages = make_overlay()
    lacking = {extra: install(extra, packages) for extra in EXTRAS}
    lacking["picotron"] = link_picotron(options.picotron, packages)
    run = options.results or Path("results") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-ecosystem"
    command = [str(PYTHON), "-m", "shardproof", "run", "scenarios/ecosystem", "--tier", "full"]
    command += ["-j", str(options.jobs), "--results", str(run)]
    # Ctrl-C reaches it as well, and it ends what it started.
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code in (0, 1, 3):
        print("\n".join(table(ROOT / run, versions(packages))))
        for extra, why in lacking.items():
            if why:
                print(f"skipped: {extra}: {why}")
    return code


if __name__ == "__main__":
    sys.exit(main())

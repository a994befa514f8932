"""``make ecosystem``: systems that people use, each held to its known verdict.

    make ecosystem                        all that can be installed
    make ecosystem PICOTRON=path          picotron as well, from a checkout of it
    python deploy/ecosystem.py --picotron path -j 2
    python deploy/ecosystem.py --picotron path --into results/README.md       the committed table

Each optional package is installed into an overlay of the environment that runs this file, so that
all share its torch.  Then ``shardproof run scenarios/ecosystem`` judges: a known failure is an
``xfail`` with the words that it must say, so any other verdict than the known one is red.  Then the
scripts of ``docs/findings`` that are about these systems run.  What cannot be installed is a
``skip``; the last line names it with the reason.  Exit codes are those of ``shardproof run``, 1
where a finding is no longer true, and 3 where no package at all could be installed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import math
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import time
import tomllib
import venv
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OVERLAY = ROOT / ".venv-ecosystem"
PYTHON = OVERLAY / "bin" / "python"
#: Seconds in which all packages together must be installed.
PATIENCE = 150
#: What stands around the table in a file that it is put into.
BEGIN, END = "<!-- ecosystem:begin -->", "<!-- ecosystem:end -->"
#: Exit code of ``shardproof run`` for what nobody has decided.
NOT_DECIDED = 3
#: Extras of pyproject.toml -> the module that comes with it.
EXTRAS = {
    "accelerate": "accelerate",
    "fabric": "lightning_fabric",
    "fairscale": "fairscale",
    "torchft": "torchft",
    "megatron": "megatron",
    "transformers": "transformers",
}
#: What is known of a system and cannot be judged here: its version, and why.
NOT_JUDGED = {
    "fairscale's `MOELayer`": ("0.4.13", "multiplies rows by a float32 mask: takes no float64"),
    "Megatron-core's MoE": ("0.16.1", "its token dispatchers create CUDA streams or tensors"),
    "torchtitan's experts": ("0.3.0", "need triton, and torch's `_grouped_mm`: no float64"),
    "torchtitan's context parallelism": ("0.3.0", "FlexAttention, or kernels of GPUs, only"),
}


def site_packages() -> Path:
    """The overlay's own."""
    return OVERLAY / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


def requirement(extra: str) -> str:
    """What ``extra`` of pyproject.toml asks for, a single distribution."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = project["optional-dependencies"][extra]
    return str(wanted)


def make_overlay() -> None:
    """An environment that also sees the packages of this one, made anew when its pins changed."""
    base = site.getsitepackages()
    parts = [*base, sys.version, importlib.metadata.version("torch")]
    parts += [(ROOT / name).read_text() for name in ("constraints.txt", "pyproject.toml")]
    state, stamp = hashlib.sha256("\n".join(parts).encode()).hexdigest(), OVERLAY / "made-of"
    if stamp.exists() and stamp.read_text() == state:
        return
    venv.create(OVERLAY, clear=True, with_pip=False)
    # addsitedir also reads the .pth files there, one of which may be shardproof's own.
    lines = "".join(f"import site; site.addsitedir({folder!r})\n" for folder in base)
    (site_packages() / "beside.pth").write_text(lines)
    stamp.write_text(state)


def install(extra: str, until: float) -> str:
    """Install what ``extra`` asks for before ``until``; why that failed, or nothing.

    :raises SystemExit: it brought a torch of its own.
    """
    if (site_packages() / EXTRAS[extra]).is_dir():
        return ""
    pins = OVERLAY / "pins.txt"
    torch = f"torch=={importlib.metadata.version('torch')}\n"
    pins.write_text((ROOT / "constraints.txt").read_text() + torch)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--retries", "1", "--constraint", str(pins), requirement(extra)]
    try:
        code, errors = run_or_kill(command, max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return f"not installed within the {PATIENCE} s that all have together"
    if (site_packages() / "torch").exists():
        raise SystemExit(f"{extra} brought a second torch into {OVERLAY.name}: correct its extra")
    lines = [line for line in errors.splitlines() if line.startswith("ERROR")]
    return (lines or [f"pip ended with exit code {code}"])[-1] if code else ""


def run_or_kill(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Exit code and errors of ``command``; what it started ends with it.

    :raises subprocess.TimeoutExpired: it took longer; the overlay is then made anew next time.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=seconds)
        return process.returncode, errors
    except BaseException:
        (OVERLAY / "made-of").unlink(missing_ok=True)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def folder_of(checkout: str) -> Path:
    """The folder that a user named."""
    return Path(checkout).expanduser().resolve()


def link_picotron(checkout: str | None) -> str:
    """Make the package of a picotron ``checkout`` importable; why it is not, or nothing."""
    link = site_packages() / "picotron.pth"
    link.unlink(missing_ok=True)
    if checkout is None:
        return "no checkout given: make ecosystem PICOTRON=path"
    folder = folder_of(checkout)
    if not (folder / "picotron" / "pipeline_parallel").is_dir():
        what = f"--picotron {checkout}: no checkout of picotron"
        print(f"{what}; give the folder that holds its package 'picotron'", file=sys.stderr)
        raise SystemExit(2)
    link.write_text(f"{folder}\n")
    return ""


def versions(checkout: str | None) -> dict[str, str]:
    """Scenario -> version of the system that it judges, as far as one is installed."""
    found = {"compiled": f"torch {importlib.metadata.version('torch')}"}
    places = [str(path) for path in (site_packages(), *site.getsitepackages())]
    known = {d.name.lower(): d.version for d in importlib.metadata.distributions(path=places)}
    for extra in EXTRAS:
        found[extra] = known.get(re.split(r"[<>=]", requirement(extra))[0], "-")
    if checkout is not None:
        found["picotron"] = "a checkout without history"
        folder = folder_of(checkout)
        if shutil.which("git") and (folder / ".git").exists():
            git = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
            done = subprocess.run(git, capture_output=True, text=True, check=False)
            found["picotron"] = done.stdout.strip() or found["picotron"]
    return found


def table(run: Path, known: dict[str, str]) -> list[str]:
    """One line for each system and expectation: what was expected of it, and what came out."""
    rows: dict[tuple[str, str, str], Counter[str]] = {}
    worlds: dict[tuple[str, str, str], set[int]] = {}
    for line in (run / "cases.jsonl").read_text().splitlines():
        result = json.loads(line)
        case = result["case"]
        says = " ... ".join(case["xfail_says"])
        expected = f"fail: {says}" if case["xfail"] else "pass"
        system = case["implementation"] + (f"+{case['label']}" if case["label"] else "")
        key = system, known.get(case["scenario"], "-"), expected
        got = "fail, as expected" if result["verdict"] == "xfail" else result["verdict"]
        rows.setdefault(key, Counter())[got] += 1
        worlds.setdefault(key, set()).add(math.prod(case["mesh"].values()))
    lines = ["| system | version | ranks | expected | cases |", "| --- | --- | --- | --- | --- |"]
    for key, found in sorted(rows.items()):
        system, version, expected = key
        ranks = ", ".join(map(str, sorted(worlds[key])))
        cases = ", ".join(f"{count} {verdict}" for verdict, count in sorted(found.items()))
        lines.append(f"| {system} | {version} | {ranks} | {expected} | {cases} |")
    return lines


def not_judged() -> list[str]:
    """The last lines of the table."""
    rows = sorted(NOT_JUDGED.items())
    return [f"| {system} | {version} | - | skip: {why} | - |" for system, (version, why) in rows]


def findings_hold(checkout: str | None) -> bool:
    """Whether every finding about these systems is still true, with what is installed of them."""
    names = " or ".join([*EXTRAS, "picotron"])
    command = [str(PYTHON), "-m", "pytest", "tests/docs/test_findings.py", "-k", names, "-rs"]
    environment = os.environ | ({"PICOTRON": str(folder_of(checkout))} if checkout else {})
    print(f"findings of docs/findings.md: {names}", flush=True)
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def closing_line(lacking: dict[str, str]) -> str:
    """What was skipped; ``lacking``: system -> why it could not be installed, empty where it is."""
    left_out = [f"{name} ({why})" for name, why in lacking.items() if why]
    systems = "system" if len(left_out) == 1 else "systems"
    line = f"{len(left_out)} {systems} could not be installed and "
    line += "was skipped" if len(left_out) == 1 else "were skipped"
    return line + (f": {', '.join(left_out)}" if left_out else "")


def ends_with(code: int, lacking: dict[str, str]) -> int:
    """The exit code of all, ``code`` being that of the run: 3, where it held and no extra is there,
    for it says nothing of the systems that people use.
    """
    return NOT_DECIDED if code == 0 and all(lacking[extra] for extra in EXTRAS) else code


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, judge, print the table; the exit code of ``shardproof run``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--picotron", metavar="PATH", help="a checkout of picotron to judge")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--into", type=Path, help=f"put the table into a file, after {BEGIN}")
    parser.add_argument("--results", type=Path, help="run folder; default: a new one in results/")
    options = parser.parse_args(arguments)
    into = require_markers(options.into) if options.into is not None else None
    make_overlay()
    until = time.monotonic() + PATIENCE
    lacking = {extra: install(extra, until) for extra in EXTRAS}
    lacking["picotron"] = link_picotron(options.picotron)
    own = ROOT / "results" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-ecosystem"
    run = (options.results or own).expanduser().absolute()
    command = [str(PYTHON), "-m", "shardproof", "run", "scenarios/ecosystem", "--tier", "full"]
    command += ["-j", str(options.jobs), "--results", str(run)]
    # Ctrl-C reaches it as well, and it ends what it started.
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    closing = closing_line(lacking)
    if code in (0, 1, 3):
        code = code if findings_hold(options.picotron) else 1
        lines = [*table(run, versions(options.picotron)), *not_judged()]
        print("\n".join(lines))
        if into is not None:
            put(into, run, lines, closing)
    print(closing)
    return ends_with(code, lacking)


def put(file: Path, run: Path, lines: Sequence[str], closing: str) -> None:
    """Put the table of ``run`` between the markers of ``file``, with what was skipped."""
    from shardproof.report.forms import insert
    from shardproof.runs.run_folder import read

    text = [*lines, "", f"{closing}.", "", read(run).provenance]
    insert("\n".join(text), file, BEGIN, END)
    print(f"{file}: table of run {run.name}")


def require_markers(file: Path) -> Path:
    """``file`` as an absolute path, before anything is installed or run.

    :raises SystemExit: it cannot be read, or has no place for the table.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        print(f"--into {file}: {error.strerror}; name a text file", file=sys.stderr)
        raise SystemExit(2) from None
    if not 0 <= text.find(BEGIN) < text.find(END):
        print(f"--into {file}: no lines {BEGIN} and {END}; put them there", file=sys.stderr)
        raise SystemExit(2)
    return file.absolute()


if __name__ == "__main__":
    sys.exit(main())

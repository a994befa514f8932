"""``make gpu``: every measurement on a machine with GPUs, in one command of at most 40 minutes.

    make gpu                              python3 must have torch with CUDA
    make gpu PYTHON=/opt/conda/bin/python
    python3 deploy/gpu.py --dry-run --gpus 8    print the commands for 8 GPUs, run nothing
    python3 deploy/gpu.py --parts gloo,bench    run only these parts
    make gpu-short                        at most 8 minutes, without downloads
    make gpu-short RUN=results/RUN        resume that run: only parts that did not finish

docs/gpu.md lists the parts and their results.  This file needs only Python; it starts commands of
shardproof.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shlex
import signal
import site
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv-gpu"
#: Minutes that all parts may take together, and those of ``make gpu-short``.
LIMIT, SHORT_LIMIT = 40.0, 8.0
#: Minutes after its budget in which a part may end running cases or comparisons.
GRACE, SHORT_GRACE = 1.0, 0.25
#: Ending of the file next to the run folder that keeps which parts were started and finished.
PROGRESS = ".parts.json"
#: Packages that only add figures.
OPTIONAL = {"nvidia-ml-py"}
#: Variables that ranks inherit.  torch must ask NVML for GPUs: a process that has asked CUDA cannot
#: fork ranks that use it.
ENVIRONMENT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "1"}
REMEDY = (
    "run it where `nvidia-smi` lists a GPU, with a PYTHON that has torch with CUDA: "
    "make gpu PYTHON=/path/to/python"
)
#: Pairs of scenarios/speed/peers.yaml that fit any number of ranks, and those with a mesh.
ANY_WORLD = "not (pipeline or tensor or sequence or hybrid or deepspeed)"
FIXED_WORLD = "(pipeline or tensor or sequence or hybrid) and not deepspeed"


class Unusable(Exception):
    """This machine or this Python cannot run it; the text gives the reason and the remedy."""


@dataclass(frozen=True)
class Part:
    """A command of shardproof; ``minutes`` is its budget, without :data:`GRACE`."""

    name: str
    what: str
    minutes: float
    command: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """The facts from torch and the driver."""

    gpus: tuple[str, ...]
    torch: str
    nccl: str
    driver: str

    def text(self) -> str:
        """One line per fact."""
        names = dict.fromkeys(self.gpus)
        gpus = ", ".join(f"{self.gpus.count(name)} x {name}" for name in names)
        return f"GPUs    {gpus}\ntorch   {self.torch}\nNCCL    {self.nccl}\ndriver  {self.driver}"


def baseline_name(gpus: Sequence[str]) -> str:
    """``["NVIDIA H100 80GB HBM3"]`` -> ``h100-x1``: the model of the first GPU and their number."""
    words = re.sub(r"[^a-z0-9]+", " ", gpus[0].lower()).split()
    kept = [w for w in words if w not in ("nvidia", "tesla", "geforce")]
    model = next((w for w in kept if re.search(r"\d", w)), kept[0] if kept else "gpu")
    return f"{model}-x{len(gpus)}"


def parts(gpus: int, run: Path, baseline: Path, jobs: int) -> list[Part]:
    """The parts for ``gpus`` GPUs, in order; they write into the folder ``run``."""
    judge = ("--tier", "full", "-j", str(jobs), "--results", str(run))
    world = max(n for n in (1, 2, 4, 8) if n <= gpus)
    time_it = ("bench", "peers", "--backend", "nccl", "--blocks", "6", "--results", str(run))
    of_nccl = ("run", "nccl", "nccl-sharded", "scenarios/gpu", "--backend", "nccl")
    # With one GPU there are fewer pairs and world sizes; from four on there are pairs with a mesh.
    nccl, gloo, pairs, meshes = (14.0, 7.0, 6.0, 4.0)

    def budget(minutes: float) -> tuple[str, ...]:
        return ("--budget", f"{minutes:g}")

    todo = [
        Part(
            "nccl",
            "NCCL over every strategy",
            nccl,
            (*of_nccl, *judge, *budget(nccl)),
        ),
        Part(
            "gloo",
            "gloo with CUDA tensors on shared GPUs",
            gloo,
            ("run", "scenarios/gpu", "--backend", "gloo_cuda", *judge, *budget(gloo)),
        ),
        Part(
            "bench",
            f"reference over upstream on {world} rank(s)",
            pairs,
            (*time_it, "--world", str(world), "-k", ANY_WORLD, *budget(pairs)),
        ),
    ]
    if gpus >= 4:
        todo.append(
            Part(
                "meshes",
                "reference over upstream with stages and split layers",
                meshes,
                (*time_it, "-k", FIXED_WORLD, *budget(meshes)),
            )
        )
    save = ("compare", str(run), "--save", str(baseline), "--force")
    todo.append(Part("baseline", "the baseline of this machine", 1.0, save))
    todo.append(Part("report", "the report", 1.0, ("report", str(run))))
    return todo


def short_parts(run: Path, baseline: Path, jobs: int) -> list[Part]:
    """The parts of ``make gpu-short``, in order; they write into the folder ``run``.

    The first judges the quick cases of CPU backends, whose ids the baselines of CPUs have, too:
    without them the columns of ``compare --by hardware`` have no case in common.
    """

    def judge(name: str, what: str, minutes: float, *words: str) -> Part:
        kept = ("--tier", "quick", "-j", str(jobs), "--results", str(run))
        return Part(name, what, minutes, ("run", *words, *kept, "--budget", f"{minutes:g}"))

    save = ("compare", str(run), "--save", str(baseline), "--force")
    return [
        judge("quick", "the quick cases of CPU backends, as in baselines of CPUs", 2.5),
        judge("moved", "the quick cases on gloo_cuda", 2.0, "--backend", "gloo_cuda"),
        judge("nccl", "the quick cases of one rank on NCCL", 1.0, *_ON_NCCL, "--world", "1"),
        Part("baseline", "the baseline of this machine", 0.5, save),
        Part("report", "the report", 0.5, ("report", str(run))),
    ]


_ON_NCCL = ("--backend", "nccl")


def resumed(part: Part, run: Path) -> Part:
    """``part`` for a run folder in which it was started and did not finish."""
    if part.command[0] != "run" or not (run / "run.json").is_file():
        return part
    budget = ("--budget", f"{part.minutes:g}")
    return replace(part, command=("run", "--resume", "--results", str(run), *budget))


def look() -> Machine:
    """The GPUs that this Python can use.

    :raises Unusable: no torch, or no GPU for it.
    """
    try:
        import torch
    except ImportError as error:
        raise Unusable(f"{sys.executable} has no torch ({error}): {REMEDY}") from None
    count = torch.cuda.device_count()
    if not count:
        raise Unusable(f"torch {torch.__version__} of {sys.executable} sees no GPU: {REMEDY}")
    gpus = tuple(torch.cuda.get_device_name(number) for number in range(count))
    with_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if with_nccl else "none in this torch"
    return Machine(gpus, torch.__version__, nccl, _driver())


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"
    return ", ".join(dict.fromkeys(done.stdout.split()))


def missing() -> list[str]:
    """Requirements of shardproof that this Python lacks; any version of torch will do."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lacking = []
    for requirement in project["dependencies"]:
        name = re.split(r"[<>=!~ ;\[]", requirement, maxsplit=1)[0]
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            lacking.append(requirement)
    return lacking


def python_for_all(downloads: bool = True) -> str:
    """A Python with all requirements: this one, or that of a venv over it, filled by pip.

    Without ``downloads`` pip takes only the files in ``wheels/``.

    :raises Unusable: a requirement is missing, and pip cannot install it.
    """
    lacking = missing()
    if not lacking:
        return sys.executable
    if not downloads:
        os.environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(ROOT / "wheels")}
    print(f"missing: {', '.join(lacking)}; installing into {VENV.name} ...", flush=True)
    python = VENV / "bin" / "python"
    make = [sys.executable, "-m", "venv", "--system-site-packages", str(VENV)]
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    why = _failure(make)
    if not why:
        # A venv sees the packages of its base Python, not those of the venv that creates it.
        own = VENV / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        (own / "machine.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
        why = _failure([*install, "--retries", "1", "--timeout", "15", *lacking])
    if not why:
        return str(python)
    needed = [r for r in lacking if re.split(r"[<>=]", r, maxsplit=1)[0] not in OPTIONAL]
    if not needed:
        print(f"not installed ({why}): no NVML figures", flush=True)
        return sys.executable
    raise Unusable(
        f"{sys.executable} lacks {', '.join(needed)}, and pip could not install it ({why}). "
        "Install it there; without a network, bring wheels: "
        "PIP_NO_INDEX=1 PIP_FIND_LINKS=/path/to/wheels make gpu"
    )


def _failure(command: Sequence[str]) -> str:
    """Run a command; its last line of output if it fails, else nothing."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return (lines[-1] if lines else f"exit code {done.returncode}") if done.returncode else ""


def run_part(part: Part, python: str, grace: float | None = None) -> int:
    """Run one part until it ends or its time is over (``grace`` minutes after its budget, default
    :data:`GRACE`); its exit code (124: stopped).
    """
    grace = GRACE if grace is None else grace
    process = subprocess.Popen(
        [python, "-m", "shardproof", *part.command],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        start_new_session=True,
    )
    try:
        return process.wait((part.minutes + grace) * 60)
    except subprocess.TimeoutExpired:
        # Like Ctrl-C: judged cases stay in the run folder.
        os.killpg(process.pid, signal.SIGINT)
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGINT)
        process.wait()
        raise
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return 124


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts; exit code 0, 1 (a part found a fault), 2 (it cannot run here)."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    parser.add_argument("--gpus", type=int, metavar="N", help="assume N GPUs (only with --dry-run)")
    parser.add_argument(
        "--short", action="store_true", help="at most 8 minutes, no downloads; --results resumes"
    )
    parser.add_argument(
        "--parts", default="", help="run only these, e.g. nccl,gloo,baseline,report"
    )
    parser.add_argument("--results", type=Path, help="run folder; default: a new one in results/")
    options = parser.parse_args(arguments)
    if options.gpus is not None and not (options.dry_run and options.gpus > 0):
        parser.error("--gpus N needs --dry-run, and N must be at least 1")
    try:
        if options.gpus is not None:
            machine = Machine(("GPU",) * options.gpus, "-", "-", "-")
        else:
            machine = look()
            print(machine.text(), flush=True)
        python = sys.executable if options.dry_run else python_for_all(not options.short)
    except Unusable as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return 2
    name = baseline_name(machine.gpus)
    run = options.results or Path("results") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{name}"
    baseline = Path("results/baselines") / f"{name}.json"
    # A case has up to 8 processes, which mostly wait for their GPUs.
    jobs = max(1, min(4, (os.cpu_count() or 4) // 4))
    if options.short:
        todo = short_parts(run, baseline, jobs)
    else:
        todo = parts(len(machine.gpus), run, baseline, jobs)
    chosen = [word for word in options.parts.split(",") if word]
    if unknown := set(chosen) - {part.name for part in todo}:
        parser.error(
            f"no part {sorted(unknown)[0]!r}; the parts are: {', '.join(p.name for p in todo)}"
        )
    todo = [part for part in todo if not chosen or part.name in chosen]
    if options.dry_run:
        for part in todo:
            print(shlex.join(["shardproof", *part.command]))
        return 0
    began = time.monotonic()
    worst = run_parts(todo, python, run, options.short)
    minutes = (time.monotonic() - began) / 60
    print(f"\n{minutes:.1f} min; evidence: {run}, baseline: {baseline}", flush=True)
    return worst


def run_parts(todo: Sequence[Part], python: str, run: Path, short: bool) -> int:
    """Run the parts one after the other; 1 if one found a fault or was stopped, else 0.

    A short run keeps its progress next to the run folder: parts that finished are not run again.
    """
    progress = run.with_name(run.name + PROGRESS)
    states: dict[str, str] = json.loads(progress.read_text()) if progress.is_file() else {}
    worst, began = 0, time.monotonic()
    for number, part in enumerate(todo, 1):
        judges = part.command[0] == "run"
        if short and judges and states.get(part.name) == "finished":
            print(f"\n[{number}/{len(todo)}] {part.what}: finished before", flush=True)
            continue
        if short and part.name in states:
            part = resumed(part, run)
        spent = (time.monotonic() - began) / 60
        if short and judges and spent + part.minutes > SHORT_LIMIT - 1:
            print(
                f"\n[{number}/{len(todo)}] {part.what}: no time left; resume with --results {run}"
            )
            continue
        command = shlex.join(["shardproof", *part.command])
        print(f"\n[{number}/{len(todo)}, {spent:.1f} min] {part.what}: {command}", flush=True)
        states[part.name] = "started"
        if short:
            _keep(states, progress)
        code = run_part(part, python, SHORT_GRACE if short else GRACE)
        # 3: nothing decided, e.g. all skipped; 124: stopped, its results stay, the rest goes on.
        worst = max(worst, 0 if code == 3 else 1 if code else 0)
        if code in (0, 1, 3):
            states[part.name] = "finished"
            if short:
                _keep(states, progress)
        if code not in (0, 3):
            print(
                f"{part.name} ended with exit code {code}; continuing with the next part",
                flush=True,
            )
    return worst


def _keep(states: dict[str, str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(states, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

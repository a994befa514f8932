"""Containers as nodes: build, start, wait, copy, remove.

``python3 -m shardproof.multinode.cluster run SCENARIO`` imports the standard library only, so
that it runs where nothing is installed but an engine (``docker`` with Compose v2 or docker-compose
1.29).  Everything it starts carries the label ``shardproof=<run>`` and is removed on every path,
after the results were copied to ``results/<run>/``; images stay.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "shardproof"
OWN_BASE = "shardproof-base"
LABEL = "shardproof"
#: What an image is made of; a change in any of it makes the images old.
SOURCES = (
    *("Dockerfile", ".dockerignore", "constraints.txt", "pyproject.toml"),
    *("suite", "impls", "scenarios", "deploy"),
)
#: How to list what a run started, and how to remove it.
LISTED = {
    ("docker", "ps", "--all"): ("docker", "rm", "--force", "--volumes"),
    ("docker", "network", "ls"): ("docker", "network", "rm"),
    ("docker", "volume", "ls"): ("docker", "volume", "rm"),
}
HELD, BROKEN, BAD_INPUT, NOT_DECIDED, INTERRUPTED = 0, 1, 2, 3, 130


class NoCluster(RuntimeError):
    """Containers cannot be had here; the message says why and what to do."""


def engine_missing() -> str | None:
    """Why no container can be started here (``None``: one can)."""
    if shutil.which("docker") is None:
        return "no container engine: install docker, then start its daemon"
    if not _quiet("docker", "info"):
        return "the container engine does not answer: start its daemon, or let this user reach it"
    if _compose() is None:
        return "no Compose: install docker-compose-plugin or docker-compose"
    return None


def _compose() -> list[str] | None:
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and _quiet(*command, "version"):
            return command
    return None


def _quiet(*command: str, timeout: float = 60.0) -> bool:
    try:
        return _run(*command, timeout=timeout).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _run(*command: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def _lines(*command: str) -> list[str]:
    return _run(*command).stdout.split()


# -------------------------------------------------------------------------------------- images


def source_digest(root: Path = ROOT) -> str:
    """Digest of everything that the images are made of."""
    digest = hashlib.sha256()
    for name in SOURCES:
        top = root / name
        files = sorted(top.rglob("*")) if top.is_dir() else [top]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(root)}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


def default_base(root: Path = ROOT) -> str:
    found = re.search(r"^ARG BASE_IMAGE=(\S+)", (root / "Dockerfile").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def base_image() -> str:
    """The image to build on: ``$BASE_IMAGE``, one that is here, one pulled, or one made.

    :raises NoCluster: none of it works; says what to install.
    """
    wanted = default_base()
    if given := os.environ.get("BASE_IMAGE"):
        return given
    for name in (OWN_BASE, wanted):
        if _quiet("docker", "image", "inspect", name):
            return name
    if _quiet("docker", "pull", "--quiet", wanted, timeout=600):
        return wanted
    if shutil.which("debootstrap") and os.geteuid() == 0:
        print(f"{wanted} cannot be pulled: making {OWN_BASE} by debootstrap ...", flush=True)
        made = subprocess.run([ROOT / "deploy" / "base-image.sh", OWN_BASE], check=False)
        if made.returncode == 0:
            return OWN_BASE
    raise NoCluster(
        f"no base image: {wanted} cannot be pulled; as root, `apt-get install debootstrap` and try "
        "again, or set BASE_IMAGE to an image with Python 3.11 and its venv module"
    )


def build(force: bool = False) -> None:
    """Build the images ``shardproof-rank`` and ``shardproof-judge`` if they are missing or old.

    :raises NoCluster: a build failed.
    """
    digest = source_digest()
    for target in ("rank", "judge"):
        name = f"{IMAGE}-{target}"
        form = '{{index .Config.Labels "shardproof.source"}}'
        if not force and digest in _lines("docker", "image", "inspect", "-f", form, name):
            continue
        arguments = [f"BASE_IMAGE={base_image()}"]
        for key in ("TORCH", "TORCH_INDEX", "PIP_INDEX_URL", "PIP_NO_INDEX"):
            if key in os.environ:
                arguments.append(f"{key}={os.environ[key]}")
        command = ["docker", "build", "--quiet", "--target", target, "--tag", name]
        command += [part for pair in arguments for part in ("--build-arg", pair)]
        command += ["--label", f"shardproof.source={digest}", str(ROOT)]
        print(f"building {name} on {arguments[0].removeprefix('BASE_IMAGE=')} ...", flush=True)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=3600, check=False)
        if done.returncode != 0:
            raise NoCluster(f"building {name} failed (exit code {done.returncode})")


# ----------------------------------------------------------------------------------------- run


@dataclass(frozen=True)
class Job:
    """What to run on how many nodes.  ``deadline_s`` is for the whole of it, start to verdict."""

    scenarios: tuple[str, ...] = ("ddp-gpt",)
    nodes: int = 2
    ranks_per_node: int = 2
    tier: str = "quick"
    expression: str = ""
    deadline_s: float = 600.0
    compare: bool = True

    def environment(self, run: str) -> dict[str, str]:
        """The variables that compose.yaml reads."""
        return {
            "RUN": run,
            "IMAGE": IMAGE,
            "NODES": str(self.nodes),
            "RANKS_PER_NODE": str(self.ranks_per_node),
            "SCENARIO": " ".join(self.scenarios),
            "TIER": self.tier,
            "EXPRESSION": self.expression,
            "DEADLINE": str(int(self.deadline_s * 0.4)),
            "COMPARE": "yes" if self.compare else "no",
        }


def run(job: Job, results: Path) -> int:
    """Run ``job`` in containers; its evidence ends up in ``results``, its exit code is returned.

    :raises NoCluster: no engine, no images, or the containers did not end in time.
    """
    missing = engine_missing()
    if missing:
        raise NoCluster(missing)
    build()
    results.mkdir(parents=True, exist_ok=True)  # before anything runs
    compose = _compose()
    assert compose is not None
    name = f"shardproof-{os.getpid()}-{int(time.time())}"
    command = [*compose, "--project-name", name, "--file", str(ROOT / "compose.yaml")]
    command += ["up", "--no-build", "--no-color", "--scale", f"node={job.nodes - 1}"]
    command += ["--exit-code-from", "head"]
    began = time.time()
    with _removed_afterwards(name, results):
        # A session of its own: Ctrl-C reaches this process only, which then ends things in order.
        client = subprocess.Popen(
            command,
            env={**os.environ, **job.environment(name)},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = client.wait(job.deadline_s)
        except subprocess.TimeoutExpired:
            raise NoCluster(f"the containers did not end within {job.deadline_s:g} s") from None
        finally:
            if client.poll() is None:
                os.killpg(client.pid, signal.SIGKILL)
                client.wait()
    _tell(results, name, job, began, code)
    if code not in (HELD, BROKEN, BAD_INPUT, NOT_DECIDED):
        print(f"the head ended with code {code}: a container was stopped from outside, or died")
        return BROKEN
    return code


def _tell(results: Path, name: str, job: Job, began: float, code: int) -> None:
    plan = results / "cluster" / "plan.json"
    first = json.loads(plan.read_text())["began"] - began if plan.exists() else None
    images = {
        target: "".join(_lines("docker", "image", "inspect", "-f", "{{.Id}}", f"{IMAGE}-{target}"))
        for target in ("rank", "judge")
    }
    facts = {
        "run": name,
        "nodes": job.nodes,
        "ranks_per_node": job.ranks_per_node,
        "seconds_to_first_case": first,
        "seconds": time.time() - began,
        "exit_code": code,
        "images": images,
    }
    (results / "cluster.json").write_text(json.dumps(facts, indent=1) + "\n")
    if first is not None:
        print(f"start to first case {first:.1f} s, in all {facts['seconds']:.1f} s")
    print(f"evidence: {results}")


@contextlib.contextmanager
def _removed_afterwards(name: str, results: Path) -> Iterator[None]:
    """Copy the results of run ``name``, then remove what it started, however the block ends."""
    previous = {
        number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    previous[signal.SIGINT] = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        # A second Ctrl-C must not stop the removal; it takes seconds.
        for number in previous:
            signal.signal(number, signal.SIG_IGN)
        try:
            _copy(name, results)
        finally:
            remove(name)
            for number, handler in previous.items():
                signal.signal(number, handler)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _copy(name: str, results: Path) -> None:
    filters = ["--filter", f"label={LABEL}={name}", "--filter", "label=shardproof.role=head"]
    for container in _lines("docker", "ps", "--all", "--quiet", *filters):
        done = _run("docker", "cp", f"{container}:/results/.", str(results), timeout=300)
        if done.returncode != 0:
            print(f"results could not be copied: {done.stderr.strip()}", file=sys.stderr)


def remove(name: str) -> list[str]:
    """Remove containers, networks and volumes of run ``name``; what is left, normally nothing."""
    label = f"label={LABEL}={name}"
    for _ in range(3):
        for listing, removal in LISTED.items():
            if found := _lines(*listing, "--quiet", "--filter", label):
                _run(*removal, *found, timeout=120)
        if not (left := leftovers(name)):
            return []
        time.sleep(1.0)
    return left


def clean(everything: bool = False) -> bool:
    """Remove what runs left behind; those that go on only with ``everything``.  Whether it went."""
    form = f'{{{{.Label "{LABEL}"}}}}'
    query = ("--filter", f"label={LABEL}", "--format", form)
    gone = True
    for name in sorted({name for listing in LISTED for name in _lines(*listing, *query)}):
        if not everything and _goes_on(name):
            print(f"left: {name}, which goes on; `cluster clean --all` ends it, too")
        else:
            gone = not remove(name) and gone
    return gone


def _goes_on(name: str) -> bool:
    """Whether the process that started run ``name`` is there, and no other has its number now."""
    named = re.fullmatch(r"shardproof-(\d+)-\d+", name)
    if named is None:
        return False
    try:
        os.kill(int(named[1]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # another user's
    command = Path(f"/proc/{named[1]}/cmdline")
    return not command.exists() or b"cluster" in command.read_bytes()


def leftovers(name: str | None = None) -> list[str]:
    """Containers, networks and volumes that carry the label."""
    label = f"label={LABEL}" if name is None else f"label={LABEL}={name}"
    query = ("--quiet", "--filter", label)
    return [thing for listing in LISTED for thing in _lines(*listing, *query)]


# ------------------------------------------------------------------------------------- command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardproof cluster", description="Containers of this machine as nodes."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="run scenarios on containers and judge them")
    runs.add_argument("scenario", nargs="*", default=["ddp-gpt"])
    runs.add_argument("--nodes", type=int, default=2)
    runs.add_argument("--ranks-per-node", type=int, default=2)
    runs.add_argument("--tier", choices=("quick", "full"), default="quick")
    runs.add_argument("-k", dest="expression", default="", metavar="EXPR")
    runs.add_argument("--results", type=Path, metavar="RUN_FOLDER")
    runs.add_argument("--deadline", type=float, default=600.0, metavar="SECONDS")
    runs.add_argument("--no-compare", action="store_true", help="skip the same cases run locally")
    builds = commands.add_parser("build", help="build the images if they are missing or old")
    builds.add_argument("--force", action="store_true")
    cleans = commands.add_parser("clean", help="remove what a killed run left behind")
    cleans.add_argument("--all", action="store_true", help="also end runs that go on")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.command == "build":
            build(options.force)
            return HELD
        if options.command == "clean":
            return HELD if clean(options.all) else NOT_DECIDED
        if options.nodes < 1 or options.ranks_per_node < 1 or options.deadline <= 0:
            print("--nodes, --ranks-per-node and --deadline must be positive", file=sys.stderr)
            return BAD_INPUT
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        job = Job(
            tuple(options.scenario or ["ddp-gpt"]),
            options.nodes,
            options.ranks_per_node,
            options.tier,
            options.expression,
            options.deadline,
            not options.no_compare,
        )
        return run(job, options.results or Path("results") / f"{stamp}-cluster")
    except NoCluster as error:
        print(f"precondition: {error}", file=sys.stderr)
        return NOT_DECIDED
    except OSError as error:
        print(f"{error.filename}: {error.strerror} - name another --results", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())

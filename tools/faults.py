"""Plant the faults that the changes since the last complete planting can affect.

    python -m tools.faults -j 2          faults that these changes touch, and one of each kind
    python -m tools.faults --all -j 2    every fault; if all die, writes the stamp (make mutants)
    python -m tools.faults --list        print the names, plant nothing

The stamp, ``results/faults.json``, holds the commit and the date of the last complete planting.
All faults are planted again when it is missing, unknown to git, or older than a week at HEAD.

A fault is affected by a change of a file that its class loads (its own file, its parent and what
that imports, by their import statements) and of a check that must catch it.  A change elsewhere in
the suite can affect any of them: one fault of each kind, a pair of check and class of fault, is
planted, and HEAD decides which, so that each change takes other ones.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from shardproof import registry
from shardproof.cases.kills import kinds
from shardproof.launch.process_control import cores

ROOT = Path(__file__).resolve().parents[1]
STAMP = ROOT / "results" / "faults.json"
OLDEST = timedelta(days=7)
CHECKS = "suite/checks/"


@dataclass(frozen=True)
class Choice:
    """Names of the faults to plant, and the reason as one sentence."""

    names: Sequence[str]
    reason: str


def choose(faults: Mapping[str, Any], changed: Iterable[str] | None, salt: str) -> Choice:
    """Choose among ``faults`` (name -> declaration) after ``changed`` files.

    ``changed`` holds paths relative to the root; ``None``: not known, so all are planted.
    ``salt`` decides which fault of a kind is planted.
    """
    if changed is None:
        return Choice([*faults], "all: no complete planting within a week is on record")
    files = {path for path in changed if path.endswith((".py", ".yaml"))}
    loaded = {path for path in files if path.startswith("impls/")}
    checks = {_check_of(path) for path in files if path.startswith(CHECKS)}
    touched = {
        name
        for name, fault in faults.items()
        if loaded & files_of(fault) or checks & {*fault.killed_by}
    }
    chosen = [*touched]
    if any(path.startswith(("suite/", "scenarios/")) for path in files):
        chosen += _one_of_each_kind(faults, touched, salt)
    reason = f"{len(touched)} touched by changes, {len(chosen) - len(touched)} as one of their kind"
    return Choice([name for name in faults if name in {*chosen}], reason)


def _one_of_each_kind(faults: Mapping[str, Any], taken: set[str], salt: str) -> list[str]:
    def place(name: str) -> str:
        return hashlib.sha256(f"{salt} {name}".encode()).hexdigest()

    seen, chosen = {kind for name in taken for kind in kinds(faults[name])}, []
    for name in sorted(faults.keys() - taken, key=place):
        if new := {*kinds(faults[name])} - seen:
            seen |= new
            chosen.append(name)
    return chosen


def _check_of(path: str) -> str:
    return path.removeprefix(CHECKS).split("/")[0].removesuffix(".py")


def files_of(fault: Any) -> set[str]:
    """Files of ``impls/`` that the class of ``fault`` loads, relative to the root."""
    modules = {cls.__module__ for cls in fault.implementation.__mro__}
    return {file for module in modules for file in _closure(module)}


@cache
def _closure(module: str) -> frozenset[str]:
    """Files of ``impls/`` that importing ``module`` loads, wherever the import statements are."""
    found: set[str] = set()
    todo = [module]
    while todo:
        path = _file(todo.pop())
        if path is None or (name := str(path.relative_to(ROOT))) in found:
            continue
        found.add(name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                todo += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return frozenset(found)


def _file(module: str) -> Path | None:
    if not module.startswith("shardproof.impls."):
        return None
    base = ROOT.joinpath("impls", *module.split(".")[2:])
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


def changed_files() -> list[str] | None:
    """Files that differ between the stamp's commit and HEAD; ``None`` if all faults must be
    planted.
    """
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
        planted, now = datetime.fromisoformat(stamp["date"]), _head_date()
        if now - planted > OLDEST:
            return None
        return _git("diff", "--name-only", stamp["commit"], "HEAD").splitlines()
    except (OSError, KeyError, ValueError, subprocess.CalledProcessError):
        return None


def _head_date() -> datetime:
    return datetime.fromisoformat(_git("log", "-1", "--format=%cI"))


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def write_stamp() -> None:
    """Record that every fault was killed at HEAD."""
    stamp = {"commit": _git("rev-parse", "HEAD"), "date": _head_date().isoformat()}
    STAMP.write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant the affected faults; return the exit code of ``shardproof mutants``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="plant every fault, write the stamp")
    parser.add_argument("--list", action="store_true", help="print names, plant nothing")
    parser.add_argument("-j", "--jobs", type=int, default=cores(), help="cases at once")
    options = parser.parse_args(arguments)
    faults = {name: registry.load_mutant(name) for name in registry.mutant_names()}
    due = choose(faults, None if options.all else changed_files(), _git("rev-parse", "HEAD"))
    names = [name.removeprefix(registry.MUTANTS) for name in due.names]
    print(f"planting {len(names)} of {len(faults)} faults: {due.reason}", flush=True)
    if options.list or not names:
        print("\n".join(names))
        return 0
    command = [sys.executable, "-m", "shardproof", "mutants", "-j", str(options.jobs)]
    if len(names) < len(faults):
        command += [word for name in names for word in ("--impl", name)]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code == 0 and len(names) == len(faults):
        write_stamp()
    return code


if __name__ == "__main__":
    sys.exit(main())

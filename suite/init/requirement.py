"""The requirement from which CI installs the suite: the source of this installation."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardproof import VERSION

#: Form of a requirement that any machine can install, for messages.
FORM = "shardproof @ git+https://HOST/REPOSITORY@COMMIT"
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Requirement:
    """A requirement for pip, and what a reader must know of it (``""``: nothing)."""

    text: str
    warning: str = ""


def default() -> Requirement:
    """The requirement that gives CI the code of this installation.

    Only an installation from an index may be named by its version: no index may have the version of
    a checkout (PEP 610: the file ``direct_url.json`` is missing exactly after an index).
    """
    try:
        found = importlib.metadata.distribution("shardproof").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return of_checkout(_ROOT)
    return Requirement(f"shardproof=={VERSION}") if found is None else of_url(json.loads(found))


def of_url(direct: dict[str, Any]) -> Requirement:
    """The requirement for an installation from ``direct``, the content of ``direct_url.json``."""
    url = str(direct["url"])
    if version := direct.get("vcs_info"):
        return _pinned(f"{version['vcs']}+{_without_secrets(url)}", str(version["commit_id"]))
    if url.startswith("file://"):
        return of_checkout(Path(url.removeprefix("file://")))
    return Requirement(f"shardproof @ {_without_secrets(url)}")


def of_checkout(folder: Path) -> Requirement:
    """The requirement for the commit of the checkout ``folder``, or for the folder itself."""
    commit = _git(folder, "rev-parse", "HEAD")
    remote = _git(folder, "remote", "get-url", "origin")
    # git's short form of ssh://, which pip does not know.
    if short := re.fullmatch(r"([\w.-]+@[\w.-]+):(?!//)(.+)", remote):
        remote = f"ssh://{short[1]}/{short[2]}"
    if commit and re.match(r"(https|ssh)://", remote):
        found = _pinned(f"git+{_without_secrets(remote)}", commit)
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
        warning = "; uncommitted changes of this checkout are not in it" if changed else ""
        return Requirement(found.text, found.warning + warning)
    return Requirement(
        f"shardproof @ {folder.as_uri()}",
        f"the workflow installs Shardproof from {folder}, which only this machine has: this "
        f"checkout has no remote. Run again with --force --install '{FORM}'",
    )


def _pinned(url: str, commit: str) -> Requirement:
    return Requirement(
        f"shardproof @ {url}@{commit}",
        f"the workflow pins commit {commit[:12]} of {url.partition('+')[2]}: this installation is "
        "not from a package index. --install names another source",
    )


def _without_secrets(url: str) -> str:
    """``url`` without a password or token; the user of ssh stays."""
    return re.sub(r"^(https?://)[^/@]*@", r"\1", re.sub(r"(//[^/@:]+):[^/@]*@", r"\1@", url))


def _git(folder: Path, *words: str) -> str:
    """The output of git in ``folder``; ``""``: it is no checkout, or git fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

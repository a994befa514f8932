"""The requirement from which CI installs the suite: the source of this installation."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

from shardproof import VERSION
from shardproof.runs.machine import output

#: Form of a requirement that any machine can install, for messages.
FORM = "shardproof @ git+https://HOST/REPOSITORY@COMMIT"
_ROOT = Path(__file__).resolve().parents[2]


def default() -> tuple[str, str]:
    """A requirement for pip that gives the code of this installation, and a note (or ``""``).

    Only an installation from an index may be named by its version: no index may have the version of
    a checkout (PEP 610: the file ``direct_url.json`` is missing exactly after an index, and in the
    metadata that setuptools leaves in a checkout).
    """
    if (_ROOT / "suite").is_dir():  # a checkout: an installed package has another name
        return of_checkout(_ROOT)
    try:
        found = importlib.metadata.distribution("shardproof").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return of_checkout(_ROOT)
    return (f"shardproof=={VERSION}", "") if found is None else of_url(json.loads(found))


def of_url(direct: dict[str, Any]) -> tuple[str, str]:
    """The same for an installation from ``direct``, the content of ``direct_url.json``."""
    url = str(direct["url"])
    if url.startswith("file://"):
        return of_checkout(Path(url.removeprefix("file://")))
    if version := direct.get("vcs_info"):
        return _pinned(url, str(version["commit_id"]))
    return f"shardproof @ {url}", ""


def of_checkout(folder: Path) -> tuple[str, str]:
    """The same for the commit of the checkout ``folder``, or for the folder itself."""
    commit = output("git", "-C", str(folder), "rev-parse", "HEAD")
    remote = output("git", "-C", str(folder), "remote", "get-url", "origin") or ""
    # git's short form of ssh://, which pip does not know.
    remote = re.sub(r"^([\w.-]+@[\w.-]+):(?!//)", r"ssh://\1/", remote)
    if commit and re.match(r"(https|ssh)://", remote):
        return _pinned(remote, commit)
    return (
        f"shardproof @ {folder.as_uri()}",
        f"the workflow installs Shardproof from {folder}, which only this machine has: this "
        f"checkout has no remote. Run again with --force --install '{FORM}'",
    )


def _pinned(url: str, commit: str) -> tuple[str, str]:
    """A commit of the repository ``url``, without a password or token in it."""
    url = re.sub(r"^(https?://)[^/@]*@|(//[^/@:]+):[^/@]*(?=@)", r"\1\2", url)
    return (
        f"shardproof @ git+{url}@{commit}",
        f"the workflow pins commit {commit[:12]} of {url}: this installation is not from a package "
        "index. --install names another source",
    )

"""The container engine of this machine: how it is reached, and the images that nodes are made of.

By the docker SDK for Python (extra ``cluster``).  ``shardproof-rank`` holds what a rank needs,
``shardproof-judge`` everything (``Dockerfile``).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("rank", "judge")
OWN_BASE = "shardproof-base"
#: Files that images are made of.
SOURCES = (
    *("Dockerfile", ".dockerignore", "constraints.txt", "pyproject.toml", "README.md", "LICENSE"),
    *("suite", "impls", "scenarios", "deploy"),
)
#: Variables that the build takes over.  Those of an index name a place, no content.
ARGUMENTS = ("TORCH", "TORCH_INDEX", "PIP_INDEX_URL", "PIP_NO_INDEX")
_PLACES = ("TORCH_INDEX", "PIP_INDEX_URL", "PIP_NO_INDEX")
#: The label of what an image was made of.
SOURCE = "shardproof.source"
_TAIL = 20


class NoCluster(RuntimeError):
    """Containers cannot be had here; the message says why and what to do."""


def client() -> Any:
    """A client of the engine.

    :raises NoCluster: there is none, or no package to talk to it.
    """
    try:
        import docker
    except ImportError:
        raise NoCluster(
            "the package docker is missing: `pip install shardproof[cluster]`"
        ) from None
    try:
        found = docker.from_env(timeout=120)
        found.ping()
    except docker.errors.DockerException as error:
        what = (
            "no container engine answers: install docker, start its daemon, let this user reach it"
        )
        raise NoCluster(f"{what} ({error})") from None
    return found


def engine_missing() -> str | None:
    """Why no container can be started here (``None``: one can)."""
    try:
        client().close()
    except NoCluster as error:
        return str(error)
    return None


def image_name(target: str) -> str:
    """The image of a target of the Dockerfile."""
    return f"shardproof-{target}"


def default_base(root: Path = ROOT) -> str:
    """The image that the Dockerfile builds on unless told otherwise."""
    found = re.search(r"^ARG BASE_IMAGE=(\S+)", (root / "Dockerfile").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def source_digest(arguments: dict[str, str], root: Path = ROOT) -> str:
    """Digest of all that the images are made of: files, and arguments of the build."""
    digest = hashlib.sha256()
    for name in SOURCES:
        top = root / name
        files = sorted(top.rglob("*")) if top.is_dir() else [top]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(root)}\0".encode())
                digest.update(file.read_bytes())
    for name, value in sorted(arguments.items()):
        digest.update(f"{name}={value}\0".encode() if name not in _PLACES else b"")
    return digest.hexdigest()[:32]


def build(engine: Any, force: bool = False) -> dict[str, str]:
    """Build the images that are missing or old; what ``run.json`` tells of them all.

    :raises NoCluster: a build failed, or this is no checkout and there are no images.
    """
    if not (ROOT / "Dockerfile").exists():
        raise NoCluster(f"images are built from a checkout, and {ROOT} is none")
    base = _base_image(engine)
    arguments = {"BASE_IMAGE": base} | {k: os.environ[k] for k in ARGUMENTS if k in os.environ}
    base_id = engine.images.get(base).id if _has(engine, base) else base
    digest = source_digest(arguments | {"BASE_IMAGE": base_id})
    facts = {"base": base, "base_id": base_id, "torch": arguments.get("TORCH", "")}
    for target in TARGETS:
        name = image_name(target)
        if force or not _has(engine, name) or _source(engine, name) != digest:
            print(f"building {name} on {base} ...", flush=True)
            _build(engine, target, arguments, digest)
        facts[target] = engine.images.get(name).id
    return facts


def _build(engine: Any, target: str, arguments: dict[str, str], digest: str) -> None:
    from docker.errors import DockerException

    said: list[str] = []
    try:
        for line in engine.api.build(
            path=str(ROOT),
            target=target,
            tag=image_name(target),
            buildargs=arguments,
            labels={SOURCE: digest},
            rm=True,
            forcerm=True,
            decode=True,
            timeout=3600,
        ):
            said.append(str(line.get("stream") or line.get("error") or "").rstrip())
            if "error" in line:
                text = "\n".join(filter(None, said[-_TAIL:]))
                raise NoCluster(f"building {image_name(target)} failed:\n{text}")
    except DockerException as error:
        raise NoCluster(f"building {image_name(target)} failed: {error}") from None


def _has(engine: Any, name: str) -> bool:
    from docker.errors import ImageNotFound

    try:
        engine.images.get(name)
    except ImageNotFound:
        return False
    return True


def _source(engine: Any, name: str) -> str:
    return str(engine.images.get(name).labels.get(SOURCE, ""))


def _base_image(engine: Any) -> str:
    """The image to build on: ``$BASE_IMAGE``, one that is here, one pulled, or one made.

    :raises NoCluster: none of it works; says what to install.
    """
    from docker.errors import DockerException

    wanted = default_base()
    if given := os.environ.get("BASE_IMAGE"):
        return given
    for name in (OWN_BASE, wanted):
        if _has(engine, name):
            return name
    try:
        engine.images.pull(wanted)
    except DockerException:
        pass
    else:
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

"""The inputs of images: names that may be used, arguments of the build, files, and a digest.

Two pairs: ``rank`` and ``judge``, and the same with DeepSpeed and MPI, ``rank-all`` and
``judge-all`` (``Dockerfile``).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardproof.errors import Problem, SelectionError

ROOT = Path(__file__).resolve().parents[3]
#: Targets of the Dockerfile: what a node is made of, and what the head is made of.
LEAN = ("rank", "judge")
EVERYTHING = ("rank-all", "judge-all")
#: Files that images are made of.
SOURCES = (
    *("Dockerfile", ".dockerignore", "constraints.txt", "pyproject.toml", "README.md", "LICENSE"),
    *("suite", "impls", "scenarios", "deploy", "tools"),
)
_IMAGE = r"[a-z0-9]+(?:[._/:-]+[a-zA-Z0-9]+)*(?:@sha256:[0-9a-f]{64})?"
_PREFIX = r"[a-z0-9]+(?:[._/-][a-z0-9]+)*"
_URL = r"(?:https?|file)://[^\s'\"]+"
#: Variables that the build takes over -> what they may be, in words and as a pattern.
ARGUMENTS = {
    "TORCH": ("a requirement such as torch==2.13.0", r"torch\b[^\s'\"]*(?: @ [^\s'\"]+)?"),
    "TORCH_INDEX": ("the address of an index of packages", _URL),
    "PIP_INDEX_URL": ("the address of an index of packages", _URL),
    "PIP_NO_INDEX": ("0 or 1", "[01]"),
}
#: Those that name where files are, not which.
_PLACES = ("TORCH_INDEX", "PIP_INDEX_URL", "PIP_NO_INDEX")


def checked(name: str, value: str, what: str, pattern: str) -> str:
    """``value``, if it is ``what``.

    :raises SelectionError: it is none.
    """
    if not re.fullmatch(pattern, value):
        shown = "the value" if name in _PLACES else repr(value)  # an address may hold a password
        raise SelectionError(Problem(f"{shown} is not {what}", f"correct {name}", name))
    return value


def image_name(target: str, environment: Mapping[str, str]) -> str:
    """The image of a target of the Dockerfile; ``IMAGE`` gives another first part of its name."""
    given = environment.get("IMAGE") or "shardproof"
    return f"{checked('IMAGE', given, 'the name of an image', _PREFIX)}-{target}"


def given_base(environment: Mapping[str, str]) -> str:
    """The base image that ``BASE_IMAGE`` names; empty: none."""
    given = environment.get("BASE_IMAGE", "")
    return checked("BASE_IMAGE", given, "the name of an image", _IMAGE) if given else ""


def arguments(environment: Mapping[str, str], root: Path = ROOT) -> dict[str, str]:
    """Arguments of the build: what the environment says, and the torch that is locked."""
    found = {"TORCH": default_argument("TORCH", root)}
    for name, rule in ARGUMENTS.items():
        if value := environment.get(name):
            found[name] = checked(name, value, *rule)
    return found


def default_argument(name: str, root: Path = ROOT) -> str:
    """The default values of the Dockerfile."""
    text = (root / "Dockerfile").read_text()
    found = re.search(rf"^ARG {name}=(\S+)", text, re.MULTILINE)
    assert found is not None
    return found[1]


def is_locked(torch: str, root: Path = ROOT) -> bool:
    """Whether a lock has the hashes of that torch."""
    return f"\n{torch}+cpu " in (root / "deploy" / "locks" / "torch.txt").read_text()


def source_digest(inputs: Mapping[str, str]) -> str:
    """Digest of all that images are made of (:func:`input_digests`)."""
    return _digest(*(f"{name}={of}" for name, of in sorted(inputs.items())))


def input_digests(build: Mapping[str, str], root: Path = ROOT) -> dict[str, str]:
    """The inputs of images, files, folders and arguments of the build -> its digest.

    Of a torch that is not locked the place decides, too: one index has it for CPUs, one for CUDA.
    """
    locked = is_locked(build.get("TORCH", ""), root)
    found = {}
    for name in SOURCES if locked else (*SOURCES, "wheels"):
        parts = []
        for file in _files(root / name):
            with file.open("rb") as content:
                of = hashlib.file_digest(content, "sha256").hexdigest()
            parts.append(f"{file.relative_to(root)}={of}")
        found[name] = _digest(*parts)
    left_out = _PLACES if locked else ()
    return found | {name: _digest(of) for name, of in build.items() if name not in left_out}


def label_of_inputs(inputs: Mapping[str, str], root: Path = ROOT) -> str:
    """The labels of an image: its inputs, and the checkout that it was built from.

    No addresses, not as digests either: they may hold passwords.
    """
    told = {name: of[:12] for name, of in inputs.items() if name not in _PLACES}
    return json.dumps({"inputs": told, "checkout": _digest(str(root))[:12]})


def why_old(label: str, inputs: Mapping[str, str], root: Path = ROOT) -> str:
    """Why an image with this ``label`` (of its inputs; or "") is old, in words."""
    if not label:
        return "old"
    before, now = json.loads(label), json.loads(label_of_inputs(inputs, root))
    names = {**before["inputs"], **now["inputs"]}
    changed = [name for name in names if before["inputs"].get(name) != now["inputs"].get(name)]
    what = f"old: other {', '.join(changed or ['places of packages'])}"
    if before["checkout"] != now["checkout"]:
        what += "; it is of another checkout: IMAGE=NAME gives each its own image"
    return what


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _files(top: Path) -> Iterator[Path]:
    for file in sorted(top.rglob("*")) if top.is_dir() else [top]:
        if file.is_file() and "__pycache__" not in file.parts:
            yield file


def told(build: Mapping[str, str], digest: str, root: Path = ROOT) -> dict[str, Any]:
    """Their entry in ``run.json``; addresses, which may hold passwords, are left out."""
    named = {name: value for name, value in build.items() if name not in _PLACES}
    return {
        "torch": named["TORCH"],
        "torch_is_locked": is_locked(named["TORCH"], root),
        "source": digest,
    }

"""The form of a bundle: names, limits, and the list at its start."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from shardproof.runs.records import Manifest

FORMAT = 1
LISTING = "bundle.json"
SUFFIX = ".tar.gz"
#: Packed if they are there, in the manifest or not; all else must stand in the manifest.
ALWAYS = ("run.json", "planned.jsonl", "cases.jsonl", Manifest.NAME)
REPORTS = ("report.html", "report.md", "junit.xml")

#: What an archive may hold: files, bytes of the list, bytes in all.
MAX_FILES, MAX_LISTING, MAX_BYTES = 100_000, 64 << 20, 64 << 30
#: The largest size that a plain header can tell.
MAX_FILE = (8 << 30) - 1
#: Bytes that are read at once.
CHUNK = 1 << 20
_PART = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._+=@,-]{1,200}")


def unsafe(name: str) -> bool:
    """Whether ``name`` is anything but a relative path of at most four plain parts."""
    parts = name.split("/")
    return len(parts) > 4 or not all(_PART.fullmatch(part) for part in parts)


def _plain(name: str) -> str:
    if unsafe(name):
        raise ValueError(f"path {name!r}: expected 1 to 4 parts (a/b) of letters, digits, ._+=@,-")
    return name


class Member(BaseModel):
    """A file of a bundle; ``name`` is that inside the run's folder."""

    model_config = ConfigDict(frozen=True, strict=True)

    name: Annotated[str, AfterValidator(_plain)]
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Listing(BaseModel):
    """``bundle.json``.  ``suite`` packed the run, the versions in ``judged_by`` judged it."""

    model_config = ConfigDict(frozen=True, strict=True)

    run: str
    suite: str
    judged_by: tuple[str, ...]
    members: tuple[Member, ...]
    left_out: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum(member.bytes for member in self.members)

    @property
    def digest(self) -> str:
        """SHA-256 of names, sizes and digests: equal for equal contents."""
        lines = (f"{member.sha256} {member.bytes} {member.name}\n" for member in self.members)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def text(self) -> str:
        fields = {"format": FORMAT, **self.model_dump(), "digest": self.digest}
        return json.dumps(fields, indent=1) + "\n"

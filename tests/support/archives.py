"""Archives as others may make them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

from shardproof import VERSION
from shardproof.runs.bundle.form import LISTING, Listing, Member

#: A file's name, or its whole header, and its content.
Part = tuple[str | tarfile.TarInfo, bytes]


def forge(path: Path, contents: list[Part]) -> Path:
    """An archive of ``contents``, whatever they are."""
    with gzip.open(path, "wb") as zipped, tarfile.open(fileobj=zipped, mode="w") as opened:
        for name, data in contents:
            info = tarfile.TarInfo(name) if isinstance(name, str) else name
            if info.isreg():
                info.size = len(data)
            opened.addfile(info, io.BytesIO(data))
    return path


def small(path: Path, *more: Part, **fields: Any) -> Path:
    """An archive of one listed file, changed by ``fields`` of its list, and ``more``."""
    member = Member(name="run.json", bytes=2, sha256=hashlib.sha256(b"{}").hexdigest())
    listing = Listing(run="r", suite=VERSION, judged_by=(VERSION,), members=(member,), left_out=())
    told = json.loads(listing.text()) | fields
    return forge(path, [(f"r/{LISTING}", json.dumps(told).encode()), ("r/run.json", b"{}"), *more])

"""Unpacking trusts nothing: whatever an archive holds, it is refused or written nowhere else."""

from __future__ import annotations

import gzip
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from archives import Part, forge, small

from shardproof.commands.verify import verify_archive
from shardproof.compare import baseline
from shardproof.errors import SelectionError
from shardproof.runs.bundle import unpacking
from shardproof.runs.bundle.form import LISTING

pytestmark = pytest.mark.usefixtures("temporary")


def special(kind: bytes, name: str = "r/x", target: str = "/etc/passwd") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    ("member", "says"),
    [
        ("../escaped", "unsafe name"),
        ("r/../../escaped", "unsafe name"),
        ("/escaped", "unsafe name"),
        ("r//escaped", "unsafe name"),
        ("r/./escaped", "unsafe name"),
        ("r/a\\..\\escaped", "unsafe name"),
        ("r/\x1b[2Jescaped", "unsafe name"),
        ("r/a/b/c/d/escaped", "unsafe name"),
        ("r/" + "e" * 250, "unsafe name"),
        ("escaped", "unsafe name"),
        (special(tarfile.SYMTYPE), "a symbolic link"),
        (special(tarfile.LNKTYPE), "a hard link"),
        (special(tarfile.CHRTYPE), "a device"),
        (special(tarfile.BLKTYPE), "a device"),
        (special(tarfile.FIFOTYPE), "a pipe"),
        (special(tarfile.DIRTYPE), "a folder"),
        (special(tarfile.CONTTYPE), "an unknown kind"),
        (special(tarfile.GNUTYPE_SPARSE), "an unknown kind"),
    ],
    ids=lambda value: repr(value.type) if isinstance(value, tarfile.TarInfo) else str(value),
)
def test_what_a_run_never_holds_is_refused(
    tmp_path: Path, member: str | tarfile.TarInfo, says: str
) -> None:
    forged = small(tmp_path / "forged.tar.gz", (member, b"x"))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SelectionError, match=says):
        verify_archive(forged)
    assert sorted(tmp_path.rglob("*")) == before
    assert not Path("/escaped").exists()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"format": 2, "suite": "9.9"}, r"format 2, packed by shardproof 9\.9"),
        ({"run": "other"}, "damaged bundle.json"),
        ({"members": 3}, "damaged bundle.json"),
        ({"members": [{"name": "../x", "bytes": 1, "sha256": "0" * 64}]}, "damaged bundle.json"),
        ({"members": [{"name": "x", "bytes": -1, "sha256": "0" * 64}]}, "damaged bundle.json"),
        ({"members": [{"name": "x", "bytes": 1, "sha256": "0"}]}, "damaged bundle.json"),
        ({"members": [{"name": 5, "bytes": 1, "sha256": "0" * 64}]}, "damaged bundle.json"),
        ({"members": [{"name": "x", "bytes": 1, "sha256": "0" * 64}] * 2}, "damaged bundle.json"),
        ({"members": [{"name": "x", "bytes": 1 << 60, "sha256": "0" * 64}]}, "would unpack to"),
        ({"members": [{"name": "x", "bytes": 80 << 20, "sha256": "0" * 64}]}, "would unpack to"),
    ],
    ids=str,
)
def test_a_list_that_no_bundle_has_is_refused(
    tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(SelectionError, match=says):
        verify_archive(small(tmp_path / "forged.tar.gz", **fields))


def test_a_list_that_nests_without_end_is_refused(tmp_path: Path) -> None:
    forged = forge(tmp_path / "forged.tar.gz", [(f"r/{LISTING}", b"[" * 200_000)])
    with pytest.raises(SelectionError, match=r"damaged bundle\.json"):
        verify_archive(forged)


def test_what_is_no_bundle_is_told_so(tmp_path: Path) -> None:
    plain = tmp_path / "plain.tar.gz"
    plain.write_bytes(b"no archive at all")
    other = forge(tmp_path / "other.tar.gz", [("r/run.json", b"{}"), (f"r/{LISTING}", b"{}")])
    empty = forge(tmp_path / "empty.tar.gz", [])
    for path, says in ((plain, "is not a bundle"), (other, "first file"), (empty, "first file")):
        with pytest.raises(SelectionError, match=says):
            verify_archive(path)
    for path in (plain, tmp_path / "absent"):
        with pytest.raises(SelectionError, match=r"is damaged|no such run"):
            baseline.load(str(path))


def test_more_bytes_than_listed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros shrink to a thousandth: neither a listed, an added nor a hidden file may swell."""
    monkeypatch.setattr(unpacking, "_GRACE", 1 << 16)
    monkeypatch.setattr(unpacking.form, "CHUNK", 1 << 12)
    zeros = bytes(8 << 20)
    for name in ("r/run.json", "r/added"):
        with pytest.raises(SelectionError, match=r"more bytes than (a run|its list)"):
            verify_archive(small(tmp_path / "bomb.tar.gz", (name, zeros)))
    bomb = tmp_path / "bomb.tar.gz"
    with gzip.open(small(bomb), "ab") as stream:
        stream.write(zeros)
    with pytest.raises(SelectionError, match="more after its end"):
        verify_archive(bomb)


def test_headers_cannot_take_memory_or_hide(tmp_path: Path) -> None:
    forged = tmp_path / "forged.tar.gz"
    for pax, says in (
        ({"comment": "c" * 5000}, "header that is too long"),
        ({"comment": "c"}, "header that no bundle has"),
        ({"path": "../escaped"}, "unsafe name"),
        ({"GNU.sparse.major": "1", "GNU.sparse.realsize": "99999999999"}, "that no bundle has"),
    ):
        info = tarfile.TarInfo("r/x")
        info.pax_headers = pax
        with pytest.raises(SelectionError, match=says):
            verify_archive(small(forged, (info, b"x")))


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking.form, "MAX_FILES", 10)
    more: list[Part] = [(f"r/{n}", b"") for n in range(20)]
    with pytest.raises(SelectionError, match="more than 10 files"):
        verify_archive(small(tmp_path / "forged.tar.gz", *more))


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = small(tmp_path / "sound.tar.gz")
    usage = shutil.disk_usage(archive)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(SelectionError, match=r"no space to unpack .*TMPDIR"):
        verify_archive(archive)

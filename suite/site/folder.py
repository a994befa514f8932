"""The output folder of a site: a complete new one takes its place, or nothing changes."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardproof import VERSION
from shardproof.errors import Problem, SelectionError
from shardproof.files import DAMAGE, read_input, write_whole
from shardproof.table import some

#: Lists the files of a site: a folder with it may be replaced.
MARKER = "site.json"
KIND = "shardproof site"
#: Files that an error names.
_NAMED = 3


class SiteFolder:
    """A folder that is being filled."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sizes: dict[str, int] = {}

    def write(self, name: str, content: str | bytes) -> None:
        """Write the file ``name``, a path from the top of the site with ``/``."""
        data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        self.sizes[name] = len(data)


def require_replaceable(output: Path) -> None:
    """Refuse a place that holds anything but an earlier site.

    :raises SelectionError: a file, or a folder with other files.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise SelectionError(Problem("--output: is a file", "name a folder", str(output)))
    others = sorted(_files(output) - _listed(output))
    if others:
        what = f"--output: holds {len(others)} files of other origin: {some(others, _NAMED)}"
        remedy = "name a new folder, or move these files out of it"
        raise SelectionError(Problem(what, remedy, file=str(output)))


def _files(folder: Path) -> set[str]:
    """Every file and link in ``folder``, by its path from there."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }


def _listed(output: Path) -> set[str]:
    """The files that the site in ``output`` says it has; none: it is no site."""
    try:
        told = json.loads(read_input(output / MARKER))
        files = told["files"] if told["kind"] == KIND else []
        return {MARKER, *(name for name in files if isinstance(name, str))}
    except (OSError, *DAMAGE):
        return set()


@contextmanager
def building(output: Path) -> Iterator[SiteFolder]:
    """A folder to fill; at the end it takes the place of ``output``.

    If the block raises, ``output`` stays as it was.

    :raises SelectionError: as :func:`require_replaceable`.
    :raises OSError: there is no room, or no right to write.
    """
    require_replaceable(output)
    target = output.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        fresh.chmod(0o755)  # that of mkdtemp is for its owner alone, and a server reads pages
        site = SiteFolder(fresh)
        yield site
        site.write(".nojekyll", b"")  # GitHub's builder would leave out files
        told = {"kind": KIND, "suite": VERSION, "files": sorted(site.sizes)}
        write_whole(fresh / MARKER, json.dumps(told, indent=0) + "\n")
        _swap(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _swap(fresh: Path, target: Path) -> None:
    """Rename ``fresh`` to ``target``; what was there goes away only when it is done."""
    require_replaceable(target)  # somebody may have put a file there meanwhile
    if not target.exists():
        fresh.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent)) / "site"
    try:
        target.rename(old)
    except OSError:
        old.parent.rmdir()
        _fill(fresh, target)
        return
    try:
        fresh.rename(target)
    except BaseException:  # Ctrl-C too: the earlier site goes back
        if not target.exists():
            old.rename(target)
        raise
    finally:
        if target.exists():  # else the earlier site is all there is
            shutil.rmtree(old.parent, ignore_errors=True)


def _fill(fresh: Path, target: Path) -> None:
    """Put the files of ``fresh`` into ``target``, a folder that cannot be renamed, such as a volume
    of a container; those of the earlier site that are not among them go last.
    """
    shutil.copytree(fresh, target, dirs_exist_ok=True)
    for name in _files(target) - _listed(target):
        (target / name).unlink()

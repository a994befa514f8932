"""A file is whole or not there, whatever ends its writing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardproof.files import write_whole


@pytest.mark.parametrize("data", ["ä\n", "ä\n".encode(), [b"\xc3", b"\xa4\n"]])
@pytest.mark.parametrize("durable", [False, True])
def test_text_bytes_and_pieces_are_written(tmp_path: Path, data: object, durable: bool) -> None:
    write_whole(tmp_path / "file", data, durable=durable)  # type: ignore[arg-type]
    assert (tmp_path / "file").read_text(encoding="utf-8") == "ä\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_fails_on_the_way_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"new"
        raise OSError(28, "No space left on device")

    write_whole(tmp_path / "file", "old")
    with pytest.raises(OSError, match="No space left") as error:
        write_whole(tmp_path / "file", pieces())
    assert error.value.filename == str(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_an_interrupt_leaves_the_old_file(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"new"
        raise KeyboardInterrupt

    write_whole(tmp_path / "file", "old")
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file", pieces())
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]

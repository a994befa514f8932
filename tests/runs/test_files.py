"""A file is whole or not there, whatever ends its writing; dataclasses come back from JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import pytest

from shardproof.files import Exact, Form, SparselyStored, Stored, from_plain, write_whole


@pytest.mark.parametrize("data", ["ä\n", "ä\n".encode(), [b"\xc3", b"\xa4\n"]])
def test_text_bytes_and_pieces_are_written(tmp_path: Path, data: object) -> None:
    write_whole(tmp_path / "file", data)  # type: ignore[arg-type]
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


@dataclass(frozen=True)
class Inner:
    name: str
    share: Exact = Fraction(1)


@dataclass(frozen=True, slots=True)
class Outer(Stored):
    inner: Inner
    pairs: tuple[tuple[int, int], ...] = ()
    by_name: Mapping[str, Sequence[Inner]] = field(default_factory=dict)
    features: Annotated[frozenset[str], Form(frozenset, sorted)] = frozenset()
    other: Inner | None = None
    note: str | None = None


@dataclass
class Sparse(SparselyStored):
    always: int | None
    sometimes: int | None = None


def test_a_dataclass_comes_back_from_its_stored_form() -> None:
    third = Inner("b", Fraction(1, 3))
    outer = Outer(Inner("a"), ((1, 2), (3, 4)), {"x": [third]}, frozenset("zy"), third)
    stored = json.loads(json.dumps(outer.to_dict()))
    assert stored == {
        "inner": {"name": "a", "share": "1/1"},
        "pairs": [[1, 2], [3, 4]],
        "by_name": {"x": [{"name": "b", "share": "1/3"}]},
        "features": ["y", "z"],
        "other": {"name": "b", "share": "1/3"},
        "note": None,
    }
    assert Outer.from_dict(stored) == outer
    assert Outer.from_dict({"inner": {"name": "a"}}) == Outer(Inner("a"))
    with pytest.raises(TypeError, match="new: Unexpected keyword argument, not 1"):
        Outer.from_dict({"inner": {"name": "a"}, "new": 1})
    assert from_plain(dict[str, list[Inner]], {"x": [{"name": "a"}]}) == {"x": [Inner("a")]}


def test_what_stayed_none_is_not_stored_where_that_is_the_default() -> None:
    assert Sparse(None).to_dict() == {"always": None}
    assert Sparse(1, 0).to_dict() == {"always": 1, "sometimes": 0}

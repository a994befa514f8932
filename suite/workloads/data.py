"""The two data sets: real, small, and the same on every machine.

*Character names*: the names of the characters below U+3000 in ``unicodedata.ucd_3_2_0``, the frozen
Unicode 3.2 data base that every CPython carries for IDNA.  The range leaves out the ideographs and
Hangul syllables, whose names are computed rather than stored.

*Digits*: the 8x8 test images of the UCI "Optical Recognition of Handwritten Digits" set, as bundled
with scikit-learn.  They are read from ``digits.npz`` beside this file or in
``<prefix>/share/shardproof/`` where that exists (a machine without scikit-learn; written by
:func:`write_digits`), else from scikit-learn's own file, without importing scikit-learn (its import
takes longer than a case).

Both are checked against a digest recorded here, so that a changed data set is an error, never a
changed result.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import sys
import unicodedata
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

CHARACTER_NAMES_DIGEST = "5573cea6389d70b89a0c64aa7b85c6c66fcfa60a8e5366529f7b7f105373448d"
DIGITS_DIGEST = "68aea062d35a127749050fa0e52dca09d6569ac08092c925610e0954e172dde2"

#: Where a digits file may lie, first match wins.
DIGITS_FILES = (
    Path(__file__).with_name("digits.npz"),
    Path(sys.prefix) / "share" / "shardproof" / "digits.npz",
)


class DataError(RuntimeError):
    """A data set is missing or is not the one that the suite was written against."""


@lru_cache(maxsize=1)
def character_names() -> tuple[str, ...]:
    """The 7,952 character names, in code point order (A-Z, 0-9, space and hyphen only)."""
    frozen = unicodedata.ucd_3_2_0
    names = tuple(filter(None, (frozen.name(chr(code), "") for code in range(0x3000))))
    _check("character names", "\n".join(names).encode(), CHARACTER_NAMES_DIGEST)
    return names


@lru_cache(maxsize=1)
def digits() -> tuple[Tensor, Tensor]:
    """Images ``(1797, 8, 8)`` of uint8 (0 to 16) and labels ``(1797,)`` of int64 (0 to 9).

    :raises DataError: no source is there, or it holds other data.
    """
    if path := next((path for path in DIGITS_FILES if path.is_file()), None):
        with np.load(path, allow_pickle=False) as file:
            table = np.concatenate([file["images"].reshape(-1, 64), file["labels"][:, None]], 1)
    else:
        table = _scikit_learn_digits()
    table = np.ascontiguousarray(table, dtype=np.uint8)
    _check("digits", table.tobytes(), DIGITS_DIGEST)
    images = torch.from_numpy(table[:, :64].reshape(-1, 8, 8).copy())
    return images, torch.from_numpy(table[:, 64].astype(np.int64))


def write_digits(path: Path) -> None:
    """Write the digits to ``path`` (``.npz``), for machines without scikit-learn."""
    images, labels = digits()
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, images=images.numpy(), labels=labels.numpy().astype(np.uint8))


def _scikit_learn_digits() -> np.ndarray:
    """The table in scikit-learn's ``digits.csv.gz``: 64 pixels and a label a row."""
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            text = gzip.decompress(path.read_bytes())
            numbers = text.replace(b"\n", b",").rstrip(b",").split(b",")
            return np.array(numbers, dtype=float).reshape(-1, 65)
    places = " or ".join(str(path) for path in DIGITS_FILES)
    raise DataError(
        "the digits images are missing: install scikit-learn. Or call write_digits() of "
        f"shardproof.workloads.data where scikit-learn is installed, and copy its file to {places}"
    )


def _check(what: str, content: bytes, expected: str) -> None:
    digest = hashlib.sha256(content).hexdigest()
    if digest != expected:
        raise DataError(f"{what}: expected SHA-256 {expected[:16]}..., found {digest[:16]}...")

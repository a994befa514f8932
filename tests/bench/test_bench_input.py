"""What `bench` refuses before anything is timed, with one line and exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import odd_files
import pytest

from shardproof.bench import sides
from shardproof.scenarios.load import SHIPPED


@pytest.mark.parametrize("others", [("plain",), ("plain", "--dry-run")])
def test_a_class_that_cannot_be_loaded(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: tuple[str, ...]
) -> None:
    (tmp_path / "no_class.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    code, out, err = command("bench", "no_class:Min", *others, "--results", str(tmp_path / "run"))
    assert (code, out) == (2, ""), out
    assert "has no 'Min'" in err and not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", odd_files.KINDS)
def test_only_regular_files_are_read(command: Any, tmp_path: Path, kind: str) -> None:
    odd = odd_files.make(kind, tmp_path / "odd.yaml")
    code, _, err = command("bench", str(odd))
    assert code == 2 and ("odd.yaml" in err or "/dev/zero" in err) and " - " in err, err


def test_results_without_a_name(command: Any) -> None:
    code, _, err = command("bench", "strong", "--results", "")
    assert code == 2 and "'--results': the name is empty" in err


def test_a_shipped_file_is_found_as_pages_name_it_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sides.files(["scenarios/scaling/strong.yaml"]) == [SHIPPED / "scaling/strong.yaml"]

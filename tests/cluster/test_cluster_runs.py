"""`cluster run`: what is chosen before anything is built."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from shardproof.cluster import head
from shardproof.commands import main as command_line
from shardproof.verdicts import BAD_INPUT, HELD


def test_words_go_on_to_the_command_in_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["ddp-gpt", "-k", "not fp64", "--impl", "reference/ddp*", "-j", "1"]
    asked: list[Any] = []

    def note(*given: Any, **_: Any) -> int:
        asked.append(given)
        return HELD

    monkeypatch.setattr(head, "run", note)
    capped = ["--cpus", "0.5", "--nodes", "4", "--results", str(tmp_path)]
    assert _exit_code(monkeypatch, *words[:2], *capped, *words[2:]) == HELD
    ((there, wanted, *_),) = asked
    assert there == ["run", *words]
    assert (wanted.nodes, wanted.limits().cpus, wanted.results) == (4, 0.5, tmp_path)


def test_a_run_with_faults_of_nodes_resumes_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[Any] = []

    def note(*given: Any, **_: Any) -> int:
        told.append(given[-1])
        return HELD

    monkeypatch.setattr(head, "run", note)
    goes_on = ["--resume", "--results", str(tmp_path)]
    assert _exit_code(monkeypatch, *goes_on) == HELD
    assert told == [{}], "its cases of such faults were skipped as on no nodes"
    assert _exit_code(monkeypatch, *goes_on, "--fault", "kill_node") == BAD_INPUT
    said = " ".join(capsys.readouterr().err.split())
    assert "a resumed run cannot have a new fault" in said


def test_a_run_to_go_on_with_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code(monkeypatch, "--resume") == BAD_INPUT
    assert "add --results" in capsys.readouterr().err


def _exit_code(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    monkeypatch.setattr(sys, "argv", ["shardproof", "cluster", "run", *words])
    with pytest.raises(SystemExit) as left:
        command_line.main()
    return left.value.code

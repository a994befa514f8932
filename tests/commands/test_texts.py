"""Texts that others wrote: half of a surrogate pair, and sequences that would move the cursor."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import here

from shardproof.commands.verify import verify
from shardproof.errors import printable
from shardproof.runs.run_folder import read

MODULE = r"""
import dataclasses
from shardproof.impls.plain import Plain

EVIL = "\x1b[2J\x1b]0;owned\x07\u202egnp.\udc80\r\x9b1A"


class Raises(Plain):
    def step(self, batch, observe):
        raise RuntimeError(EVIL)


class Refuses(Plain):
    def step(self, batch, observe):
        from shardproof.contract import Refused

        raise Refused(EVIL)


class Names(Plain):
    def local_state(self, kind):
        return [dataclasses.replace(p, name=p.name + EVIL) for p in super().local_state(kind)]
"""
RAW = [chr(n) for n in (*range(9), *range(11, 32), *range(0x7F, 0xA0), 0x202E)]


def _is_neutral(text: str) -> bool:
    text.encode()
    return not any(character in text for character in RAW)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of these systems, from a folder whose name is no text."""
    place = Path(os.fsdecode(os.fsencode(tmp_path_factory.mktemp("run")) + b"/no\xfftext\x1b[2J"))
    place.mkdir()
    (place / "evil.py").write_text(MODULE)
    named = [word for name in ("Raises", "Refuses", "Names") for word in ("--impl", f"evil:{name}")]
    cell = "sgd and noclip and fp64 and replicate1"
    done = here(
        *("run", "ddp-gpt", *named, "-k", cell, "--backend", "in_memory", "--tier", "full"),
        *("--results", "run", "--junit", "junit.xml"),
        cwd=place,
        paths=[place],
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert _is_neutral(done.stdout + done.stderr), repr(done.stdout + done.stderr)
    yield place / "run"
    shutil.rmtree(place)


def test_files_are_neutral_and_evidence_is_whole(run: Path) -> None:
    files = ["report.html", "report.md", "junit.xml", "cases.jsonl", "run.json", "../junit.xml"]
    for file in files:
        text = (run / file).read_bytes().decode()
        assert _is_neutral(text), file
    assert verify(run).problems == []
    reasons = [result.reason for result in read(run).cases]
    assert len(reasons) >= 3 and all("owned" in reason for reason in reasons)
    json.loads((run / "run.json").read_text())


@pytest.mark.parametrize(
    "words",
    [
        *(["report"], ["report", "--format", "markdown"], ["report", "--format", "html"]),
        *(["verify"], ["badges", "-o", "badges"], ["bundle", "-o", "run.tar.gz"]),
    ],
    ids=" ".join,
)
def test_commands_show_it_neutrally(
    run: Path, words: list[str], command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = command(words[0], str(run), *words[1:])
    assert code == 0, out + err
    assert _is_neutral(out + err), repr(out + err)
    for badge in tmp_path.glob("badges/*"):
        assert _is_neutral(badge.read_text()), badge


def test_gate_and_compare_too(run: Path, command: Any, tmp_path: Path) -> None:
    saved = str(tmp_path / "base.json")
    assert command("compare", str(run), "--save", saved)[0] == 0
    summary = tmp_path / "summary.md"
    for words in (
        ["gate", str(run), "--against", saved, "--summary", str(summary)],
        *(["compare", saved, str(run), "--format", form] for form in ("table", "markdown")),
    ):
        code, out, err = command(*words)
        assert code in (0, 1, 3), out + err
        assert _is_neutral(out + err), repr(out + err)
    assert _is_neutral(summary.read_text())


def test_what_names_a_fault_is_neutral(command: Any, tmp_path: Path) -> None:
    evil = "no\udcff\x1b[2Jsuch"
    for words in (["run", evil], ["run", f"{evil}.yaml"], ["report", evil], ["run", "-k", evil]):
        code, out, err = command(*words)
        assert code == 2 and "such" in err and _is_neutral(out + err), repr(err)


def test_lines_tabs_and_letters_stay() -> None:
    assert printable("é\tß\n€ 漢 👩\u200d🔬") == "é\tß\n€ 漢 👩\u200d🔬"
    assert printable("\x1b[31m\ud800\u202e") == "\\x1b[31m\\ud800\\u202e"
